"""bounds.py VERSIONS: fail unless the lowest installed versions are those in pyproject.toml."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


def main() -> int:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    lines = [line.partition(";")[0].split("#")[0].strip() for line in Path(sys.argv[1]).read_text().splitlines()]
    installed = {name: Version(version) for name, _, version in (line.partition("==") for line in lines) if version}
    optional = [line for name, lines in project["optional-dependencies"].items() if name != "dev" for line in lines]
    wrong = []
    for requirement in map(Requirement, [*project["dependencies"], *optional]):
        name = requirement.name.lower().replace("_", "-")
        lowest = next((Version(s.version) for s in requirement.specifier if s.operator == ">="), None)
        if name in installed and lowest is not None and installed[name] != lowest:
            wrong.append(f"{requirement}: the lowest that can be installed is {installed[name]}")
    print(*wrong, sep="\n", file=sys.stderr)  # noqa: T201
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Plan and check the dataset on which uploads fail: 902 sessions, 273 GB of sparse files.

    python benchmarks/arc.py [FOLDER] [--json FILE]

Creates the dataset (which takes almost no disk space), then measures time and peak memory from outside for
`brim plan` and `brim check`, with and without the built-in recipe. Nothing is built.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from peak import measure
from tables import MB, Part, at_most, machine, print_goals, print_machine, print_part, write_json

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.generators.arc import make_arc

COMMANDS = (
    ["plan"],
    ["plan", "--recipe", "arc"],
    ["check", "--recipe", "arc", "--sample-size", "0"],  # sparse files have no headers to check
)
MOST_SECONDS, MOST_MB = 2, 100  # limit for a plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="where the dataset is made (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        facts = machine(folder, ("brim", "pyarrow"))
        part = measured(folder)
    print_part(part)
    print_goals({"arc": part})
    print_machine(facts)
    write_json(arguments.json, facts, {"arc": part})
    sys.exit(not all(goal.reached for goal in part.goals))


def measured(folder: Path) -> Part:
    make_arc(folder / "ds004884", sessions=902, sparse_sizes=True)
    part = Part("902 sessions, 273 GB of sparse files", ("command", "s", "peak MB"))
    for verb, *options in COMMANDS:
        name = " ".join(["brim", verb, *options])
        result = measure([sys.executable, "-m", "brim", verb, str(folder / "ds004884"), *options])
        if result.exit_code:
            raise SystemExit(f"{name} ended with {result.exit_code}:\n{result.output[-2000:]}")
        part.rows.append((name, f"{result.seconds:.1f}", f"{result.peak_bytes / MB:.0f}"))
        part.runs[name] = [{"seconds": result.seconds, "peak_bytes": result.peak_bytes}]
        if verb == "plan":
            part.goals.append(at_most(f"{name}: time", result.seconds, MOST_SECONDS, " s"))
            part.goals.append(at_most(f"{name}: memory", result.peak_bytes / MB, MOST_MB, " MB"))
    return part


if __name__ == "__main__":
    main()

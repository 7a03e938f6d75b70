"""make benchmarks: docs/benchmarks.md from what the benchmarks wrote with --json to benchmarks/results/.

Every file there is one run of one benchmark: its tables, goals and machine (`tables.Part`), or curves. Nothing on the
page is written by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
HEAD = """# How fast, how small

Made by `make benchmarks` from `benchmarks/results/*.json`; each is what one benchmark wrote with `--json`. Memory is
anonymous + shared + swap of the whole process tree, sampled from outside. Times move with the load of the machine: the
ratios within a table are what to look at.
"""


def parts_of(found: Any) -> list[dict[str, Any]]:
    """The parts of a result, whether it lists them, names them, or is one."""
    if isinstance(found, dict) and "header" in found and "rows" in found:
        return [found]
    inside = found.values() if isinstance(found, dict) else found if isinstance(found, list) else []
    return [part for one in inside for part in parts_of(one)]


def table(part: dict[str, Any]) -> list[str]:
    lines = [f"### {part['title']}", ""]
    lines += [
        f"| {' | '.join(map(str, cells))} |" for cells in (part["header"], ["---"] * len(part["header"]), *part["rows"])
    ]
    lines += ["", *(line for note in part.get("notes", []) for line in (note, ""))]
    for goal in part.get("goals", []):
        lines.append(f"- {'reached' if goal['reached'] else '**missed**'}: {goal['text']}: {goal['numbers']}")
    return [*lines, ""]


def curves(found: dict[str, Any]) -> list[str]:
    lines = ["| | time | peak memory |", "|---|---:|---:|"]
    for name, way in found["curves"].items():
        lines.append(f"| {name} | {way['seconds']:.1f} s | {way['peak_bytes'] / 1e6:,.0f} MB |")
    return [*lines, ""]


def machine(found: Any) -> list[str]:
    facts = found.get("machine") if isinstance(found, dict) else None
    return [", ".join(f"{name} {value}" for name, value in facts.items()) + ".", ""] if facts else []


def main() -> None:
    lines = [HEAD]
    for path in sorted((HERE / "results").glob("*.json")):
        found = json.loads(path.read_text())
        made = curves(found) if "curves" in found else [line for part in parts_of(found) for line in table(part)]
        if made:
            lines += [f"## {path.stem.replace('-', ' ')}", "", *machine(found), *made]
    PAGE.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()

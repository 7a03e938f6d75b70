"""make benchmarks: docs/benchmarks/results.md, and the table of README.md, from benchmarks/results/*.json.

    python benchmarks/page.py [--check]

Every file there is what one benchmark wrote with --json: its tables, goals and machine (`tables.Part`), or curves.
Nothing on the page or in the table is written by hand; --check changes nothing, and fails if they are not what the
results say.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/benchmarks/results.md"
README = HERE.parent / "README.md"
BEGIN, END = "<!-- figures: make benchmarks -->\n", "<!-- end of figures -->\n"
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
    lines = [f"### {part['title']}", ""] if part["title"] else []
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


def machine(name: str, found: Any) -> list[str]:
    facts = found.get("machine") if isinstance(found, dict) else None
    script = f"`python benchmarks/{name}.py`. " if (HERE / f"{name}.py").exists() else ""
    told = ", ".join(f"{fact} {value}" for fact, value in facts.items()) if facts else ""
    return [f"{script}{told}.", ""] if told else []


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured of one tool: the median of its times, and the largest of its peaks.

    It is looked for in every result whose name begins with `file`: a benchmark may be run in pieces.
    """

    file: str
    part: str
    run: str

    def runs(self, results: dict[str, Any]) -> list[dict[str, float]]:
        """None if it was not measured."""
        for name, found in results.items():
            if name.startswith(self.file) and "parts" in found and isinstance(found["parts"], dict):
                runs = found["parts"].get(self.part, {}).get("runs", {}).get(self.run)
                if runs:
                    return [run | {"peak_bytes": run.get("peak_bytes", run.get("peak_mb", 0) * 1e6)} for run in runs]
        return []

    def cells(self, results: dict[str, Any]) -> str:
        """The median time and the largest peak, as two cells of a table."""
        runs = self.runs(results)
        seconds, peak = statistics.median(run["seconds"] for run in runs), max(run["peak_bytes"] for run in runs)
        return f"{seconds:,.1f} s | {peak / 1e6:,.0f} MB"


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the README's table: brim, and the best other tool in the same run of the benchmark."""

    task: str
    brim: Figure
    tool: str
    peer: Figure

    def text(self, results: dict[str, Any]) -> str:
        return f"| {self.task} | {self.brim.cells(results)} | {self.tool} | {self.peer.cells(results)} |"


LINES = (
    Line(
        "12 files of 300 MB to Parquet",
        Figure("package", "speed", "brim build"),
        "`datasets`, as `push_to_hub` makes shards",
        Figure("package", "speed", "datasets, as push_to_hub"),
    ),
    Line(
        "the same files to a local Hub",
        Figure("publish", "speed", "brim, by LFS"),
        "`push_to_hub`",
        Figure("publish", "speed", "push_to_hub, by LFS"),
    ),
    Line(
        "select half of 100,000 values of 10 kB, shuffled",
        Figure("select", "small", "brim"),
        "Polars",
        Figure("select", "small", "polars"),
    ),
    Line(
        "a Python function over 5 GB of Parquet",
        Figure("map", "5 GB, python", "brim"),
        "`Dataset.map`, two processes, without the time for its Arrow cache",
        Figure("map", "5 GB, python", "datasets, 2 processes"),
    ),
)


def readme_table(results: dict[str, Any]) -> str:
    header = "| task | brim | memory | another tool | its time | its memory |\n|---|---:|---:|---|---:|---:|"
    return "\n".join([header, *(line.text(results) for line in LINES)]) + "\n"


def page(results: dict[str, Any]) -> str:
    lines = [HEAD]
    for name, found in results.items():
        made = curves(found) if "curves" in found else [line for part in parts_of(found) for line in table(part)]
        if not made:
            raise SystemExit(f"benchmarks/results/{name}.json holds no table: write it with the benchmark's --json.")
        lines += [f"## {name.replace('-', ' ')}", "", *machine(name, found), *made]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Make docs/benchmarks/results.md and the table of README.md.")
    parser.add_argument("--check", action="store_true", help="fail if they differ from what the results say")
    arguments = parser.parse_args()
    results = {path.stem: json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))}
    before = README.read_text()
    begin, end = before.index(BEGIN) + len(BEGIN), before.index(END)
    made = {PAGE: page(results), README: before[:begin] + readme_table(results) + before[end:]}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    if arguments.check:
        for path in stale:
            print(f"{path.name} is not what benchmarks/results says: make benchmarks", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(made[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())

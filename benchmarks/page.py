"""make benchmarks: docs/benchmarks/results.md, and the table of README.md, from benchmarks/results/*.json.

    python benchmarks/page.py [--check]

Every file in that folder is the --json output of one benchmark: its tables, goals and machine (`tables.Part`), or
curves. No part of the page or the table is written by hand; --check changes nothing, and fails if they differ from the
results.
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
HEAD = """# Benchmark results

`make benchmarks` generates this page from `benchmarks/results/*.json`, which benchmarks write with `--json`. Memory is
anonymous, shared and swapped memory of the whole process tree, sampled from outside. Times depend on the load of the
machine: compare the ratios within a table. Machine and versions are above each table. To run one yourself, use the
command that is given there, or the `make bench-…` targets of the [Makefile](../../Makefile).
"""
# Sections of the page: the result, its heading, and a sentence about it. Unlisted results come at the end.
SECTIONS = {
    "package": ("Package", "Files to Parquet shards in a folder."),
    "memory-curves": ("Memory over time", "The picture of the home page: ten files of 50 MB."),
    "publish": ("Publish", "To a local server that answers the real clients of the Hub; it hashes and stores nothing."),
    "objects": ("Objects", "From and to buckets: SeaweedFS on the same two cores."),
    "reupload": ("Reupload", "How much of a dataset is sent again after rows were added."),
    "selecting": ("Selecting", "Filter, split, concatenate, shuffle and sort datasets, on disk and remote."),
    "budget": ("Memory budgets", "A setting for memory, and how much each tool takes."),
    "map": ("Map", "A cheap function over rows of Parquet."),
    "tokens_fast": (
        "Tokenizing",
        "*raw* is `encode_batch` of the tokenizers library on all cores, which writes nothing; *straight line* is a "
        "script that parses, encodes, writes Parquet and hashes, without a memory limit.",
    ),
    "start": ("Start", "Jobs so small that starting up decides."),
    "cluster": ("Ray", "Two and three nodes of a Ray cluster on one machine."),
    "arc": ("A dataset of 273 GB", "Planning and checking 902 sessions of brain scans."),
    "version-0.1-measured": (
        "Earlier measurements",
        "Of version 0.1; written by hand from the output of the benchmarks.",
    ),
}
COMMANDS = {"budget": "selecting.py --only budget"}  # of results whose name differs from their script
INTERNAL = ("compare",)  # comparisons of brim versions, for developers


def parts_of(actual: Any) -> list[dict[str, Any]]:
    """Return the parts of a result, which may be a list, a mapping by name, or a single part."""
    if isinstance(actual, dict) and "header" in actual and "rows" in actual:
        return [actual]
    inside = actual.values() if isinstance(actual, dict) else actual if isinstance(actual, list) else []
    return [part for item in inside for part in parts_of(item)]


def table(part: dict[str, Any]) -> list[str]:
    lines = [f"### {part['title']}", ""] if part["title"] else []
    lines += [
        f"| {' | '.join(map(str, cells))} |" for cells in (part["header"], ["---"] * len(part["header"]), *part["rows"])
    ]
    lines += ["", *(line for note in part.get("notes", []) for line in (note, ""))]
    if goals := part.get("goals"):
        missed = sum(not goal["reached"] for goal in goals)
        count = f"{len(goals)} goal{'s' if len(goals) > 1 else ''}"
        summary = f"{count}, {missed} missed" if missed else f"{count}, all reached"
        listed = [
            f"- {'reached' if goal['reached'] else '**missed**'}: {goal['text']}: {goal['numbers']}" for goal in goals
        ]
        lines += ['<details markdown="1">', f"<summary>{summary}</summary>", "", *listed, "", "</details>"]
    return [*lines, ""]


def curves(actual: dict[str, Any]) -> list[str]:
    lines = ["| | time | peak memory |", "|---|---:|---:|"]
    for name, method in actual["curves"].items():
        lines.append(f"| {name} | {method['seconds']:.1f} s | {method['peak_bytes'] / 1e6:,.0f} MB |")
    return [*lines, ""]


def machine(name: str, actual: Any) -> list[str]:
    facts = actual.get("machine") if isinstance(actual, dict) else None
    command = COMMANDS.get(name, f"{name}.py")
    script = f"`python benchmarks/{command}`. " if (HERE / command.split()[0]).exists() else ""
    report = ", ".join(f"{fact} {value}" for fact, value in facts.items()) if facts else ""
    return [f"{script}{report}.", ""] if report else []


@dataclass(frozen=True, slots=True)
class Figure:
    """The measurements of one tool: the median of its times, and the largest of its peaks.

    They are looked up in every result whose name begins with `file`, because a benchmark may be run in several parts.
    """

    file: str
    part: str
    run: str

    def runs(self, results: dict[str, Any]) -> list[dict[str, float]]:
        """Return the runs, or None without a measurement."""
        for name, match in results.items():
            if name.startswith(self.file) and "parts" in match and isinstance(match["parts"], dict):
                runs = match["parts"].get(self.part, {}).get("runs", {}).get(self.run)
                if runs:
                    return [run | {"peak_bytes": run.get("peak_bytes", run.get("peak_mb", 0) * 1e6)} for run in runs]
        return []

    def cells(self, results: dict[str, Any]) -> str:
        """Return the median time and the largest peak, as two cells of a table."""
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
    unlisted = [name for name in results if name not in SECTIONS and name not in INTERNAL]
    for name in [*(name for name in SECTIONS if name in results), *unlisted]:
        actual = results[name]
        created = curves(actual) if "curves" in actual else [line for part in parts_of(actual) for line in table(part)]
        if not created:
            raise SystemExit(f"benchmarks/results/{name}.json has no table: write it with the benchmark's --json.")
        heading, about = SECTIONS.get(name, (name.replace("-", " "), ""))
        lines += [f"## {heading}", "", *([about, ""] if about else []), *machine(name, actual), *created]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Make docs/benchmarks/results.md and the table of README.md.")
    parser.add_argument("--check", action="store_true", help="fail if they differ from what the results say")
    arguments = parser.parse_args()
    results = {path.stem: json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))}
    before = README.read_text()
    start, end = before.index(BEGIN) + len(BEGIN), before.index(END)
    created = {PAGE: page(results), README: before[:start] + readme_table(results) + before[end:]}
    stale = [path for path, text in created.items() if not path.exists() or path.read_text() != text]
    if arguments.check:
        for path in stale:
            print(f"{path.name} is not what benchmarks/results says: make benchmarks", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(created[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""List the jobs, destinations and engines, and the guarantees that tests/contracts/test_matrix.py checks for each.

python -m tests.matrix           print the table
python -m tests.matrix --write   write it to docs/contributing/tests.md
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs/contributing/tests.md"
BEGIN, END = "<!-- the matrix: python -m tests.matrix --write -->", "<!-- the end of the matrix -->"
VERBS = ("build", "map", "tokenize", "embed")
FILES = ("file.safetensors", "file.npy", "file.parquet", "bucket.npy", "hubbucket.npy")
PLACES = ("folder", "hub", "bucket", "hubbucket")
ENGINES = ("local", "ray")
EVENTS = ("undisturbed", "killed", "stopped", "full disk")
_ARGUMENTS = {
    "folder": "folder",
    "hub": "Hub",
    "bucket": "bucket",
    "hubbucket": "bucket of the Hub",
    "file.safetensors": "file `.safetensors`",
    "file.npy": "file `.npy`",
    "file.parquet": "file `.parquet`",
    "bucket.npy": "file `.npy` in a bucket",
    "hubbucket.npy": "file `.npy` in a bucket of the Hub",
}
# The cells that the suite runs every time; `make test-matrix` runs all of them.
_IN_SUITE = {
    ("build", "folder"): ("killed", "full disk"),
    ("build", "hub"): ("killed",),
    ("map", "folder"): ("killed", "stopped"),
    ("tokenize", "bucket"): ("stopped",),
    ("tokenize", "hubbucket"): ("killed",),
    ("embed", "hubbucket"): ("undisturbed",),
    ("embed", "file.safetensors"): ("killed", "full disk"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    verb: str
    place: str
    engine: str
    event: str

    def __str__(self) -> str:
        return "-".join((self.verb, self.place, self.engine, self.event)).replace(" ", "_")

    @property
    def target(self) -> str:
        """Return the target that runs this cell: the suite or the larger one."""
        suite = self.engine == "local" and self.event in _IN_SUITE.get((self.verb, self.place), ())
        return "suite" if suite else "matrix" if self.engine == "local" else "ray"


def rows() -> list[tuple[str, str]]:
    return [(verb, destination) for verb in VERBS for destination in (*PLACES, *(FILES if verb == "embed" else ()))]


CELLS = [Cell(verb, position, engine, event) for verb, position in rows() for engine in ENGINES for event in EVENTS]


def table() -> str:
    """Return the table of the page: a row per job and destination, and in each cell the command that tests it."""
    heads = [f"{event}, {engine}" for engine in ENGINES for event in EVENTS]
    lines = [
        "| job | to | " + " | ".join(heads) + " |",
        "|---|---|" + "---|" * len(heads),
    ]
    by_row = {row: [cell for cell in CELLS if (cell.verb, cell.place) == row] for row in rows()}
    for (verb, position), cells in by_row.items():
        lines.append(f"| {verb} | {_ARGUMENTS[position]} | " + " | ".join(cell.target for cell in cells) + " |")
    lines += [f"| {verb} | file | " + " | ".join("–" for _ in heads) + " |" for verb in VERBS[:3]]
    return "\n".join(lines)


def block(page: str) -> str:
    """Return the text between the markers of a page."""
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    if "--write" not in sys.argv[1:]:
        sys.stdout.write(table() + "\n")
        return
    page = PAGE.read_text()
    before, _, after = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after.partition(END)[2]}")


if __name__ == "__main__":
    main()

"""What a recipe expects of a whole dataset, held against what was found: in a folder, or in what is published.

Whoever looked hands over numbers; nothing is read here but the files that a recipe requires.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field

from brim.errors import InputError
from brim.records import dataclass
from brim.sources.file_table import Finding
from brim.sources.folder_tree import Tree
from brim.sources.recipe import Expect, Recipe, Span


@dataclass
class Counted:
    """What was found: rows that hold something in a column, and files in it; both by the column's name."""

    rows: int = 0
    subjects: int = 0
    sessions: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)


def expectation_findings(
    recipe: Recipe, counted: Counted, tolerance: float | None = None, partly: Sequence[str] = ()
) -> list[Finding]:
    """Every number that the recipe expects. They are not compared if the source was read `partly`, by these options."""
    expect = recipe.expect
    share = expect.tolerance if tolerance is None else tolerance
    if not 0 <= share <= 1:
        raise InputError(f"--tolerance takes a share from 0 to 1, not {share}.")
    numbers: list[tuple[str, Span | None, int]] = [
        ("rows", expect.rows, counted.rows),
        (f"distinct {recipe.key[0]}", expect.subjects, counted.subjects),
        ("sessions", expect.sessions, counted.sessions),
    ]
    numbers += [(f"rows with {name}", span, counted.counts.get(name, 0)) for name, span in expect.counts.items()]
    numbers += [(f"files in {name}", span, counted.files.get(name, 0)) for name, span in expect.files.items()]
    wanted = [(name, span, count) for name, span, count in numbers if span is not None]
    if wanted and partly:
        detail = f"not compared: the source was read with {', '.join(partly)}"
        return [Finding("numbers", True, detail, skipped=True)]
    return [_compared(name, span, count, share, expect) for name, span, count in wanted]


def required_findings(recipe: Recipe, tree: Tree) -> list[Finding]:
    """Every file that the recipe says must be there."""
    return [_required(tree, path, recipe.root) for path in recipe.expect.required]


def _required(tree: Tree, path: str, root: str) -> Finding:
    full = f"{root}/{path}" if root else path
    if tree.is_file(full):
        size = tree.size(full)
        return Finding(f"file {path}", size > 0, "is there" if size else "is empty (0 bytes)")
    what = "is a link that leads nowhere: its content is not here" if tree.is_link(full) else "is missing"
    return Finding(f"file {path}", False, what)


def _compared(name: str, span: Span, count: int, tolerance: float, expect: Expect) -> Finding:
    low = math.ceil(round(span[0] * (1 - tolerance), 6))
    high = math.floor(round(span[1] * (1 + tolerance), 6))
    expected = f"{span[0]:,}" if span[0] == span[1] else f"{span[0]:,} to {span[1]:,}"
    room = f", {low:,} to {high:,} with a tolerance of {tolerance:g}" if tolerance else ""
    of = f" in {expect.snapshot}" if expect.snapshot else ""
    return Finding(name, low <= count <= high, f"{count:,}; expected {expected}{room}{of}")

"""The tables of BIDS: participants.tsv, sessions.tsv, scans.tsv, phenotype."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Mapping, Sequence

import pyarrow as pa

from brim.errors import SourceError
from brim.sources.pointers import COMMANDS, pointer_kind
from brim.sources.tree import Tree

Texts = dict[str, list[str | None]]
_NULLS = frozenset(["", "n/a", "N/A", "NA", "nan", "NaN"])
_INTEGER = re.compile(r"[+-]?(0|[1-9]\d*)")
_NUMBER = re.compile(r"[+-]?(0|[1-9]\d*|(?=\.\d))(\.\d*)?([eE][+-]?\d+)?")


def read_tsv(tree: Tree, path: str) -> Texts:
    """The columns of a TSV as texts; nulls are None. Byte-order marks and CRLF are accepted."""
    try:
        pointer = pointer_kind(tree.head(path))
        with tree.text(path, newline="") as file:
            lines = [line.split("\t") for line in re.split(r"\r\n|\r|\n", file.read()) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} cannot be read: {error}.", path=path) from error
    if pointer is not None:
        raise SourceError(f"{path} is a pointer, not data.", hint=f"Fetch it with: {COMMANDS[pointer]}", path=path)
    if not lines:
        return {}
    header = [name.strip() for name in lines[0]]
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        raise SourceError(f"{path} has two columns named {twice[0]!r}.", hint="Rename one of them.", path=path)
    columns: Texts = {name: [] for name in header if name}
    for number, row in enumerate(lines[1:], start=2):
        if len(row) > len(header) and any(row[len(header) :]):
            raise SourceError(f"{path} line {number} has {len(row)} cells, the header has {len(header)}.", path=path)
        cells = row + [""] * (len(header) - len(row))
        for name, cell in zip(header, cells, strict=False):
            if name:
                columns[name].append(None if cell.strip() in _NULLS else cell.strip())
    return columns


def typed(values: Sequence[str | None]) -> pa.Array:
    """Texts as whole numbers, numbers or text. Leading zeros stay text: 007 is a name."""
    present = [value for value in values if value is not None]
    if present and all(_INTEGER.fullmatch(value) for value in present):
        if all(-(2**63) <= int(value) < 2**63 for value in present):
            return pa.array([None if value is None else int(value) for value in values], pa.int64())
        return pa.array(values, pa.string())  # an id of that many digits is a name
    if present and all(_NUMBER.fullmatch(value) and math.isfinite(float(value)) for value in present):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array(values, pa.string())


def participants(tree: Tree, subjects: Sequence[str]) -> tuple[dict[str, pa.Array], tuple[str, ...]]:
    """A value for each subject and column of participants.tsv, and what does not match."""
    return keyed_table(tree, "participants.tsv", "participant_id", "sub-", subjects)


def keyed_table(
    tree: Tree, name: str, key: str, prefix: str, wanted: Sequence[str]
) -> tuple[dict[str, pa.Array], tuple[str, ...]]:
    """The columns of a table in the order of `wanted`, typed by the whole table."""
    if not tree.is_file(name):
        return {}, ()
    columns = read_tsv(tree, name)
    if key not in columns:
        return {}, (f"{name} has no column {key} and is not joined",) if columns else ()
    ids = [
        None if value is None else value if value.startswith(prefix) else prefix + value for value in columns.pop(key)
    ]
    row_of = {value: row for row, value in enumerate(ids) if value is not None}
    warnings = []
    listed, here = {value for value in ids if value}, set(wanted)
    if absent := sorted(listed - here):
        warnings.append(f"{len(absent)} of {name} have no folder, for example {absent[0]}")
    if unlisted := sorted(here - listed):
        warnings.append(f"{len(unlisted)} with a folder are not in {name}, for example {unlisted[0]}")
    twice = len([value for value in ids if value]) - len(listed)
    if twice:
        warnings.append(f"{twice} of {name} are listed twice; the last line counts")
    order = pa.array([row_of.get(value) for value in wanted], pa.int64())
    return {column: typed(values).take(order) for column, values in columns.items()}, tuple(warnings)


def sessions(tree: Tree, tables: Mapping[str, str], keys: Sequence[tuple[str, str | None]]) -> Texts:
    """A text for each (subject, session) and column of the subjects' sessions.tsv."""
    found: dict[tuple[str, str], dict[str, str | None]] = {}
    names: dict[str, None] = {}
    wanted = sorted(path for path, kind in tables.items() if kind == "sessions" and path.endswith(".tsv"))
    tree.expect(wanted)
    for path in wanted:
        columns = read_tsv(tree, path)
        subject = path.split("/", 1)[0]
        for row, session in enumerate(columns.pop("session_id", [])):
            if session is not None:
                session = session if session.startswith("ses-") else f"ses-{session}"
                found[subject, session] = {name: values[row] for name, values in columns.items()}
        names |= dict.fromkeys(columns)
    joined = [found.get((subject, session), {}) if session else {} for subject, session in keys]
    return {name: [row.get(name) for row in joined] for name in names}


def scans(tree: Tree, tables: Mapping[str, str]) -> dict[str, dict[str, str | None]]:
    """What scans.tsv says of each file, by its path in the dataset."""
    found: dict[str, dict[str, str | None]] = {}
    wanted = sorted(path for path, kind in tables.items() if kind == "scans" and path.endswith(".tsv"))
    tree.expect(wanted)
    for path in wanted:
        columns = read_tsv(tree, path)
        folder = path.rpartition("/")[0]
        for row, name in enumerate(columns.pop("filename", [])):
            if name is not None:
                place = posixpath.normpath(f"{folder}/{name}")
                found[place] = {column: values[row] for column, values in columns.items()}
    return found

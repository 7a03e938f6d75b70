"""What an image needs, found by the inheritance principle: JSON fields, gradients, events.

A text file applies to an image if it lies in the image's folder or one above it and its entities are
among the image's. Of gradients and events the nearest counts; JSON fields are merged, the nearest wins.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from brim.errors import SourceError
from brim.sources.bids_layout import BidsLayout, Item
from brim.sources.file_table import Refused
from brim.sources.folder_tree import COMMANDS, Tree, pointer_kind

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


# What identifies a person, a place, a device or a day: DICOM names, as converters copy them into JSON, and the
# same words as tables spell them. Compared without case and underscores.
_PRIVATE = re.compile(
    r"patient.*|.*patient(id|name).*|issuerofpatient.*|.*physician.*|.*operator.*|responsibleperson.*|subject(id|name).*"
    r"|institution.*|.*address|.*telephone.*|.*datetime.*|dateof.*|dob|birth(date|day)|.*birthdate.*"
    r"|(acq|acquisition|content|series|study|scan|session|visit|exam|recording|instancecreation|procedure.*|performed.*)"
    r"(date|time|datetime)s?|.*stepstart(date|time)|.*stepend(date|time)"
    r"|.*serialnumber.*|.*stationname|.*stationaetitle|accessionnumber|studyid|.*instanceuid|.*ofreferenceuid"
    r"|.*creatoruid|deviceuid|referring.*|requesting.*"
)
_DATE = re.compile(r".*[a-z]Dates?")  # any other DICOM date; with its capital, so that a candidate is not one

# Recordings that have events.
_MOST_TEXT_BYTES = 16 << 20
HAVE_EVENTS = frozenset("bold cbv phase eeg meg ieeg nirs emg pet beh motion svs mrsi mrsref unloc".split())  # noqa: SIM905


def is_private(key: str) -> bool:
    plain = re.sub(r"[\s_-]", "", key).lower()
    return _PRIVATE.fullmatch(plain) is not None or _DATE.fullmatch(key) is not None


class Sidecars:
    """Finds and reads what applies to an item. Each file is read once."""

    def __init__(self, layout: BidsLayout, safe: bool) -> None:
        self._layout, self._safe = layout, safe
        self._fields: dict[str, dict[str, Any] | None] = {}
        self._texts: dict[str, str | None] = {}
        self.removed: Counter[str] = Counter()
        self.broken: list[str] = []
        self.read: set[str] = set()  # files whose content went into some column

    def json(self, item: Item) -> str | None:
        """The merged fields as JSON text, or None if no file applies."""
        read = [self._read_fields(path) for path in self._applying(item, item.name.suffix, ".json")]
        fields = [each for each in read if each is not None]
        return _as_json({key: value for each in fields for key, value in each.items()}) if fields else None

    def nearest(self, item: Item, extension: str, suffix: str | None = None) -> str | None:
        """The text of the nearest file with this extension that applies."""
        applies = self._applying(item, suffix or item.name.suffix, extension)
        return self.text(applies[-1]) if applies else None

    def events(self, item: Item) -> str | None:
        path = self.events_path(item)
        return None if path is None else self.text(path)

    def events_path(self, item: Item) -> str | None:
        """The events that belong to a recording."""
        if item.name.suffix not in HAVE_EVENTS or item.name.get("task") is None:
            return None
        applies = self._applying(item, "events", ".tsv")
        return applies[-1] if applies else None

    def text(self, path: str) -> str | None:
        """The content of a text file; JSON loses its private fields."""
        if path not in self._texts:
            if path.endswith(".json"):
                fields = self._read_fields(path)
                self._texts[path] = None if fields is None else _as_json(fields)
            else:
                self._texts[path] = self._read(path)
        return self._texts[path]

    def expect(self, extra: str, items: Iterable[Item]) -> None:
        """What of one kind (json, events, bval, bvec, or their own text) will be wanted of items, in order."""
        self._layout.tree.expect(path for path in self._wanted(extra, items) if path not in self._fields)

    def _wanted(self, extra: str, items: Iterable[Item]) -> Iterator[str]:
        for item in items:
            if extra == "text":
                yield item.path
            elif extra == "json":
                yield from self._applying(item, item.name.suffix, ".json")
            elif extra == "events":
                yield from filter(None, [self.events_path(item)])
            else:
                yield from self._applying(item, item.name.suffix, f".{extra}")[-1:]

    def _applying(self, item: Item, suffix: str, extension: str) -> list[str]:
        """Files that apply, from the top of the dataset down; at one level, the more specific later."""
        found = []
        folders = _folders_above(item)
        for folder in folders:
            here = [
                (len(name.entities), path)
                for name, path in self._layout.shared.get(folder, ())
                if name.suffix == suffix and name.extension == extension and name.within(item.name)
            ]
            found += [path for _, path in sorted(here)]
        return found

    def _read(self, path: str) -> str | None:
        tree = self._layout.tree
        self.read.add(path)
        try:
            if tree.size(path) > _MOST_TEXT_BYTES:
                raise SourceError(
                    f"{path} is too large to be stored as text ({tree.size(path):,} bytes).",
                    hint="Leave it out with --exclude, or take other suffixes with --suffixes.",
                )
            pointer = pointer_kind(tree.head(path))
            if pointer is not None:
                self._layout.refused.append(Refused(pointer, path))
                return None
            with tree.text(path) as file:
                return file.read()
        except (OSError, UnicodeDecodeError):
            self.broken.append(path)
            return None

    def _read_fields(self, path: str) -> dict[str, Any] | None:
        if path not in self._fields:
            text = self._read(path)
            try:
                fields = json.loads(text) if text and text.strip() else {} if text is not None else None
            except (ValueError, RecursionError):
                self.broken.append(path)
                fields = None
            if fields is not None and not isinstance(fields, dict):
                self.broken.append(path)
                fields = None
            self._fields[path] = fields if fields is None else self._clean(fields)
        return self._fields[path]

    def _clean(self, value: Any) -> Any:
        """A JSON value without private fields at any depth, and without numbers that JSON does not have."""
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, list):
            return [self._clean(element) for element in value]
        if not isinstance(value, dict):
            return value
        private = {key for key in value if self._safe and is_private(key)}
        self.removed.update(private)
        return {key: self._clean(inner) for key, inner in value.items() if key not in private}


def _as_json(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, ensure_ascii=False)
    # Half of a surrogate pair can be written in JSON and not in UTF-8.
    return text if text.isprintable() or text.encode("utf-8", "ignore").decode() == text else json.dumps(fields)


def _folders_above(item: Item) -> list[str]:
    """The folders from the top of the dataset (or of the derivative) down to the item's own."""
    parts = item.folder.split("/")
    first = parts.index(item.subject)  # what lies above is the top: of the dataset, or of the derivative
    return ["/".join(parts[:depth]) for depth in range(first, len(parts) + 1)]

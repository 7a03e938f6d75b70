"""Sidecars of a BIDS image, found by the inheritance principle: JSON fields, gradients, events.

A text file applies to an image if it is in the image's folder or one above it, and its entities are among those of the
image. Of gradients and events the nearest file counts. JSON fields are merged, and the nearest value counts.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from brim.errors import SourceError
from brim.sources.bids_layout import BidsLayout, Item
from brim.sources.file_table import Refused
from brim.sources.folder_tree import Tree, pointer_kind
from brim.sources.joined_tables import LINE, read_tsv

_MOST_TEXT_BYTES = 16 << 20
# Recordings that have events.
_HAVE_EVENTS = frozenset("bold cbv phase eeg meg ieeg nirs emg pet beh motion svs mrsi mrsref unloc".split())  # noqa: SIM905


def read_sessions(
    tree: Tree, tables: Mapping[str, str], keys: Sequence[tuple[str, str | None]]
) -> dict[str, list[str | None]]:
    """Return the columns of the subjects' sessions.tsv for each (subject, session)."""
    rows: dict[tuple[str, str | None], dict[str, str | None]] = {}
    names: dict[str, None] = {}
    paths = sorted(path for path, kind in tables.items() if kind == "sessions" and path.endswith(".tsv"))
    tree.expect(paths)
    for path in paths:
        table = read_tsv(tree, path).drop_columns([LINE])
        names |= dict.fromkeys(name for name in table.column_names if name != "session_id")
        for row in table.to_pylist():
            if (session := row.pop("session_id", None)) is not None:
                rows[path.split("/", 1)[0], session if session.startswith("ses-") else f"ses-{session}"] = row
    return {name: [rows.get(key, {}).get(name) for key in keys] for name in names}


def read_scans(tree: Tree, tables: Mapping[str, str]) -> dict[str, dict[str, str | None]]:
    """Return the values of scans.tsv by the path of the file that they are of."""
    rows: dict[str, dict[str, str | None]] = {}
    paths = sorted(path for path, kind in tables.items() if kind == "scans" and path.endswith(".tsv"))
    tree.expect(paths)
    for path in paths:
        for row in read_tsv(tree, path).drop_columns([LINE]).to_pylist():
            if (name := row.pop("filename", None)) is not None:
                rows[posixpath.normpath(f"{path.rpartition('/')[0]}/{name}")] = row
    return rows


# Names of fields that identify a person, a site, a device or a day: those of DICOM, as converters copy them into JSON,
# and the same words as tables spell them. Compared without case and underscores.
_PRIVATE = re.compile(
    r"patient.*|.*patient(id|name).*|issuerofpatient.*|.*physician.*|.*operator.*|responsibleperson.*|subject(id|name).*"
    r"|institution.*|.*address|.*telephone.*|.*datetime.*|dateof.*|dob|birth(date|day)|.*birthdate.*"
    r"|(acq|acquisition|content|series|study|scan|session|visit|exam|recording|instancecreation|procedure.*|performed.*)"
    r"(date|time|datetime)s?|.*stepstart(date|time)|.*stepend(date|time)"
    r"|.*serialnumber.*|.*stationname|.*stationaetitle|accessionnumber|studyid|.*instanceuid|.*ofreferenceuid"
    r"|.*creatoruid|deviceuid|referring.*|requesting.*"
)
_DATE = re.compile(r".*[a-z]Dates?")  # any other DICOM date; with its capital, so that a candidate is not one


class Sidecars:
    """Finds and reads the sidecars of files. Each is read once. `is_safe` leaves out fields that identify."""

    def __init__(self, layout: BidsLayout, is_safe: bool) -> None:
        self._layout, self._is_safe = layout, is_safe
        self._fields: dict[str, dict[str, Any] | None] = {}
        self._texts: dict[str, str | None] = {}
        self.removed: Counter[str] = Counter()  # names of fields that were left out
        self.broken: list[str] = []
        self.read: set[str] = set()

    def removes(self, name: str) -> bool:
        """Return whether a field is left out, and count it."""
        plain = re.sub(r"[\s_-]", "", name).lower()
        is_private = _PRIVATE.fullmatch(plain) is not None or _DATE.fullmatch(name) is not None
        self.removed.update([name] if self._is_safe and is_private else [])
        return self._is_safe and is_private

    def paths(self, extra: str, item: Item) -> list[str]:
        """Return the sidecars of a kind (json, events, bval, bvec) that apply; the last counts most."""
        suffix, extension = item.name.suffix, f".{extra}"
        if extra == "events":
            if suffix not in _HAVE_EVENTS or item.name.get("task") is None:
                return []
            suffix, extension = "events", ".tsv"
        parts = item.folder.split("/")
        top = parts.index(item.subject)  # folders above the subject's are the dataset, or the derivative
        matching: list[str] = []
        for depth in range(top, len(parts) + 1):
            candidates = [
                (len(name.entities), path)
                for name, path in self._layout.shared.get("/".join(parts[:depth]), ())
                if name.suffix == suffix and name.extension == extension and name.within(item.name)
            ]
            matching += [path for _, path in sorted(candidates)]
        return matching if extra == "json" else matching[-1:]

    def extra(self, extra: str, item: Item) -> str | None:
        """Return the text of a sidecar, or merged JSON; None if no file applies."""
        paths = self.paths(extra, item)
        if extra != "json":
            return self.text(paths[0]) if paths else None
        read = [fields for path in paths if (fields := self._read_fields(path)) is not None]
        return _as_json({key: value for fields in read for key, value in fields.items()}) if read else None

    def text(self, path: str) -> str | None:
        """Return the content of a text file; of JSON without the fields that identify."""
        if path not in self._texts:
            if path.endswith(".json"):
                fields = self._read_fields(path)
                self._texts[path] = None if fields is None else _as_json(fields)
            else:
                self._texts[path] = self._read(path)
        return self._texts[path]

    def prefetch(self, extra: str, items: Iterable[Item]) -> None:
        """Announce that the sidecars of a kind, or the items themselves (text), will be read in this order."""
        paths = (path for item in items for path in ([item.path] if extra == "text" else self.paths(extra, item)))
        self._layout.tree.expect(path for path in paths if path not in self._fields)

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
                fields = None if text is None else json.loads(text) if text.strip() else {}
            except (ValueError, RecursionError):
                fields = ...
            if fields is not None and not isinstance(fields, dict):
                self.broken.append(path)
                fields = None
            self._fields[path] = self._clean(fields)
        return self._fields[path]

    def _clean(self, value: Any) -> Any:
        """Remove fields that identify, at any depth, and numbers that JSON does not have."""
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, list):
            return [self._clean(element) for element in value]
        if isinstance(value, dict):
            return {key: self._clean(inner) for key, inner in value.items() if not self.removes(key)}
        return value


def _as_json(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, ensure_ascii=False)
    # JSON can have half of a surrogate pair, and UTF-8 cannot.
    return text if text.isprintable() or text.encode("utf-8", "ignore").decode() == text else json.dumps(fields)

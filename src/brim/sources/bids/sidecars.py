"""What an image needs, found by the inheritance principle: JSON fields, gradients, events.

A text file applies to an image if it lies in the image's folder or one above it and its entities are
among the image's. Of gradients and events the nearest counts; JSON fields are merged, the nearest wins.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections import Counter
from typing import Any

from brim.sources.bids.layout import Item, Layout

# What identifies a person, a place, a device or a day. DICOM names, as converters copy them into JSON.
PRIVATE_KEYS = (
    "Patient*", "*Physician*", "Institution*", "*DateTime*", "*Date", "*Address*", "*Telephone*", "*BirthDate*",
    "AcquisitionTime", "ContentTime", "SeriesTime", "StudyTime", "InstanceCreationTime", "*StepStartTime",
    "*StepEndTime", "*SerialNumber", "*StationName", "*StationAETitle", "*Operator*",
    "AccessionNumber", "StudyID", "*InstanceUID", "*OfReferenceUID", "Referring*", "Requesting*", "SubjectName*",
    "OtherPatient*", "acq_time",
)  # fmt: skip
_PRIVATE = re.compile("|".join(fnmatch.translate(pattern) for pattern in PRIVATE_KEYS), re.IGNORECASE)

# Recordings that have events.
HAVE_EVENTS = frozenset("bold cbv phase eeg meg ieeg nirs emg pet beh".split())  # noqa: SIM905


def is_private(key: str) -> bool:
    return _PRIVATE.fullmatch(key) is not None


class Sidecars:
    """Finds and reads what applies to an item. Each file is read once."""

    def __init__(self, layout: Layout, safe: bool) -> None:
        self._layout, self._safe = layout, safe
        self._fields: dict[str, dict[str, Any] | None] = {}
        self._texts: dict[str, str | None] = {}
        self.removed: Counter[str] = Counter()
        self.broken: list[str] = []

    def json(self, item: Item) -> str | None:
        """The merged fields as JSON text, or None if no file applies."""
        merged: dict[str, Any] = {}
        applies = self._applying(item, item.name.suffix, ".json")
        for path in applies:
            merged |= self._read_fields(path) or {}
        if not applies:
            return None
        return json.dumps(merged, ensure_ascii=False)

    def nearest(self, item: Item, extension: str, suffix: str | None = None) -> str | None:
        """The text of the nearest file with this extension that applies."""
        applies = self._applying(item, suffix or item.name.suffix, extension)
        return self.text(applies[-1]) if applies else None

    def events(self, item: Item) -> str | None:
        if item.name.suffix not in HAVE_EVENTS or item.name.get("task") is None:
            return None
        return self.nearest(item, ".tsv", "events")

    def text(self, path: str) -> str | None:
        """The content of a text file; JSON loses its private fields."""
        if path not in self._texts:
            if path.endswith(".json"):
                fields = self._read_fields(path)
                self._texts[path] = None if fields is None else json.dumps(fields, ensure_ascii=False)
            else:
                self._texts[path] = self._read(path)
        return self._texts[path]

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
        try:
            with open(os.path.join(self._layout.root, path), encoding="utf-8-sig") as file:
                return file.read()
        except (OSError, UnicodeDecodeError):
            self.broken.append(path)
            return None

    def _read_fields(self, path: str) -> dict[str, Any] | None:
        if path not in self._fields:
            text = self._read(path)
            try:
                fields = json.loads(text) if text and text.strip() else {} if text is not None else None
            except ValueError:
                self.broken.append(path)
                fields = None
            if fields is not None and not isinstance(fields, dict):
                self.broken.append(path)
                fields = None
            self._fields[path] = self._clean(fields) if self._safe and fields else fields
        return self._fields[path]

    def _clean(self, value: Any) -> Any:
        """A JSON value without private fields, at any depth."""
        if isinstance(value, list):
            return [self._clean(element) for element in value]
        if not isinstance(value, dict):
            return value
        self.removed.update(key for key in value if is_private(key))
        return {key: self._clean(inner) for key, inner in value.items() if not is_private(key)}


def _folders_above(item: Item) -> list[str]:
    """The folders from the top of the dataset (or of the derivative) down to the item's own."""
    parts = item.folder.split("/")
    start = parts.index(item.subject) if item.derivative else 0
    return ["", *("/".join(parts[: depth + 1]) for depth in range(start, len(parts)))]

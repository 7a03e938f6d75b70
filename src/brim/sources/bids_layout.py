"""Find the files of a BIDS dataset: its subjects and sessions, their files, their sidecars, and what is left out.

A sidecar is a text file that applies to an image if it is in the image's folder or one above it, and its entities are
among those of the image. Of gradients and events the nearest file counts. JSON fields are merged, and the nearest value
counts.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from brim.errors import SourceError
from brim.extras import missing
from brim.file_set import AbsentStat, Stat
from brim.options.groups import BidsOptions
from brim.records import dataclass
from brim.sources.features import kind_of
from brim.sources.file_table import Refused
from brim.sources.folder_tree import Tree, Walk, natural, pointer_kind
from brim.sources.joined_tables import LINE, read_tsv

_ENTITY = re.compile(r"([A-Za-z0-9]+)-(.+)")
TEXT_EXTENSIONS = frozenset([".tsv", ".json", ".bval", ".bvec"])
# Recordings that happen to be tables: files, not texts.
_LARGE_TABLES = frozenset(["motion", "physio", "stim", "timeseries", "regressors"])
_OTHER_FOLDERS = ("sourcedata", "code", "stimuli", "derivatives", "phenotype")


@dataclass(frozen=True, slots=True)
class Name:
    """A BIDS name: its entities in order, the suffix, and everything from the first dot on."""

    entities: tuple[tuple[str, str], ...]
    suffix: str
    extension: str

    def get(self, entity: str) -> str | None:
        return dict(self.entities).get(entity)

    def within(self, other: Name) -> bool:
        """Return whether the other name has all entities of this one, so that this file applies to it."""
        return set(self.entities) <= set(other.entities)


def parse_name(name: str) -> Name | None:
    """Parse the name of a file or folder; None if it is not a BIDS name."""
    stem, dot, rest = name.partition(".")
    *parts, suffix = stem.split("_")
    matches = [_ENTITY.fullmatch(part) for part in parts]
    if not suffix or "-" in suffix or None in matches:
        return None
    return Name(tuple((match[1], match[2]) for match in matches if match is not None), suffix, dot + rest)


def is_text(name: Name) -> bool:
    """Return whether a file is small text that is stored as such."""
    return name.extension in TEXT_EXTENSIONS and not (name.extension == ".tsv" and name.suffix in _LARGE_TABLES)


def file_kind(name: Name) -> str:
    """Return the type of a file: "nifti" only for plain images, so that CIFTI and the like stay files."""
    kind = kind_of("x" + name.extension.lower())
    return "file" if kind == "nifti" and name.extension.lower() not in (".nii", ".nii.gz") else kind


@dataclass(frozen=True, slots=True)
class Item:
    """A file with a BIDS name, or a recording that is a folder. `members` are the files of such a folder."""

    path: str  # relative to the dataset
    name: Name
    subject: str
    session: str | None
    datatype: str
    stat: Stat | None
    members: tuple[tuple[str, str, Stat], ...] | None = None
    derivative: str = ""

    @property
    def folder(self) -> str:
        return self.path.rstrip("/").rpartition("/")[0]


class BidsLayout:
    """The files of a dataset. Paths are relative to the top of `tree`."""

    def __init__(self, tree: Tree, options: BidsOptions) -> None:
        self.tree, self._options = tree, options
        self.keys: list[tuple[str, str | None]] = []  # (subject, session) of the folders
        self.items: list[Item] = []
        self.shared: dict[str, list[tuple[Name, str]]] = {}  # by folder: texts that may apply to images in or below it
        self.tables: dict[str, str] = {}  # scans.tsv and sessions.tsv by path
        self.left_out: Counter[str] = Counter()  # by the reason
        self.examples: dict[str, str] = {}
        self.refused: list[Refused] = []
        self.loops: list[str] = []
        self._is_ignored = _ignore_rules(tree) if options.bidsignore else lambda path: False
        subjects = [subject for subject in self._subjects("", self.refused) if not self._is_ignored(f"{subject}/")]
        if not subjects:
            raise SourceError(
                "This BIDS dataset has no subjects (folders named sub-*).",
                hint="For an atlas or template, use --recipe=files to package every file of the folder.",
                path=tree.root,
            )
        self._read_top()
        _check_exist("--subjects", options.subjects, "sub-", subjects)
        for subject in subjects:
            if options.wants_subject(subject):
                self._read_subject(subject, subject, "")
        if not self.keys:
            raise SourceError(
                "No subject or session is left after --subjects and --sessions.", hint="Leave one of them out."
            )
        _check_exist("--sessions", options.sessions, "ses-", [session for _, session in self.keys if session])
        self._read_other_folders()
        present = {item.name.suffix.lower() for item in self.items}
        if absent := [suffix for suffix in options.suffixes if suffix.lower() not in present]:
            raise SourceError(
                f"--suffixes names {absent[0]!r}, which no file has.", hint="brim plan lists the suffixes."
            )
        # Rows of sessions (or of no session) that only a derivative has.
        if extra := {(item.subject, item.session) for item in self.items} - set(self.keys):
            order = {subject: number for number, subject in enumerate(subjects)}
            keys = [*self.keys, *extra]
            self.keys = sorted(keys, key=lambda k: (order[k[0]], k[1] is not None, natural(k[1] or "")))

    def _subjects(self, folder: str, refused: list[Refused] | None = None) -> list[str]:
        names = []
        for name in self.tree.names(folder):
            if name.startswith("sub-") and self.tree.is_folder(f"{folder}/{name}" if folder else name):
                if name.encode("utf-8", "replace").decode() == name:
                    names.append(name)
                elif refused is not None:
                    refused.append(Refused("name", name.encode("utf-8", "backslashreplace").decode()))
        return sorted(names, key=natural)

    def _leave_out(self, why: str, path: str) -> None:
        self.left_out[why] += 1
        self.examples.setdefault(why, path)

    def _add_text(self, filename: str, folder: str) -> None:
        """Add a text file that may apply to images in its folder and below."""
        name = parse_name(filename)
        if name is not None and name.extension in TEXT_EXTENSIONS:
            self.shared.setdefault(folder, []).append((name, f"{folder}/{filename}" if folder else filename))

    def _read_top(self) -> None:
        """Read the files next to the subjects' folders: texts that apply to all subjects."""
        walk = Walk(self.tree)
        for name in sorted(self.tree.names("")):
            if name.startswith((".", "sub-")) or self._is_ignored(name):
                continue
            if self.tree.is_folder(name):
                if name not in _OTHER_FOLDERS:
                    self.left_out[f"the folder {name}/"] += 1
            elif walk.find(name, name) is not None:
                self._add_text(name, "")
        self.refused += walk.refused

    def _read_subject(self, folder: str, subject: str, derivative: str) -> None:
        """Read the folder of a subject, which may be that of a derivative."""
        tree, options = self.tree.below(folder), self._options
        walk = Walk(tree, keep_hidden=lambda prefix: _recording_of(prefix) is not None, keys=True)
        recordings: dict[str, list[tuple[str, str, Stat]]] = {}
        session_folders = {name for name in tree.names("") if name.startswith("ses-") and tree.is_folder(name)}
        sessions: set[str | None] = set(session_folders)
        for inside, stat in walk:
            path, session = f"{folder}/{inside}", _session_and_datatype(inside)[0]
            if self._is_ignored(path):
                self._leave_out("ignored by .bidsignore", path)
                continue
            if not options.wants_session(session) and inside.count("/") > 0:
                continue
            recording, name = _recording_of(inside), parse_name(inside.rsplit("/", 1)[-1])
            is_read = name is not None and name.extension in TEXT_EXTENSIONS
            if isinstance(stat, AbsentStat) and (recording is not None or is_read):
                walk.refused.append(Refused("annex", inside))  # its content is needed now
            elif recording is not None:
                recordings.setdefault(recording, []).append((inside[len(recording) + 1 :], path, stat))
            elif name is None or name.get("sub") is None:
                self._leave_out("not a BIDS name", path)
            else:
                self._add_file(
                    Item(path, name, subject, *_session_and_datatype(inside), stat, None, derivative), sessions
                )
        for inside, members in recordings.items():
            if (name := parse_name(inside.rsplit("/", 1)[-1])) is not None:
                location = _session_and_datatype(inside)
                item = Item(f"{folder}/{inside}/", name, subject, *location, None, tuple(members), derivative)
                self._add(item, sessions)
        walk.refused += [Refused("empty", f"{empty}/") for empty in _empty_recordings(tree, set(recordings))]
        for refused in walk.refused:
            path = f"{folder}/{refused.path}"
            name = parse_name(refused.path.rstrip("/").rsplit("/", 1)[-1])
            if self._is_ignored(path):
                self._leave_out("ignored by .bidsignore", path)
            elif options.wants_session(_session_and_datatype(refused.path)[0]):
                is_included = name is None or options.wants_suffix(name.suffix)
                self.refused += [Refused(refused.reason, path)] if is_included else []
        self.loops += [f"{folder}/{loop}" for loop in walk.loops]
        if not derivative:
            if (None in sessions or not session_folders) and not options.sessions:
                self.keys.append((subject, None))
            session_names = sorted((s for s in sessions if s is not None and options.wants_session(s)), key=natural)
            self.keys += [(subject, session) for session in session_names]

    def _add_file(self, item: Item, sessions: set[str | None]) -> None:
        """Add a table of the dataset, a text that others inherit, or a file; some are two of these."""
        name = item.name
        if name.suffix in ("scans", "sessions") and name.extension in (".tsv", ".json"):
            self.tables[item.path] = name.suffix
            return
        is_inherited = name.extension in TEXT_EXTENSIONS
        if is_inherited:
            folder, _, filename = item.path.rpartition("/")
            self._add_text(filename, folder)
        if not is_inherited or item.datatype or name.extension == ".tsv":
            self._add(item, sessions)

    def _add(self, item: Item, sessions: set[str | None]) -> None:
        if self._options.wants_suffix(item.name.suffix):
            sessions.add(item.session)
            self.items.append(item)
        elif not self._options.suffixes:
            self._leave_out(f"_{item.name.suffix} (--suffixes {item.name.suffix} takes them)", item.path)

    def _read_other_folders(self) -> None:
        """Read derivatives if they were asked for, and count the other folders next to the subjects as left out."""
        for name, is_included in (("phenotype", self._options.phenotype), ("derivatives", self._options.derivatives)):
            if is_included and not self.tree.is_folder(name):
                raise SourceError(f"This dataset has no folder {name}/.", hint=f"Leave out --{name}.")
        for name in filter(self.tree.is_folder, _OTHER_FOLDERS):
            if name == "derivatives":
                self._read_derivatives()
            elif name != "phenotype" or not self._options.phenotype:
                self.left_out[f"{name}/"] += 1

    def _read_derivatives(self) -> None:
        requested = self._options.derivatives
        if self._subjects("derivatives"):  # without the name of a pipeline
            if "all" in requested:
                self._read_derivative("")
            else:
                self.left_out["derivatives/sub-* (--derivatives all takes them)"] += 1
        names = [name for name in self.tree.names("derivatives") if not name.startswith((".", "sub-"))]
        present = sorted(name for name in names if self.tree.is_folder(f"derivatives/{name}"))
        if unknown := set(requested) - set(present) - {"all"}:
            raise SourceError(
                f"This dataset has no folder derivatives/{min(unknown)}.",
                hint=f"Its derivatives are: {', '.join(present) or 'none'}.",
            )
        for derivative in present:
            if derivative in requested or "all" in requested:
                self._read_derivative(derivative)
            else:
                self.left_out[f"derivatives/{derivative} (--derivatives {derivative} takes it)"] += 1

    def _read_derivative(self, derivative: str) -> None:
        """Read the subjects of a derivative, whether or not it has a dataset_description.json."""
        base = f"derivatives/{derivative}".rstrip("/")
        subjects, derived_subjects = {subject for subject, _ in self.keys}, self._subjects(base)
        for name in sorted(self.tree.names(base)):
            if self.tree.is_file(f"{base}/{name}"):
                self._add_text(name, base)
        for subject in derived_subjects:
            if subject in subjects:
                self._read_subject(f"{base}/{subject}", subject, derivative or "derivatives")
            elif self._options.wants_subject(subject):
                self._leave_out(f"{base}: subjects that the dataset does not have", f"{base}/{subject}")
        if not derived_subjects:
            self.left_out[f"{base}: has no folders sub-*"] += 1


def _check_exist(option: str, names: Sequence[str], prefix: str, existing: list[str]) -> None:
    paths = [name if name.startswith(prefix) else prefix + name for name in names]
    if unknown := [name for name in paths if name not in existing]:
        some = ", ".join(existing[:5]) + (", …" if len(existing) > 5 else "")
        raise SourceError(f"{option} names {unknown[0]}, which is not in the dataset.", hint=f"Choose from: {some}.")


def _session_and_datatype(inside: str) -> tuple[str | None, str]:
    """Return session and datatype of a path inside a subject's folder."""
    parts = inside.split("/")[:-1]
    session = parts.pop(0) if parts and parts[0].startswith("ses-") else None
    return session, parts[0] if parts else ""


def _recording_of(path: str) -> str | None:
    """Return the part of a path that is a recording's folder: one with a BIDS name below the datatype."""
    parts = path.rstrip("/").split("/")
    for depth, part in enumerate(parts[:-1] if not path.endswith("/") else parts):
        if part.startswith("sub-") and depth > 0 and parse_name(part) is not None:
            return "/".join(parts[: depth + 1])
    return None


def _empty_recordings(tree: Tree, recordings: set[str]) -> list[str]:
    """Return folders with the name of a recording and no files: a copy that failed."""
    empty = []
    for inside, names, _ in tree.walk(""):
        if inside and _recording_of(f"{inside}/") is not None:
            names.clear()
            continue
        for name in names:
            path = f"{inside}/{name}" if inside else name
            if _recording_of(f"{path}/") == path and path not in recordings:
                empty.append(path)
    return empty


def _ignore_rules(tree: Tree) -> Callable[[str], bool]:
    """Return a test for paths that .bidsignore excludes."""
    if not tree.is_file(".bidsignore"):
        return lambda path: False
    try:
        import pathspec
    except ModuleNotFoundError as error:
        raise missing(
            "neuro",
            "This dataset has a .bidsignore, and the library that reads it is not installed.",
            "pathspec",
            instead=". Or use --no-bidsignore.",
        ) from error
    with tree.text(".bidsignore", encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    return pathspec.GitIgnoreSpec.from_lines(lines).match_file


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

"""Find the files of a BIDS dataset: its subjects and sessions, their files, and the files that are left out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from brim.errors import SourceError
from brim.extras import missing
from brim.file_set import AbsentStat, Stat
from brim.options.groups import BidsOptions
from brim.records import dataclass
from brim.sources.features import kind_of
from brim.sources.file_table import Refused
from brim.sources.folder_tree import Tree, Walk, natural

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

    def sort_key(self) -> tuple[object, ...]:
        return tuple((entity, natural(value)) for entity, value in self.entities)


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
        walk = Walk.through(self.tree)
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
        walk = Walk(tree.root, keep_hidden=lambda prefix: _recording_of(prefix) is not None, tree=tree, keys=True)
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

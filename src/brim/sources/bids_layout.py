"""What is in a BIDS dataset: its subjects and sessions, their files, and what was left out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field

from brim.errors import SourceError
from brim.extras import missing
from brim.file_set import AbsentStat, Stat
from brim.options.groups import BidsOptions
from brim.records import dataclass
from brim.sources.features import kind_of
from brim.sources.file_table import Refused
from brim.sources.folder_tree import Tree, Walk, natural

_PART = re.compile(r"([A-Za-z0-9]+)-(.+)")
TEXT_EXTENSIONS = frozenset([".tsv", ".json", ".bval", ".bvec"])
LARGE_TABLES = frozenset(
    ["motion", "physio", "stim", "timeseries", "regressors"]
)  # recordings that happen to be tables: files, not texts


@dataclass(frozen=True, slots=True)
class Name:
    """Entities in the order of the name, the suffix, and everything from the first dot on."""

    entities: tuple[tuple[str, str], ...]
    suffix: str
    extension: str

    def get(self, entity: str) -> str | None:
        return dict(self.entities).get(entity)

    def within(self, other: Name) -> bool:
        """Whether all entities of this name are those of the other: it then applies to it."""
        return set(self.entities) <= set(other.entities)

    def sort_key(self) -> tuple[object, ...]:
        return tuple((entity, natural(value)) for entity, value in self.entities)


def is_text(name: Name) -> bool:
    """Whether a file is small text that travels as such."""
    return name.extension in TEXT_EXTENSIONS and not (name.extension == ".tsv" and name.suffix in LARGE_TABLES)


def parse_name(name: str) -> Name | None:
    """The parts of a file or folder name, or None if it is not a BIDS name."""
    stem, dot, rest = name.partition(".")
    *parts, suffix = stem.split("_")
    entities = []
    for part in parts:
        match = _PART.fullmatch(part)
        if match is None:
            return None
        entities.append((match[1], match[2]))
    if not suffix or "-" in suffix:
        return None
    return Name(tuple(entities), suffix, dot + rest)


def file_kind(name: Name) -> str:
    """What decodes a file: "nifti" only for plain images, so that CIFTI and its kin stay files."""
    kind = kind_of("x" + name.extension.lower())
    if kind == "nifti" and name.extension.lower() not in (".nii", ".nii.gz"):
        return "file"
    return kind


Ignored = Callable[[str], bool]
_ASIDE = ("sourcedata", "code", "stimuli", "derivatives", "phenotype")


@dataclass(frozen=True, slots=True)
class Item:
    """A file with a BIDS name, or a recording that is a folder (then `members` are its files)."""

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


@dataclass
class BidsLayout:
    """A dataset as it lies on disk or in a bucket. Paths are relative to the top of `tree`."""

    tree: Tree
    keys: list[tuple[str, str | None]] = field(default_factory=list)  # (subject, session) of the folders
    items: list[Item] = field(default_factory=list)
    shared: dict[str, list[tuple[Name, str]]] = field(default_factory=dict)  # text files by folder
    tables: dict[str, str] = field(default_factory=dict)  # scans.tsv and sessions.tsv by path
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)
    loops: list[str] = field(default_factory=list)

    def leave_out(self, why: str, path: str) -> None:
        self.left_out[why] += 1
        self.examples.setdefault(why, path)


def read_layout(tree: Tree, options: BidsOptions) -> BidsLayout:
    layout = BidsLayout(tree)
    ignored = _ignore_rules(tree) if options.bidsignore else _nothing
    subjects = [subject for subject in _subjects(tree, "", layout.refused) if not ignored(f"{subject}/")]
    if not subjects:
        raise SourceError(
            "This BIDS dataset has no subjects (folders named sub-*).",
            hint="For an atlas or template, use --recipe=files to package every file of the folder.",
            path=tree.root,
        )
    _read_top(layout, ignored)
    _check_asked("--subjects", options.subjects, "sub-", subjects)
    for subject in subjects:
        if options.wants_subject(subject):
            _read_subject(layout, subject, subject, options, ignored, "")
    if not layout.keys:
        raise SourceError(
            "No subject or session is left after --subjects and --sessions.", hint="Leave one of them out."
        )
    _check_asked("--sessions", options.sessions, "ses-", [session for _, session in layout.keys if session])
    _read_aside(layout, options, ignored)
    met = {item.name.suffix.lower() for item in layout.items}
    if unmet := [suffix for suffix in options.suffixes if suffix.lower() not in met]:
        raise SourceError(f"--suffixes names {unmet[0]!r}, which no file has.", hint="brim plan lists the suffixes.")
    _add_keys(layout, subjects)
    return layout


def _read_top(layout: BidsLayout, ignored: Ignored) -> None:
    """Files beside the subjects: texts that apply to all of them; links that lead nowhere are refused."""
    walk = Walk.through(layout.tree)
    for name in sorted(layout.tree.names("")):
        if name.startswith(".") or name.startswith("sub-") or ignored(name):
            continue
        if layout.tree.is_folder(name):
            if name not in _ASIDE:
                layout.left_out[f"the folder {name}/"] += 1
        elif walk.find(name, name) is not None:
            _add_text(layout, name, "")
    layout.refused += walk.refused


def _add_keys(layout: BidsLayout, subjects: list[str]) -> None:
    """Rows for sessions (or none) that only a derivative has."""
    order = {subject: number for number, subject in enumerate(subjects)}
    extra = {(item.subject, item.session) for item in layout.items} - set(layout.keys)
    if extra:
        keys = [*layout.keys, *extra]
        layout.keys = sorted(keys, key=lambda k: (order[k[0]], k[1] is not None, natural(k[1] or "")))


def _check_asked(option: str, names: Sequence[str], prefix: str, there: list[str]) -> None:
    """Every name that was asked for must be there."""
    asked = [name if name.startswith(prefix) else prefix + name for name in names]
    if unknown := [name for name in asked if name not in there]:
        some = ", ".join(there[:5]) + (", …" if len(there) > 5 else "")
        raise SourceError(f"{option} names {unknown[0]}, which is not in the dataset.", hint=f"Choose from: {some}.")


def _subjects(tree: Tree, folder: str, refused: list[Refused] | None = None) -> list[str]:
    names = []
    for name in tree.names(folder):
        if name.startswith("sub-") and tree.is_folder(f"{folder}/{name}" if folder else name):
            if name.encode("utf-8", "replace").decode() == name:
                names.append(name)
            elif refused is not None:
                refused.append(Refused("name", name.encode("utf-8", "backslashreplace").decode()))
    return sorted(names, key=natural)


def _read_subject(
    layout: BidsLayout, folder: str, subject: str, options: BidsOptions, ignored: Ignored, derivative: str
) -> None:
    """Everything below a subject's folder, which may be that of a derivative."""
    tree = layout.tree.below(folder)
    walk = Walk(tree.root, keep_hidden=lambda prefix: _bundle_of(prefix) is not None, tree=tree, keys=True)
    bundles: dict[str, list[tuple[str, str, Stat]]] = {}
    sessions = {name for name in tree.names("") if name.startswith("ses-") and tree.is_folder(name)}
    found: set[str | None] = set(sessions)
    for inside, stat in walk:
        path = f"{folder}/{inside}"
        if ignored(path):
            layout.leave_out("ignored by .bidsignore", path)
            continue
        session, datatype = _place(inside)
        if not options.wants_session(session) and inside.count("/") > 0:
            continue
        bundle = _bundle_of(inside)
        if isinstance(stat, AbsentStat) and (bundle is not None or _is_read(inside)):
            walk.refused.append(Refused("annex", inside))  # its content is needed at once
            continue
        if bundle is not None:
            name_inside = inside[len(bundle) + 1 :]
            bundles.setdefault(bundle, []).append((name_inside, path, stat))
            continue
        name = parse_name(inside.rsplit("/", 1)[-1])
        if name is None or name.get("sub") is None:
            layout.leave_out("not a BIDS name", path)
            continue
        item = Item(path, name, subject, session, datatype, stat, None, derivative)
        _add_file(layout, item, options, found)
    for inside, members in bundles.items():
        name = parse_name(inside.rsplit("/", 1)[-1])
        if name is not None:
            session, datatype = _place(inside)
            item = Item(f"{folder}/{inside}/", name, subject, session, datatype, None, tuple(members), derivative)
            _add(layout, item, options, found)
    for empty in _empty_recordings(tree, set(bundles)):
        walk.refused.append(Refused("empty", f"{empty}/"))
    for refused in walk.refused:
        if ignored(f"{folder}/{refused.path}"):
            layout.leave_out("ignored by .bidsignore", f"{folder}/{refused.path}")
        elif options.wants_session(_place(refused.path)[0]):
            _add_refused(layout, folder, refused, options)
    layout.loops += [f"{folder}/{loop}" for loop in walk.loops]
    if not derivative:
        _add_rows(layout, subject, sessions, found, options)


def _add_file(layout: BidsLayout, item: Item, options: BidsOptions, found: set[str | None]) -> None:
    """A table of the dataset, a text that others inherit, or a file of its own; some are two of these."""
    name = item.name
    if name.suffix in ("scans", "sessions") and name.extension in (".tsv", ".json"):
        layout.tables[item.path] = name.suffix
        return
    text = name.extension in TEXT_EXTENSIONS
    if text:
        folder, _, base = item.path.rpartition("/")
        _add_text(layout, base, folder)
    if not text or item.datatype or name.extension == ".tsv":
        _add(layout, item, options, found)


def _add_rows(
    layout: BidsLayout, subject: str, sessions: set[str], found: set[str | None], options: BidsOptions
) -> None:
    """The rows that a subject has."""
    keys = sorted((s for s in found if s is not None), key=natural)
    wanted: list[str | None] = [s for s in keys if options.wants_session(s)]
    if (None in found or not sessions) and not options.sessions:
        wanted.insert(0, None)
    layout.keys += [(subject, session) for session in wanted]


def _is_read(inside: str) -> bool:
    """Whether a file is one whose text is read: a sidecar or a table."""
    name = parse_name(inside.rsplit("/", 1)[-1])
    return name is not None and name.extension in TEXT_EXTENSIONS


def _empty_recordings(tree: Tree, bundles: set[str]) -> list[str]:
    """Folders with a recording's name and nothing inside: a copy that failed."""
    found = []
    for inside, names, _ in tree.walk(""):
        if inside and _bundle_of(f"{inside}/") is not None:
            names.clear()
            continue
        for name in names:
            path = f"{inside}/{name}" if inside else name
            if _bundle_of(f"{path}/") == path and path not in bundles:
                found.append(path)
    return found


def _add_refused(layout: BidsLayout, folder: str, refused: Refused, options: BidsOptions) -> None:
    name = parse_name(refused.path.rstrip("/").rsplit("/", 1)[-1])
    if name is None or options.wants_suffix(name.suffix):
        layout.refused.append(Refused(refused.reason, f"{folder}/{refused.path}"))


def _add(layout: BidsLayout, item: Item, options: BidsOptions, found: set[str | None]) -> None:
    if not options.wants_suffix(item.name.suffix):
        if not options.suffixes:
            layout.leave_out(f"_{item.name.suffix} (--suffixes {item.name.suffix} takes them)", item.path)
        return
    found.add(item.session)
    layout.items.append(item)


def _add_text(layout: BidsLayout, filename: str, folder: str) -> None:
    """A text file that may apply to images at its level and below."""
    name = parse_name(filename)
    if name is not None and name.extension in TEXT_EXTENSIONS:
        layout.shared.setdefault(folder, []).append((name, f"{folder}/{filename}" if folder else filename))


def _place(inside: str) -> tuple[str | None, str]:
    """(session, datatype) of a path inside a subject's folder."""
    parts = inside.split("/")[:-1]
    session = parts.pop(0) if parts and parts[0].startswith("ses-") else None
    return session, parts[0] if parts else ""


def _bundle_of(path: str) -> str | None:
    """The part of a path that is a recording's folder: one with a BIDS name below the datatype."""
    parts = path.rstrip("/").split("/")
    for depth, part in enumerate(parts[:-1] if not path.endswith("/") else parts):
        if part.startswith("sub-") and depth > 0 and parse_name(part) is not None:
            return "/".join(parts[: depth + 1])
    return None


def _read_aside(layout: BidsLayout, options: BidsOptions, ignored: Ignored) -> None:
    """Folders beside the subjects: derivatives if asked for; the others are said to be left out."""
    asked = [("phenotype", options.phenotype), ("derivatives", bool(options.derivatives))]
    for name, wanted in asked:
        if wanted and not layout.tree.is_folder(name):
            raise SourceError(f"This dataset has no folder {name}/.", hint=f"Leave out --{name}.")
    for name in _ASIDE:
        if not layout.tree.is_folder(name) or (name == "phenotype" and options.phenotype):
            continue
        if name != "derivatives":
            layout.left_out[f"{name}/"] += 1
            continue
        if _subjects(layout.tree, name):  # derivatives without a pipeline's name
            if "all" in options.derivatives:
                _read_derivative(layout, "", options, ignored)
            else:
                layout.left_out["derivatives/sub-* (--derivatives all takes them)"] += 1
        shown = [inside for inside in layout.tree.names(name) if not inside.startswith((".", "sub-"))]
        present = sorted(inside for inside in shown if layout.tree.is_folder(f"{name}/{inside}"))
        unknown = set(options.derivatives) - set(present) - {"all"}
        if unknown:
            raise SourceError(
                f"This dataset has no folder derivatives/{min(unknown)}.",
                hint=f"Its derivatives are: {', '.join(present) or 'none'}.",
            )
        for derivative in present:
            if derivative in options.derivatives or "all" in options.derivatives:
                _read_derivative(layout, derivative, options, ignored)
            else:
                layout.left_out[f"derivatives/{derivative} (--derivatives {derivative} takes it)"] += 1


def _read_derivative(layout: BidsLayout, derivative: str, options: BidsOptions, ignored: Ignored) -> None:
    """A derivative's subjects, whether or not it has a dataset_description.json."""
    base = f"derivatives/{derivative}".rstrip("/")
    subjects = {subject for subject, _ in layout.keys}
    there = _subjects(layout.tree, base)
    for name in sorted(layout.tree.names(base)):
        if layout.tree.is_file(f"{base}/{name}"):
            _add_text(layout, name, base)
    for subject in there:
        if subject in subjects:
            _read_subject(layout, f"{base}/{subject}", subject, options, ignored, derivative or "derivatives")
        elif options.wants_subject(subject):
            layout.leave_out(f"{base}: subjects that the dataset does not have", f"{base}/{subject}")
    if not there:
        layout.left_out[f"{base}: has no folders sub-*"] += 1


def _nothing(_path: str) -> bool:
    return False


def _ignore_rules(tree: Tree) -> Ignored:
    """A test for paths that .bidsignore excludes."""
    if not tree.is_file(".bidsignore"):
        return _nothing
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

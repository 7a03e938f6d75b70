"""Find the files of a source of rows: by path, glob, folder, or a list of those, all of one format.

They are local, or remote files of one listing. Remote names, their order and ignored files are those of the same files
in a folder, so that a job that was begun from a copy continues from the bucket.

Names are relative to the source, and kept in columns, not as one object each: a folder may hold millions.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import itertools
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field, replace
from typing import Any

from brim.compute.rows.open_files import AnyFile, as_option, located
from brim.compute.rows.unit import Kind, Span
from brim.errors import InputError, SourceError
from brim.file_set import FileSet, FileSetBuilder, Stat
from brim.options.groups import InputOptions
from brim.records import dataclass
from brim.sources.dataset_files import DatasetFiles, find_files
from brim.sources.folder_tree import LocalTree, Tree, Walk
from brim.sources.remote_tree import ObjectTree
from brim.state.atomic_files import reason
from brim.storage.listing import stat_file
from brim.storage.location import Access, Location, folder_location, is_dataset_address, is_remote, parse_location

LEAST_UNIT_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class RowOptions(InputOptions):
    """How a source is read and cut. Options that may decide the rows are part of the fingerprint.

    `name` and `code` are only part of it for iterators; `access` and `leave_out_unreadable` (decided by the job's
    `on_error`) never are.
    """

    as_text: tuple[str, ...] = ()  # columns of CSV that are read as text
    json_columns: tuple[str, ...] = ()  # columns of JSONL and of dicts that are read as JSON texts
    other_columns: tuple[str, ...] | None = None  # of JSONL with json_columns: the only other columns that are read
    least_unit_bytes: int = LEAST_UNIT_BYTES
    name: str | None = None  # of an iterator
    code: str | None = None  # digest of the function that makes the iterator
    access: Access = field(default_factory=Access)  # to the object store of the source
    leave_out_unreadable: bool = False  # rows of text that cannot be read, instead of an error

    @property
    def facts(self) -> dict[str, Any]:
        """The fingerprint inputs that are not the default, under the keys that ledgers have, as JSON returns them."""
        values: dict[str, Any] = {
            "format": self.input_format,
            "text": None if self.text == "lines" else self.text,
            "columns": list(self.columns),
            "delimiter": self.delimiter,
            "as_text": list(self.as_text),
            "json_columns": list(self.json_columns),
            "limit": self.limit,
            "split": self.from_split,
            "config": self.from_config,
            "where": self.where,
            "unit_bytes": self.unit_bytes,
            "least_unit_bytes": None if self.least_unit_bytes == LEAST_UNIT_BYTES else self.least_unit_bytes,
        }
        return {name: value for name, value in values.items() if value not in (None, [])}


Skip = Callable[[int], bool]


def never(number: int) -> bool:
    """Skip no unit."""
    return False


_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".txt": "text",
    ".md": "text",
}
_CODECS = {".gz": "gzip", ".zst": "zstd"}
# A README with the data is not data.
COMPANIONS = re.compile(r"(readme|licen[cs]e|changelog|citation)(\.\w+)?|dataset_(infos?|dict)\.json|state\.json", re.I)
WILD = re.compile(r"[*?[]")


def split_name(name: str) -> tuple[str | None, str | None]:
    """Return the format and the compression of a file by its name."""
    lower = name.lower()
    codec = next((codec for end, codec in _CODECS.items() if lower.endswith(end)), None)
    stem = lower.rsplit(".", 1)[0] if codec else lower
    return _FORMATS.get(os.path.splitext(stem)[1]), codec


def endings() -> str:
    return ", ".join(_FORMATS) + " (text also with .gz or .zst)"


def pick(splits: list[str], name: str | None, folder: str) -> str:
    """Return the split of a saved dataset with a name, or its only one."""
    listed = f"It has: {', '.join(splits) or 'none'}."
    if name is None:
        if len(splits) == 1:
            return splits[0]
        raise InputError(
            f"{os.path.basename(folder)!r} has several splits.", hint=f"{listed} Name one with --from-split."
        )
    if name not in splits:
        raise InputError(f"{os.path.basename(folder)!r} has no split {name!r}.", hint=listed)
    return name


def arrow_files_of_cache(names: Iterable[str], splits: list[str], split: str | None, folder: str) -> list[str]:
    """Return the files that `load_dataset` prepared, without those of later calls of map."""
    files = [name for name in sorted(names) if name.endswith(".arrow") and not name.startswith("cache-")]
    if splits or split is not None:
        split = pick(splits, split, folder)
        files = [name for name in files if re.search(rf"-{re.escape(split)}(-\d+-of-\d+)?\.arrow$", name)]
    return files


@dataclass(frozen=True, slots=True)
class RowFiles:
    """Files of one format, in order. `delimiter` is that of CSV. `empty` are names of skipped empty files."""

    files: FileSet
    kind: Kind
    codec: str | None
    delimiter: str = ","
    empty: tuple[str, ...] = ()

    def digest(self) -> str:
        """Return a digest of names and sizes."""
        digest = hashlib.sha256()
        for name, size in zip(self.files.paths, self.files.sizes.tolist(), strict=True):
            digest.update(f"{name.as_py()}\0{size}\0".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def shown(self, number: int) -> str:
        return str(self.files.paths[number].as_py())

    def full(self, number: int) -> str:
        return self.files.full_path(number)

    def version(self, number: int) -> tuple[int, str] | None:
        """Return the size and the version of a remote file."""
        if self.files.etags is None:
            return None
        return int(self.files.sizes[number]), str(self.files.etags[number].as_py())

    def file(self, number: int) -> AnyFile:
        """Return a file to open."""
        span = Span(self.full(number), self.kind, 0, 0, self.version(number))
        return located(span, self.shown(number), self.options)

    @property
    def options(self) -> dict[str, Any]:
        """Return the access to remote files, for a Reading."""
        return {} if self.files.bucket is None else {"access": as_option(self.files.bucket.access)}


def find(sources: list[str], options: RowOptions) -> RowFiles:
    """Return the files that these paths, globs and folders lead to."""
    if not sources:
        raise InputError("The list of sources is empty.", hint="Give a file, a folder or a glob.")
    remote = [is_remote(source) for source in sources]
    if any(remote) and not all(remote):
        raise InputError("The sources are partly in a bucket and partly on this machine.", hint="Take one at a time.")
    resolved = [_resolve_remote(source, options) if all(remote) else _resolve(source, options) for source in sources]
    base = _common_root([root for root, _ in resolved])
    builder = FileSetBuilder(str(base), None if base.is_local else base)
    kinds: dict[tuple[str | None, str | None], str] = {}
    empty: list[str] = []
    for (root, files), source in zip(resolved, sources, strict=True):
        before, empty_before = len(builder), len(empty)
        for name, info in files:
            path = name if root == base else base.name_of(root.key(name))
            if info.st_size == 0 and not (options.text == "document" and split_name(path)[0] == "text"):
                empty.append(path)
                continue
            format, codec = split_name(path)
            kinds.setdefault((options.input_format or format, codec), path)
            builder.add(path, info)
        if len(builder) == before:
            if len(empty) > empty_before:
                path = empty[empty_before]
                raise InputError(f"{path!r} is empty.", hint="Remove it, or leave it out.", path=path)
            kind = options.input_format
            looked_for = f"files of the format {kind}" if kind else f"files that end in {endings()}"
            raise InputError(f"Nothing was found at {source!r}. brim looked for {looked_for}.", hint="Check the path.")
    return replace(_of_one_kind(builder.finish(), kinds, options), empty=tuple(empty))


Resolved = tuple[Location, Iterator[tuple[str, Stat]]]  # a folder, and files below it


def _common_root(roots: Sequence[Location]) -> Location:
    if any((root.scheme, root.container) != (roots[0].scheme, roots[0].container) for root in roots):
        raise InputError("The sources are in several buckets.", hint="Take one at a time.")
    parts = zip(*(root.prefix.split("/") for root in roots), strict=False)
    shared = "/".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, parts))
    return replace(roots[0], prefix=shared or "/" if roots[0].is_local else shared)


def _of_one_kind(files: FileSet, kinds: dict[tuple[str | None, str | None], str], options: RowOptions) -> RowFiles:
    formats = {format: name for (format, _), name in kinds.items()}
    codecs = {codec: name for (_, codec), name in kinds.items()}
    if None in formats:
        raise InputError(
            f"{formats[None]!r} has a name without a known suffix.",
            hint=f"brim reads files that end in {endings()}; --input-format sets the format of others.",
        )
    for trait, several in (("formats", formats), ("compressions", codecs)):
        if len(several) > 1:
            first, second = list(several.values())[:2]
            raise InputError(
                f"The source has files of different {trait}: {first!r} and {second!r}.",
                hint="Read one kind at a time: use a glob like 'folder/*.jsonl', or --input-format.",
            )
    (format,), (codec,) = formats, codecs
    for option, is_set, its_formats in (
        ("delimiter", options.delimiter is not None, ("csv", "tsv")),
        ("text=document", options.text == "document", ("text",)),
    ):
        if is_set and format not in its_formats:
            raise InputError(
                f"--{option} can only be used with {' and '.join(its_formats)}, and the source is {format}."
            )
    delimiter = options.delimiter or ("\t" if format == "tsv" else ",")
    kind: Any = {"tsv": "csv", "text": "lines" if options.text == "lines" else "document"}.get(str(format), format)
    if codec and kind in ("parquet", "arrow"):
        raise InputError(
            f"{next(iter(formats.values()))!r} is compressed as a file, although its format has its own compression.",
            hint="Decompress it first.",
        )
    return RowFiles(files, kind, codec, delimiter)


def _resolve(source: str, options: RowOptions) -> Resolved:
    """Return the files that a local path, folder or glob leads to."""
    if "://" in source:
        raise InputError(
            f"{source!r} is not a local path.", hint="Use a file, a folder, a glob, or s3://BUCKET/PREFIX."
        )
    path = os.path.abspath(source)
    if os.path.isdir(path):
        return _in_folder(LocalTree(path), options, source)
    wild = WILD.search(path)
    if _names_part(options) and (os.path.exists(path) or wild):
        return _shards(source, options)
    if os.path.exists(path):
        return folder_location(os.path.dirname(path)), iter([(os.path.basename(path), _stat(path))])
    if not wild:
        hint = "Standard input is not read: give a file" if source == "-" else "Give a file"
        raise InputError(f"The source {source!r} does not exist.", hint=f"{hint}, a folder or a glob.")
    root = os.path.dirname(path[: wild.start()])
    names = sorted(os.path.relpath(match, root) for match in glob.iglob(path, recursive=True))
    files = ((name, _stat(os.path.join(root, name))) for name in names)
    return folder_location(root), ((name, info) for name, info in files if stat.S_ISREG(info.st_mode))


def _resolve_remote(source: str, options: RowOptions) -> Resolved:
    """Return the files that the address of a file, a prefix or a glob leads to."""
    location = parse_location(source, options.access)
    if is_dataset_address(source) and options.input_format in (None, "parquet"):
        # The Parquet files of a config and split, if it has any; other formats are found as in a bucket.
        try:
            dataset = find_files(source, options.from_config, options.from_split)
        except SourceError:
            dataset = None
        if dataset is not None and dataset.format == ".parquet":
            splits = list(dict.fromkeys(file.split for file in dataset.files))
            if options.from_split is None and len(splits) > 1:
                hint = f"Name one with --from-split: {', '.join(splits)}."
                raise InputError(f"{source!r} has several splits.", hint=hint)
            return _files_of(dataset)
    own = None if source.endswith("/") else stat_file(location)
    wild = WILD.search(location.prefix)
    single = [] if own is None else [(location.prefix.rpartition("/")[2], own)]
    if own is not None and own.st_size:
        return _shards(source, options) if _names_part(options) else (location.parent, iter(single))
    tree = ObjectTree.listed(location)
    if len(tree):  # a folder, also one that has a * in its name or an empty object for its mark
        return _in_folder(tree, options, source)
    if _names_part(options) and (single or wild):
        return _shards(source, options)
    if single:
        return location.parent, iter(single)
    if wild is None:
        raise InputError(
            f"There is nothing at {source!r}.", hint="Give an object, a prefix (a folder) or a glob of objects."
        )
    root = replace(location, prefix=location.prefix[: wild.start()].rpartition("/")[0])
    pattern = root.name_of(location.prefix)
    parts = [None if part == "**" else _Part.parse(part) for part in pattern.split("/")]
    tree = ObjectTree.listed(root)
    names = (f"{top}/{name}" if top else name for top, _, files in tree.walk("") for name in files)
    fitting = sorted(name for name in names if _fits(name.split("/"), parts))
    return root, ((name, _stat_in(tree, name)) for name in fitting)


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise InputError(f"{os.path.basename(path)!r} cannot be read: {reason(error)}.", path=path) from error


def _names_part(options: RowOptions) -> bool:
    return options.from_split is not None or options.from_config is not None


def _shards(source: str, options: RowOptions) -> Resolved:
    """Return the files of the chosen config and split of a dataset of Parquet files."""
    option, why = "config" if options.from_split is None else "split", f"{source!r} is {options.input_format}"
    if options.input_format in (None, "parquet"):
        try:
            dataset = find_files(source, options.from_config, options.from_split, options.access)
            if dataset.format == ".parquet":
                return _files_of(dataset)
            why = f"{source!r} holds tars"
        except SourceError as error:
            why = error.words[0].rstrip(".")
    raise InputError(
        f"--from-{option} can only be used with a dataset of Parquet files or one that `datasets` saved, and {why}.",
        hint="Leave it out, and name the files, with a glob if there are many.",
    )


def _files_of(dataset: DatasetFiles) -> Resolved:
    first = dataset.files[0]
    local_root = first.path.removesuffix(f"/{first.shown}")
    root = folder_location(local_root) if first.remote is None else first.remote.location
    return root, ((file.shown, file.stat) for file in dataset.files)


def _in_folder(top: Tree, options: RowOptions, source: str) -> Resolved:
    """Return the files of a folder: those of a dataset that `datasets` saved or prepared, else all files of rows."""
    tree, split = top, options.from_split
    if options.from_config and tree.is_folder(options.from_config):
        tree = tree.below(options.from_config)
    if tree.is_file("dataset_dict.json"):
        splits = _read_json(tree, "dataset_dict.json").get("splits", [])
        tree, split = tree.below(pick(splits, split, tree.root)), None
    root = tree.bucket or folder_location(tree.root)
    if not tree.is_file("dataset_info.json"):
        if split is not None or (options.from_config is not None and tree is top):
            return _shards(source, options)
        return root, _walk(tree, options)
    if tree.is_file("state.json"):
        state = _read_json(tree, "state.json")
        if split is not None:  # one Dataset that was saved is of one split, or of none
            pick([state["_split"]] if state.get("_split") else [], split, tree.root)
        names = [str(file["filename"]) for file in state.get("_data_files", [])]
    else:
        splits = list(_read_json(tree, "dataset_info.json").get("splits") or {})
        names = arrow_files_of_cache(tree.names(""), splits, options.from_split, tree.root)
    return root, iter([(name, _stat_in(tree, name)) for name in names])


def _stat_in(tree: Tree, name: str) -> Stat:
    if tree.bucket is None:
        return _stat(os.path.join(tree.root, name))
    try:
        return tree.stat(name)
    except OSError as error:
        raise InputError(f"{name!r} of the saved dataset is not at {tree.root}.", path=name) from error


def _read_json(tree: Tree, name: str) -> dict[str, Any]:
    try:
        with tree.text(name, encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{name!r} of the saved dataset cannot be read: {error}.") from error


def _walk(tree: Tree, options: RowOptions) -> Iterator[tuple[str, Stat]]:
    """Yield files of known formats, or of the chosen one. A README with the data is not data."""
    walk = Walk(tree)
    for path, info in walk:
        format = split_name(path)[0]
        if format is None or (options.input_format is not None and format != options.input_format):
            continue
        if not COMPANIONS.fullmatch(path.rsplit("/", 1)[-1]):
            yield path, info
    if walk.refused:
        first = walk.refused[0]
        raise InputError(f"{first.path!r} cannot be read ({first.reason}).", hint="Fix or remove it.", path=first.path)


@dataclass(frozen=True, slots=True)
class _Part:
    """One name of a glob."""

    expression: re.Pattern[str]
    hidden: bool

    @classmethod
    def parse(cls, pattern: str) -> _Part:
        return cls(re.compile(fnmatch.translate(pattern)), pattern.startswith("."))

    def fits(self, name: str) -> bool:
        return (self.hidden or not name.startswith(".")) and self.expression.match(name) is not None


def _fits(names: list[str], parts: list[_Part | None]) -> bool:
    if not parts:
        return not names
    part, following = parts[0], parts[1:]
    if part is not None:
        return bool(names) and part.fits(names[0]) and _fits(names[1:], following)
    if not following:
        return not any(name.startswith(".") for name in names)
    for number in range(len(names)):
        if _fits(names[number:], following):
            return True
        if names[number].startswith("."):
            return False
    return False

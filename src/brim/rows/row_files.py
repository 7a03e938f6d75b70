"""The files of a source of rows: by path, glob, folder, or a list of those, and what kind they all are.

They are on this machine, or objects of a bucket, which one listing finds. There, names, their order and what is passed
over are those of the same files in a folder, so that a job that was begun from a copy goes on from the bucket.

Names are kept relative to what was given, in columns and not as an object each: a folder may hold millions.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from brim.buckets.bucket_address import (
    BucketAddress,
    is_bucket_address,
    is_web_address,
    parse_bucket_address,
    parse_web_address,
)
from brim.buckets.listing import ObjectStat, list_objects, read_small, stat_object
from brim.errors import InputError, SourceError
from brim.file_set import FileSet, FileSetBuilder, Stat
from brim.records import dataclass
from brim.rows.open_files import AnyFile, as_option, located
from brim.rows.row_options import RowOptions
from brim.rows.unit import Kind, Span
from brim.sources.dataset_files import DatasetFiles, find_files
from brim.sources.folder_tree import IGNORED, Walk
from brim.state.durable import reason

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
# A README beside the data is not data.
COMPANIONS = re.compile(r"(readme|licen[cs]e|changelog|citation)(\.\w+)?|dataset_(infos?|dict)\.json|state\.json", re.I)
WILD = re.compile(r"[*?[]")


def split_name(name: str) -> tuple[str | None, str | None]:
    """The format and the compression that a name tells."""
    lower = name.lower()
    codec = next((codec for end, codec in _CODECS.items() if lower.endswith(end)), None)
    stem = lower.rsplit(".", 1)[0] if codec else lower
    return _FORMATS.get(os.path.splitext(stem)[1]), codec


def endings() -> str:
    return ", ".join(_FORMATS) + " (text also with .gz or .zst)"


def pick(splits: list[str], wanted: str | None, folder: str) -> str:
    """The split of a saved dataset that is meant."""
    listed = f"It has: {', '.join(splits) or 'none'}."
    if wanted is None:
        if len(splits) == 1:
            return splits[0]
        raise InputError(
            f"{os.path.basename(folder)!r} has several splits.", hint=f"{listed} Name one with --from-split."
        )
    if wanted not in splits:
        raise InputError(f"{os.path.basename(folder)!r} has no split {wanted!r}.", hint=listed)
    return wanted


def arrow_files_of_cache(names: Iterable[str], splits: list[str], wanted: str | None, folder: str) -> list[str]:
    """The files that `load_dataset` prepared, without those that later calls of map left beside them."""
    found = [name for name in sorted(names) if name.endswith(".arrow") and not name.startswith("cache-")]
    if splits or wanted is not None:
        split = pick(splits, wanted, folder)
        found = [name for name in found if re.search(rf"-{re.escape(split)}(-\d+-of-\d+)?\.arrow$", name)]
    return found


@dataclass(frozen=True, slots=True)
class RowFiles:
    """Files of one kind, in order. `delimiter` is that of CSV. `empty` are names of files without a byte, left out."""

    files: FileSet
    kind: Kind
    codec: str | None
    delimiter: str = ","
    empty: tuple[str, ...] = ()

    def digest(self) -> str:
        """Of names and sizes."""
        digest = hashlib.sha256()
        for name, size in zip(self.files.paths, self.files.sizes.tolist(), strict=True):
            digest.update(f"{name.as_py()}\0{size}\0".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def shown(self, number: int) -> str:
        return str(self.files.paths[number].as_py())

    def full(self, number: int) -> str:
        return self.files.full_path(number)

    def version(self, number: int) -> tuple[int, str] | None:
        """Of an object: its size and ETag."""
        if self.files.etags is None:
            return None
        return int(self.files.sizes[number]), str(self.files.etags[number].as_py())

    def file(self, number: int) -> AnyFile:
        """What can be opened."""
        span = Span(self.full(number), self.kind, 0, 0, self.version(number))
        return located(span, self.shown(number), self.options)

    @property
    def options(self) -> dict[str, Any]:
        """How objects are reached, for a Reading."""
        return {} if self.files.bucket is None else {"access": as_option(self.files.bucket.access)}


def find(sources: list[str], options: RowOptions) -> RowFiles:
    """The files that these paths, globs and folders lead to."""
    if not sources:
        raise InputError("The list of sources is empty.", hint="Give a file, a folder or a glob.")
    remote = [is_bucket_address(source) or is_web_address(source) for source in sources]
    if any(remote) and not all(remote):
        raise InputError("The sources are partly in a bucket and partly on this machine.", hint="Take one at a time.")
    if all(remote):
        resolved = [resolve_objects(source, options) for source in sources]
        bucket = common_root([one.root for one in resolved])
        places: list[Iterator[tuple[str, Stat]]] = [one.below(bucket) for one in resolved]
        builder = FileSetBuilder(str(bucket), bucket)
    else:
        local = [_resolve(source, options) for source in sources]
        base = os.path.commonpath([root for root, _ in local])
        places = [_below(root, paths, base) for root, paths in local]
        builder = FileSetBuilder(base)
    kinds: dict[tuple[str | None, str | None], str] = {}
    empty: list[str] = []
    for paths, source in zip(places, sources, strict=True):
        before, empty_before = len(builder), len(empty)
        for path, found in paths:
            if found.st_size == 0 and not (options.text == "document" and split_name(path)[0] == "text"):
                empty.append(path)
                continue
            format, codec = split_name(path)
            kinds.setdefault((options.format or format, codec), path)
            builder.add(path, found)
        if len(builder) == before:
            if len(empty) > empty_before:
                path = empty[empty_before]
                raise InputError(f"{path!r} is empty.", hint="Remove it, or leave it out.", path=path)
            wanted = f"files of the format {options.format}" if options.format else f"files that end in {endings()}"
            raise InputError(f"Nothing was found at {source!r}. brim looked for {wanted}.", hint="Check the path.")
    return replace(_of_one_kind(builder.finish(), kinds, options), empty=tuple(empty))


def _below(root: str, paths: Iterator[tuple[str, Stat]], base: str) -> Iterator[tuple[str, Stat]]:
    for path, found in paths:
        yield os.path.relpath(os.path.join(root, path), base) if root != base else path, found


def _of_one_kind(files: FileSet, kinds: dict[tuple[str | None, str | None], str], options: RowOptions) -> RowFiles:
    formats = {format: name for (format, _), name in kinds.items()}
    codecs = {codec: name for (_, codec), name in kinds.items()}
    if None in formats:
        raise InputError(
            f"{formats[None]!r} has a name that does not tell what it is.",
            hint=f"brim reads files that end in {endings()}; --input-format says what others are.",
        )
    for what, several in (("formats", formats), ("compressions", codecs)):
        if len(several) > 1:
            first, second = list(several.values())[:2]
            raise InputError(
                f"The source holds files of different {what}: {first!r} and {second!r}.",
                hint="Take one kind at a time: give a glob like 'folder/*.jsonl', or --input-format.",
            )
    (format,), (codec,) = formats, codecs
    for option, said, those in (
        ("delimiter", options.delimiter is not None, ("csv", "tsv")),
        ("text=document", options.text == "document", ("text",)),
    ):
        if said and format not in those:
            raise InputError(f"--{option} is for {' and '.join(those)}, and the source is {format}.")
    delimiter = options.delimiter or ("\t" if format == "tsv" else ",")
    kind: Any = {"tsv": "csv", "text": "lines" if options.text == "lines" else "document"}.get(str(format), format)
    if codec and kind in ("parquet", "arrow"):
        raise InputError(f"{next(iter(formats.values()))!r} is compressed as a whole.", hint="Decompress it first.")
    return RowFiles(files, kind, codec, delimiter)


def _resolve(source: str, options: RowOptions) -> tuple[str, Iterator[tuple[str, Stat]]]:
    """The folder that names start from, and the files with their names."""
    if "://" in source:
        raise InputError(
            f"{source!r} is not a local path.", hint="Give a file, a folder, a glob, or s3://BUCKET/PREFIX."
        )
    path = os.path.abspath(source)
    if os.path.isdir(path):
        return _in_folder(path, options)
    if _names_part(options) and (os.path.exists(path) or WILD.search(source)):
        return _shards_here(source, options)
    if os.path.exists(path):
        return os.path.dirname(path), iter([(os.path.basename(path), _stat(path))])
    if not WILD.search(source):
        hint = "Standard input is not read: give a file" if source == "-" else "Give a file"
        raise InputError(f"The source {source!r} does not exist.", hint=f"{hint}, a folder or a glob.")
    fixed = path[: WILD.search(path).start()]  # type: ignore[union-attr]
    root = os.path.dirname(fixed)
    names = sorted(os.path.relpath(match, root) for match in glob.iglob(path, recursive=True))
    return root, ((name, found) for name in names if stat.S_ISREG((found := _stat(os.path.join(root, name))).st_mode))


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise InputError(f"{os.path.basename(path)!r} cannot be read: {reason(error)}.", path=path) from error


def _names_part(options: RowOptions) -> bool:
    return options.split is not None or options.config is not None


def _shards(source: str, options: RowOptions) -> DatasetFiles:
    """The files of the config and split that are asked for, as a dataset of Parquet files tells them."""
    what, why = "config" if options.split is None else "split", f"{source!r} is {options.format}"
    if options.format in (None, "parquet"):
        try:
            found = find_files(source, options.config, options.split, options.access)
            if found.format == ".parquet":
                return found
            why = f"{source!r} holds tars"
        except SourceError as error:
            why = error.words[0].rstrip(".")
    raise InputError(
        f"--from-{what} is for a dataset of Parquet files or one that `datasets` saved, and {why}.",
        hint="Leave it out, and name the files that are meant, by a glob if they are many.",
    )


def _shards_here(source: str, options: RowOptions) -> tuple[str, Iterator[tuple[str, Stat]]]:
    files = _shards(source, options).files
    return files[0].path.removesuffix(f"/{files[0].shown}"), ((file.shown, file.stat) for file in files)


def _in_folder(folder: str, options: RowOptions) -> tuple[str, Iterator[tuple[str, Stat]]]:
    whole, split = folder, options.split
    if options.config and os.path.isdir(os.path.join(folder, options.config)):
        folder = os.path.join(folder, options.config)
    if os.path.exists(os.path.join(folder, "dataset_dict.json")):
        splits = _read_json(folder, "dataset_dict.json").get("splits", [])
        folder, split = os.path.join(folder, pick(splits, split, folder)), None
    if os.path.exists(os.path.join(folder, "state.json")) and os.path.exists(os.path.join(folder, "dataset_info.json")):
        state = _read_json(folder, "state.json")
        _refuse_other_split(state, split, folder)
        names = [str(file["filename"]) for file in state.get("_data_files", [])]
        return folder, ((name, _stat(os.path.join(folder, name))) for name in names)
    if os.path.exists(os.path.join(folder, "dataset_info.json")):
        return folder, _of_cache(folder, options)
    if split is not None or (options.config is not None and folder == whole):
        return _shards_here(whole, options)
    return folder, _walk(folder, options)


def _refuse_other_split(state: dict[str, Any], wanted: str | None, folder: str) -> None:
    """One Dataset that was saved is of one split, or of none."""
    if wanted is not None:
        pick([state["_split"]] if state.get("_split") else [], wanted, folder)


def _of_cache(folder: str, options: RowOptions) -> Iterator[tuple[str, Stat]]:
    """The files that `load_dataset` prepared, without those that later calls of map left beside them."""
    splits = list(_read_json(folder, "dataset_info.json").get("splits") or {})
    names = arrow_files_of_cache(os.listdir(folder), splits, options.split, folder)
    return ((name, _stat(os.path.join(folder, name))) for name in names)


def _read_json(folder: str, name: str) -> dict[str, Any]:
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{name!r} of the saved dataset cannot be read: {error}.") from error


def _walk(folder: str, options: RowOptions) -> Iterator[tuple[str, Stat]]:
    """Files of known formats, or of the one that was asked for. A README beside the data is not data."""
    walk = Walk(folder)
    for path, found in walk:
        format = split_name(path)[0]
        if format is None or (options.format is not None and format != options.format):
            continue
        if not COMPANIONS.fullmatch(path.rsplit("/", 1)[-1]):
            yield path, found
    if walk.refused:
        first = walk.refused[0]
        raise InputError(f"{first.path!r} cannot be read ({first.reason}).", hint="Mend or remove it.", path=first.path)


@dataclass(frozen=True, slots=True)
class Resolved:
    """Where names start from, and the objects with their names."""

    root: BucketAddress
    found: list[tuple[str, ObjectStat]]

    def below(self, base: BucketAddress) -> Iterator[tuple[str, Stat]]:
        """The same with names from another start."""
        skip = len(base.prefix) + 1 if base.prefix else 0
        return ((self.root.key(name)[skip:], stat) for name, stat in self.found)


def common_root(roots: list[BucketAddress]) -> BucketAddress:
    first = roots[0]
    if any((root.scheme, root.bucket) != (first.scheme, first.bucket) for root in roots):
        raise InputError("The sources are in several buckets.", hint="Take one at a time.")
    parts = [root.prefix.split("/") if root.prefix else [] for root in roots]
    shared = 0
    while all(len(part) > shared and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    return BucketAddress(first.scheme, first.bucket, "/".join(parts[0][:shared]), first.access)


def resolve_objects(source: str, options: RowOptions) -> Resolved:
    if is_web_address(source):
        resolved = _on_the_web(source, options)
        if resolved is not None:
            return resolved
    address = parse_web_address(source) if is_web_address(source) else parse_bucket_address(source, options.access)
    folder, _, name = address.prefix.rpartition("/")
    own = None if source.endswith("/") else stat_object(address)
    wild = WILD.search(address.prefix)
    if own is not None and own.st_size:
        one = Resolved(_at(address, folder), [(name, own)])
        return _objects_of(_shards(source, options)) if _names_part(options) else one
    found = dict(_without_marks(list_objects(address)))
    if found:  # a folder, also one that has a * in its name or an empty object for its mark
        return _in_bucket(address, found, options, source)
    if _names_part(options) and (own is not None or wild is not None):
        return _objects_of(_shards(source, options))
    if own is not None:
        return Resolved(_at(address, folder), [(name, own)])
    if wild is not None:
        root = _at(address, address.prefix[: wild.start()].rpartition("/")[0])
        pattern = address.prefix[len(root.prefix) + 1 if root.prefix else 0 :]
        return Resolved(root, _matching(root, pattern))
    raise InputError(
        f"There is nothing at {source!r}.", hint="Give an object, a prefix (a folder) or a glob of objects."
    )


def _on_the_web(source: str, options: RowOptions) -> Resolved | None:
    """The Parquet files of a config and split, if it has any; other formats are found as in a bucket."""
    if options.format not in (None, "parquet"):
        return None
    try:
        found = find_files(source, options.config, options.split)
    except SourceError:
        return None
    if found.format != ".parquet":
        return None
    splits = list(dict.fromkeys(file.split for file in found.files))
    if options.split is None and len(splits) > 1:
        raise InputError(f"{source!r} has several splits.", hint=f"Name one with --from-split: {', '.join(splits)}.")
    return _objects_of(found)


def _objects_of(found: DatasetFiles) -> Resolved:
    first = found.files[0].remote
    assert first is not None
    stats = [(file.shown, ObjectStat(int(file.stat.st_size), file.remote.etag)) for file in found.files if file.remote]
    return Resolved(first.address, stats)


def _at(address: BucketAddress, prefix: str) -> BucketAddress:
    return BucketAddress(address.scheme, address.bucket, prefix, address.access)


def _matching(root: BucketAddress, pattern: str) -> list[tuple[str, ObjectStat]]:
    """As Python's glob has it: ** is any number of folders, and nothing hidden is meant that is not said."""
    parts = [None if part == "**" else _Part.of(part) for part in pattern.split("/")]
    found = {name: stat for name, stat in _without_marks(list_objects(root)) if _fits(name.split("/"), parts)}
    return sorted(found.items(), key=lambda one: one[0])


@dataclass(frozen=True, slots=True)
class _Part:
    """One name of a glob."""

    expression: re.Pattern[str]
    hidden: bool

    @classmethod
    def of(cls, pattern: str) -> _Part:
        return cls(re.compile(fnmatch.translate(pattern)), pattern.startswith("."))

    def fits(self, name: str) -> bool:
        return (self.hidden or not name.startswith(".")) and self.expression.match(name) is not None


def _fits(names: list[str], parts: list[_Part | None]) -> bool:
    if not parts:
        return not names
    part, rest = parts[0], parts[1:]
    if part is not None:
        return bool(names) and part.fits(names[0]) and _fits(names[1:], rest)
    if not rest:
        return not any(name.startswith(".") for name in names)
    for number in range(len(names)):
        if _fits(names[number:], rest):
            return True
        if names[number].startswith("."):
            return False
    return False


def _in_bucket(address: BucketAddress, found: dict[str, ObjectStat], options: RowOptions, source: str) -> Resolved:
    whole, split = address, options.split
    if options.config and any(name.startswith(f"{options.config}/") for name in found):
        address, found = _enter(address, found, options.config)
    if "dataset_dict.json" in found:
        splits = _read_json_object(address, "dataset_dict.json").get("splits", [])
        address, found = _enter(address, found, pick(splits, split, address.prefix))
        split = None
    if "dataset_info.json" not in found:
        if split is not None or (options.config is not None and address == whole):
            return _objects_of(_shards(source, options))
        return Resolved(address, _rows(found, options))
    if "state.json" in found:
        state = _read_json_object(address, "state.json")
        _refuse_other_split(state, split, address.prefix)
        names = [str(file["filename"]) for file in state.get("_data_files", [])]
    else:
        splits = list(_read_json_object(address, "dataset_info.json").get("splits") or {})
        names = arrow_files_of_cache((n for n in found if "/" not in n), splits, options.split, address.prefix)
    for name in names:
        if name not in found:
            raise InputError(f"{name!r} of the saved dataset is not at {address}.", path=name)
    return Resolved(address, [(name, found[name]) for name in names])


def _enter(
    address: BucketAddress, found: dict[str, ObjectStat], folder: str
) -> tuple[BucketAddress, dict[str, ObjectStat]]:
    start = f"{folder}/"
    return address.below(folder), {
        name.removeprefix(start): stat for name, stat in found.items() if name.startswith(start)
    }


def _rows(found: dict[str, ObjectStat], options: RowOptions) -> list[tuple[str, ObjectStat]]:
    """Files of known formats, or of the one that was asked for, in the order of a walk through folders."""
    outputs = {name.partition("/.brim/")[0] for name in found if "/.brim/" in name}
    wanted = []
    for name in found:
        *folders, last = names = name.split("/")
        format = split_name(last)[0]
        if format is None or (options.format is not None and format != options.format) or COMPANIONS.fullmatch(last):
            continue
        if any(part.startswith(".") or part in IGNORED for part in names):
            continue
        if outputs and any("/".join(folders[: depth + 1]) in outputs for depth in range(len(folders))):
            continue
        wanted.append(name)
    wanted.sort(key=lambda name: name.split("/"))
    return [(name, found[name]) for name in wanted]


def _without_marks(listed: Iterable[tuple[str, ObjectStat]]) -> Iterator[tuple[str, ObjectStat]]:
    """Without the empty objects that only mark a folder, like `data.parquet/`. Other empty ones come last."""
    empty: dict[str, ObjectStat] = {}
    for name, found in listed:
        if empty:  # what is in a folder is listed behind its mark, sooner or later
            folder = name
            while folder := folder.rpartition("/")[0]:
                empty.pop(folder, None)
        if found.st_size:
            yield name, found
        else:
            empty[name] = found
    yield from empty.items()


def _read_json_object(address: BucketAddress, name: str) -> dict[str, Any]:
    try:
        return dict(json.loads(read_small(address, name) or b""))
    except (ValueError, TypeError) as error:
        raise InputError(f"{name!r} of the saved dataset cannot be read: {error}.") from error

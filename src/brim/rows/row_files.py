"""The files of a source of rows: by path, glob, folder, or a list of those, and what kind they all are.

They are on this machine, or objects of a bucket (`found_objects`).

Names are kept relative to what was given, in columns and not as an object each: a folder may hold millions.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from typing import Any

from brim.buckets.bucket_address import is_bucket_address, is_web_address
from brim.errors import InputError
from brim.file_set import FileSet, FileSetBuilder, Stat
from brim.records import dataclass
from brim.rows.open_files import AnyFile, as_option, located
from brim.rows.row_names import COMPANIONS, WILD, arrow_files_of_cache, endings, pick, split_name
from brim.rows.row_objects import common_root, resolve_objects
from brim.rows.row_options import RowOptions
from brim.rows.unit import Kind, Span
from brim.sources.folder_tree import Walk
from brim.state.durable import reason


@dataclass(frozen=True, slots=True)
class RowFiles:
    """Files of one kind, in order. `delimiter` is that of CSV."""

    files: FileSet
    kind: Kind
    codec: str | None
    delimiter: str = ","

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
    for paths, source in zip(places, sources, strict=True):
        before = len(builder)
        for path, found in paths:
            if found.st_size == 0 and not (options.text == "document" and split_name(path)[0] == "text"):
                raise InputError(f"{path!r} is empty.", hint="Remove it, or leave it out.", path=path)
            format, codec = split_name(path)
            kinds.setdefault((options.format or format, codec), path)
            builder.add(path, found)
        if len(builder) == before:
            wanted = f"files of the format {options.format}" if options.format else f"files that end in {endings()}"
            raise InputError(f"Nothing was found at {source!r}. brim looked for {wanted}.", hint="Check the path.")
    return _of_one_kind(builder.finish(), kinds, options)


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


def _in_folder(folder: str, options: RowOptions) -> tuple[str, Iterator[tuple[str, Stat]]]:
    if options.config and os.path.isdir(os.path.join(folder, options.config)):
        folder = os.path.join(folder, options.config)
    if os.path.exists(os.path.join(folder, "dataset_dict.json")):
        splits = _read_json(folder, "dataset_dict.json").get("splits", [])
        folder = os.path.join(folder, pick(splits, options.split, folder))
    if os.path.exists(os.path.join(folder, "state.json")) and os.path.exists(os.path.join(folder, "dataset_info.json")):
        names = [str(file["filename"]) for file in _read_json(folder, "state.json").get("_data_files", [])]
        return folder, ((name, _stat(os.path.join(folder, name))) for name in names)
    if os.path.exists(os.path.join(folder, "dataset_info.json")):
        return folder, _of_cache(folder, options)
    return folder, _walk(folder, options)


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

"""The files of a source of rows: by path, glob, folder, or a list of those, and what kind they all are.

Names are kept relative to what was given, in columns and not as an object each: a folder may hold millions.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from brim.errors import InputError
from brim.fileset import FileSet, FileSetBuilder, Stat
from brim.sources.rows.options import RowOptions
from brim.sources.rows.unit import Kind
from brim.sources.walk import Walk

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
_COMPANIONS = re.compile(
    r"(readme|licen[cs]e|changelog|citation)(\.\w+)?|dataset_(infos?|dict)\.json|state\.json", re.I
)
_WILD = re.compile(r"[*?[]")


@dataclass(frozen=True, slots=True)
class Found:
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
        return os.path.join(self.files.root, self.shown(number))


def split_name(name: str) -> tuple[str | None, str | None]:
    """The format and the compression that a name tells."""
    lower = name.lower()
    codec = next((codec for end, codec in _CODECS.items() if lower.endswith(end)), None)
    stem = lower.rsplit(".", 1)[0] if codec else lower
    return _FORMATS.get(os.path.splitext(stem)[1]), codec


def find(sources: list[str], options: RowOptions) -> Found:
    """The files that these paths, globs and folders lead to."""
    if not sources:
        raise InputError("The list of sources is empty.", hint="Give a file, a folder or a glob.")
    places = [_resolve(source, options) for source in sources]
    base = os.path.commonpath([root for root, _ in places])
    builder = FileSetBuilder(base)
    kinds: dict[tuple[str | None, str | None], str] = {}
    for (root, paths), source in zip(places, sources, strict=True):
        before = len(builder)
        for path, found in paths:
            relative = os.path.relpath(os.path.join(root, path), base) if root != base else path
            if found.st_size == 0 and not (options.text == "document" and split_name(path)[0] == "text"):
                raise InputError(f"{relative!r} is empty.", hint="Remove it, or leave it out.", path=relative)
            format, codec = split_name(path)
            kinds.setdefault((options.format or format, codec), relative)
            builder.add(relative, found)
        if len(builder) == before:
            wanted = f"files of the format {options.format}" if options.format else f"files that end in {_endings()}"
            raise InputError(f"Nothing was found at {source!r}. brim looked for {wanted}.", hint="Check the path.")
    return _of_one_kind(builder.finish(), kinds, options)


def _endings() -> str:
    return ", ".join(_FORMATS) + " (text also with .gz or .zst)"


def _of_one_kind(files: FileSet, kinds: dict[tuple[str | None, str | None], str], options: RowOptions) -> Found:
    formats = {format: name for (format, _), name in kinds.items()}
    codecs = {codec: name for (_, codec), name in kinds.items()}
    if None in formats:
        raise InputError(
            f"{formats[None]!r} has a name that does not tell what it is.",
            hint=f"brim reads files that end in {_endings()}; --input-format says what others are.",
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
    return Found(files, kind, codec, delimiter)


def _resolve(source: str, options: RowOptions) -> tuple[str, Iterator[tuple[str, Stat]]]:
    """The folder that names start from, and the files with their names."""
    if "://" in source:
        raise InputError(f"{source!r} is not a local path.", hint="Give a file, a folder or a glob of this machine.")
    path = os.path.abspath(source)
    if os.path.isdir(path):
        return _in_folder(path, options)
    if os.path.exists(path):
        return os.path.dirname(path), iter([(os.path.basename(path), _stat(path))])
    if not _WILD.search(source):
        hint = "Standard input is not read: give a file" if source == "-" else "Give a file"
        raise InputError(f"The source {source!r} does not exist.", hint=f"{hint}, a folder or a glob.")
    fixed = path[: _WILD.search(path).start()]  # type: ignore[union-attr]
    root = os.path.dirname(fixed)
    names = sorted(os.path.relpath(match, root) for match in glob.iglob(path, recursive=True))
    return root, ((name, found) for name in names if stat.S_ISREG((found := _stat(os.path.join(root, name))).st_mode))


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise InputError(f"{os.path.basename(path)!r} cannot be read: {error.strerror}.", path=path) from error


def _in_folder(folder: str, options: RowOptions) -> tuple[str, Iterator[tuple[str, Stat]]]:
    if options.config and os.path.isdir(os.path.join(folder, options.config)):
        folder = os.path.join(folder, options.config)
    if os.path.exists(os.path.join(folder, "dataset_dict.json")):
        splits = _read_json(folder, "dataset_dict.json").get("splits", [])
        folder = os.path.join(folder, _pick(splits, options.split, folder))
    if os.path.exists(os.path.join(folder, "state.json")) and os.path.exists(os.path.join(folder, "dataset_info.json")):
        names = [str(file["filename"]) for file in _read_json(folder, "state.json").get("_data_files", [])]
        return folder, ((name, _stat(os.path.join(folder, name))) for name in names)
    if os.path.exists(os.path.join(folder, "dataset_info.json")):
        return folder, _of_cache(folder, options)
    return folder, _walk(folder, options)


def _of_cache(folder: str, options: RowOptions) -> Iterator[tuple[str, Stat]]:
    """The files that `load_dataset` prepared, without those that later calls of map left beside them."""
    splits = list(_read_json(folder, "dataset_info.json").get("splits") or {})
    names = [name for name in sorted(os.listdir(folder)) if name.endswith(".arrow") and not name.startswith("cache-")]
    if splits:
        split = _pick(splits, options.split, folder)
        names = [name for name in names if re.search(rf"-{re.escape(split)}(-\d+-of-\d+)?\.arrow$", name)]
    return ((name, _stat(os.path.join(folder, name))) for name in names)


def _pick(splits: list[str], wanted: str | None, folder: str) -> str:
    listed = f"It has: {', '.join(splits)}."
    if wanted is None:
        if len(splits) == 1:
            return splits[0]
        raise InputError(
            f"{os.path.basename(folder)!r} has several splits.", hint=f"{listed} Name one with --from-split."
        )
    if wanted not in splits:
        raise InputError(f"{os.path.basename(folder)!r} has no split {wanted!r}.", hint=listed)
    return wanted


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
        if not _COMPANIONS.fullmatch(path.rsplit("/", 1)[-1]):
            yield path, found
    if walk.refused:
        first = walk.refused[0]
        raise InputError(f"{first.path!r} cannot be read ({first.reason}).", hint="Mend or remove it.", path=first.path)

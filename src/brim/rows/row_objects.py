"""The files of rows in a bucket: an object, what lies below a prefix, or a glob. One listing finds them.

Names, their order and what is passed over are those of the same files in a folder, so that a job that was begun from a
copy goes on from the bucket.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from brim.buckets.bucket_address import BucketAddress, is_web_address, parse_bucket_address, parse_web_address
from brim.buckets.listing import ObjectStat, list_objects, read_small, stat_object
from brim.errors import InputError, SourceError
from brim.file_set import Stat
from brim.records import dataclass
from brim.rows.row_names import COMPANIONS, WILD, arrow_files_of_cache, pick, split_name
from brim.rows.row_options import RowOptions
from brim.sources.dataset_files import find_files
from brim.sources.folder_tree import IGNORED


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
    if own is not None and own.st_size:
        return Resolved(_at(address, folder), [(name, own)])
    found = dict(_without_marks(list_objects(address)))
    if found:  # a folder, also one that has a * in its name or an empty object for its mark
        return _in_folder(address, found, options)
    if own is not None:
        return Resolved(_at(address, folder), [(name, own)])
    wild = WILD.search(address.prefix)
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


def _in_folder(address: BucketAddress, found: dict[str, ObjectStat], options: RowOptions) -> Resolved:
    if options.config and any(name.startswith(f"{options.config}/") for name in found):
        address, found = _enter(address, found, options.config)
    if "dataset_dict.json" in found:
        splits = _read_json(address, "dataset_dict.json").get("splits", [])
        address, found = _enter(address, found, pick(splits, options.split, address.prefix))
    if "dataset_info.json" not in found:
        return Resolved(address, _rows(found, options))
    if "state.json" in found:
        names = [str(file["filename"]) for file in _read_json(address, "state.json").get("_data_files", [])]
    else:
        splits = list(_read_json(address, "dataset_info.json").get("splits") or {})
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
    for name, stat in listed:
        if empty:  # what is in a folder is listed behind its mark, sooner or later
            folder = name
            while folder := folder.rpartition("/")[0]:
                empty.pop(folder, None)
        if stat.st_size:
            yield name, stat
        else:
            empty[name] = stat
    yield from empty.items()


def _read_json(address: BucketAddress, name: str) -> dict[str, Any]:
    try:
        return dict(json.loads(read_small(address, name) or b""))
    except (ValueError, TypeError) as error:
        raise InputError(f"{name!r} of the saved dataset cannot be read: {error}.") from error

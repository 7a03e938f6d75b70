"""Which files a dataset is made of: a folder, a glob, a file, a repository on the Hub, a bucket or an https address.

Configs and splits are those of the card, else of the names of files and folders as `datasets` reads them.
"""

from __future__ import annotations

import fnmatch
import glob
import io
import os
import re
import shlex
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import pyarrow as pa

from brim.errors import DestinationError, InputError, SourceChangedError, SourceError
from brim.file_set import RemoteObject, Stat
from brim.formats.card import CARD, SEVERAL_LICENSES, read_card
from brim.formats.card_configs import card_entries, fits, patterns_of
from brim.formats.shard_listing import LISTING, ShardListing
from brim.formats.source_reader import join_ranges
from brim.records import dataclass
from brim.state.ledger import STATE, Ledger, Receipt
from brim.state.record_log import record_line, records_of
from brim.storage.listing import list_objects, read_small, stat_object
from brim.storage.location import Access, Location, is_remote, parse_location
from brim.storage.reading import ObjectFile, ObjectPiece, ahead
from brim.storage.storage import ObjectStat

EXTENSIONS = (".parquet", ".tar")
_WILD = re.compile(r"[*?\[]")
_TEXT = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|txt|md|arrow|feather)(\.gz|\.zst)?$", re.IGNORECASE)
_SHARD = re.compile(r"(?:^|.*/)(?P<split>[A-Za-z0-9_.]+?)-\d{5,}-of-\d{5,}\.(?:parquet|tar)$")
_KEYWORDS = (
    ("train", ("train", "training")),
    ("validation", ("validation", "valid", "dev", "val")),
    ("test", ("test", "testing", "eval", "evaluation")),
)
_TAIL_BYTES = 1 << 16
_MOST_MANIFEST_BYTES = 16_000_000  # of a larger one only receipts would be wanted, by nobody here
Range = tuple[int, int]
_BIBTEX = re.compile(r"```bibtex\s*\n(.*?)```", re.DOTALL)
_LICENSES = re.compile(r"^- \*\*License\*\*: (.+?)(?: \(the licenses of the sources differ: .*\))?$", re.MULTILINE)
CITATION = "__citation__"  # where the BibTeX of a card is kept beside its fields
LICENSES = "__licenses__"  # and those that a selection from several sources has


@dataclass(frozen=True, slots=True)
class DatasetFile:
    """A file of a dataset. `path` is absolute, or its address; `shown` its name for people."""

    path: str
    shown: str
    stat: Stat
    split: str = "train"
    remote: RemoteObject | None = None
    listing: ShardListing | None = None  # what a manifest tells of it


@dataclass(frozen=True, slots=True)
class DatasetFiles:
    """The files of one config of a dataset, in order, and what its card says."""

    name: str
    files: tuple[DatasetFile, ...]
    card: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None
    config: str = "default"
    manifests: tuple[tuple[Location, str], ...] = ()  # by where they are and what they are called there

    @property
    def format(self) -> str:
        return os.path.splitext(self.files[0].path.partition("?")[0])[1]


def changed_file(file: DatasetFile) -> SourceChangedError:
    return SourceChangedError(
        f"The source file {file.shown!r} was changed or removed while it was read.",
        hint="Make sure nothing is modifying the source, then run the same command again.",
        path=file.shown,
    )


class RemoteShard(ObjectFile):
    """A remote Parquet file. Ranges that are asked for together are few requests, and are kept."""

    def __init__(self, file: DatasetFile) -> None:
        assert file.remote is not None
        remote = file.remote
        super().__init__(remote.address, file.shown, int(file.stat.st_size), remote.etag, lambda: changed_file(file))
        self.key = remote.key
        self._kept: list[tuple[int, bytes]] = []

    def pieces(self, ranges: Iterable[Range]) -> list[ObjectPiece]:
        """What is asked for to have these ranges, apart from what is here."""
        missing = [
            (max(start, 0), min(stop, self.size))
            for start, stop in ranges
            if self._find(start, min(stop, self.size) - start) is None
        ]
        joined = join_ranges((start, stop) for start, stop in missing if start < stop)
        return [ObjectPiece(self.key, start, stop, self.etag) for start, stop in joined]

    def keep(self, start: int, data: bytes) -> None:
        """What is read of these bytes later takes no request."""
        self._kept.append((start, data))

    def kept(self) -> list[tuple[int, bytes]]:
        return self._kept

    def _find(self, offset: int, size: int) -> bytes | None:
        for start, data in self._kept:
            if start <= offset and offset + size <= start + len(data):
                return data[offset - start : offset - start + size]
        return None

    def read_at(self, offset: int, size: int) -> bytes:
        size = max(min(size, self.size - offset), 0)
        found = self._find(offset, size)
        return super().read_at(offset, size) if found is None else found

    def fetch(self, start: int, stop: int) -> bytes:
        """A range by one request, kept by nobody; from any thread."""
        return self._fetch(start, stop)

    def _fetch(self, start: int, stop: int) -> bytes:
        with self.watched():
            return b"".join(data for _, data in ahead(self.address, [ObjectPiece(self.key, start, stop, self.etag)]))

    def close(self) -> None:
        super().close()
        self._kept = []


def fetched(wanted: Sequence[tuple[RemoteShard, Iterable[Range]]]) -> Iterator[tuple[RemoteShard, int, bytes]]:
    """Ranges of several shards, on their way together: (shard, start, bytes), in order."""
    asked = [(shard, piece) for shard, ranges in wanted for piece in shard.pieces(ranges)]
    for address in dict.fromkeys(shard.address for shard, _ in asked):
        own = [(shard, piece) for shard, piece in asked if shard.address == address]
        coming = ahead(address, [piece for _, piece in own])
        for shard, piece in own:
            with shard.watched():
                data = next(coming)[1]
            yield shard, piece.start, data


def fetch_together(wanted: Sequence[tuple[RemoteShard, Iterable[Range]]]) -> None:
    """Have ranges of several shards here."""
    for shard, start, data in fetched(wanted):
        shard.keep(start, data)


def open_together(files: Sequence[DatasetFile]) -> list[RemoteShard]:
    """Parquet files far away, with their footers: those of many are on their way together."""
    shards = [RemoteShard(file) for file in files]
    fetch_together([(shard, [(max(shard.size - _TAIL_BYTES, 0), shard.size)]) for shard in shards])
    longer = []
    for shard in shards:
        tail = shard.read_at(shard.size - 8, 8)
        length = int.from_bytes(tail[:4], "little") + 8
        if tail[4:] == b"PAR1" and _TAIL_BYTES < length <= shard.size:
            longer.append((shard, [(shard.size - length, shard.size - _TAIL_BYTES)]))
    fetch_together(longer)
    return shards


def find_files(
    source: str | os.PathLike[str], config: str | None = None, split: str | None = None, access: Access | None = None
) -> DatasetFiles:
    """The shards of a dataset. Of several configs one has to be named."""
    text = os.fspath(source)
    if is_remote(text):
        found = _remote_files(text, access or Access())
    elif "://" in text:
        raise SourceError(
            f"brim cannot read {text.partition('://')[0]}:// as a source.",
            hint="Use a folder, a glob, hf://datasets/ORG/NAME, s3://BUCKET/PREFIX or an https address.",
        )
    else:
        found = _local_files(text)
    if not found.files:
        raise SourceError(f"{text!r} has no Parquet or tar files.", hint=_instead(text))
    return _listed(_of_split(_of_config(found, config, text), split, text))


def named_files(
    source: str, splits: Mapping[str, Sequence[str]], config: str, access: Access | None = None
) -> tuple[DatasetFile, ...]:
    """The shards of a dataset with these names, by split, whatever its card says."""
    names = [(split, name) for split, of in splits.items() for name in of]
    if not is_remote(source):
        paths = [os.path.join(source, name) for _, name in names]
        return tuple(
            DatasetFile(path, name, os.stat(path), split) for path, (split, name) in zip(paths, names, strict=True)
        )
    root = parse_location(source, access or Access())
    there = dict(list_objects(root))
    files = tuple(
        DatasetFile(f"{root}/{name}", name, there[name], split, RemoteObject(root, root.key(name), there[name].etag))
        for split, name in names
    )
    manifests = tuple((root, n) for n, s in there.items() if _is_manifest(n, s))
    return _listed(DatasetFiles(source, files, config=config, manifests=manifests)).files


def _is_manifest(name: str, stat: ObjectStat) -> bool:
    return name.startswith(f"{STATE}/") and name.endswith(".jsonl") and stat.st_size <= _MOST_MANIFEST_BYTES


def _instead(text: str) -> str:
    if os.path.isfile(os.path.join(text, "dataset_dict.json")) or os.path.isfile(os.path.join(text, "state.json")):
        return "save_to_disk wrote it: in Python, give what datasets.load_from_disk() makes of it."
    if _TEXT.search(text) or (os.path.isdir(text) and any(_TEXT.search(name) for name in os.listdir(text))):
        return _as_parquet(text)
    return "Give a folder or a glob of shards, or a repository; brim build is for folders of other files."


def _as_parquet(text: str) -> str:
    """The command that makes shards of rows of text, whose values have no place in a file that could be copied."""
    return f"Make Parquet of it first: brim map {shlex.quote(text)} shards/ --fn builtins:dict"


def _listed(found: DatasetFiles) -> DatasetFiles:
    """With what the manifests tell of the shards, if they are of these shards, all of them."""
    wanted = {f"{STATE}/{found.config}/{split}.jsonl" for split in {file.split for file in found.files}}
    receipts: dict[str, Receipt] = {}
    listings: dict[str, ShardListing] = {}
    try:
        for address, name in found.manifests:
            if name in wanted:
                records = list(records_of(io.BytesIO(read_small(address, name) or b"")))
                ledger = Ledger.of(b"".join(record_line(record) for record in records if record["type"] != LISTING))
                receipts |= ledger.receipts
                for record in records:
                    if record["type"] == LISTING:
                        listing = ShardListing(receipts[record["name"]].rows, record)
                        listings[record["name"]] = listing
                        assert listing.small is not None  # what is wrong with it is found now
    except (KeyError, TypeError, ValueError, zlib.error, pa.ArrowException):
        return found
    if not all(file.shown in listings and _is_told(file.stat, receipts[file.shown]) for file in found.files):
        return found
    return replace(found, files=tuple(replace(file, listing=listings[file.shown]) for file in found.files))


def _is_told(stat: Stat, receipt: Receipt) -> bool:
    """Whether a shard is the one that a receipt is of, as far as the store tells."""
    if stat.st_size != receipt.size or not isinstance(stat, ObjectStat):
        return False
    return stat.sha256 in ("", receipt.sha256) and receipt.etag in ("", stat.etag)


def _local_files(text: str) -> DatasetFiles:
    path = os.path.abspath(text)
    card: Mapping[str, Any] = {}
    if os.path.isdir(path):
        root = path
        names = []
        for folder, folders, inside in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            below = os.path.relpath(folder, path)
            names += [name if below == "." else f"{below}/{name}" for name in sorted(inside) if _is_shard(name)]
        try:
            with open(os.path.join(path, CARD), encoding="utf-8") as file:
                card = _card(file.read())
        except (OSError, UnicodeDecodeError):
            pass
    elif os.path.exists(path):
        root, names = os.path.dirname(path), [os.path.basename(path)]
    elif _WILD.search(text):
        matches = sorted(match for match in glob.iglob(path, recursive=True) if os.path.isfile(match))
        root = os.path.dirname(path[: _WILD.search(path).start()])  # type: ignore[union-attr]
        names = [os.path.relpath(match, root) for match in matches]
    else:
        raise SourceError(f"The source {text!r} does not exist.", hint="Use a folder or a glob of shards.")
    files = []
    for name in names:
        try:
            if not name.endswith(EXTENSIONS):
                _refuse_others(root, name, text)
            stat = os.stat(os.path.join(root, name))
        except OSError as error:
            raise SourceError(f"{name!r} cannot be read: {error.strerror}.", path=name) from error
        files.append(DatasetFile(os.path.join(root, name), name, stat, _split_of(name)))
    return DatasetFiles(text, tuple(files), card)


def _refuse_others(root: str, name: str, text: str) -> None:
    """A file with another name may be one of Parquet all the same."""
    with open(os.path.join(root, name), "rb") as file:
        if file.read(4) != b"PAR1":
            hint = _as_parquet(text) if _TEXT.search(name) else "brim build is for other files."
            raise SourceError(f"{name!r} is not a Parquet or tar file.", hint=hint, path=name)


def _is_shard(name: str) -> bool:
    return name.endswith(EXTENSIONS) and not name.startswith(".")


def _remote_files(text: str, access: Access) -> DatasetFiles:
    address = parse_location(text, access)
    own = None if address.scheme == "hf" and not address.prefix else stat_object(address)
    card: Mapping[str, Any] = {}
    revision = None
    manifests: tuple[tuple[Location, str], ...] = ()
    if own is not None and (own.st_size or address.prefix.endswith(EXTENSIONS)):
        folder, _, name = address.prefix.rpartition("/")
        root, listed = replace(address, prefix=folder), [(name, own)]
    elif address.scheme in ("http", "https"):
        raise SourceError(f"{text!r} does not exist.", hint="Use the address of a Parquet file.")
    else:
        wild = _WILD.search(address.prefix)
        root = replace(address, prefix=address.prefix[: wild.start()].rpartition("/")[0]) if wild else address
        pattern = address.prefix[len(root.prefix) + 1 if root.prefix else 0 :] if wild else "*"
        found = list(list_objects(root))
        listed = [(name, stat) for name, stat in found if _is_shard(name.rpartition("/")[2])]
        listed = [one for one in listed if fnmatch.fnmatch(one[0], pattern) and "/." not in f"/{one[0]}"]
        manifests = tuple((root, name) for name, stat in found if _is_manifest(name, stat))
        if any(name == CARD for name, _ in found):
            card = _card((read_small(root, CARD) or b"").decode("utf-8", "replace"))
    files = []
    for name, stat in sorted(listed):
        remote = RemoteObject(root, root.key(name), stat.etag)
        files.append(DatasetFile(f"{root}/{name}", name, stat, _split_of(name), remote))
        revision = stat.etag if address.scheme == "hf" and not address.on_hub else None
    return DatasetFiles(text, tuple(files), card, revision, manifests=manifests)


def _card(text: str) -> Mapping[str, Any]:
    try:
        fields = read_card(text)
    except DestinationError:
        return {}
    cited = "\n\n".join(found.strip() for found in _BIBTEX.findall(text))
    listed = _LICENSES.search(text) if fields.get("license_name") == SEVERAL_LICENSES else None
    return {**fields, **({CITATION: cited} if cited else {}), **({LICENSES: listed[1]} if listed else {})}


def _split_of(name: str) -> str:
    match = _SHARD.match(name)
    if match:
        return match["split"]
    words = re.split(r"[^a-z0-9]+", name.lower())
    for split, keywords in _KEYWORDS:
        if any(word in keywords for word in words):
            return split
    return "train"


def _of_config(found: DatasetFiles, config: str | None, text: str) -> DatasetFiles:
    """The files of one config, as the card names them; else of a folder of that name."""
    entries = card_entries(dict(found.card))
    by_name = {str(one["config_name"]): patterns_of(one) for one in entries}
    if config is None and by_name:
        usual = [str(one["config_name"]) for one in entries if one.get("default")]
        config = next(iter([*usual, *(["default"] if "default" in by_name else []), *by_name]))
        if len(by_name) > 1 and not usual and "default" not in by_name:
            raise InputError(
                f"{text!r} has several configs.", hint=f"Name one with --from-config: {', '.join(by_name)}."
            )
    if config in by_name:
        patterns = by_name[config]
        files = [
            replace(file, split=split)
            for split, pattern in patterns
            for file in found.files
            if fits(file.shown, pattern)
        ]
        if files:
            return replace(found, files=tuple(files), config=config)
        if patterns:
            raise SourceError(f"{text!r} is unfinished, or its card names files that do not exist.")
    if config in (None, "default"):
        folder = "data/"
        own = [file for file in found.files if file.shown.startswith(folder)]
        return replace(found, files=tuple(own) or found.files)
    own = [file for file in found.files if f"/{config}/" in f"/{file.shown}"]
    if not own:
        known = ", ".join(by_name) or ", ".join(
            sorted({f.shown.partition("/")[0] for f in found.files if "/" in f.shown})
        )
        hint = f"It has: {known}." if known else "It has none: leave out --from-config."
        raise InputError(f"{text!r} has no config {config!r}.", hint=hint)
    return replace(found, files=tuple(own), config=config)


def _of_split(found: DatasetFiles, split: str | None, text: str) -> DatasetFiles:
    kinds = {os.path.splitext(file.shown)[1] for file in found.files}
    if len(kinds) > 1:
        raise SourceError(f"{text!r} has both Parquet and tar files.", hint="Use a glob that matches only one kind.")
    names = list(dict.fromkeys(file.split for file in found.files))
    if not found.card.get("configs"):  # which has an order of its own
        names = list(dict.fromkeys([*(name for name, _ in _KEYWORDS if name in names), *names]))
    files = sorted(found.files, key=lambda file: names.index(file.split))
    if split is not None:
        if split not in names:
            raise InputError(f"{text!r} has no split {split!r}.", hint=f"It has: {', '.join(names)}.")
        files = [file for file in files if file.split == split]
    return replace(found, files=tuple(files))

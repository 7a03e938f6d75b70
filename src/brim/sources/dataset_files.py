"""Find the files of a dataset: a folder, a glob, a file, a repository on the Hub, a bucket or an https address.

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
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import pyarrow as pa

from brim.errors import DestinationError, InputError, SourceChangedError, SourceError
from brim.file_set import Stat
from brim.formats.card import CARD, SEVERAL_LICENSES, read_card
from brim.formats.card_configs import SPLIT_NAMES, card_entries, fits, patterns_of
from brim.formats.shard_listing import LISTING, ShardListing
from brim.records import dataclass
from brim.state.ledger import STATE, Ledger, Receipt
from brim.state.record_log import record_line, records_of
from brim.storage.explain_error import explain_errors
from brim.storage.location import Access, Location, is_remote, parse_location
from brim.storage.reading import RandomFile, RemoteFile, keep_footers
from brim.storage.storage import FileInfo, Storage, open_storage

EXTENSIONS = (".parquet", ".tar")
_WILD = re.compile(r"[*?\[]")
_TEXT = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|txt|md|arrow|feather)(\.gz|\.zst)?$", re.IGNORECASE)
_SHARD = re.compile(r"(?:^|.*/)(?P<split>[A-Za-z0-9_.]+?)-\d{5,}-of-\d{5,}\.(?:parquet|tar)$")
_MAX_MANIFEST_BYTES = 16_000_000  # a larger one has receipts only, which are not needed here
Range = tuple[int, int]
_BIBTEX = re.compile(r"```bibtex\s*\n(.*?)```", re.DOTALL)
_LICENSES = re.compile(r"^- \*\*License\*\*: (.+?)(?: \(the licenses of the sources differ: .*\))?$", re.MULTILINE)
CITATION = "__citation__"  # the field for the BibTeX of a card
LICENSES = "__licenses__"  # and for the licenses of a selection from several sources


@dataclass(frozen=True, slots=True)
class DatasetFile:
    """A file of a dataset. `path` is absolute, or its address; `shown` its name for people."""

    path: str
    shown: str
    stat: Stat
    split: str = "train"
    remote: RemoteFile | None = None
    listing: ShardListing | None = None  # of its rows, from a manifest


@dataclass(frozen=True, slots=True)
class DatasetFiles:
    """The files of one config of a dataset, in order, and its card."""

    name: str
    files: tuple[DatasetFile, ...]
    card: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None
    config: str = "default"
    storage: Storage | None = None  # of remote files
    manifests: tuple[str, ...] = ()  # names in it

    @property
    def format(self) -> str:
        return os.path.splitext(self.files[0].path.partition("?")[0])[1]


def changed_file(file: DatasetFile) -> SourceChangedError:
    return SourceChangedError(
        f"The source file {file.shown!r} was changed or removed while it was read.",
        hint="Make sure nothing is modifying the source, then run the same command again.",
        path=file.shown,
    )


class RemoteShard(RandomFile):
    """A remote shard of a dataset."""

    def __init__(self, file: DatasetFile) -> None:
        assert file.remote is not None
        super().__init__(file.remote, lambda: changed_file(file))


def open_together(files: Sequence[DatasetFile]) -> list[RemoteShard]:
    """Open remote Parquet files, with their footers: those of many are requested together."""
    shards = [RemoteShard(file) for file in files]
    keep_footers(shards)
    return shards


def find_files(
    source: str | os.PathLike[str], config: str | None = None, split: str | None = None, access: Access | None = None
) -> DatasetFiles:
    """Return the shards of a dataset. Of several configs one has to be named."""
    text = os.fspath(source)
    if is_remote(text):
        dataset = _remote_files(text, access or Access())
    elif "://" in text:
        raise SourceError(
            f"brim cannot read {text.partition('://')[0]}:// as a source.",
            hint="Use a folder, a glob, hf://datasets/ORG/NAME, s3://BUCKET/PREFIX or an https address.",
        )
    else:
        dataset = _local_files(text)
    if not dataset.files:
        raise SourceError(f"{text!r} has no Parquet or tar files.", hint=_instead(text))
    return _with_listings(_of_split(_of_config(dataset, config, text), split, text))


def named_files(
    source: str, splits: Mapping[str, Sequence[str]], config: str, access: Access | None = None
) -> tuple[DatasetFile, ...]:
    """Return the shards of a dataset with these names, by split, without its card."""
    names = [(split, name) for split, shards in splits.items() for name in shards]
    if not is_remote(source):
        paths = [os.path.join(source, name) for _, name in names]
        return tuple(
            DatasetFile(path, name, os.stat(path), split) for path, (split, name) in zip(paths, names, strict=True)
        )
    root = parse_location(source, access)
    storage = open_storage(root)
    with explain_errors(root, "read"):
        infos = dict(storage.list())
        files = tuple(_remote_file(root, name, infos[name], split) for split, name in names)
        manifests = tuple(name for name, info in infos.items() if _is_manifest(name, info))
        return _with_listings(DatasetFiles(source, files, config=config, storage=storage, manifests=manifests)).files


def _remote_file(root: Location, name: str, info: FileInfo, split: str) -> DatasetFile:
    remote = RemoteFile(root, name, info.st_size, info.etag)
    return DatasetFile(str(remote), name, info, split, remote)


def _is_manifest(name: str, info: FileInfo) -> bool:
    return name.startswith(f"{STATE}/") and name.endswith(".jsonl") and info.st_size <= _MAX_MANIFEST_BYTES


def _instead(text: str) -> str:
    if os.path.isfile(os.path.join(text, "dataset_dict.json")) or os.path.isfile(os.path.join(text, "state.json")):
        return "save_to_disk wrote it: in Python, give what datasets.load_from_disk() makes of it."
    if _TEXT.search(text) or (os.path.isdir(text) and any(_TEXT.search(name) for name in os.listdir(text))):
        return _as_parquet(text)
    return "Give a folder or a glob of shards, or a repository; brim build is for folders of other files."


def _as_parquet(text: str) -> str:
    """Return the hint to convert text such as JSONL to Parquet: its values are not stored as ranges of bytes."""
    return f"Make Parquet of it first: brim map {shlex.quote(text)} shards/ --fn builtins:dict"


def _with_listings(dataset: DatasetFiles) -> DatasetFiles:
    """Add what the manifests list of the shards, if they are of these shards, all of them."""
    names = {f"{STATE}/{dataset.config}/{split}.jsonl" for split in {file.split for file in dataset.files}}
    receipts: dict[str, Receipt] = {}
    listings: dict[str, ShardListing] = {}
    try:
        for name in names.intersection(dataset.manifests):
            assert dataset.storage is not None
            with explain_errors(dataset.storage.location, "read"):
                data = dataset.storage.read(name)
            records = list(records_of(io.BytesIO(data or b"")))
            ledger = Ledger.from_bytes(b"".join(record_line(record) for record in records if record["type"] != LISTING))
            receipts |= ledger.receipts
            for record in records:
                if record["type"] == LISTING:
                    listing = ShardListing(receipts[record["name"]].rows, record)
                    listings[record["name"]] = listing
                    assert listing.small is not None  # errors in it are found now
    except (KeyError, TypeError, ValueError, zlib.error, pa.ArrowException):
        return dataset
    if not all(file.shown in listings and _matches(receipts[file.shown], file.stat) for file in dataset.files):
        return dataset
    return replace(dataset, files=tuple(replace(file, listing=listings[file.shown]) for file in dataset.files))


def _matches(receipt: Receipt, stat: Stat) -> bool:
    """Return whether a receipt is of this shard, as far as the store says."""
    sha256, etag = getattr(stat, "sha256", ""), getattr(stat, "etag", "")
    return stat.st_size == receipt.size and sha256 in ("", receipt.sha256) and receipt.etag in ("", etag)


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
            if not name.endswith(EXTENSIONS):  # another name is allowed for Parquet
                with open(os.path.join(root, name), "rb") as file:
                    if file.read(4) != b"PAR1":
                        hint = _as_parquet(text) if _TEXT.search(name) else "brim build is for other files."
                        raise SourceError(f"{name!r} is not a Parquet or tar file.", hint=hint, path=name)
            stat = os.stat(os.path.join(root, name))
        except OSError as error:
            raise SourceError(f"{name!r} cannot be read: {error.strerror}.", path=name) from error
        files.append(DatasetFile(os.path.join(root, name), name, stat, _split_of(name)))
    return DatasetFiles(text, tuple(files), card)


def _is_shard(name: str) -> bool:
    return name.endswith(EXTENSIONS) and not name.startswith(".")


def _remote_files(text: str, access: Access) -> DatasetFiles:
    location = parse_location(text, access)
    storage = open_storage(location)
    with explain_errors(location, "read"):
        own = next(iter(storage.stat([""]))) if location.prefix else None
    if own is not None and (own.st_size or location.prefix.endswith(EXTENSIONS)):
        root, name = location.parent, location.prefix.rpartition("/")[2]
        file = _remote_file(root, name, own, _split_of(name))
        return DatasetFiles(text, (file,), revision=storage.pinned_revision())
    wild = _WILD.search(location.prefix)
    root = replace(location, prefix=location.prefix[: wild.start()].rpartition("/")[0]) if wild else location
    pattern = location.prefix[len(root.prefix) + 1 if root.prefix else 0 :] if wild else "*"
    storage = open_storage(root) if wild else storage
    if not storage.can_list:
        raise SourceError(f"{text!r} does not exist.", hint="Use the address of a Parquet file.")
    with explain_errors(root, "read"):
        infos = dict(storage.list())
        card = _card((storage.read(CARD) or b"").decode("utf-8", "replace")) if CARD in infos else {}
        revision = storage.pinned_revision() if infos else None
    shards = sorted(
        name
        for name in infos
        if _is_shard(name.rpartition("/")[2]) and fnmatch.fnmatch(name, pattern) and "/." not in f"/{name}"
    )
    return DatasetFiles(
        text,
        tuple(_remote_file(root, name, infos[name], _split_of(name)) for name in shards),
        card,
        revision,
        storage=storage,
        manifests=tuple(name for name, info in infos.items() if _is_manifest(name, info)),
    )


def _card(text: str) -> Mapping[str, Any]:
    try:
        fields = read_card(text)
    except DestinationError:
        return {}
    cited = "\n\n".join(entry.strip() for entry in _BIBTEX.findall(text))
    listed = _LICENSES.search(text) if fields.get("license_name") == SEVERAL_LICENSES else None
    return {**fields, **({CITATION: cited} if cited else {}), **({LICENSES: listed[1]} if listed else {})}


def _split_of(name: str) -> str:
    match = _SHARD.match(name)
    if match:
        return match["split"]
    parts = re.split(r"[^a-z0-9]+", name.lower())
    return next((split for split, keywords in SPLIT_NAMES if not set(keywords).isdisjoint(parts)), "train")


def _of_config(dataset: DatasetFiles, config: str | None, text: str) -> DatasetFiles:
    """Keep the files of one config, as the card names them; else of a folder of that name."""
    entries = card_entries(dict(dataset.card))
    by_name = {str(entry["config_name"]): patterns_of(entry) for entry in entries}
    if config is None and by_name:
        usual = [str(entry["config_name"]) for entry in entries if entry.get("default")]
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
            for file in dataset.files
            if fits(file.shown, pattern)
        ]
        if files:
            return replace(dataset, files=tuple(files), config=config)
        if patterns:
            raise SourceError(f"{text!r} is unfinished, or its card names files that do not exist.")
    if config in (None, "default"):
        folder = "data/"
        own = [file for file in dataset.files if file.shown.startswith(folder)]
        return replace(dataset, files=tuple(own) or dataset.files)
    own = [file for file in dataset.files if f"/{config}/" in f"/{file.shown}"]
    if not own:
        folders = sorted({file.shown.partition("/")[0] for file in dataset.files if "/" in file.shown})
        configs = ", ".join(by_name) or ", ".join(folders)
        hint = f"It has: {configs}." if configs else "It has none: leave out --from-config."
        raise InputError(f"{text!r} has no config {config!r}.", hint=hint)
    return replace(dataset, files=tuple(own), config=config)


def _of_split(dataset: DatasetFiles, split: str | None, text: str) -> DatasetFiles:
    kinds = {os.path.splitext(file.shown)[1] for file in dataset.files}
    if len(kinds) > 1:
        raise SourceError(f"{text!r} has both Parquet and tar files.", hint="Use a glob that matches only one kind.")
    names = list(dict.fromkeys(file.split for file in dataset.files))
    if not dataset.card.get("configs"):  # they have an order
        names = list(dict.fromkeys([*(name for name, _ in SPLIT_NAMES if name in names), *names]))
    files = sorted(dataset.files, key=lambda file: names.index(file.split))
    if split is not None:
        if split not in names:
            raise InputError(f"{text!r} has no split {split!r}.", hint=f"It has: {', '.join(names)}.")
        files = [file for file in files if file.split == split]
    return replace(dataset, files=tuple(files))

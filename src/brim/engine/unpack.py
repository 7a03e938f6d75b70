"""The original files back from a dataset, byte for byte, under their relative paths."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from brim.durable import failures
from brim.engine.destination import state_folder
from brim.engine.hashing import sha256_of
from brim.engine.ledger import Ledger, Receipt
from brim.engine.progress import Progress, Silent
from brim.engine.shard import locate
from brim.errors import DamageFound, InputError
from brim.formats.found import Found
from brim.formats.splice import BUFFER_BYTES, copy_range
from brim.memory.limit import effective_limit


@dataclass
class Unpacked:
    """What was written."""

    files: int = 0
    bytes: int = 0
    already_there: int = 0
    unproved: int = 0  # shards without a receipt to compare with


def unpack(
    destination: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    state: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Unpacked:
    """Write every file of a dataset below `out`. What is there already must be the same, and stays."""
    folder, target = Path(destination), Path(out)
    progress = progress or Silent()
    if not (folder / "data").is_dir():
        raise InputError(
            f"{str(folder)!r} holds no dataset: it has no folder data/.", hint="Give the folder that brim built."
        )
    if target.exists() and not target.is_dir():
        raise InputError(f"{str(target)!r} is a file.", hint="Give a folder.")
    shards = sorted(path for path in (folder / "data").glob("[!.]*") if path.is_file())
    if not shards:
        raise InputError(f"{str(folder)!r} holds no shards.")
    receipts = Ledger(state_folder(folder, state)).receipts
    missing = [name for name in receipts if not (folder / name).exists()]
    if missing:
        raise DamageFound(f"{missing[0]} is missing.", hint="brim verify lists everything that is wrong.")
    total = sum(shard.stat().st_size for shard in shards)
    progress.start("unpack", total, len(shards), effective_limit().bytes)
    result = Unpacked()
    try:
        with failures(target):
            target.mkdir(parents=True, exist_ok=True)
            for shard in shards:
                _unpack_shard(shard, receipts.get(f"data/{shard.name}"), os.path.realpath(target), result, progress)
    finally:
        progress.finish()
    return result


def _unpack_shard(shard: Path, receipt: Receipt | None, root: str, result: Unpacked, progress: Progress) -> None:
    """Prove a shard by its receipt, then write its files."""
    try:
        if receipt is None:
            result.unproved += 1
        elif sha256_of(shard, lambda _: None) != receipt.sha256:
            raise DamageFound(
                f"data/{shard.name} is damaged: its content is not what was written.",
                hint="brim verify lists everything that is wrong.",
            )
        descriptor = os.open(shard, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"data/{shard.name} cannot be read: {error.strerror}.") from error
    try:
        for found in locate(shard):
            for file in _members(descriptor, found) if (found.path or "").endswith("/") else (found,):
                _write(descriptor, file, shard.name, root, result)
            progress.advance(found.size)
    finally:
        os.close(descriptor)
    progress.shard(f"data/{shard.name}", shard.stat().st_size, "", "unpacked")


def _members(shard: int, found: Found) -> Iterator[Found]:
    """The files of a folder that is packed as one value."""
    with os.fdopen(os.dup(shard), "rb") as file:
        file.seek(found.offset)
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would keep every header
                yield Found(found.column, found.row, f"{found.path}{member.name}", member.offset_data, member.size)


def _write(shard: int, found: Found, shard_name: str, root: str, result: Unpacked) -> None:
    path = _safe_path(found, shard_name, root)
    if os.path.lexists(path):
        if not _holds(path, shard, found):
            raise InputError(
                f"{found.path!r} is already there with other content.", hint="Unpack into an empty folder."
            )
        result.already_there += 1
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = os.path.join(os.path.dirname(path), f".brim-{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        copy_range(shard, found.offset, found.size, descriptor)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)
    os.rename(temporary, path)
    result.files += 1
    result.bytes += found.size


def _safe_path(found: Found, shard_name: str, root: str) -> str:
    """Where a file goes; refuses a path that leads out of the folder, also by a link that is there."""
    name = found.path or ""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise DamageFound(
            f"{shard_name} row {found.row} names {name!r}, which would leave the folder.",
            hint="Nothing was written there; do not trust this dataset.",
        )
    path = os.path.join(root, *parts)
    parent = os.path.realpath(os.path.dirname(path))
    if parent != root and not parent.startswith(root + os.sep):
        raise DamageFound(f"{name!r} would be written outside of the folder, through a link.")
    return path


def _holds(path: str, shard: int, found: Found) -> bool:
    """Whether the file at `path` is what the shard holds."""
    if os.path.islink(path) or not os.path.isfile(path) or os.path.getsize(path) != found.size:
        return False
    with open(path, "rb", buffering=0) as file:
        for at in range(0, found.size, BUFFER_BYTES):
            want = min(BUFFER_BYTES, found.size - at)
            if file.read(want) != os.pread(shard, want, found.offset + at):
                return False
    return True

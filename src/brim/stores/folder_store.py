"""A folder as destination. A shard appears whole, under its name, on disk for good, or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Self

from brim.errors import DestinationError
from brim.formats.card import CARD
from brim.formats.card_configs import UNFINISHED
from brim.formats.splice import FileSplice, Splice
from brim.records import dataclass
from brim.state.atomic_files import BUFFER_BYTES, failures, free_bytes, rename, write_whole
from brim.state.ledger import Piece
from brim.storage.upload_content import Buffers
from brim.stores.store import Announcement, CardMaker, Publication, Put, PutWatcher

ALIGNMENT = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux has it


class DirectFile:
    """A new file to be written front to back."""

    def __init__(self, path: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._direct = bool(_DIRECT)
        try:
            self._descriptor = os.open(path, flags | _DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = False
            self._descriptor = os.open(path, flags, 0o644)

    def write(self, data: memoryview) -> None:
        if self._direct and len(data) % ALIGNMENT:
            self._leave_direct()
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._leave_direct()

    def _leave_direct(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        self._direct = False

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


_KEEP = ".brim/keep"  # content that lost its name and will get another, by SHA-256


@dataclass(frozen=True, slots=True)
class FolderCarrier:
    """Writes shards. `mark` is a file in the folder that shows another machine that it sees the same one."""

    root: Path
    mark: str = ""

    def check(self) -> None:
        if self.mark and not (self.root / self.mark).exists():
            raise DestinationError(
                f"The destination {str(self.root)!r} is not there, or is another folder of that name.",
                hint="Choose a folder on a disk that every node shares under the same path.",
            )
        tried = self.root / "data" / f".{uuid.uuid4().hex[:12]}.tmp"
        with failures(self.root):
            tried.touch()
            tried.unlink()

    def put(self, name: str, splice: Splice, sha256: str | None, watcher: PutWatcher) -> Put:
        """In one pass; the watcher may raise to drop the shard. A file on this disk is linked and not copied."""
        target = self.root / name
        # A name of its own: a machine that was given up may still write the same shard.
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.tmp")
        if sha256 is not None and isinstance(splice, FileSplice) and self._link(splice.path, temporary, target):
            watcher.sent(splice.size)
            return Put(sha256)
        with failures(self.root):
            file = DirectFile(str(temporary))
            try:
                digest = _write_and_hash(file, splice, watcher.sent)
                file.sync()
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            finally:
                file.close()
            rename(temporary, target)
        return Put(digest)

    def _link(self, source: Path, temporary: Path, target: Path) -> bool:
        """Give a finished file a second name here; False where the file system cannot."""
        try:
            os.link(source, temporary)
        except OSError:
            return False
        with failures(self.root):
            rename(temporary, target)
            temporary.unlink(missing_ok=True)  # two names of one file: then the system leaves both as they are
        return True


class FolderStore:
    """Shards under `root/data/`, the card beside it.

    `mine` names the shards of a run that shares the folder with others: what is unfinished of those stays.
    """

    staged = False

    def __init__(self, root: Path, mine: frozenset[str] | None = None) -> None:
        self.root, self._mine = root, mine
        self._own = f".{Path(min(mine)).stem}" if mine else ""  # in the name of a card that others write too
        self._mark: Path | None = None

    def open(self, fingerprint: str) -> None:
        """Remove what an interrupted run left behind. Only for whoever holds the lock."""
        if self._mine is None:
            for left in (self.root / "data").glob(".*.tmp"):
                left.unlink()
            return
        (self.root / f".{CARD}{self._own}.tmp").unlink(missing_ok=True)
        for left in (self.root / "data").glob(".*.tmp"):
            if f"data/{left.name[1:].rsplit('.', 2)[0]}" in self._mine:
                left.unlink(missing_ok=True)

    def shards(self) -> Iterator[str]:
        for entry in sorted(os.listdir(self.root / "data")):
            if not entry.startswith("."):
                yield f"data/{entry}"

    def begun(self) -> bool:
        try:
            return UNFINISHED.encode() in (self.root / CARD).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return False

    def holds(self, piece: Piece) -> bool:
        """By its size: content is `brim verify`'s to prove."""
        return self._size(piece.name) == piece.size

    def holds_aside(self, piece: Piece) -> bool:
        return self._size(f"{_KEEP}/{piece.sha256}") == piece.size

    def set_aside(self, piece: Piece) -> None:
        with failures(self.root):
            rename(self.root / piece.name, self.root / _KEEP / piece.sha256)

    def bring_back(self, piece: Piece, name: str) -> str:
        with failures(self.root):
            rename(self.root / _KEEP / piece.sha256, self.root / name)
        return ""

    def discard(self, names: Iterable[str]) -> None:
        for name in names:
            (self.root / name).unlink(missing_ok=True)
        shutil.rmtree(self.root / _KEEP, ignore_errors=True)

    def _size(self, name: str) -> int | None:
        try:
            return (self.root / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def free_bytes(self) -> int | None:
        return free_bytes(self.root)

    def check_card(self, maker: CardMaker) -> None:
        with failures(self.root):
            maker(self._read_card(), {})

    def begin(self, job: Announcement) -> None:
        self._write_card(job.unfinished_card)

    def put(self, name: str, splice: Splice, sha256: str | None, watcher: PutWatcher) -> Put:
        return FolderCarrier(self.root).put(name, splice, sha256, watcher)

    def carrier(self) -> FolderCarrier:
        """What an interrupted run leaves of the mark goes like everything temporary."""
        if self._mark is None:
            self._mark = self.root / "data" / f".{uuid.uuid4().hex}.tmp"
            with failures(self.root):
                self._mark.touch()
        return FolderCarrier(self.root.absolute(), f"data/{self._mark.name}")

    def checkpoint(self, pieces: Sequence[Piece], oldest: float) -> None:
        """What is on disk lasts."""

    def publish(self, publication: Publication) -> str:
        self.discard(sorted(publication.gone))
        if self._mark is not None:  # with it goes what machines that were lost have left
            for left in (self.root / "data").glob(".*.tmp"):
                left.unlink(missing_ok=True)
        self._write_card(publication.card)
        return ""

    def _write_card(self, maker: CardMaker) -> None:
        with failures(self.root):
            write_whole(self.root / CARD, maker(self._read_card(), {}).encode(), self._own)

    def _read_card(self) -> str | None:
        try:
            return (self.root / CARD).read_bytes().decode()
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as error:
            raise DestinationError(
                f"The {CARD} at the destination cannot be read: {error}.",
                hint="Correct it; or move it away and run again, which writes a new one.",
            ) from error

    def close(self) -> None:
        """Nothing is held open."""


def make_folder(root: Path) -> None:
    """A folder for shards."""
    if root.exists() and not root.is_dir():
        raise DestinationError(f"{str(root)!r} is a file.", hint="Give a folder.")
    with failures(root):
        (root / "data").mkdir(parents=True, exist_ok=True)


_AHEAD_CHUNKS = 2  # read before the ones in front of them are written and hashed


class _Behind:
    """A thread that does one thing with each chunk, in order. An executor's future for each takes ten times as long
    as to hand a chunk over, with the interpreter held, which those who read need after each value."""

    def __init__(self, name: str, do: Callable[[memoryview], None]) -> None:
        self._do = do
        self._given: SimpleQueue[memoryview | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name)

    def _work(self) -> None:
        while (chunk := self._given.get()) is not None:
            failed: BaseException | None = None
            try:
                self._do(chunk)
            except BaseException as error:  # noqa: BLE001  # for whoever gave the chunk
                failed = error
            del chunk  # its buffer is used again
            self._done.put(failed)

    def give(self, chunk: memoryview) -> None:
        self._given.put(chunk)

    def settle(self) -> None:
        """Wait for the first chunk that was not waited for; what went wrong with it is raised."""
        failed = self._done.get()
        if failed is not None:
            raise failed

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._given.put(None)
        self._thread.join()


def _write_and_hash(file: DirectFile, splice: Splice, advance: Callable[[int], None]) -> str:
    """One pass over the bytes: while a chunk is hashed and written, by two threads, the next ones are read."""
    digest = hashlib.sha256()
    written = 0
    coming: deque[int] = deque()

    def settle(most: int) -> None:
        nonlocal written
        while len(coming) > most:
            hasher.settle()
            writer.settle()
            size = coming.popleft()
            written += size
            advance(size)

    with _Behind("hash", digest.update) as hasher, _Behind("write", file.write) as writer:
        for chunk in splice.chunks(keep=Buffers(BUFFER_BYTES)):
            hasher.give(chunk)
            writer.give(chunk)
            coming.append(len(chunk))
            settle(_AHEAD_CHUNKS)
        settle(0)
    if written != splice.size:
        raise ValueError(f"a splice of {splice.size} bytes gave {written}")
    return digest.hexdigest()

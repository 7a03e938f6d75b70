"""The storage contract spoken to today's functions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from brim.state.retry import look
from brim.storage.explain_error import explained
from brim.storage.listing import list_objects, read_small, stat_objects
from brim.storage.location import Access, Location, is_web_file, parse_object_address
from brim.storage.reading import Changed as Changed
from brim.storage.reading import ahead, as_they_come, cut
from brim.storage.storage import ObjectStat, open_storage
from brim.storage.storage_error import StorageError
from brim.stores.bucket_store import BucketCarrier
from brim.stores.folder_store import FolderCarrier


class _Watcher:
    def hashed(self, size: int) -> None:
        look()

    def sent(self, size: int) -> None:
        look()


class TodayStorage:
    def __init__(self, address: str) -> None:
        self._folder = Path(address) if "://" not in address else None
        if is_web_file(address):
            scheme, _, host = address.partition("://")
            self._address = Location(scheme, host, "")
        elif self._folder is None:
            self._address = parse_object_address(address, Access())
        self.location: Any = self._folder or self._address

    def list(self) -> Iterator[tuple[str, ObjectStat]]:
        if self._folder is None:
            yield from list_objects(self._address)
            return
        for top, _, names in os.walk(self._folder):
            for name in names:
                path = Path(top) / name
                yield str(path.relative_to(self._folder)), _info(path)

    def stat(self, names: Sequence[str]) -> Iterator[ObjectStat | None]:
        if self._folder is None:
            return stat_objects(self._address, names)
        paths = [self._folder / name for name in names]
        return iter([_info(path) if path.exists() else None for path in paths])

    def stream(self, name: str, size: int, version: str) -> Iterator[memoryview]:
        if self._folder is None:
            pieces = as_they_come(self._address, cut(self._address.key(name), 0, size, version))
            yield from (view for _, view in pieces)
            return
        with open(self._folder / name, "rb") as file:
            while block := file.read(1 << 20):
                yield memoryview(block)

    def read(self, name: str, start: int, stop: int, version: str) -> bytes:
        if self._folder is None:
            pieces = cut(self._address.key(name), start, stop, version)
            return b"".join(data for _, data in ahead(self._address, pieces))
        with open(self._folder / name, "rb") as file:
            file.seek(start)
            data = file.read(stop - start)
        if _info(self._folder / name).etag != version:
            raise Changed(f"{name} was replaced")
        return data

    def read_small(self, name: str) -> bytes | None:
        if self._folder is None:
            return read_small(self._address, name)
        path = self._folder / name
        return path.read_bytes() if path.exists() else None

    def put(self, name: str, blocks: Iterable[bytes], size: int | None = None) -> None:
        carrier: Any = BucketCarrier(self._address) if self._folder is None else FolderCarrier(self._folder)
        carrier.put(name, Blocks(blocks, size), None, _Watcher())

    def put_bytes(self, name: str, data: bytes) -> None:
        if self._folder is not None:
            (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self._folder / name).write_bytes(data)
            return
        with explained(self._address):
            open_storage(self._address).put_bytes(self._address.key(name), data)

    def put_if(self, name: str, data: bytes, expected: Any) -> Any:
        if self._folder is not None:
            return None
        try:
            return open_storage(self._address).put_instead(self._address.key(name), data, expected)
        except StorageError as error:
            if error.is_changed:
                raise Changed(f"{name} was replaced") from None
            if error.is_unsupported:
                return None
            raise

    def move(self, source: str, target: str) -> None:
        if self._folder is not None:
            os.rename(self._folder / source, self._folder / target)
            return
        with explained(self._address):
            open_storage(self._address).copy(self._address.key(source), self._address.key(target))
        self.delete([source])

    def delete(self, names: Sequence[str]) -> None:
        if self._folder is not None:
            for name in names:
                (self._folder / name).unlink(missing_ok=True)
            return
        with explained(self._address):
            open_storage(self._address).delete([self._address.key(name) for name in names])


def _info(path: Path) -> ObjectStat:
    found = path.stat()
    return ObjectStat(found.st_size, f"{found.st_mtime_ns}-{found.st_ino}-{found.st_size}")


class Blocks:
    """Content of a few blocks, as a splice gives them."""

    def __init__(self, blocks: Iterable[bytes], size: int | None) -> None:
        self._blocks = blocks if size is not None else list(blocks)
        self.size = sum(map(len, self._blocks)) if size is None else size

    def chunks(
        self,
        start: int = 0,
        stop: int | None = None,
        buffer_bytes: int = 1 << 20,
        *,
        keep: object = None,
        as_they_come: bool = False,
    ) -> Iterator[memoryview]:
        at, stop = 0, self.size if stop is None else stop
        for block in self._blocks:
            view = memoryview(block)[max(start - at, 0) : max(stop - at, 0)]
            at += len(block)
            for first in range(0, len(view), buffer_bytes):
                yield view[first : first + buffer_bytes]

"""Bring shards to a bucket: the part of the sink that other machines can do as well."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from brim.errors import BrimError, SinkFailed
from brim.formats.buffers import Buffers
from brim.formats.splice import Splice
from brim.objects.address import ObjectAddress
from brim.objects.failures import explain, explained, is_object_error, is_passing
from brim.objects.listing import stat_object
from brim.objects.sending import PART_BYTES, delete_objects, part_bytes, send_parts, send_small
from brim.objects.store import patience_s
from brim.objects.uploads import CannotTell, abort_uploads
from brim.sinks.sink import Put, Watcher

CHECKS = "check-"  # what the names of objects begin with that only try whether one may write
_TRIES = 3
_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class ObjectCarrier:
    """Shards to `address`, with so many parts of one on their way at a time. Credentials are the machine's own."""

    address: ObjectAddress
    in_flight: int = 2

    def check(self) -> None:
        """Whether this machine may write there."""
        key = self.address.key(f".brim/{CHECKS}{time.time_ns():x}")
        with explained(self.address):
            send_small(self.address, key, b"")
            delete_objects(self.address, [key])

    def put(self, name: str, splice: Splice, sha256: str | None, watcher: Watcher) -> Put:
        for attempt in range(_TRIES):
            began = time.monotonic()
            try:
                return self._put(name, splice, _Told(watcher, quiet=attempt > 0))
            except Exception as error:
                if isinstance(error, BrimError) or not is_object_error(error):
                    self.drop(name)
                    raise
                # obstore has tried again what it may. What it may not, like a part whose answer was lost, is sent anew.
                if not is_passing(error) or attempt + 1 == _TRIES or time.monotonic() - began > patience_s():
                    self.drop(name)
                    raise explain(error, self.address) from None
            except BaseException:
                self.drop(name)
                raise
            time.sleep(_WAIT_S)
        raise AssertionError("the last try returns or raises")

    def _put(self, name: str, splice: Splice, watcher: _Told) -> Put:
        digest = hashlib.sha256()
        key, size = self.address.key(name), part_bytes(splice.size)

        def parts() -> Iterator[memoryview]:
            """Each its own memory: a part may be sent again while the next ones are made."""
            for part in splice.chunks(buffer_bytes=size, keep=Buffers(size)):
                digest.update(part)
                yield part
                watcher.sent(len(part))

        if splice.size <= size:
            etag = send_small(self.address, key, next(iter(list(parts())), memoryview(b"")))
        else:
            in_flight = max(1, self.in_flight * PART_BYTES // size)
            etag = send_parts(self.address, key, parts(), size, in_flight, lambda: watcher.sent(0))
        there = stat_object(self.address.below(name), reading=False)
        if there is None or there.st_size != splice.size:
            there_are = "is not there" if there is None else f"has {there.st_size:,} there"
            raise SinkFailed(
                f"{self.address.below(name)} was sent with {splice.size:,} bytes and {there_are}.",
                hint="Somebody else may be writing to the same place. Run the same command again.",
            )
        return Put(digest.hexdigest(), etag=etag or there.etag)

    def drop(self, name: str) -> None:
        """What was begun and will not be finished."""
        key = self.address.key(name)
        try:
            abort_uploads(self.address, key, lambda found: found == key)
        except CannotTell:
            pass  # the next run tries again


class _Told:
    """Tells of bytes once, however often they are sent."""

    def __init__(self, watcher: Watcher, quiet: bool) -> None:
        self._watcher, self._quiet = watcher, quiet

    def sent(self, size: int) -> None:
        self._watcher.sent(0 if self._quiet else size)

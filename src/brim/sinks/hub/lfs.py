"""Send a shard by Git LFS: hash it, ask whether the Hub has it, and send it in one or several parts if not.

The library's own functions do the requests and try again what may pass. They need a file that can be
read twice: a splice is one, without ever being a file.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

from brim.errors import SinkFailed
from brim.formats.seekable import Seekable
from brim.formats.splice import Splice
from brim.sinks.hub.address import Address
from brim.sinks.hub.operations import addition, upload_info
from brim.sinks.hub.session import status_of
from brim.sinks.sink import Piece, Put, Watcher

_EXPIRED = 403  # how storage answers to a pre-signed URL whose time is over
_TRIES = 4


class Lfs:
    """`send` is called by several threads."""

    name = "LFS"
    hashes_first = True

    def __init__(self, address: Address, token: str, endpoint: str | None = None) -> None:
        self._address, self._token, self._endpoint = address, token, endpoint

    def send(self, name: str, splice: Splice, sha256: str | None, watcher: Watcher) -> Put:
        from huggingface_hub.lfs import lfs_upload

        piece = Piece(name, splice.size, sha256 or splice.sha256(watcher.hashed))
        content = _Content(splice, watcher)
        refusal: Exception | None = None
        for attempt in range(_TRIES):
            action = self.asked([piece]).get(piece.sha256)
            if action is None:
                watcher.sent(0 if attempt else piece.size)  # a try that failed late has counted its bytes
                return Put(piece.sha256, sent=attempt > 0)
            content.seek(0)
            try:
                lfs_upload(addition(piece, content), action, token=self._token, endpoint=self._endpoint)
            except Exception as error:
                if status_of(error) != _EXPIRED:
                    raise
                refusal = error
                continue  # with new URLs
            return Put(piece.sha256, sent=True)
        raise SinkFailed(
            f"The Hub's storage refuses {name} (403), with {_TRIES} different URLs.",
            hint="The line may be too slow for them: try smaller shards, or --via=xet. Other shards are kept.",
        ) from refusal

    def asked(self, pieces: list[Piece]) -> dict[str, dict[str, object]]:
        """What the Hub wants of these objects, by SHA-256; those it has are left out."""
        from huggingface_hub.lfs import post_lfs_batch_info

        wanted: dict[str, dict[str, object]] = {}
        for start in range(0, len(pieces), 256):
            actions, errors, _ = post_lfs_batch_info(
                [upload_info(piece) for piece in pieces[start : start + 256]],
                token=self._token,
                repo_type="dataset",
                repo_id=self._address.repo,
                endpoint=self._endpoint,
            )
            if errors:
                raise SinkFailed(f"The Hub refuses an object: {errors[0]['error']['message']}.")
            wanted |= {action["oid"]: action for action in actions if action.get("actions")}
        return wanted


class _Content(Seekable, io.BufferedIOBase):
    """A splice as the file that the library reads: in small steps, forwards, again from the start after a failure."""

    def __init__(self, splice: Splice, watcher: Watcher) -> None:
        self._splice, self._watcher = splice, watcher
        self._furthest = 0
        self._chunks: Iterator[memoryview] | None = None
        self._chunk = memoryview(b"")

    def _size(self) -> int:
        return self._splice.size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        before = self._at
        if super().seek(offset, whence) != before:
            self._chunks, self._chunk = None, memoryview(b"")
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            size = self._splice.size - self._at
        parts = []
        while size > 0 and self._at < self._splice.size:
            if not self._chunk:
                self._chunks = self._chunks or self._splice.chunks(self._at)
                self._chunk = next(self._chunks)
            parts.append(bytes(self._chunk[:size]))
            self._chunk = self._chunk[len(parts[-1]) :]
            self._at += len(parts[-1])
            size -= len(parts[-1])
        if self._at > self._furthest:  # what is sent again is not counted again
            self._watcher.sent(self._at - self._furthest)
            self._furthest = self._at
        else:
            self._watcher.sent(0)
        return b"".join(parts)

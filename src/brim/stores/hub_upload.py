"""Two ways for a shard to get to a repository: LFS, and Xet (storage/xet.py).

Xet works in lanes, a shard and a block of 64 MB each, as many as fit the memory that a user has set; without such a
word, or with little of it, it sends shards in pieces.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterator
from functools import partial

from brim.errors import BrimError, DestinationError, DestinationUnavailableError, MemoryLimitError
from brim.formats.file_views import Seekable
from brim.formats.splice import Splice
from brim.sizes import format_size
from brim.state.ledger import Piece
from brim.state.retry import check_stop, may_pass
from brim.storage.hub_private import addition, upload_info
from brim.storage.hub_session import (
    HubAnswer,
    answer_of,
    ask_hub,
    explained_answer,
    hub_tries,
    scrubbed,
    status_of,
    unexpected,
)
from brim.storage.location import Location
from brim.storage.storage import PutResult
from brim.storage.upload_content import UploadWatcher
from brim.storage.xet import (
    BASE_BYTES,
    LANE_BYTES,
    XET_BYTES,
    XetError,
    XetToken,
    XetUnavailableError,
    XetUploader,
    token_of,
)
from brim.stores.store import SendingRoom

_TOLD_BY_CODE = (400, 403, 409)
_EXPIRED = 403  # how storage answers to a pre-signed URL whose time is over


class Lfs:
    """`send` is called by several threads."""

    name = "LFS"
    hashes_first = True

    def __init__(self, address: Location, token: str, endpoint: str | None = None) -> None:
        self._address, self._token, self._endpoint = address, token, endpoint

    def send(self, name: str, splice: Splice, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        from huggingface_hub.lfs import lfs_upload

        piece = Piece(name, splice.size, sha256 or splice.sha256(watcher.hashed))
        content = _Content(splice, watcher)
        renewed = False
        retry = hub_tries()
        for attempt in itertools.count():
            action = self.asked([piece]).get(piece.sha256)
            if action is None:
                watcher.sent(0 if attempt else piece.size)  # a try that failed late has counted its bytes
                return PutResult(piece.sha256, sent=attempt > 0)
            content.seek(0)
            try:
                ask_hub(partial(lfs_upload, addition(piece, content), action, self._token, endpoint=self._endpoint))
            except Exception as error:
                answer = answer_of(error)
                expired = answer is not None and answer.status == _EXPIRED and not answer.by_hub
                # The library has tried again what its status says may pass; it does not know codes of storage.
                told = answer is not None and answer.status in _TOLD_BY_CODE
                if not (expired and not renewed) and not (told and retry.again(error)):
                    raise
                renewed = renewed or expired  # the next round asks for new addresses
                continue
            return PutResult(piece.sha256, sent=True)
        raise AssertionError("counting does not end")

    def asked(self, pieces: list[Piece]) -> dict[str, dict[str, object]]:
        """What the Hub wants of these objects, by SHA-256; those it has are left out."""
        from huggingface_hub.lfs import post_lfs_batch_info

        wanted: dict[str, dict[str, object]] = {}
        for start in range(0, len(pieces), 256):
            ask = partial(
                post_lfs_batch_info,
                [upload_info(piece) for piece in pieces[start : start + 256]],
                token=self._token,
                repo_type="dataset",
                repo_id=self._address.repo,
                endpoint=self._endpoint,
            )
            actions, errors, _ = ask_hub(ask)
            if errors:
                told = errors[0]["error"]
                code = told.get("code")
                answer = HubAnswer(code if isinstance(code, int) else 422, "", scrubbed(str(told["message"])), True)
                raise explained_answer(answer, self._address.repo)
            wanted |= {action["oid"]: action for action in actions if action.get("actions")}
        return wanted


class _Content(Seekable, io.BufferedIOBase):
    """A splice as the file that the library reads: in small steps, forwards, again from the start after a failure."""

    def __init__(self, splice: Splice, watcher: UploadWatcher) -> None:
        self._splice, self._watcher = splice, watcher
        self._furthest = 0
        self._chunks: Iterator[memoryview] | None = None
        self._chunk = memoryview(b"")

    def _size(self) -> int:
        return self._splice.size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        before = self._position
        if super().seek(offset, whence) != before:
            self._chunks, self._chunk = None, memoryview(b"")
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        check_stop()  # after a stop the splice is closed, and a request that was abandoned must not read from it
        if size is None or size < 0:
            size = self._splice.size - self._position
        parts = []
        while size > 0 and self._position < self._splice.size:
            if not self._chunk:
                self._chunks = self._chunks or self._splice.chunks(self._position)
                self._chunk = next(self._chunks)
            parts.append(bytes(self._chunk[:size]))
            self._chunk = self._chunk[len(parts[-1]) :]
            self._position += len(parts[-1])
            size -= len(parts[-1])
        if self._position > self._furthest:  # what is sent again is not counted again
            self._watcher.sent(self._position - self._furthest)
            self._furthest = self._position
        else:
            self._watcher.sent(0)
        return b"".join(parts)


_MOST_LANES = 16


class Xet:
    """`send` is called by several threads, each with commits of its own to the storage server."""

    name = "Xet"
    hashes_first = False

    def __init__(self, address: Location, token: str, room: SendingRoom, endpoint: str | None = None) -> None:
        # In pieces, unless someone said that there is memory for more.
        lanes = min((room.bytes - BASE_BYTES) // LANE_BYTES, _MOST_LANES, room.workers) if room.asked_for else 0
        if lanes < 1 and room.bytes < XET_BYTES:
            raise MemoryLimitError(
                f"Xet needs about {format_size(XET_BYTES)} beside the build, and "
                f"{format_size(max(room.bytes, 0))} are left.",
                hint="Use --upload-with=lfs, which needs none of it, or raise --memory.",
                need_bytes=XET_BYTES,
                limit_bytes=room.bytes,
            )
        self._line = XetUploader(lambda: _token(address, token, endpoint), int(lanes) if lanes >= 1 else None)

    def send(self, name: str, splice: Splice, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        def told(sent: int, hashed: int) -> None:
            watcher.hashed(0 if sha256 else hashed)  # else whoever knows it has told
            watcher.sent(sent)

        try:
            done = self._line.send(name, splice, sha256, told)
        except XetError as error:
            lasts = error.status is not None and not may_pass(error.status)
            raise (DestinationError if lasts else DestinationUnavailableError)(
                f"Sending {name} by Xet failed: {scrubbed(error.text)}.",
                hint=("" if lasts else "Run the same command to continue. ")
                + "With --upload-with=lfs the bytes go another way.",
            ) from error
        return PutResult(done.sha256, sent=True)


def _token(address: Location, token: str, endpoint: str | None) -> XetToken:
    """What lets us into the storage; XetUnavailableError where there is none."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    url = f"{HfApi(endpoint=endpoint).endpoint}/api/datasets/{address.repo}/xet-write-token/main"
    headers = build_hf_headers(token=token, library_name="brim")
    try:
        answer = ask_hub(lambda: http_backoff("GET", url, headers=headers))
        hf_raise_for_status(answer)
    except BrimError:
        raise
    except Exception as error:
        if status_of(error) in (404, 405, 501):
            raise XetUnavailableError("the server has no Xet storage") from error
        raise
    try:
        return token_of(answer.json(), url, headers)
    except ValueError as error:
        raise unexpected(error) from error

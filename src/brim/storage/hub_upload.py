"""Upload shards to a repository on the Hub, by LFS or by Xet (storage/xet.py).

Xet uploads in lanes, each of a shard and a block of 64 MB, as many as fit a memory limit that the user has chosen;
otherwise it uploads shards in pieces.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from brim.errors import BrimError, DestinationError, DestinationUnavailableError, MemoryLimitError
from brim.sizes import format_size
from brim.state.ledger import StoredFile
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
from brim.storage.upload_content import UploadContent, UploadWatcher
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

_STATUS_OF_STORAGE = (400, 403, 409)
_EXPIRED = 403  # of a pre-signed URL
_BATCH = 256
_MOST_LANES = 16


class HubContent(UploadContent, Protocol):
    """The bytes of a shard, which can be hashed before they are uploaded."""

    def sha256(self, advance: Callable[[int], None]) -> str: ...


class HubUpload(Protocol):
    """A protocol for uploads. `send` is called by several threads."""

    hashes_first: bool

    def send(self, name: str, content: HubContent, sha256: str | None, watcher: UploadWatcher) -> PutResult: ...


class LfsUpload:
    hashes_first = True

    def __init__(self, location: Location, token: str, endpoint: str | None = None) -> None:
        self._location, self._token, self._endpoint = location, token, endpoint

    def send(self, name: str, content: HubContent, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        from huggingface_hub.lfs import lfs_upload

        shard = StoredFile(name, content.size, sha256 or content.sha256(watcher.hashed))
        body = _UploadFile(content, watcher)
        was_renewed = False
        retry = hub_tries()
        for attempt in itertools.count():
            action = self.request([shard]).get(shard.sha256)
            if action is None:
                watcher.sent(0 if attempt else shard.size)  # an attempt that failed late has counted its bytes
                return PutResult(shard.sha256, sent=attempt > 0)
            body.seek(0)
            try:
                ask_hub(partial(lfs_upload, addition(shard, body), action, self._token, endpoint=self._endpoint))
            except Exception as error:
                answer = answer_of(error)
                is_expired = answer is not None and answer.status == _EXPIRED and not answer.by_hub
                # The library has retried transient statuses; it does not know the codes of storage.
                has_code = answer is not None and answer.status in _STATUS_OF_STORAGE
                if not (is_expired and not was_renewed) and not (has_code and retry.wait_to_retry(error)):
                    raise
                was_renewed = was_renewed or is_expired  # the next round requests new URLs
                continue
            return PutResult(shard.sha256, sent=True)
        raise AssertionError("counting does not end")

    def request(self, shards: list[StoredFile]) -> dict[str, dict[str, object]]:
        """Return how to upload these objects, by SHA-256, without those that the Hub has."""
        from huggingface_hub.lfs import post_lfs_batch_info

        requested: dict[str, dict[str, object]] = {}
        for start in range(0, len(shards), _BATCH):
            call = partial(
                post_lfs_batch_info,
                [upload_info(shard) for shard in shards[start : start + _BATCH]],
                token=self._token,
                repo_type="dataset",
                repo_id=self._location.repo,
                endpoint=self._endpoint,
            )
            actions, errors, _ = ask_hub(call)
            if errors:
                error = errors[0]["error"]
                code = error.get("code")
                status = code if isinstance(code, int) else 422
                answer = HubAnswer(status, "", scrubbed(str(error["message"])), True)
                raise explained_answer(answer, self._location.repo)
            requested |= {action["oid"]: action for action in actions if action.get("actions")}
        return requested


class _UploadFile(io.BufferedIOBase):
    """Content as the file that the library reads: in small steps, forwards, from the start again after a failure."""

    def __init__(self, content: UploadContent, watcher: UploadWatcher) -> None:
        self._content, self._watcher = content, watcher
        self._position = self._furthest = 0
        self._chunks: Iterator[memoryview] | None = None
        self._chunk = memoryview(b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._content.size}[whence]
        if base + offset != self._position:
            self._position, self._chunks, self._chunk = base + offset, None, memoryview(b"")
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        check_stop()  # after a stop the content is closed, and an abandoned request must not read from it
        if size is None or size < 0:
            size = self._content.size - self._position
        parts = []
        while size > 0 and self._position < self._content.size:
            if not self._chunk:
                self._chunks = self._chunks or self._content.chunks(self._position)
                self._chunk = next(self._chunks)
            parts.append(bytes(self._chunk[:size]))
            self._chunk = self._chunk[len(parts[-1]) :]
            self._position += len(parts[-1])
            size -= len(parts[-1])
        self._watcher.sent(max(self._position - self._furthest, 0))  # bytes that are sent again do not count twice
        self._furthest = max(self._position, self._furthest)
        return b"".join(parts)


class XetUpload:
    """`send` is called by several threads, each with its own commits to the storage server.

    `memory_bytes` and `workers` limit the lanes; `is_explicit`: the user chose the memory limit.
    """

    hashes_first = False

    def __init__(
        self,
        location: Location,
        token: str,
        memory_bytes: int,
        workers: int,
        is_explicit: bool,
        endpoint: str | None = None,
    ) -> None:
        lanes = min((memory_bytes - BASE_BYTES) // LANE_BYTES, _MOST_LANES, workers) if is_explicit else 0
        if lanes < 1 and memory_bytes < XET_BYTES:
            raise MemoryLimitError(
                f"Xet needs about {format_size(XET_BYTES)} in addition to the build, and "
                f"{format_size(max(memory_bytes, 0))} are left.",
                hint="Use --upload-with=lfs, which needs none of it, or raise --memory.",
                need_bytes=XET_BYTES,
                limit_bytes=memory_bytes,
            )
        self._xet = XetUploader(lambda: _write_token(location, token, endpoint), int(lanes) if lanes >= 1 else None)

    def send(self, name: str, content: HubContent, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        def report(sent: int, hashed: int) -> None:
            watcher.hashed(0 if sha256 else hashed)
            watcher.sent(sent)

        try:
            result = self._xet.send(name, content, sha256, report)
        except XetError as error:
            is_permanent = error.status is not None and not may_pass(error.status)
            raise (DestinationError if is_permanent else DestinationUnavailableError)(
                f"Sending {name} by Xet failed: {scrubbed(error.text)}.",
                hint=("" if is_permanent else "Run the same command to continue. ")
                + "--upload-with=lfs uses another protocol.",
            ) from error
        return PutResult(result.sha256, sent=True)


def _write_token(location: Location, token: str, endpoint: str | None) -> XetToken:
    """Return the token of the Xet storage; raise XetUnavailableError without one."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    url = f"{HfApi(endpoint=endpoint).endpoint}/api/datasets/{location.repo}/xet-write-token/main"
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

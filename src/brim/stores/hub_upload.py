"""Send a shard by Xet, the Hub's own storage: in one pass, hashed on the way, only the chunks it does not have.

Xet keeps blocks of 64 MB, by default up to 64 of them on their way at once: gigabytes on a fast line. Here
it works in lanes, a shard and a block each, as many as fit the memory that is left.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

from brim.errors import BrimError, DestinationError, DoesNotFit, SinkFailed
from brim.formats.seekable import Seekable
from brim.formats.splice import Splice
from brim.memory.release import give_back_heap, keep_heap_small
from brim.sizes import format_size
from brim.state.ledger import Piece
from brim.state.retry import may_pass
from brim.stores.hub_options import HubAddress
from brim.stores.hub_private import addition, upload_info
from brim.stores.hub_session import HubAnswer, answer_of, explained_answer, hub_tries, scrubbed, status_of
from brim.stores.store import Put, PutWatcher, SendingRoom

_TOLD_BY_CODE = (400, 403, 409)
_EXPIRED = 403  # how storage answers to a pre-signed URL whose time is over


class Lfs:
    """`send` is called by several threads."""

    name = "LFS"
    hashes_first = True

    def __init__(self, address: HubAddress, token: str, endpoint: str | None = None) -> None:
        self._address, self._token, self._endpoint = address, token, endpoint

    def send(self, name: str, splice: Splice, sha256: str | None, watcher: PutWatcher) -> Put:
        from huggingface_hub.lfs import lfs_upload

        piece = Piece(name, splice.size, sha256 or splice.sha256(watcher.hashed))
        content = _Content(splice, watcher)
        renewed = False
        retry = hub_tries()
        for attempt in itertools.count():
            action = self.asked([piece]).get(piece.sha256)
            if action is None:
                watcher.sent(0 if attempt else piece.size)  # a try that failed late has counted its bytes
                return Put(piece.sha256, sent=attempt > 0)
            content.seek(0)
            try:
                lfs_upload(addition(piece, content), action, token=self._token, endpoint=self._endpoint)
            except Exception as error:
                answer = answer_of(error)
                expired = answer is not None and answer.status == _EXPIRED and not answer.by_hub
                # The library has tried again what its status says may pass; it does not know codes of storage.
                told = answer is not None and answer.status in _TOLD_BY_CODE
                if not (expired and not renewed) and not (told and retry.again(error)):
                    raise
                renewed = renewed or expired  # the next round asks for new addresses
                continue
            return Put(piece.sha256, sent=True)
        raise AssertionError("counting does not end")

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
                told = errors[0]["error"]
                code = told.get("code")
                answer = HubAnswer(code if isinstance(code, int) else 422, "", scrubbed(str(told["message"])), True)
                raise explained_answer(answer, self._address.repo)
            wanted |= {action["oid"]: action for action in actions if action.get("actions")}
        return wanted


class _Content(Seekable, io.BufferedIOBase):
    """A splice as the file that the library reads: in small steps, forwards, again from the start after a failure."""

    def __init__(self, splice: Splice, watcher: PutWatcher) -> None:
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


# Measured with hf-xet 1.8 (benchmarks/publish.py): what a session takes, and what each lane adds.
BASE_BYTES = 15_000_000
LANE_BYTES = 200_000_000
_MOST_LANES = 16
_INGESTION_BYTES = 1 << 20
_AHEAD_BYTES = 80_000_000  # a block that is on the line, and a part of the next one
_TRIM_BYTES = 32 << 20
_PATIENCE_S = 5.0


_STATUS = re.compile(r"\b(?:status|error)\D{0,40}\(?([45]\d\d)\b", re.IGNORECASE)


class NoXet(Exception):
    """There is no Xet here: no library, or no storage of that kind on the server."""


class Xet:
    """`send` is called by several threads, each with a commit of its own to the storage server."""

    name = "Xet"
    hashes_first = False

    def __init__(self, address: HubAddress, token: str, room: SendingRoom, endpoint: str | None = None) -> None:
        # One lane, unless someone said how much memory there is for it.
        lanes = min((room.bytes - BASE_BYTES) // LANE_BYTES, _MOST_LANES if room.asked_for else 1, room.workers)
        if lanes < 1:
            raise DoesNotFit(
                f"Xet needs about {format_size(BASE_BYTES + LANE_BYTES)} beside the build, and "
                f"{format_size(max(room.bytes, 0))} are left.",
                hint="Use --via=lfs, which needs none of it, or raise --memory.",
                need_bytes=BASE_BYTES + LANE_BYTES,
                limit_bytes=room.bytes,
            )
        self._url, self._headers = _connection(address, token, endpoint)
        keep_heap_small()
        self._session = _session(int(lanes))
        self._lanes = threading.Semaphore(int(lanes))

    def send(self, name: str, splice: Splice, sha256: str | None, watcher: PutWatcher) -> Put:
        with self._lanes:
            try:
                return self._send(name, splice, sha256, watcher)
            except ConnectionError as error:  # what the library makes of every answer that it does not try again
                status = _STATUS.search(str(error))
                lasts = status is not None and not may_pass(int(status[1]))
                raise (DestinationError if lasts else SinkFailed)(
                    f"Sending {name} by Xet failed: {scrubbed(str(error))}.",
                    hint=("" if lasts else "Run the same command to continue. ")
                    + "With --via=lfs the bytes go another way.",
                ) from error
            finally:
                give_back_heap()

    def _send(self, name: str, splice: Splice, sha256: str | None, watcher: PutWatcher) -> Put:
        import hf_xet  # type: ignore[import-untyped]

        plain = {key: value for key, value in self._headers.items() if key.lower() != "authorization"}
        with self._session.new_upload_commit(
            token_refresh_url=self._url, token_refresh_headers=self._headers, custom_headers=plain
        ) as commit:
            stream = commit.start_upload_stream(name=name, sha256=sha256 or hf_xet.COMPUTE_SHA256)
            try:
                written = 0
                for chunk in splice.chunks():
                    stream.write(bytes(chunk))
                    written += len(chunk)
                    watcher.hashed(len(chunk))
                    watcher.sent(len(chunk))
                    if written % _TRIM_BYTES < len(chunk):
                        give_back_heap()
                    _wait_for_line(commit, written, watcher)
                done = stream.finish()
            except BaseException:
                stream.abort()
                raise
        return Put(sha256 or str(done.xet_info.sha256), sent=True)


def _wait_for_line(commit: Any, written: int, watcher: PutWatcher) -> None:
    """Do not run ahead of the line: what Xet has read and not sent it keeps in memory.

    What it does not count as sent for long is not on the line (the block that it fills), so the wait ends.
    """
    sent, since = -1, time.monotonic()
    while written - (now := int(commit.progress().total_bytes_completed)) > _AHEAD_BYTES:
        if now != sent:
            sent, since = now, time.monotonic()
        elif time.monotonic() - since > _PATIENCE_S:
            return
        watcher.sent(0)
        time.sleep(0.005)


def _session(lanes: int) -> Any:
    try:
        import hf_xet

        config = hf_xet.XetConfig().with_config(
            {
                "client.ac_max_upload_concurrency": lanes,
                "client.ac_initial_upload_concurrency": min(2, lanes),
                "data.max_concurrent_file_ingestion": lanes,
                "data.ingestion_block_size": _INGESTION_BYTES,
            }
        )
        return hf_xet.XetSession(config)
    except (ImportError, AttributeError, TypeError, ValueError, KeyError) as error:
        raise NoXet(f"hf_xet cannot be used: {error}") from error


def _connection(address: HubAddress, token: str, endpoint: str | None) -> tuple[str, dict[str, str]]:
    """Where write tokens for the storage server come from; NoXet where there are none."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    url = f"{HfApi(endpoint=endpoint).endpoint}/api/datasets/{address.repo}/xet-write-token/main"
    headers = build_hf_headers(token=token, library_name="brim")
    try:
        hf_raise_for_status(http_backoff("GET", url, headers=headers))
    except BrimError:
        raise
    except Exception as error:
        if status_of(error) in (404, 405, 501):
            raise NoXet("the server has no Xet storage") from error
        raise
    return url, headers

"""Upload bytes by Xet, the Hub's own storage: it cuts files into chunks and receives only those that it does not have.

hf_xet collects chunks into blocks of 64 MB, whose size cannot be set, and holds one twice while it sends it: 150 MB for
one file at a time. It ends a block earlier only where a commit ends. So, unless there is memory to spare, a large file
is sent twice: first in segments, each with its own commit, then as one. The second time every chunk is known already,
and only the list of them is sent. The segments overlap a little, because chunks are cut by content: after its first
ones, a segment has the same cuts as the file. It costs as much computing again, and 2 % more bytes. Two files are sent
at a time, so that one is cut into chunks while another is sent.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import field
from functools import partial
from typing import Any

from brim.memory.release import give_back_heap, keep_heap_small
from brim.records import dataclass
from brim.state.retry import interruptible
from brim.storage.upload_content import UploadContent

# Measured with hf-xet 1.8 (benchmarks/publish.py): what a session takes, and what a file adds while it is sent.
BASE_BYTES = 15_000_000
LANE_BYTES = 240_000_000  # of a file that is sent as one
_SEGMENTS_BYTES = 60_000_000  # of two files that are sent in segments
XET_BYTES = BASE_BYTES + _SEGMENTS_BYTES  # the least that it takes
SEGMENT_BYTES, _SEGMENT_LANES = 6 << 20, 2
_OVERLAP_BYTES = 1 << 19
_SMALL_BYTES = 1 << 16
_INGESTION_BYTES = 1 << 20
_AHEAD_BYTES = 80_000_000  # a block that is being sent, and a part of the next one
_STALLED_S = 5.0
_RENEW_S = 300.0  # before a token expires
_STATUS = re.compile(r"\b(?:status|error)\D{0,40}\(?([45]\d\d)\b", re.IGNORECASE)


class XetUnavailableError(Exception):
    """Xet cannot be used: the library is missing, or the server has no storage of that kind."""


class XetError(Exception):
    """The storage refused, with a status, or did not answer. The text is the library's: it may contain addresses."""

    def __init__(self, text: str, status: int | None) -> None:
        super().__init__(text, status)
        self.text, self.status = text, status


@dataclass(frozen=True, slots=True)
class XetToken:
    """Access to the storage for a while. The library gets the next token with `url` and `headers`, from the Hub."""

    storage: str
    secret: str = field(repr=False)
    expires: float
    url: str
    headers: dict[str, str] = field(repr=False)


def token_of(answer: Any, url: str, headers: dict[str, str]) -> XetToken:
    """Read the Hub's answer to a request for a token; ValueError for any other answer."""
    if not isinstance(answer, dict) or not {"casUrl", "accessToken", "exp"} <= answer.keys():
        raise ValueError("no token of Xet's storage")
    return XetToken(str(answer["casUrl"]), str(answer["accessToken"]), float(answer["exp"]), url, headers)


@dataclass(frozen=True, slots=True)
class XetFile:
    """A file that was sent: its hash in the storage, and its SHA-256."""

    hash: str
    sha256: str


class XetUploader:
    """Several threads call `send`; `lanes` of them run at a time, each with its own commits. None: in segments."""

    def __init__(self, get_token: Callable[[], XetToken], lanes: int | None = None) -> None:
        self._get_token, self._sends_segments = get_token, lanes is None
        lanes = lanes or _SEGMENT_LANES
        self._token = get_token()
        if self._sends_segments:
            keep_heap_small(large_bytes=None)
        try:
            import hf_xet  # type: ignore[import-untyped]

            config = hf_xet.XetConfig().with_config(
                {
                    "client.ac_max_upload_concurrency": lanes,
                    "client.ac_initial_upload_concurrency": min(2, lanes),
                    "data.max_concurrent_file_ingestion": lanes,
                    "data.ingestion_block_size": _INGESTION_BYTES,
                }
            )
            self._session: Any = hf_xet.XetSession(config)
            self._skipped, self._computed = hf_xet.SKIP_SHA256, hf_xet.COMPUTE_SHA256
            self._failures = (ConnectionError, TimeoutError, hf_xet.XetAuthenticationError)
        except (ImportError, AttributeError, TypeError, ValueError, KeyError) as error:
            raise XetUnavailableError(f"hf_xet cannot be used: {error}") from error
        self._lanes = threading.Semaphore(lanes)

    def send(
        self, name: str, content: UploadContent, sha256: str | None, advance: Callable[[int, int], None]
    ) -> XetFile:
        """Send a file. `advance` gets how many bytes were sent and how many hashed, and may raise to drop it."""
        is_small = content.size <= _SMALL_BYTES  # it needs little memory, and does not wait for shards
        in_segments = self._sends_segments and content.size > SEGMENT_BYTES
        with contextlib.nullcontext() if is_small else self._lanes:
            try:
                for start in range(0, content.size, SEGMENT_BYTES) if in_segments else ():
                    first, stop = max(start - _OVERLAP_BYTES, 0), min(start + SEGMENT_BYTES, content.size)
                    self._stream(name, content.chunks(first, stop), self._skipped, _after(start - first, advance))
                result = self._stream(
                    name,
                    content.chunks(),
                    sha256 or self._computed,
                    lambda size: advance(0 if in_segments else size, size),
                )
            except self._failures as error:  # raised for every answer that the library does not retry
                status = _STATUS.search(str(error))
                raise XetError(str(error), int(status[1]) if status else None) from error
            finally:
                give_back_heap()
        return XetFile(str(result.hash), sha256 or str(result.sha256))

    def _stream(self, name: str, chunks: Iterator[memoryview], sha256: Any, advance: Callable[[int], None]) -> Any:
        if time.time() >= self._token.expires - _RENEW_S:
            self._token = self._get_token()
        token = self._token
        commit = self._session.new_upload_commit(
            endpoint=token.storage,
            token=token.secret,
            token_expiry_unix_secs=int(token.expires),
            token_refresh_url=token.url,
            token_refresh_headers=token.headers,
            custom_headers={key: value for key, value in token.headers.items() if key.lower() != "authorization"},
        )
        try:
            stream = commit.start_upload_stream(name=name, sha256=sha256)
            written = 0
            for chunk in chunks:
                interruptible(partial(stream.write, bytes(chunk)))
                written += len(chunk)
                advance(len(chunk))
                _wait_for_network(commit, written, advance)
            result = interruptible(stream.finish)
            interruptible(commit.wait_to_finish)
        except BaseException:
            commit.abort()  # with the blocks that it is sending
            raise
        if self._sends_segments:
            give_back_heap()
        return result.xet_info


def _after(overlap: int, advance: Callable[[int, int], None]) -> Callable[[int], None]:
    """Return a function that counts each byte of a file once: not those of the overlap."""
    uncounted = overlap

    def sent(size: int) -> None:
        nonlocal uncounted
        repeated = min(uncounted, size)
        uncounted -= repeated
        advance(size - repeated, 0)

    return sent


def _wait_for_network(commit: Any, written: int, advance: Callable[[int], None]) -> None:
    """Do not run ahead of the network: Xet keeps unsent bytes in memory.

    The block that it fills is not counted as sent for long, so the wait ends.
    """
    sent, since = -1, time.monotonic()
    while written - (now := int(commit.progress().total_bytes_completed)) > _AHEAD_BYTES:
        if now != sent:
            sent, since = now, time.monotonic()
        elif time.monotonic() - since > _STALLED_S:
            return
        advance(0)
        time.sleep(0.005)

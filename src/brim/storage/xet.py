"""Bytes to Xet, the Hub's own storage: cut into chunks there, of which only those go that it does not have.

hf_xet collects chunks into blocks of 64 MB, whose size cannot be set, and holds one twice while it sends it: 150 MB for
one file at a time. It ends a block earlier only where a commit ends. So, unless there is memory to spare, a large file
is sent twice: first in pieces, each a commit of its own, then whole. The second time every chunk is known already, and
nothing goes but the list of them. The pieces overlap a little, because chunks are cut by content: a piece finds back to
the cuts of the whole after its first ones. It costs as much computing again, and 2 % more bytes. Two files go at a
time, so that one is cut into chunks while another is on the line.
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

# Measured with hf-xet 1.8 (benchmarks/publish.py): what a session takes, and what a file on its way adds.
BASE_BYTES = 15_000_000
LANE_BYTES = 240_000_000  # in one go
PIECES_BYTES = 60_000_000  # in pieces, two files at a time
XET_BYTES = BASE_BYTES + PIECES_BYTES  # the least that it takes
PIECE_BYTES, PIECE_LANES = 6 << 20, 2
OVERLAP_BYTES = 1 << 19
SMALL_BYTES = 1 << 16
_INGESTION_BYTES = 1 << 20
_AHEAD_BYTES = 80_000_000  # a block that is on the line, and a part of the next one
_PATIENCE_S = 5.0
_RENEW_S = 300.0  # before a token ends
_STATUS = re.compile(r"\b(?:status|error)\D{0,40}\(?([45]\d\d)\b", re.IGNORECASE)


class NoXet(Exception):
    """There is no Xet here: no library, or no storage of that kind on the server."""


class XetFailed(Exception):
    """The storage refused, with a status, or did not answer. The text is the library's: it may hold addresses."""

    def __init__(self, text: str, status: int | None) -> None:
        super().__init__(text, status)
        self.text, self.status = text, status


@dataclass(frozen=True, slots=True)
class XetToken:
    """What lets us in for a while. `url` and `headers` are how the library gets the next one, of the Hub."""

    storage: str
    secret: str = field(repr=False)
    ends: float
    url: str
    headers: dict[str, str] = field(repr=False)

    @property
    def lasts(self) -> bool:
        return time.time() < self.ends - _RENEW_S


def token_of(answer: Any, url: str, headers: dict[str, str]) -> XetToken:
    """Read the Hub's answer to a request for a token; ValueError if it is none."""
    if not isinstance(answer, dict) or not {"casUrl", "accessToken", "exp"} <= answer.keys():
        raise ValueError("no token of Xet's storage")
    return XetToken(str(answer["casUrl"]), str(answer["accessToken"]), float(answer["exp"]), url, headers)


@dataclass(frozen=True, slots=True)
class XetFile:
    """What was sent: how the storage calls it, and its SHA-256."""

    hash: str
    sha256: str


class XetLine:
    """`send` is called by several threads; `lanes` of them at a time, each with commits of its own. None: in pieces."""

    def __init__(self, token: Callable[[], XetToken], lanes: int | None = None) -> None:
        self._ask, self._in_pieces = token, lanes is None
        lanes = lanes or PIECE_LANES
        self._token = token()
        if self._in_pieces:
            keep_heap_small(large_bytes=None)
        self._session = _session(lanes)
        self._lanes = threading.Semaphore(lanes)

    def send(self, name: str, content: UploadContent, sha256: str | None, told: Callable[[int, int], None]) -> XetFile:
        """`told` hears how many bytes were sent and how many hashed, and may raise to drop it."""
        import hf_xet  # type: ignore[import-untyped]

        small = content.size <= SMALL_BYTES  # needs no room, and does not wait behind shards: a sign of life among them
        with contextlib.nullcontext() if small else self._lanes:
            try:
                if self._in_pieces and content.size > PIECE_BYTES:
                    for start in range(0, content.size, PIECE_BYTES):
                        first, stop = max(start - OVERLAP_BYTES, 0), min(start + PIECE_BYTES, content.size)
                        chunks = content.chunks(first, stop)
                        self._stream(name, chunks, hf_xet.SKIP_SHA256, _sent_beyond(start - first, told))
                    done = self._stream(
                        name, content.chunks(), sha256 or hf_xet.COMPUTE_SHA256, lambda size: told(0, size)
                    )
                else:
                    done = self._stream(
                        name, content.chunks(), sha256 or hf_xet.COMPUTE_SHA256, lambda size: told(size, size)
                    )
            except (ConnectionError, TimeoutError, hf_xet.XetAuthenticationError) as error:
                # What the library makes of every answer that it does not try again.
                status = _STATUS.search(str(error))
                raise XetFailed(str(error), int(status[1]) if status else None) from error
            finally:
                give_back_heap()
        return XetFile(str(done.hash), sha256 or str(done.sha256))

    def _stream(self, name: str, chunks: Iterator[memoryview], sha256: Any, told: Callable[[int], None]) -> Any:
        if not self._token.lasts:
            self._token = self._ask()
        token = self._token
        plain = {key: value for key, value in token.headers.items() if key.lower() != "authorization"}
        commit = self._session.new_upload_commit(
            endpoint=token.storage,
            token=token.secret,
            token_expiry_unix_secs=int(token.ends),
            token_refresh_url=token.url,
            token_refresh_headers=token.headers,
            custom_headers=plain,
        )
        try:
            stream = commit.start_upload_stream(name=name, sha256=sha256)
            written = 0
            for chunk in chunks:
                interruptible(partial(stream.write, bytes(chunk)))
                written += len(chunk)
                told(len(chunk))
                _wait_for_line(commit, written, told)
            done = interruptible(stream.finish)
            interruptible(commit.wait_to_finish)
        except BaseException:
            commit.abort()  # and what it has begun to send
            raise
        if self._in_pieces:
            give_back_heap()
        return done.xet_info


def _sent_beyond(overlap: int, told: Callable[[int, int], None]) -> Callable[[int], None]:
    """Tells of each byte of a file once."""
    left = overlap

    def sent(size: int) -> None:
        nonlocal left
        again = min(left, size)
        left -= again
        told(size - again, 0)

    return sent


def _wait_for_line(commit: Any, written: int, told: Callable[[int], None]) -> None:
    """Do not run ahead of the line: what Xet has read and not sent it keeps in memory.

    What it does not count as sent for long is not on the line (the block that it fills), so the wait ends.
    """
    sent, since = -1, time.monotonic()
    while written - (now := int(commit.progress().total_bytes_completed)) > _AHEAD_BYTES:
        if now != sent:
            sent, since = now, time.monotonic()
        elif time.monotonic() - since > _PATIENCE_S:
            return
        told(0)
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

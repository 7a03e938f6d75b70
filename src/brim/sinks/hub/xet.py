"""Send a shard by Xet, the Hub's own storage: in one pass, hashed on the way, only the chunks it does not have.

Xet keeps blocks of 64 MB, by default up to 64 of them on their way at once: gigabytes on a fast line. Here
it works in lanes, a shard and a block each, as many as fit the memory that is left.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from brim.errors import BrimError, DoesNotFit, SinkFailed
from brim.formats.splice import Splice
from brim.memory.heap import give_back_heap, keep_heap_small
from brim.sinks.hub.address import Address
from brim.sinks.hub.session import scrubbed, status_of
from brim.sinks.room import Room
from brim.sinks.sink import Put, Watcher
from brim.sizes import format_size

# Measured with hf-xet 1.8 (benchmarks/publish.py): what a session takes, and what each lane adds.
BASE_BYTES = 15_000_000
LANE_BYTES = 200_000_000
_MOST_LANES = 16
_INGESTION_BYTES = 1 << 20
_AHEAD_BYTES = 80_000_000  # a block that is on the line, and a part of the next one
_TRIM_BYTES = 32 << 20
_PATIENCE_S = 5.0


class NoXet(Exception):
    """There is no Xet here: no library, or no storage of that kind on the server."""


class Xet:
    """`send` is called by several threads, each with a commit of its own to the storage server."""

    name = "Xet"
    hashes_first = False

    def __init__(self, address: Address, token: str, room: Room, endpoint: str | None = None) -> None:
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

    def send(self, name: str, splice: Splice, sha256: str | None, watcher: Watcher) -> Put:
        with self._lanes:
            try:
                return self._send(name, splice, sha256, watcher)
            except ConnectionError as error:  # what the library makes of every answer that it does not try again
                raise SinkFailed(
                    f"Sending {name} by Xet failed: {scrubbed(str(error))}.",
                    hint="Run the same command to continue; with --via=lfs the bytes go another way.",
                ) from error
            finally:
                give_back_heap()

    def _send(self, name: str, splice: Splice, sha256: str | None, watcher: Watcher) -> Put:
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


def _wait_for_line(commit: Any, written: int, watcher: Watcher) -> None:
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


def _connection(address: Address, token: str, endpoint: str | None) -> tuple[str, dict[str, str]]:
    """Where write tokens for the storage server come from; NoXet where there are none."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import hf_raise_for_status, http_backoff

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

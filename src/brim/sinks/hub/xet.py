"""Send a shard by Xet, the Hub's own storage: in one pass, hashed on the way, only the chunks it does not have.

Xet keeps blocks of 64 MB in flight, by default up to 64 of them: gigabytes on a fast line. How many it may
keep follows from the memory limit here.
"""

from __future__ import annotations

from typing import Any

from brim.errors import BrimError, DoesNotFit
from brim.formats.splice import Splice
from brim.sinks.hub.address import Address
from brim.sinks.hub.session import status_of
from brim.sinks.sink import Put, Watcher
from brim.sizes import format_size

# Measured with hf-xet 1.8 (benchmarks/publish.py): what a session takes, and what each block in flight adds.
BASE_BYTES = 130_000_000
BLOCK_BYTES = 70_000_000
_MOST_BLOCKS = 16
_INGESTION_BYTES = 1 << 20


class NoXet(Exception):
    """There is no Xet here: no library, or no storage of that kind on the server."""


class Xet:
    """`send` is called by several threads, each with a commit of its own to the storage server."""

    name = "Xet"
    hashes_first = False

    def __init__(self, address: Address, token: str, room_bytes: int, workers: int) -> None:
        blocks = min((room_bytes - BASE_BYTES) // BLOCK_BYTES, _MOST_BLOCKS)
        if blocks < 1:
            raise DoesNotFit(
                f"Xet needs about {format_size(BASE_BYTES + BLOCK_BYTES)} beside the build, and "
                f"{format_size(max(room_bytes, 0))} are left.",
                hint="Use --via lfs, which needs none of it, or raise --memory.",
                need_bytes=BASE_BYTES + BLOCK_BYTES,
                limit_bytes=room_bytes,
            )
        self._url, self._headers = _connection(address, token)
        self._session = _session(int(blocks), workers)

    def send(self, name: str, splice: Splice, sha256: str | None, watcher: Watcher) -> Put:
        import hf_xet  # type: ignore[import-untyped]

        plain = {key: value for key, value in self._headers.items() if key.lower() != "authorization"}
        with self._session.new_upload_commit(
            token_refresh_url=self._url, token_refresh_headers=self._headers, custom_headers=plain
        ) as commit:
            stream = commit.start_upload_stream(name=name, sha256=sha256 or hf_xet.COMPUTE_SHA256)
            try:
                for chunk in splice.chunks():
                    stream.write(bytes(chunk))
                    watcher.hashed(len(chunk))
                    watcher.sent(len(chunk))
                done = stream.finish()
            except BaseException:
                stream.abort()
                raise
        return Put(sha256 or str(done.xet_info.sha256), sent=True)

    def close(self) -> None:
        self._session = None


def _session(blocks: int, workers: int) -> Any:
    try:
        import hf_xet

        config = hf_xet.XetConfig().with_config(
            {
                "client.ac_max_upload_concurrency": blocks,
                "client.ac_initial_upload_concurrency": min(2, blocks),
                "data.max_concurrent_file_ingestion": workers,
                "data.ingestion_block_size": _INGESTION_BYTES,
            }
        )
        return hf_xet.XetSession(config)
    except (ImportError, AttributeError, TypeError, ValueError, KeyError) as error:
        raise NoXet(f"hf_xet cannot be used: {error}") from error


def _connection(address: Address, token: str) -> tuple[str, dict[str, str]]:
    """Where write tokens for the storage server come from; NoXet where there are none."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import hf_raise_for_status, http_backoff

    url = f"{HfApi().endpoint}/api/datasets/{address.repo}/xet-write-token/main"
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

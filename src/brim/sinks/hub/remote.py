"""Files on the Hub to read from: any range of them, or all of them in one stream that is hashed on the way.

The Hub sends whoever asks for a large file on to its storage, with an address that expires. Each reader
keeps that address, and asks for a new one when it is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from brim.errors import SinkFailed
from brim.formats.readable import copy_by_reading
from brim.sinks.hub.client import HubClient, Remote, Snapshot
from brim.sinks.hub.session import is_passing, persistently

_WINDOW_BYTES = 1 << 18  # a Parquet footer and what else is small
_KEEP_BYTES = 8 << 20  # what a stream can go back: more than the largest page that is read whole
_READ_BYTES = 1 << 18
_TRIES = 6


class _Source:
    """One file of a snapshot, by range."""

    def __init__(self, client: HubClient, snapshot: Snapshot, name: str) -> None:
        self.client, self.name = client, name
        self.file: Remote = snapshot.tree[name]
        self._url = client.url(name, snapshot.commit)
        self._place: str | None = None

    def ask(self, start: int, stop: int) -> Any:
        """An open response with these bytes; close it."""
        from huggingface_hub.utils._http import get_session, hf_raise_for_status

        for attempt in range(2):
            place = self._place or self._find_place()
            own = place == self._url
            headers = {**(self.client.headers() if own else {}), "Range": f"bytes={start}-{stop - 1}"}
            request = get_session().build_request("GET", place, headers=headers)
            response = get_session().send(request, stream=True)
            if response.status_code in (401, 403) and not own and attempt == 0:
                response.close()
                self._place = None
                continue
            if response.status_code >= 300:
                response.read()
            hf_raise_for_status(response)
            return response
        raise AssertionError("the second try returns or raises")

    def _find_place(self) -> str:
        """Where the bytes are; the token goes to the Hub alone."""
        from huggingface_hub.utils._http import get_session, hf_raise_for_status

        response = get_session().head(self._url, headers=self.client.headers(), follow_redirects=False)
        hf_raise_for_status(response)
        where = response.headers.get("Location")
        self._place = str(response.url.join(where)) if where else self._url
        return self._place


class RangeFile:
    """Any range, by one request each; small reads near each other share one."""

    def __init__(self, client: HubClient, snapshot: Snapshot, name: str) -> None:
        self._source = _Source(client, snapshot, name)
        self.name, self.size = name, self._source.file.size
        self._at, self._window = 0, b""

    def read_at(self, offset: int, size: int) -> bytes:
        size = max(min(size, self.size - offset), 0)
        if not self._at <= offset <= offset + size <= self._at + len(self._window):
            start = offset
            if self.size - offset < _WINDOW_BYTES:  # near the end is a footer: take it whole
                start = max(self.size - _WINDOW_BYTES, 0)
            stop = min(max(offset + size, start + _WINDOW_BYTES), self.size)
            self._at, self._window = start, persistently(lambda: self._fetch(start, stop))
        begin = offset - self._at
        return self._window[begin : begin + size]

    def _fetch(self, start: int, stop: int) -> bytes:
        if stop <= start:
            return b""
        response = self._source.ask(start, stop)
        try:
            data = bytes(response.read())
        finally:
            response.close()
        if len(data) != stop - start:
            raise SinkFailed(f"The Hub gave {len(data)} bytes of {self.name} instead of {stop - start}.")
        return data

    def copy_to(self, descriptor: int, offset: int, size: int) -> None:
        copy_by_reading(self, descriptor, offset, size)

    def close(self) -> None:
        self._window = b""


class StreamFile:
    """Forwards, in one request, hashed on the way. A cut connection goes on where it was."""

    def __init__(self, client: HubClient, snapshot: Snapshot, name: str) -> None:
        self._source = _Source(client, snapshot, name)
        self.name, self.size = name, self._source.file.size
        self._digest = hashlib.sha256()
        self._kept = bytearray()  # the bytes before `_end`
        self._end = 0
        self._response: Any = None
        self._blocks: Iterator[bytes] = iter(())

    def read_at(self, offset: int, size: int) -> bytes:
        size = max(min(size, self.size - offset), 0)
        if offset < self._end - len(self._kept):
            raise ValueError(f"{self.name} is read forwards only")
        while self._end < offset + size:
            self._advance(offset)
        begin = offset - (self._end - len(self._kept))
        return bytes(self._kept[begin : begin + size])

    def _advance(self, needed_from: int) -> None:
        block = self._next_block()
        self._digest.update(block)
        self._kept += block
        self._end += len(block)
        spare = min(len(self._kept) - _KEEP_BYTES, needed_from - (self._end - len(self._kept)))
        if spare > _KEEP_BYTES // 2:
            del self._kept[:spare]

    def _next_block(self) -> bytes:
        for attempt in range(_TRIES):
            try:
                if self._response is None:
                    self._response = persistently(lambda: self._source.ask(self._end, self.size))
                    self._blocks = self._response.iter_raw(_READ_BYTES)
                block = next(self._blocks, b"")
            except Exception as error:
                self._drop()
                if not is_passing(error) or attempt + 1 == _TRIES:
                    raise
                continue
            if block:
                return block[: self.size - self._end]
            self._drop()
        raise SinkFailed(f"The Hub ends {self.name} after {self._end:,} of {self.size:,} bytes.")

    def _drop(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def sha256(self) -> str:
        """Of everything: what was not read yet is read now."""
        while self._end < self.size:
            self._advance(self.size)
        return self._digest.hexdigest()

    def copy_to(self, descriptor: int, offset: int, size: int) -> None:
        copy_by_reading(self, descriptor, offset, size)

    def close(self) -> None:
        self._drop()

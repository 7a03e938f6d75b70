"""Files on the Hub to read from: any range of them, or all of them in one stream that is hashed on the way.

The Hub sends whoever asks for a large file on to its storage, with an address that expires. Each reader
keeps that address, and asks for a new one when it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brim.errors import SinkFailed
from brim.remote_file import ForwardFile, WindowFile
from brim.state.retry import Retry
from brim.stores.hub_client import HubClient, HubEntry, Snapshot
from brim.stores.hub_session import is_passing, persistently

_READ_BYTES = 1 << 18
_TRIES = 6
_HOPS = 4  # to the storage, and once more if its address is too old


class _Source:
    """One file of a snapshot, by range."""

    def __init__(self, client: HubClient, snapshot: Snapshot, name: str) -> None:
        self.client, self.name = client, name
        self.file: HubEntry = snapshot.tree[name]
        self._url = client.url(name, snapshot.commit)
        self._place: str | None = None

    def ask(self, start: int, stop: int) -> Any:
        """An open response with these bytes; close it. The token goes to the Hub alone."""
        from huggingface_hub.utils import get_session, hf_raise_for_status

        for attempt in range(_HOPS):
            place = self._place or self._url
            own = place == self._url
            headers = {**(self.client.headers() if own else {}), "Range": f"bytes={start}-{stop - 1}"}
            request = get_session().build_request("GET", place, headers=headers)
            response = get_session().send(request, stream=True, follow_redirects=False)
            where = response.headers.get("Location")
            if response.status_code in (301, 302, 303, 307, 308) and where:
                response.close()
                self._place = str(response.url.join(where))
                continue
            if response.status_code in (401, 403) and not own and attempt < _HOPS - 2:
                response.close()
                self._place = None  # its time is over: the Hub gives another one
                continue
            if response.status_code >= 300:
                response.read()
            hf_raise_for_status(response)
            return response
        raise SinkFailed(f"The Hub sends whoever asks for {self.name} from one address to another without end.")


class RangeFile(WindowFile):
    """Any range."""

    def __init__(self, client: HubClient, snapshot: Snapshot, name: str) -> None:
        self._source = _Source(client, snapshot, name)
        super().__init__(name, self._source.file.size)

    def _fetch(self, start: int, stop: int) -> bytes:
        return persistently(lambda: self._ask(start, stop))

    def _ask(self, start: int, stop: int) -> bytes:
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


class StreamFile(ForwardFile):
    """In one request. A cut connection goes on where it was."""

    def __init__(self, client: HubClient, snapshot: Snapshot, name: str) -> None:
        self._source = _Source(client, snapshot, name)
        super().__init__(name, self._source.file.size)
        self._response: Any = None
        self._blocks: Iterator[bytes] = iter(())

    def _next_block(self) -> bytes:
        retry = Retry((0.0,) * (_TRIES - 1), is_passing)  # asking anew waits by itself
        while True:
            try:
                if self._response is None:
                    self._response = persistently(lambda: self._source.ask(self._end, self.size))
                    self._blocks = self._response.iter_raw(_READ_BYTES)
                block = next(self._blocks, b"")
            except Exception as error:
                self._drop()
                if not retry.again(error):
                    raise
                continue
            if block:
                return block[: self.size - self._end]
            self._drop()
            if retry.next_s() is None:
                raise SinkFailed(f"The Hub ends {self.name} after {self._end:,} of {self.size:,} bytes.")

    def _drop(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def close(self) -> None:
        self._drop()

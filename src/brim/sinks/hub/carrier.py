"""The part of the Hub's sink that travels: sends shards from another machine, and commits nothing.

It carries the address of the Hub and the token, so that workers need neither a login nor an environment of their own.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass, field

from brim.formats.splice import Splice
from brim.sinks.hub.address import Address
from brim.sinks.hub.lfs import Lfs
from brim.sinks.hub.session import explained, hub_session
from brim.sinks.hub.xet import NoXet, Xet
from brim.sinks.room import Room
from brim.sinks.sink import Piece, Put, Watcher

_REACH_S = 10.0
_ONE_BYTE = Piece("check", 1, hashlib.sha256(b"\0").hexdigest())

# What this process has opened. It is a worker's, and ends with its job; connections stay open from shard to shard.
_WAYS: dict[HubCarrier, Lfs | Xet] = {}
_SESSION: list[ExitStack] = []


@dataclass(frozen=True, slots=True)
class HubCarrier:
    """`room` is that of one shard; None: by LFS, which needs none."""

    address: Address
    endpoint: str
    token: str = field(repr=False)
    room: Room | None = None

    def check(self) -> None:
        """Ask for the right to send one byte, which is then not sent. First, without patience: is the Hub there?"""
        from huggingface_hub.utils._http import get_session

        _open_session()
        with explained(self.address.repo, begun=False):
            get_session().head(self.endpoint, timeout=_REACH_S)
            Lfs(self.address, self.token, self.endpoint).asked([_ONE_BYTE])

    def put(self, name: str, splice: Splice, sha256: str | None, watcher: Watcher) -> Put:
        _open_session()
        with explained(self.address.repo, begun=True):
            way = _WAYS.get(self)
            if way is None:
                way = _WAYS[self] = self._way()
            return way.send(name, splice, sha256, watcher)

    def _way(self) -> Lfs | Xet:
        """A machine that has no Xet sends the same bytes by LFS."""
        if self.room is not None:
            try:
                return Xet(self.address, self.token, self.room, self.endpoint)
            except NoXet:
                pass
        return Lfs(self.address, self.token, self.endpoint)


def _open_session() -> None:
    """The library, changed as brim uses it, from the first shard of this process to its end."""
    if not _SESSION:
        stack = ExitStack()
        stack.enter_context(hub_session(lambda text: None))
        _SESSION.append(stack)

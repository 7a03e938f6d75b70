"""Receipts: what is known of shards that are done, kept small.

A job may have a million shards. As Python objects their receipts take 600 MB, most of it for hashes as text; packed
into bytes they take 280 MB, half of which are the names.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, KeysView, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

from brim.sinks.sink import Piece


@dataclass(frozen=True, slots=True)
class Receipt:
    """A shard is done: what it is called, what it holds, what it was made of."""

    name: str
    split: str
    rows: int
    size: int
    sha256: str
    key: str
    mtimes: str
    job: str
    staged_at: int = 0  # when it was sent to where it is safe only for some hours; 0: it is where it belongs
    etag: str = ""  # what a bucket calls its content

    @property
    def piece(self) -> Piece:
        return Piece(self.name, self.size, self.sha256, self.etag)


Each = TypeVar("Each")


class Lazy(Sequence[Each], Generic[Each]):
    """What is made of names, whenever it is asked for and not before: a million would take much memory at once."""

    def __init__(self, names: Sequence[str], make: Callable[[str], Each]) -> None:
        self._names, self._make = names, make

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, at: int) -> Each: ...
    @overload
    def __getitem__(self, at: slice) -> Lazy[Each]: ...
    def __getitem__(self, at: int | slice) -> Each | Lazy[Each]:
        return Lazy(self._names[at], self._make) if isinstance(at, slice) else self._make(self._names[at])

    def __iter__(self) -> Iterator[Each]:
        return map(self._make, self._names)


@dataclass(slots=True)
class Total:
    """Of several shards."""

    shards: int = 0
    bytes: int = 0


def totals(receipts: Iterable[Receipt]) -> dict[str, Total]:
    """By split."""
    found: dict[str, Total] = {}
    for receipt in receipts:
        total = found.setdefault(receipt.split, Total())
        total.shards += 1
        total.bytes += receipt.size
    return found


# Rows, size, when it was staged, which split and job; two hashes; the length of the digest of dates, which follows with
# the ETag.
_PACKED = struct.Struct("<qqqI32s32sB")
_SHARED_AT = struct.calcsize("<qqq")


class Receipts(MutableMapping[str, Receipt]):
    """Receipts by name, in the order in which they came. One is made anew whenever it is asked for."""

    def __init__(self) -> None:
        self._packed: dict[str, bytes | Receipt] = {}
        self._shared: dict[tuple[str, str], int] = {}  # splits and jobs, which are few, by number
        self._pairs: list[tuple[str, str]] = []

    def __getitem__(self, name: str) -> Receipt:
        packed = self._packed[name]
        if isinstance(packed, Receipt):
            return packed
        rows, size, staged_at, shared, sha256, key, length = _PACKED.unpack_from(packed)
        split, job = self._pairs[shared]
        rest = packed[_PACKED.size :]
        dates, etag = rest[:length].hex(), rest[length:].decode()
        return Receipt(name, split, rows, size, sha256.hex(), key.hex(), dates, job, staged_at, etag)

    def __setitem__(self, name: str, receipt: Receipt) -> None:
        self._packed[name] = self._pack(receipt)

    def _pack(self, receipt: Receipt) -> bytes | Receipt:
        """A receipt with other texts than hashes stays what it is."""
        texts = (receipt.sha256, receipt.key, receipt.mtimes)
        try:
            hashes = [bytes.fromhex(text) for text in texts]
            if len(hashes[0]) != 32 or len(hashes[1]) != 32 or [h.hex() for h in hashes] != [*texts]:
                return receipt
            pair = (receipt.split, receipt.job)
            shared = self._shared.setdefault(pair, len(self._pairs))
            if shared == len(self._pairs):
                self._pairs.append(pair)
            numbers = (receipt.rows, receipt.size, receipt.staged_at, shared, *hashes[:2], len(hashes[2]))
            return _PACKED.pack(*numbers) + hashes[2] + receipt.etag.encode()
        except (TypeError, ValueError, struct.error):
            return receipt

    def __delitem__(self, name: str) -> None:
        del self._packed[name]

    def __contains__(self, name: object) -> bool:
        return name in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def keys(self) -> KeysView[str]:
        return self._packed.keys()

    def jobs(self) -> set[str]:
        """The jobs that the receipts are of."""
        found = self._packed.values()
        numbers = {each[_SHARED_AT : _SHARED_AT + 4] for each in found if isinstance(each, bytes)}
        others = {each.job for each in found if isinstance(each, Receipt)}
        return others | {self._pairs[int.from_bytes(number, "little")][1] for number in numbers}

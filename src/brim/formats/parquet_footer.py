"""Read a Parquet footer and check its numbers before pyarrow opens the file.

pyarrow trusts offsets and counts of a footer, and aborts the process for some that are damaged. Here every one of them
is compared with the file's size and with the schema. What the pages hold is not looked at.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from brim.errors import DamageFound
from brim.formats import thrift
from brim.formats.encrypted import encrypted
from brim.formats.readable import Readable, ReadableFile
from brim.formats.thrift import Struct

_TYPES, _CODECS, _FIXED = range(8), range(8), 7
_MOST_DEPTH = 64
_TAIL_BYTES = 64 * 1024
# What pyarrow raises for a file that is damaged; see `is_damage`.
UNREADABLE = (pa.ArrowException, OSError, ValueError, OverflowError)


def is_damage(error: BaseException) -> bool:
    """Whether an error is about the content of a file, and not about the disk or the server that it is read from."""
    return not isinstance(error, OSError) or (type(error) is OSError and error.errno is None)


def read_footer(shard: Readable) -> Struct:
    return thrift.decode(footer_bytes(shard))[0]


def footer_bytes(shard: Readable) -> bytes:
    """The footer as it lies in the file, mostly by one read; ValueError if there is none."""
    size = shard.size
    tail = shard.read_at(max(size - _TAIL_BYTES, 0), min(size, _TAIL_BYTES))
    if size > 12 and tail[-4:] == b"PARE":
        raise encrypted(shard.name)
    if size < 12 or tail[-4:] != b"PAR1":
        raise ValueError("it does not end like a Parquet file")
    length = int.from_bytes(tail[-8:-4], "little")
    if length > size - 12:
        raise ValueError("its footer is longer than the file")
    if length + 8 <= len(tail):
        return tail[len(tail) - 8 - length : -8]
    return shard.read_at(size - 8 - length, length)


def open_parquet(shard: Readable, **options: Any) -> pq.ParquetFile:
    """A Parquet file whose footer is checked first, and read once. Errors are those of `check_footer`."""
    _, data = check_footer(shard)
    try:
        ends = b"PAR1", len(data).to_bytes(4, "little") + b"PAR1"
        metadata = pq.read_metadata(pa.BufferReader(ends[0] + data + ends[1]))
        return pq.ParquetFile(ReadableFile(shard), metadata=metadata, pre_buffer=False, **options)
    except UNREADABLE as error:
        if not is_damage(error):
            raise
        raise damaged(shard.name, error) from error


def check_footer(shard: Readable) -> tuple[Struct, bytes]:
    """The footer, and its bytes; DamageFound if a number in it cannot be right, InputError if it is encrypted."""
    try:
        data = footer_bytes(shard)
        footer = thrift.decode(data)[0]
        leaves = _leaves(_structs(footer, 2))
        groups = _structs(footer, 4)
        rows = [_number(group, 3) for group in groups]
        if sum(rows) != _number(footer, 3):
            raise ValueError("its row groups have other rows than it says")
        for group in groups:
            chunks = _structs(group, 1)
            if len(chunks) != len(leaves):
                raise ValueError("a row group has other columns than the file")
            for chunk, leaf in zip(chunks, leaves, strict=True):
                _check_chunk(chunk, leaf, shard)
        for pair in _structs(footer, 5):
            if any(not isinstance(pair[n][1], bytes) for n in (1, 2) if n in pair):
                raise ValueError("its metadata are not texts")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(shard.name, error) from error
    return footer, data


def damaged(name: str, error: BaseException) -> DamageFound:
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return DamageFound(
        f"{name} is not a Parquet file that can be read: {reason[:300]}.", hint="Get or write the file again."
    )


def _structs(fields: Struct, number: int) -> list[Struct]:
    """The structs of a list; none if the field is absent."""
    items = fields[number][1].items if number in fields else []
    if not all(isinstance(item, dict) for item in items):
        raise ValueError("a list of its footer holds other things than it should")
    return list(items)


def _number(fields: Struct, number: int, most: int | None = None, default: int | None = None) -> int:
    """A number that is not negative, and not more than `most`."""
    value: Any = fields[number][1] if number in fields or default is None else default
    if not isinstance(value, int) or value < 0 or (most is not None and value > most):
        raise ValueError("a number of its footer is impossible")
    return value


def _leaves(elements: list[Struct]) -> list[int]:
    """The physical type of each leaf of the schema."""
    for element in elements:
        element[4][1].decode()
    found: list[int] = []
    left = [_number(elements[0], 5, default=0)]  # of each open group, how many of its fields are to come
    for element in elements[1:]:
        while left and not left[-1]:
            left.pop()
        if not left or len(left) > _MOST_DEPTH:
            raise ValueError("its schema is broken")
        left[-1] -= 1
        children = _number(element, 5, default=0)
        _number(element, 3, most=2, default=0)
        if children:
            left.append(children)
            continue
        kind = _number(element, 1, most=_TYPES.stop - 1)
        if kind == _FIXED and _number(element, 2) == 0:
            raise ValueError("its schema is broken")
        found.append(kind)
    if any(left):
        raise ValueError("its schema ends early")
    return found


def _check_chunk(chunk: Struct, kind: int, shard: Readable) -> None:
    """A column chunk lies within the file, and so do its indexes."""
    if 3 not in chunk:
        raise encrypted(shard.name)
    meta = chunk[3][1]
    if _number(meta, 1) != kind:
        raise ValueError("a column has another type than the schema says")
    _number(meta, 4, most=_CODECS.stop - 1)
    for number in (5, 6):
        _number(meta, number)
    if 1 in chunk:  # in another file
        return
    size, data = _number(meta, 7), _number(meta, 9)
    dictionary = _number(meta, 11, default=0)  # some writers say 0 for none
    if (min(data, dictionary) if dictionary else data) + size > shard.size:
        raise ValueError("a column runs past the end of the file")
    for offset, length in ((4, 5), (6, 7)):
        if offset in chunk and _number(chunk, offset) + _number(chunk, length) > shard.size:
            raise ValueError("the page index runs past the end of the file")

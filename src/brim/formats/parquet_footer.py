"""Read a Parquet footer and its schema, and check its numbers before pyarrow opens the file.

pyarrow trusts the offsets and counts of a footer, and some damaged ones make it abort the process. `check_footer`
compares all of them with the size of the file and with the schema. Pages are not checked here.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from brim.errors import VerificationError
from brim.formats import thrift
from brim.formats.encrypted import encrypted
from brim.formats.parquet_levels import OPTIONAL, REPEATED
from brim.formats.range_readers import FileView, Readable
from brim.formats.thrift import Struct
from brim.records import dataclass

_TYPES, _CODECS, _BYTE_ARRAY, _FIXED = range(8), range(8), 6, 7
_MAX_DEPTH = 64
_TAIL_BYTES = 64 * 1024
# The errors of pyarrow for a damaged file; see `is_damage`.
UNREADABLE = (pa.ArrowException, OSError, ValueError, OverflowError)


def is_damage(error: BaseException) -> bool:
    """Return whether an error is about the content of a file, not about the disk or server that it is read from."""
    return not isinstance(error, OSError) or (type(error) is OSError and error.errno is None)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A column of a Parquet file that has values. `levels` are the fields on the way that are OPTIONAL or REPEATED."""

    number: int
    path: tuple[str, ...]
    physical_type: int
    levels: tuple[int, ...]
    optional: bool  # whether the value itself may be null
    is_raw: bool  # bytes that are not declared as text or anything else

    @property
    def is_bytes(self) -> bool:
        return self.physical_type == _BYTE_ARRAY

    @property
    def max_repetition(self) -> int:
        return self.levels.count(REPEATED)

    @property
    def max_definition(self) -> int:
        return len(self.levels)

    @property
    def repeated(self) -> int:
        """Return the definition level of an element of the innermost list; 0 outside of lists."""
        return max((depth for depth, kind in enumerate(self.levels, 1) if kind == REPEATED), default=0)


def schema_leaves(footer: Struct) -> list[Leaf]:
    """Return all leaves of the schema, in the order of the column chunks. Raises ValueError if it is damaged."""
    elements = _structs(footer, 2)
    leaves: list[Leaf] = []
    remaining = [_number(elements[0], 5, default=0)]  # of each open group, the number of fields that follow
    parents: list[tuple[tuple[str, ...], tuple[int, ...]]] = [((), ())]  # path and levels of each open group
    elements[0][4][1].decode()
    for element in elements[1:]:
        while remaining and not remaining[-1]:
            remaining.pop(), parents.pop()
        if not remaining or len(remaining) > _MAX_DEPTH:
            raise ValueError("its schema is broken")
        remaining[-1] -= 1
        path, levels = parents[-1]
        repetition = _number(element, 3, maximum=2, default=0)
        path, levels = (*path, element[4][1].decode()), (*levels, repetition) if repetition else levels
        children = _number(element, 5, default=0)
        if children:
            remaining.append(children)
            parents.append((path, levels))
            continue
        kind = _number(element, 1, maximum=_TYPES.stop - 1)
        if kind == _FIXED and _number(element, 2) == 0:
            raise ValueError("its schema is broken")
        is_raw = kind == _BYTE_ARRAY and 6 not in element and 10 not in element
        leaves.append(Leaf(len(leaves), path, kind, levels, repetition == OPTIONAL, is_raw))
    if any(remaining):
        raise ValueError("its schema ends early")
    return leaves


def read_footer(shard: Readable) -> Struct:
    return thrift.decode(footer_bytes(shard))[0]


def footer_bytes(shard: Readable) -> bytes:
    """Read the footer, usually with one request. Raises ValueError if the file has none."""
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
    """Check the footer, read it once, and open the file with it. Raises the errors of `check_footer`."""
    _, data = check_footer(shard)
    try:
        metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + data + len(data).to_bytes(4, "little") + b"PAR1"))
        return pq.ParquetFile(FileView(shard), metadata=metadata, pre_buffer=False, **options)
    except UNREADABLE as error:
        if not is_damage(error):
            raise
        raise damaged(shard.name, error) from error


def check_footer(shard: Readable) -> tuple[Struct, bytes]:
    """Return the footer and its bytes. Raises VerificationError for an impossible number, InputError if encrypted."""
    try:
        data = footer_bytes(shard)
        footer = thrift.decode(data)[0]
        leaves = schema_leaves(footer)
        groups = _structs(footer, 4)
        rows = [_number(group, 3) for group in groups]
        if sum(rows) != _number(footer, 3):
            raise ValueError("its row groups do not have the number of rows that it declares")
        for group in groups:
            chunks = _structs(group, 1)
            if len(chunks) != len(leaves):
                raise ValueError("a row group has different columns than the file")
            for chunk, leaf in zip(chunks, leaves, strict=True):
                _check_chunk(chunk, leaf.physical_type, shard)
        for pair in _structs(footer, 5):
            if any(not isinstance(pair[n][1], bytes) for n in (1, 2) if n in pair):
                raise ValueError("its metadata are not texts")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(shard.name, error) from error
    return footer, data


def _check_chunk(chunk: Struct, kind: int, shard: Readable) -> None:
    """Check that a column chunk and its indexes are within the file."""
    if 3 not in chunk:
        raise encrypted(shard.name)
    meta = chunk[3][1]
    if _number(meta, 1) != kind:
        raise ValueError("a column has another type than the schema says")
    _number(meta, 4, maximum=_CODECS.stop - 1)
    for number in (5, 6):
        _number(meta, number)
    if 1 in chunk:  # in another file
        return
    size, data = _number(meta, 7), _number(meta, 9)
    dictionary = _number(meta, 11, default=0)  # some writers write 0 for none
    if (min(data, dictionary) if dictionary else data) + size > shard.size:
        raise ValueError("a column runs past the end of the file")
    for offset, length in ((4, 5), (6, 7)):
        if offset in chunk and _number(chunk, offset) + _number(chunk, length) > shard.size:
            raise ValueError("the page index runs past the end of the file")


def damaged(name: str, error: BaseException) -> VerificationError:
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return VerificationError(
        f"{name} is not a Parquet file that brim can read: {reason[:300]}.", hint="Download or write the file again."
    )


def _structs(fields: Struct, number: int) -> list[Struct]:
    """Return the structs of a list; none if the field is absent."""
    items = fields[number][1].items if number in fields else []
    if not all(isinstance(item, dict) for item in items):
        raise ValueError("a list in its footer has items of another type than it should")
    return list(items)


def _number(fields: Struct, number: int, maximum: int | None = None, default: int | None = None) -> int:
    """Return a number that is neither negative nor above `maximum`."""
    value: Any = fields[number][1] if number in fields or default is None else default
    if not isinstance(value, int) or value < 0 or (maximum is not None and value > maximum):
        raise ValueError("a number of its footer is impossible")
    return value

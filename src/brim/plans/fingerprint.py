"""Digests of what decides the output's bytes, and of nothing else.

Two tables with the same content have the same digest, however their memory is laid out and whichever
release of pyarrow made them: chunks, offsets and what lies behind nulls do not count.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim import partition as cuts
from brim.file_set import Bools, Ints
from brim.sizes import format_size
from brim.sources.read_table import plain_type

_PIECE_BYTES = 8_000_000  # of a column that are looked at together
_BLOCK = 10_000  # items of a list that are written as JSON at a time
_ENCODER = json.JSONEncoder(sort_keys=True, default=str)
Pieces = Callable[[], Iterator[Any]]  # the arrays of a column, from its beginning whenever asked


def digest_table(table: pa.Table, *, deep: bool = False) -> str:
    """The SHA-256 of a table's names, types and values.

    `deep` takes lists of fixed length and extension types by their values and not by their text, which is
    slow; it gives them another digest.
    """
    digest = hashlib.sha256()
    for name in table.column_names:
        field = table.schema.field(name)
        digest.update(json.dumps([name, str(field.type), field.nullable, table.num_rows]).encode())
        kind = plain_type(field.type)  # few functions take views
        _feed(digest, kind, _pieces(table.column(name), kind), deep)
    return digest.hexdigest()


def digest_json(value: Any) -> str:
    return hashlib.sha256(_ENCODER.encode(value).encode()).hexdigest()


def digest_items(items: Iterable[Any]) -> str:
    """What `digest_json` gives for a list of the items, without holding it."""
    digest, separator = hashlib.sha256(b"["), ""
    rest = iter(items)
    while block := list(itertools.islice(rest, _BLOCK)):
        digest.update(f"{separator}{_ENCODER.encode(block)[1:-1]}".encode())
        separator = ", "
    digest.update(b"]")
    return digest.hexdigest()


def digest_ints(values: Ints) -> str:
    return hashlib.sha256(values.astype("<i8").tobytes()).hexdigest()


def _pieces(column: pa.ChunkedArray, kind: pa.DataType) -> Pieces:
    """A column in pieces of few bytes: it may be larger than memory."""
    small = cuts.arrow_bytes(column) <= _PIECE_BYTES  # found out without weighing every value
    edges = [0, len(column)] if small else cuts.fill(cuts.column_bytes(column), _PIECE_BYTES).tolist()

    def pieces() -> Iterator[Any]:
        for start, stop in itertools.pairwise(edges):
            for piece in column.slice(start, stop - start).chunks:
                yield piece if kind == column.type else piece.cast(kind)

    return pieces


def _feed(digest: hashlib._Hash, kind: pa.DataType, pieces: Pieces, deep: bool) -> None:
    if pa.types.is_dictionary(kind):
        _feed(digest, kind.value_type, lambda: (p.dictionary_decode() for p in pieces()), deep)
        return
    if deep and isinstance(kind, pa.BaseExtensionType):
        _feed(digest, kind.storage_type, lambda: (p.storage for p in pieces()), deep)
        return
    digest.update(sum(len(piece) for piece in pieces()).to_bytes(8, "little"))
    _feed_bits(digest, (piece.is_valid().to_numpy(zero_copy_only=False) for piece in pieces()))

    def values() -> Iterator[Any]:
        return (piece.drop_null() if piece.null_count else piece for piece in pieces())

    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        for piece in values():
            digest.update(pc.list_value_length(piece).to_numpy().astype("<i8").tobytes())
        _feed(digest, kind.value_type, lambda: (piece.flatten() for piece in values()), deep)
    elif deep and pa.types.is_fixed_size_list(kind):
        _feed(digest, kind.value_type, lambda: (piece.flatten() for piece in values()), deep)
    elif pa.types.is_struct(kind):
        for number, field in enumerate(kind):
            _feed(digest, field.type, lambda n=number: (piece.flatten()[n] for piece in values()), deep)  # type: ignore[misc]
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        _feed_bytes(digest, lambda: (piece.cast(pa.large_string()) for piece in values()))
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        _feed_bytes(digest, lambda: (piece.cast(pa.large_binary()) for piece in values()))
    elif pa.types.is_boolean(kind):
        _feed_bits(digest, (piece.to_numpy(zero_copy_only=False) for piece in values()))
    elif pa.types.is_primitive(kind) and not pa.types.is_null(kind):
        _feed_numbers(digest, kind.bit_width // 8, values())
    else:  # decimals, maps, fixed sizes: rare, and small
        _feed_texts(digest, (repr(value) for piece in values() for value in piece.to_pylist()))


def _feed_numbers(digest: hashlib._Hash, width: int, pieces: Iterator[Any]) -> None:
    for piece in pieces:
        data = piece.buffers()[1]
        if data is not None:
            digest.update(memoryview(data)[piece.offset * width : (piece.offset + len(piece)) * width])


def _feed_texts(digest: hashlib._Hash, texts: Iterator[str]) -> None:
    digest.update(b"[" + next(texts, "").encode())
    for text in texts:
        digest.update(f", {text}".encode())
    digest.update(b"]")


def _feed_bits(digest: hashlib._Hash, parts: Iterator[Bools]) -> None:
    """Eight to a byte, across the borders of parts."""
    rest = np.zeros(0, bool)
    for part in parts:
        bits = np.concatenate([rest, part]) if len(rest) else part
        whole = len(bits) & ~7
        digest.update(np.packbits(bits[:whole]).tobytes())
        rest = bits[whole:]
    digest.update(np.packbits(rest).tobytes())


def _feed_bytes(digest: hashlib._Hash, pieces: Pieces) -> None:
    for piece in pieces():
        digest.update(pc.binary_length(piece).to_numpy().astype("<i8").tobytes())
    for piece in pieces():
        _, offsets, data = piece.buffers()
        if len(piece) and data is not None:
            ends = np.frombuffer(offsets, np.int64)[piece.offset : piece.offset + len(piece) + 1]
            digest.update(memoryview(data)[int(ends[0]) : int(ends[-1])])


def changes_between(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """From the facts of the plan that was built to those of another; never empty."""
    if "step" in old:
        return ["it was made by another command"]
    changes = []
    if old["format"] != new["format"]:
        changes.append(f"its format was {old['format']} and is now {new['format']}")
    for name in ("rows", "files"):
        if old[name] != new[name]:
            changes.append(f"it had {old[name]:,} {name} and would have {new[name]:,}")
    if old["bytes"] != new["bytes"]:
        changes.append(f"its files were {format_size(old['bytes'])} and are {format_size(new['bytes'])}")
    gone = sorted(set(old["columns"]) - set(new["columns"]))
    added = sorted(set(new["columns"]) - set(old["columns"]))
    retyped = sorted(n for n in set(old["columns"]) & set(new["columns"]) if old["columns"][n] != new["columns"][n])
    changes += [f"the column {name!r} is gone" for name in gone]
    changes += [f"the column {name!r} is new" for name in added]
    changes += [f"the column {name!r} has another type" for name in retyped]
    if old["cut"] != new["cut"] and old["shards"] != new["shards"]:
        changes.append(f"its shards were cut by {_cut(old['cut'])} and would be by {_cut(new['cut'])}")
    if not changes and old["features"] != new["features"]:
        changes.append("the types of its columns for `datasets` changed")
    return changes or ["names of files or values of its table changed"]


def _cut(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()) or "the default size"

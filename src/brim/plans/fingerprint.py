"""Compute digests of the inputs that determine the output's bytes.

Two tables with the same content have the same digest, regardless of their memory layout and the release of pyarrow:
chunks, offsets and the bytes of null values do not count.
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
from brim.formats.parquet_levels import plain_type
from brim.sizes import format_size

_PIECE_BYTES = 8_000_000  # of a column that is hashed at a time
_BLOCK = 10_000  # items of a list that are written as JSON at a time
_ENCODER = json.JSONEncoder(sort_keys=True, default=str)
Chunks = Callable[[], Iterator[Any]]  # returns the arrays of a column, from the start at every call


def digest_table(table: pa.Table, *, deep: bool = False) -> str:
    """Return the SHA-256 of a table's names, types and values.

    `deep` hashes the values of fixed-size lists and extension types, instead of their text, which is slow; the digest
    differs.
    """
    digest = hashlib.sha256()
    for name in table.column_names:
        field = table.schema.field(name)
        digest.update(json.dumps([name, str(field.type), field.nullable, table.num_rows]).encode())
        kind = plain_type(field.type, pa.large_string(), pa.large_binary())  # few functions take views
        _hash_column(digest, kind, _small_chunks(table.column(name), kind), deep)
    return digest.hexdigest()


def digest_json(value: Any) -> str:
    return hashlib.sha256(_ENCODER.encode(value).encode()).hexdigest()


def digest_items(items: Iterable[Any]) -> str:
    """Return the same digest as `digest_json` of the list, without keeping the list in memory."""
    digest, separator = hashlib.sha256(b"["), ""
    remaining = iter(items)
    while block := list(itertools.islice(remaining, _BLOCK)):
        digest.update(f"{separator}{_ENCODER.encode(block)[1:-1]}".encode())
        separator = ", "
    digest.update(b"]")
    return digest.hexdigest()


def digest_ints(values: Ints) -> str:
    return hashlib.sha256(values.astype("<i8").tobytes()).hexdigest()


def _small_chunks(column: pa.ChunkedArray, kind: pa.DataType) -> Chunks:
    """Split a column into small chunks, because it may be larger than memory."""
    small = cuts.arrow_bytes(column) <= _PIECE_BYTES  # cheap: without the size of every value
    edges = [0, len(column)] if small else cuts.fill(cuts.column_bytes(column), _PIECE_BYTES).tolist()

    def chunks() -> Iterator[Any]:
        for start, stop in itertools.pairwise(edges):
            for chunk in column.slice(start, stop - start).chunks:
                yield chunk if kind == column.type else chunk.cast(kind)

    return chunks


def _hash_column(digest: hashlib._Hash, kind: pa.DataType, chunks: Chunks, deep: bool) -> None:
    if pa.types.is_dictionary(kind):
        _hash_column(digest, kind.value_type, lambda: (p.dictionary_decode() for p in chunks()), deep)
        return
    if deep and isinstance(kind, pa.BaseExtensionType):
        _hash_column(digest, kind.storage_type, lambda: (p.storage for p in chunks()), deep)
        return
    digest.update(sum(len(chunk) for chunk in chunks()).to_bytes(8, "little"))
    _hash_bits(digest, (chunk.is_valid().to_numpy(zero_copy_only=False) for chunk in chunks()))

    def values() -> Iterator[Any]:
        return (chunk.drop_null() if chunk.null_count else chunk for chunk in chunks())

    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        for chunk in values():
            digest.update(pc.list_value_length(chunk).to_numpy().astype("<i8").tobytes())
        _hash_column(digest, kind.value_type, lambda: (chunk.flatten() for chunk in values()), deep)
    elif deep and pa.types.is_fixed_size_list(kind):
        _hash_column(digest, kind.value_type, lambda: (chunk.flatten() for chunk in values()), deep)
    elif pa.types.is_struct(kind):
        for number, field in enumerate(kind):
            _hash_column(digest, field.type, lambda n=number: (chunk.flatten()[n] for chunk in values()), deep)  # type: ignore[misc]
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        _hash_bytes(digest, lambda: (chunk.cast(pa.large_string()) for chunk in values()))
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        _hash_bytes(digest, lambda: (chunk.cast(pa.large_binary()) for chunk in values()))
    elif pa.types.is_boolean(kind):
        _hash_bits(digest, (chunk.to_numpy(zero_copy_only=False) for chunk in values()))
    elif pa.types.is_primitive(kind) and not pa.types.is_null(kind):
        _hash_numbers(digest, kind.bit_width // 8, values())
    else:  # decimals, maps, fixed sizes: rare, and small
        texts = (repr(value) for chunk in values() for value in chunk.to_pylist())
        digest.update(b"[" + next(texts, "").encode())
        for text in texts:
            digest.update(f", {text}".encode())
        digest.update(b"]")


def _hash_numbers(digest: hashlib._Hash, width: int, chunks: Iterator[Any]) -> None:
    for chunk in chunks:
        if (data := chunk.buffers()[1]) is not None:
            digest.update(memoryview(data)[chunk.offset * width : (chunk.offset + len(chunk)) * width])


def _hash_bits(digest: hashlib._Hash, parts: Iterator[Bools]) -> None:
    """Hash booleans packed to bits, across the borders of parts."""
    remainder = np.zeros(0, bool)
    for part in parts:
        bits = np.concatenate([remainder, part]) if len(remainder) else part
        whole = len(bits) & ~7
        digest.update(np.packbits(bits[:whole]).tobytes())
        remainder = bits[whole:]
    digest.update(np.packbits(remainder).tobytes())


def _hash_bytes(digest: hashlib._Hash, chunks: Chunks) -> None:
    for chunk in chunks():
        digest.update(pc.binary_length(chunk).to_numpy().astype("<i8").tobytes())
    for chunk in chunks():
        _, offsets, data = chunk.buffers()
        if len(chunk) and data is not None:
            ends = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
            digest.update(memoryview(data)[int(ends[0]) : int(ends[-1])])


def changes_between(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Describe the differences between the facts of a built plan and a new one; never empty."""
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
    removed = sorted(set(old["columns"]) - set(new["columns"]))
    added = sorted(set(new["columns"]) - set(old["columns"]))
    retyped = sorted(n for n in set(old["columns"]) & set(new["columns"]) if old["columns"][n] != new["columns"][n])
    changes += [f"the column {name!r} is gone" for name in removed]
    changes += [f"the column {name!r} is new" for name in added]
    changes += [f"the column {name!r} has another type" for name in retyped]
    if old["cut"] != new["cut"] and old["shards"] != new["shards"]:
        changes.append(f"its shards were cut by {_cut(old['cut'])} and would be by {_cut(new['cut'])}")
    if not changes and old["features"] != new["features"]:
        changes.append("the types of its columns for `datasets` changed")
    return changes or ["names of files or values of its table changed"]


def _cut(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()) or "the default size"

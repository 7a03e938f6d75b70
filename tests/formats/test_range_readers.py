"""Values that are ranges of other files, and splices of such values."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brim.errors import SourceChangedError
from brim.file_set import NO_CONTENT, FileSet, RangeSetBuilder
from brim.formats.splice import Splice, SpliceBuilder
from tests.conftest import random_bytes

_SIZES = (5000, 300, 0)
_CONTAINERS = [random_bytes(size, seed) for seed, size in enumerate(_SIZES)]
_value = st.integers(0, 2).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(0, _SIZES[n]), st.integers(0, 800)).map(
        lambda cut: (cut[0], cut[1], min(cut[2], _SIZES[cut[0]] - cut[1]))
    )
)


def range_set(folder: Path, values: list[tuple[int, int, int]], paths: list[str | None] | None = None) -> FileSet:
    builder = RangeSetBuilder()
    for number, content in enumerate(_CONTAINERS):
        path = folder / f"c{number}.bin"
        path.write_bytes(content)
        builder.container(str(path), path.stat())
    holders, starts, sizes = (np.array([value[i] for value in values], np.int64) for i in range(3))
    builder.add(pa.array(paths or [None] * len(values), pa.string()), holders, starts, sizes)
    return builder.finish()


def splice_of(files: FileSet, literals: list[bytes]) -> Splice:
    out = SpliceBuilder(files)
    sizes = np.array([len(literal) for literal in literals], np.int64)
    out.interleave(b"".join(literals), sizes, np.arange(len(files), dtype=np.int64))
    return out.finish()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_value, min_size=1, max_size=40), st.integers(0, 9000), st.integers(0, 3000), st.integers(1, 700))
def test_ranges_read_like_files(
    tmp_path: Path, values: list[tuple[int, int, int]], start: int, size: int, buffer: int
) -> None:
    """A splice of ranges consists of its literals and parts of containers, for every way of reading."""
    literals = [bytes([n % 256]) * (n % 3) for n in range(len(values))]
    parts = [_CONTAINERS[number][position : position + length] for number, position, length in values]
    whole = b"".join(literal + part for literal, part in zip(literals, parts, strict=True))
    splice = splice_of(range_set(tmp_path, values), literals)
    assert splice.size == len(whole)
    assert b"".join(bytes(chunk) for chunk in splice.chunks(buffer_bytes=buffer)) == whole
    assert splice.read_at(start, size) == whole[start : start + size]
    assert splice.sha256() == hashlib.sha256(whole).hexdigest()
    with open(tmp_path / "copy", "w+b") as copy:
        splice.copy_to(copy.fileno())
        copy.seek(0)
        assert copy.read() == whole


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.lists(st.integers(0, 120), min_size=1, max_size=200), st.integers(0, 3), st.integers(1, 5000))
def test_neighbours_are_read_ahead(tmp_path: Path, sizes: list[int], gap: int, buffer: int) -> None:
    """Small ranges with gaps, as in an Arrow file, are read without the bytes between them."""
    ends = np.cumsum([size + gap for size in sizes])
    values = [(0, int(end) - size - gap, size) for end, size in zip(ends, sizes, strict=True) if end <= _SIZES[0]]
    if not values:
        return
    splice = splice_of(range_set(tmp_path, values), [b"|"] * len(values))
    whole = b"".join(b"|" + _CONTAINERS[0][position : position + size] for _, position, size in values)
    assert b"".join(bytes(chunk) for chunk in splice.chunks(buffer_bytes=buffer)) == whole


def test_neighbours_share_an_open_file(tmp_path: Path) -> None:
    """Consecutive ranges of one file are read through one descriptor, so the file may be deleted during the read."""
    splice = splice_of(range_set(tmp_path, [(0, 4 * n, 4) for n in range(1000)]), [b"x"] * 1000)
    chunks = splice.chunks(buffer_bytes=100)
    first = bytes(next(chunks))
    os.unlink(tmp_path / "c0.bin")
    whole = b"".join(b"x" + _CONTAINERS[0][4 * n : 4 * n + 4] for n in range(1000))
    assert first + b"".join(bytes(chunk) for chunk in chunks) == whole


@pytest.mark.parametrize("change", [lambda path: os.utime(path, ns=(1, 1)), lambda path: os.truncate(path, 4999)])
def test_a_container_that_changed_is_named(tmp_path: Path, change) -> None:  # type: ignore[no-untyped-def]
    """If a container changes, the error names it, even if only its beginning is read."""
    splice = splice_of(range_set(tmp_path, [(0, 0, 10), (1, 0, 10)]), [b"", b""])
    change(tmp_path / "c0.bin")
    with pytest.raises(SourceChangedError) as caught:
        splice.read_at(0, 5)
    assert caught.value.facts["path"] == str(tmp_path / "c0.bin")


def test_a_container_that_changes_while_it_is_read(tmp_path: Path) -> None:
    """A change of a container between the first and the last of its ranges is detected during the read."""
    splice = splice_of(range_set(tmp_path, [(0, n * 10, 10) for n in range(100)]), [b"-"] * 100)
    chunks = splice.chunks(buffer_bytes=50)
    next(chunks)
    os.utime(tmp_path / "c0.bin", ns=(1, 1))
    with pytest.raises(SourceChangedError, match=r"c0\.bin"):
        list(chunks)


def test_paths_may_be_null(tmp_path: Path) -> None:
    """A value without a path is named after its container."""
    files = range_set(tmp_path, [(0, 1, 2), (1, 0, 3)], ["a.png", None])
    assert [files.path(0), files.path(1)] == ["a.png", str(tmp_path / "c1.bin")]
    assert files.full_path(0) == str(tmp_path / "c0.bin")
    assert files.take(np.array([1])).full_path(0) == str(tmp_path / "c1.bin")


def test_no_content_is_not_empty(tmp_path: Path) -> None:
    """A value without content is different from a value of zero bytes."""
    files = range_set(tmp_path, [(2, 0, 0), (NO_CONTENT, 0, 0)], [None, "only/a/name"])
    assert files.has_content(np.array([0, 1])).tolist() == [True, False]
    assert files.path(1) == "only/a/name"


def test_values_are_dated_by_place(tmp_path: Path) -> None:
    """The dates of two ranges of one container have the same time and different positions."""
    files = range_set(tmp_path, [(0, 0, 5), (0, 5, 5)])
    first, second = ([date.tolist() for date in files.dates(np.array([n]))] for n in (0, 1))
    assert first[0] == second[0]
    assert first != second


def test_a_million_values_stay_small() -> None:
    """A value takes 20 bytes of numbers and no Python object."""
    builder = RangeSetBuilder()
    count = 100_000
    numbers = np.arange(count, dtype=np.int64)
    builder.add(pa.array([None] * count, pa.string()), numbers * 0, numbers, numbers)
    files = builder.finish()
    assert files.ranges is not None
    arrays = [files.sizes, files.ranges.starts, files.ranges.holders]
    assert sum(array.nbytes for array in arrays) == 20 * count
    assert files.mtimes_ns.base is not None  # one number for all values

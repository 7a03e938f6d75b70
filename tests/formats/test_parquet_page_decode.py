"""Decoding pages of Parquet files from any writer: values as ranges of the file, and errors for damaged pages."""

from __future__ import annotations

import io
import random
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from brim.formats import parquet_page_decode as pages
from brim.formats import thrift
from brim.formats.parquet_levels import Damaged, read_varint, unpack_bits
from brim.formats.parquet_page_decode import (
    PageBody,
    decode_delta,
    decode_runs,
    max_delta_bytes,
    plain_body,
    snappy_body,
    zstd_body,
)

AT = 7  # pages start at any offset of a file
RANDOM = random.Random(1).randbytes


def fetch_from(file: bytes) -> Callable[[int, int], bytes]:
    return lambda position, size: file[position : position + size]


def snappy(data: bytes, size: int) -> PageBody | None:
    file = b"#" * AT + data + b"#" * 9
    return snappy_body(fetch_from(file), AT, len(data), size)


def zstd(data: bytes, size: int) -> PageBody | None:
    file = b"#" * AT + data + b"#" * 9
    return zstd_body(fetch_from(file), AT, len(data), size)


def test_a_plain_page_is_a_range() -> None:
    """An uncompressed page is read from memory if it is loaded, otherwise from the file, and reads stop at its end."""
    file = bytes(range(100))
    retained = plain_body(memoryview(file)[10:30], 10, 20, lambda *_: pytest.fail("read again"))
    remote = plain_body(b"", 10, 20, fetch_from(file))
    for body in (retained, remote):
        assert body.size == 20
        assert body.read(0, 5) == file[10:15]
        assert body.read(3, 2) == file[13:15]
        assert body.read(15, 99) == file[25:30]
        assert body.read(20, 1) == body.read(25, 1) == b""
        assert body.ranges(3, 8) == [(13, 5)]
        assert body.ranges(3, 3) == []
    assert PageBody(b"", [], [], fetch_from(file)).size == 0
    with pytest.raises(Damaged, match="cut off"):
        plain_body(b"", 90, 20, fetch_from(file)).read(0, 20)


def test_pieces_that_follow_each_other_are_one() -> None:
    """Adjacent segments are merged if they are adjacent in the file too."""
    file = bytes(range(100))
    body = PageBody(b"", [5, 10, 15], [20, 25, 50], fetch_from(file))
    assert body.ranges(0, 15) == [(20, 10), (50, 5)]
    assert body.ranges(2, 12) == [(22, 8), (50, 2)]
    assert body.ranges(5, 6) == [(25, 1)]
    assert body.ranges(10, 15) == [(50, 5)]
    assert body.read(4, 8) == file[24:30] + file[50:52]


@given(
    st.binary(max_size=300) | st.integers(1, 5).map(lambda n: b"abcdefgh" * n * 7),
    st.integers(0, 30),
    st.integers(0, 40),
)
@example(b"x" * 60, 0, 60)
@example(b"x" * 61, 0, 61)
@example(bytes(range(60)), 0, 60)
@example(bytes(range(61)), 1, 60)
@example(bytes(range(256)), 0, 256)
@example(bytes(range(256)) + b"!", 0, 257)
@example(b"abcdefgh" * 9 + bytes(range(80)) + b"abcdefgh" * 9, 3, 200)
def test_snappy_pages_are_ranges(data: bytes, start: int, size: int) -> None:
    """Reading ranges of a Snappy page, with literals and copies, returns the original data."""
    body = snappy(pa.compress(data, "snappy", asbytes=True), len(data))
    assert body is not None
    assert body.size == len(data)
    assert body.read(0, len(data)) == data
    assert body.read(start, size) == data[start : start + size]


def test_large_literals_are_not_read() -> None:
    """Locating the literals of a Snappy page reads only a few bytes between them."""
    data, reads = RANDOM(300_000), []
    packed = pa.compress(data, "snappy", asbytes=True)

    def fetch(position: int, size: int) -> bytes:
        reads.append(size)
        return packed[position : position + size]

    body = snappy_body(fetch, 0, len(packed), len(data))
    assert body is not None
    assert sum(reads) <= 4096 * 12
    assert max(reads) == 4096
    assert body.read(250_000, 100) == data[250_000:250_100]


def literal(data: bytes) -> bytes:
    return bytes([(len(data) - 1) << 2]) + data


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (literal(b"abcd") + b"\x01\x04", b"abcdabcd"),  # offset 4, length 4
        (literal(b"abcd") + b"\x1d\x04", b"abcd" + b"abcdabcdabc"),  # offset 4, length 11
        (literal(b"a") + b"\x01\x01", b"aaaaa"),  # the copy overlaps its output
        (literal(b"abcd") + b"\x0e\x02\x00", b"abcdcdcd"),  # offset in two bytes
        (literal(b"abcd") + b"\x0f\x03\x00\x00\x00", b"abcdbcdb"),  # offset in four bytes
        (literal(b"ab") + literal(b"cd") + b"\x09\x03", b"abcdbcdbcd"),  # the copy spans two literals
        (b"\xf0\x3b" + bytes(range(60)), bytes(range(60))),  # length in one byte
        (b"\xf4\x3b\x00" + bytes(range(60)), bytes(range(60))),  # length in two bytes
        (b"\xf8\x3b\x00\x00" + bytes(range(60)), bytes(range(60))),
        (b"\xfc\x3b\x00\x00\x00" + bytes(range(60)), bytes(range(60))),
        (b"\xec" + bytes(range(60)), bytes(range(60))),  # the longest length within the tag
        (literal(b"z" * 60) * 5 + b"\x21\x00", (b"z" * 60) * 5 + b"z" * 4),  # offset 256
    ],
)
def test_every_kind_of_snappy_tag(tags: bytes, expected: bytes) -> None:
    size = len(expected)
    head = bytes([size]) if size < 128 else bytes([size & 0x7F | 0x80, size >> 7])
    assert pa.decompress(head + tags, size, "snappy", asbytes=True) == expected
    body = snappy(head + tags, size)
    assert body is not None
    assert body.read(0, size) == expected


@pytest.mark.parametrize(
    ("data", "size", "arguments"),
    [
        (b"\x05" + literal(b"abcd"), 4, "another size"),
        (b"\x05" + literal(b"abcd"), 5, "another size"),
        (b"\x03" + literal(b"abcd"), 3, "another size"),
        (b"\x08" + literal(b"abcd") + b"\x01\x05", 8, "refers to what is not there"),
        (b"\x08" + literal(b"abcd") + b"\x01\x00", 8, "refers to what is not there"),
        (b"\x04" + b"\x0cab", 4, "another size"),
        (b"", 0, "ends early"),
        (b"\x08" + literal(b"abcd") + b"\x01", 8, "ends early"),
        (b"\x80" * 10 + b"\x01", 4, "does not end"),
    ],
)
def test_broken_snappy_pages_are_damage(data: bytes, size: int, arguments: str) -> None:
    with pytest.raises(Damaged, match=arguments):
        snappy(data, size)


def test_many_small_pieces_are_left_to_who_decompresses() -> None:
    """Pages with more than 64 segments plus one per 512 bytes are left to the decompressor."""
    for count, described in ((64, True), (65, False)):
        data = bytes([count]) + literal(b"a") * count
        assert (snappy(data, count) is not None) == described
    items = 64 + 2
    assert (
        snappy(
            b"\x80\x08"
            + literal(b"a") * items
            + b"\xf4"
            + bytes([1023 - items - 1 & 255, 1023 - items >> 8])
            + b"b" * (1024 - items),
            1024,
        )
        is None
    )
    fits = literal(b"a") * 65 + b"\xf4" + (1024 - 65 - 1).to_bytes(2, "little") + b"b" * (1024 - 65)
    assert snappy(b"\x80\x08" + fits, 1024) is not None


MAGIC = b"\x28\xb5\x2f\xfd"


def block(data: bytes, last: bool, kind: int = 0) -> bytes:
    return (len(data) << 3 | kind << 1 | last).to_bytes(3, "little") + data


@pytest.mark.parametrize("size", [1000, 70_000, 300_000])
def test_zstd_pages_of_media_are_ranges(size: int) -> None:
    """Zstandard stores incompressible data unchanged, so such pages are read as ranges."""
    data = RANDOM(size)
    body = zstd(pa.compress(data, "zstd", asbytes=True), size)
    assert body is not None
    assert body.read(0, size) == data
    assert body.read(size - 10, 99) == data[-10:]
    assert zstd(pa.compress(b"a" * size, "zstd", asbytes=True), size) is None


@pytest.mark.parametrize(
    ("head", "skipped"),
    # Frame header flags: window or single segment, bytes of the dictionary id and of the size, trailing checksum.
    [
        (0x00, 1), (0x20, 1), (0x21, 2), (0x22, 3), (0x23, 5), (0x01, 2), (0x40, 3), (0x60, 2), (0x80, 5), (0xC0, 9),
        (0xE0, 8), (0x24, 1),
    ],
)  # fmt: skip
def test_every_kind_of_zstd_frame(head: int, skipped: int) -> None:
    body = block(b"abcd", False) + block(b"", False) + block(b"ef", True)
    end = b"\x01\x02\x03\x04" if head & 4 else b""
    frame = MAGIC + bytes([head]) + b"\0" * skipped + body + end
    actual = zstd(frame, 6)
    assert actual is not None
    assert actual.read(0, 6) == b"abcdef"
    assert len(actual.ends) == 2
    for broken in (frame + b"!", frame[:-1], b"!" + frame[1:]):
        assert zstd(broken, 6) is None
    assert zstd(frame, 5) is None
    assert zstd(frame, 7) is None
    wrong = MAGIC + bytes([head ^ 4]) + b"\0" * skipped + body + end
    assert zstd(wrong, 6) is None


def test_zstd_blocks_that_are_compressed() -> None:
    """Frames with runs, compressed blocks or incomplete blocks are left to the decompressor."""
    for kind in (1, 2, 3):
        assert zstd(MAGIC + b"\x20\x04" + block(b"abcd", True, kind), 4) is None
    assert zstd(MAGIC + b"\x20\x00" + block(b"", True), 0) is not None
    assert zstd(MAGIC + b"\x20\x00" + block(b"", True)[:2], 0) is None
    assert zstd(MAGIC + b"\x20\x04" + (9 << 3 | 1).to_bytes(3, "little") + b"abcd", 9) is None


def deltas_of(values: list[int]) -> bytes:
    """Return the values as delta-encoded by pyarrow."""
    sink = io.BytesIO()
    table = pa.table({"x": pa.array(values, pa.int64())}, schema=pa.schema([pa.field("x", pa.int64(), nullable=False)]))
    pq.write_table(table, sink, use_dictionary=False, column_encoding="DELTA_BINARY_PACKED", compression="none")
    position = pq.ParquetFile(sink).metadata.row_group(0).column(0).data_page_offset
    header, start = thrift.decode(sink.getvalue(), position)
    return sink.getvalue()[start : start + header[2][1]]


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=300))
@example([5])
@example(list(range(33)))
@example([0] * 128 + [1])
@example([2**62, -(2**62)] * 20)
@example(list(range(0, 300, 3)) * 2)
def test_deltas_are_read(values: list[int]) -> None:
    """Decoding deltas returns the values and the end position of the data."""
    data = deltas_of(values)
    actual, end = decode_delta(data, len(values))
    assert (actual.tolist(), end) == (values, len(data))
    assert decode_delta(data + b"more", len(values))[1] == len(data)
    with pytest.raises(Damaged, match="lengths of a page are broken"):
        decode_delta(data, len(values) + 1)


@pytest.mark.parametrize(
    ("head", "count", "maximum"),
    [
        (b"\x80\x01\x04", 0, 64 + 256 + 14),
        (b"\x80\x01\x04", 31, 64 + 256 + 14),
        (b"\x80\x01\x04", 32, 64 + 512 + 14),
        (b"\x80\x01\x04", 128, 64 + 5 * 256 + 28),
        (b"\x01\x02", 3, 64 + 4 * 12),
        (b"\x80\x80\x40\x80\x04", 1, 64 + 8 * 2048 + 522),
    ],
)
def test_how_long_deltas_are_at_most(head: bytes, count: int, maximum: int) -> None:
    """The maximum length of delta-encoded values follows from the sizes of blocks and miniblocks, which are padded."""
    assert max_delta_bytes(head, count) == maximum


@pytest.mark.parametrize("values", [[5], list(range(33)), [2**62, -(2**62)] * 200, [0] * 1000])
def test_deltas_are_never_longer(values: list[int]) -> None:
    assert len(deltas_of(values)) <= max_delta_bytes(deltas_of(values)[:20], len(values))


@pytest.mark.parametrize("widths", [b"\x08\0\0\0", b"\x41\0\0\0", b"\x08"])
def test_deltas_that_end_early(widths: bytes) -> None:
    """Deltas are damaged if the packed bits are missing or wider than 64 bits.

    The header announces a block of 128 in 4 miniblocks with 3 values.
    """
    with pytest.raises(Damaged, match="end early"):
        decode_delta(b"\x80\x01\x04\x03\x00\x00" + widths + bytes(7 if widths[0] == 8 else 300), 3)


def test_widths_that_end_early() -> None:
    """Deltas are damaged if the list of widths is truncated, although all requested values are present."""
    with pytest.raises(Damaged, match="end early"):
        decode_delta(b"\x80\x01\x04\x03\x00\x00" + bytes(3), 3)


@pytest.mark.parametrize("head", [b"\x80\x01\x00", b"\x00\x04", b"\x80\x01\x81\x04", b"\x81\x80\x40\x04"])
def test_heads_of_deltas_that_cannot_be(head: bytes) -> None:
    with pytest.raises(Damaged, match="lengths of a page are broken"):
        max_delta_bytes(head, 5)


def test_no_deltas() -> None:
    assert decode_delta(b"\x80\x01\x04\x00\x00", 0)[1] == 5


@pytest.mark.parametrize(
    ("data", "count", "arguments"),
    [
        (b"", 1, "does not end"),
        (b"\x80" * 10, 1, "does not end"),
        (b"\x80\x01\x00\x01\x00", 1, "broken"),  # no miniblocks
        (b"\x00\x04\x01\x00", 1, "broken"),  # no values per block
        (b"\x80\x01\x03\x01\x00", 1, "broken"),  # the block size is not a multiple of the miniblocks
        (b"\x80\x01\x20\x01\x00", 1, "broken"),  # miniblocks of four values
        (b"\x80\x01\x81\x04\x01\x00", 1, "broken"),  # 513 miniblocks
        (b"\x80\x80\x80\x01\x04\x01\x00", 1, "broken"),  # blocks of two million values
        (b"\x80\x01\x04\x02\x00" + b"\x00\x00\x00", 2, "end early"),  # truncated widths
        (b"\x80\x01\x04\x02\x00" + b"\x00", 2, "end early"),  # no complete list of widths
        (b"\x80\x01\x04\x02\x00" + b"\x00\x41\x00\x00\x00" + b"\0" * 400, 2, "end early"),  # a width of 65 bits
        (b"\x80\x01\x04\x02\x00" + b"\x00\x08\x00\x00\x00" + b"\0" * 31, 2, "end early"),
    ],
)
def test_broken_deltas_are_damage(data: bytes, count: int, arguments: str) -> None:
    with pytest.raises(Damaged, match=arguments):
        decode_delta(data, count)


def test_deltas_at_the_edges() -> None:
    """Deltas are decoded at the limits: a block of a million values, miniblocks of eight, 64 bits, no spare byte."""
    assert decode_delta(b"\x80\x80\x40\x80\x04\x01\x0a", 1)[0].tolist() == [5]
    just = b"\x80\x01\x04\x02\x00" + b"\x00\x08\x00\x00\x00" + b"\x03" + b"\0" * 31
    assert decode_delta(just, 2) == (pytest.approx([0, 3]), len(just))
    wide = b"\x08\x01\x02\x00" + b"\x00\x40" + (2**63 - 1).to_bytes(8, "little") + b"\0" * 56
    assert decode_delta(wide, 2)[0].tolist() == [0, 2**63 - 1]


def hybrid(groups: list[tuple[str, int, int]], width: int) -> tuple[bytes, list[int]]:
    """Return encoded levels and their values for runs ("run", count, value) and ("packed", groups of eight, seed)."""
    data, values = b"", []
    for kind, count, value in groups:
        if kind == "run":
            data += bytes([count << 1]) + value.to_bytes((width + 7) // 8, "little")
            values += [value] * count
        else:
            numbers = [(value + n * 7) % (1 << width) for n in range(count * 8)]
            bits = sum(number << (n * width) for n, number in enumerate(numbers))
            data += bytes([count << 1 | 1]) + bits.to_bytes(count * width, "little")
            values += numbers
    return data, values


_group = st.tuples(st.sampled_from(["run", "packed"]), st.integers(1, 9), st.integers(0, 1))


@given(st.lists(_group, min_size=1, max_size=5), st.integers(1, 20), st.integers(0, 7))
@example([("packed", 2, 1), ("run", 3, 1), ("packed", 1, 0)], 1, 0)
@example([("packed", 2, 1)], 12, 3)
@example([("run", 63, 1)], 9, 0)
def test_runs_and_packed_bits_are_read(groups: list[tuple[str, int, int]], width: int, fewer: int) -> None:
    """Decoding returns the requested number of values and ignores following bytes."""
    data, values = hybrid(groups, width)
    count = max(len(values) - fewer, 1)
    assert decode_runs(data, width, count).tolist() == values[:count]
    assert decode_runs(data + b"more", width, count).tolist() == values[:count]


def test_numbers_of_no_bits_are_zero() -> None:
    assert decode_runs(b"\x0a", 0, 5).tolist() == [0] * 5
    assert decode_runs(b"\x03", 0, 5).tolist() == [0] * 5
    assert decode_runs(b"", 3, 0).tolist() == []
    assert decode_runs(b"\x04\xff\xff\xff\xff", 32, 2).tolist() == [2**32 - 1] * 2


def test_the_last_group_may_be_cut() -> None:
    """A truncated last group is accepted if it contains all requested values."""
    data, values = hybrid([("packed", 2, 1)], 4)
    assert decode_runs(data[:-2], 4, 12).tolist() == values[:12]
    with pytest.raises(Damaged, match="end early"):
        decode_runs(data[:-2], 4, 13)
    with pytest.raises(Damaged, match="end early"):
        decode_runs(data[:-3], 4, 12)


@pytest.mark.parametrize(
    ("data", "width", "count", "arguments"),
    [
        (b"\x04\x01", 33, 2, "too wide"),
        (b"\x04", 1, 2, "end early"),
        (b"\x04\x01", 9, 2, "end early"),
        (b"\x00\x01", 1, 2, "end early"),
        (b"\x01", 1, 2, "end early"),
        (b"\x04\x01", 1, 3, "does not end"),
    ],
)
def test_broken_runs_are_damage(data: bytes, width: int, count: int, arguments: str) -> None:
    with pytest.raises(Damaged, match=arguments):
        decode_runs(data, width, count)


def test_numbers_that_are_too_long() -> None:
    """Variable-length integers of up to ten bytes are decoded. Longer ones are damaged."""
    assert read_varint(b"\xff" * 9 + b"\x01", 0) == (2**64 - 1, 10)
    assert read_varint(b"??\x80\x01", 2) == (128, 4)
    with pytest.raises(Damaged):
        read_varint(b"\xff" * 10 + b"\x01", 0)
    assert [pages._zigzag(n) for n in range(5)] == [0, -1, 1, -2, 2]
    assert np.array_equal(unpack_bits(b"\x21\x43", 4, 4), [1, 2, 3, 4])

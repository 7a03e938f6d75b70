import errno
import hashlib
import io
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brim.errors import SourceChangedError
from brim.file_set import FileSet, FileSetBuilder, Ranges, Segments, tar_size
from brim.formats import splice as splice_module
from brim.formats.range_readers import Unreadable
from brim.formats.splice import Splice, SpliceBuilder
from brim.state.atomic_files import BUFFER_BYTES
from brim.state.scratch import Scratch
from brim.storage.local import _write_and_hash
from brim.storage.upload_content import Buffers
from tests.conftest import file_set, random_bytes, write_files

_segment = st.one_of(
    st.binary(max_size=30).map(lambda data: ("literal", data)),
    st.tuples(st.integers(0, 4), st.integers(0, 40), st.integers(0, 60)).map(lambda cut: ("file", cut)),
)
_CONTENTS = {f"{i}.bin": random_bytes(size, i) for i, size in enumerate((0, 1, 50, 100, 7))}


def make(root: Path, segments: list[tuple[str, object]]) -> tuple[Splice, bytes]:
    files = file_set(root, _CONTENTS)
    builder, whole = SpliceBuilder(files), b""
    for kind, value in segments:
        if kind == "literal":
            builder.literal(value)  # type: ignore[arg-type]
            whole += value  # type: ignore[operator]
        else:
            number, start, size = value  # type: ignore[misc]
            content = _CONTENTS[f"{number}.bin"]
            segment = content[start : start + size]
            builder.file(number, min(start, len(content)), len(segment))
            whole += segment
    return builder.finish(), whole


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(_segment, max_size=12), st.integers(0, 300), st.integers(0, 300), st.integers(1, 64))
def test_any_range_reads_as_the_whole_would(
    tmp_path: Path, segments: list[tuple[str, object]], start: int, size: int, buffer: int
) -> None:
    """Size, ranges, chunks, hash, copy and file object of a splice all agree with the plain bytes."""
    splice, whole = make(tmp_path, segments)
    assert splice.size == len(whole)
    assert splice.read_at(start, size) == whole[start : start + size]
    assert b"".join(bytes(c) for c in splice.chunks(buffer_bytes=buffer)) == whole
    assert splice.sha256() == hashlib.sha256(whole).hexdigest()
    file = splice.open()
    file.seek(min(start, len(whole)))
    assert file.read(size) == whole[start : start + size]
    with open(tmp_path / "copy", "w+b") as copy:
        splice.copy_to(copy.fileno())
        copy.seek(0)
        assert copy.read() == whole


def test_the_file_object_is_what_clients_expect(tmp_path: Path) -> None:
    """A splice opens as a seekable buffered binary file, as upload clients expect."""
    splice, whole = make(tmp_path, [("literal", b"head"), ("file", (3, 0, 100)), ("literal", b"tail")])
    with splice.open() as file:
        assert isinstance(file, io.BufferedIOBase)
        assert file.seek(-4, os.SEEK_END) == len(whole) - 4
        assert file.read() == b"tail"
        assert file.read(1) == b""
        buffer = bytearray(6)
        file.seek(0)
        assert file.readinto(buffer) == 6
        assert bytes(buffer) == whole[:6]
        with pytest.raises(ValueError, match="seek"):
            file.seek(-1)
    with pytest.raises(ValueError, match="closed"):
        file.read()


def test_threads_may_read_at_once(tmp_path: Path) -> None:
    """Several threads can read ranges of one splice at the same time."""
    splice, whole = make(tmp_path, [("file", (n, 0, 100)) for n in (2, 3, 4)] * 5)
    ranges = [(i % len(whole), 40) for i in range(400)]
    with ThreadPoolExecutor(8) as pool:
        for (start, size), data in zip(ranges, pool.map(lambda r: splice.read_at(*r), ranges), strict=True):
            assert data == whole[start : start + size]


def test_interleaved_literals_and_files(tmp_path: Path) -> None:
    """`interleave` alternates literals and whole files."""
    builder = SpliceBuilder(file_set(tmp_path, _CONTENTS))
    builder.literal(b">")
    builder.interleave(b"aabbb", np.array([2, 3]), np.array([3, 1]))
    assert builder.finish().read_at(0, 999) == b">aa" + _CONTENTS["3.bin"] + b"bbb" + _CONTENTS["1.bin"]


def _append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"x")


def _touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def _replace(path: Path) -> None:
    stat = path.stat()
    copy = path.with_suffix(".new")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    copy.replace(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_append, "100 bytes when planned and is 101"),
        (_touch, "written to"),
        (_replace, "replaced"),
        (lambda path: os.truncate(path, 3), "is 3 now"),
        (os.unlink, "can no longer be opened"),
    ],
)
def test_a_source_that_changed_is_named(tmp_path: Path, change, says: str) -> None:  # type: ignore[no-untyped-def]
    """A file that differs from the plan raises SourceChangedError with its path, for every way of reading."""
    splice, _ = make(tmp_path, [("literal", b"x"), ("file", (3, 0, 100))])
    change(tmp_path / "3.bin")
    for read in (splice.sha256, lambda: splice.read_at(5, 3), lambda: list(splice.chunks())):
        with pytest.raises(SourceChangedError, match=says) as caught:
            read()
        assert caught.value.facts["path"] == "3.bin"


def test_a_change_while_reading_is_noticed(tmp_path: Path) -> None:
    """A file that changes between its first and last chunk raises SourceChangedError."""
    splice, _ = make(tmp_path, [("file", (3, 0, 100))])
    chunks = splice.chunks(buffer_bytes=10)
    next(chunks)
    _touch(tmp_path / "3.bin")
    with pytest.raises(SourceChangedError):
        list(chunks)


@pytest.mark.parametrize("behind", [[("literal", b"y")], []])
def test_an_empty_file_that_grew_is_noticed(tmp_path: Path, behind: list[tuple[str, object]]) -> None:
    """An empty file that grows is detected, also at the end of a splice."""
    splice, _ = make(tmp_path, [("literal", b"x"), ("file", (0, 0, 0)), *behind])
    _append(tmp_path / "0.bin")
    with pytest.raises(SourceChangedError, match=r"0\.bin"):
        splice.sha256()


def test_few_descriptors_are_open(tmp_path: Path) -> None:
    """Reading a splice keeps at most one file open, for any number of files."""
    splice, _ = make(tmp_path, [("file", (n, 0, 100)) for n in (1, 2, 3, 4)] * 50)
    before = len(os.listdir("/proc/self/fd"))
    for _ in splice.chunks(buffer_bytes=16):
        assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_parts_of_a_scratch_file(tmp_path: Path) -> None:
    """Segments of a scratch file are read and copied, and closing the splice closes the file."""
    scratch = Scratch(str(tmp_path))
    os.write(scratch.descriptor, b"0123456789")
    builder = SpliceBuilder(file_set(tmp_path / "files", _CONTENTS), scratch)
    builder.literal(b"<")
    builder.scratch(3, 4)
    builder.scratch(9, 0)
    builder.file(4)
    builder.scratch(0, 2)
    assert builder.position == 1 + 4 + 7 + 2
    whole = b"<3456" + _CONTENTS["4.bin"] + b"01"
    with builder.finish() as splice:
        assert splice.read_at(0, 99) == whole
        assert splice.read_at(2, 3) == whole[2:5]
        with open(tmp_path / "copy", "w+b") as copy:
            splice.copy_to(copy.fileno())
        assert (tmp_path / "copy").read_bytes() == whole
    with pytest.raises(OSError, match="Bad file descriptor"):
        splice.read_at(1, 2)
    splice.close()


def test_a_folder_is_a_value(tmp_path: Path) -> None:
    """A bundled folder is read as a tar of its files, alone and between literals."""
    import tarfile

    write_files(tmp_path, {"a": b"aaa", "b": b"b" * 512, "c": b"ccc"})
    files = FileSetBuilder(str(tmp_path))
    first = files.add("a", os.stat(tmp_path / "a"))
    folder = files.add_bundle("x/", [(name, name, os.stat(tmp_path / name)) for name in "bc"])
    builder = SpliceBuilder(files.finish())
    builder.interleave(b"<<>", np.array([2, 1]), np.array([first, folder]))
    builder.value(first)
    whole = builder.finish().read_at(0, 1 << 20)
    assert whole.startswith(b"<<aaa>")
    assert whole.endswith(b"\0aaa")
    assert len(whole) - len(b"<<aaa>" + b"aaa") == tar_size([("b", 512), ("c", 3)])
    with tarfile.open(fileobj=io.BytesIO(whole[6:-3])) as tar:
        assert {member.name: tar.extractfile(member).read() for member in tar} == {"b": b"b" * 512, "c": b"ccc"}  # type: ignore[union-attr]


def test_ranges_of_a_file(tmp_path: Path) -> None:
    """Segments may start anywhere in a file and end at any position or at its end."""
    builder = SpliceBuilder(file_set(tmp_path, _CONTENTS))
    builder.file(3, 90)
    builder.file(3, 10, 5)
    builder.file(0)
    assert builder.finish().read_at(0, 99) == _CONTENTS["3.bin"][90:] + _CONTENTS["3.bin"][10:15]


def test_many_segments_go_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are processed in blocks, and reads across the border of two blocks are correct."""
    assert splice_module._BLOCK == 16384
    monkeypatch.setattr(splice_module, "_BLOCK", 3)
    splice, whole = make(tmp_path, [("file", (n % 5, 0, 100)) for n in range(1, 12)])
    for start in range(0, len(whole), 7):
        for size in (1, 8, 60, 999):
            assert splice.read_at(start, size) == whole[start : start + size]
    assert splice.read_at(-0, -5) == b""
    assert splice.read_at(len(whole), 5) == b""


def test_buffers_that_are_kept(tmp_path: Path) -> None:
    """With `keep`, every chunk stays valid as long as it is referenced."""
    splice, whole = make(tmp_path, [("literal", b"head"), ("file", (3, 0, 100)), ("file", (2, 0, 50))])
    remaining = list(splice.chunks(buffer_bytes=16, keep=Buffers(16)))
    assert b"".join(map(bytes, remaining)) == whole
    assert [len(chunk) for chunk in remaining] == [16] * 9 + [10]
    assert [bytes(chunk) for chunk in splice.chunks(3, 9, 64, keep=Buffers(64))] == [whole[3:9]]
    assert [bytes(chunk) for chunk in splice.chunks(3, 9, 4)] == [whole[3:7], whole[7:9]]
    assert [len(chunk) for chunk in splice.chunks(150)] == [4]
    assert list(splice.chunks(154)) == []


def test_whoever_waits_for_a_hash_is_told(tmp_path: Path) -> None:
    messages: list[int] = []
    splice, whole = make(tmp_path, [("literal", b"head"), ("file", (3, 0, 100))])
    splice.sha256(messages.append)
    assert sum(messages) == len(whole)


def test_the_file_object_reads_in_every_way(tmp_path: Path) -> None:
    splice, whole = make(tmp_path, [("literal", b"head"), ("file", (3, 0, 100))])
    file = splice.open()
    assert file.read(None) == whole
    assert file.read() == file.read1() == b""
    file.seek(0)
    assert file.read1() == whole
    file.seek(2)
    assert (file.read1(3), file.read1(0), file.read(0), file.tell()) == (whole[2:5], b"", b"", 5)
    file.seek(500)
    assert file.read() == b""
    file.seek(100)
    buffer = bytearray(10)
    assert file.readinto(buffer) == 4
    assert buffer == whole[100:] + b"\0" * 6


def test_a_reader_is_told_what_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader receives the upcoming segments with their total size, so that it can request them together."""
    splice, whole = make(tmp_path, [("literal", b"head"), ("file", (3, 0, 100)), ("file", (2, 0, 50))])
    messages: list[tuple[object, list[tuple[int, int, int]], int]] = []
    plain = splice_module.reader_of

    def reader_of(files: object, segments: Iterator[tuple[int, int, int]], size: int) -> object:
        messages.append((files, list(segments), size))
        return plain(files, iter(messages[-1][1]), size)  # type: ignore[arg-type]

    monkeypatch.setattr(splice_module, "reader_of", reader_of)
    assert splice.read_at(10, 100) == whole[10:110]
    assert messages == [(splice.files, [(3, 6, 94), (2, 0, 6)], 100)]


def test_local_files_are_copied_by_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel copies ranges of local files, and only other segments pass through this process."""
    splice, whole = make(tmp_path, [("literal", b"head"), ("file", (3, 10, 20)), ("file", (2, 0, 50))])
    copied: list[tuple[int, int]] = []
    plain = splice_module.copy_range

    def copy(source: int, position: int, size: int, target: int) -> None:
        copied.append((position, size))
        plain(source, position, size, target)

    monkeypatch.setattr(splice_module, "copy_range", copy)
    with open(tmp_path / "copy", "w+b") as file:
        splice.copy_to(file.fileno())
    assert (tmp_path / "copy").read_bytes() == whole
    assert copied == [(10, 20), (0, 50)]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Return the descriptors of a file of a hundred bytes and of an empty target file."""
    (tmp_path / "from").write_bytes(_CONTENTS["3.bin"])
    source = os.open(tmp_path / "from", os.O_RDONLY)
    target = os.open(tmp_path / "to", os.O_RDWR | os.O_CREAT)
    yield source, target
    os.close(source)
    os.close(target)


@pytest.mark.parametrize("answer", ["in full", "nothing", "cannot", "a little", "later no more"])
def test_the_kernel_copies_where_it_can(
    pair: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """If `copy_file_range` copies nothing, less than requested, or fails, the rest is copied by reading and writing."""
    plain, calls = os.copy_file_range, [0]

    def copy(source: int, target: int, count: int, offset: int) -> int:
        calls[0] += 1
        if answer == "cannot" or (answer == "later no more" and calls[0] > 1):
            raise OSError(errno.EXDEV, "no")
        if answer == "nothing":
            return 0
        return plain(source, target, count if answer == "in full" else min(count, 7), offset)

    monkeypatch.setattr(os, "copy_file_range", copy)
    monkeypatch.setattr(splice_module, "BUFFER_BYTES", 16)
    splice_module.copy_range(pair[0], 5, 90, pair[1])
    assert (tmp_path / "to").read_bytes() == _CONTENTS["3.bin"][5:95]
    assert calls[0] == {"in full": 1, "nothing": 1, "cannot": 1, "a little": 13, "later no more": 2}[answer]
    splice_module.copy_range(pair[0], 5, 0, pair[1])
    assert (tmp_path / "to").stat().st_size == 90


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_no_reason_to_try_otherwise(
    pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def copy(*_: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", copy)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        splice_module.copy_range(pair[0], 0, 100, pair[1])
    assert not isinstance(caught.value, Unreadable)


def test_whose_fault_it_is_that_nothing_can_be_copied(
    pair: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short or unreadable source raises Unreadable. An error while writing raises a plain OSError."""
    monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)
    with pytest.raises(Unreadable, match="shorter than its recorded size") as caught:
        splice_module.copy_range(pair[0], 50, 51, pair[1])
    assert caught.value.errno == errno.EIO
    blind = os.open(tmp_path / "from", os.O_WRONLY)
    with pytest.raises(Unreadable, match="Bad file descriptor") as caught:
        splice_module.copy_range(blind, 0, 1, pair[1])
    assert caught.value.errno == errno.EBADF
    os.close(blind)
    with pytest.raises(OSError, match="Bad file descriptor") as second:
        splice_module.copy_range(pair[0], 0, 1, pair[0])
    assert not isinstance(second.value, Unreadable)


def test_a_kernel_without_that_call(pair: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "copy_file_range")
    splice_module.copy_range(pair[0], 0, 100, pair[1])
    assert (tmp_path / "to").read_bytes() == _CONTENTS["3.bin"]


def test_one_whole_file(tmp_path: Path) -> None:
    """A file splice exposes its path, so that a folder on the same disk can move the file."""
    (tmp_path / "a").write_bytes(b"whole")
    splice = splice_module.FileSplice(tmp_path / "a")
    assert (splice.path, splice.size, splice.read_at(1, 3)) == (tmp_path / "a", 5, b"hol")
    _touch(tmp_path / "a")
    with pytest.raises(SourceChangedError):
        splice.sha256()


def test_segments_are_small(tmp_path: Path) -> None:
    """A segment takes twenty bytes, stored in columns."""
    splice, _ = make(tmp_path, [("file", (3, 0, 100)), ("literal", b"x")])
    assert (splice._ends.dtype, splice._sources.dtype, splice._starts.dtype) == (np.int64, np.int32, np.int64)
    empty, whole = make(tmp_path, [])
    assert (empty.size, whole, empty.read_at(0, 5)) == (0, b"", b"")


def test_an_empty_file_at_the_beginning_is_looked_at(tmp_path: Path) -> None:
    """An empty file at the start is checked by reads from there, and not by reads that start after it."""
    splice, whole = make(tmp_path, [("file", (0, 0, 0)), ("file", (3, 0, 100))])
    _append(tmp_path / "0.bin")
    assert splice.read_at(1, 5) == whole[1:6]
    with pytest.raises(SourceChangedError, match=r"0\.bin"):
        splice.read_at(0, 5)


def test_more_than_a_buffer_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Splice.chunks, "__defaults__", (0, None, 16))
    splice, whole = make(tmp_path, [("file", (3, 0, 100))])
    assert splice.read_at(3, 90) == whole[3:93]
    file = splice.open()
    assert file.read(40) + file.read(999) == whole


@pytest.mark.parametrize(("start", "size"), [(0, None), (0, 9), (2, 5), (3, 3), (1, None), (4, 0), (3, 5)])
def test_a_value_that_lies_in_pieces(tmp_path: Path, start: int, size: int | None) -> None:
    """A value in several segments is read as one, completely or by range, alone and between literals."""
    container = file_set(tmp_path, {"c": bytes(range(100))})
    segments = Segments(np.array([0, 3]), np.array([50, 10, 30]), np.array([3, 2, 4]))
    ranges = Ranges(container, np.array([0, 0], np.int32), np.array([-1, 7]), segments)
    sizes, none = np.array([9, 5]), np.zeros(2, np.int64)
    files = FileSet(str(tmp_path), pa.array(["v", "w"], pa.large_string()), sizes, none, none, ranges=ranges)
    value = bytes([50, 51, 52, 10, 11, 30, 31, 32, 33])
    builder = SpliceBuilder(files)
    builder.file(0, start, size)
    expected = value[start:] if size is None else value[start : start + size]
    assert builder.finish().read_at(0, 99) == expected
    mixed = SpliceBuilder(files)
    mixed.literal(b"!")
    mixed.interleave(b"<>>", np.array([1, 2]), np.array([0, 1]))
    assert mixed.finish().read_at(0, 99) == b"!<" + value + b">>" + bytes([7, 8, 9, 10, 11])


def test_a_write_that_fails_ends_the_shard(tmp_path: Path) -> None:
    """An error of the writing thread is raised by the pass over the splice, and all threads exit."""
    files = file_set(tmp_path / "files", {"a": random_bytes(3 * BUFFER_BYTES, 1)})
    builder = SpliceBuilder(files)
    builder.file(0)

    class Full:
        def write(self, data: memoryview) -> None:
            raise OSError(errno.ENOSPC, "full")

    before = threading.active_count()
    with builder.finish() as splice, pytest.raises(OSError, match="full"):
        _write_and_hash(Full(), splice, lambda size: None)  # type: ignore[arg-type]
    assert threading.active_count() == before


def test_what_lies_before_a_range_is_not_opened(tmp_path: Path) -> None:
    """Reading a range does not open files before it, because a repeated upload part may start after deleted files."""
    splice, whole = make(tmp_path, [("file", (2, 0, 50)), ("file", (3, 0, 100))])
    (tmp_path / "2.bin").unlink()
    assert splice.read_at(50, 100) == whole[50:]

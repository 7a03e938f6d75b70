import hashlib
import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brim.errors import SourceChanged
from brim.formats.splice import Splice, SpliceBuilder
from tests.conftest import file_set, random_bytes

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
            piece = content[start : start + size]
            builder.file(number, min(start, len(content)), len(piece))
            whole += piece
    return builder.finish(), whole


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(_segment, max_size=12), st.integers(0, 300), st.integers(0, 300), st.integers(1, 64))
def test_any_range_reads_as_the_whole_would(
    tmp_path: Path, segments: list[tuple[str, object]], start: int, size: int, buffer: int
) -> None:
    """Size, any range, any chunking, hash, copy and file object all agree with the plain bytes."""
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
    """A splice opens as a seekable buffered binary file."""
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
    """Range reads from several threads do not disturb each other."""
    splice, whole = make(tmp_path, [("file", (n, 0, 100)) for n in (2, 3, 4)] * 5)
    ranges = [(i % len(whole), 40) for i in range(400)]
    with ThreadPoolExecutor(8) as pool:
        for (start, size), data in zip(ranges, pool.map(lambda r: splice.read_at(*r), ranges), strict=True):
            assert data == whole[start : start + size]


def test_interleaved_literals_and_files(tmp_path: Path) -> None:
    """interleave() alternates literals and whole files."""
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
    """A file that is not what was planned is SourceChanged with its path, however it is read."""
    splice, _ = make(tmp_path, [("literal", b"x"), ("file", (3, 0, 100))])
    change(tmp_path / "3.bin")
    for read in (splice.sha256, lambda: splice.read_at(5, 3), lambda: list(splice.chunks())):
        with pytest.raises(SourceChanged, match=says) as caught:
            read()
        assert caught.value.facts["path"] == "3.bin"


def test_a_change_while_reading_is_noticed(tmp_path: Path) -> None:
    """A file that is written to between its first and last chunk is SourceChanged."""
    splice, _ = make(tmp_path, [("file", (3, 0, 100))])
    chunks = splice.chunks(buffer_bytes=10)
    next(chunks)
    _touch(tmp_path / "3.bin")
    with pytest.raises(SourceChanged):
        list(chunks)


def test_an_empty_file_that_grew_is_noticed(tmp_path: Path) -> None:
    """Zero bytes are checked like any other content."""
    splice, _ = make(tmp_path, [("literal", b"x"), ("file", (0, 0, 0)), ("literal", b"y")])
    _append(tmp_path / "0.bin")
    with pytest.raises(SourceChanged, match=r"0\.bin"):
        splice.sha256()


def test_few_descriptors_are_open(tmp_path: Path) -> None:
    """However many files a splice has, reading it keeps one of them open."""
    splice, _ = make(tmp_path, [("file", (n, 0, 100)) for n in (1, 2, 3, 4)] * 50)
    before = len(os.listdir("/proc/self/fd"))
    for _ in splice.chunks(buffer_bytes=16):
        assert len(os.listdir("/proc/self/fd")) <= before + 1

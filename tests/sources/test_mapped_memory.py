"""Finding the file and offset of memory-mapped data."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from brim.sources.dataset_source import Mappings
from tests.conftest import random_bytes

CONTENT = random_bytes(100_000)


@pytest.mark.parametrize("name", ["a.arrow", "with a space.arrow", "ünïcode 数据.arrow", "new\nline.arrow"])
def test_a_mapped_buffer_is_found(tmp_path: Path, name: str) -> None:
    """The path and offset of any part of a mapped file are found, for any file name."""
    path = tmp_path / name
    path.write_bytes(CONTENT)
    with pa.memory_map(str(path)) as mapped:
        whole = mapped.read_buffer(len(CONTENT))
        for start, size in ((0, len(CONTENT)), (12_345, 10), (99_999, 1), (5000, 60_000)):
            assert Mappings().find(whole.slice(start, size)) == (str(path), start)


def test_what_is_in_no_file_is_not_found(tmp_path: Path) -> None:
    """Process memory, empty buffers, and files that were deleted or replaced have no location."""
    assert Mappings().find(pa.py_buffer(b"x" * 5000)) is None
    assert Mappings().find(pa.py_buffer(b"")) is None
    path = tmp_path / "a.arrow"
    path.write_bytes(CONTENT)
    with pa.memory_map(str(path)) as mapped:
        buffer = mapped.read_buffer(1000)
        assert Mappings().find(buffer) is not None
        path.unlink()
        assert Mappings().find(buffer) is None
        path.write_bytes(random_bytes(100_000, 1))
        assert Mappings().find(buffer) is None

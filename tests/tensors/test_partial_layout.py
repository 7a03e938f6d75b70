"""The location of tensor bytes while a file is unfinished, and the names of the finished files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from brim.errors import InputError
from brim.tensors import partial_layout
from brim.tensors.partial_layout import BinaryLayout, Files, FileSpan, ParquetLayout, Request, layout_for
from brim.tensors.tensor_files import Tensor

A, B = Tensor("a", (2,), "float32"), Tensor("b", (), "int64")  # both have eight bytes per row
TEXT = Tensor("t", (), "string")


def request(folder: Path, name: str = "x.safetensors", rows: Any = None, **options: Any) -> Request:
    tensors = options.pop("tensors", (A, B))
    counts = {tensor.name: rows for tensor in tensors} if isinstance(rows, int) else rows
    return Request(folder / name, tensors, counts, **options)


def write(created: Any, files: Files, values: dict[str, list[bytes]]) -> None:
    """Write each stream from its beginning, as a writer does."""
    for name, streams in values.items():
        for position, data in zip(created.find_spans[name], streams, strict=True):
            offset = 0
            for span in position(0, len(data)):
                files.write(span, memoryview(data)[offset : offset + span.size])
                offset += span.size
            assert offset == len(data)


def values(rows: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.arange(2 * rows, dtype="<f4").reshape(rows, 2) + 1, np.arange(rows, dtype="<i8") + 100


def finish(created: Any, folder: Path, counts: dict[str, int], data: dict[str, list[bytes]]) -> dict[str, bytes]:
    """Finish the layout; return the content of the files by name."""
    (folder / "partial").mkdir(exist_ok=True)
    files = Files(folder / "partial")
    write(created, files, data)
    moves = created.prepare(files, counts)
    files.close()
    return {name: (folder / "partial" / inside).read_bytes() for inside, name in moves}


def safetensors(data: bytes) -> dict[str, list[Any]]:
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    kinds = {"F32": "<f4", "I64": "<i8"}
    actual = {}
    for name, about in header.items():
        if name != "__metadata__":
            start, end = about["data_offsets"]
            actual[name] = np.frombuffer(body[start:end], kinds[about["dtype"]]).reshape(about["shape"]).tolist()
    assert len(body) == max(about["data_offsets"][1] for name, about in header.items() if name != "__metadata__")
    return actual


@pytest.mark.parametrize(("known_values", "rows"), [(3, 3), (5, 3), (None, 3), (None, 0), (0, 0)])
def test_a_file_of_several_tensors(tmp_path: Path, known_values: int | None, rows: int) -> None:
    """The file is the same whether the number of rows is known before, overestimated, or unknown."""
    layout = layout_for(request(tmp_path, rows=known_values, metadata={"m": "n"}))
    a, b = values(rows)
    actual = finish(layout, tmp_path, {"a": rows, "b": rows}, {"a": [a.tobytes()], "b": [b.tobytes()]})
    assert list(actual) == ["x.safetensors"]
    assert safetensors(actual["x.safetensors"]) == {"a": a.tolist(), "b": b.tolist()}
    assert b'"m":"n"' in actual["x.safetensors"].replace(b" ", b"")
    assert layout.targets == [tmp_path / "x.safetensors"]
    assert layout.need_bytes == (None if known_values is None else 16 * known_values)


def test_where_values_go(tmp_path: Path) -> None:
    """If the size is known, values go to their offsets in the final file, otherwise to one file per tensor."""
    direct = layout_for(request(tmp_path, rows={"a": 3, "b": 2}))
    assert isinstance(direct, BinaryLayout)
    (span,) = direct.find_spans["a"][0](8, 16)
    body = direct._body(0, {"a": 3, "b": 2})
    assert span == FileSpan("00000.0.part", body.starts["a"] + 8, 16, body.size)
    assert body.size == len(body.header) + 24 + 16
    assert direct.need_bytes == 24 + 16
    growing = layout_for(request(tmp_path))
    assert list(growing.find_spans["b"][0](8, 16)) == [FileSpan("1.rows", 8, 16)]
    assert list(growing.find_spans["b"][0](8, 0)) == []
    assert growing.need_bytes is None


def test_the_checksum_is_of_the_header(tmp_path: Path) -> None:
    """The checksum detects a header with another layout; a Parquet file has none."""
    first, second = (layout_for(request(tmp_path, rows=rows)) for rows in (3, 4))
    assert first.checksum != second.checksum
    assert first.checksum == layout_for(request(tmp_path, rows=3)).checksum > 0
    assert layout_for(request(tmp_path, "x.parquet", 3)).checksum == 0
    sharded = layout_for(request(tmp_path, rows=4, shard_bytes=16 * 3))
    assert sharded.checksum == first.checksum, "the first of its shards has three rows too"


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("rows", "shards"), [(0, [0]), (1, [1]), (3, [3]), (4, [3, 1]), (6, [3, 3]), (7, [3, 3, 1])])
def test_shards_of_rows(tmp_path: Path, rows: int, shards: list[int], is_known: bool) -> None:
    """A shard has as many rows as fit, at least one, and an index lists the shards."""
    layout = layout_for(request(tmp_path, rows=rows if is_known else None, shard_bytes=16 * 3 + 15))
    a, b = values(rows)
    actual = finish(layout, tmp_path, {"a": rows, "b": rows}, {"a": [a.tobytes()], "b": [b.tobytes()]})
    written = actual.pop("x.safetensors.index.json")
    index = json.loads(written)
    assert written == json.dumps(index, indent=1).encode() + b"\n", "for people too"
    names = [f"x-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    assert list(actual) == names
    messages = [{"file": name, "rows": count} for name, count in zip(names, shards, strict=True)]
    assert index == {"format": "brim row shards", "rows": rows, "shards": messages}
    parts = [safetensors(data) for data in actual.values()]
    assert [row for part in parts for row in part["a"]] == a.tolist()
    assert [len(part["b"]) for part in parts] == shards
    assert layout.targets == [tmp_path / "x.safetensors.index.json", tmp_path / "x.safetensors"]


def test_a_row_larger_than_a_shard(tmp_path: Path) -> None:
    assert request(tmp_path, shard_bytes=1).shard_rows == 1
    assert request(tmp_path, shard_bytes=32).shard_rows == 2
    assert request(tmp_path).shard_rows is None
    assert request(tmp_path).row_bytes == 16


def test_what_a_request_says_of_itself(tmp_path: Path) -> None:
    """The request contains all inputs that decide the bytes, so a changed one does not resume an earlier file."""
    assert request(tmp_path, rows=3, metadata={"a": "b"}, shard_bytes=40).facts() == {
        "tensors": ["a=(2, float32)", "b=(int64)"],
        "rows": {"a": 3, "b": 3},
        "metadata": {"a": "b"},
        "rows in a shard": 2,
    }
    assert request(tmp_path).facts()["rows"] is None
    assert request(tmp_path).facts()["metadata"] is None


@pytest.mark.parametrize("known_values", [4, 9, None])
def test_a_file_for_each_array(tmp_path: Path, known_values: int | None) -> None:
    """The file of a single tensor has the requested name; with several tensors, each file name contains the
    tensor's."""
    a, b = values(4)
    for tensors, names in (((A, B), ["x.a.npy", "x.b.npy"]), ((A,), ["x.npy"])):
        layout = layout_for(request(tmp_path, "x.npy", known_values, tensors=tensors))
        data = {"a": [a.tobytes()], "b": [b.tobytes()]}
        counts = {tensor.name: 4 for tensor in tensors}
        actual = finish(layout, tmp_path, counts, {name: data[name] for name in counts})
        assert list(actual) == names
        assert [path.name for path in layout.targets] == names
        for name, expected in zip(names, (a, b), strict=False):
            (tmp_path / "read.npy").write_bytes(actual[name])
            assert np.load(tmp_path / "read.npy").tolist() == expected.tolist()
        for path in (tmp_path / "partial").iterdir():
            path.unlink()


def test_a_parquet_file(tmp_path: Path) -> None:
    """Strings take two streams; columns without rows have files too."""
    layout = layout_for(request(tmp_path, "x.parquet", 2, tensors=(A, TEXT), metadata={"m": "n"}))
    assert isinstance(layout, ParquetLayout)
    a, _ = values(2)
    texts = [np.array([1, 2], "<i8").tobytes(), b"xyz"]
    assert [span.file for position in layout.find_spans["t"] for span in position(0, 1)] == ["1.lengths", "1.text"]
    lengths = next(layout.find_spans["t"][0](0, 8))
    assert lengths == FileSpan("1.lengths", 0, 8)
    (tmp_path / "partial").mkdir()
    files = Files(tmp_path / "partial")
    write(layout, files, {"a": [a.tobytes()], "t": texts})
    assert layout.prepare(files, {"a": 2, "t": 2}) == [("whole", "x.parquet")]
    files.close()
    table = pq.read_table(tmp_path / "partial" / "whole")
    assert table.column("t").to_pylist() == ["x", "yz"]
    assert table.column("a").to_pylist() == a.tolist()
    assert table.schema.metadata[b"m"] == b"n"
    assert layout.targets == [tmp_path / "x.parquet"]
    assert layout.need_bytes == 2 * 2 * 8
    assert layout_for(request(tmp_path, "x.parquet")).need_bytes is None
    with pytest.raises(InputError, match="have the same rows") as caught:
        layout.prepare(files, {"a": 2, "t": 1})
    assert caught.value.hint == "Write a .safetensors file."


def test_columns_without_rows_have_files(tmp_path: Path) -> None:
    layout = layout_for(request(tmp_path, "x.parquet", tensors=(A, TEXT)))
    (tmp_path / "partial").mkdir()
    files = Files(tmp_path / "partial")
    layout.prepare(files, {"a": 0, "t": 0})
    files.close()
    assert pq.read_table(tmp_path / "partial" / "whole").num_rows == 0
    assert {path.name for path in (tmp_path / "partial").iterdir()} == {"0.rows", "1.lengths", "1.text", "whole"}


@pytest.mark.parametrize(
    ("name", "rows", "options", "synced"),
    [
        ("x.safetensors", 3, {}, {"00000.0.part"}),
        ("x.safetensors", 5, {}, {"00000.0.part.whole"}),
        ("x.safetensors", None, {}, {"00000.0.part.whole"}),
        ("x.safetensors", None, {"shard_bytes": 48}, {"00000.0.part", "index"}),
        ("x.parquet", None, {}, {"whole"}),
        ("x.npy", 3, {}, {"00000.0.part", "00000.1.part"}),
    ],
)
def test_whole_files_are_on_disk_before_they_get_their_names(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    rows: int | None,
    options: dict[str, Any],
    synced: set[str],
) -> None:
    """Every file is synced before it is renamed, including header and index."""
    actual: dict[str, int] = {}
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        actual[os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))] = os.fstat(descriptor).st_size
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    layout = layout_for(request(tmp_path, name, rows, **options))
    a, b = values(3)
    finish(layout, tmp_path, {"a": 3, "b": 3}, {"a": [a.tobytes()], "b": [b.tobytes()]})
    assert actual.keys() == synced
    assert actual == {name: (tmp_path / "partial" / name).stat().st_size for name in synced}, "all of it"


@pytest.mark.parametrize(
    ("name", "options", "arguments", "hint"),
    [
        ("x.pt", {}, "'x.pt' does not end in .safetensors, .npy, .parquet", "The ending chooses the format."),
        ("x.npy", {"shard_bytes": 9}, "A .npy file is not cut into shards", "Leave shard_size out"),
        ("x.parquet", {"shard_bytes": 9}, "A .parquet file is not cut into shards", "Leave shard_size out"),
        ("x.npy", {"metadata": {}}, "A .npy file has no room for metadata", "Leave it out"),
    ],
)
def test_requests_that_cannot_be(tmp_path: Path, name: str, options: dict[str, Any], arguments: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        layout_for(request(tmp_path, name, **options))
    assert arguments in caught.value.message
    assert hint in caught.value.hint


def test_names_of_parts() -> None:
    assert partial_layout.shard_name(Path("d/x.safetensors"), 0, 12) == "x-00001-of-00012.safetensors"
    assert partial_layout.index_path(Path("d/x.safetensors")) == Path("d/x.safetensors.index.json")

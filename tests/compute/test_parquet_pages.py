"""Parquet files that brim encodes: content-defined pages, page indexes, no dictionary for ids, small row groups."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brim.compute.outputs.rows_file import MOST_GROUP_BYTES, RowsFile, Writing
from brim.compute.outputs.token_files import ParquetShard
from brim.formats import thrift
from tests.forked import brim

FUNCTIONS = """
import hashlib
import numpy as np

def length(row):
    return {"length": len(row["text"]), "numbers": list(range(row["score"] % 7))}

def model():
    def embed(given):
        seeds = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") for text in given["text"]]
        return np.stack([np.random.default_rng(seed).standard_normal(512).astype(np.float16) for seed in seeds])
    return embed
"""
JOBS = {
    "map": (["--fn", "functions:length"], {"numbers.list.element"}),
    "tokenize": (["--tokenizer", "words.json", "--keep", "id"], {"input_ids.list.element"}),
    "embed": (["--model", "functions:model", "--column", "text", "--keep", "id"], {"embedding.list.element"}),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 2,000 rows, and copies with 20 more rows at the start and in the middle."""
    folder, rng = tmp_path_factory.mktemp("pages"), random.Random(0)
    vocabulary = ["".join(rng.choice("abcdefghijklmnop") for _ in range(rng.randrange(2, 9))) for _ in range(5000)]
    model = {
        "type": "WordLevel",
        "vocab": {w: n for n, w in enumerate(["?", *dict.fromkeys(vocabulary)])},
        "unk_token": "?",
    }
    (folder / "words.json").write_text(
        json.dumps({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model})
    )
    (folder / "functions.py").write_text(FUNCTIONS)

    def rows(name: str, count: int) -> list[str]:
        texts = [" ".join(rng.choices(vocabulary, k=rng.randrange(100, 300))) for _ in range(count)]
        return [json.dumps({"id": f"{name}{n}", "score": n, "text": text}) + "\n" for n, text in enumerate(texts)]

    old, new = rows("old", 2000), rows("new", 20)
    for name, lines in {"old": old, "start": [*new, *old], "middle": [*old[:1000], *new, *old[1000:]]}.items():
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def run(folder: Path, command: str, source: str, workers: int = 2) -> list[Path]:
    """Return the files that a command writes; each command runs once."""
    target = folder / f"{command}-{source}-{workers}"
    if not target.exists():
        target.mkdir()
        to = target / "vectors.parquet" if command == "embed" else target
        brim(command, f"{source}.jsonl", to, *JOBS[command][0], "--quiet", "--workers", str(workers), cwd=folder)
    return sorted(path for path in target.rglob("*.parquet") if ".brim" not in path.parts)


def pages_of(path: Path) -> Iterator[bytes]:
    """Return the pages of a file by the offsets in its page index."""
    data = path.read_bytes()
    footer, _ = thrift.decode(data, len(data) - 8 - int.from_bytes(data[-8:-4], "little"))
    for group in footer[4][1].items:
        for chunk in group[1][1].items:
            index, _ = thrift.decode(data[chunk[4][1] : chunk[4][1] + chunk[5][1]])
            for location in index[1][1].items:
                yield data[location[1][1] : location[1][1] + location[2][1]]


def digests(pages: Iterable[bytes]) -> set[bytes]:
    return {hashlib.sha256(page).digest() for page in pages}


@pytest.mark.parametrize("command", JOBS)
def test_written_pages_stay_the_same_where_rows_are_inserted(sources: Path, command: str) -> None:
    """Most pages of the old file are in the new one, byte for byte, so the Hub's storage already has them."""
    old = digests(page for path in run(sources, command, "old") for page in pages_of(path))
    for location in ("start", "middle"):
        pages = [page for path in run(sources, command, location) for page in pages_of(path)]
        known_values = sum(len(page) for page in pages if digests([page]) <= old)
        assert known_values > 0.5 * sum(map(len, pages)), location


@pytest.mark.parametrize("command", JOBS)
def test_written_columns_have_a_page_index_and_ids_no_dictionary(sources: Path, command: str) -> None:
    plain = JOBS[command][1]
    observed = set()
    for path in run(sources, command, "old"):
        with pq.ParquetFile(path) as file:
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
            columns = [group.column(number) for group in groups for number in range(group.num_columns)]
            assert all(group.total_byte_size <= MOST_GROUP_BYTES for group in groups)
        for column in columns:
            assert column.has_offset_index
            assert column.has_column_index or column.path_in_schema in plain
            if column.path_in_schema in plain:
                assert not column.has_dictionary_page
                observed.add(column.path_in_schema)
    assert observed == plain


@pytest.mark.parametrize("command", JOBS)
def test_written_bytes_do_not_depend_on_the_number_of_workers(sources: Path, command: str) -> None:
    first, two = ([path.read_bytes() for path in run(sources, command, "old", workers)] for workers in (1, 2))
    assert first == two


def test_row_groups_of_rows_of_very_different_sizes_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brim.compute.outputs.rows_file.MOST_GROUP_BYTES", 1_000_000)
    sizes = [10] * 300 + [600_000] * 3 + [10] * 300
    table = pa.table({"x": pa.array([bytes(size) for size in sizes], pa.binary())})
    file = RowsFile(tmp_path / "a.parquet", table.schema, Writing("parquet", 100_000, 1_000_000))
    file.write(table)
    file.close()
    with pq.ParquetFile(tmp_path / "a.parquet") as written:
        groups = [written.metadata.row_group(number) for number in range(written.metadata.num_row_groups)]
        assert max(group.total_byte_size for group in groups) <= 1_000_000
    assert pq.read_table(tmp_path / "a.parquet").equals(table)


def test_joined_row_groups_keep_their_page_indexes(tmp_path: Path) -> None:
    """After concatenating separately encoded row groups, the indexes list whole pages of the file, in order."""
    rng = np.random.default_rng(0)
    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("id", pa.string())])
    tables = [
        pa.table(
            {"input_ids": list(rng.integers(0, 50_000, (rows, 200))), "id": [f"{rows}-{n}" for n in range(rows)]},
            schema,
        )
        for rows in (900, 1, 700)
    ]
    shard = ParquetShard(tmp_path / "a.parquet", schema, None)
    for table in tables:
        shard.append(shard.encoded(table))
    shard.close()
    pages = list(pages_of(tmp_path / "a.parquet"))
    assert len(pages) > 12
    for page in pages:
        header, end = thrift.decode(page)
        assert end + header[3][1] == len(page)
    assert pq.read_table(tmp_path / "a.parquet").equals(pa.concat_tables(tables))
    with pq.ParquetFile(tmp_path / "a.parquet") as file:
        assert [file.metadata.row_group(number).num_rows for number in range(3)] == [900, 1, 700]

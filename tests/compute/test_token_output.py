"""Finishing tokens: packing, splits, shuffling and files depend only on the documents."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.compute.outputs import token_files, token_output
from brim.compute.outputs.token_files import MAGIC, JoinedFooter
from brim.compute.outputs.token_output import FinishedTokens, FinishOptions, finish_tokens, token_splits
from brim.compute.outputs.token_packing import SEQ_LENGTHS, Packer, TokenSplit, hashed
from brim.compute.steps.tokenize_step import CUT, IDS, NOTE, NULL, PLAIN, ROUGH, choose_dtype
from brim.errors import BrimError, InputError, MemoryLimitError
from brim.options.compute_options import TokenSplitOptions

Documents = list[list[int]]
DOCUMENTS = st.lists(st.lists(st.integers(0, 60_000), max_size=30), max_size=40)


def splits_of(shares: str) -> tuple[TokenSplit, ...]:
    return token_splits(TokenSplitOptions(split_into=shares))


TWO = splits_of("train=0.7,validation=0.3")


def units_of(
    folder: Path, documents: Documents, cuts: Sequence[int] = (), kind: str = "int32", **extra: Any
) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    notes = extra.pop("notes", [PLAIN] * len(documents))
    edges = [0, *sorted(min(cut, len(documents)) for cut in cuts), len(documents)]
    paths = []
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        columns = {IDS: pa.array(documents[start:stop], pa.list_(pa.type_for_alias(kind)))}
        columns[NOTE] = pa.array(notes[start:stop], pa.uint8())
        table = pa.table(columns | {name: pa.array(values[start:stop]) for name, values in extra.items()})
        paths.append(folder / f"{number}.arrow")
        with pa.OSFile(str(paths[-1]), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return paths


def finish(units: list[Path], folder: Path, limit_bytes: int = 100_000_000, **options: Any) -> FinishedTokens:
    return finish_tokens(units, folder, FinishOptions(**options), limit_bytes, lambda count: None)


def rows_of(finished: FinishedTokens, split: str = "train") -> Documents:
    return [
        row for shard in finished.shards if shard.split == split for row in pq.read_table(shard.path)[IDS].to_pylist()
    ]


def bytes_of(finished: FinishedTokens) -> dict[str, bytes]:
    actual = {shard.name: shard.path.read_bytes() for shard in finished.shards}
    for made in finished.shards:  # hashed while they were written
        assert (made.size, made.sha256) == (len(actual[made.name]), hashlib.sha256(actual[made.name]).hexdigest())
    return actual


@settings(max_examples=40, deadline=None)
@given(DOCUMENTS, st.integers(2, 9), st.lists(st.integers(0, 40), max_size=4))
def test_packing_is_that_of_the_concatenation(documents: Documents, length: int, cuts: list[int]) -> None:
    """Blocks are the concatenation of all documents, cut every `length` tokens, for any batches.

    `seq_lengths` are the numbers of tokens of each document in a block, which give the document boundaries.
    """
    packer = Packer(length, pa.int32())
    rows: Documents = []
    lengths: Documents = []
    edges = [0, *sorted(min(cut, len(documents)) for cut in cuts), len(documents)]
    for start, stop in itertools.pairwise(edges):
        batch = pa.RecordBatch.from_pydict({IDS: pa.array(documents[start:stop], pa.list_(pa.int32()))})
        for item in packer.add(batch):
            rows += item.column(IDS).to_pylist()
            lengths += item.column(SEQ_LENGTHS).to_pylist()
    tail = packer.tail()
    lengths += tail.column(SEQ_LENGTHS).to_pylist() if tail else []
    numbers = [number for number, document in enumerate(documents) for _ in document]
    assert lengths == [
        [len([*run]) for _, run in itertools.groupby(numbers[index : index + length])]
        for index in range(0, len(numbers), length)
    ]
    flat = [token for document in documents for token in document]
    whole = len(flat) // length * length
    assert rows == [flat[position : position + length] for position in range(0, whole, length)]
    assert (tail.column(IDS).to_pylist() if tail else []) == ([flat[whole:]] if flat[whole:] else [])


@settings(max_examples=15, deadline=None)
@given(DOCUMENTS, st.lists(st.integers(0, 40), max_size=3), st.sampled_from(["parquet", "arrow", "bin"]))
def test_unit_cuts_do_not_matter(
    tmp_path_factory: pytest.TempPathFactory, documents: Documents, cuts: list[int], format: str
) -> None:
    """The same documents give the same bytes, for any division into units."""
    folder = tmp_path_factory.mktemp("finish")
    options: dict[str, Any] = {"format": format, "pack": 5, "shuffle": 3, "splits": TWO}
    units = (units_of(folder / "u1", documents), units_of(folder / "u2", documents, cuts))
    try:
        whole = finish(units[0], folder / "one", **options)
    except InputError:  # no row is full
        with pytest.raises(InputError):
            finish(units[1], folder / "many", **options)
        return
    segments = finish(units[1], folder / "many", **options)
    assert bytes_of(whole) == bytes_of(segments)
    assert whole.counts == segments.counts


def many(count: int = 3000) -> Documents:
    random = np.random.default_rng(1)
    return [random.integers(0, 50_000, size).tolist() for size in random.integers(0, 12, count)]


def test_shuffle_is_a_permutation_that_memory_does_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All documents occur once, in another order; with little memory, nested buckets give the same order."""
    documents = many()
    units = units_of(tmp_path / "u", documents, [1000, 2500])
    plenty = finish(units, tmp_path / "plenty", shuffle=1)
    monkeypatch.setattr("brim.compute.outputs.token_packing._LEAST_BUCKET", 2000)
    monkeypatch.setattr("brim.compute.outputs.token_packing._MOST_BUCKETS", 4)
    small = finish(units, tmp_path / "little", limit_bytes=1, shuffle=1)
    second = finish(units, tmp_path / "other", shuffle=2)
    order = np.argsort(hashed(np.arange(len(documents), dtype=np.uint64), 1, 2))
    assert rows_of(plenty) == [documents[number] for number in order]
    assert bytes_of(plenty) == bytes_of(small)
    assert rows_of(second) != rows_of(plenty)
    assert sorted(rows_of(second)) == sorted(documents)
    assert not (tmp_path / "little" / ".finish").exists()


def test_splits_share_the_documents(tmp_path: Path) -> None:
    """Every document is in one split, in order, with about the requested shares."""
    documents = many()
    result = finish(units_of(tmp_path / "u", documents, [10]), tmp_path / "out", splits=splits_of("90/5/5"))
    parts = {split: rows_of(result, split) for split in ("train", "validation", "test")}
    assert sorted(row for rows in parts.values() for row in rows) == sorted(documents)
    assert 2600 < len(parts["train"]) < 2800
    assert 100 < len(parts["validation"]) < 200
    destinations = iter(documents)
    assert all(row in destinations for row in parts["train"])
    assert sorted(shard.name for shard in result.shards) == [
        f"data/{name}-00000-of-00001.parquet" for name in ("test", "train", "validation")
    ]


@pytest.mark.parametrize(
    "text",
    [
        *("", "1", "0.5", "0.5/0.4", "0.9/0.1/0", "a/b", "0.25/0.25/0.25/0.25", "1.5/-0.5", "nan/1"),
        *("train=0.5", "train=0.5,test=0.4", "train=1.5,test=-0.5", "train=a,test=b", "train=0.5,train=0.5", "a b=1"),
    ],
)
def test_wrong_splits_are_refused(text: str) -> None:
    """Shares are above zero and add up to 1 (or 100, without names); a split has a plain name."""
    with pytest.raises(InputError, match=r"split_into=|name of a split"):
        splits_of(text)


def test_shares_have_two_spellings_and_one_meaning() -> None:
    """Shares without names, which earlier versions also accepted as `split`, mean train, validation and test."""
    names = splits_of("train=0.99,validation=0.01")
    assert names == splits_of("0.99/0.01") == splits_of("99/1") == token_splits(TokenSplitOptions(split="0.99/0.01"))
    assert names == token_splits(TokenSplitOptions(split_into={"train": 0.99, "validation": 0.01}))
    assert token_splits(TokenSplitOptions()) == (TokenSplit("train", 1.0),)
    assert token_splits(TokenSplitOptions(split="dev")) == (TokenSplit("dev", 1.0),)
    assert TokenSplitOptions(split="99/1").deprecated_shares == ("split", "99/1", "train=0.99,validation=0.01")
    assert not TokenSplitOptions(split_into="train=0.5,test=0.5").deprecated_shares
    with pytest.raises(InputError, match="split= cannot be used with split_into="):
        TokenSplitOptions(split="dev", split_into="train=0.5,test=0.5")


def test_bin_is_read_with_memmap(tmp_path: Path) -> None:
    """The file contains only tokens, the index the start of each document, and the header the type."""
    documents = [[1, 2, 3], [], [70, 5], [65_535]]
    units = units_of(tmp_path / "u", documents, [2], kind="uint16")
    result = finish(units, tmp_path / "out", format="bin", dtype="uint16", header=(("vocab_size", 65_536),))
    assert [shard.name for shard in result.shards] == ["train.bin", "train.idx.npy", "train.json"]
    header = json.loads((tmp_path / "out/train.json").read_text())
    tokens = np.memmap(tmp_path / "out/train.bin", dtype=header["dtype"], mode="r")
    index = np.load(tmp_path / "out/train.idx.npy", mmap_mode="r")
    assert [tokens[a:b].tolist() for a, b in itertools.pairwise(index)] == documents
    assert header == {
        "format": "brim-tokens",
        "version": 1,
        "dtype": "<u2",
        "tokens": 6,
        "documents": 4,
        "vocab_size": 65_536,
        "pack": None,
    }


def test_packed_bin_is_a_view_of_blocks(tmp_path: Path) -> None:
    """With --pack the file holds whole blocks; documents that start in the dropped tail are not in the index."""
    units = units_of(tmp_path / "u", [[1, 2, 3], [4, 5], [6, 7], [8]])
    result = finish(units, tmp_path / "out", format="bin", pack=3)
    tokens = np.memmap(tmp_path / "out/train.bin", dtype="<i4", mode="r")
    assert tokens.reshape(-1, 3).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert np.load(tmp_path / "out/train.idx.npy").tolist() == [0, 3, 5, 6]
    assert (result.counts.tokens, result.counts.dropped_tail) == (6, 2)
    remaining = finish(units, tmp_path / "kept", format="bin", pack=3, pack_tail="keep")
    assert (remaining.counts.tokens, remaining.counts.dropped_tail) == (8, 0)
    assert [len(bytes_of(each)["train.bin"]) for each in (result, remaining)] == [24, 32]


def test_nothing_gives_files_without_rows(tmp_path: Path) -> None:
    """A split without documents has a file without rows."""
    for format in ("parquet", "arrow", "bin"):
        result = finish(units_of(tmp_path / "u", []), tmp_path / format, format=format, splits=TWO)
        assert sum(shard.rows for shard in result.shards) == 0
        assert {made.split for made in result.shards} == {"train", "validation"}


def test_counts(tmp_path: Path) -> None:
    """Null and empty documents are counted separately and become empty lists; cut documents are counted."""
    units = units_of(tmp_path / "u", [[1], [], [], [2, 3], [4]], notes=[PLAIN, NULL, PLAIN, CUT, ROUGH])
    result = finish(units, tmp_path / "out")
    counts = result.counts
    assert (counts.documents, counts.tokens, counts.empty, counts.null, counts.cut, counts.rough) == (5, 4, 1, 1, 2, 1)
    assert rows_of(result) == [[1], [], [], [2, 3], [4]]


def test_kept_columns_travel(tmp_path: Path) -> None:
    """Kept columns stay with their documents through split and shuffle; packing refuses them."""
    documents = many(500)
    units = units_of(tmp_path / "u", documents, [100], name=[str(number) for number in range(500)])
    result = finish(units, tmp_path / "out", shuffle=0, splits=TWO)
    rows = [row for shard in result.shards for row in pq.read_table(shard.path).to_pylist()]
    assert len(rows) == 500
    assert all(documents[int(row["name"])] == row[IDS] for row in rows)
    with pytest.raises(InputError, match="keep_columns='name'"):
        finish(units, tmp_path / "packed", pack=4)


@pytest.mark.parametrize("cuts", [[], [1, 50, 333], list(range(0, 1000, 90))])
def test_shards_are_cut_at_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: list[int]) -> None:
    """Shards have exactly the requested rows, or as many row groups as their size allows."""
    monkeypatch.setattr(token_files, "GROUP_TOKENS", 100)
    documents = many(1000)
    units = units_of(tmp_path / "u", documents, cuts)
    by_rows = finish(units, tmp_path / "rows", rows_per_shard=300)
    assert [shard.rows for shard in by_rows.shards] == [300, 300, 300, 100]
    by_size = finish(units, tmp_path / "size", shard_bytes=4000)
    assert len(by_size.shards) > 4
    assert all(made.tokens <= 1000 for made in by_size.shards)
    assert rows_of(by_rows) == rows_of(by_size) == documents
    for made in by_size.shards:
        groups = pq.ParquetFile(made.path).metadata
        assert groups.num_row_groups > 1
    exact = finish(units, tmp_path / "exact", rows_per_shard=500)
    assert [made.rows for made in exact.shards] == [500, 500]


def test_a_document_that_no_row_of_parquet_can_hold_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error counts the memory for writing in addition to the used memory, and the suggested limit is sufficient."""
    monkeypatch.setattr(token_output, "GROUP_TOKENS", 1000)
    monkeypatch.setattr(token_output, "tree_bytes", lambda: 50_000_000)
    units = units_of(tmp_path / "u", [[1, 2], [3] * 200_000, [4]])
    with pytest.raises(
        MemoryLimitError, match=r"A document of 200,000 tokens does not fit a limit of 52\.0 MB"
    ) as caught:
        finish(units, tmp_path / "out", 52_000_000)
    assert "60MB" in caught.value.hint
    for limit, format in ((60_000_000, "parquet"), (52_000_000, "arrow"), (52_000_000, "bin")):
        assert finish(units, tmp_path / format, limit, format=format).counts.tokens == 200_003


@pytest.mark.parametrize("format", ["parquet", "arrow", "bin"])
@pytest.mark.parametrize("splits", [splits_of("50/50"), (TokenSplit("train", 1.0),)])
def test_packing_refuses_rows_that_no_tokens_fill(tmp_path: Path, format: str, splits: tuple[TokenSplit, ...]) -> None:
    """An empty dataset is an error; the tail can be kept, and no file has its final name before the error."""
    units = units_of(tmp_path / "u", [[1, 2, 3], [4, 5]])
    options: dict[str, Any] = {"format": format, "splits": splits, "pack": 10_000_000}
    with pytest.raises(InputError, match=r"No row of 10,000,000 tokens \(.*pack.*\) is full: .* have 5 tokens"):
        finish(units, tmp_path / "out", **options)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".finish"]
    remaining = finish(units, tmp_path / "out", **options, pack_tail="keep")
    assert remaining.counts.tokens == 5


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_failure_leaves_no_named_file_and_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files get their names at the end; a second run after the failure gives the same bytes."""
    monkeypatch.setattr(token_files, "GROUP_TOKENS", 64)  # so that shards are open when it fails
    units = units_of(tmp_path / "u", many(), [1500])
    options = FinishOptions(shuffle=0, pack=16, splits=(TokenSplit("train", 0.5), TokenSplit("validation", 0.5)))

    def fail(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finish_tokens(units, tmp_path / "out", options, 1 << 27, fail)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".finish"]
    repeated = finish_tokens(units, tmp_path / "out", options, 1 << 27, lambda count: None)
    clean = finish_tokens(units, tmp_path / "clean", options, 1 << 27, lambda count: None)
    assert bytes_of(repeated) == bytes_of(clean)


def test_dtypes() -> None:
    """`auto` is a type that torch supports, or the smallest for bin; a type that is too small is refused."""
    assert choose_dtype("auto", "parquet", 100) == "int32"
    assert choose_dtype("auto", "bin", 65_536) == "uint16"
    assert choose_dtype("auto", "bin", 65_537) == "uint32"
    with pytest.raises(InputError, match="65,535"):
        choose_dtype("uint16", "bin", 65_537)


def test_kept_types_may_differ_between_units(tmp_path: Path) -> None:
    """A kept column that is an integer in one unit, a float in another and null in a third gets a common type."""
    units = []
    for number, values in enumerate([pa.array([1, 2]), pa.array([0.5]), pa.nulls(1)]):
        ids = pa.array([[number]] * len(values), pa.list_(pa.int32()))
        table = pa.table({IDS: ids, NOTE: pa.array([0] * len(values), pa.uint8()), "v": values})
        units.append(tmp_path / f"{number}.arrow")
        with pa.OSFile(str(units[-1]), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    for shuffle in (None, 0):
        options = FinishOptions(shuffle=shuffle)
        result = finish_tokens(units, tmp_path / str(shuffle), options, 1 << 27, lambda count: None)
        rows = pq.read_table(result.shards[0].path).to_pylist()
        expected = [([0], 1.0), ([0], 2.0), ([1], 0.5), ([2], None)]
        assert sorted(map(str, expected)) == sorted(str((row[IDS], row["v"])) for row in rows)


def parquet_by_one_writer(table: pa.Table, groups: Sequence[int], index: bool) -> bytes:
    """Write the row groups of a table to one file with pyarrow."""
    other_items = [name for name in table.schema.names if name != IDS]
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=other_items or False,
        write_statistics=other_items or False,
        write_page_index=index,
    ) as writer:
        start = 0
        for rows in groups:
            writer.write_table(table.slice(start, rows), row_group_size=max(rows, 1))
            start += rows
    return bytes(sink.getvalue())


@given(rows=st.lists(st.integers(0, 9), min_size=1, max_size=6), is_kept=st.booleans(), index=st.booleans())
@settings(max_examples=60, deadline=None)
def test_groups_that_are_encoded_apart(rows: list[int], is_kept: bool, index: bool) -> None:
    """Concatenated row groups give the bytes of a single writer, also with empty groups, nulls and nested columns."""
    count = sum(rows)
    columns = {IDS: pa.array([list(range(number % 5)) for number in range(count)], pa.list_(pa.int32()))}
    if is_kept:
        columns["name"] = pa.array([f"n{number % 3}" if number % 4 else None for number in range(count)], pa.string())
        columns["deep"] = pa.array([[{"a": number}] for number in range(count)], pa.list_(pa.struct({"a": pa.int64()})))
    table = pa.table(columns)
    footer, created, start = JoinedFooter(), bytearray(MAGIC), 0
    for each in rows:
        first = parquet_by_one_writer(table.slice(start, each), [each], index)
        created += footer.add(memoryview(first), len(created))
        start += each
    created += footer.end(len(created))
    assert bytes(created) == parquet_by_one_writer(table, rows, index)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rows_per_shard": 37},
        {"pack": 16},
        {"pack": 16, "pack_tail": "keep", "splits": TWO},
        {"shuffle": 3, "splits": TWO, "shard_bytes": 900},
        {"format": "arrow", "shard_bytes": 900},
        {"format": "bin", "dtype": "uint16", "splits": TWO},
        {"format": "bin", "pack": 16, "shuffle": 0},
    ],
    ids=lambda options: " ".join(map(str, options.items())) or "rows",
)
def test_any_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Any number of encoding threads, or none, gives the same files."""
    monkeypatch.setattr(token_files, "GROUP_TOKENS", 50)
    documents = [[number % 60_000] * (number % 23) for number in range(400)]
    remaining = {} if "pack" in options or options.get("format") == "bin" else {"name": [f"{n}" for n in range(400)]}
    units = units_of(tmp_path / "units", documents, cuts=[90, 91, 300], kind=options.get("dtype", "int32"), **remaining)
    actual = []
    for threads in (0, 1, 4):
        monkeypatch.setattr(token_output, "_encoders", lambda options, limit_bytes, threads=threads: threads)
        actual.append(bytes_of(finish(units, tmp_path / str(threads), **options)))
    assert len(actual[0]) > 1 or "shard_bytes" not in options
    assert actual[0] == actual[1] == actual[2]


def test_no_threads_without_room(tmp_path: Path) -> None:
    """A small limit allows no threads, a large one at most as many as there are cores."""
    assert token_output._encoders(FinishOptions(), 1 << 27) == 0
    assert 1 <= token_output._encoders(FinishOptions(), 1 << 33) <= (os.cpu_count() or 1)
    assert token_output._encoders(FinishOptions(pack=1 << 26), 1 << 33) <= 4


def test_a_failure_beside_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a thread becomes the job's error without a hang, and the next run completes the job."""

    def broken(self: Any, table: pa.Table) -> Any:
        raise OSError(28, "No space left on device")

    units = units_of(tmp_path / "units", [[1, 2, 3]] * 50)
    monkeypatch.setattr(token_output, "_encoders", lambda options, limit_bytes: 2)
    with monkeypatch.context() as patched:
        patched.setattr(token_files.ParquetShard, "encoded", broken)
        with pytest.raises(BrimError, match="disk of the destination is full"):
            finish(units, tmp_path / "out")
    assert rows_of(finish(units, tmp_path / "out")) == [[1, 2, 3]] * 50

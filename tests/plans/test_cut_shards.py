"""Cutting rows into shards: positions of the cuts, names of the shards, and the printed reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from brim.errors import InputError
from brim.file_set import FileSetBuilder
from brim.options.groups import ShardOptions
from brim.plans import cut_shards as module
from brim.plans.cut_shards import Shard, Shards, cut_shards, metadata_bytes, shard_name
from brim.sources.file_table import FileColumn, FileTable, Split

MB = 10**6


class _Stat:
    st_mode, st_ino, st_mtime_ns, st_dev = 0o100644, 1, 1, 1

    def __init__(self, size: int) -> None:
        self.st_size = size


def table_of(sizes: Sequence[int], splits: dict[str, int] | None = None, **columns: Any) -> FileTable:
    """Return a table with one row per file of the specified sizes; `splits` are the row counts."""
    files = FileSetBuilder("/nowhere")
    for number, size in enumerate(sizes):
        files.add(f"{number}", _Stat(size))  # type: ignore[arg-type]
    ends = np.cumsum([0, *(splits or {"train": len(sizes)}).values()]).tolist()
    actual = tuple(Split(name, *ends[n : n + 2]) for n, name in enumerate(splits or {"train": 0}))
    rows = pa.table({"file": pa.array(range(len(sizes)), pa.int64()), **columns})
    return FileTable(rows, {"file": FileColumn("Image", False)}, files.finish(), None, actual)


def cut(table: FileTable, max_rows: int | None = None, **options: Any) -> tuple[list[tuple[str, int, int]], str]:
    _, shards, why = cut_shards(table, ".parquet", ShardOptions(**options), max_rows)
    return [(shard.split, shard.start, shard.stop) for shard in shards], why


def test_shards_by_size() -> None:
    """A shard takes as many rows as fit by total size, and a larger row gets a separate shard."""
    table = table_of([40, 50, 10, 200, 30])
    actual, why = cut(table, shard_size=100)
    assert actual == [("train", 0, 3), ("train", 3, 4), ("train", 4, 5)]
    assert why == "rows in order, up to 100 B a shard"
    texts = table_of([40, 50, 10, 200, 30], text=["x" * 6] * 5)
    assert cut(texts, shard_size=100)[0][0] == ("train", 0, 1)
    assert metadata_bytes(texts).tolist() == [10] * 5
    assert cut(texts, shard_size=110)[0][0] == ("train", 0, 2)


def test_the_default_size() -> None:
    """The default shard size is 500 MB, doubled until there are at most 5,000 shards."""
    assert (module.DEFAULT_SHARD_BYTES, module.MOST_SHARDS) == (500 * MB, 5_000)
    actual, why = cut(table_of([250 * MB] * 4 + [1]))
    assert [stop for _, _, stop in actual] == [2, 4, 5]
    assert why == "rows in order, up to 500 MB a shard"
    at_most = table_of([500 * MB] * 5_000)
    assert len(cut(at_most)[0]) == 5_000
    actual, why = cut(table_of([500 * MB] * 5_001))
    assert len(actual) == 2_501
    assert why == "rows in order, up to 1.00 GB a shard (larger than 500 MB, to stay below 5000 files)"


def test_the_most_rows_of_a_shard() -> None:
    actual, why = cut(table_of([1] * 5), max_rows=2)
    assert [(start, stop) for _, start, stop in actual] == [(0, 2), (2, 4), (4, 5)]
    assert why == "rows in order, up to 500 MB a shard and 2 rows"
    assert [stop for _, _, stop in cut(table_of([1] * 5), max_rows=2, shard_size=100)[0]] == [2, 4, 5]
    assert [stop for _, _, stop in cut(table_of([1] * 5), max_rows=2, num_shards=1)[0]] == [5]


def test_shards_by_rows() -> None:
    """--rows-per-shard counts the rows of each split separately."""
    actual, why = cut(table_of([1] * 7, {"train": 5, "test": 2}), rows_per_shard=2)
    assert actual == [("train", 0, 2), ("train", 2, 4), ("train", 4, 5), ("test", 5, 7)]
    assert why == "2 rows each"


def test_shards_by_number() -> None:
    """--num-shards cuts each split, or only the named splits, into shards of about the same size."""
    table = table_of([90, 10, 10, 10, 60, 60], {"train": 4, "test": 2})
    actual, why = cut(table, num_shards=2)
    assert actual == [("train", 0, 1), ("train", 1, 4), ("test", 4, 5), ("test", 5, 6)]
    assert why == "--num-shards 2 for each split"
    assert cut(table_of([1, 1]), num_shards=2)[1] == "--num-shards 2"
    actual, why = cut(table, num_shards={"test": 2})
    assert actual == [("train", 0, 4), ("test", 4, 5), ("test", 5, 6)]
    assert why == "--num-shards test=2"
    assert cut(table, num_shards={"train": 1, "test": 1})[1] == "--num-shards train=1, test=1"


def test_more_shards_than_rows() -> None:
    assert len(cut(table_of([1] * 3), num_shards=3)[0]) == 3
    with pytest.raises(InputError, match="num_shards=4 is more than the 3 rows of the split 'train'"):
        cut(table_of([1] * 3), num_shards=4)
    with pytest.raises(InputError, match="is more than the 2 values of who of the split 'train'"):
        cut(table_of([1] * 3, who=["a", "b", "a"]), num_shards=3, shard_by="who")


def test_splits_that_are_not_there() -> None:
    table = table_of([1] * 3, {"train": 2, "test": 1})
    with pytest.raises(InputError, match="names the split 'dev', which does not exist") as caught:
        cut(table, num_shards={"train": 1, "other": 1, "dev": 1})
    assert caught.value.hint == "The splits are: train, test."


def test_a_split_without_rows_has_a_shard() -> None:
    """A split without rows gets one empty shard, as in `datasets`."""
    table = table_of([1, 1], {"train": 0, "dev": 2, "test": 0})
    expected = [("train", 0, 0), ("dev", 0, 2), ("test", 2, 2)]
    for options in ({}, {"shard_size": 100}, {"rows_per_shard": 5}, {"num_shards": 1}, {"num_shards": {"dev": 1}}):
        assert cut(table, **options)[0] == expected, options
    assert cut(table_of([]))[0] == [("train", 0, 0)]
    assert cut(table_of([]), num_shards=3)[0] == [("train", 0, 0)]


def test_rows_of_one_value_stay_together() -> None:
    """With `shard_by`, rows with the same value stay together, in the order of first appearance within each split.

    Null counts as a value.
    """
    actor = ["b", "a", None, "b", "a", "c", None, "c"]
    table = table_of([10] * 8, {"train": 5, "test": 3}, who=actor)
    ordered, shards, why = cut_shards(table, ".parquet", ShardOptions(shard_by="who"))
    assert ordered.rows.column("who").to_pylist() == ["b", "b", "a", "a", None, None, "c", "c"]
    assert ordered.rows.column("file").to_pylist() == [0, 3, 1, 4, 2, 6, 5, 7]
    assert [(s.split, s.start, s.stop) for s in shards] == [
        *(("train", 0, 2), ("train", 2, 4), ("train", 4, 5)),
        *(("test", 5, 6), ("test", 6, 8)),
    ]
    assert why == "one for each who"
    actual, why = cut(table, shard_by="who", shard_size=60 + 20)
    assert (actual, why) == (
        [("train", 0, 5), ("test", 5, 8)],
        "rows in order, up to 80 B a shard, rows of one who kept together",
    )
    assert [stop for _, _, stop in cut(table, shard_by="who", num_shards=2)[0]] == [4, 5, 6, 8]


def test_values_that_are_too_many_share_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SHARDS", 2)
    assert cut(table_of([1] * 3, who=["a", "b", "a"]), shard_by="who")[1] == "one for each who"
    actual, why = cut(table_of([1] * 3, who=["a", "b", "c"]), shard_by="who")
    assert actual == [("train", 0, 3)]
    assert why == "rows in order, up to 500 MB a shard, rows of one who kept together"


def test_dictionaries_are_grouped_by_their_values() -> None:
    chunks = [pa.array(["a", "b"]).dictionary_encode(), pa.array(["b", "a"]).dictionary_encode()]
    table = table_of([1] * 4, who=pa.chunked_array(chunks))
    assert cut(table, shard_by="who")[0] == [("train", 0, 2), ("train", 2, 4)]


def test_what_cannot_be_grouped_by() -> None:
    table = table_of([1, 1], who=["a", "b"], deep=[[1], [2]])
    for name in ("nobody", "file"):
        with pytest.raises(
            InputError, match=f"names '{name}', which is not a column that rows can be grouped by"
        ) as caught:
            cut(table, shard_by=name)
        assert caught.value.hint == "Columns are: who, deep."
    with pytest.raises(InputError) as caught:
        cut(table_of([1]), shard_by="x")
    assert caught.value.hint == "Columns are: (none)."
    with pytest.raises(InputError, match="cannot group by 'deep', which holds list"):
        cut(table, shard_by="deep")


def test_options_that_cannot_be() -> None:
    """Only one way to cut can be chosen, and its number must be above zero."""
    for options in ({"shard_size": 1, "num_shards": 1}, {"num_shards": 1, "rows_per_shard": 1}):
        with pytest.raises(InputError, match="exclude each other"):
            ShardOptions(**options)  # type: ignore[arg-type]
    for options, name in (({"num_shards": 0}, "num_shards"), ({"num_shards": {"a": 2, "b": 0}}, "num_shards")):
        with pytest.raises(InputError, match=f"{name}= takes a number above zero, not"):
            ShardOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="rows_per_shard= takes a number above zero"):
        ShardOptions(rows_per_shard=0)
    ShardOptions(num_shards=1)
    ShardOptions(rows_per_shard=1, shard_by=None)
    ShardOptions(shard_by="a", shard_size=1)
    with pytest.raises(InputError, match="cannot be used with"):
        ShardOptions(rows_per_shard=1, shard_by="a")


def test_what_a_cut_says_of_itself() -> None:
    """The fingerprint inputs contain only the chosen options, because they identify the dataset."""
    assert ShardOptions().fingerprint_inputs() == {}
    assert ShardOptions(num_shards={"a": 2}, shard_by="b").fingerprint_inputs() == {
        "num_shards": {"a": 2},
        "shard_by": "b",
    }
    assert ShardOptions(shard_size=7).fingerprint_inputs() == {"shard_bytes": 7}
    assert ShardOptions(num_shards={"a": 2}).shard_count("b") is None
    assert (ShardOptions(num_shards={"a": 2}).shard_count("a"), ShardOptions(num_shards=3).shard_count("a")) == (2, 3)


@pytest.mark.parametrize(
    ("number", "count", "name"),
    [
        (0, 1, "data/train-00000-of-00001.parquet"),
        (7, 100_000, "data/train-00007-of-100000.parquet"),
        (7, 100_001, "data/train-000007-of-100001.parquet"),
        (100_000, 100_001, "data/train-100000-of-100001.parquet"),
    ],
)
def test_names(number: int, count: int, name: str) -> None:
    """Shard numbers have at least five digits and the same width within a split."""
    assert shard_name("data", "train", number, count, ".parquet") == name


def test_a_plan_of_shards_is_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of shards supports indexing from both ends, slicing and iteration, and creates shards in small blocks."""
    monkeypatch.setattr(module, "_BLOCK", 2)
    table = table_of([10, 20, 30, 40, 50], {"train": 3, "dev": 0, "test": 2}, text=["x"] * 5)
    _, shards, _ = cut_shards(table, ".tar", ShardOptions(rows_per_shard=1), folder="there")
    expected = [
        Shard("there/train-00000-of-00003.tar", "train", 0, 1, 10, 5),
        Shard("there/train-00001-of-00003.tar", "train", 1, 2, 20, 5),
        Shard("there/train-00002-of-00003.tar", "train", 2, 3, 30, 5),
        Shard("there/dev-00000-of-00001.tar", "dev", 3, 3, 0, 0),
        Shard("there/test-00000-of-00002.tar", "test", 3, 4, 40, 5),
        Shard("there/test-00001-of-00002.tar", "test", 4, 5, 50, 5),
    ]
    assert list(shards) == expected
    assert len(shards) == 6
    assert [shards[n] for n in range(-6, 6)] == expected * 2
    assert shards[1:5:2] == [expected[1], expected[3]]
    assert shards.rows.tolist() == [1, 1, 1, 0, 1, 1]
    assert [shard.rows for shard in expected] == [1, 1, 1, 0, 1, 1]
    with pytest.raises(IndexError):
        shards[6]
    assert isinstance(shards, Shards)
    assert (shards.splits, shards.counts) == (("train", "dev", "test"), (3, 1, 2))
    assert module.cut_shards(table, ".x", ShardOptions())[1][0].name.startswith("data/train-")

"""Fingerprints, keys and dates of plans stay the same across versions, so existing ledgers stay valid."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pytest

from brim.file_set import Bundle, FileSet, Ranges
from brim.options.groups import ShardOptions
from brim.plans import cut_shards, fingerprint, plan
from brim.plans.cut_shards import shard_name
from brim.plans.fingerprint import digest_items, digest_json
from brim.plans.plan import Plan, make_plan
from brim.sources.file_table import FileColumn, FileTable, Split

N = 40
_ONE = FileColumn("Image", False)
_LIST = FileColumn("Image", True)


def files(count: int, **more: object) -> FileSet:
    numbers = np.arange(count, dtype=np.int64)
    paths = pa.array([f"sub-{n:03d}/scan é {n}.bin" for n in range(count)], pa.large_string())
    return FileSet("/nowhere", paths, numbers * 7 + 1, numbers * 1000 + 5, numbers + 1, **more)  # type: ignore[arg-type]


def table(kind: str) -> FileTable:
    """Return a small table with one kind of cell."""
    texts = pa.array([f"t{n % 5}" if n % 7 else None for n in range(N)])
    numbers = pa.array(range(N), pa.int64())
    split = (Split("train", 0, 30), Split("test", 30, N))
    if kind == "plain":
        rows = pa.table({"a": texts, "image": numbers, "b": texts.dictionary_encode()})
        return FileTable(rows, {"image": _ONE}, files(N), {"a": {"_type": "Value"}}, split)
    if kind == "lists":
        cells = [None if n == 3 else [] if n == 4 else [n, None, n + 1] for n in range(N)]
        single = pa.array([None if n % 4 == 0 else n for n in range(N)], pa.int64())
        rows = pa.table({"many": pa.array(cells, pa.list_(pa.int64())), "a": texts, "one": single})
        return FileTable(rows, {"one": _ONE, "many": _LIST}, files(N + 1), None, split)
    if kind == "bundles":
        inside = files(N, bundles={2: Bundle(("x", "y"), (3, 4)), 9: Bundle(("z",), (5,))})
        return FileTable(pa.table({"image": numbers, "a": texts}), {"image": _ONE}, inside, None, split)
    holders = np.array([-1 if n % 6 == 0 else n % 3 for n in range(N)], np.int32)
    parts = files(N, ranges=Ranges(files(3), holders, np.arange(N, dtype=np.int64) * 11))
    return FileTable(pa.table({"image": numbers}), {"image": _ONE}, parts, None, split, verbatim=True)


PLANS = {
    "plain": ("parquet", ShardOptions()),
    "plain, one row per shard": ("webdataset", ShardOptions(rows_per_shard=1)),
    "plain, by value": ("parquet", ShardOptions(shard_by="a")),
    "lists": ("parquet", ShardOptions(rows_per_shard=3)),
    "bundles": ("parquet", ShardOptions(num_shards=2)),
    "ranges": ("parquet", ShardOptions(rows_per_shard=7)),
}
# Digests of the first implementation, which digested each shard as a Python object: the fingerprint, then names and
# positions, keys, and dates of all shards.
EXPECTED = {
    "plain": ["9fa7729a29b885e7", "38a3d283e20a286f", "3c207b3403621561", "7777f322cca6db0c"],
    "plain, one row per shard": ["796738a060337e9e", "624a064c8f629b67", "80e2bb50e7f53484", "169908010de40316"],
    "plain, by value": ["951d61070ab377dd", "ee029871ccb6d138", "97a1a055826939c7", "cf8cfd051bd446a9"],
    "lists": ["36729ae6bf019d04", "ab39dd396fb50410", "00604ab4b22940f9", "7883a045a9ef6b01"],
    "bundles": ["f79676e9e84c03f3", "7e163c1626791176", "d0b38e814bd439a5", "4a6e08e13f67bac4"],
    "ranges": ["76f2cda3128bebcc", "8d7cfbbcbcd04e00", "64064d00ee36e960", "1e543a742a64a8cc"],
}


def planned(name: str) -> Plan:
    kind, cut = PLANS[name]
    return make_plan(table(name.partition(",")[0]), kind, cut)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PLANS)
def test_digests_are_what_they_were(name: str) -> None:
    """A new version resumes a job of an earlier version shard by shard."""
    plan = planned(name)
    shards = [[s.name, s.split, s.start, s.stop, s.file_bytes, s.value_bytes] for s in plan.shards]
    keys = [plan.shard_key(shard) for shard in plan.shards]
    dates = [plan.shard_mtimes(shard) for shard in plan.shards]
    digests = [plan.fingerprint, *(digest_json(each) for each in (shards, keys, dates))]
    assert [digest[:16] for digest in digests] == EXPECTED[name]


@pytest.mark.parametrize("name", PLANS)
def test_shards_in_columns_are_a_sequence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards and their dates are the same by iteration, index and slice, for every block size."""
    planned_job = planned(name)
    for block in (3, 10_000):
        monkeypatch.setattr(cut_shards, "_BLOCK", block)
        monkeypatch.setattr(plan, "_BLOCK", block)
        shards = list(planned_job.shards)
        assert [planned_job.shards[n] for n in range(len(shards))] == shards == planned_job.shards[:]
        assert (planned_job.shards[-1], planned_job.shards[1:3]) == (shards[-1], shards[1:3])
        assert list(planned_job.with_mtimes(shards)) == [(shard, planned_job.shard_mtimes(shard)) for shard in shards]
        back = shards[::-2]
        assert list(planned_job.with_mtimes(back)) == [(shard, planned_job.shard_mtimes(shard)) for shard in back]
    with pytest.raises(IndexError):
        planned_job.shards[len(shards)]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_a_long_list_is_digested_in_pieces(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digesting items in blocks gives the digest of their list."""
    monkeypatch.setattr(fingerprint, "_BLOCK", 3)
    items = [[f"é {n}", n] for n in range(count)]
    assert digest_items(iter(items)) == digest_json(items)


def test_names_sort_as_rows_do() -> None:
    """Shard names sort in the order of shards for every number of shards, and match one pattern."""
    for count in (1, 99_999, 100_000, 100_001, 1_000_000):
        numbers = sorted({0, 1, 9, 10_000, 99_998, 99_999, 100_000, 999_999} & set(range(count)))
        names = [shard_name("data", "train", number, count, ".parquet") for number in numbers]
        assert names == sorted(names)
        assert len({len(name) for name in names}) == 1
        assert all(re.fullmatch(rf"data/train-\d{{5,}}-of-0*{count}\.parquet", name) for name in names)
    assert shard_name("data", "train", 7, 902, ".tar") == "data/train-00007-of-00902.tar"

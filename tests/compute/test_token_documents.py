"""Documents in chunks, splits, shuffled order and blocks: edge cases, and results that must not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from brim.compute.outputs import token_packing as module
from brim.compute.outputs.token_packing import (
    KEY,
    SPLIT,
    Packer,
    TokenSplit,
    ends_of,
    hashed,
    in_key_order,
    small_batches,
    tokens_of,
    unit_batches,
    with_places,
)
from brim.compute.steps.tokenize_step import IDS, NOTE


def batch_of(documents: list[list[int]], kind: pa.DataType | None = None, **extra: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({IDS: pa.array(documents, pa.list_(kind or pa.int32())), **extra})


def packed(length: int, *batches: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Return the blocks, and the remainder."""
    packer = Packer(length, pa.int32())
    rows = [row for batch in batches for item in packer.add(batch_of(batch)) for row in item.column(IDS).to_pylist()]
    tail = packer.tail()
    assert packer.tail_tokens == (0 if tail is None else len(tail.column(IDS)[0].as_py()))
    return rows, [] if tail is None else tail.column(IDS)[0].as_py()


@pytest.mark.parametrize(
    ("batches", "rows", "remainder"),
    [
        ([[[1, 2, 3]]], [[1, 2, 3]], []),  # exactly one block
        ([[[1, 2, 3], [4, 5, 6]]], [[1, 2, 3], [4, 5, 6]], []),
        ([[[1, 2]], [[3]]], [[1, 2, 3]], []),  # filled by the last token of another batch
        ([[[1, 2]], [[3]], [[4]]], [[1, 2, 3]], [4]),
        ([[[1, 2]]], [], [1, 2]),
        ([[[1, 2, 3, 4]]], [[1, 2, 3]], [4]),
        ([[[1]], [[2, 3, 4, 5, 6]]], [[1, 2, 3], [4, 5, 6]], []),
        ([[[]], [[], []]], [], []),
        ([], [], []),
    ],
)
def test_blocks_at_exact_multiples(batches: list[Any], rows: list[list[int]], remainder: list[int]) -> None:
    """A block that is exactly full is returned at once, without a remainder."""
    assert packed(3, *batches) == (rows, remainder)


def test_blocks_of_one_token() -> None:
    assert packed(1, [[1, 2], [3]], [[]], [[4]]) == ([[1], [2], [3], [4]], [])


def test_a_full_block_does_not_wait() -> None:
    packer = Packer(2, pa.uint16())
    assert [len(item) for item in packer.add(batch_of([[1]]))] == []
    created = list(packer.add(batch_of([[2]])))
    assert [row for each in created for row in each.column(IDS).to_pylist()] == [[1, 2]]
    assert created[0].column(IDS).type == pa.list_(pa.uint16())
    assert packer.tail() is None


def test_what_is_kept_is_a_copy() -> None:
    """The packer copies the tokens that it keeps, because their memory may be unmapped."""
    values = np.array([1, 2], np.int32)
    batch = pa.RecordBatch.from_pydict({IDS: pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), pa.array(values))})
    packer = Packer(5, pa.int32())
    list(packer.add(batch))
    assert not np.shares_memory(packer._tokens[0], tokens_of(batch))


def test_tokens_and_ends_of_a_slice() -> None:
    """A slice only gives the tokens and ends of its documents."""
    batch = batch_of([[1, 2], [], [3], [4, 5, 6]]).slice(1, 3)
    assert tokens_of(batch).tolist() == [3, 4, 5, 6]
    assert ends_of(batch).tolist() == [0, 1, 4]


@pytest.mark.parametrize(
    ("documents", "tokens", "rows", "sizes"),
    [
        ([[1, 2], [3, 4], [5]], 4, 99, [2, 1]),  # exactly full
        ([[1, 2], [3, 4], [5]], 3, 99, [1, 2]),
        ([[1] * 9, [2], [3]], 4, 99, [1, 2]),  # a larger one is alone
        ([[2], [1] * 9, [3]], 4, 99, [1, 1, 1]),
        ([[]] * 5, 4, 2, [2, 2, 1]),
        ([], 4, 2, []),
    ],
)
def test_pieces_are_small(
    monkeypatch: pytest.MonkeyPatch, documents: list[list[int]], tokens: int, rows: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(module, "_TOKENS", tokens)
    monkeypatch.setattr(module, "_ROWS", rows)
    segments = list(small_batches(batch_of(documents)))
    assert [len(segment) for segment in segments] == sizes
    assert [row for chunk in segments for row in chunk.column(IDS).to_pylist()] == documents


def test_the_bounds_of_pieces() -> None:
    assert (module._ROWS, module._TOKENS, module._MOST_BUCKETS) == (4096, 1 << 20, 128)
    assert (module._LEAST_BUCKET, module._MOST_BUCKET) == (4_000_000, 512_000_000)


def write_unit(path: Path, *batches: pa.RecordBatch) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return path


def test_units_come_in_order_with_one_schema(tmp_path: Path) -> None:
    """Units of other types are cast to the schema."""
    first = write_unit(tmp_path / "1", batch_of([[1], [2]]), batch_of([[3]]))
    two = write_unit(tmp_path / "2", batch_of([[4]], pa.int64()))
    schema = pa.schema([(IDS, pa.list_(pa.int32()))])
    actual = list(unit_batches([first, two], schema))
    assert [row for batch in actual for row in batch.column(IDS).to_pylist()] == [[1], [2], [3], [4]]
    assert all(batch.schema.equals(schema) for batch in actual)


# Fixed since the first datasets were shuffled and split: another number gives another dataset.
HASHED = [14030824919205454789, 14005454944200096763, 8143414469265454090]


def test_the_order_of_documents_is_what_it_was() -> None:
    """The order depends on seed and purpose; neighboring seeds are unrelated."""
    numbers = np.arange(3, dtype=np.uint64)
    assert hashed(numbers, 7, 2).tolist() == HASHED
    assert hashed(numbers, 7, 1).tolist() != HASHED
    assert hashed(numbers, 8, 2).tolist() != HASHED
    assert hashed(numbers[1:], 7, 2).tolist() == HASHED[1:]
    assert hashed(numbers, 2**62 + 7, 2).tolist() == HASHED
    assert len(set(hashed(np.arange(10_000, dtype=np.uint64), 1, 1).tolist())) == 10_000


def test_each_document_gets_its_split_and_its_place() -> None:
    """Split and key depend on the document's number among all, not on its batch; the column of notes is dropped."""
    splits = [TokenSplit("a", 0.5), TokenSplit("b", 0.25), TokenSplit("c", 0.25)]
    documents = [[n] for n in range(1000)]
    note = pa.array([0] * 1000, pa.uint8())
    whole = batch_of(documents, kept=range(1000), **{NOTE: note})
    (first,) = with_places(iter([whole]), splits, 7, True)
    assert first.schema.names == [IDS, "kept", SPLIT, KEY]
    assert first.column(KEY).to_pylist() == hashed(np.arange(1000, dtype=np.uint64), 7, 2).tolist()
    counts = np.bincount(first.column(SPLIT).to_numpy(), minlength=3)
    assert abs(counts / 1000 - [0.5, 0.25, 0.25]).max() < 0.05
    assert first.column(SPLIT).type == pa.uint8()
    fraction = hashed(np.arange(1000, dtype=np.uint64), 7, 1) / 2.0**64
    assert first.column(SPLIT).to_pylist() == np.searchsorted([0.5, 0.75], fraction, side="right").tolist()
    parts = list(with_places(iter([whole.slice(0, 300), whole.slice(300)]), splits, 7, False))
    assert [part.schema.names for part in parts] == [[IDS, "kept", SPLIT]] * 2
    assert [n for part in parts for n in part.column(SPLIT).to_pylist()] == first.column(SPLIT).to_pylist()
    (single,) = with_places(iter([whole]), [TokenSplit("a", 1.0)], 7, False)
    assert set(single.column(SPLIT).to_pylist()) == {0}
    (remainder,) = with_places(iter([whole]), [TokenSplit("a", 0.25), TokenSplit("b", 0.25)], 7, False)
    assert set(remainder.column(SPLIT).to_pylist()) == {0, 1}, "the last one takes the rest"


def keyed(count: int) -> list[pa.RecordBatch]:
    keys = hashed(np.arange(count, dtype=np.uint64), 1, 2)
    batch = batch_of([[n, n] for n in range(count)], **{KEY: pa.array(keys)})
    return [batch.slice(index, 50) for index in range(0, count, 50)]


@pytest.mark.parametrize("bucket", [10**9, 4000, 300])
def test_documents_are_sorted_by_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: int) -> None:
    """Documents are sorted with one bucket, several, and nested buckets; the folder is empty afterwards."""
    monkeypatch.setattr(module, "_LEAST_BUCKET", bucket)
    monkeypatch.setattr(module, "_MOST_BUCKETS", 8)
    actual = list(in_key_order(iter(keyed(700)), 700 * 24, tmp_path / "buckets", 0))
    keys = [key for batch in actual for key in batch.column(KEY).to_pylist()]
    assert keys == sorted(hashed(np.arange(700, dtype=np.uint64), 1, 2).tolist())
    documents = [row for batch in actual for row in batch.column(IDS).to_pylist()]
    assert sorted(documents) == [[n, n] for n in range(700)]
    assert not list(tmp_path.iterdir())


def test_equal_keys_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal keys keep their order, without endless nesting of buckets."""
    monkeypatch.setattr(module, "_LEAST_BUCKET", 10)
    keys = pa.array([5] * 20 + [2**64 - 1] * 20 + [0] * 20, pa.uint64())
    batch = batch_of([[n] for n in range(60)], **{KEY: keys})
    (tmp_path / "buckets").mkdir()  # left by a killed run
    actual = list(in_key_order(iter([batch]), 60 * 20, tmp_path / "buckets", 0))
    order = [row[0] for each in actual for row in each.column(IDS).to_pylist()]
    assert order == [*range(40, 60), *range(20), *range(20, 40)]


def test_a_bucket_has_the_keys_from_its_edge_to_the_next(tmp_path: Path) -> None:
    """A bucket contains its lower edge and not the upper one; of several batches, in order."""
    keys = [29, 0, 10, 9, 20, 19]
    batches = [batch_of([[n]], **{KEY: pa.array([key], pa.uint64())}) for n, key in enumerate(keys)]
    buckets = module._scatter(iter(batches), tmp_path, [0, 10, 20, 30])
    assert [rows for _, rows in buckets] == [2, 2, 2]
    actual = [[key for batch in module._read(path) for key in batch.column(KEY).to_pylist()] for path, _ in buckets]
    assert actual == [[0, 9], [10, 19], [29, 20]]


def test_the_folder_of_buckets_is_made(tmp_path: Path) -> None:
    """Missing parent folders are created too."""
    actual = list(in_key_order(iter(keyed(60)), 60 * 24, tmp_path / "above" / "buckets", 0))
    assert sum(map(len, actual)) == 60
    assert not list((tmp_path / "above").iterdir())


@pytest.mark.parametrize(
    ("limit", "total", "count"),
    [
        (0, 0, 1),
        (0, 3_200_000, 1),
        (0, 3_200_001, 2),
        (120_000_000, 8_000_000, 1),
        (120_000_000, 8_000_001, 2),
        (10**12, 409_600_000, 1),
        (10**12, 409_600_001, 2),
        (0, 10**12, 128),
    ],
)
def test_how_many_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, total: int, count: int) -> None:
    """A bucket takes a twelfth of the limit, within bounds; a quarter more buckets allow for uneven ones."""
    observed: list[int] = []
    plain = module._scatter

    def scatter(batches: Any, folder: Path, edges: list[int]) -> Any:
        observed.append(len(edges) - 1)
        assert (edges[0], edges[-1]) == (0, 1 << 64)
        return plain(batches, folder, edges)

    monkeypatch.setattr(module, "_scatter", scatter)
    assert list(in_key_order(iter([]), total, tmp_path / "b", limit)) == []
    assert observed == [count]


def test_sorted_rows_come_a_thousand_at_a_time(tmp_path: Path) -> None:
    actual = list(in_key_order(iter(keyed(2100)), 2100 * 24, tmp_path / "b", 10**9))
    assert [len(batch) for batch in actual] == [1024, 1024, 52]

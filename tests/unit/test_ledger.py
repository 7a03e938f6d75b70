from dataclasses import replace
from pathlib import Path

import pytest

from brim.errors import DestinationError
from brim.state.ledger import LEDGER, JobRecord, Ledger, PackedReceipts, Receipt, finished_ledger

JOB = JobRecord("f" * 64, {"rows": 3}, {"brim": "0"})
ONE = Receipt("data/a", "train", 1, 10, "aa", "key-a", "m", "job")
TWO = replace(ONE, name="data/b", sha256="bb", key="key-b")


def written(folder: Path) -> Ledger:
    ledger = Ledger(folder)
    ledger.begin(JOB)
    ledger.add(ONE)
    ledger.add(TWO)
    ledger.close()
    return ledger


def test_receipts_are_read_back(tmp_path: Path) -> None:
    """What was added is there in the next run."""
    written(tmp_path)
    again = Ledger(tmp_path)
    assert again.job == JOB
    assert again.receipts == {"data/a": ONE, "data/b": TWO}
    assert not again.done


def test_every_cut_leaves_a_readable_ledger(tmp_path: Path) -> None:
    """A ledger cut at any byte loses the torn line and no other, and can be written on."""
    written(tmp_path)
    data = (tmp_path / LEDGER).read_bytes()
    for cut in range(len(data)):
        (tmp_path / LEDGER).write_bytes(data[:cut])
        ledger = Ledger(tmp_path)
        whole_lines = data[:cut].count(b"\n")
        # The last line counts without its newline too: its checksum says that it is whole.
        known = len(ledger.receipts) + (ledger.job is not None)
        assert known in (whole_lines, whole_lines + 1)
        ledger.add(replace(ONE, name="data/new", key="key-new"))
        ledger.close()
        assert "data/new" in Ledger(tmp_path).receipts
        assert len(Ledger(tmp_path).receipts) == len(ledger.receipts)


@pytest.mark.parametrize("at", [5, 40, 200, -30])
def test_a_damaged_line_counts_as_not_written(tmp_path: Path, at: int) -> None:
    """A flipped byte loses its own line only."""
    written(tmp_path)
    data = bytearray((tmp_path / LEDGER).read_bytes())
    data[at] ^= 1
    (tmp_path / LEDGER).write_bytes(bytes(data))
    ledger = Ledger(tmp_path)
    assert len(ledger.receipts) + (ledger.job is not None) == 2


@pytest.mark.parametrize(
    "harm", [{"name": "../a"}, {"name": "/tmp/a"}, {"name": "data/../../a"}, {"sha256": "../../a"}]
)
def test_a_line_that_reaches_outside_counts_as_not_written(tmp_path: Path, harm: dict[str, str]) -> None:
    """A folder may come from a stranger, and what is no longer needed is removed by the names in its ledger."""
    (tmp_path / LEDGER).write_bytes(finished_ledger(JOB, [replace(ONE, **harm), TWO]))
    assert Ledger(tmp_path).names == {"data/b"}


def test_finishing_forgets_the_way_there(tmp_path: Path) -> None:
    """A finished ledger depends on what was built, not on the order or what was done twice."""
    ledger = written(tmp_path)
    ledger.add(TWO)
    ledger.forget("data/a")
    ledger.add(ONE)
    ledger.finish([ONE, TWO])
    first = (tmp_path / LEDGER).read_bytes()
    (tmp_path / LEDGER).unlink()
    straight = written(tmp_path)
    straight.finish([ONE, TWO])
    assert (tmp_path / LEDGER).read_bytes() == first
    assert Ledger(tmp_path).done


def test_a_ledger_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """One that is a folder, or belongs to somebody else, is an error that names it."""
    (tmp_path / LEDGER).mkdir()
    with pytest.raises(DestinationError, match="cannot be read: Is a directory"):
        Ledger(tmp_path)


HASHES = replace(ONE, name="data/c", sha256="0a" * 32, key="b1" * 32, mtimes="c2" * 8, staged_at=7)


@pytest.mark.parametrize(
    "receipt",
    [
        HASHES,
        ONE,
        replace(HASHES, mtimes=""),
        replace(HASHES, sha256="0A" * 32),
        replace(HASHES, key="b1 " * 32),
        replace(HASHES, rows=2**80),
    ],
)
def test_receipts_are_packed_without_loss(receipt: Receipt) -> None:
    """Whatever a receipt holds, the same comes out."""
    receipts = PackedReceipts()
    receipts[receipt.name] = receipt
    receipts["data/b"] = TWO
    assert receipts == {receipt.name: receipt, "data/b": TWO}
    assert receipts.jobs() == {"job"}
    receipts[receipt.name] = replace(receipt, job="other", split="test")
    assert list(receipts.values()) == [replace(receipt, job="other", split="test"), TWO]
    assert receipts.jobs() == {"job", "other"}
    del receipts[receipt.name]
    assert receipts.jobs() == {"job"}


def test_what_was_here_once_is_known(tmp_path: Path) -> None:
    """A shard whose receipt was taken back or overtaken can be found by its key; a name is never forgotten."""
    ledger = written(tmp_path)
    ledger.forget("data/a")
    ledger.add(replace(TWO, key="key-new", job="next"))
    ledger.close()
    for known in (ledger, Ledger(tmp_path)):
        assert known.known() == {"key-a": ONE, "key-b": TWO, "key-new": replace(TWO, key="key-new", job="next")}
        assert known.names == {"data/a", "data/b"}
        assert not known.all_of("next")
    ledger.add(replace(ONE, name="data/z", job="next"))
    assert ledger.known()["key-a"].name == "data/z"

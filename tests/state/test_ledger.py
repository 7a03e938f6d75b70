import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from brim.errors import DestinationError
from brim.state.ledger import LEDGER, JobRecord, Ledger, PackedReceipts, Receipt, finished_ledger
from brim.state.record_log import record_line

JOB = JobRecord("f" * 64, {"rows": 3}, {"brim": "0"})
SINGLE = Receipt("data/a", "train", 1, 10, "aa", "key-a", "m", "job")
TWO = replace(SINGLE, name="data/b", sha256="bb", key="key-b")


def written(folder: Path) -> Ledger:
    ledger = Ledger(folder)
    ledger.start_job(JOB)
    ledger.add(SINGLE)
    ledger.add(TWO)
    ledger.close()
    return ledger


def test_receipts_are_read_back(tmp_path: Path) -> None:
    """The next run reads all receipts that were added."""
    written(tmp_path)
    reopened = Ledger(tmp_path)
    assert reopened.job == JOB
    assert reopened.receipts == {"data/a": SINGLE, "data/b": TWO}
    assert not reopened.is_finished


def test_every_cut_leaves_a_readable_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that is cut at any byte loses only the torn line, and new receipts can be appended to it."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # saves a thousand waits for the disk
    written(tmp_path)
    data = (tmp_path / LEDGER).read_bytes()
    for cut in range(len(data)):
        (tmp_path / LEDGER).write_bytes(data[:cut])
        ledger = Ledger(tmp_path)
        whole_lines = data[:cut].count(b"\n")
        # The last line counts even without its newline, because its checksum shows that it is complete.
        known_values = len(ledger.receipts) + (ledger.job is not None)
        assert known_values in (whole_lines, whole_lines + 1)
        ledger.add(replace(SINGLE, name="data/new", key="key-new"))
        ledger.close()
        assert "data/new" in Ledger(tmp_path).receipts
        assert len(Ledger(tmp_path).receipts) == len(ledger.receipts)


@pytest.mark.parametrize("position", [5, 40, 200, -30])
def test_a_damaged_line_counts_as_not_written(tmp_path: Path, position: int) -> None:
    """A flipped byte invalidates only its own line."""
    written(tmp_path)
    data = bytearray((tmp_path / LEDGER).read_bytes())
    data[position] ^= 1
    (tmp_path / LEDGER).write_bytes(bytes(data))
    ledger = Ledger(tmp_path)
    assert len(ledger.receipts) + (ledger.job is not None) == 2


@pytest.mark.parametrize(
    "harm", [{"name": "../a"}, {"name": "/tmp/a"}, {"name": "data/../../a"}, {"sha256": "../../a"}]
)
def test_a_line_that_reaches_outside_counts_as_not_written(tmp_path: Path, harm: dict[str, str]) -> None:
    """Receipts with names outside the folder are ignored.

    A ledger may come from an untrusted folder, and obsolete files are deleted by the names in it.
    """
    (tmp_path / LEDGER).write_bytes(finished_ledger(JOB, [replace(SINGLE, **harm), TWO]))
    assert Ledger(tmp_path).names == {"data/b"}


def test_finishing_forgets_the_way_there(tmp_path: Path) -> None:
    """A finished ledger contains only the final receipts, independent of their order, repetitions and removals."""
    ledger = written(tmp_path)
    ledger.add(TWO)
    ledger.forget("data/a")
    ledger.add(SINGLE)
    ledger.finish([SINGLE, TWO])
    first = (tmp_path / LEDGER).read_bytes()
    (tmp_path / LEDGER).unlink()
    straight = written(tmp_path)
    straight.finish([SINGLE, TWO])
    assert (tmp_path / LEDGER).read_bytes() == first
    assert Ledger(tmp_path).is_finished


def test_a_ledger_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """A ledger that cannot be read (here because it is a folder) raises an error with its path."""
    (tmp_path / LEDGER).mkdir()
    with pytest.raises(DestinationError, match="cannot be read: Is a directory"):
        Ledger(tmp_path)


HASHES = replace(SINGLE, name="data/c", sha256="0a" * 32, key="b1" * 32, mtimes="c2" * 8, staged_at=7)


@pytest.mark.parametrize(
    "receipt",
    [
        HASHES,
        SINGLE,
        replace(HASHES, mtimes=""),
        replace(HASHES, sha256="0A" * 32),
        replace(HASHES, key="b1 " * 32),
        replace(HASHES, rows=2**80),
    ],
)
def test_receipts_are_packed_without_loss(receipt: Receipt) -> None:
    """Packed receipts return exactly the receipts that were stored."""
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
    """Removed and replaced receipts can still be found by key, and the ledger keeps every name."""
    ledger = written(tmp_path)
    ledger.forget("data/a")
    ledger.add(replace(TWO, key="key-new", job="next"))
    ledger.close()
    for known_values in (ledger, Ledger(tmp_path)):
        assert known_values.receipts_by_key() == {
            "key-a": SINGLE,
            "key-b": TWO,
            "key-new": replace(TWO, key="key-new", job="next"),
        }
        assert known_values.names == {"data/a", "data/b"}
        assert not known_values.has_only("next")
    ledger.add(replace(SINGLE, name="data/z", job="next"))
    assert ledger.receipts_by_key()["key-a"].name == "data/z"


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of all files and folders in the order in which they were synced to disk."""
    actual: list[str] = []
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        actual.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return actual


def test_a_receipt_is_on_disk_when_it_is_written(tmp_path: Path, synced: list[str]) -> None:
    """Each call syncs the ledger to disk once, including a call that adds many receipts."""
    ledger = Ledger(tmp_path)
    for number, call in enumerate(
        [
            lambda: ledger.start_job(JOB),
            lambda: ledger.add(SINGLE),
            lambda: ledger.remember("a", 1),
            lambda: ledger.forget("data/a"),
            lambda: ledger.add_all([SINGLE, TWO]),
        ],
        1,
    ):
        call()
        assert synced == [LEDGER] * number
    ledger.remember("a", 1)
    assert len(synced) == 5, "what is known already is not written again"
    ledger.add_all([])
    assert len(synced) == 5
    ledger.close()


def test_many_receipts_are_written_in_parts(tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from brim.state import ledger as module

    assert module._BATCH == 10_000
    monkeypatch.setattr(module, "_BATCH", 2)
    ledger = Ledger(tmp_path)
    items = [replace(SINGLE, name=f"data/{n}", key=f"key-{n}") for n in range(5)]
    ledger.add_all(iter(items))
    assert synced == [LEDGER] * 3
    ledger.close()
    assert list(Ledger(tmp_path).receipts.values()) == items


def test_a_finished_ledger_is_on_disk_with_its_name(tmp_path: Path, synced: list[str]) -> None:
    ledger = written(tmp_path)
    del synced[:]
    ledger.finish([SINGLE, TWO])
    assert len(synced) == 2
    assert synced[1] == tmp_path.name
    assert ledger.is_finished
    assert (tmp_path / LEDGER).read_bytes() == finished_ledger(JOB, [SINGLE, TWO])


def test_nothing_is_finished_that_has_not_begun(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no job has begun"):
        Ledger(tmp_path).finish([])


def test_notes_are_of_a_job(tmp_path: Path) -> None:
    """The next run of the same job reads remembered values. A new job starts without them."""
    ledger = Ledger(tmp_path)
    ledger.start_job(JOB)
    ledger.remember("a", {"b": [1]})
    ledger.remember("a", 2)
    ledger.remember("c", None)
    assert (ledger.recall("a"), ledger.recall("c"), ledger.recall("other")) == (2, None, None)
    ledger.close()
    reopened = Ledger(tmp_path)
    assert reopened.recall("a") == 2
    reopened.start_job(replace(JOB, left_out=("x", "y")))
    assert reopened.recall("a") is None
    assert Ledger(tmp_path).job == replace(JOB, left_out=("x", "y"))
    reopened.close()


def test_a_new_job_is_not_done(tmp_path: Path) -> None:
    ledger = written(tmp_path)
    ledger.finish([SINGLE])
    ledger.start_job(replace(JOB, fingerprint="e" * 64))
    assert not ledger.is_finished
    assert not Ledger(tmp_path).is_finished
    assert ledger.receipts.keys() == {"data/a", "data/b"}
    ledger.close()


def test_a_published_ledger_counts_unless_a_job_is_under_way(tmp_path: Path) -> None:
    """A published ledger replaces the local one unless a job is in progress. Its names are always remembered."""
    second = replace(JOB, fingerprint="d" * 64)
    three = replace(SINGLE, name="data/c", key="key-c")
    published = finished_ledger(second, [three])
    for started_at, takes in (("nothing", True), ("under way", False), ("done", True), ("same", False)):
        folder = tmp_path / started_at
        folder.mkdir()
        ledger = Ledger(folder)
        if started_at != "nothing":
            ledger.start_job(second if started_at == "same" else JOB)
            ledger.add(SINGLE)
        if started_at in ("done", "same"):
            ledger.finish([SINGLE])
        ledger.agree_with(published)
        ledger.close()
        assert ("data/c" in ledger.receipts) == takes, started_at
        assert "data/c" in ledger.names
        assert ((folder / LEDGER).read_bytes() == published if (folder / LEDGER).exists() else not takes) == takes
        assert list(Ledger(folder).receipts) == list(ledger.receipts)


def test_a_published_ledger_that_is_empty(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.agree_with(b"")
    assert (ledger.job, ledger.names, (tmp_path / LEDGER).exists()) == (None, set(), False)


def test_lines_of_another_version_are_passed_over(tmp_path: Path) -> None:
    """Lines of an unknown type, with missing fields or from another version are ignored."""
    from brim.state.record_log import record_line

    lines = [
        {"type": "shard", "name": "data/x"},
        {"type": "job", "fingerprint": "a"},
        {"type": "new kind"},
        {"name": "no type"},
        {"type": "gone", "name": "data/never"},
        {"type": "note", "name": "n", "value": 1},
    ]
    (tmp_path / LEDGER).write_bytes(b"".join(map(record_line, lines)))
    ledger = Ledger(tmp_path)
    assert (len(ledger.receipts), ledger.job, ledger.names, ledger.recall("n")) == (0, None, set(), 1)


def test_what_receipts_add_up_to() -> None:
    """Receipts are summed by split, and lazy sequences create their items only on access."""
    from brim.state.ledger import LazySequence, SplitTotal, split_totals

    test = replace(SINGLE, split="test", size=5)
    assert split_totals([SINGLE, TWO, test]) == {"train": SplitTotal(2, 20), "test": SplitTotal(1, 5)}
    created: list[str] = []

    def make(name: str) -> str:
        created.append(name)
        return name.upper()

    lazy = LazySequence(["a", "b", "c"], make)
    assert (len(lazy), created) == (3, [])
    assert lazy[1] == "B"
    assert created == ["b"]
    part = lazy[1:]
    assert isinstance(part, LazySequence)
    assert list(part) == ["B", "C"]
    assert list(lazy) == ["A", "B", "C"]


def test_pieces_and_lines_of_receipts(tmp_path: Path) -> None:
    """Empty fields are not written, the ETag is part of the stored file, and a finished receipt has no staging time."""
    tagged = replace(HASHES, etag="tag", staged_at=0)
    assert (tagged.stored_file.name, tagged.stored_file.size, tagged.stored_file.etag) == ("data/c", 10, "tag")
    assert tagged.stored_file.sha256 == tagged.sha256
    receipts = PackedReceipts()
    receipts["x"] = tagged
    assert receipts["x"] == replace(tagged, name="x")
    assert "x" in receipts
    assert list(receipts) == ["x"]
    data = finished_ledger(JOB, [HASHES, tagged])
    assert b"staged_at" not in data
    assert data.count(b"etag") == 1
    assert Ledger.from_bytes(data).receipts["data/c"] == tagged
    assert Ledger.from_bytes(data).is_finished


def test_a_ledger_in_what_is_no_folder_is_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert Ledger(tmp_path / "file").job is None
    assert Ledger(tmp_path / "nothing").job is None


def test_an_unreadable_ledger_says_where_another_may_be(tmp_path: Path) -> None:
    (tmp_path / LEDGER).mkdir()
    with pytest.raises(DestinationError) as caught:
        Ledger(tmp_path)
    assert str(tmp_path / LEDGER) in caught.value.message
    assert "Choose another folder for it" in caught.value.hint


def test_all_of_one_job(tmp_path: Path) -> None:
    """`has_only` checks the jobs of all shards ever recorded, including shards whose receipts were removed."""
    ledger = Ledger(tmp_path)
    assert ledger.has_only("job")
    ledger.add(SINGLE)
    assert ledger.has_only("job")
    assert not ledger.has_only("other")
    ledger.forget("data/a")
    assert not ledger.has_only("other")
    ledger.add_names(["data/k"])
    assert ledger.names == {"data/a", "data/k"}
    ledger.close()


def test_what_is_gone_is_known_as_former(tmp_path: Path) -> None:
    """A removed receipt is kept as an old receipt, also in the next run, so that its bytes can be reused."""
    ledger = written(tmp_path)
    ledger.forget("data/a")
    ledger.close()
    for each in (ledger, Ledger(tmp_path)):
        assert each.receipts == {"data/b": TWO}
        assert each.old_receipts == {"key-a": SINGLE}


def with_boot(ledger: Path, *receipts: Receipt, finished: bool = False) -> None:
    """Append receipts of version 0.1, which were valid only until the next boot of the machine."""
    records = [{"type": "shard", **asdict(receipt), "boot": "this"} for receipt in receipts]
    records += [{"type": "done for now", "boot": "this"}] if finished else []
    with ledger.open("ab") as file:
        file.write(b"".join(map(record_line, records)))


def test_receipts_with_a_boot_count_once_they_are_written_again(tmp_path: Path) -> None:
    """A receipt with a boot id is valid only after it has been written again without one.

    The files of these receipts were not synced to disk, so a run must check each file first.
    """
    ledger = Ledger(tmp_path)
    ledger.start_job(JOB)
    ledger.close()
    with_boot(tmp_path / LEDGER, SINGLE, TWO, finished=True)
    reopened = Ledger(tmp_path)
    assert (reopened.is_finished, reopened.finished_unsynced, dict(reopened.receipts)) == (False, True, {})
    assert reopened.unsynced == {SINGLE.name: SINGLE, TWO.name: TWO}
    reopened.forget(TWO.name)
    reopened.add_all([SINGLE])
    assert not reopened.unsynced
    remaining = Ledger(tmp_path)
    assert (dict(remaining.receipts), remaining.unsynced) == ({SINGLE.name: SINGLE}, {})
    remaining.finish([SINGLE])
    assert b"boot" not in (tmp_path / LEDGER).read_bytes()
    assert Ledger(tmp_path).is_finished


def test_a_receipt_with_a_boot_replaces_an_earlier_one(tmp_path: Path) -> None:
    """A receipt with a boot id invalidates the earlier receipt of the same file, because the file has changed."""
    written(tmp_path)
    with_boot(tmp_path / LEDGER, replace(SINGLE, key="another"))
    reopened = Ledger(tmp_path)
    assert set(reopened.receipts) == {TWO.name}
    assert reopened.unsynced[SINGLE.name].key == "another"
    assert not reopened.finished_unsynced


def test_a_damaged_line_is_told_of_what_is_finished_for_good(tmp_path: Path) -> None:
    """Damaged lines are counted in finished ledgers only. In an unfinished ledger, a crash can leave a torn line."""
    ledger = written(tmp_path)
    data = (tmp_path / LEDGER).read_bytes()
    torn = data.replace(b"key-a", b"key-x")
    (tmp_path / LEDGER).write_bytes(torn)
    assert Ledger(tmp_path).broken == 0
    (tmp_path / LEDGER).write_bytes(data)
    ledger.finish([SINGLE, TWO])
    (tmp_path / LEDGER).write_bytes((tmp_path / LEDGER).read_bytes().replace(b"key-a", b"key-x"))
    assert (Ledger(tmp_path).is_finished, Ledger(tmp_path).broken) == (True, 2)


def test_where_there_is_no_ledger(tmp_path: Path) -> None:
    """A missing ledger reads as empty. A new one is created under the name that all versions use."""
    ledger = Ledger(tmp_path / "none")
    assert (ledger.job, ledger.is_finished, dict(ledger.receipts)) == (None, False, {})
    written(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.jsonl"]


def test_a_shard_that_is_back_is_no_former_one(tmp_path: Path) -> None:
    """A shard that is added again, under any name, is no longer listed as an old receipt: its key identifies it."""
    ledger = written(tmp_path)
    ledger.forget(SINGLE.name)
    assert set(ledger.old_receipts) == {SINGLE.key}
    ledger.add(replace(SINGLE, name="data/c"))
    assert not ledger.old_receipts


def test_a_job_whose_receipt_is_gone_is_not_done(tmp_path: Path) -> None:
    """Removing a receipt makes a finished job unfinished, so that a kill before the next write is noticed."""
    ledger = written(tmp_path)
    ledger.finish([SINGLE, TWO])
    Ledger(tmp_path).forget(SINGLE.name)
    assert not Ledger(tmp_path).is_finished

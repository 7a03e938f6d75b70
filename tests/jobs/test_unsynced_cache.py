"""Caches of version 0.1, which wrote receipts before the files were synced to disk: checked once, then reused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import brim
from brim.state.ledger import LEDGER, Ledger
from brim.state.record_log import record_line, records_of

pytest.importorskip("datasets")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "marks").mkdir()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(400)))
    return tmp_path


def mark(batch: dict[str, list[int]]) -> dict[str, list[int]]:
    """Write one file per call, so that a test can count the computed batches."""
    Path(f"marks/{batch['n'][0]}").touch()
    return {"twice": [2 * n for n in batch["n"]]}


def computed(work: Path) -> int:
    """Map the rows and return how many batches were computed."""
    for path in (work / "marks").iterdir():
        path.unlink()
    result = brim.map(
        "rows.jsonl", mark, batched=True, batch_size=100, unit_size="1KB", cache_dir="cache", memory="1GB"
    )
    assert result["twice"] == [2 * n for n in range(400)]
    return len(list((work / "marks").iterdir()))


def as_version_0_1_left_it(work: Path, boot: str, *, result: bool = True) -> Path:
    """Rewrite the ledger of the cache with receipts of version 0.1, which were valid only until the next boot."""
    (path,) = (work / "cache").glob(f"*/units/{LEDGER}")
    lines = []
    for record in records_of(path.read_bytes().splitlines(keepends=True)):
        if record["type"] == "shard":
            record["boot"] = boot
        if record["type"] == "done":
            record = {"type": "done for now", "boot": boot}
            if not result:
                continue
        lines.append(record_line(record))
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.parametrize("result", [True, False])
def test_complete_files_are_kept(work: Path, result: bool) -> None:
    assert computed(work) > 3
    (path,) = (work / "cache").glob(f"*/units/{LEDGER}")
    count = len(Ledger(path.parent).receipts)
    ledger = as_version_0_1_left_it(work, "another boot", result=result)
    assert not Ledger(ledger.parent).receipts
    assert computed(work) == 0
    remaining = Ledger(ledger.parent)
    assert remaining.is_finished
    assert len(remaining.receipts) == count
    assert not remaining.unsynced
    assert b"boot" not in ledger.read_bytes()


@pytest.mark.parametrize("damage", ["cut", "zeros", "gone"])
def test_damaged_files_are_computed_again(work: Path, damage: str) -> None:
    """Files that were damaged by a crash before they were synced are computed again."""
    computed(work)
    ledger = as_version_0_1_left_it(work, "another boot")
    unit = sorted(ledger.parent.glob("*.arrow"))[1]
    size = unit.stat().st_size
    if damage == "gone":
        unit.unlink()
    else:
        unit.write_bytes(unit.read_bytes()[:-100] if damage == "cut" else bytes(size))
    assert computed(work) == 1
    assert computed(work) == 0

"""Ledger lines with valid checksums and values of wrong types give a clear error, never an internal one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import brim
from brim.errors import BrimError
from brim.plans.fingerprint import digest_json
from brim.state.record_log import record_line, records_of
from tests.conftest import write_files


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[dict[str, Any]]]:
    """Build a dataset with appended rows; return it with the source of its first rows and its ledger records."""
    folder = tmp_path_factory.mktemp("crafted")
    first = write_files(folder / "first", {f"{n}.bin": bytes([n]) * 50 for n in range(4)})
    more_files = write_files(folder / "more", {"z.bin": b"zz"})
    brim.build(str(first), str(folder / "out"), num_shards=2, progress=False)
    brim.build(str(more_files), str(folder / "out"), append=True, progress=False)
    lines = (folder / "out" / ".brim" / "ledger.jsonl").read_bytes().splitlines()
    return folder / "out", first, list(records_of(lines))


def places(value: Any, position: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the key path of every value in a record."""
    if position:
        yield position
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*position, key))


def changed(record: dict[str, Any], position: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return a copy of a record with another value at a key path, and with the matching fingerprint."""
    new = json.loads(json.dumps(record))
    inside = new
    for key in position[:-1]:
        inside = inside[key]
    inside[position[-1]] = value
    if position[0] == "facts" and isinstance(new["facts"], dict):
        new["fingerprint"] = digest_json({k: v for k, v in new["facts"].items() if k not in ("cut", "recipe")})
    return new


@pytest.mark.long
@pytest.mark.parametrize("line", [0, 1], ids=["job", "receipt"])
def test_commands_refuse_a_ledger_with_values_of_other_types(
    line: int, built: tuple[Path, Path, list[dict[str, Any]]]
) -> None:
    out, source, records = built
    ledger = out / ".brim" / "ledger.jsonl"
    whole, refused = ledger.read_bytes(), 0
    try:
        for position in places(records[line]):
            for odd in (None, 5, "x", [1], {"a": 1}):
                lines = [*records[:line], changed(records[line], position, odd), *records[line + 1 :]]
                ledger.write_bytes(b"".join(map(record_line, lines)))
                assert brim.info(out).shards == 3
                assert isinstance(brim.check(out, progress=False).ok, bool)
                try:
                    brim.verify(out, source, progress=False)
                except BrimError:
                    refused += 1
    finally:
        ledger.write_bytes(whole)
    assert refused > 10


@pytest.mark.parametrize(
    ("line", "position", "odd"),
    [
        (0, ("facts",), 5),
        (0, ("facts", "recipe"), None),
        (0, ("facts", "cut"), "x"),
        (0, ("facts", "parts"), 5),
        (0, ("facts", "parts", 0, "shards"), [1]),
        (0, ("facts", "parts", 0, "facts"), None),
        (0, ("versions",), None),
        (0, ("left_out",), [1]),
        (1, ("rows",), None),
        (1, ("size",), "x"),
        (1, ("split",), None),
        (1, ("name",), 5),
    ],
)
def test_verify_info_and_append_say_what_is_wrong_with_a_crafted_ledger(
    line: int, position: tuple[Any, ...], odd: Any, built: tuple[Path, Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    records = built[2]
    out = Path(shutil.copytree(built[0], tmp_path / "out"))
    lines = [*records[:line], changed(records[line], position, odd), *records[line + 1 :]]
    (out / ".brim" / "ledger.jsonl").write_bytes(b"".join(map(record_line, lines)))
    more_files = write_files(tmp_path / "more", {"new.bin": b"new"})
    assert brim.info(out).shards == 3
    with pytest.raises(BrimError):
        brim.verify(out, progress=False)
    with pytest.raises(BrimError):
        brim.build(str(more_files), str(out), append=True, progress=False)

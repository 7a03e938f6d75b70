"""Commands that were killed in an earlier version resume to the result of an uninterrupted run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.goldens import cases, interrupted
from tests.goldens.interrupted import CASES, ENDPOINT, SOURCE_ROOT, Interrupted
from tests.s3 import S3Server
from tests.s3.server import PRIVATE

FACTS = json.loads(interrupted.FACTS.read_text())
pytestmark = pytest.mark.skipif(
    FACTS["made_with"] != cases.versions(), reason="needs the Python and pyarrow that the files were made with"
)


def restore(case: Interrupted, folder: Path, s3: S3Server, prefix: str) -> str:
    """Restore the output of the killed command; return the address of the bucket."""
    cases.inputs(folder)
    cases.unpack(case.archive, folder)
    if case.change is not None:
        case.change(folder)
    bucket = f"s3://{PRIVATE}/{prefix.rstrip('/')}"
    interrupted.replace_text(folder, {ENDPOINT: s3.endpoint, "$BUCKET": bucket, SOURCE_ROOT: str(folder)})
    if (folder / "bucket").exists():
        for path in sorted(path for path in (folder / "bucket").rglob("*") if path.is_file()):
            s3.write(PRIVATE, prefix + path.relative_to(folder / "bucket").as_posix(), path.read_bytes())
            path.unlink()
    return bucket


def shard_stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Return inode and modification time of each shard by name, including kept content that will be renamed."""
    patterns = ("out/data/[!.]*", "chosen/data/[!.]*", "out/.brim/keep/*")
    paths = [path for pattern in patterns for path in folder.glob(pattern)]
    return {str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(paths)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_resumed_by_the_present_version(case: Interrupted, tmp_path: Path, s3: S3Server, s3_prefix: str) -> None:
    bucket = restore(case, tmp_path.resolve(), s3, s3_prefix)
    before = shard_stamps(tmp_path)
    for command in (case.again or case.killed, *case.rest):
        assert interrupted.run(command, tmp_path, bucket, s3.environment) == 0
    actual = interrupted.results(tmp_path, s3, s3_prefix)
    assert without_dates(actual, case) == without_dates(FACTS["cases"][case.name], case)
    # A shard that already has its final name is not written again: it keeps its inode and modification time.
    after = shard_stamps(tmp_path)
    if case.name not in ("update", "fresh"):
        assert {name: after[name] for name in before} == before
    if case.name == "update":  # shards with the same content and another name are renamed
        assert len(set(before.values()) & set(after.values())) >= 10


def without_dates(results: dict[str, Any], case: Interrupted) -> dict[str, Any]:
    """Remove the dates of a source that the test itself builds."""
    if case.name == "select":
        for record in results["chosen"]["ledgers"][".brim/ledger.jsonl"]:
            record.pop("mtimes", None)
    return results

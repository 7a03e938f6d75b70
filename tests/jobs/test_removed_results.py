"""After a finished result was deleted, its ledger does not prevent another job from writing there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import brim

EMBED = ("embed", "rows.jsonl", "v.npy", "--model", "embed_models:hashing", "--column", "text")
MAP = ("map", "rows.jsonl", "out", "--fn", "step.py:step", "--workers", "1")


@pytest.mark.parametrize(
    ("command", "second"),
    [(EMBED, ("--dtype", "float32")), (MAP, ("--rows-per-shard", "7"))],
    ids=["file", "folder"],
)
def test_a_removed_result_is_not_another_dataset(
    command: tuple[str, ...], second: tuple[str, ...], tmp_path: Path
) -> None:
    rows = [{"text": f"row {n}", "n": n} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "step.py").write_text("def step(row):\n    return {'k': row['n'] + 1}\n")
    shutil.copy(Path(__file__).parents[1] / "embed_models.py", tmp_path)
    brim(*command, cwd=tmp_path)
    assert "another dataset" in brim(*command, *second, cwd=tmp_path, check=2).stderr
    for path in [*tmp_path.glob("v.npy"), *tmp_path.glob("out/data/*"), *tmp_path.glob("out/README.md")]:
        path.unlink()
    brim(*command, *second, cwd=tmp_path)
    assert (tmp_path / command[2]).exists()
    assert "nothing to do" in brim(*command, *second, cwd=tmp_path).stdout


def test_a_removed_build_is_not_another_dataset(many_files: Callable[..., Path], tmp_path: Path) -> None:
    source, out = many_files(6), tmp_path / "out"
    brim("build", source, out)
    assert "another dataset" in brim("build", source, out, "--num-shards", "2", check=2).stderr
    shutil.rmtree(out / "data")
    brim("build", source, out, "--num-shards", "2")
    brim("verify", out, source)
    for path in (out / "data").iterdir():
        path.unlink()
    brim("build", source, out, "--num-shards", "3")
    brim("verify", out, source)

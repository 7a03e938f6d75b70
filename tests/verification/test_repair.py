"""The command that `brim verify` suggests repairs the damage and rewrites only the damaged files."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import tree_digest, write_files
from tests.destinations import BucketDestination, HubDestination, run
from tests.forked import brim
from tests.hub import TestHub
from tests.s3 import S3Server


def flip(path: Path, when: float = 0.5) -> None:
    """Flip one bit of a file and keep its size and date."""
    before, data = path.stat(), bytearray(path.read_bytes())
    data[int(when * (len(data) - 1))] ^= 1
    path.write_bytes(bytes(data))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def shards_of(folder: Path) -> list[Path]:
    return sorted((folder / "data").iterdir())


@pytest.mark.parametrize("options", [(), ("--update",)], ids=["same-command", "update"])
@pytest.mark.parametrize("form", ["parquet", "webdataset"])
def test_build_writes_exactly_the_shard_that_verify_found_damaged(
    form: str, options: tuple[str, ...], many_files: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = many_files(8), tmp_path / "out"
    build = ("build", source, out, "--num-shards", "4", "--format", form)
    brim(*build)
    whole = tree_digest(out)
    flip(shards_of(out)[2])
    remaining = {path.name: path.stat().st_ino for path in shards_of(out)}
    advice = brim("verify", out, check=3).stderr
    assert "Run the command that built it again: it writes the 1 damaged file" in advice
    assert "4 (1 written, 3 kept)" in brim(*build, *options).stdout
    written = [path.name for path in shards_of(out) if path.stat().st_ino != remaining[path.name]]
    assert written == [shards_of(out)[2].name]
    brim("verify", out, source)
    assert tree_digest(out) == whole
    assert "4 (0 written, 4 kept)" in brim(*build).stdout


def test_build_writes_the_shard_whose_source_changed_with_equal_size_and_date(
    many_files: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = many_files(8), tmp_path / "out"
    build = ("build", source, out, "--num-shards", "4")
    brim(*build)
    flip(source / "f003.bin")
    assert "f003.bin: differs" in brim("verify", out, source, check=3).stderr
    assert "4 (1 written, 3 kept)" in brim(*build).stdout
    brim("verify", out, source)


@pytest.mark.parametrize("shards", [1, 4])
def test_verify_with_a_damaged_shard_does_not_take_the_source_for_another(
    shards: int, many_files: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = many_files(8), tmp_path / "out"
    brim("build", source, out, "--num-shards", str(shards))
    flip(shards_of(out)[0])
    failed = brim("verify", out, source, check=3).stderr
    assert "another source" not in failed
    assert "1 problem found" in failed
    other_files = write_files(tmp_path / "other", {f"{n}.bin": b"x" * (n + 1) for n in range(8)})
    names = brim("verify", out, other_files, check=3).stderr
    assert ("This is another source" in names) == (shards > 1)  # a single damaged shard is ambiguous


@pytest.mark.parametrize("ledger", [True, False], ids=["ledger", "no-ledger"])
@pytest.mark.parametrize(
    "cut", [(), ("--num-shards", "4"), ("--shard-size", "50KB")], ids=["default", "number", "size"]
)
@pytest.mark.parametrize("form", ["parquet", "webdataset"])
def test_verify_repair_runs_as_advised_and_restores_every_byte(
    form: str, cut: tuple[str, ...], ledger: bool, many_files: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = many_files(8), tmp_path / "out"
    brim("build", source, out, "--format", form, *cut)
    if not ledger:
        shutil.rmtree(out / ".brim")
    whole = {path.name: path.read_bytes() for path in shards_of(out)}
    flip(shards_of(out)[-1])
    failed = brim("verify", out, source, check=3).stderr
    (advised,) = re.findall(r"brim (verify .* --repair)", failed)
    assert "repaired" in brim(*shlex.split(advised)).stdout
    assert {path.name: path.read_bytes() for path in shards_of(out)} == whole
    brim("verify", out, source)


def test_verify_repair_writes_a_missing_or_cut_shard_without_a_ledger(
    many_files: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = many_files(8), tmp_path / "out"
    brim("build", source, out, "--num-shards", "4")
    shutil.rmtree(out / ".brim")
    whole = {path.name: path.read_bytes() for path in shards_of(out)}
    shards_of(out)[1].unlink()
    brim("verify", out, source, "--repair")
    os.truncate(shards_of(out)[3], 100)
    brim("verify", out, source, "--repair")
    assert {path.name: path.read_bytes() for path in shards_of(out)} == whole


def test_verify_repair_writes_nothing_from_another_source(many_files: Callable[..., Path], tmp_path: Path) -> None:
    source, out = many_files(8), tmp_path / "out"
    larger, same_sizes = many_files(8, 20_001, name="larger"), many_files(8, name="same_sizes")
    for path in same_sizes.iterdir():
        flip(path)
    brim("build", source, out, "--num-shards", "4")
    flip(shards_of(out)[2])
    before = {path.name: path.read_bytes() for path in shards_of(out)}
    brim("verify", out, larger, "--repair", check=3)
    brim("verify", out, same_sizes, "--repair", check=3)
    shutil.rmtree(out / ".brim")
    brim("verify", out, larger, "--repair", check=3)
    brim("verify", out, same_sizes, "--repair", check=2)
    assert {path.name: path.read_bytes() for path in shards_of(out)} == before
    assert "--repair needs the source" in brim("verify", out, "--repair", check=2).stderr


def test_verify_repair_writes_shards_of_appended_rows_from_their_own_source(
    many_files: Callable[..., Path], tmp_path: Path
) -> None:
    first, second, out = many_files(4), many_files(6, 10_000, name="second"), tmp_path / "out"
    for path in second.iterdir():
        path.rename(path.with_name(f"g{path.name}"))
    brim("build", first, out, "--num-shards", "2")
    brim("build", second, out, "--num-shards", "2", "--append")
    whole = {path.name: path.read_bytes() for path in shards_of(out)}
    flip(shards_of(out)[1])
    flip(shards_of(out)[2])
    assert "--repair" in brim("verify", out, check=3).stderr
    assert "has 2 damaged file" in brim("build", second, out, "--num-shards", "3", "--append", check=2).stderr
    assert "1 problem found" in brim("verify", out, first, "--repair", check=3).stderr
    brim("verify", out, second, "--repair")
    assert {path.name: path.read_bytes() for path in shards_of(out)} == whole


def test_map_writes_exactly_the_shard_that_verify_found_damaged(tmp_path: Path) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(100)))
    (tmp_path / "doubled.py").write_text("def double(row):\n    return {'n': row['n'] * 2}\n")
    command = ("map", source, out, "--fn", f"{tmp_path}/doubled.py:double", "--rows-per-shard", "25", "--workers", "1")
    brim(*command)
    whole = {path.name: path.read_bytes() for path in shards_of(out)}
    flip(shards_of(out)[1])
    assert "Run the command that built it again" in brim("verify", out, check=3).stderr
    remaining = {path.name: path.stat().st_ino for path in shards_of(out)}
    brim(*command)
    assert {path.name: path.read_bytes() for path in shards_of(out)} == whole
    assert sum(path.stat().st_ino != remaining[path.name] for path in shards_of(out)) == 1
    brim("verify", out)
    assert "nothing to do" in brim(*command).stdout


def test_damage_that_cannot_be_recorded_is_said(many_files: Callable[..., Path], tmp_path: Path) -> None:
    source, out = many_files(4), tmp_path / "out"
    brim("build", source, out)
    flip(shards_of(out)[0])
    (out / ".brim" / "lock").unlink()
    (out / ".brim" / "lock").mkdir()
    failed = brim("verify", out, check=3).stderr
    assert "could not be recorded" in failed


def test_a_dataset_on_the_hub_is_repaired_by_the_same_command(
    hub: TestHub, many_files: Callable[..., Path], tmp_path: Path
) -> None:
    """Another machine, without the ledger of the build, can repair the dataset too."""
    source = many_files(8)
    destination, second = HubDestination(hub, tmp_path / "one"), HubDestination(hub, tmp_path / "two")
    build = ("build", source, destination.address, "--num-shards", "4")
    run(destination, *build)
    for name, machine in (("f003.bin", destination), ("f005.bin", second)):
        flip(source / name)
        assert "other bytes" in run(machine, "verify", destination.address, source, check=3).stderr
        assert "4 (1 sent" in run(machine, *build).stdout
        run(machine, "verify", destination.address, source)


def test_a_dataset_in_a_bucket_is_repaired_by_the_same_command(
    s3: S3Server, s3_prefix: str, many_files: Callable[..., Path], tmp_path: Path
) -> None:
    source, destination = many_files(8), BucketDestination(s3, tmp_path, s3_prefix)
    build = ("build", source, destination.address, "--num-shards", "4")
    run(destination, *build)
    flip(source / "f003.bin")
    assert "other bytes" in run(destination, "verify", destination.address, source, check=3).stderr
    assert "4 (1 written" in run(destination, *build).stdout
    run(destination, "verify", destination.address, source, "--deep")

"""brim verify finds damage and names the damaged file."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from brim.formats.parquet_writer import splice_parquet
from tests.conftest import file_set, random_bytes, tree_digest, write_files
from tests.forked import brim

FORMATS = ["parquet", "webdataset"]


@pytest.fixture(params=FORMATS)
def built(request: pytest.FixtureRequest, many_files: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    source, out = many_files(8), tmp_path / "out"
    brim("build", source, out, "--num-shards", "4", "--format", request.param)
    return source, out


def shard(out: Path, number: int) -> Path:
    return sorted((out / "data").iterdir())[number]


def test_what_is_whole_is_whole(built: tuple[Path, Path]) -> None:
    """A new build passes verify, alone and compared with its source."""
    source, out = built
    brim("verify", out)
    assert "8 files are inside" in brim("verify", out, source).stdout


@pytest.mark.parametrize("where", ["start", "middle", "end"])
def test_one_flipped_byte(built: tuple[Path, Path], where: str) -> None:
    """A single changed byte anywhere in a shard is found, and the shard is named."""
    _, out = built
    path = shard(out, 2)
    position = {"start": 0, "middle": path.stat().st_size // 2, "end": path.stat().st_size - 1}[where]
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))
    failed = brim("verify", out, check=3).stderr
    assert f"data/{path.name}: its content changed" in failed
    assert "1 problem found" in failed


def test_missing_truncated_and_extra_shards(built: tuple[Path, Path]) -> None:
    """One run of verify reports all missing, truncated and extra shards."""
    source, out = built
    missing, cut = shard(out, 0), shard(out, 1)
    extra = missing.with_name("train-00009-of-00004" + missing.suffix)
    shutil.copy(missing, extra)
    missing.unlink()
    os.truncate(cut, cut.stat().st_size - 5)
    for arguments in ([out], [out, source]):
        failed = brim("verify", *arguments, check=3).stderr
        assert f"data/{missing.name}: is missing" in failed
        assert f"data/{cut.name}: has " in failed
        assert f"data/{extra.name}: is not part of the dataset" in failed
    repaired = extra
    repaired.unlink()
    brim(
        "build", source, out, "--num-shards", "4", "--format", missing.suffix.replace(".tar", "webdataset").lstrip(".")
    )
    brim("verify", out, source)


def test_a_source_that_is_not_what_was_built(built: tuple[Path, Path]) -> None:
    """Changed, missing and added source files are named; a changed file date is not a difference."""
    source, out = built
    os.utime(source / "f000.bin", ns=(1, 1))
    brim("verify", out, source)
    data = bytearray((source / "f001.bin").read_bytes())
    data[777] ^= 1
    (source / "f001.bin").write_bytes(bytes(data))
    (source / "f002.bin").unlink()
    (source / "new.bin").write_bytes(b"new")
    (source / "f003.bin").write_bytes(b"short")
    failed = brim("verify", out, source, check=3).stderr
    assert "f001.bin: differs" in failed
    assert "holds f002.bin, which the source does not have" in failed
    assert "new.bin: is 0 time(s) in the shards and 1 time(s)" in failed
    assert "f003.bin: has 5 bytes in the source" in failed
    assert "4 problems" in failed


def test_the_card_is_held_against_the_shards(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """A card that differs from the shards, or is missing, is found."""
    source, out = many_files(4), tmp_path / "out"
    brim("build", source, out)
    card = out / "README.md"
    text = card.read_text()
    card.write_text(text.replace("num_examples: 4", "num_examples: 5"))
    assert "says 5 rows of train, the shards hold 4" in brim("verify", out, check=3).stderr
    card.write_text(text.replace("split: train", "split: test"))
    assert "names the splits test" in brim("verify", out, check=3).stderr
    card.write_text("---\n{{{\n---\n")
    assert "README.md" in brim("verify", out, check=3).stderr
    card.unlink()
    assert "README.md: is missing" in brim("verify", out, check=3).stderr
    card.write_text(text)
    shutil.rmtree(out / ".brim")
    for shard in (out / "data").iterdir():
        shard.unlink()
    assert "the shards are of (none)" in brim("verify", out, check=3).stderr


def test_without_a_ledger(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """Without .brim, verify reports which checks it could not make, and still finds a missing shard."""
    source, out = many_files(6), tmp_path / "out"
    brim("build", source, out, "--num-shards", "3")
    shutil.rmtree(out / ".brim")
    assert "not verified" in brim("verify", out).stdout
    assert "6 files are inside" in brim("verify", out, source).stdout
    shard(out, 1).unlink()
    assert "train-00001-of-00003.parquet: is missing" in brim("verify", out, check=3).stderr


def test_a_ledger_elsewhere(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """--state keeps the ledger outside the destination, and verify reads it from there."""
    source, out, state = many_files(4), tmp_path / "out", tmp_path / "state"
    brim("build", source, out, "--state", state)
    assert not list((out / ".brim").iterdir())
    brim("verify", out, source, "--state", state)


def test_paths_that_would_leave_the_folder(tmp_path: Path) -> None:
    """unpack refuses absolute paths, `..` and links that lead out of the folder, and writes nothing there."""
    files = file_set(tmp_path / "files", {"x": b"evil"})
    leaf = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for path in ("../escape", "/tmp/brim-escape", "a/../../escape", ""):
        out = tmp_path / "evil"
        shutil.rmtree(out, ignore_errors=True)
        (out / "data").mkdir(parents=True)
        table = pa.table({"f": pa.array([{"bytes": b"", "path": path}], leaf)})
        with open(out / "data" / "train-00000-of-00001.parquet", "wb") as file:
            splice_parquet(table, files, {"f": np.array([0])}).copy_to(file.fileno())
        assert "leave the folder" in brim("unpack", out, tmp_path / "target", check=3).stderr
        assert not (tmp_path / "escape").exists()
        assert not list((tmp_path / "target").iterdir())
    outside = tmp_path / "outside"
    outside.mkdir()
    source = write_files(tmp_path / "source", {"link/file.bin": b"x"})
    brim("build", source, tmp_path / "out")
    target = tmp_path / "linked"
    target.mkdir()
    (target / "link").symlink_to(outside)
    assert "through a link" in brim("unpack", tmp_path / "out", target, check=3).stderr
    assert not list(outside.iterdir())


def test_unpack_proves_what_it_unpacks(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """unpack refuses a damaged shard; a shard without a receipt is unpacked with a note that it was not verified."""
    source, out = many_files(4), tmp_path / "out"
    brim("build", source, out)
    path = shard(out, 0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    assert "is damaged" in brim("unpack", out, tmp_path / "back", check=3).stderr
    assert not list((tmp_path / "back").iterdir())
    shutil.rmtree(out / ".brim")
    assert "not verified" in brim("unpack", out, tmp_path / "back").stdout


def test_values_of_the_table_are_compared(tmp_path: Path) -> None:
    """A changed value in the source's table is found, although all files are the same."""
    source, out = write_files(tmp_path / "source", {"a.bin": b"a"}), tmp_path / "out"
    (source / "t.csv").write_text("f,age\na.bin,1\n")
    brim("build", source / "t.csv", out)
    brim("verify", out, source / "t.csv")
    (source / "t.csv").write_text("f,age\na.bin,2\n")
    assert "values of the source's table" in brim("verify", out, source / "t.csv", check=3).stderr


def test_unpack_overwrites_nothing(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """unpack does not overwrite an existing file with other content."""
    source, out, back = many_files(3), tmp_path / "out", tmp_path / "back"
    brim("build", source, out)
    write_files(back, {"f001.bin": b"mine"})
    assert "already exists with other content" in brim("unpack", out, back, check=2).stderr
    assert (back / "f001.bin").read_bytes() == b"mine"


def test_webdataset_is_read_by_its_reader(tmp_path: Path) -> None:
    """The webdataset library reads every sample with its files and metadata, and tarfile reads the same."""
    import webdataset

    contents = {f"a/{i}.png": random_bytes(500 + i, i) for i in range(5)} | {
        "ü b.nii.gz": b"brain",
        "long" * 40 + ".bin": b"n",
    }
    source = write_files(tmp_path / "source", contents)
    names = list(contents)
    rows = [
        f'{{"one": "{names[i]}", "many": {names[i + 1 : i + 3]}, "label": {i}}}'.replace("'", '"') for i in range(5)
    ]
    (source / "t.jsonl").write_text("\n".join(rows) + "\n")
    out = tmp_path / "out"
    brim("build", source / "t.jsonl", out, "--format", "webdataset", "--rows-per-shard", "2")
    shards = sorted(str(p) for p in (out / "data").iterdir())
    assert [Path(s).name for s in shards] == [f"train-{i:05d}-of-00003.tar" for i in range(3)]
    samples = list(webdataset.WebDataset(shards, shardshuffle=False, empty_check=False))
    assert [s["__key__"] for s in samples] == [f"{i:09d}" for i in range(5)]
    for i, sample in enumerate(samples):
        assert sample["one.png"] == contents[names[i]]
        files = [value for key, value in sample.items() if key.startswith("many.")]
        assert files == [contents[n] for n in names[i + 1 : i + 3]]
        assert f'"label": {i}'.encode() in sample["json"]
    with tarfile.open(shards[0]) as archive:
        assert archive.getnames()[:2] == ["000000000.json", "000000000.one.png"]
    brim("verify", out, source / "t.jsonl")
    brim("unpack", out, tmp_path / "back")
    used = {p.relative_to(tmp_path / "back").as_posix() for p in (tmp_path / "back").rglob("*") if p.is_file()}
    assert used == set(names)
    assert tree_digest(tmp_path / "back").items() <= tree_digest(source).items()

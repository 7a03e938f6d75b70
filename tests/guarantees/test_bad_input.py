"""Bad input of every kind gives a clear error with exit code 2 or 3, no traceback and no output."""

from __future__ import annotations

import os
import random
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from brim import BrimError, plan
from tests.conftest import random_bytes, write_files
from tests.forked import brim

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 273000000\n"
ANNEX = b"/annex/objects/MD5E--0123456789abcdef0123456789abcdef.nii.gz\n"


def refused(source: Path, *options: str, code: int = 2) -> str:
    out = source.parent / "refused"
    text = brim("build", source, out, *options, check=code).stderr
    assert text.startswith("brim: ")
    assert not out.exists() or not list(out.glob("data/*"))
    planned_job = brim("plan", source, *options, check=code).stderr
    assert planned_job.replace("brim plan --help", "brim build --help") == text
    return text


def test_pointers_instead_of_data(tmp_path: Path) -> None:
    """LFS and annex pointers are recognized by content, and the error names the command that fetches the data."""
    source = write_files(
        tmp_path / "source",
        {"a.nii.gz": LFS, "b.nii.gz": ANNEX, "c.nii.gz": random_bytes(300), "small.nii.gz": b"x"},
    )
    # a target without a size in its name
    (source / "d.nii.gz").symlink_to("../.git/annex/objects/xx/yy/MD5E--z.nii.gz")
    text = refused(source)
    assert "git lfs pull" in text
    assert "datalad get b.nii.gz d.nii.gz" in text
    assert "1 is a Git LFS pointer, not data: a.nii.gz" in text
    assert "b.nii.gz" in text
    assert "d.nii.gz" in text
    assert "small.nii.gz" not in text
    table = source / "t.csv"
    table.write_text("f\n" + "".join(f"{n}.nii.gz\n" for n in ("a", "b", "c", "d", "small")))
    text = refused(table)
    assert "git lfs pull" in text
    assert "2 are git-annex pointers" in text


def test_empty_files(tmp_path: Path) -> None:
    """Empty files are refused with a summary, and accepted with --allow-empty."""
    source = write_files(tmp_path / "source", {f"{i}.png": b"" for i in range(500)} | {"full.png": b"x"})
    text = refused(source)
    assert "500 of 501 files" in text
    assert "500 are empty" in text
    assert "and 497 more" in text
    assert "--allow-empty" in text
    assert len(text.splitlines()) < 6
    brim("build", source, tmp_path / "out", "--allow-empty")
    brim("verify", tmp_path / "out", source)


@pytest.mark.parametrize("label", ["folder", "missing", "pipe", "socket", "unreadable", "loop"])
def test_what_is_not_a_file(tmp_path: Path, label: str) -> None:
    """A folder, a missing or unreadable file, a pipe, a socket or a link to itself in place of a file is refused."""
    source = write_files(tmp_path / "source", {"a.bin": b"a"})
    target = source / "thing.bin"
    if label == "folder":
        target.mkdir()
    elif label == "pipe":
        os.mkfifo(target)
    elif label == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(target))
    elif label == "loop":
        target.symlink_to("thing.bin")
    elif label == "unreadable":
        target.write_bytes(b"x")
        target.chmod(0)
        if os.access(target, os.R_OK):
            pytest.skip("unreadable files are not proved here: root reads everything")
    (source / "t.csv").write_text("f,n\na.bin,1\nthing.bin,2\n")
    assert "thing.bin" in refused(source / "t.csv", "--files", "f")


def test_a_link_loop_in_a_folder_is_reported_and_not_followed(tmp_path: Path) -> None:
    """Links from a folder to itself are reported and not followed; links to other folders are followed."""
    source = write_files(tmp_path / "source", {"sub/a.bin": b"a"})
    write_files(tmp_path / "other", {"b.bin": b"b"})
    (source / "sub" / "back").symlink_to("..")
    (source / "linked").symlink_to(tmp_path / "other")
    (source / "file-link.bin").symlink_to(tmp_path / "other" / "b.bin")
    text = brim("plan", source).stdout
    assert re.search(r"rows +3 ", text)
    assert "lead back to themselves" in text
    brim("build", source, tmp_path / "out")
    brim("unpack", tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back" / "linked" / "b.bin").read_bytes() == b"b"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.csv", b"", "empty"),
        ("t.csv", b"f,n\n", "no rows"),
        ("t.csv", b"f,n\na.bin\n", "Expected 2 columns, got 1"),
        ("t.csv", b"f,f\na.bin,a.bin\n", "several columns named 'f'"),
        ("t.csv", b"x,y\n1,2\n", "No column of the table names files"),
        ("t.csv", b"f\nnowhere.png\n", "--root"),
        ("t.csv", b"\xff\xfe\x00bad,f\n\x80,a.bin\n", "t.csv"),
        ("t.csv", b"f\nhttps://example.org/a.png\na.bin\n", "address"),
        ("t.jsonl", b'{"f": "a.bin"}\n{"f": \n', "not a row of JSON"),
        ("t.jsonl", b'{"f": "a.bin"}\n{"f": 3}\n', "not valid"),
        ("t.parquet", b"PAR1 nothing else PAR1", "not valid"),
        ("t.xlsx", b"PK", "not a table that brim can read"),
        ("t.csv", b"f\n/etc/hostname\na.bin\n", "in common"),
    ],
)
def test_broken_tables(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    """A table that is empty, truncated, of the wrong type or with wrong names is refused with the reason."""
    source = write_files(tmp_path / "source", {"a.bin": b"a", name: content})
    assert says in refused(source / name)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--files", "nope"], "does not have"),
        (["--files", "n"], "not paths"),
        (["--files", "f:movie"], "not a type of file"),
        (["--drop", "nope"], "does not have"),
        (["--shard-by", "nope"], "Columns are"),
        (["--shard-size", "lots"], "500MB"),
        (["--shard-size", "1GB", "--num-shards", "2"], "exclude each other"),
        (["--num-shards", "99"], "more than the 2 rows"),
        (["--num-shards", "0"], "above zero"),
        (["--limit", "-1"], "above zero"),
        (["--split-by", "nope"], "does not have"),
        (["--split", "a b"], "not the name of a split"),
        (["--label-from", "parent"], "'parent', which the table does not have"),
        (["--label-from", "aunt"], "'aunt', which the table does not have"),
        (["--format", "zip"], "--format takes"),
        (["--oversize", "maybe"], "--oversize takes"),
        (["--memory", "much"], "500MB"),
        (["--workers", "0"], "above zero"),
        (["--exclude", "*"], "No row"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: list[str], says: str) -> None:
    """An option with an invalid value is refused by name before anything is written."""
    source = write_files(tmp_path / "source", {"a.bin": b"a", "b.bin": b"b"})
    (source / "t.csv").write_text("f,n\na.bin,1\nb.bin,2\n")
    assert says in refused(source / "t.csv", *options)


def test_unknown_options_and_verbs() -> None:
    """Errors of the argument parser exit with code 2 too."""
    assert brim("build", "--nonsense", check=2).stderr
    assert brim("bild", check=2).stderr
    assert brim("build", check=2).stderr


def test_destinations_that_make_no_sense(tmp_path: Path, many_files: Callable[..., Path]) -> None:
    """A file, a folder with foreign data and an unknown address are refused as destinations."""
    source = many_files(2)
    (tmp_path / "file").write_bytes(b"x")
    assert "is a file" in brim("build", source, tmp_path / "file", check=2).stderr
    write_files(tmp_path / "foreign", {"data/train-old.parquet": b"x"})
    assert "brim did not write" in brim("build", source, tmp_path / "foreign", check=2).stderr
    assert (tmp_path / "foreign/data/train-old.parquet").exists()
    assert "ftp://" in brim("build", source, "ftp://host/x", check=2).stderr
    assert "does not exist" in brim("verify", tmp_path / "nothing", check=2).stderr
    assert "no dataset" in brim("unpack", source, tmp_path / "x", check=2).stderr


def test_absurd_sizes(tmp_path: Path) -> None:
    """A file of 3 GB does not fit a cell: it is refused with a suggestion, skipped on request, or put into a tar."""
    source = write_files(tmp_path / "source", {"small.bin": b"x"})
    with open(source / "big.bin", "wb") as file:
        file.truncate(3_000_000_000)
    text = refused(source)
    assert "big.bin" in text
    assert "--format webdataset" in text
    assert "--oversize skip" in text
    result = brim("build", source, tmp_path / "out", "--oversize", "skip").stdout
    assert "skipped  1 file too large" in result
    assert "big.bin" in (tmp_path / "out" / "README.md").read_text()
    brim("verify", tmp_path / "out", source)
    with open(source / "big.bin", "wb") as file:
        file.truncate(10**13)
    assert "big.bin" in refused(source)
    assert "free disk" in brim("build", source, tmp_path / "tar", "--format", "webdataset", check=5).stderr


def test_names_that_are_odd(tmp_path: Path) -> None:
    """Quotes, newlines, emoji and dots are valid in file names; bytes that are not UTF-8 are refused."""
    names = [
        "a b.bin",
        "it's.bin",
        'say "hi".bin',
        "new\nline.bin",
        "🧠.bin",
        "...bin",
        "x" * 200 + ".bin",
        "-rf",
        "a,b.bin",
    ]
    source = write_files(tmp_path / "source", {name: name.encode() for name in names if not name.startswith(".")})
    brim("build", source, tmp_path / "out")
    brim("verify", tmp_path / "out", source)
    brim("unpack", tmp_path / "out", tmp_path / "back")
    for name in names:
        if not name.startswith("."):
            assert (tmp_path / "back" / name).read_bytes() == name.encode()
    with open(os.fsencode(source) + b"/bad\xff.bin", "wb") as file:
        file.write(b"x")
    assert "not UTF-8" in refused(source)


def test_columns_that_tell_where_things_lie(tmp_path: Path) -> None:
    """Absolute paths in a metadata column are refused, because they would be published."""
    source = write_files(tmp_path / "source", {"a.bin": b"a"})
    (source / "t.csv").write_text(f"f,origin\na.bin,{source}/a.bin\n")
    assert "--drop origin" in refused(source / "t.csv", "--files", "f")
    brim("build", source / "t.csv", tmp_path / "out", "--files", "f", "--drop", "origin")


def test_random_garbage_tables(tmp_path: Path) -> None:
    """Tables of random bytes and truncated tables are either planned or refused with an input error of brim."""
    source = write_files(tmp_path / "source", {"a.bin": b"a"})
    noise = random.Random(1)
    good = b'f,n,t\na.bin,1,"x, y"\na.bin,2,z\n'
    for number in range(12):
        content = noise.randbytes(noise.randrange(1, 300)) if number % 2 else good[: noise.randrange(1, len(good))]
        for name in ("t.csv", "t.jsonl", "t.parquet"):
            (source / name).write_bytes(content)
            try:
                plan(source / name)
            except BrimError as error:
                assert error.exit_code == 2, error  # noqa: PT017  the test looks for any other exception

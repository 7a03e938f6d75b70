"""brim check finds problems that would ruin a long run and reports each in one line."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import brim as library
from brim.api.check_api import check
from brim.errors import InputError, MissingDependencyError
from brim.progress import Progress
from brim.verification.check_files import Check, CheckReport, anatomical_reminder, bids_validator
from tests.conftest import random_bytes, write_files
from tests.forked import brim

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
ANNEX = b"/annex/objects/MD5E-s12345--aa.nii.gz\n"


def nifti(number: int = 0) -> bytes:
    values = np.frombuffer(random_bytes(2 * 16**3, number), np.int16).reshape(16, 16, 16)
    return gzip.compress(nib.Nifti1Image(values, np.eye(4)).to_bytes(), mtime=0)


def scans(root: Path, count: int = 30, prefix: str = "p") -> Path:
    return write_files(root, {f"{prefix}{i:03d}/anat/{prefix}{i:03d}_T1w.nii.gz": nifti(i) for i in range(count)})


def named(report: CheckReport, name: str) -> Check:
    return next(item for item in report.checks if item.name == name)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)


class Counting(Progress):
    """A progress object that adds up the reported bytes."""

    def __init__(self) -> None:
        self.total = self.done = 0

    def start(self, label: str, total_bytes: int, shards: int, limit_bytes: int) -> None:
        self.total = total_bytes

    def advance(self, size: int) -> None:
        self.done += size


def test_good_files_pass(tmp_path: Path) -> None:
    """A source without problems passes with a sample and with --all, which reads every byte."""
    table = library.files(scans(tmp_path / "a"))
    report = check(table)
    assert report.ok
    assert named(report, "NIfTI headers").counted == 10
    assert "10 of 30 looked at" in named(report, "NIfTI headers").detail
    progress = Counting()
    report = check(table, everything=True, progress=progress)
    assert report.ok
    assert named(report, "NIfTI headers").counted == named(report, "gzip, to the last byte").counted == 30
    assert progress.done == progress.total == table.files.sizes.sum()


def test_a_sample_finds_what_it_looks_at(tmp_path: Path) -> None:
    """Damage in a sampled file is found; in other files only with --all. The sample is spread evenly and
    deterministic."""
    root = scans(tmp_path / "a", 31)
    paths = sorted(root.rglob("*.gz"))
    paths[30].write_bytes(b"a text, not a brain")
    report = check(library.files(root), sample_size=4)
    assert named(report, "NIfTI headers").failed == ["p030/anat/p030_T1w.nii.gz"]
    assert named(report, "NIfTI headers").faults == ["is not gzip"]
    paths[30].write_bytes(nifti())
    paths[5].write_bytes(b"a text, not a brain")
    assert check(library.files(root), sample_size=4).ok  # 0, 10, 20, 30
    assert check(library.files(root), sample_size=0).ok
    report = check(library.files(root), everything=True)
    assert [item.failed for item in report.failed] == [["p005/anat/p005_T1w.nii.gz"]]


def test_damage_behind_the_header(tmp_path: Path) -> None:
    """Truncated, flipped, too short and overlong files are listed with their problem."""
    root = scans(tmp_path / "a", 8)
    paths = sorted(root.rglob("*.gz"))
    paths[1].write_bytes(paths[1].read_bytes()[:-1000])
    flip(paths[2], 6000)
    paths[3].write_bytes(paths[3].read_bytes() + b"garbage")
    paths[4].write_bytes(gzip.compress(gzip.decompress(nifti())[:-10]))
    table = library.files(root)
    assert check(table).ok  # the headers are valid
    report = check(table, everything=True)
    actual = named(report, "gzip, to the last byte")
    assert [item.name for item in report.failed] == [actual.name]
    assert actual.failed == [str(path.relative_to(root)) for path in paths[1:5]]
    for fault, arguments in zip(actual.faults, ["cut off", "CRC", "7 byte(s) behind", "too little data"], strict=True):
        assert arguments in fault


def test_images_and_plain_files(tmp_path: Path) -> None:
    """Images are checked by content and other files by name, also in mixed folders."""
    root = tmp_path / "a"
    root.mkdir()
    pixels = np.zeros((20, 30, 3), np.uint8)
    Image.fromarray(pixels).save(root / "good.png")
    Image.fromarray(pixels).save(root / "really-a-jpeg.png", "JPEG")
    (root / "cut.png").write_bytes((root / "good.png").read_bytes()[:10])
    actual = named(check(library.files(root)), "image headers")
    assert (actual.counted, actual.failed, actual.faults) == (3, ["cut.png"], ["ends early"])
    write_files(root, {"doc.pdf": b"<html>", "log.gz": b"plain", "x.wav": b"RIFF"})
    report = check(library.files(root, column="file:file"), everything=True)
    assert [(item.name, item.failed) for item in report.failed] == [
        ("image headers", ["cut.png"]),
        ("PDF headers", ["doc.pdf"]),
        ("gzip headers", ["log.gz"]),
    ]


def test_pointers_and_links(tmp_path: Path) -> None:
    """Pointers of git-annex and Git LFS are reported with the command that fetches the data; other files pass."""
    root = scans(tmp_path / "a", 3)
    write_files(root, {"lfs_T1w.nii.gz": LFS, "annex_T1w.nii.gz": ANNEX})
    (root / "link_T1w.nii.gz").symlink_to(".git/annex/objects/aa/bb/MD5E-s1--x.nii.gz")
    report = check(library.files(root), everything=True)
    assert [item.name for item in report.failed] == ["is data, not a pointer"]
    actual = report.failed[0]
    assert sorted(actual.failed) == ["annex_T1w.nii.gz", "lfs_T1w.nii.gz", "link_T1w.nii.gz"]
    assert "datalad get" in actual.detail
    assert "git lfs pull" in actual.detail
    assert actual.counted == 6


def test_missing_files_of_a_table(tmp_path: Path) -> None:
    """Missing files of a table are listed; the existing ones are checked."""
    scans(tmp_path, 3)
    (tmp_path / "t.csv").write_text(
        "scan,age\n" + "".join(f"p{i:03d}/anat/p{i:03d}_T1w.nii.gz,{i}\n" for i in range(5)) + "p000/anat,7\n"
    )
    report = check(library.table(tmp_path / "t.csv", files=["scan:nifti"]))
    actual = named(report, "exists and can be read")
    assert actual.failed == [f"p{i:03d}/anat/p{i:03d}_T1w.nii.gz" for i in (3, 4)] + ["p000/anat"]
    assert actual.counted == 6
    assert "2 × missing" in actual.detail
    assert [item.name for item in report.failed] == [actual.name]


def test_oversize_cells(tmp_path: Path) -> None:
    """A file too large for a Parquet cell is found without reading it; formats without cells accept it."""
    root = scans(tmp_path / "a", 1)
    with open(root / "huge_T1w.nii", "wb") as file:
        file.write(nib.Nifti1Image(np.zeros((4, 4, 4)), np.eye(4)).to_bytes())
        file.truncate(3_000_000_000)
    table = library.files(root)
    report = check(table)
    assert [(item.name, item.failed) for item in report.failed] == [("fits the format", ["huge_T1w.nii"])]
    assert check(table, max_cell_bytes=None).ok


def test_several_columns(tmp_path: Path) -> None:
    """Each file column has a separate sample, and a file in two columns is checked once."""
    scans(tmp_path, 12)
    paths = [f"p{i:03d}/anat/p{i:03d}_T1w.nii.gz" for i in range(12)]
    rows = pa.table({"a": paths[:6], "b": [*([path, path] for path in paths[6:11]), paths[:1]]})
    table = library.table(rows, files=["a:nifti", "b:nifti"], root=tmp_path)
    actual = named(check(table, sample_size=2), "NIfTI headers")
    assert actual.counted == 3  # a: first, last; b: first, last; the first of b is also the first of a
    assert actual.detail.startswith("3 of 11")


def test_metadata_that_names_this_machine(tmp_path: Path) -> None:
    """A path of this machine in the metadata is one finding among others and does not end the check."""
    scans(tmp_path, 2)
    rows = pa.table({"scan": ["p000/anat/p000_T1w.nii.gz", "gone.nii.gz"], "from": [f"{tmp_path}/x", ""]})
    report = check(library.table(rows, files=["scan:nifti"], root=tmp_path))
    assert [item.name for item in report.failed] == ["exists and can be read", "metadata names no path of this machine"]
    assert "drop='from'" in report.failed[1].detail


def test_reminder_of_faces(tmp_path: Path) -> None:
    """Anatomical images are counted by name, folder and column; masks and functional images are not."""
    write_files(
        tmp_path,
        {
            name: nifti()
            for name in [
                "sub-1/anat/sub-1_T1w.nii.gz",
                "sub-1/anat/sub-1_odd.nii.gz",
                "sub-1/anat/sub-1_desc-lesion_mask.nii.gz",
                "sub-1/func/sub-1_bold.nii.gz",
                "flat_FLAIR.nii",
                "raw/sub-1_ncct.nii.gz",
                "x.nii.gz",
            ]
        },
    )
    table = library.files(tmp_path)
    reminder = anatomical_reminder(table)
    assert (reminder.ok, reminder.counted) == (True, 4)
    assert "cannot tell whether faces were removed" in reminder.detail
    rows = pa.table({"t2w": ["x.nii.gz"], "bold": ["sub-1/func/sub-1_bold.nii.gz"]})
    assert anatomical_reminder(library.table(rows, files=["t2w:nifti", "bold:nifti"], root=tmp_path)).counted == 1


def test_extra_checks_count(tmp_path: Path) -> None:
    """Checks of the caller are part of the report."""
    extra = Check("229 subjects", False, 229, detail="expected 230")
    report = check(library.files(scans(tmp_path, 2)), extra=[extra])
    assert report.failed == [extra]


def test_wrong_sample_size(tmp_path: Path) -> None:
    """A negative sample size is an error."""
    with pytest.raises(InputError, match="sample_size="):
        check(library.files(scans(tmp_path, 1)), sample_size=-1)


def test_500_empty_files_are_one_line(tmp_path: Path) -> None:
    """The summary has one line, --list lists every file, and --allow-empty accepts them."""
    root = scans(tmp_path / "a", 3)
    write_files(root, {f"empty-{i:03d}.nii.gz": b"" for i in range(500)})
    failed = brim("check", root, check=3)
    lines = [line for line in failed.stdout.splitlines() if "empty" in line]
    assert len(lines) == 1
    assert lines[0].startswith("FAIL  is not empty")
    assert "500 of 503" in lines[0]
    assert "empty-000.nii.gz, empty-001.nii.gz, empty-002.nii.gz and 497 more" in lines[0]
    assert "1 of 7 checks failed: is not empty (500)" in failed.stderr
    assert "--list" in failed.stderr
    listed = brim("check", root, "--list", check=3).stdout
    assert all(f"      empty-{i:03d}.nii.gz\n" in listed for i in range(500))
    brim("check", root, "--allow-empty")


def test_json(tmp_path: Path) -> None:
    """--json prints one object per check with all its files, then a summary and the error, and nothing else."""
    root = scans(tmp_path / "a", 4)
    (root / "bad.nii.gz").write_bytes(b"text")
    result = brim("check", root, "--all", "--json", check=3)
    events = [json.loads(line) for line in result.stdout.splitlines()]
    by_name = {event["name"]: event for event in events if event["event"] == "check"}
    assert by_name["NIfTI headers"]["failed"] == ["bad.nii.gz"]
    assert by_name["NIfTI headers"]["faults"] == ["is not gzip"]
    assert by_name["faces (a reminder)"]["counted"] == 4
    last = [event for event in events if event["event"] == "checked"]
    assert [(e["ok"], e["checks"], e["failed"]) for e in last] == [(False, len(by_name), ["NIfTI headers"])]
    assert "exists and can be read" in last[0]["proved"]
    assert by_name["NIfTI headers"]["status"] == "FAIL"
    assert by_name["faces (a reminder)"]["status"] == "note"
    assert events[-1]["exit_code"] == 3
    assert result.stderr == ""


def test_the_table_is_aligned(tmp_path: Path) -> None:
    """Counts are aligned in one column, and the problem is printed next to the file."""
    root = scans(tmp_path / "a", 4)
    (root / "bad.nii.gz").write_bytes(b"text")
    lines = brim("check", root, check=3).stdout.splitlines()
    assert lines[-2].startswith("checked: exists and can be read, ")
    assert lines[-1] == "not checked: nothing was left out"
    lines = lines[:-2]
    assert {line[:6] for line in lines} == {"  ok  ", "FAIL  ", "note  "}
    assert any("bad.nii.gz (is not gzip)" in line for line in lines)
    ends = {line.index(count) + len(count) for line in lines for count in ("1 of 5", "  5", "  4") if count in line}
    assert len(ends) == 1


def test_oversize_skip(tmp_path: Path) -> None:
    """--oversize skip accepts files that a build would leave out; an unknown value is an error."""
    root = scans(tmp_path / "a", 1)
    with open(root / "huge_T1w.nii", "wb") as file:
        file.write(nib.Nifti1Image(np.zeros((4, 4, 4)), np.eye(4)).to_bytes())
        file.truncate(3_000_000_000)
    assert "--oversize skip" in brim("check", root, check=3).stdout
    brim("check", root, "--oversize", "skip")
    assert "--oversize takes" in brim("check", root, "--oversize", "what", check=2).stderr


def test_memory_stays_flat(tmp_path: Path) -> None:
    """Decompressing two streams of 400 MB at the same time takes a few megabytes."""
    for name in "ab":
        with gzip.open(tmp_path / f"{name}.bin.gz", "wb", compresslevel=1) as file:
            for _ in range(40):
                file.write(bytes(10_000_000))
    code = (
        "import resource, sys, brim; from brim import check\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "table = brim.files(sys.argv[1]); check(table); before = peak()\n"
        "report = check(table, everything=True); print(report.ok, peak() - before)"
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    ok, grown = result.stdout.split()
    assert ok == "True"
    assert int(grown) * 1024 < 20_000_000


def bids(root: Path) -> Path:
    description = json.dumps({"Name": "x", "BIDSVersion": "1.9.0"}).encode()
    return write_files(
        scans(root, 2, "sub-"), {"dataset_description.json": description, "README": b"A dataset of two scans.\n" * 20}
    )


def test_bids_validator(tmp_path: Path) -> None:
    """Errors of the BIDS validator fail the check and name the files; warnings do not."""
    if not os.path.exists(os.path.join(os.path.dirname(sys.executable), "bids-validator-deno")):
        pytest.skip("bids-validator-deno is not installed")
    root = bids(tmp_path / "a")
    good, *warned = bids_validator(root)
    assert (good.ok, good.counted, good.failed, good.detail) == (True, 4, [], "0 errors")
    assert all(check.ok and check.note and check.failed and check.faults for check in warned)
    write_files(root, {"sub-000/anat/sub-000_nonsense.nii.gz": nifti()})
    bad = bids_validator(root)[0]
    assert not bad.ok
    assert bad.failed == ["sub-000/anat/sub-000_nonsense.nii.gz"]
    assert "NOT_INCLUDED" in bad.faults[0]
    lines = brim("check", root, "--bids-validator", check=3).stdout.splitlines()
    assert any(line.startswith("FAIL  BIDS validator") and "NOT_INCLUDED" in line for line in lines)


def fake_validator(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / "bids-validator-deno").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bids-validator-deno").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


def test_bids_validator_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the package to install, or says that the path is not a folder."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="pip install bids-validator-deno"):
        bids_validator(tmp_path)
    fake_validator(tmp_path / "bin", "exit 0", monkeypatch)
    with pytest.raises(InputError, match="is not a folder"):
        bids_validator(tmp_path / "table.csv")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'error: no such thing' >&2; exit 1", "could not run: error: no such thing"),
        ("exit 7", "could not run: exit code 7"),
        ('echo \'{"issues":{"issues":[{"code":"A"\'', "could not run"),
        ('echo \'{"issues":{"issues":[{"other":1}]}}\'', "could not run"),
        ("kill -9 $$", "could not run: exit code -9"),
    ],
)
def test_bids_validator_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str) -> None:
    """A validator that crashes or prints unexpected output is an error that quotes the output."""
    fake_validator(tmp_path / "bin", script, monkeypatch)
    with pytest.raises(InputError, match=message):
        bids_validator(tmp_path)


def test_many_issues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long answer is parsed one issue at a time, wherever its chunks are cut."""
    issues = [
        {"code": f"C{i % 3}", "severity": "error" if i % 2 else "warning", "location": f"/f{i}", "text": "x}]," * i}
        for i in range(1500)
    ]
    answer = {"issues": {"issues": issues, "codeMessages": {}}, "summary": {"totalFiles": 77}}
    (tmp_path / "answer.json").write_text(json.dumps(answer, separators=(",", ":")))
    assert (tmp_path / "answer.json").stat().st_size > 4 << 20
    fake_validator(tmp_path / "bin", f"cat {tmp_path}/answer.json; exit 16", monkeypatch)
    actual, warned = bids_validator(tmp_path)
    assert (actual.ok, actual.counted, len(actual.failed)) == (False, 77, 750)
    assert actual.detail == "750 errors (C1 250, C0 250, C2 250)"
    assert (warned.ok, warned.status, len(warned.failed), warned.failed[1]) == (True, "note", 750, "f10")
    assert warned.faults[1] == "C1"

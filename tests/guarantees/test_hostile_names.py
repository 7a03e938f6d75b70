"""Names from data become paths: no name makes brim write outside the destination."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

import brim as library
from brim.errors import BrimError, InputError, VerificationError
from brim.safe_names import is_file_name, path_below, stays_below
from brim.state.ledger import Ledger
from brim.state.record_log import record_line
from tests.forked import brim
from tests.hub import TestHub
from tests.publishing import DEST, REPO, Machine, put_by_hand

FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
INSIDE = "{sandbox}"  # replaced by the folder of the test, which gives an absolute path that a test may write to

_parts = st.sampled_from(
    ["..", ".", "", "evil", "evil.bin", "T:1.png", "~", "é", "a b", "\\..", "x\n", "data", ".brim"]
)
hostile = st.builds(
    lambda start, parts, end: start + "/".join(parts) + end,
    st.sampled_from(["", "/", "./", "../", "../../", "../../../", f"{INSIDE}/", "//"]),
    st.lists(_parts, min_size=1, max_size=4),
    st.sampled_from(["", "/", "\0"]),
)
ESCAPES = [f"{INSIDE}/evil", "../evil", "../../evil", "a/../../evil", "data/../../../evil", "..", "/", "\0"]


def each_escape(test: Callable[..., None]) -> Callable[..., None]:
    for name in ESCAPES:
        test = example(name)(test)
    return settings(max_examples=12)(given(hostile)(test))


@pytest.fixture
def sandbox(tmp_path: Path) -> Callable[[], Path]:
    """Create a folder for each example; only its subfolders `in` and `out` may be used."""

    def new() -> Path:
        return Path(tempfile.mkdtemp(dir=tmp_path)) / "a" / "b"

    return new


def outside(folder: Path) -> list[str]:
    """Return all files near a sandbox that are in neither its source nor its destination."""
    top = folder.parent.parent
    actual = [path for path in top.rglob("*") if not path.is_dir()]
    return [str(path) for path in actual if not path.is_relative_to(folder / "in")
            and not path.is_relative_to(folder / "out")]  # fmt: skip


def shard(content: bytes = b"x", path: str | None = "x.bin") -> pa.Table:
    return pa.table({"file": pa.array([{"bytes": content, "path": path}], FILE), "text": ["a text"]})


def dataset(folder: Path, splits: dict[str, pa.Table], config: str = "default") -> Path:
    """Create a dataset of another program whose card names the splits."""
    folder.mkdir(parents=True)
    listed = []
    for number, (split, table) in enumerate(splits.items()):
        pq.write_table(table, folder / f"{number}.parquet")
        listed.append({"split": split, "path": f"{number}.parquet"})
    card = yaml.safe_dump({"configs": [{"config_name": config, "data_files": listed}]})
    (folder / "README.md").write_text(f"---\n{card}---\n")
    return folder


@given(hostile)
@example("T:1.png")
@example("a..b/..c")
@example("./a")
def test_stays_below_agrees_with_the_file_system(name: str) -> None:
    name = name.replace(INSIDE, "/elsewhere")
    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(folder).resolve())
        if not stays_below(name):
            with pytest.raises(VerificationError, match="leave the folder"):
                path_below(root, name, "a row")
            return
        path = Path(path_below(root, name, "a row"))
        assert path.resolve().is_relative_to(root)
        assert path.resolve() != Path(root)
        assert is_file_name(name) is ("/" not in name)


def test_path_below_refuses_a_link_that_leads_out(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    with pytest.raises(VerificationError, match="through a link"):
        path_below(str((tmp_path / "root").resolve()), "link/evil", "a row")


@pytest.mark.parametrize("method", ["all", "columns"])
def test_unpack_refuses_split_names_that_leave_the_folder(tmp_path: Path, method: str) -> None:
    evil = tmp_path / "evil"
    source = dataset(tmp_path / "in", {str(evil): shard(b"1"), "two": shard(b"2")})
    result = brim("unpack", source, tmp_path / "out", *(["--columns", "file"] if method == "columns" else []), check=3)
    assert "would leave the folder" in result.stderr
    assert not evil.exists()


def test_unpack_from_the_hub_refuses_split_names_that_leave_the_folder(
    hub: TestHub, machine: Machine, tmp_path: Path
) -> None:
    evil = tmp_path / "evil"
    source = dataset(tmp_path / "in", {str(evil): shard(b"1"), "two": shard(b"2")})
    hub.create(REPO)
    put_by_hand(hub, {path.name: path.read_bytes() for path in source.iterdir()})
    result = brim("unpack", DEST, tmp_path / "out", env=machine.environment, check=3)
    assert "would leave the folder" in result.stderr
    assert not evil.exists()


def test_unpack_writes_nothing_outside_whatever_splits_and_files_are_called(sandbox: Callable[[], Path]) -> None:
    @each_escape
    def unpack(name: str) -> None:
        work_folder = sandbox()
        name = name.replace(INSIDE, str(work_folder.parent))
        for kind in ("split", "path"):
            shutil.rmtree(work_folder, ignore_errors=True)
            tables = {name: shard(b"1"), "two": shard(b"2")} if kind == "split" else {
                "one": shard(b"1", name), "two": shard(b"2", name)}  # fmt: skip
            dataset(work_folder / "in", tables)
            with suppress(BrimError):
                library.unpack(work_folder / "in", work_folder / "out")
            assert not outside(work_folder)

    unpack()


def test_unpack_writes_nothing_outside_whatever_members_of_a_packed_folder_are_called(
    sandbox: Callable[[], Path],
) -> None:
    @each_escape
    def unpack(name: str) -> None:
        work_folder = sandbox()
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            member = tarfile.TarInfo("x")
            member.name, member.size = name.replace(INSIDE, str(work_folder.parent)).replace("\0", "") or "x", 1
            archive.addfile(member, io.BytesIO(b"1"))
        dataset(work_folder / "in", {"train": shard(packed.getvalue(), "recording.ds/")})
        with suppress(BrimError):
            library.unpack(work_folder / "in", work_folder / "out")
        assert not outside(work_folder)

    unpack()


@pytest.mark.parametrize("write", [library.select, library.build])
def test_written_datasets_stay_in_their_folder_whatever_splits_are_called(
    sandbox: Callable[[], Path], write: Callable[..., object]
) -> None:
    @each_escape
    def write_one(name: str) -> None:
        work_folder = sandbox()
        dataset(work_folder / "in", {name.replace(INSIDE, str(work_folder.parent)): shard(b"1"), "two": shard(b"2")})
        with suppress(BrimError):
            write(work_folder / "in", work_folder / "out")
        assert not outside(work_folder)

    write_one()


@pytest.mark.parametrize("name", ["../../evil", f"{INSIDE}/evil"])
def test_map_stays_in_its_folder_whatever_the_split_is_called(sandbox: Callable[[], Path], name: str) -> None:
    work_folder = sandbox()
    name = name.replace(INSIDE, str(work_folder.parent))
    dataset(work_folder / "in", {name: shard(b"1"), "two": shard(b"2")})
    (work_folder / "in" / "step.py").write_text("def same(row):\n    return {'text': row['text']}\n")
    arguments = ("--fn", work_folder / "in" / "step.py:same", "--columns", "text", "--from-split", name)
    brim("map", work_folder / "in", work_folder / "out", *arguments)
    assert not outside(work_folder)


def _same(row: dict[str, Any]) -> dict[str, Any]:
    return {"text": row["text"]}


@pytest.mark.parametrize("name", ["../../evil", "/evil", "a/b"])
def test_select_refuses_split_names_that_cannot_be_part_of_a_file_name(tmp_path: Path, name: str) -> None:
    source = dataset(tmp_path / "a" / "in", {name: shard(b"1"), "two": shard(b"2")})
    result = brim("select", source, tmp_path / "a" / "out", check=2)
    assert "cannot be part of a file name" in result.stderr
    assert not (tmp_path / "a" / "out").exists()


def receipt(name: str, **extra: str) -> bytes:
    records = {"type": "shard", "name": name, "split": "train", "rows": 1, "size": 1, "sha256": "0" * 64,
            "key": "1" * 64, "mtimes": "", "job": "j"}  # fmt: skip
    return record_line({**records, **extra})


@each_escape
def test_ledger_takes_no_receipt_that_names_a_file_outside(name: str) -> None:
    name = name.replace(INSIDE, "/elsewhere")
    assert (name in Ledger.from_bytes(receipt(name)).receipts) is stays_below(name)
    remaining = Ledger.from_bytes(receipt("data/x.parquet", sha256=name)).receipts
    assert ("data/x.parquet" in remaining) is (name == "" or is_file_name(name))


@pytest.mark.parametrize("name", ESCAPES)
def test_a_planted_ledger_reaches_no_file_outside(tmp_path: Path, name: str) -> None:
    """A crafted ledger in a folder cannot make --fresh delete or --update rename files outside the destination."""
    name = name.replace(INSIDE, str(tmp_path))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.bin").write_bytes(b"1")
    victim = tmp_path / "evil"
    victim.write_bytes(b"mine")
    for option in ("--fresh", "--update"):
        brim("build", tmp_path / "in", tmp_path / "out", "--quiet")
        with open(tmp_path / "out" / ".brim" / "ledger.jsonl", "ab") as ledger:
            ledger.write(receipt(name) + receipt("data/y.parquet", sha256=name))
        brim("build", tmp_path / "in", tmp_path / "out", "--rows-per-shard", "1", option, check=None)
        assert victim.read_bytes() == b"mine"
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("label", ["split", "folder", "path", "bundle"])
def test_a_saved_plan_that_names_something_outside_is_refused(tmp_path: Path, label: str) -> None:
    from dataclasses import replace

    from brim.file_set import Bundle
    from brim.plans.saved_plan import load_plan, save_plan

    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.bin").write_bytes(b"1")
    plan = library.plan(tmp_path / "in", tmp_path / "out").plan
    files, shards = plan.table.files, plan.shards
    if label == "path":
        files = replace(files, paths=pa.array(["../in/1.bin"], files.paths.type))
    elif label == "bundle":
        files = replace(files, bundles={0: Bundle(("../evil",), (0,))})
    else:
        shards = replace(shards, **({"folder": "../evil"} if label == "folder" else {"splits": ("../../evil",)}))
    hostile_plan = replace(plan, table=plan.table.replace(files=files), shards=shards)
    vars(hostile_plan)["facts"] = plan.facts
    with pytest.raises(InputError, match="leave its folder"):
        save_plan(tmp_path / "a.plan", hostile_plan, {}, {"brim": "1"})
    with pytest.raises(InputError):
        load_plan(tmp_path / "a.plan")


@pytest.mark.parametrize("name", ["../evil.arrow", "x.arrow", "sub/../../../evil.arrow"])
def test_parts_take_no_unit_from_outside_of_their_folder(tmp_path: Path, name: str) -> None:
    """The ledger of a part comes from another machine, so its names are not trusted."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"{n}"}) + "\n" for n in range(20)))
    (tmp_path / "step.py").write_text("def same(row):\n    return row\n")
    arguments = ("map", "rows.jsonl", "out", "--fn", "step.py:same", "--save", "job.plan")
    brim(*arguments, cwd=tmp_path)
    brim("map", "--plan", "job.plan", "--part", "1/1", cwd=tmp_path)
    victim = tmp_path / "out" / ".brim" / "evil.arrow"
    with open(tmp_path / "job.plan.parts" / "00001-of-00001" / "ledger.jsonl", "ab") as ledger:
        ledger.write(receipt(name))
    result = brim("map", "--plan", "job.plan", "--finish", cwd=tmp_path, check=None)
    assert result.returncode in (0, 2), result.stderr
    assert "bug" not in result.stderr
    assert not victim.exists()
    assert not (tmp_path / "evil.arrow").exists()


@pytest.mark.parametrize("name", ["../../evil.arrow", "/etc/hostname"])
def test_caches_open_no_file_outside_of_their_folder(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIM_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert library.map(str(rows), _same)["text"] == ["a", "b"]
    ledger = next((tmp_path / "cache").glob("*/units/ledger.jsonl"))
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join([*lines[:-1], receipt(name), lines[-1]]))
    assert library.map(str(rows), _same)["text"] == ["a", "b"]

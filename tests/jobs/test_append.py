"""`--append`: adding rows to an existing dataset without its original source."""

from __future__ import annotations

import io
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import brim as api
from brim.errors import InputError
from brim.progress import Progress
from brim.state.ledger import Ledger
from tests.conftest import random_bytes, write_files
from tests.forked import brim
from tests.generators.arc import make_arc
from tests.hub import TestHub
from tests.publishing import DEST, REPO, Listing, Machine, shards

ROWS = ("--rows-per-shard", "2")


def files(folder: Path, start: int, stop: int) -> Path:
    return write_files(folder, {f"f{i:03d}.bin": random_bytes(2000 + i, i) for i in range(start, stop)})


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return three sources: four files, three more, and all of them."""
    return files(tmp_path / "old", 0, 4), files(tmp_path / "new", 4, 7), files(tmp_path / "all", 0, 7)


def rows(folder: Path) -> list[str]:
    tables = [pq.read_table(path) for path in sorted((folder / "data").iterdir())]
    return [str(cell["path"]) for table in tables for cell in table.column("file").to_pylist()]


def fields(text: str) -> dict[str, object]:
    actual = yaml.safe_load(text.split("---\n")[1])
    assert isinstance(actual, dict)
    return actual


def test_a_folder(sources: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """An append to a folder keeps the existing shards and gives the rows, order and card of one complete build.

    Each source verifies its own rows, and repeating the command appends nothing.
    """
    old, new, every = sources
    out = tmp_path / "out"
    brim("build", old, out, *ROWS, "--quiet")
    before = {path.name: path.stat().st_ino for path in (out / "data").iterdir()}
    shutil.rmtree(old)
    brim("build", new, out, *ROWS, "--append", "--quiet")
    names = sorted(path.name for path in (out / "data").iterdir())
    assert names == [
        *sorted(before),
        "train-00002-of-00004.parquet",
        "train-00003-of-00004.parquet",
    ]
    assert all((out / "data" / name).stat().st_ino == inode for name, inode in before.items())
    brim("build", every, tmp_path / "whole", *ROWS, "--quiet")
    assert rows(out) == rows(tmp_path / "whole")
    assert (out / "README.md").read_text() == (tmp_path / "whole" / "README.md").read_text()
    assert "3 files are inside" in brim("verify", out, new).stdout
    assert "4 files are inside" in brim("verify", out, files(tmp_path / "old", 0, 4)).stdout
    repeated = brim("build", new, out, *ROWS, "--append")
    assert "these rows exist already" in repeated.stderr
    assert sorted(path.name for path in (out / "data").iterdir()) == names
    brim("build", files(tmp_path / "third", 7, 8), out, "--append", "--quiet")
    assert rows(out)[-1] == "f007.bin"
    assert brim("verify", out).returncode == 0
    assert api.unpack(out, tmp_path / "files").files == 8


def test_on_the_hub(hub: TestHub, machine: Machine, sources: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """An append to the Hub uploads only new shards, in one commit, and gives the shards of one complete build.

    It works from another machine without the old source, and of the old shards it reads only footers.
    """
    old, new, every = sources
    machine.publish(old, *ROWS)
    put_other = Machine(hub, tmp_path / "other")
    received_bytes, sent, requested = hub.counters.bytes_received, hub.counters.bytes_sent, len(hub.log)
    result = put_other.publish(new, *ROWS, "--append")
    assert "4 (2 sent" in result.stdout
    assert len(hub.history(REPO)) == 3
    whole = Machine(hub, tmp_path / "whole")
    new_bytes = sum(size for name, (size, _) in shards(hub).items() if name > "data/train-00002")
    assert hub.counters.bytes_received - received_bytes <= new_bytes * 1.01
    assert len([line for line in hub.log[requested:] if "/object/" in line]) <= 1
    assert hub.counters.bytes_sent - sent < 40_000
    actual, card = shards(hub), hub.read(REPO, "README.md").decode()
    whole.publish(every, *ROWS, to="hf://datasets/ada/whole")
    expected = {n: message for n, message in hub.files("ada/whole").items() if n.startswith("data/")}
    assert actual == expected
    assert fields(card) == fields(hub.read("ada/whole", "README.md").decode())
    assert card.replace(REPO, "ada/whole") == hub.read("ada/whole", "README.md").decode()
    assert "3 files are inside" in put_other.run("verify", DEST, str(new)).stdout
    assert "4 files are inside" in put_other.run("verify", DEST, str(old), "--deep").stdout
    repeated = put_other.publish(new, *ROWS, "--append")
    assert "in 0 commits" in repeated.stdout


def test_two_writers(hub: TestHub, machine: Machine, sources: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """If two runs append at once, the slower one notices the other commit and appends after its rows."""
    old, new, _ = sources
    machine.publish(old, *ROWS)
    third = files(tmp_path / "third", 7, 10)  # as many shards, so that their names are the same
    second = Machine(hub, tmp_path / "other")
    hub.commit_as_someone_else = lambda groups: second.publish(third, *ROWS, "--append")  # type: ignore[method-assign]
    hub.faults.add("commit", action="conflict")
    result = machine.publish(new, *ROWS, "--append")
    assert "another run has changed the dataset: reading it again" in result.stderr
    actual = machine.python("""
        from datasets import load_dataset
        print(*[cell["path"] for cell in load_dataset("ada/data", split="train")["file"]])
    """).stdout.split()
    assert actual == [f"f{i:03d}.bin" for i in (0, 1, 2, 3, 7, 8, 9, 4, 5, 6)]
    assert machine.run("verify", DEST).returncode == 0


def test_readers_of_the_hub(hub: TestHub, machine: Machine, tmp_path: Path) -> None:
    """While many shards are appended through a pull request, readers see the old rows or all rows."""
    machine.publish(files(tmp_path / "old", 0, 30), "--rows-per-shard", "1")
    observed: list[Listing] = []
    finished = threading.Event()

    def read() -> None:
        while not finished.is_set():
            observed.append(shards(hub))

    reader = threading.Thread(target=read)
    reader.start()
    machine.publish(files(tmp_path / "new", 30, 110), "--rows-per-shard", "1", "--append")
    finished.set()
    reader.join()
    assert {len(listing) for listing in observed} <= {30, 110}
    assert len(shards(hub)) == 110
    assert machine.run("verify", DEST).returncode == 0


def test_readers_of_a_folder(sources: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """During an append to a folder, the card lists exactly the old shards by name, and it is replaced last."""
    old, new, _ = sources
    out = tmp_path / "out"
    brim("build", old, out, *ROWS, "--quiet")
    observed = []

    class Watch(Progress):
        def shard(self, name: str, size: int, sha256: str, method: str) -> None:
            listed = fields((out / "README.md").read_text())["configs"][0]["data_files"]  # type: ignore[index]
            observed.append(listed)

    api.build(new, out, rows_per_shard=2, append=True, progress=Watch())
    existing = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    assert observed == [[{"split": "train", "path": existing}]] * 2
    assert fields((out / "README.md").read_text())["configs"] == [
        {"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]}
    ]


def test_it_goes_on(hub: TestHub, machine: Machine, sources: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """An interrupted append resumes with the same command. Until then, the dataset is unfinished, also in a folder."""
    old, new, _ = sources
    machine.publish(old, *ROWS)
    hub.faults.add("batch", nth=2, status=401)
    machine.publish(new, *ROWS, "--append", "--workers", "1", check=2)
    assert len(shards(hub)) == 2
    hub.faults.clear()
    assert "4 (1 sent" in machine.publish(new, *ROWS, "--append").stdout
    assert len(shards(hub)) == 4
    out = tmp_path / "out"
    brim("build", old, out, *ROWS, "--quiet")
    ledger = out / ".brim" / "ledger.jsonl"
    whole = ledger.read_bytes()
    brim("build", new, out, *ROWS, "--append", "--quiet")
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(whole + lines[0] + b"".join(lines[1:4]))  # as after a kill following its first shard
    (out / "data" / "train-00003-of-00004.parquet").unlink()
    assert "unfinished: 3 of 4 shards" in brim("verify", out, check=3).stderr
    # an append of another source replaces the unfinished one
    brim("build", files(tmp_path / "third", 7, 8), out, "--append", "--quiet")
    assert rows(out) == ["f000.bin", "f001.bin", "f002.bin", "f003.bin", "f007.bin"]
    brim("build", new, out, *ROWS, "--append", "--quiet")
    assert len(rows(out)) == 8
    brim("verify", out)


def test_rows_that_do_not_go_with_those_there(tmp_path: Path) -> None:
    """Rows with other columns, types or labels are refused with the difference, before anything is written."""
    write_files(tmp_path / "a", {"cat/x.bin": b"1", "dog/y.bin": b"2"})
    write_files(tmp_path / "b", {"bird/z.bin": b"3"})
    api.build(tmp_path / "a", tmp_path / "out", label_from="parent")
    with pytest.raises(InputError, match=r"'label' has new classes: bird\. .*cat, dog"):
        api.build(tmp_path / "b", tmp_path / "out", label_from="parent", append=True)
    with pytest.raises(InputError, match="'label' is missing"):
        api.build(tmp_path / "b", tmp_path / "out", append=True)
    assert len(list((tmp_path / "out" / "data").iterdir())) == 1
    api.verify(tmp_path / "out")


def test_lists_of_files(tmp_path: Path) -> None:
    """Rows with lists, texts and numbers can be appended to columns of the same types."""
    make_arc(tmp_path / "old", sessions=4)
    make_arc(tmp_path / "new", sessions=3)
    for source, extra in (("old", False), ("new", True)):
        api.build(api.bids(tmp_path / source, recipe="arc"), tmp_path / "out", rows_per_shard=2, append=extra)
    assert api.verify(tmp_path / "out").rows == 7
    plain = pa.table({"n": pa.array([1], pa.int32()), "t": pa.array(["a"], pa.large_string())})
    for number, table in enumerate((plain, plain, plain.cast(pa.schema([("n", pa.int64()), ("t", pa.string())])))):
        pq.write_table(table.append_column("x", [pa.array([[f"{number}"]])]), tmp_path / f"{number}.parquet")
    for number in (0, 1):
        api.build(api.dataset(tmp_path / f"{number}.parquet"), tmp_path / "rows", append=True)
    with pytest.raises(InputError, match="'n' is int64 instead of int32"):
        api.build(api.dataset(tmp_path / "2.parquet"), tmp_path / "rows", append=True)
    assert api.verify(tmp_path / "rows").rows == 2


@pytest.mark.parametrize("extra", [("--fresh",), ("--update",)])
def test_words_that_do_not_go_together(sources: tuple[Path, Path, Path], tmp_path: Path, extra: tuple[str]) -> None:
    _, new, _ = sources
    assert "cannot be used with --append" in brim("build", new, tmp_path / "out", "--append", *extra, check=2).stderr


def test_nothing_there(sources: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """An append to an empty destination is a build, and repeating it appends nothing."""
    old, _, _ = sources
    for _ in range(2):
        brim("build", old, tmp_path / "out", "--append", "--quiet")
    assert len(rows(tmp_path / "out")) == 4


def test_a_dataset_of_others(hub: TestHub, machine: Machine, tmp_path: Path) -> None:
    """Rows can be appended to a dataset that `datasets` published: listing and footers are sufficient."""
    code = """
        import datasets, brim
        ds = datasets.Dataset.from_dict({"n": list(range(10)), "t": [str(i) for i in range(10)]})
        {0}
        brim.push_to_hub(datasets.Dataset.from_dict({{"n": [10, 11], "t": ["x", "y"]}}), "ada/data", append=True)
        assert datasets.load_dataset("ada/data", split="train")["n"] == list(range(12))
    """
    code = code.replace("{0}", 'ds.push_to_hub("ada/data", num_shards=2)').replace("{{", "{").replace("}}", "}")
    machine.python(code)
    assert sorted(shards(hub)) == [f"data/train-0000{i}-of-00003.parquet" for i in range(3)]
    result = machine.run("verify", DEST)
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "folder" / "data"
    folder.mkdir(parents=True)
    for number in range(2):
        pq.write_table(pa.table({"n": [number]}), folder / f"train-0000{number}-of-00002.parquet")
    out = io.BytesIO()
    pq.write_table(pa.table({"n": [2]}), out)
    api.build(api.dataset(write_files(tmp_path / "more", {"x.parquet": out.getvalue()})), folder.parent, append=True)
    assert len(list(folder.iterdir())) == 3
    assert api.verify(folder.parent).rows == 3


def test_other_splits_stay(hub: TestHub, machine: Machine, sources: tuple[Path, Path, Path]) -> None:
    """An append to one split leaves all files of the other splits unchanged, and can create a new split."""
    old, new, _ = sources
    machine.publish(old, "--split", "train")
    machine.publish(old, "--split", "test")
    before = hub.files(REPO)
    machine.publish(new, "--split", "test", "--append")
    machine.publish(new, "--split", "more", "--append")
    after = hub.files(REPO)
    assert {n for n in before if "train" in n and before[n] != after.get(n)} == set()
    infos = fields(hub.read(REPO, "README.md").decode())["dataset_info"]["splits"]  # type: ignore[index]
    assert {info["name"]: info["num_examples"] for info in infos} == {"train": 4, "test": 7, "more": 3}
    assert machine.run("verify", DEST).returncode == 0


def test_a_branch_that_is_not_there_yet(hub: TestHub, machine: Machine, sources: tuple[Path, Path, Path]) -> None:
    """An append to a new branch starts from the rows of main, and main stays unchanged."""
    old, new, _ = sources
    machine.publish(old)
    head = hub.head(REPO)
    machine.publish(new, "--append", to=f"{DEST}@dev")
    machine.run("verify", f"{DEST}@dev", str(new)).check_returncode()
    machine.run("verify", f"{DEST}@dev", str(old)).check_returncode()
    assert hub.head(REPO) == head
    assert (len(shards(hub)), len(shards(hub, "dev"))) == (1, 2)


def test_no_rows(hub: TestHub, machine: Machine) -> None:
    """Appending a dataset without rows changes nothing, however often."""
    machine.python(f"""
        import brim, datasets
        ds = datasets.Dataset.from_dict({{"n": [1, 2]}})
        brim.push_to_hub(ds, "{REPO}")
        first, second = (brim.push_to_hub(ds.select([]), "{REPO}", append=True) for _ in range(2))
        assert (first.rows, second.rows, second.commits) == (2, 2, 0)
    """)
    assert len(shards(hub)) == 1


def test_configs_with_splits_of_one_name(
    hub: TestHub, machine: Machine, sources: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """An append to one config ignores a split of the same name in another config. Each source still verifies."""
    old, new, _ = sources
    other_files = write_files(tmp_path / "other", {f"o{i}.bin": random_bytes(500, 70 + i) for i in range(5)})
    machine.publish(other_files, "--config", "first", "--rows-per-shard", "1")
    machine.publish(old, "--rows-per-shard", "1")
    machine.publish(new, "--append", "--rows-per-shard", "1")
    job = Ledger.from_bytes(hub.read(REPO, ".brim/default/train.jsonl")).job
    assert job is not None
    assert [part["shards"] for part in job.facts["parts"]] == [{"train": 4}, {"train": 3}]
    assert job.facts["files"] == 7
    for source in (old, new, other_files):
        result = machine.run("verify", DEST, str(source), "--deep", "--json")
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout.splitlines()[-1])["files_compared"] == len(list(source.iterdir()))


def test_plan(sources: tuple[Path, Path, Path], tmp_path: Path) -> None:
    old, new, _ = sources
    brim("build", old, tmp_path / "out", *ROWS, "--quiet")
    assert (
        "has 4 rows in 2 shards; these are appended to them" in brim("plan", new, tmp_path / "out", "--append").stdout
    )
    assert (
        "cannot be used with --append"
        in brim("plan", new, tmp_path / "out", "--append", "--save", tmp_path / "p", check=2).stderr
    )


def test_select_appends(sources: tuple[Path, Path, Path], tmp_path: Path, many_files: Callable[..., Path]) -> None:
    """`brim select --append` adds rows of one dataset to another."""
    old, new, _ = sources
    for source in (old, new):
        brim("build", source, tmp_path / f"{source.name}-out", *ROWS, "--quiet")
    brim("select", tmp_path / "new-out", tmp_path / "old-out", "--append", "--quiet")
    assert rows(tmp_path / "old-out") == [f"f{i:03d}.bin" for i in range(7)]
    brim("verify", tmp_path / "old-out")

"""Saved plans that are built in parts by independent processes, and then finished."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import brim as library
from brim.errors import DestinationError, InputError, PlanMismatchError, SourceChangedError, SourceError
from brim.jobs.plan_storage import Part, PartReceipts, divide
from brim.jobs.publish_options import PublishOptions
from brim.jobs.saved_plans import SavedBuild, SavedSettings, job_facts
from brim.plans.plan import Plan
from brim.plans.saved_plan import load_plan, save_plan
from brim.plans.shard_bytes import splice_of
from brim.state.ledger import Ledger
from brim.storage.location import folder_location
from tests.conftest import brim, random_bytes, tree_digest, write_files
from tests.destinations import BucketDestination, FolderDestination, listing, run
from tests.destinations import start as start_at
from tests.hub import TestHub
from tests.publishing import DEST, REPO, Machine
from tests.s3 import S3Server

SCRIPTS = Path(__file__).parents[2] / "examples" / "slurm"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    contents = {f"{'train' if i < 8 else 'test'}/f{i:03d}.bin": random_bytes(20_000 + 37 * i, i) for i in range(12)}
    return write_files(tmp_path_factory.mktemp("batch") / "source", contents)


@pytest.fixture(scope="module")
def undisturbed(source: Path) -> dict[str, str]:
    """Return the files that one machine builds without interruption."""
    library.build(source, source.parent / "whole", rows_per_shard=1)
    return tree_digest(source.parent / "whole")


@pytest.fixture
def plan(source: Path, tmp_path: Path) -> Path:
    """Save a plan of twelve shards for the destination `out` next to it."""
    library.plan(source, tmp_path / "out", rows_per_shard=1).save(tmp_path / "a.plan")
    return tmp_path / "a.plan"


def start(plan: Path, *options: str, **more: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "brim", "build", "--plan", str(plan), "--quiet", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)  # type: ignore[call-overload,no-any-return]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition() and process.poll() is None:
        time.sleep(0.002)


def test_three_parts_at_once(source: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    """Parts of one plan in concurrent processes produce the same files as one machine."""
    path = tmp_path / "a.plan"
    brim("plan", source, tmp_path / "out", "--rows-per-shard", "1", "--save", path)
    assert path.stat().st_mode & 0o777 == 0o600
    running = [start(path, "--part", f"{i}/3") for i in (1, 2, 3)]
    assert [process.wait() for process in running] == [0, 0, 0], [process.communicate() for process in running]
    assert "unfinished" in (tmp_path / "out" / "README.md").read_text()  # an unfinished dataset does not load
    brim("build", "--plan", path, "--finish")
    assert tree_digest(tmp_path / "out") == undisturbed
    assert SavedBuild(path).finish().kept == 12  # a second finish changes nothing
    assert tree_digest(tmp_path / "out") == undisturbed
    assert SavedBuild(path).status.finished


def test_a_part_is_missing(plan: Path, tmp_path: Path) -> None:
    """Finishing without all parts publishes nothing, and the error contains the command for the missing part."""
    build = SavedBuild(plan)
    with pytest.raises(InputError, match="No part"):
        build.finish()
    assert not (tmp_path / "out").exists()
    for number in (1, 3):
        build.part(Part(number, 3))
    with pytest.raises(InputError, match=r"4 of 12 shards are missing.* part 2 of 3") as caught:
        build.finish()
    assert f"--plan {plan} --part 2/3" in caught.value.hint
    assert caught.value.facts == {"parts": [2], "count": 3}
    output = json.loads(brim("plan", "--plan", plan, "--json").stdout)["saved"]
    assert (output["done"], output["shards"], output["missing_parts"], output["finished"]) == (8, 12, [2], False)
    build.part(Part(2, 3))
    (tmp_path / "out" / "data" / "train-00000-of-00008.parquet").unlink()
    with pytest.raises(InputError, match=r"1 of them no longer.* part 1 of 3"):
        build.finish()
    assert "unfinished" in (tmp_path / "out" / "README.md").read_text()


def test_three_machines_publish_together(source: Path, tmp_path: Path) -> None:
    """With the Hub, parts upload objects without a commit, and the finish publishes all of them in one commit.

    Parts whose objects expired or disappeared are named by the finish, and their next run uploads them again.
    """
    with TestHub(tmp_path / "hub") as hub, TestHub(tmp_path / "other") as second:
        Machine(second, tmp_path / "alone").publish(source, "--rows-per-shard", "1")
        path = tmp_path / "a.plan"
        library.plan(source, DEST, rows_per_shard=1).save(path)
        machines = [Machine(hub, tmp_path / f"machine{i}") for i in range(4)]

        def parts(*numbers: int) -> None:
            running = [start(path, "--part", f"{n}/3", env=machines[n].environment) for n in numbers]
            assert [process.wait() for process in running] == [0] * len(numbers), running[0].communicate()

        parts(1, 2, 3)
        assert len(hub.history(REPO)) == 1
        ledgers = PartReceipts(path)
        for receipt in ledgers.ledger(Part(2, 3)).receipts.values():
            hub.repos.get("datasets", REPO).objects.discard(receipt.sha256)
        expired = ledgers.ledger(Part(3, 3))
        expired.add_all([replace(r, staged_at=r.staged_at - 13 * 3600) for r in expired.receipts.values()])
        expired.close()
        failed = machines[0].run("build", "--plan", str(path), "--finish")
        assert failed.returncode == 2, failed.stderr
        assert "part 3 of 3" in failed.stderr
        parts(3)
        failed = machines[0].run("build", "--plan", str(path), "--finish")
        assert failed.returncode == 2, failed.stderr
        assert "part 2 of 3" in failed.stderr
        assert len(hub.history(REPO)) == 1
        parts(2)
        result = machines[0].run("build", "--plan", str(path), "--finish")
        assert result.returncode == 0, result.stderr
        assert hub.files(REPO) == second.files(REPO)
        assert len(hub.history(REPO)) == 2


def test_a_part_killed(tmp_path: Path) -> None:
    """After kill -9, a part keeps shards with receipts and files of other parts, and builds only the rest."""
    contents = {f"f{i:03d}.bin": random_bytes(700_000, i) for i in range(60)}
    source = write_files(tmp_path / "source", contents)
    path, out = tmp_path / "a.plan", tmp_path / "out"
    library.plan(source, out, rows_per_shard=1).save(path)
    ledger = path.with_name("a.plan.parts") / "00001-of-00002" / "ledger.jsonl"
    process = start(path, "--part", "1/2", "--workers", "1")
    wait_for(lambda: ledger.exists() and len(Ledger(ledger.parent).receipts) > 1, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    before = {name: (out / name).stat().st_mtime_ns for name in Ledger(ledger.parent).receipts}
    assert 0 < len(before) < 30
    mine, other_items = (out / "data" / f".train-{number:05d}-of-00060.parquet.0a1b2c.tmp" for number in (29, 59))
    mine.touch()
    other_items.touch()
    result = SavedBuild(path).part(Part(1, 2))
    assert (result.kept, result.written) == (len(before), 30 - len(before))
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before
    assert (mine.exists(), other_items.exists()) == (False, True)
    assert SavedBuild(path).run().written == 30  # one machine builds the rest
    library.build(source, tmp_path / "whole", rows_per_shard=1)
    assert tree_digest(out) == tree_digest(tmp_path / "whole")


def test_one_at_a_time(plan: Path, source: Path) -> None:
    """A part is locked while it runs, which also blocks builds and finishes of the whole plan.

    The number of parts cannot change after the first part.
    """
    build = SavedBuild(plan)
    build.part(Part(1, 3))
    with PartReceipts(plan).part(Part(2, 3)):
        with pytest.raises(DestinationError, match="Part 2/3 is being done"):
            build.part(Part(2, 3))
        build.part(Part(3, 3))
        with pytest.raises(DestinationError, match="Parts of this plan are being done"):
            build.run()
    with pytest.raises(InputError, match=r"into 3 parts.*another division"):
        build.part(Part(1, 4))
    assert not (plan.parent / "a.plan.parts" / "00001-of-00004").exists()


def test_another_dataset_is_not_written_over(plan: Path, source: Path, tmp_path: Path) -> None:
    """A destination with another dataset, or receipts of another plan, is refused before anything is written."""
    SavedBuild(plan).part(Part(1, 2))
    second = library.plan(source, tmp_path / "out", rows_per_shard=2)
    with pytest.raises(InputError, match="receipts of another plan"):
        second.save(plan)
    SavedBuild(plan).run()
    second.save(tmp_path / "b.plan")
    before = tree_digest(tmp_path / "out")
    with pytest.raises(PlanMismatchError, match="has another dataset"):
        SavedBuild(tmp_path / "b.plan").part(Part(1, 2))
    assert tree_digest(tmp_path / "out") == before


def test_the_source_changed(plan: Path, source: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    """A file that differs from the plan is an error in its part. Copies in another folder match by path and size."""
    copy = tmp_path / "copy"
    shutil.copytree(source, copy, copy_function=shutil.copy)
    existing = SavedBuild(plan, SavedSettings(root=str(copy)))
    existing.part(Part(2, 2))
    (copy / "train" / "f000.bin").unlink()
    with pytest.raises(SourceError, match=r"f000\.bin.*is not in"):
        existing.part(Part(1, 2))
    (copy / "train" / "f000.bin").write_bytes(b"shorter")
    with pytest.raises(SourceChangedError, match=r"f000\.bin"):
        existing.part(Part(1, 2))
    SavedBuild(plan).part(Part(1, 2))
    SavedBuild(plan).finish()
    assert tree_digest(tmp_path / "out") == undisturbed


def test_planned_again(source: Path, tmp_path: Path) -> None:
    """After a new plan of the same sizes, receipts of shards with unchanged content are kept, even once finished.

    Until then, a modified file is an error in its part.
    """
    copy, path = tmp_path / "copy", tmp_path / "a.plan"
    shutil.copytree(source, copy)
    library.plan(copy, tmp_path / "out", rows_per_shard=1).save(path)
    SavedBuild(path).part(Part(1, 2))
    for name in ("train/f000.bin", "test/f011.bin"):
        os.utime(copy / name, (1, 1))
    with pytest.raises(SourceChangedError, match=r"f\d\d\d\.bin.*plan again"):
        SavedBuild(path).part(Part(2, 2))
    library.plan(copy, tmp_path / "out", rows_per_shard=1).save(path)
    build = SavedBuild(path)
    assert build.part(Part(1, 2)).kept == 6
    build.part(Part(2, 2))
    assert build.finish().shards == 12
    (copy / "train/f001.bin").write_bytes(random_bytes(20_037, 99))
    library.plan(copy, tmp_path / "out", rows_per_shard=1).save(path)
    build = SavedBuild(path)
    with pytest.raises(InputError, match="part 1 of 2"):
        build.finish()
    assert [build.part(Part(n, 2)).written for n in (1, 2)] == [1, 0]
    build.finish()
    library.build(copy, tmp_path / "whole", rows_per_shard=1)
    assert tree_digest(tmp_path / "out") == tree_digest(tmp_path / "whole")


def _cut(data: bytes) -> bytes:
    return data[:-100]


def _flipped(data: bytes) -> bytes:
    return data[:2000] + bytes([data[2000] ^ 1]) + data[2001:]


@pytest.mark.parametrize(
    ("harm", "arguments"),
    [
        (_cut, "cut off"),
        (_flipped, "damaged"),
        (lambda data: b"", "not a plan"),
        (lambda data: b"PAR1" + data, "not a plan"),
        (lambda data: data[:8] + b"\x09" + data[9:], "another version"),
    ],
)
def test_a_file_that_is_no_plan(plan: Path, harm: Callable[[bytes], bytes], arguments: str) -> None:
    """A damaged plan or another file is refused with an error that states the problem."""
    plan.write_bytes(harm(plan.read_bytes()))
    with pytest.raises(InputError, match=arguments):
        load_plan(plan)


def test_a_plan_of_another_version(plan: Path, tmp_path: Path) -> None:
    """A plan of a newer version is refused with the number of that version."""
    saved = load_plan(plan)
    save_plan(tmp_path / "new.plan", saved.plan, {**saved.job, "hub": {"unheard_of": True}}, {"brim": "9"})
    with pytest.raises(InputError, match="was made by brim 9"):
        SavedBuild(tmp_path / "new.plan")


def test_words_that_do_not_go_together(plan: Path, source: Path) -> None:
    """Options that are part of the plan cannot be repeated with --plan, and --part must be I/N."""
    for arguments, expected in {
        (str(source), "--plan", str(plan), "--shard-size", "1MB"): "--shard-size, SOURCE cannot be used with --plan",
        ("--plan", str(plan), "--part", "4/3"): "--part must be I/N",
        (str(source), "out", "--part", "1/3"): "can only be used with --plan",
    }.items():
        assert expected in brim("build", *arguments, check=2, cwd=plan.parent).stderr


def test_plans_come_back_as_they_were(tmp_path: Path) -> None:
    """A loaded plan has the same fingerprint and builds the same bytes.

    The table has lists, labels, nulls, bundled folders and features.
    """
    contents = {f"f{i}.bin": random_bytes(100 + i, i) for i in range(6)}
    files = write_files(tmp_path / "files", contents)
    rows = {
        "one": ["f0.bin", None, "f1.bin"],
        "many": [["f2.bin", "f3.bin"], [], ["f4.bin"]],
        "label": pa.array(["a", "b", "a"]).dictionary_encode(),
        "when": pa.array([1, None, 3], pa.timestamp("ms")),
    }
    table = library.table(pa.table(rows), files={"one": "image", "many": "file"}, root=files)
    meg = {f"sub-1/meg/sub-1_task-x_meg.ds/{name}": name.encode() for name in ("a.meg4", "b.res4", "hz.ds/c")}
    recording = write_files(
        tmp_path / "meg", {"dataset_description.json": b'{"Name": "m", "BIDSVersion": "1.8"}'} | meg
    )
    for number, item in enumerate([table, library.bids(recording)]):
        planned_job = library.plan(item, tmp_path / f"out{number}", num_shards=1)
        planned_job.save(tmp_path / f"{number}.plan")
        loaded = load_plan(tmp_path / f"{number}.plan").plan
        anew = Plan(loaded.table, loaded.shards, loaded.format, loaded.cut, loaded.why)
        assert loaded.fingerprint == anew.fingerprint == planned_job.plan.fingerprint
        assert list(loaded.shards) == list(planned_job.plan.shards)
        assert loaded.shard_mtimes(loaded.shards[0]) == planned_job.plan.shard_mtimes(planned_job.plan.shards[0])
        with (
            splice_of(planned_job.plan, planned_job.plan.shards[0]) as ours,
            splice_of(loaded, loaded.shards[0]) as theirs,
        ):
            assert ours.sha256() == theirs.sha256()
        assert {b.names for b in loaded.table.files.bundles.values()} == {
            b.names for b in planned_job.plan.table.files.bundles.values()
        }


def test_no_token_in_a_plan(tmp_path: Path) -> None:
    """A plan contains the publishing options but no credentials."""
    report = job_facts(folder_location(tmp_path), PublishOptions(config="one", token="hf_secret"), update=True)
    assert "hf_secret" not in json.dumps(report)
    assert PublishOptions.from_record(report["hub"]) == PublishOptions(config="one")


@pytest.mark.parametrize("count", [1, 3, 12, 40])
def test_parts_share_the_bytes(plan: Path, count: int) -> None:
    """Every shard belongs to exactly one part, and the parts have about the same size."""
    shards = SavedBuild(plan).plan.shards
    edges = divide(shards, count)
    assert (edges[0], edges[-1], len(edges)) == (0, len(shards), count + 1)
    assert all(a <= b for a, b in itertools.pairwise(edges))
    weights = [sum(s.file_bytes for s in shards[a:b]) for a, b in itertools.pairwise(edges)]
    assert max(weights) <= sum(weights) / count + max(s.file_bytes for s in shards)


def test_the_slurm_scripts(tmp_path: Path) -> None:
    """The array script forwards Slurm's signal, requeues a stopped task, and exits with 0 when the part is complete.

    The second script finishes the plan. `scontrol` is a stub here: `make test-slurm` uses a real one.
    """
    source = write_files(tmp_path / "source", {f"f{i:03d}.bin": random_bytes(800_000, i) for i in range(50)})
    path = tmp_path / "a.plan"
    library.plan(source, tmp_path / "out", rows_per_shard=1).save(path)
    stubs = {
        "scontrol": f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n',
        "brim": f'#!/bin/sh\nexec {sys.executable} -m brim "$@"\n',
    }
    (tmp_path / "bin").mkdir()
    for name, text in stubs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {"SLURM_ARRAY_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "72", "PARTS": "1"}
    environment = {**os.environ, **slurm, "PLAN": str(path), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def script(name: str, *options: str) -> subprocess.Popen[str]:
        command = ["bash", str(SCRIPTS / f"brim-{name}.sbatch"), "--quiet", *options]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    folder = path.with_name("a.plan.parts") / "00001-of-00001"
    task = script("array", "--workers", "1")
    wait_for(lambda: folder.exists() and bool(Ledger(folder).receipts), task)
    task.send_signal(signal.SIGUSR1)
    _, output = task.communicate(timeout=60)
    assert task.returncode == 6, output
    assert "SIGUSR1" in output
    assert (tmp_path / "asked").read_text() == "requeue 71_1\n"
    remaining = len(Ledger(folder).receipts)
    assert 0 < remaining < 50
    task = script("array")
    assert task.wait(60) == 0, task.communicate()
    finishing = script("finish")
    assert finishing.wait(60) == 0, finishing.communicate()
    assert (tmp_path / "asked").read_text() == "requeue 71_1\n"
    assert len(list((tmp_path / "out" / "data").iterdir())) == 50


def test_which_parts_are_missing(plan: Path, tmp_path: Path) -> None:
    """`brim plan --missing N` prints the parts that are left, in the format of job arrays."""

    def missing(count: int, check: int = 0) -> str:
        result = brim("plan", "--plan", plan, "--missing", str(count), check=check)
        return result.stderr if check else result.stdout.strip()

    assert missing(5) == "1-5"
    for number in (2, 4):
        SavedBuild(plan).part(Part(number, 5))
    assert missing(5) == "1,3,5"
    assert "into 5 parts, not into 6" in missing(6, check=2)
    assert "--plan PLAN" in brim("plan", plan.parent, "--missing", "5", check=2).stderr
    SavedBuild(plan).run()
    assert missing(5) == ""


@pytest.mark.parametrize("name", ["brim-job.yaml", "brim-finish.yaml"])
def test_the_kubernetes_example(name: str) -> None:
    """Every field of the Kubernetes example is valid according to the schema of Kubernetes."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate: make test-slurm")
    import yaml

    text = (SCRIPTS.parent / "kubernetes" / name).read_text()
    kubernetes_validate.validate(yaml.safe_load(text), "1.33", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(yaml.safe_load(text.replace("restartPolicy", "restart")), "1.33", strict=True)


def test_plan_receipts_and_shards_in_a_bucket(s3: S3Server, s3_prefix: str, tmp_path: Path) -> None:
    """Three machines that share only a bucket build one plan, even if one of them is killed and restarted."""
    source = write_files(tmp_path / "source", {f"{n}.bin": random_bytes(300_000, n) for n in range(6)})
    destination = BucketDestination(s3, tmp_path / "first", f"{s3_prefix}out")
    plan = f"s3://private/{s3_prefix}job.plan"
    run(destination, "plan", source, destination.address, "--rows-per-shard", "1", "--save", plan)
    refused = run(destination, "build", "--plan", plan, "--finish", check=2)
    assert "No part" in refused.stderr
    machines = [BucketDestination(s3, tmp_path / f"machine{n}", f"{s3_prefix}out") for n in (1, 2, 3)]
    killed = start_at(machines[0], "build", "--plan", plan, "--part", "1/3", "--quiet")
    time.sleep(1.0)
    killed.kill()
    killed.wait()
    parts = [
        start_at(machine, "build", "--plan", plan, "--part", f"{number}/3", "--quiet")
        for number, machine in enumerate(machines, start=1)
    ]
    assert [process.wait(60) for process in parts] == [0, 0, 0]
    finished = run(destination, "build", "--plan", plan, "--finish", "--json")
    assert json.loads(finished.stdout.splitlines()[-1])["kept"] == 6
    whole = FolderDestination(tmp_path / "whole")
    run(whole, "build", source, whole.address, "--rows-per-shard", "1", "--quiet")
    assert listing(destination) == listing(whole)
    run(destination, "verify", destination.address, source, "--deep", "--quiet")

"""Saved plans of map, tokenize and embed whose units are computed in parts by independent processes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import brim as library
from brim.errors import InputError
from tests.conftest import tree_digest, write_files
from tests.destinations import BucketDestination
from tests.forked import brim
from tests.s3 import S3Server

UNITS = ("--unit-size", "20KB")
VERBS = {
    "map": ("map", "rows.jsonl", ("--fn", "steps.py:work", "--on-error", "quarantine"), "out"),
    "tokenize": (
        "tokenize",
        "rows.jsonl",
        ("--tokenizer", "t.json", "--pack", "32", "--no-eos", "--shuffle", "7"),
        "out",
    ),
    "embed": (
        "embed",
        "rows.jsonl",
        ("--model", "embed_models:hashing", "--column", "text"),
        "v.npy",
    ),
}
STEPS = b"""
import time

def work(row):
    time.sleep(0.0005)
    if row["number"] == 77:
        raise ValueError("a row that fails")
    return {"length": len(row["text"]), "half": None if row["number"] < 500 else row["number"] / 2}
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with rows for about six units, a function and a tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("work")
    rows = [{"number": n, "text": f"row {n} of many " * (1 + n % 7)} for n in range(1200)]
    write_files(folder, {"rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(), "steps.py": STEPS})
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [row["text"] for row in rows], tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    tokenizer.save(str(folder / "t.json"))
    shutil.copy(Path(__file__).parents[1] / "embed_models.py", folder)
    return folder


def content(path: Path) -> dict[str, str]:
    """Return the files of the result without its ledgers."""
    if path.is_file():
        return {"file": tree_digest(path.parent)[path.name]}
    return {name: digest for name, digest in tree_digest(path).items() if not name.startswith(".brim")}


@pytest.mark.long
@pytest.mark.parametrize("verb", VERBS)
def test_parts_make_what_one_machine_makes(verb: str, work: Path, tmp_path: Path) -> None:
    """Three parts produce the same files as one machine, after one was killed and restarted.

    Finishing fails while a part is missing.
    """
    name, source, arguments, target = VERBS[verb]
    brim(name, source, tmp_path / "one" / target, *arguments, *UNITS, "--quiet", cwd=work)
    plan, existing = tmp_path / "a.plan", tmp_path / "parts" / target
    saved = brim(name, source, existing, *arguments, *UNITS, "--save", plan, "--json", cwd=work)
    assert json.loads(saved.stdout.splitlines()[-1])["units"] >= 5
    assert not existing.exists()
    assert plan.stat().st_mode & 0o777 == 0o600
    started_at = subprocess.Popen(
        [sys.executable, "-m", "brim", name, "--plan", str(plan), "--part", "1/3", "--quiet"],
        cwd=work,
        stderr=subprocess.DEVNULL,
    )
    while not list(tmp_path.glob("a.plan.parts/**/ledger.jsonl")):  # wait until it has started
        assert started_at.poll() is None
        time.sleep(0.01)
    started_at.send_signal(signal.SIGKILL)
    started_at.wait()
    for part in ("1/3", "3/3"):
        brim(name, "--plan", plan, "--part", part, "--quiet", cwd=work)
    refused = brim(name, "--plan", plan, "--finish", check=2, cwd=work)
    assert "part 2 of 3" in refused.stderr
    assert not existing.exists()
    elsewhere = tmp_path if verb == "map" else work  # a function in a file is found from any folder
    brim(name, "--plan", plan, "--part", "2/3", "--quiet", cwd=elsewhere)
    repeated = brim(name, "--plan", plan, "--part", "2/3", "--json", cwd=work)
    assert json.loads(repeated.stdout.splitlines()[-1])["written"] == 0
    parsed = json.loads(brim(name, "--plan", plan, "--finish", "--json", cwd=work).stdout.splitlines()[-1])
    assert parsed["computed"] == 0
    assert content(existing) == content(tmp_path / "one" / target)
    if verb == "map":
        assert parsed["bad_rows"] == 1
        remaining = [
            path for folder in (existing, tmp_path / "one" / target) for path in folder.rglob("quarantine.parquet")
        ]
        assert len({path.read_bytes() for path in remaining}) == 1
        assert len(remaining) == 2


@pytest.mark.long
def test_parts_in_a_bucket(s3: S3Server, s3_prefix: str, work: Path, tmp_path: Path) -> None:
    """With plan and units in a bucket, each part can run on another machine with a separate state folder."""
    address = f"s3://private/{s3_prefix}"
    machines = [BucketDestination(s3, tmp_path / f"machine{n}", s3_prefix.rstrip("/")) for n in range(3)]
    plan, arguments = f"{address}a.plan", ("--fn", "steps.py:work", "--on-error", "skip")
    brim(
        "map", "rows.jsonl", f"{address}out", *arguments, *UNITS, "--save", plan, cwd=work, env=machines[0].environment
    )
    for number in (0, 1):
        part = ("--plan", plan, "--part", f"{number + 1}/2")
        brim("map", *part, "--quiet", cwd=work, env=machines[number].environment)
    elsewhere = brim("map", "--plan", plan, "--part", "2/2", "--json", cwd=work, env=machines[2].environment)
    assert json.loads(elsewhere.stdout.splitlines()[-1])["written"] == 0
    brim("map", "--plan", plan, "--finish", "--quiet", cwd=work, env=machines[2].environment)
    brim("map", "rows.jsonl", tmp_path / "one", *arguments, *UNITS, "--quiet", cwd=work)
    existing = {name: data for name, data in machines[0].content().items() if name.startswith("out/data/")}
    assert {Path(name).name: data for name, data in existing.items()} == {
        path.name: path.read_bytes() for path in (tmp_path / "one" / "data").iterdir()
    }


@pytest.mark.long
@pytest.mark.parametrize("harm", ["gone", "another"])
def test_a_unit_in_a_bucket_is_not_what_was_computed(
    harm: str, s3: S3Server, s3_prefix: str, work: Path, tmp_path: Path
) -> None:
    """If a stored unit is damaged or missing, the finish names its part, which then recomputes only that unit."""
    destination = BucketDestination(s3, tmp_path, f"{s3_prefix}out")
    verb, source, args, _ = VERBS["map"]
    plan = f"s3://private/{s3_prefix}job.plan"

    def run(*arguments: str | Path, check: int = 0) -> subprocess.CompletedProcess[str]:
        return brim(*arguments, cwd=work, env=destination.environment, check=check)

    run(verb, source, tmp_path / "out", *args, *UNITS, "--save", plan)
    for part in ("1/2", "2/2"):
        run(verb, "--plan", plan, "--part", part, "--quiet")
    key = f"{s3_prefix}job.plan.parts/00002-of-00002/00000001.parquet"
    unit = bytearray(s3.read("private", key))
    unit[len(unit) // 3] ^= 1
    if harm == "gone":
        s3.delete("private", key)
    else:
        s3.write("private", key, bytes(unit))
    refused = run(verb, "--plan", plan, "--finish", check=2)
    assert f"'s3://private/{key}' is missing or differs from what part 2/2 computed." in refused.stderr
    assert "Run that part again." in refused.stderr
    result = run(verb, "--plan", plan, "--part", "2/2", "--json")
    assert json.loads(result.stdout.splitlines()[-1])["written"] == 1
    run(verb, "--plan", plan, "--finish", "--quiet")
    run("verify", tmp_path / "out", "--deep")


def test_in_python(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved plan can be opened, computed and queried for progress from Python."""
    monkeypatch.chdir(work)
    library.save_job(
        tmp_path / "a.plan", "map", "rows.jsonl", "steps.py:work", tmp_path / "out", on_error="skip", unit_size="20KB"
    )
    saved = library.open_job(tmp_path / "a.plan", memory="1GB")
    assert saved.status.parts is None
    saved.part("2/2")
    assert saved.status.missing_parts == [1]
    output = brim("plan", "--plan", tmp_path / "a.plan").stdout
    assert "1 of 2 done" in output
    assert "brim map --plan" in output
    assert brim("plan", "--plan", tmp_path / "a.plan", "--missing", "2").stdout == "1\n"
    with pytest.raises(InputError, match="part 1 of 2"):
        saved.finish()
    assert saved.run().rows == 1199
    assert saved.status.finished
    with pytest.raises(InputError, match="open_job"):
        library.open_plan(tmp_path / "a.plan")


def test_what_has_no_parts(work: Path, tmp_path: Path) -> None:
    """Plans with invalid input are refused: compressed text, options that the plan fixes, or a changed job.

    Compressed text can only be read from its start, so it cannot be divided into parts.
    """
    import gzip

    write_files(tmp_path, {"rows.jsonl.gz": gzip.compress((work / "rows.jsonl").read_bytes())})
    write_files(tmp_path, {"steps.py": STEPS, "rows.jsonl": (work / "rows.jsonl").read_bytes()})
    arguments = ("--fn", "steps.py:work", "--on-error", "skip")
    refused = brim("map", "rows.jsonl.gz", "out", *arguments, "--save", "a.plan", check=2, cwd=tmp_path)
    assert "only be read from its start" in refused.stderr
    brim("map", "rows.jsonl", "out", *arguments, "--save", "a.plan", cwd=tmp_path)
    for extra, message in (
        (("--batched",), "--batched cannot be used with --plan"),
        (("--part", "4/3"), "--part must be I/N"),
        (("--part", "1/2", "--finish"), "cannot be used with --finish"),
    ):
        assert message in brim("map", "--plan", "a.plan", *extra, check=2, cwd=tmp_path).stderr
    assert "is a plan of brim map" in brim("embed", "--plan", "a.plan", check=2, cwd=tmp_path).stderr
    assert "can only be used with --plan" in brim("map", "--part", "1/2", check=2, cwd=tmp_path).stderr
    write_files(tmp_path, {"steps.py": STEPS.replace(b"/ 2", b"/ 3")})
    assert "differs from the planned one" in brim("map", "--plan", "a.plan", "--finish", check=2, cwd=tmp_path).stderr
    assert not (tmp_path / "out").exists()


def test_a_function_that_fails_in_a_part(work: Path, tmp_path: Path) -> None:
    """The error of a failing function suggests saving the plan again, because --keep-done does not apply to plans."""
    plan, late = tmp_path / "a.plan", tmp_path / "late.py"
    late.write_text("def work(row):\n    return {'share': 1 / (row['number'] - 1100)}\n")
    brim("map", "rows.jsonl", tmp_path / "out", "--fn", f"{late}:work", *UNITS, "--save", plan, "--quiet", cwd=work)
    failed = brim("map", "--plan", plan, "--part", "1/1", cwd=work, check=2)
    assert "ZeroDivisionError" in failed.stderr
    assert "save the plan again" in failed.stderr
    assert "--keep-done" not in failed.stderr


@pytest.mark.parametrize("verb", ["map", "embed"])
def test_finish_refuses_a_local_unit_of_the_same_size_and_other_content(verb: str, tmp_path: Path) -> None:
    """The finish names the part of a changed unit, and that part recomputes only this unit."""
    lines = [json.dumps({"number": n, "text": f"row {n}"}) + "\n" for n in range(60)]
    step = b"def work(row):\n    return {'double': row['number'] * 2}\n"
    write_files(tmp_path, {"rows.jsonl": "".join(lines).encode(), "steps.py": step})
    shutil.copy(Path(__file__).parents[1] / "embed_models.py", tmp_path)
    arguments = ("--fn", "steps.py:work") if verb == "map" else ("--model", "embed_models:hashing", "--column", "text")
    target = "out" if verb == "map" else "v.npy"
    units = ("--unit-size", "1KB")
    brim(verb, "rows.jsonl", target, *arguments, *units, "--save", "a.plan", cwd=tmp_path)
    for part in ("1/2", "2/2"):
        brim(verb, "--plan", "a.plan", "--part", part, "--quiet", cwd=tmp_path)
    files = [path for path in sorted((tmp_path / "a.plan.parts").glob("*/*")) if path.stem.isdecimal()]
    damaged = files[-1]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(bytes(data))
    refused = brim(verb, "--plan", "a.plan", "--finish", cwd=tmp_path, check=2)
    part = damaged.parent.name.lstrip("0").partition("-")[0]
    assert f"differs from what part {part}/2 computed" in refused.stderr
    assert not (tmp_path / target / "data").exists()
    repeated = brim(verb, "--plan", "a.plan", "--part", f"{part}/2", "--json", cwd=tmp_path)
    assert json.loads(repeated.stdout.splitlines()[-1])["written"] == 1
    brim(verb, "--plan", "a.plan", "--finish", "--quiet", cwd=tmp_path)
    brim(verb, "rows.jsonl", f"one/{target}", *arguments, *units, "--quiet", cwd=tmp_path)
    assert content(tmp_path / target) == content(tmp_path / "one" / target)


def test_plans_of_earlier_versions_open(work: Path, tmp_path: Path) -> None:
    """Plans store the first names of renamed options, and a plan of an earlier version is the same job."""
    write_files(tmp_path, {"steps.py": STEPS, "rows.jsonl": (work / "rows.jsonl").read_bytes()})
    arguments = ("--fn", "steps.py:work", "--on-error", "skip")
    brim("map", "rows.jsonl", "out", *arguments, "--save", "a.plan", cwd=tmp_path)
    plan = json.loads((tmp_path / "a.plan").read_text())
    assert {"direct", "via", "from_split", "on_error"} <= plan["words"]["given"].keys()
    assert not {"state", "state_dir", "memory", "commit_as_you_go"} & plan["words"]["given"].keys()
    plan["words"]["options"] |= {"format_type": None, "format_columns": None, "format_kwargs": {}, "fn_kwargs": {}}
    plan["words"]["options"]["side_effects"] = False
    (tmp_path / "a.plan").write_text(json.dumps(plan))
    brim("map", "--plan", "a.plan", "--part", "1/1", cwd=tmp_path)
    result = brim("map", "--plan", "a.plan", "--finish", "--json", cwd=tmp_path)
    assert json.loads(result.stdout.splitlines()[-1])["computed"] == 0


def test_a_plan_of_a_build_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.bin").write_bytes(b"a")
    brim("plan", "files", "out", "--save", "b.plan", cwd=tmp_path)
    refused = brim("map", "--plan", "b.plan", check=2, cwd=tmp_path).stderr
    assert "is a plan of brim build" in refused
    assert "brim build --plan" in refused

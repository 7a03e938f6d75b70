"""Jobs of earlier versions resume with the same names and fingerprints, without repeated work, to the same bytes.

For each case, tests/goldens holds a finished destination, one that was killed with SIGKILL, and their sources.
Computed jobs of format version 1 are refused, and their finished results still load and verify. The bytes of Parquet
and Arrow files depend on the release of pyarrow: with a release other than that of the goldens, rows are compared
instead. The fingerprint of a function depends on the version of Python (its bytecode): with another version, cases
with a user function are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brim.memory.meter import boot_id
from brim.state.record_log import record_line, records_of
from tests.conftest import started as interpreted
from tests.forked import brim
from tests.goldens import cases, hub_state
from tests.goldens.cases import CASES, CURRENT, Case
from tests.hub import TestHub
from tests.publishing import DEST, REPO, Machine

GOLDENS = {version: json.loads(cases.facts_path(version).read_text()) for version in (1, cases.VERSION)}
HUB = GOLDENS[1]["hub"]


def is_same(version: int, library: str) -> bool:
    """Return whether the goldens of a version were made with the installed release of a library, or of Python."""
    same: bool = GOLDENS[version]["versions"][library] == cases.versions()[library]
    return same


IN_BYTES = ("size", "sha256")  # fields of a receipt that depend on the bytes of its file
BY_CODE = ("map", "cached.py")  # identified by the bytecode of a function
NEEDS = {"tokenize": "tokenizers", "cached.py": "datasets", "tensors.py": "safetensors"}
COMPUTED = [case for case in CASES if case.verb in ("map", "tokenize", "embed")]
KILLED = [(case, name) for case in CURRENT for name in case.kills]
every_case = pytest.mark.parametrize("case", CURRENT, ids=lambda case: case.name)


@pytest.fixture
def work(case: Case, tmp_path: Path) -> Path:
    """Create the sources of the goldens in another folder than the original one."""
    if case.verb in BY_CODE and not is_same(case.version, "python"):
        made_by = GOLDENS[case.version]["versions"]["python"]
        pytest.skip(f"goldens of functions are not compared: they are of Python {made_by}")
    if case.verb in NEEDS:
        pytest.importorskip(NEEDS[case.verb])
    return cases.inputs(tmp_path / "elsewhere")


class Run:
    """One run of a case: its final report, and the ids of the rows with which its function was called."""

    def __init__(self, case: Case, work: Path) -> None:
        (work / "out").mkdir(exist_ok=True)
        calls = work / "calls"
        calls.unlink(missing_ok=True)
        environment = {**os.environ, "GOLDEN_CALLS": str(calls), "PYTHONDONTWRITEBYTECODE": "1"}
        if case.script:
            command = [sys.executable, *case.words]
            result = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=120)
            assert result.returncode == 0, result.stderr
        else:
            # The module of a model is imported from the working directory of Python.
            result = (interpreted if case.verb == "embed" else brim)(*case.words, cwd=work, env=environment)
        self.said = json.loads(result.stdout.splitlines()[-1])
        self.calls = sorted(map(int, calls.read_text().split())) if calls.exists() else []


def golden(case: Case) -> dict[str, Any]:
    actual: dict[str, Any] = GOLDENS[case.version]["cases"][case.name]
    assert tuple(actual["words"]) == case.words, "the case is not the one that the golden was made by"
    return actual


def left_by(case: Case, name: str, work: Path) -> None:
    """Restore the output of the old version: `finished`, or one of the kills."""
    cases.unpack(case.archive, work / "left")
    (work / "left" / name).rename(work / "out")
    for path in (work / "out").rglob("ledger.jsonl"):
        _move_to_this_boot(path)


def _move_to_this_boot(path: Path) -> None:
    """Write the current boot id into receipts that are valid for one boot only.

    The job then looks like one that was killed during this boot.
    """
    with path.open("rb") as file:
        records = list(records_of(file))
    if any("boot" in record for record in records):
        moved_path = [{**record, **({"boot": boot_id()} if "boot" in record else {})} for record in records]
        path.write_bytes(b"".join(map(record_line, moved_path)))


def comparable(report: dict[str, Any], version: int) -> dict[str, Any]:
    """Return the fields that must be equal: all, or only those that do not depend on the release of pyarrow."""
    if is_same(version, "pyarrow"):
        return report
    files = {name: None if name in report["rows"] else digest for name, digest in report["files"].items()}
    lines = {
        name: [{key: value for key, value in record.items() if key not in IN_BYTES} for record in records]
        for name, records in report["ledgers"].items()
    }
    return {"files": files, "rows": report["rows"], "ledgers": lines}


def assert_is_golden(case: Case, out: Path) -> None:
    expected, actual = (comparable(message, case.version) for message in (golden(case)["finished"], cases.told(out)))
    assert sorted(actual["files"]) == sorted(expected["files"])
    assert actual["ledgers"] == expected["ledgers"]
    assert actual["rows"] == expected["rows"]
    assert actual["files"] == expected["files"]


@every_case
def test_the_same_job(case: Case, work: Path) -> None:
    """A rerun of a job gives the same facts, fingerprint, receipts, names and bytes."""
    Run(case, work)
    assert_is_golden(case, work / "out")


@every_case
def test_finished(case: Case, work: Path) -> None:
    """A rerun of a finished job changes nothing, calls no function and reports that."""
    left_by(case, "finished", work)
    run = Run(case, work)
    assert run.calls == []
    # Byte for byte with every release of pyarrow, because nothing has been written.
    assert cases.told(work / "out")["files"] == golden(case)["finished"]["files"]
    assert cases.told(work / "out")["ledgers"] == golden(case)["finished"]["ledgers"]
    if case.verb == "tensors.py":
        assert run.said == 300
    elif not case.script:
        assert (run.said["event"], run.said["written"]) == ("done", 0)
        assert run.said["kept"] == run.said["shards"] > 0
        assert run.said.get("computed", 0) == 0


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in (*CASES, *(case for case in CURRENT if case.version > 1))
        if not case.script and case.words[2] == "out"
    ],
    ids=lambda case: f"{case.name}-{case.version}",
)
def test_verified(case: Case, work: Path) -> None:
    """`verify` accepts a finished dataset, and a build also with its source; `unpack` restores the files of a build."""
    left_by(case, "finished", work)
    if case.verb != "build":
        brim("verify", "out", "--quiet", cwd=work)
        return
    brim("verify", "out", *([case.words[1]] if "--recipe" not in case.words else []), "--quiet", cwd=work)
    brim("unpack", "out", "back", "--quiet", cwd=work)
    files = {
        path.relative_to(work / "back"): path.read_bytes() for path in (work / "back").rglob("*") if path.is_file()
    }
    roots = (work, work / case.words[1])
    assert files
    for name, content in files.items():
        assert content in [(root / name).read_bytes() for root in roots if (root / name).is_file()], name


@pytest.mark.parametrize(("case", "kind"), KILLED, ids=lambda value: getattr(value, "name", value))
def test_killed(case: Case, kind: str, work: Path) -> None:
    """A killed job resumes to the same result and does not repeat finished work."""
    left_by(case, kind, work)
    before = golden(case)["killed"][kind]
    if "ledger" in before:
        assert cases.receipts(work, before["ledger"]) == before["done"]
    stamps, rows = _stamps(work / "out"), _rows_done(work, before.get("ledger", "none"))
    run = Run(case, work)
    assert_is_golden(case, work / "out")
    if kind == "rows":
        assert 0 < run.said <= before["rows"]
    elif kind == "units":
        assert_units_were_kept(case, run, before["done"], rows)
    else:
        assert run.calls == []
        assert run.said["kept"] == len(before["done"])
        assert run.said["written"] == run.said["shards"] - run.said["kept"]
        assert run.said.get("computed", 0) == 0
        after = _stamps(work / "out")
        assert {name: after[name] for name in before["done"]} == {name: stamps[name] for name in before["done"]}


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, name) for case in COMPUTED for name in ("finished", *case.kills)],
    ids=lambda value: getattr(value, "name", value),
)
def test_computed_job_of_version_1_is_refused_and_fresh_replaces_it(case: Case, kind: str, work: Path) -> None:
    left_by(case, kind, work)
    before = cases.told(work / "out")
    run = interpreted if case.verb == "embed" else brim
    environment = {**os.environ, "GOLDEN_CALLS": os.devnull, "PYTHONDONTWRITEBYTECODE": "1"}
    refused = run(*case.words, check=2, cwd=work, env=environment)
    assert "begun by an earlier version of brim" in refused.stdout + refused.stderr
    assert "--fresh" in refused.stdout + refused.stderr
    assert cases.told(work / "out") == before
    run(*case.words, "--fresh", cwd=work, env=environment)


def assert_units_were_kept(case: Case, run: Run, result: list[str], rows: int) -> None:
    """Check that finished units were not computed again; `rows` is the number of their rows."""
    if not case.script:
        assert run.said["units"] - run.said["computed"] == len(result)
    if case.verb in ("map", "embed", "cached.py"):
        assert run.calls[0] >= rows > 0
        assert run.calls[-1] == 239


def _rows_done(work: Path, pattern: str) -> int:
    actual = [record for path in work.glob(pattern) for record in cases.records(path)]
    return sum(record["rows"] for record in actual if record["type"] == "shard")


def _stamps(out: Path) -> dict[str, int]:
    """Return the modification time of each file."""
    return {path.relative_to(out).as_posix(): path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}


def hub_as_left(hub: TestHub, tmp_path: Path, name: str) -> tuple[Machine, Path, Path]:
    """Restore a machine and a Hub as the old version left them; return them with the source and the stored state."""
    machine = Machine(hub, tmp_path / "machine")
    remaining = cases.unpack(cases.HOME / "hub.tar.xz", tmp_path / "left") / name
    hub_state.put_back(hub, machine, remaining)
    return machine, cases.inputs(tmp_path / "elsewhere") / "files", remaining


def published(hub: TestHub) -> dict[str, str]:
    return {name: sha256 for name, (_, sha256) in hub.files(REPO).items() if not name.startswith(".brim/")}


def manifests(hub: TestHub) -> dict[str, Any]:
    names = [name for name in hub.files(REPO) if name.startswith(".brim/")]
    return {name: list(cases.records(hub.read(REPO, name))) for name in names}


def assert_is_published(hub: TestHub, remaining: Path) -> None:
    """Check names, receipts, card and, with the same pyarrow, bytes against the golden publication."""
    whole = remaining.parent / "finished" / "main"
    expected = HUB["finished"]["main"]
    assert sorted(hub.files(REPO)) == sorted(expected)
    if is_same(1, "pyarrow"):
        assert published(hub) == {name: sha256 for name, sha256 in expected.items() if not name.startswith(".brim/")}
        for name, match in manifests(hub).items():
            # Records of type `listing` were added later, and earlier versions ignore them.
            assert [record for record in match if record["type"] != "listing"] == list(cases.records(whole / name))


def test_published(tmp_path: Path) -> None:
    """A finished publication is recognized with and without the local ledger: nothing is uploaded or committed."""
    with TestHub(tmp_path / "hub") as hub:
        machine, source, remaining = hub_as_left(hub, tmp_path, "finished")
        head = hub.head(REPO)
        for item in (machine, Machine(hub, tmp_path / "another")):
            output = json.loads(item.publish(source, *hub_state.ARGUMENTS).stdout.splitlines()[-1])
            assert (output["written"], output["kept"], output["commits"]) == (0, 12, 0)
        assert (hub.head(REPO), hub.counters.puts) == (head, 0)
        assert_is_published(hub, remaining)
        brim("verify", DEST, source, "--quiet", env=machine.environment)
        brim("unpack", DEST, tmp_path / "back", "--quiet", env=machine.environment)
        names = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
        assert {n: (source / n).read_bytes() for n in names} == {n: (tmp_path / "back" / n).read_bytes() for n in names}


def test_killed_while_publishing(tmp_path: Path) -> None:
    """A killed publication resumes to the same result without uploading existing files again."""
    with TestHub(tmp_path / "hub") as hub:
        machine, source, remaining = hub_as_left(hub, tmp_path, "killed")
        objects = HUB["killed"]["objects"]
        machine.publish(source, *hub_state.ARGUMENTS)
        assert [ledger.name for ledger in machine.ledgers] == [hub_state.state_name(hub)]
        assert not set(objects) & hub.counters.bytes_by_oid.keys()
        assert hub.counters.puts == 12 - len(objects)
        assert_is_published(hub, remaining)


def test_saved_plan(tmp_path: Path) -> None:
    """A saved plan with one finished part is read; the other parts and --finish give the same publication."""
    with TestHub(tmp_path / "hub") as hub:
        machine, source, remaining = hub_as_left(hub, tmp_path, "plan")
        plan, objects = remaining / "a.plan", HUB["plan"]["objects"]
        for part in ("1/3", "2/3", "3/3"):
            brim("build", "--plan", plan, "--root", source, "--part", part, "--quiet", env=machine.environment)
            if part == "1/3":
                assert hub.counters.puts == 0
        brim("build", "--plan", plan, "--root", source, "--finish", "--quiet", env=machine.environment)
        assert hub.counters.puts == 12 - len(objects) > 0
        assert_is_published(hub, remaining)

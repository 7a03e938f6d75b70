"""Make the goldens of a format version: run every case completely and with kills, and keep the files.

    PYTHONPATH=$PWD/src python -m tests.goldens.make VERSION

Version 1 is that of brim 0.1.0, which wrote the goldens in this folder; later versions have a folder each, with the
changed cases. Goldens that later code makes again would not test compatibility, so existing ones are not replaced: a
deliberate format change gets a new version. Kills are real: SIGKILL to the whole session of a process when its
ledger has the given number of receipts; a run that finishes too early is repeated. The folder of a version contains:

    inputs.tar.xz     the sources, with their dates
    CASE.tar.xz       `finished`, and a folder per kill with its `out`
    goldens.json      facts, fingerprints, names, receipts and SHA-256 of all files, for comparison and for readers
    hub.tar.xz        version 1: the state of the test Hub and a machine after a publish, and after a killed one
"""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import brim
from tests.conftest import started as brim_command
from tests.generators import bids
from tests.goldens import cases, hub_state
from tests.goldens.cases import CASES, CURRENT, Case
from tests.hub import TestHub
from tests.publishing import DEST, REPO, Machine

DATE_NS = 1_700_000_000_123_456_789
TRIES = 40
SETUP = "setup.pickle"  # the arguments that a run passes to its workers


def make_inputs(folder: Path) -> None:
    draw = random.Random("goldens")
    contents = {f"files/{'ab'[i % 2]}/f{i:02d}.bin": draw.randbytes(300 + 41 * i) for i in range(12)}
    contents |= {f"bids/{name}": content for name, content in bids.sessions().items()}
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    with open(folder / "table.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["scan", "age", "part"])
        rows.writerows([f"files/{'ab'[i % 2]}/f{i:02d}.bin", 20 + i, "test" if i > 8 else "train"] for i in range(12))
    vocabulary = [f"w{n}" for n in range(60)]
    texts = [{"id": n, "text": f"row {n} " + " ".join(draw.choices(vocabulary, k=n % 9))} for n in range(240)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    _save_tokenizer(folder / "tokenizer.json", vocabulary)
    _save_dataset(folder / "saved", texts)
    _brim(folder, "plan", "bids", "--save-recipe", "columns.toml")
    for number, path in enumerate(sorted(folder.rglob("*"))):
        os.utime(path, ns=(0, DATE_NS + number * 1_000_000_007))


def make_new_inputs(folder: Path) -> None:
    """Write the sources of the cases that version 2 changed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"id": range(40), "part": [number % 2 for number in range(40)]})
    pq.write_to_dataset(table, folder / "hive", partition_cols=["part"], basename_template="{i}.parquet")
    lines = [json.dumps({"id": number, "text": f"row {number}"}).encode() for number in range(60)]
    lines[7], lines[21], lines[33] = lines[7][:-4], b'{"id": 21, "text": "\\ud83d"}', b'{"id": 33, "text": "\xff"}'
    (folder / "unreadable.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    numbers = [f"{number},0x{number:x},{number:03d},{10**25 + number}" for number in range(30)]
    (folder / "numbers.csv").write_text("\n".join(["id,hex,padded,large", *numbers]) + "\n")
    vocabulary = [f"w{n}" for n in range(60)]
    (folder / "tokenizer").mkdir()
    _save_tokenizer(folder / "tokenizer" / "tokenizer.json", vocabulary)
    (folder / "tokenizer" / "special_tokens_map.json").write_text(json.dumps({"eos_token": "[end]"}))
    for number, path in enumerate(sorted(folder.rglob("*"))):
        os.utime(path, ns=(0, DATE_NS + number * 1_000_000_007))


def _save_tokenizer(path: Path, vocabulary: list[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    ids = {text: number for number, text in enumerate(["[unk]", "[end]", "row", *vocabulary])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["[end]"])
    tokenizer.save(str(path))


def _save_dataset(folder: Path, rows: list[dict[str, Any]]) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(folder, num_shards=3)


def _brim(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "brim", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def start(case: Case, folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    arguments = case.words if case.script else ("-m", "brim", *case.words)
    (folder / "out").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def kill_midway(case: Case, folder: Path, pattern: str, count: int) -> dict[str, Any]:
    """Run a case until its ledger has `count` receipts, kill its session, and return the finished work."""
    for _ in range(TRIES):
        shutil.rmtree(folder / "out", ignore_errors=True)
        if not pattern:
            assert start(case, folder, GOLDEN_KILL=str(count)).wait() == -signal.SIGKILL
            return {"rows": count}
        process = start(case, folder, GOLDEN_CALLS=os.devnull, GOLDEN_PAUSE_S="0.02")
        while process.poll() is None and len(cases.receipts(folder, pattern)) < count:
            pass
        was_alive = process.poll() is None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        time.sleep(0.3)  # workers end with their parent
        result = cases.receipts(folder, pattern)
        kinds = {record["type"] for path in folder.glob(pattern) for record in cases.records(path)}
        if was_alive and "done" not in kinds:
            return {"ledger": pattern, "done": result}
    raise SystemExit(f"{case.name} was never caught with {count} receipts in {pattern}")


def make_case(case: Case, work: Path) -> dict[str, Any]:
    folder, remaining = cases.inputs(work / case.name), work / f"{case.name}-kept"
    remaining.mkdir()
    code = start(case, folder).wait()
    assert code == 0, f"{case.name}: exit {code}"
    facts = {"words": list(case.words), "finished": cases.told(folder / "out"), "killed": {}}
    (folder / "out").rename(remaining / "finished")
    for name, (pattern, count) in case.kills.items():
        facts["killed"][name] = kill_midway(case, folder, pattern, count)
        (folder / "out").rename(remaining / name)
    for path in remaining.rglob(SETUP):
        path.write_bytes(b"")  # contain paths of this machine and are written by every run
    for path in remaining.rglob("*"):
        os.utime(path, ns=(0, DATE_NS))
    cases.pack(remaining, case.archive)
    return facts


def make_hub(work: Path) -> dict[str, Any]:
    """Make a finished publication, one killed while uploading, and a saved plan with one of three parts done."""
    source, remaining = cases.inputs(work / "hub-inputs") / "files", work / "hub-kept"
    records: dict[str, Any] = {}
    for kind in ("finished", "killed", "plan"):
        with TestHub(work / f"hub-{kind}") as hub:
            machine = Machine(hub, work / f"machine-{kind}")
            if kind == "finished":
                machine.publish(source, *hub_state.ARGUMENTS)
            elif kind == "killed":
                _kill_sending(hub, machine, source)
            else:
                plan = remaining / kind / "a.plan"
                plan.parent.mkdir()
                brim_command("plan", source, DEST, "--rows-per-shard", "1", "--save", plan, env=machine.environment)
                brim_command("build", "--plan", plan, "--part", "1/3", env=machine.environment)
            hub_state.keep(hub, machine, remaining / kind)
            records[kind] = {"objects": sorted(hub.repos.get("datasets", REPO).objects)}
            if kind == "finished":
                records[kind]["main"] = {name: sha256 for name, (_, sha256) in hub.files(REPO).items()}
    for path in remaining.rglob("*"):
        os.utime(path, ns=(0, DATE_NS))
    cases.pack(remaining, cases.HOME / "hub.tar.xz")
    return records


def _kill_sending(hub: TestHub, machine: Machine, source: Path) -> None:
    hub.faults.add("put", nth=6, times=None, action="stall", seconds=5)
    process = machine.start(source, *hub_state.ARGUMENTS)
    while not machine.ledgers or len(cases.receipts(machine.ledgers[0], cases.LEDGER)) < 4:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()


def main() -> None:
    version = int(sys.argv[1])
    facts_path, make = cases.facts_path(version), {1: make_inputs, cases.VERSION: make_new_inputs}[version]
    if version == 1:
        assert brim.__version__ == "0.1.0", "goldens are made by the version whose state they are"
    with tempfile.TemporaryDirectory(prefix="goldens-") as scratch:
        work = Path(scratch)
        os.environ |= {"HF_HOME": str(work / "hf"), "XDG_STATE_HOME": str(work / "state"), "HF_HUB_OFFLINE": "1"}
        inputs = cases.home(version) / "inputs.tar.xz"
        if not inputs.exists():
            inputs.parent.mkdir(exist_ok=True)
            (work / "inputs").mkdir()
            make(work / "inputs")
            cases.pack(work / "inputs", inputs)
        facts = json.loads(facts_path.read_text()) if facts_path.exists() else {}
        facts |= {"brim": brim.__version__, "versions": cases.versions(), "cases": facts.get("cases", {})}
        for case in CASES if version == 1 else [case for case in CURRENT if case.version == version]:
            if case.name in facts["cases"]:
                continue
            began = time.monotonic()
            facts["cases"][case.name] = result = make_case(case, work)
            print(f"{case.name}: {result['killed']}, {time.monotonic() - began:.1f} s", flush=True)  # noqa: T201
            facts_path.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
        if version == 1 and "hub" not in facts:
            facts["hub"] = make_hub(work)
            facts_path.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

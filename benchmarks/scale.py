"""Measure the overhead of a job of a million shards: the plan, the saved plan, the ledger, resuming.

    python benchmarks/scale.py [--shards 1000000] [--files 1] [--only hash,plan,saved,ledger,resume,finish]

The source is a file table in memory, because planning needs names and sizes and no file: a million BIDS-like
sessions of 5 GB each, which are 5 PB. One row is one shard. Shards at the destination are sparse files with the
size in their receipt and no content, as a folder destination only checks sizes.

- *hash*: SHA-256 on one core, through which every byte passes.
- *plan*: cut, fingerprint, forecast and the facts that `brim plan` prints, in addition to a process with the table.
- *saved*: `brim plan --save` and reading it back (brim.plans.saved_plan).
- *ledger*: 2,000 receipts as a build adds them, each with its fsync; then the ledger of the whole job as a build writes
  it at its end. Dates of files in it are real; keys (measured for 2,000 shards) and hashes are placeholders.
- *resume*: a run with 1,000 missing shards, from reading the ledger to the list of shards to build.
- *finish*: the end of a run without missing shards: card and ledger are written.

Each step runs in a separate process. Memory is its peak, sampled from outside by peak.py, including the table and
the interpreter with pyarrow. Goals refer to processor time, which depends less on other load on the machine.
Data lies in a temporary folder, or in --data.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from peak import measure
from tables import (
    GB,
    MB,
    Part,
    at_most,
    comma_list,
    machine,
    print_goals,
    print_machine,
    print_part,
    progress,
    write_json,
)

from brim.file_set import FileSet
from brim.jobs.destination import Run
from brim.jobs.destination_paths import dataset_paths
from brim.jobs.files_destination import FilesDestination
from brim.jobs.job import Delivery, Job
from brim.jobs.preflight import JobSettings
from brim.jobs.reconcile import WHOLE_JOB, Reconciliation
from brim.jobs.shard_set import PlannedShards
from brim.memory.limit import Limit
from brim.options.groups import ShardOptions
from brim.plans.describe_plan import forecast_build, plan_facts
from brim.plans.plan import Plan, make_plan
from brim.progress import Progress
from brim.sources.file_table import FileColumn, FileTable, Split
from brim.state.ledger import JobRecord, Ledger, Receipt, job_versions
from brim.state.record_log import record_line
from brim.state.stop import stoppable
from brim.storage.location import folder_location

SESSION_BYTES = 5 * GB
MISSING = 1_000
SYNCED = 2_000
HASHED_BYTES = 2 * GB
SUFFIXES = ("anat/{}_T1w.nii.gz", "func/{}_task-rest_bold.nii.gz", "dwi/{}_dwi.nii.gz")
BLOCK = 100_000
SAVED_PLANS = "brim.plans.saved_plan"  # the module that converts plans to files
STEPS: dict[str, Callable[[argparse.Namespace], None]] = {}


def step(function: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], None]:
    """Register a function that runs in a separate process and prints its measurements as JSON lines."""
    STEPS[function.__name__] = function
    return function


@contextmanager
def timed(name: str, **more: Any) -> Iterator[None]:
    started_at, worked = time.monotonic(), time.process_time()
    yield
    seconds, processor = time.monotonic() - started_at, time.process_time() - worked
    print(json.dumps({"name": name, "seconds": seconds, "processor": processor, **more}), flush=True)


def sessions(rows: int, files: int) -> FileTable:
    """Yield rows of `files` files each, 5 GB together, made in blocks so that few Python objects live at a time."""
    random = np.random.default_rng(1)
    paths, subjects, names = [], [], []
    for start in range(0, rows, BLOCK):
        block = [(f"sub-{n // 4:06d}", f"ses-{n % 4:02d}") for n in range(start, min(start + BLOCK, rows))]
        subjects.append(pa.array([subject for subject, _ in block]))
        names.append(pa.array([session for _, session in block]))
        every = [f"{a}/{b}/{SUFFIXES[i].format(f'{a}_{b}')}" for a, b in block for i in range(files)]
        paths.append(pa.array(every, pa.large_string()))
    count = rows * files
    spread = random.integers(-SESSION_BYTES // 20, SESSION_BYTES // 20, count) // files
    mtimes = 1_700_000_000_000_000_000 + random.integers(0, 10**16, count)
    inodes = np.arange(count, dtype=np.int64) + 100
    actual = FileSet("/nowhere", pa.concat_arrays(paths), SESSION_BYTES // files + spread, mtimes, inodes)
    columns = {
        "subject": pa.chunked_array(subjects),
        "session": pa.chunked_array(names),
        "age": pa.array(random.uniform(18, 90, rows).round(1)),
    }
    kinds = {}
    for number in range(files):
        name = SUFFIXES[number].partition("/")[0]
        columns[name] = pa.array(np.arange(number, count, files, dtype=np.int64))
        kinds[name] = FileColumn("Nifti", False)
    features = {name: {"dtype": "string", "_type": "Value"} for name in ("subject", "session")}
    features |= {"age": {"dtype": "float64", "_type": "Value"}, **{name: {"_type": "Nifti"} for name in kinds}}
    return FileTable(pa.table(columns), kinds, actual, features, (Split("train", 0, rows),))


def planned(arguments: argparse.Namespace) -> Plan:
    # A cell of a Parquet file holds at most 2 GiB, so a file of 5 GB needs tar shards.
    kind = "parquet" if arguments.files > 2 else "webdataset"
    return make_plan(sessions(arguments.shards, arguments.files), kind, ShardOptions(rows_per_shard=1))


def saved_plans() -> Any:
    """Return the module that writes plans to files, or None if this version of brim has none."""
    return importlib.import_module(SAVED_PLANS) if importlib.util.find_spec(SAVED_PLANS) else None


def receipts_of(plan: Plan) -> Iterator[Receipt]:
    """Yield the receipts of a finished job, with placeholders for hashes of content and keys."""
    job = plan.fingerprint[:16]
    for number, (shard, mtimes) in enumerate(PlannedShards(plan).with_mtimes(plan.shards)):
        if number % (len(plan.shards) // MISSING):
            sha256 = hashlib.sha256(shard.name.encode()).hexdigest()
            key = hashlib.sha256(sha256.encode()).hexdigest()
            yield Receipt(shard.name, shard.split, shard.rows, shard.file_bytes, sha256, key, mtimes, job)


@step
def hash(arguments: argparse.Namespace) -> None:
    segment = os.urandom(8 << 20)
    digest = hashlib.sha256()
    with timed("SHA-256, one core", bytes=HASHED_BYTES):
        for _ in range(HASHED_BYTES // len(segment)):
            digest.update(segment)


@step
def table(arguments: argparse.Namespace) -> None:
    with timed("the file table alone"):
        sessions(arguments.shards, arguments.files)


@step
def plan(arguments: argparse.Namespace) -> None:
    table = sessions(arguments.shards, arguments.files)
    kind = "parquet" if arguments.files > 2 else "webdataset"
    with timed("cut into shards"):
        plan = make_plan(table, kind, ShardOptions(rows_per_shard=1))
    with timed("fingerprint"):
        assert plan.fingerprint
    with timed("forecast and facts"):
        limit = Limit(8 * GB, "--memory")
        assert plan_facts(plan, forecast_build(plan, limit, 2), limit)["shards"]["count"] == arguments.shards


@step
def save(arguments: argparse.Namespace) -> None:
    plan, path = planned(arguments), arguments.data / "plan"
    with timed("saved, with the fingerprint"):
        saved_plans().save_plan(path, plan, {}, job_versions())
    print(json.dumps({"name": "size of the saved plan", "bytes": path.stat().st_size}))


@step
def load(arguments: argparse.Namespace) -> None:
    with timed("read back and checked"):
        plan = saved_plans().load_plan(arguments.data / "plan").plan
    assert len(plan.shards) == arguments.shards


@step
def ledger(arguments: argparse.Namespace) -> None:
    """Write the ledger of a stopped job and the shards in it, without those that count as missing."""
    plan = planned(arguments)
    job = JobRecord(plan.fingerprint, plan.facts, job_versions(), ())
    with timed(f"keys of {SYNCED:,} shards", count=SYNCED):
        for shard in plan.shards[:SYNCED]:
            plan.shard_key(shard)
    folder = arguments.data / "synced"
    folder.mkdir()
    started_at = Ledger(folder)
    started_at.start_job(job)
    with timed(f"{SYNCED:,} receipts with an fsync each", count=SYNCED):
        for receipt in itertools.islice(receipts_of(plan), SYNCED):
            started_at.add(receipt)
    started_at.close()
    state = arguments.data / "out" / ".brim"
    state.mkdir(parents=True)
    started_at = Ledger(state)
    started_at.start_job(job)
    with timed("the finished ledger written, as at the end of a job"):
        started_at.finish(receipts_of(plan))
    path = state / "ledger.jsonl"
    os.truncate(path, path.stat().st_size - len(record_line({"type": "done"})))  # stopped shortly before the end
    print(json.dumps({"name": "size of the ledger", "bytes": path.stat().st_size}))


@step
def shards(arguments: argparse.Namespace) -> None:
    """Create empty files that have the size of the shards in the ledger."""
    folder = arguments.data / "out"
    (folder / "data").mkdir()
    for receipt in Ledger(folder / ".brim").receipts.values():
        descriptor = os.open(folder / receipt.name, os.O_CREAT | os.O_WRONLY)
        os.ftruncate(descriptor, receipt.size)
        os.close(descriptor)


@step
def read(arguments: argparse.Namespace) -> None:
    with timed("the ledger read"):
        ledger = Ledger(arguments.data / "out" / ".brim")
    assert len(ledger.receipts) == arguments.shards - MISSING


@contextmanager
def resumed(arguments: argparse.Namespace) -> Iterator[tuple[Delivery, Reconciliation, Run]]:
    plan, root = planned(arguments), arguments.data / "out"
    with timed("fingerprint"):
        assert plan.fingerprint
    with timed("the ledger read"):
        ledger = Ledger(root / ".brim")
    assert len(ledger.receipts) == arguments.shards - MISSING
    settings, shards = JobSettings(), PlannedShards(plan)
    job = Job.__new__(Job)  # without its checks, because the source exists only in the table
    job.plan, job.settings, job.forecast = plan, settings, None
    job.paths, job.limit = dataset_paths(folder_location(root), None, settings.hub), Limit(8 * GB, "--memory")
    with stoppable(root / ".brim" / "stop") as stop:
        run = Run(ledger, stop, Progress())
        destination = FilesDestination(job.paths, run)
        destination.free_bytes = lambda: None  # type: ignore[method-assign]  # no disk has space for these shards
        rules = Reconciliation(run, destination, shards, WHOLE_JOB, fresh=False, updates=False, replaces_foreign=False)
        delivery = Delivery(job, run, destination, shards, WHOLE_JOB, None)
        delivery._rules, delivery._budget = rules, job.upload_budget()
        yield delivery, rules, run


@step
def resume(arguments: argparse.Namespace) -> None:
    with resumed(arguments) as (delivery, rules, _):
        with timed("what is missing"):
            assert len(rules.missing_shards(2, 8 * GB)) == MISSING
        with timed("all that a run does before its first shard"):
            existing = delivery._destination.read_existing()
            rules.agree(existing)
            rules.start(existing, delivery._card(()))
            missing = rules.missing_shards(2, 8 * GB)
            assert len(missing) == MISSING
            delivery._destination.start("", MISSING, delivery._card(()))


@step
def finish(arguments: argparse.Namespace) -> None:
    with resumed(arguments) as (delivery, _, run):
        receipts = run.ledger.receipts
        last = next(iter(receipts.values()))
        for shard in delivery._shards.shards:
            if shard.name not in receipts:
                receipts[shard.name] = replace(last, name=shard.name)
        with timed("card and ledger written"):
            assert delivery._publish(delivery._destination.read_existing()).shards == arguments.shards


def measured(name: str, arguments: argparse.Namespace, part: Part) -> tuple[dict[str, dict[str, Any]], int]:
    """Run a step in a separate process; return its measurements by name, and its peak memory."""
    progress(name)
    numbers = ["--shards", str(arguments.shards), "--files", str(arguments.files), "--data", str(arguments.data)]
    result = measure([sys.executable, __file__, "--step", name, *numbers])
    if result.exit_code:
        sys.exit(f"{name} failed:\n{result.output}")
    messages = [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]
    for item in messages:
        seconds, processor = (f"{item[source]:.1f} s" if source in item else "" for source in ("seconds", "processor"))
        size = f"{item['bytes'] / MB:,.0f} MB" if "bytes" in item else ""
        rate = f"{item['count'] / item['seconds']:,.0f} a second" if "count" in item and seconds else ""
        part.rows.append((item["name"], seconds, processor, rate or size, ""))
    if part.rows:
        part.rows[-1] = (*part.rows[-1][:4], f"{result.peak_bytes / MB:,.0f} MB")
    part.runs[name] = [*messages, {"peak_bytes": result.peak_bytes}]
    return {entry["name"]: entry for entry in messages}, result.peak_bytes


def hash_part(arguments: argparse.Namespace, part: Part) -> None:
    message, _ = measured("hash", arguments, part)
    first = next(iter(message.values()))
    part.notes.append(f"{first['bytes'] / first['processor'] / GB:.2f} GB/s of SHA-256 on one core.")


def plan_part(arguments: argparse.Namespace, part: Part) -> None:
    measured("table", arguments, part)
    message, peak = measured("plan", arguments, part)
    part.goals.append(
        at_most("processor time of a plan", sum(item["processor"] for item in message.values()), 60, " s")
    )
    part.goals.append(at_most("memory of a plan", peak / MB, 600, " MB"))


def saved_part(arguments: argparse.Namespace, part: Part) -> None:
    if saved_plans() is None:
        part.notes.append(f"Left out: this brim has no {SAVED_PLANS}.")
        return
    measured("save", arguments, part)
    measured("load", arguments, part)


def ledger_part(arguments: argparse.Namespace, part: Part) -> None:
    for remaining in ("out", "synced"):
        shutil.rmtree(arguments.data / remaining, ignore_errors=True)
    measured("ledger", arguments, part)


def resume_part(arguments: argparse.Namespace, part: Part) -> None:
    if not (arguments.data / "out" / "data").exists():
        measured("shards", arguments, Part("", ()))
    measured("read", arguments, part)
    message, peak = measured("resume", arguments, part)
    seconds = sum(item["processor"] for name, item in message.items() if name != "what is missing")
    part.goals.append(at_most("processor time from the plan to the first missing shard", seconds, 60, " s"))
    part.goals.append(at_most("memory of it, with the plan", peak / MB, 1200, " MB"))


def finish_part(arguments: argparse.Namespace, part: Part) -> None:
    measured("finish", arguments, part)


PARTS = {
    "hash": hash_part,
    "plan": plan_part,
    "saved": saved_part,
    "ledger": ledger_part,
    "resume": resume_part,
    "finish": finish_part,
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, choices=(1, 2, 3), default=1, help="files in a row; 3 are Parquet")
    parser.add_argument("--only", type=comma_list(*PARTS), default=",".join(PARTS))
    parser.add_argument("--data", type=Path, help="where ledger and sparse shards go; kept if given")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.shards < SYNCED:
        parser.error(f"--shards takes {SYNCED} or more")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.step:
        STEPS[arguments.step](arguments)
        return
    with tempfile.TemporaryDirectory(dir=None) as folder:
        arguments.data = Path(folder) if arguments.data is None else arguments.data
        arguments.data.mkdir(parents=True, exist_ok=True)
        facts = machine(arguments.data, ("brim", "pyarrow", "numpy"))
        parts: dict[str, Part] = {}
        for name in arguments.only.split(","):
            title = f"{name}: {arguments.shards:,} shards of 5 GB, {arguments.files} file(s) each"
            parts[name] = Part(title, ("step", "time", "processor", "rate or size", "peak memory of the process"))
            PARTS[name](arguments, parts[name])
            print_part(parts[name])
    print_goals(parts)
    print_machine(facts)
    write_json(arguments.json, facts, parts)


if __name__ == "__main__":
    main()

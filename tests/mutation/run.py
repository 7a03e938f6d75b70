"""Mutation testing of the core: `make mutate`.

    python -m tests.mutation.run                    all modules, at most 100 mutants of each
    python -m tests.mutation.run thrift -n 30       30 of one module
    python -m tests.mutation.run thrift --all       every mutant of one module
    python -m tests.mutation.run thrift --again     only earlier survivors; the others count as killed

Results are stored in .mutation and stay valid until the module or its tests change, so a run can be interrupted.
Every run rewrites docs/contributing/mutation.md from the stored results.

A mutant is one small change to one module (mutants.py). It is killed if a test of that module fails or does not end.
The selection of mutants is deterministic. Each one runs in a process that is forked from one that has imported
pytest, numpy and pyarrow, and nothing of brim.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from tests.mutation.mutants import Mutant, all_mutants, mutated

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/contributing/mutation.md"
REASONS = Path(__file__).with_name("survivors.json")
MAXIMUM, GOAL = 100, 0.85
_SURVIVED, _KILLED = 0, 1
_SECONDS = 10.0  # of processor time; the tests of one module take one or two
_WALL_S = 45.0  # terminates a mutant that waits forever
_BYTES = 6 << 30
_KEPT = ROOT / ".mutation"
_OPTIONAL = ("huggingface_hub.hf_api", "huggingface_hub.lfs", "obstore.store", "psutil", "trustme")


@dataclass(frozen=True)
class Module:
    """A module of brim and the fast tests, run in one process, that should detect every change of it."""

    name: str
    tests: tuple[str, ...]

    @property
    def path(self) -> Path:
        return ROOT / "src" / f"{self.name.replace('.', '/')}.py"

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]

    def digest(self) -> str:
        """Return a digest of the module and its tests; modules that it imports are not included."""
        digest = hashlib.sha256(self.path.read_bytes())
        for test in self.tests:
            digest.update((ROOT / test).read_bytes())
        return digest.hexdigest()


class Kept:
    """Stored results of earlier runs: by key, whether a test detected the mutant."""

    def __init__(self, module: Module, again: bool) -> None:
        self._path, self._digest = _KEPT / f"{module.name}.json", module.digest()
        self.noticed: dict[str, bool] = {}
        if self._path.exists():
            remaining = json.loads(self._path.read_text())
            if remaining["digest"] == self._digest:
                self.noticed = remaining["noticed"]
            elif again:
                self.noticed = {key: True for key, noticed in remaining["noticed"].items() if noticed}
                self._write()

    def add(self, key: str, noticed: bool) -> None:
        self.noticed[key] = noticed
        self._write()

    def _write(self) -> None:
        _KEPT.mkdir(exist_ok=True)
        self._path.write_text(json.dumps({"digest": self._digest, "noticed": self.noticed}))


def _module(name: str, *tests: str) -> Module:
    return Module(f"brim.{name}", tests)


MODULES = (
    _module("formats.splice", "tests/formats/test_splice.py", "tests/formats/test_range_readers.py"),
    _module("formats.thrift", "tests/formats/test_thrift.py"),
    _module("formats.parquet_levels", "tests/formats/test_parquet_levels.py"),
    _module("formats.parquet_page_decode", "tests/formats/test_parquet_page_decode.py"),
    _module("formats.parquet_writer", "tests/formats/test_parquet_writer.py", "tests/formats/test_parquet_skeleton.py"),
    _module("state.record_log", "tests/state/test_record_log.py"),
    _module("state.ledger", "tests/state/test_ledger.py"),
    _module("partition", "tests/root_modules/test_partition.py"),
    _module("plans.cut_shards", "tests/plans/test_cut_shards.py"),
    _module("plans.fingerprint", "tests/plans/test_fingerprint.py"),
    _module("execution.scheduler", "tests/execution/test_scheduler.py"),
    _module("execution.memory_limiter", "tests/execution/test_memory_limiter.py"),
    _module("tensors.partial_layout", "tests/tensors/test_partial_layout.py"),
    _module("tensors.checkpoints", "tests/tensors/test_checkpoints.py"),
    _module("compute.outputs.token_packing", "tests/compute/test_token_documents.py"),
    _module("storage.hub_commits", "tests/storage/test_hub_commits.py"),
    _module("monitor.oom.kernel_record", "tests/monitor/test_why_kernel.py", "tests/monitor/test_kernel_record.py"),
    _module("storage.lease", "tests/storage/test_bucket_lease.py"),
)


@dataclass(frozen=True)
class Result:
    """The results of all mutants of a module."""

    module: Module
    possible: int
    tried: int
    survivors: tuple[Mutant, ...]
    seconds: float

    @property
    def killed(self) -> int:
        return self.tried - len(self.survivors)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with one mutant applied."""

    number = 0

    def get_code(self, fullname: str) -> CodeType:
        return compile(mutated(Path(self.path).read_text(), self.number), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: Module, number: int) -> None:
        self._module, self._number = module, number

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._module.name:
            return None
        loader = _Loader(name, str(self._module.path))
        loader.number = self._number
        return importlib.util.spec_from_loader(name, loader)


def _run_tests(module: Module, number: int | None) -> int:
    """Return the exit code of pytest; called in a separate process."""
    import pytest

    if number is not None:
        sys.meta_path.insert(0, _Finder(module, number))
    options = ["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(ROOT)]
    return int(pytest.main([*options, *(str(ROOT / test) for test in module.tests)]))


def _start(module: Module, number: int | None, log: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(_SECONDS), int(_SECONDS) + 2))
        resource.setrlimit(resource.RLIMIT_DATA, (_BYTES, _BYTES))
        code = _run_tests(module, number)
    finally:
        os._exit(code)


class _Pool:
    """Runs several mutants in parallel."""

    def __init__(self, jobs: int, folder: Path) -> None:
        self._jobs, self._folder = jobs, folder
        self._running: dict[int, tuple[Mutant, float]] = {}
        self.cut_short = False

    def run(self, module: Module, mutants: Sequence[Mutant]) -> Iterator[tuple[Mutant, int, float]]:
        """Yield each mutant with the exit code of its tests and the processor time they used."""
        try:
            yield from self._run(module, list(mutants))
        finally:
            for pid in self._running:
                _end_group(pid)

    def _run(self, module: Module, waiting: list[Mutant]) -> Iterator[tuple[Mutant, int, float]]:
        while waiting or self._running:
            if self.cut_short:
                sys.exit("interrupted: results so far are kept")
            while waiting and len(self._running) < self._jobs:
                mutant = waiting.pop(0)
                log = self._folder / f"{len(self._running)}.log"
                self._running[_start(module, mutant.number, log)] = mutant, time.monotonic()
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid in self._running:
                mutant, _ = self._running.pop(pid)
                _end_group(pid)
                yield mutant, os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
                continue
            for pid, (_, started_at) in self._running.items():
                if time.monotonic() - started_at > _WALL_S:
                    _end_group(pid)
            select.select([], [], [], 0.02)


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def drawn(module: Module, count: int | None) -> tuple[list[Mutant], int]:
    """Return the selected mutants, always the same ones, and the number of all mutants."""
    all_values = all_mutants(module.path.read_text())
    if count is None or count >= len(all_values):
        return all_values, len(all_values)
    selection = all_values[:]
    random.Random(module.name).shuffle(selection)  # a smaller selection is a prefix of a larger one
    return sorted(selection[:count], key=lambda mutant: mutant.number), len(all_values)


def try_module(module: Module, count: int | None, pool: _Pool, is_repeated: bool, verbose: bool) -> Result:
    """Check that the tests pass without a mutant, then run them with each selected mutant."""
    log = Path(pool._folder / "clean.log")
    pid = _start(module, None, log)
    _, status, usage = os.wait4(pid, 0)
    if status:
        sys.exit(f"the tests of {module.name} fail without any mutant:\n{log.read_text()[-3000:]}")
    clean_s = usage.ru_utime + usage.ru_stime
    mutants, possible = drawn(module, count)
    seconds, remaining = clean_s, Kept(module, is_repeated)
    marks = {mutant.number: f"{mutant.number} {mutant.key}" for mutant in mutants}
    for mutant, code, took_s in pool.run(module, [m for m in mutants if marks[m.number] not in remaining.noticed]):
        seconds += took_s
        remaining.add(marks[mutant.number], code != _SURVIVED)
        if code not in (_KILLED, _SURVIVED) and verbose:
            print(f"    exit {code} after {took_s:.1f} s: {mutant.line} {mutant.key}")
    survivors = [mutant for mutant in mutants if not remaining.noticed[marks[mutant.number]]]
    result = Result(module, possible, len(mutants), tuple(survivors), seconds)
    print(
        f"{module.short:20} {possible:5} {result.tried:5} {result.killed:5} {result.killed / result.tried:6.0%}"
        f"   clean {clean_s:.1f} s, all {seconds:.0f} s of the processor",
        flush=True,
    )
    if verbose:
        for mutant in survivors:
            print(f"    {module.path.name}:{mutant.line} {mutant.key}", flush=True)
    return result


def kept_result(module: Module) -> Result:
    """Return the stored results of a module's mutants from this run and earlier ones."""
    mutants, possible = drawn(module, MAXIMUM)
    noticed = Kept(module, again=False).noticed
    known_values = {mutant.number: noticed.get(f"{mutant.number} {mutant.key}") for mutant in mutants}
    survivors = tuple(mutant for mutant in mutants if known_values[mutant.number] is False)
    return Result(module, possible, sum(mark is not None for mark in known_values.values()), survivors, 0.0)


def page(results: Sequence[Result]) -> str:
    """Return the text of docs/contributing/mutation.md."""
    reasons = json.loads(REASONS.read_text()) if REASONS.exists() else {}
    lines = [
        "# Mutation testing",
        "",
        "`make mutate` changes the core of brim in small ways, one at a time, and checks that a test fails: `<`",
        "becomes `<=`, `max` becomes `min`, a number is increased by one, a call or an assignment is dropped, an",
        f"argument becomes None. At most {MAXIMUM} mutants per module are drawn, always the same ones.",
        "It wrote this page.",
        "",
        "| module | possible | tried | killed | |",
        "|---|---:|---:|---:|---:|",
    ]
    for result in results:
        fraction = f"{result.killed / result.tried:.0%}" if result.tried else "–"
        name = result.module.name.removeprefix("brim.").replace(".", "/")
        lines.append(f"| `{name}.py` | {result.possible} | {result.tried} | {result.killed} | {fraction} |")
    possible, tried, killed = (sum(getattr(r, n) for r in results) for n in ("possible", "tried", "killed"))
    lines += [
        f"| all | {possible} | {tried} | {killed} | {killed / max(tried, 1):.0%} |",
        "",
        f"`{REASONS.relative_to(ROOT)}` explains the survivors: mostly changes that give the same bytes.",
    ]
    for result in results:
        known_values = reasons.get(result.module.short, {})
        unexplained = [mutant.key for mutant in result.survivors if mutant.key not in known_values]
        if unexplained:
            lines += ["", f"Not explained in `{result.module.path.name}`:", "", *(f"- {key}" for key in unexplained)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("modules", nargs="*", help="their last names; all without any")
    parser.add_argument("-n", type=int, default=MAXIMUM, help="how many of a module")
    parser.add_argument("--all", action="store_true", help="every one of a module")
    parser.add_argument("--again", action="store_true", help="those that survived the last time")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    selection = [module for module in MODULES if not options.modules or module.short in options.modules]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["BRIM_MUTANT"] = "1"  # tests/conftest.py then does not search for minimal examples
    for name in ("pytest", "hypothesis", "numpy", "pyarrow.parquet", "pyarrow.compute", *_OPTIONAL):
        importlib.import_module(name)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        pool = _Pool(options.jobs, Path(folder))
        signal.signal(signal.SIGTERM, lambda *_: setattr(pool, "cut_short", True))  # an exception may be lost in a fork
        count = None if options.all else options.n
        try:
            results = [try_module(module, count, pool, options.again, bool(options.modules)) for module in selection]
        finally:
            PAGE.write_text(page([kept_result(module) for module in MODULES]))
    tried, killed = sum(result.tried for result in results), sum(result.killed for result in results)
    print(f"{killed} of {tried} mutants killed, {killed / tried:.0%}; {sum(r.seconds for r in results):.0f} s")
    low = [result.module.short for result in results if result.killed < GOAL * result.tried]
    if low:
        sys.exit(f"fewer than {GOAL:.0%} are killed of {', '.join(low)}")


if __name__ == "__main__":
    main()

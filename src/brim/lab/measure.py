"""Run a part of an experiment in a process of its own and measure it from outside, step by step."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from brim.errors import BrimError, InputError, MemoryLimitError
from brim.extras import missing
from brim.lab.steps import ExperimentPart, ExperimentStep, LabSample, Watch
from brim.memory.meter import Usage, machine_now, proportional_usage, read_process, resident_tree, tree
from brim.sizes import format_size


def step(name: str) -> None:
    """Be measured now, under this name."""
    _say({"step": name})
    sys.stdin.readline()


def tell(**facts: Any) -> None:
    """Something that the measuring process wants to know."""
    _say(facts)


def _say(entry: dict[str, Any]) -> None:
    os.write(1, json.dumps(entry).encode() + b"\n")


_EVERY_S = 0.01
_IN_MEMORY = ("tmpfs", "ramfs")
# No network, no bars, and caches that go away with the experiment.
_QUIET = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def measure(
    name: str,
    call: str,
    options: Mapping[str, Any],
    folder: Path,
    watch: Watch,
    stop_when: Callable[[list[dict[str, Any]]], bool] = lambda told: False,
) -> ExperimentPart:
    """Run `call` ("module:function" in brim.lab) with `options`; kill it as soon as `stop_when` says so."""
    command = [sys.executable, "-m", "brim.lab", call, json.dumps(options)]
    environment = {**os.environ, **_QUIET, "HF_HOME": str(folder / "hf"), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,  # one signal ends it with all its workers, and Ctrl-C comes here first
        )
        try:
            part = _follow(child, name, watch, stop_when)
            if not part.interrupted:
                child.wait()
        finally:
            _end(child)
        if child.returncode != 0 and not part.interrupted:
            raise _failure(name, child.returncode, errors)
    return part


def _follow(
    child: subprocess.Popen[bytes], name: str, watch: Watch, stop_when: Callable[[list[dict[str, Any]]], bool]
) -> ExperimentPart:
    assert child.stdout is not None
    assert child.stdin is not None
    began = time.monotonic()
    machine = machine_now().total_bytes or 1
    steps: list[ExperimentStep] = []
    samples: list[LabSample] = []
    told: list[dict[str, Any]] = []
    waiting = b""
    peak = 0
    while True:
        ready, _, _ = select.select([child.stdout], [], [], _EVERY_S)
        usage, now = usage_of(child.pid), time.monotonic() - began
        if usage.total_bytes or not samples:
            samples.append(LabSample(now, usage.total_bytes, usage.file_bytes))
            peak = max(peak, usage.total_bytes)
        if not ready and child.poll() is not None:  # an orphan may hold the other end open
            return ExperimentPart(name, tuple(steps), tuple(samples), tuple(told))
        if ready:
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                return ExperimentPart(name, tuple(steps), tuple(samples), tuple(told))
            *lines, waiting = (waiting + data).split(b"\n")
            for entry in map(_entry, lines):
                if "step" not in entry:
                    told.append(entry)
                    continue
                usage = usage_of(child.pid)
                samples.append(LabSample(now, usage.total_bytes, usage.file_bytes))
                steps.append(ExperimentStep(entry["step"], now, usage, max(peak, usage.total_bytes), machine))
                watch(name, steps[-1])
                peak = 0
                if not stop_when(told):  # else it waits there until it is killed
                    _go_on(child.stdin)
        if stop_when(told):
            return ExperimentPart(name, tuple(steps), tuple(samples), tuple(told), interrupted=True)


def _go_on(stdin: IO[bytes]) -> None:
    try:
        stdin.write(b"\n")
        stdin.flush()
    except BrokenPipeError:  # it is gone: its end is read next
        pass


def usage_of(pid: int) -> Usage:
    """A tree now, each page once: a process that has forked is counted page by page, one that has not need not be."""
    if sys.platform != "linux":
        return sum((process.usage for process in resident_tree([pid])), Usage())
    processes = [process for process in map(read_process, tree([pid])) if process is not None]
    if len(processes) < 2:
        return sum((process.usage for process in processes), Usage())
    return sum((proportional_usage(process.pid) or process.usage for process in processes), Usage())


def _entry(line: bytes) -> dict[str, Any]:
    """What the child said; empty for what some library printed."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left of it, workers too."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                pass


def _failure(name: str, code: int, errors: IO[bytes]) -> BrimError:
    errors.seek(0)
    text = errors.read().decode(errors="replace").strip().splitlines()
    if code == -signal.SIGKILL:
        return MemoryLimitError(
            f"The part {name!r} was killed, most likely for its memory.", hint="Choose smaller sizes."
        )
    if "MemoryError" in (text[-1] if text else ""):
        return MemoryLimitError(f"The part {name!r} ran out of memory.", hint="Choose smaller sizes.")
    said = text[-1] if text else f"exit code {code}"
    return BrimError(f"The part {name!r} failed: {said}", hint="With other versions of its packages it may work.")


def need_room(folder: Path, disk_bytes: int, memory_bytes: int) -> None:
    """Refuse sizes that would fill the disk or the machine, before the first byte is written."""
    free = shutil.disk_usage(folder).free
    if disk_bytes > free:
        raise MemoryLimitError(
            f"This takes {format_size(disk_bytes)} of disk, and {format_size(free)} are free.",
            hint="Choose smaller sizes, or another disk with --keep DIR.",
        )
    available = machine_now().available_bytes
    if available is not None and memory_bytes > available:
        raise MemoryLimitError(
            f"This takes {format_size(memory_bytes)} of memory, and {format_size(available)} are available.",
            hint="Choose smaller sizes.",
        )


def need(package: str) -> None:
    """MissingDependencyError unless an optional library is there; it is not imported here."""
    if importlib.util.find_spec(package) is None:
        raise missing(package, f"This experiment needs {package}.")


@contextmanager
def scratch(keep: str | os.PathLike[str] | None) -> Iterator[Path]:
    """A folder for an experiment's data: removed at the end, unless the user has named one."""
    if keep is not None:
        folder = Path(keep)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise InputError(f"{folder} is not empty.", hint="Give --keep a new folder.")
        except OSError as error:
            raise InputError(f"{folder} cannot be used: {error.strerror}.") from error
        yield folder.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="brim-lab-", dir=_on_disk()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _on_disk() -> str:
    """A temporary folder that is not itself in memory: there, file pages could not be taken back."""
    import psutil

    kinds = {partition.mountpoint: partition.fstype for partition in psutil.disk_partitions(all=True)}
    candidates = [tempfile.gettempdir(), "/var/tmp", os.getcwd()]
    for candidate in candidates:
        place = os.path.realpath(candidate)
        while place not in kinds and place != os.path.dirname(place):
            place = os.path.dirname(place)
        if kinds.get(place) not in _IN_MEMORY and os.access(candidate, os.W_OK):
            return candidate
    return candidates[0]

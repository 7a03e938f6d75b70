"""Run a part of an experiment in a separate process and measure it from outside, step by step."""

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
from typing import Any

from brim.errors import BrimError, InputError, MemoryLimitError
from brim.extras import missing
from brim.lab.steps import ExperimentPart, ExperimentStep, LabSample, Watch
from brim.memory.meter import Usage, machine_now, proven_bytes
from brim.memory.tree_meter import TreeMeter
from brim.sizes import format_size

_EVERY_S = 0.01
_IN_MEMORY = ("tmpfs", "ramfs")
# No network, no bars, and caches that are removed with the experiment.
_QUIET = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def step(name: str) -> None:
    """Child: request a measurement with this name, and wait for it."""
    send(step=name)
    sys.stdin.readline()


def send(**facts: Any) -> None:
    """Child: report facts to the measuring process."""
    os.write(1, json.dumps(facts).encode() + b"\n")


def send_and_wait(**facts: Any) -> None:
    """Child: report facts, and wait until they were read: this process may be killed because of them."""
    send(**facts, waits=True)
    sys.stdin.readline()


def measure(
    name: str,
    function: str,
    options: Mapping[str, Any],
    folder: Path,
    watch: Watch,
    should_stop: Callable[[list[dict[str, Any]]], bool] = lambda messages: False,
) -> ExperimentPart:
    """Run the child `function` of experiments.py with `options`; kill it as soon as `should_stop(messages)`."""
    environment = {**os.environ, **_QUIET, "HF_HOME": str(folder / "hf"), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "brim.lab", function, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,  # one signal kills it with all its workers, and Ctrl-C only reaches this process
        )
        try:
            part = _follow(child, name, watch, should_stop)
            if not part.interrupted:
                child.wait()
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            for stream in (child.stdin, child.stdout):
                try:
                    if stream is not None:
                        stream.close()
                except BrokenPipeError:
                    pass
        if child.returncode == 0 or part.interrupted:
            return part
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else f"exit code {child.returncode}"
    if child.returncode == -signal.SIGKILL:
        problem = f"The part {name!r} was killed, most likely for its memory."
        raise MemoryLimitError(problem, hint="Choose smaller sizes.")
    if "MemoryError" in last:
        raise MemoryLimitError(f"The part {name!r} ran out of memory.", hint="Choose smaller sizes.")
    raise BrimError(f"The part {name!r} failed: {last}", hint="With other versions of its packages it may work.")


def _follow(
    child: subprocess.Popen[bytes], name: str, watch: Watch, should_stop: Callable[[list[dict[str, Any]]], bool]
) -> ExperimentPart:
    assert child.stdout is not None
    assert child.stdin is not None
    start, machine = time.monotonic(), machine_now().total_bytes or 1
    meter = TreeMeter(lambda: [child.pid])
    steps: list[ExperimentStep] = []
    samples: list[LabSample] = []
    messages: list[dict[str, Any]] = []
    unread, peak, highest, most_files = b"", 0, 0, 0

    def sample() -> Usage:
        """Measure. The kernel's high-water mark shows a peak between two samples."""
        nonlocal peak, highest, most_files
        reading = meter.read()
        usage, most_files = reading.usage, max(most_files, reading.usage.file_bytes)
        if usage.total_bytes or not samples:
            samples.append(LabSample(time.monotonic() - start, usage.total_bytes, usage.file_bytes))
            peak = max(peak, usage.total_bytes)
        for process in reading.processes:
            if (proven := proven_bytes(process.most_resident_bytes, most_files)) > highest:
                highest = proven
                peak = max(peak, proven)
        return usage

    while True:
        ready, _, _ = select.select([child.stdout], [], [], _EVERY_S)
        sample()
        data = os.read(child.stdout.fileno(), 1 << 16) if ready else b""
        if not data and (ready or child.poll() is not None):  # an orphan may keep the other end open
            return ExperimentPart(name, tuple(steps), tuple(samples), tuple(messages))
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                continue  # a library printed it
            if not isinstance(message, dict):
                continue
            if "step" in message:
                usage = sample()
                steps.append(ExperimentStep(message["step"], samples[-1].seconds, usage, peak, machine))
                watch(name, steps[-1])
                peak = 0
            else:
                messages.append(message)
            is_waiting = "step" in message or message.get("waits")
            if is_waiting and not should_stop(messages):  # otherwise it waits until it is killed
                try:
                    child.stdin.write(b"\n")
                    child.stdin.flush()
                except BrokenPipeError:
                    pass  # it has ended: its end is read next
        if should_stop(messages):
            return ExperimentPart(name, tuple(steps), tuple(samples), tuple(messages), interrupted=True)


def check_space(folder: Path, disk_bytes: int, memory_bytes: int) -> None:
    """Refuse sizes that would fill the disk or the machine, before the first byte is written."""
    free, available = shutil.disk_usage(folder).free, machine_now().available_bytes
    if disk_bytes > free:
        raise MemoryLimitError(
            f"This takes {format_size(disk_bytes)} of disk, and {format_size(free)} are free.",
            hint="Choose smaller sizes, or another disk with --keep DIR.",
        )
    if available is not None and memory_bytes > available:
        raise MemoryLimitError(
            f"This takes {format_size(memory_bytes)} of memory, and {format_size(available)} are available.",
            hint="Choose smaller sizes.",
        )


def require(package: str) -> None:
    """Raise MissingDependencyError unless an optional library is installed; it is not imported here."""
    if importlib.util.find_spec(package) is None:
        raise missing(package, f"This experiment needs {package}.")


@contextmanager
def scratch(keep: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Return a folder for an experiment's data: removed at the end, unless the user has named one."""
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
    folder = Path(tempfile.mkdtemp(prefix="brim-lab-", dir=_disk_folder()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _disk_folder() -> str:
    """Return a temporary folder on a disk, if there is one: the kernel cannot reclaim pages of files in memory."""
    import psutil

    kinds = {partition.mountpoint: partition.fstype for partition in psutil.disk_partitions(all=True)}
    candidates = [tempfile.gettempdir(), "/var/tmp", os.getcwd()]
    for candidate in candidates:
        folder = os.path.realpath(candidate)
        while folder not in kinds and folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)
        if kinds.get(folder) not in _IN_MEMORY and os.access(candidate, os.W_OK):
            return candidate
    return candidates[0]

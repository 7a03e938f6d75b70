"""Run a command and measure, from outside, its time and the peak of its unreclaimable memory.

Counted: RssAnon + RssShmem + VmSwap of the command and of all its descendants, summed every 10 ms. Not
counted: file-backed pages and the page cache, which the kernel can reclaim. The sum is an upper bound if
processes share pages after a fork; a spike shorter than the sampling period, and a descendant whose parent
has ended, can be missed.

Linux only. Import `measure`, or run `python benchmarks/peak.py [--curve FILE] -- COMMAND…`
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PERIOD_S = 0.01
_COUNTED = ("RssAnon:", "RssShmem:", "VmSwap:")


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a command. `output` is its stdout and stderr; `curve` is (seconds, bytes) or empty."""

    seconds: float
    exit_code: int
    peak_bytes: int
    output: str
    curve: tuple[tuple[float, int], ...] = ()
    cpu_seconds: float = 0.0  # of the process and of those children that it waited for


def as_installed(env: Mapping[str, str]) -> dict[str, str]:
    """Let Python keep the bytecode of a checkout's modules, so that it starts like an installed package."""
    return {name: value for name, value in env.items() if name != "PYTHONDONTWRITEBYTECODE"}


def measure(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, period_s: float = PERIOD_S, curve: bool = False
) -> Measured:
    """Run the command to its end and return the measurements."""
    env = as_installed(env or os.environ)
    peak, cpu_before = 0, _children_cpu()
    points: list[tuple[float, int]] = []
    with tempfile.TemporaryFile() as output:
        started_at = time.monotonic()
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        ended = _EndOf(process.pid)
        try:
            while True:
                now = tree_bytes(process.pid)
                peak = max(peak, now)
                if curve:
                    points.append((time.monotonic() - started_at, now))
                if ended.within(period_s):
                    break
            seconds = time.monotonic() - started_at
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # including its children
            raise
        finally:
            ended.close()
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Measured(seconds, process.returncode, peak, text, tuple(points), _children_cpu() - cpu_before)


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tree_bytes(pid: int) -> int:
    """Return the unreclaimable memory of a process and its descendants; 0 if it has ended."""
    return sum(_process_bytes(each) for each in _tree(pid))


class _EndOf:
    """Wait for the end of a process without reaping it, so that its time is not rounded to a sample."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def within(self, seconds: float) -> bool:
        return bool(self._poll.poll(seconds * 1000))

    def close(self) -> None:
        os.close(self._descriptor)


def _tree(pid: int) -> list[int]:
    actual = [pid]
    for each in actual:  # may grow during the iteration
        actual += _children(each)
    return actual


def _children(pid: int) -> list[int]:
    """Return the children of all threads, because each thread has a separate list."""
    children: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return children
    for thread in threads:
        children += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return children


def _process_bytes(pid: int) -> int:
    lines = _read(f"/proc/{pid}/status").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(_COUNTED))


def _read(path: str) -> str:
    """Return the text of a file below /proc, empty if its process has just ended."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Time and peak unreclaimable memory of a command's process tree.")
    parser.add_argument("--curve", type=Path, metavar="FILE", help="write seconds,bytes of every sample")
    parser.add_argument("command", nargs="+", help="after --")
    arguments = parser.parse_args()
    result = measure(arguments.command, curve=arguments.curve is not None)
    sys.stderr.write(result.output)
    if arguments.curve is not None:
        arguments.curve.write_text("".join(f"{position:.3f},{size}\n" for position, size in result.curve))
    print(json.dumps({"seconds": result.seconds, "exit_code": result.exit_code, "peak_bytes": result.peak_bytes}))
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())

"""A job of brim's own, written down as `brim run` does it for others, so that it can have a report too.

A thread looks at this process and those it started about twice a second and writes the log; whoever works only leaves
notes for it. The thread shares the process that it looks at: a job that the kernel kills leaves a log without an end,
which `brim report` turns into a page all the same.

How far each shard or unit is, is gathered while the job runs, logged with samples and read for the page. A job may have
a million of them, so what is logged is counts and those that are under way; the finished ones are the log's own events,
thinned as all events are.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from brim.errors import BrimError, InputError, Stopped
from brim.memory.limit import Limit
from brim.memory.meter import blind_spots, boot_id, machine_facts, machine_now, versions
from brim.memory.tree_meter import TreeMeter
from brim.progress import Progress, tell_rows
from brim.records import dataclass
from brim.sizes import format_size
from brim.state.durable import reason
from brim.watching.find_processes import ProcessNames
from brim.watching.run_log import LogWriter, check_log, new_log_path, objects, size, text, time_of_day

_MOST_RUNNING, _MOST_AGAIN = 40, 20


@dataclass(frozen=True, slots=True)
class TaskUnderWay:
    """A shard or unit that somebody works on, since `t`; `tries` is how often it was begun before."""

    name: str
    bytes: int
    t: float
    tries: int = 0


@dataclass(frozen=True, slots=True)
class WorkState:
    """How far a job is. `total` is None where that is not known yet."""

    what: str = ""
    total: int | None = None
    done: int = 0
    running: tuple[TaskUnderWay, ...] = ()
    more_running: int = 0
    again: tuple[tuple[str, int], ...] = ()  # which wait to be tried again, and how often they were tried


class WorkTally:
    """What a recording knows of the job's shards or units. Told by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._what, self._total, self._done = "", 0, 0
        self._running: dict[str, tuple[int, float]] = {}
        self._tries: dict[str, int] = {}  # of those that were lost and are not done yet

    def start(self, what: str, total: int) -> None:
        """Another part of the job: comparing, making, finishing, publishing."""
        with self._lock:
            self._what, self._total, self._done = what, total, 0
            self._running, self._tries = {}, {}

    def begin(self, name: str, size: int) -> None:
        with self._lock:
            self._running[name] = size, time.time()

    def again(self, name: str) -> None:
        """It was lost, and waits to be begun once more."""
        with self._lock:
            self._running.pop(name, None)
            self._tries[name] = self._tries.get(name, 0) + 1

    def done(self, name: str) -> None:
        with self._lock:
            self._running.pop(name, None)
            self._tries.pop(name, None)
            self._done += 1

    def facts(self) -> dict[str, Any] | None:
        """For a sample of the log; None while there is nothing to tell."""
        with self._lock:
            if not (self._total or self._done or self._running or self._tries):
                return None
            running = [
                {"name": name, "bytes": size, "t": round(t, 3), "tries": self._tries.get(name, 0)}
                for name, (size, t) in self._running.items()
            ]
            waiting = [(name, tries) for name, tries in self._tries.items() if name not in self._running]
            return {
                "what": self._what,
                "total": self._total or None,
                "done": self._done,
                "running": running[:_MOST_RUNNING],
                "more_running": max(len(running) - _MOST_RUNNING, 0),
                "again": [{"name": name, "tries": tries} for name, tries in waiting[:_MOST_AGAIN]],
            }


def work_of(entry: object) -> WorkState | None:
    """What a sample says of it."""
    if not isinstance(entry, dict):
        return None
    return WorkState(
        what=text(entry.get("what"), 40),
        total=size(entry.get("total")),
        done=size(entry.get("done")) or 0,
        running=tuple(_under_way(entry.get("running"))),
        more_running=size(entry.get("more_running")) or 0,
        again=tuple((text(one.get("name"), 300), size(one.get("tries")) or 1) for one in objects(entry.get("again"))),
    )


def _under_way(listed: object) -> Iterable[TaskUnderWay]:
    for one in objects(listed):
        name, t = text(one.get("name"), 300), time_of_day(one.get("t"))
        if name and t is not None:
            yield TaskUnderWay(name, size(one.get("bytes")) or 0, t, size(one.get("tries")) or 0)


_EVERY_S = 0.5
_PROCESSES_EVERY_S = 5.0
_SHOWN_PROCESSES = 20
_MOST_EVENTS = 20_000  # the log thins its samples, not its events


class Recording:
    """Listens to a job, tells `inner`, and writes a log. Close it, whatever happened."""

    def __init__(
        self,
        inner: Progress,
        log: Path,
        command: Sequence[str],
        limit: Limit,
        forecast: Mapping[str, Any] | None = None,
        stop_file: Path | None = None,
    ) -> None:
        self._inner = inner
        self._work = WorkTally()
        self._names = ProcessNames()
        self._stop_file = stop_file
        self._peak = (0, time.time())
        self._events = 0
        self._nodes: dict[str, int] = {}  # the most that each was seen to hold
        self._limit_bytes = limit.bytes
        self._meter = TreeMeter(lambda: [os.getpid()])
        self._listed = 0.0
        # Lines for the thread, which alone writes: a log has one writer, and a job should not wait for a disk.
        self._waiting: queue.SimpleQueue[tuple[str, dict[str, Any]] | None] = queue.SimpleQueue()
        try:
            log.unlink(missing_ok=True)
            self._log = LogWriter(log)
        except OSError as error:
            raise InputError(f"The log {str(log)!r} cannot be written: {reason(error)}.") from error
        self._log.write("head", self._head(command, limit, forecast))
        self._thread = threading.Thread(target=self._write, name="brim-record", daemon=True)
        self._thread.start()

    def _head(self, command: Sequence[str], limit: Limit, forecast: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "boot_id": boot_id(),
            "machine": machine_facts(),
            "limit": {"bytes": limit.bytes, "why": limit.reason, "enforced": "the job keeps to it"},
            "watched": "job",
            "command": list(command),
            "pid": os.getpid(),
            "versions": versions(),
            "not_seen": blind_spots(),
            **({"forecast": dict(forecast)} if forecast else {}),
            **({"ladder": {"stop_file": str(self._stop_file)}} if self._stop_file else {}),
        }

    @property
    def peak_bytes(self) -> int:
        return max(self._peak[0], getattr(self._inner, "peak_bytes", 0))

    @property
    def node_peak_bytes(self) -> int:
        return max(self._nodes.values(), default=0)

    def start(self, what: str, total_bytes: int, shards: int, limit_bytes: int) -> None:
        self._inner.start(what, total_bytes, shards, limit_bytes)
        self._work.start(what, shards)
        self._event("start", f"{what}: {format_size(total_bytes)}{f' in {shards:,} shards' if shards else ''}")

    def advance(self, size: int) -> None:
        self._inner.advance(size)

    def hashed(self, size: int) -> None:
        self._inner.hashed(size)

    def committed(self) -> None:
        self._inner.committed()
        self._event("mark", "commit")

    def begin(self, name: str, size: int) -> None:
        self._work.begin(name, size)

    def again(self, name: str) -> None:
        self._work.again(name)

    def shard(self, name: str, size: int, sha256: str, how: str) -> None:
        self._inner.shard(name, size, sha256, how)
        self._work.done(name)
        self._event("shard", f"{name}: {format_size(size)} {how}" if size else f"{name}: {how}")

    def rows(self, count: int) -> None:
        tell_rows(self._inner, count)

    def note(self, text: str) -> None:
        self._inner.note(text)
        self._event("note", text)

    def nodes(self, held: Mapping[str, int]) -> None:
        self._inner.nodes(held)
        self._nodes = {name: max(held.get(name, 0), self._nodes.get(name, 0)) for name in {**self._nodes, **held}}

    def finish(self) -> None:
        self._inner.finish()

    def close(self, exit_code: int, error: str | None = None) -> None:
        """Write the end. `error` is what the job failed with."""
        if not self._thread.is_alive():
            return
        if error is not None:
            self._waiting.put(("event", {"t": round(time.time(), 3), "kind": "error", "text": error}))
        self._waiting.put(None)
        self._thread.join()
        peak_bytes, peak_t = self._peak
        end = {
            "t": round(time.time(), 3),
            "exit_code": exit_code,
            "signal": None,
            "peak_bytes": peak_bytes,
            "peak_t": round(peak_t, 3),
            "overshoot_bytes": max(peak_bytes - self._limit_bytes, 0),
            "events_left_out": max(self._events - _MOST_EVENTS, 0),
            "lost_lines": self._log.lost_lines,
        }
        self._log.write("end", end)
        self._log.close()

    def _event(self, kind: str, text: str) -> None:
        self._events += 1
        if self._events <= _MOST_EVENTS:
            self._waiting.put(("event", {"t": round(time.time(), 3), "kind": kind, "text": text}))

    def _write(self) -> None:
        due = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= due:
                self._sample()
                due = now + _EVERY_S
            try:
                line = self._waiting.get(timeout=max(due - now, 0.0))
            except queue.Empty:
                continue
            if line is None:
                break
            self._log.write(*line)
        self._sample()

    def _sample(self) -> None:
        reading, machine, now = self._meter.read(), machine_now(), time.time()
        usage = reading.usage
        if usage.total_bytes > self._peak[0]:
            self._peak = (usage.total_bytes, now)
        facts: dict[str, Any] = {
            "t": round(now, 3),
            **asdict(usage),
            "total_bytes": usage.total_bytes,
            "available_bytes": machine.available_bytes,
            "swap_free_bytes": machine.swap_free_bytes,
            "psi_some_avg10": machine.psi_some_avg10,
        }
        if time.monotonic() - self._listed >= _PROCESSES_EVERY_S:
            self._listed = time.monotonic()
            largest = sorted(reading.processes, key=lambda process: -process.usage.total_bytes)[:_SHOWN_PROCESSES]
            facts["processes"] = [
                {"pid": p.pid, "name": self._names.of(p.pid, p.name), **asdict(p.usage)} for p in largest
            ]
        if (work := self._work.facts()) is not None:
            facts["work"] = work
        if self._nodes:
            facts["nodes"] = [{"name": name, "peak_bytes": peak} for name, peak in self._nodes.items()]
        self._log.write("sample", facts)


@contextmanager
def recorded(
    inner: Progress,
    html: Path | None,
    command: Sequence[str],
    limit: Limit,
    forecast: Mapping[str, Any] | None = None,
    *,
    live_port: int | None = None,
    open_page: bool = False,
    stop_file: Path | None = None,
) -> Iterator[Progress]:
    """Listen to a job and write its page at `html`, also if it fails; with `live_port`, show it meanwhile.

    The log stays beside the page, for a job that does not live to see its end; without `html` it is in the user's
    folder of logs. Without either, nothing but `inner`.
    """
    if html is None and live_port is None:
        yield inner
        return
    # Most runs have neither, and need not wait for them.
    from brim.report.live_server import shown_live
    from brim.report.page import write_page

    log = log_beside(html) if html is not None else new_log_path("-".join(command[:2]))
    recording = Recording(inner, log, command, limit, forecast, stop_file)
    exit_code, error = 1, None
    with shown_live(log, live_port, open_page, _tell):
        try:
            yield recording
            exit_code = 0
        except BrimError as failure:
            exit_code, error = failure.exit_code, failure.message
            raise
        except KeyboardInterrupt:
            exit_code, error = Stopped.exit_code, "Stopped by Ctrl-C."
            raise
        finally:
            recording.close(exit_code, error)
            if html is not None:
                write_page(log, html)


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def log_beside(html: Path) -> Path:
    """The log of a page; neither takes the place of something else, or it is refused before anything runs."""
    from brim.report.page import check_page  # as above

    log = html.with_suffix(".jsonl")
    if log == html:
        raise InputError("--report takes the name of a page.", hint=f"Write --report={html.with_suffix('.html')}.")
    check_page(html)
    check_log(log)
    return log

"""Write the run log of a brim job in the format of `brim run`, for its report and live page."""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from brim.errors import BrimError, InputError, StoppedError
from brim.memory.limit import Limit
from brim.memory.meter import blind_spots, largest_first, machine_now
from brim.memory.tree_meter import TreeMeter
from brim.monitor.log_writer import (
    SHOWN_PROCESSES,
    LogWriter,
    check_log,
    head_entry,
    new_log_path,
    process_entries,
    sample_entry,
)
from brim.monitor.watching.find_processes import ProcessNames
from brim.progress import Progress, ProgressSnapshot, Renderer, as_progress
from brim.sizes import format_size
from brim.state.atomic_files import reason

_MAX_RUNNING, _MAX_WAITING = 40, 20
_SAMPLE_EVERY_S = 0.5
_PROCESSES_EVERY_S = 5.0
_MAX_EVENTS = 20_000  # the log thins its samples, not its events


class RunRecorder(Renderer):
    """Writes the run log of a job. A thread samples memory twice per second and is the only writer.

    The thread shares the process with the job: a job that the kernel kills leaves a log without an end, of which
    `brim report` still makes a page.
    """

    interval_s = math.inf  # the thread takes snapshots itself

    def __init__(
        self,
        progress: Progress,
        log: Path,
        command: Sequence[str],
        limit: Limit,
        forecast: Mapping[str, Any] | None = None,
        stop_file: Path | None = None,
    ) -> None:
        self._progress, self._limit_bytes = progress, limit.bytes
        self._names = ProcessNames()
        self.peak_bytes, self._peak_t = 0, time.time()
        self._events = 0
        self._meter = TreeMeter(lambda: [os.getpid()])
        self._listed_at = 0.0
        # The thread writes these entries, so that the job does not wait for a disk.
        self._queue: queue.SimpleQueue[tuple[str, dict[str, Any]] | None] = queue.SimpleQueue()
        facts: dict[str, Any] = {"pid": os.getpid(), "not_seen": blind_spots()}
        if forecast:
            facts["forecast"] = dict(forecast)
        if stop_file:
            facts["ladder"] = {"stop_file": str(stop_file)}
        try:
            log.unlink(missing_ok=True)
            self._log = LogWriter(log)
        except OSError as error:
            raise InputError(f"The log {str(log)!r} cannot be written: {reason(error)}.") from error
        self._log.write("head", head_entry("job", command, limit, "the job keeps to it", **facts))
        self._thread = threading.Thread(target=self._write, name="brim-record", daemon=True)
        self._thread.start()

    def event(self, name: str, state: ProgressSnapshot, /, **facts: Any) -> None:
        if name == "start":
            shards = f" in {state.shards:,} shards" if state.shards else ""
            self._add("start", f"{state.phase}: {format_size(state.total_bytes)}{shards}")
        elif name == "shard":
            size = f"{format_size(facts['bytes'])} " if facts["bytes"] else ""
            self._add("shard", f"{facts['name']}: {size}{facts['how']}")
        elif name == "commit":
            self._add("mark", "commit")
        elif name == "note":
            self._add("note", facts["text"])

    def _add(self, kind: str, text: str) -> None:
        self._events += 1
        if self._events <= _MAX_EVENTS or kind == "error":
            self._queue.put(("event", {"t": round(time.time(), 3), "kind": kind, "text": text}))

    def close(self, exit_code: int, error: str | None = None) -> None:
        """Write the end. `error` is the message that the job failed with."""
        if not self._thread.is_alive():
            return
        omitted = max(self._events - _MAX_EVENTS, 0)
        if error is not None:
            self._add("error", error)
        self._queue.put(None)
        self._thread.join()
        end = {
            "t": round(time.time(), 3),
            "exit_code": exit_code,
            "signal": None,
            "peak_bytes": self.peak_bytes,
            "peak_t": round(self._peak_t, 3),
            "overshoot_bytes": max(self.peak_bytes - self._limit_bytes, 0),
            "events_left_out": omitted,
            "lost_lines": self._log.lost_lines,
        }
        self._log.write("end", end)
        self._log.close()

    def _write(self) -> None:
        due = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= due:
                self._sample()
                due = now + _SAMPLE_EVERY_S
            try:
                line = self._queue.get(timeout=max(due - now, 0.0))
            except queue.Empty:
                continue
            if line is None:
                break
            self._log.write(*line)
        self._sample()

    def _sample(self) -> None:
        reading, now, state = self._meter.read(), time.time(), self._progress.snapshot()
        if reading.usage.total_bytes > self.peak_bytes:
            self.peak_bytes, self._peak_t = reading.usage.total_bytes, now
            self._progress.peak_bytes = max(self._progress.peak_bytes, self.peak_bytes)
        facts = sample_entry(now, reading.usage, machine_now())
        if time.monotonic() - self._listed_at >= _PROCESSES_EVERY_S:
            self._listed_at = time.monotonic()
            facts["processes"] = process_entries(largest_first(reading.processes)[:SHOWN_PROCESSES], self._names)
        if state.shards or state.shards_done or state.running or state.retries:
            # A job may have a million shards, so a sample has counts and the running tasks; finished ones are events.
            names = {task.name for task in state.running}
            facts["work"] = {
                "what": state.phase,
                "total": state.shards or None,
                "done": state.shards_done,
                "running": [
                    {"name": task.name, "bytes": task.bytes, "t": round(task.t, 3), "tries": task.tries}
                    for task in state.running[:_MAX_RUNNING]
                ],
                "more_running": max(len(state.running) - _MAX_RUNNING, 0),
                "again": [{"name": name, "tries": tries} for name, tries in state.retries.items() if name not in names][
                    :_MAX_WAITING
                ],
            }
        if state.node_peaks:
            facts["nodes"] = [{"name": name, "peak_bytes": peak} for name, peak in state.node_peaks.items()]
        self._log.write("sample", facts)


@contextmanager
def recorded(
    progress: Progress,
    html: Path | None,
    command: Sequence[str],
    limit: Limit,
    forecast: Mapping[str, Any] | None = None,
    *,
    live_port: int | None = None,
    open_page: bool = False,
    stop_file: Path | None = None,
) -> Iterator[Progress]:
    """Record a job and write its page to `html`, also if it fails; with `live_port`, serve its live page.

    The log stays next to the page, for a job that is killed before its end; without `html` it is in the user's
    folder of logs. Without either nothing is recorded.
    """
    if html is None and live_port is None:
        yield progress
        return
    # Most runs have neither, and need not wait for them.
    from brim.monitor.report.live_server import shown_live
    from brim.monitor.report.page import write_page

    log = log_next_to(html) if html is not None else new_log_path("-".join(command[:2]))
    progress = as_progress(progress)
    recorder = RunRecorder(progress, log, command, limit, forecast, stop_file)
    exit_code, error = 1, None
    with shown_live(log, live_port, open_page, lambda text: sys.stderr.write(f"{text}\n")):
        try:
            with progress.drawn_by(recorder):
                yield progress
            exit_code = 0
        except BrimError as failure:
            exit_code, error = failure.exit_code, failure.message
            raise
        except KeyboardInterrupt:
            exit_code, error = StoppedError.exit_code, "Stopped by Ctrl-C."
            raise
        finally:
            recorder.close(exit_code, error)
            if html is not None:
                write_page(log, html)


def log_next_to(html: Path) -> Path:
    """Return the log of a page. Refuse both if they would replace a file that brim did not write."""
    from brim.monitor.report.page import check_page  # as above

    log = html.with_suffix(".jsonl")
    if log == html:
        raise InputError(
            "--report needs the name of an HTML page.", hint=f"Write --report={html.with_suffix('.html')}."
        )
    check_page(html)
    check_log(log)
    return log

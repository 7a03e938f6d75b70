"""Stop a watched process tree: request it with the stop file, then SIGTERM, then SIGKILL.

`StopSequence.step` is called at every sample and takes the next step if it is due, so that nothing waits. The lead of
a command is set by the user, or derived from an earlier run of it, or 30 s.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import field
from pathlib import Path

from brim.memory.thresholds import DEFAULT_LEAD_S
from brim.monitor.log_records import End, Head, LogEvent, read_records
from brim.monitor.log_writer import recent_logs
from brim.records import dataclass
from brim.sizes import format_duration
from brim.state.stop import forget_run

_LEFTOVERS_S = 5.0


@dataclass(slots=True)
class StopSequence:
    """`main` returns the processes that get SIGTERM first, `members` all of them. Without `enforce`, no signals."""

    members: Callable[[], Iterable[int]]
    report: Callable[[str, str], None]
    stop_file: Path | None = None
    grace_s: float = 30.0
    enforce: bool = True
    main: Callable[[], Iterable[int]] = field(default=list)
    stage: str | None = None  # "stop" or "kill", once started
    _term_after_s: float = 0.0  # from the stop file to SIGTERM
    _made_file: bool = False
    _requested_at: float | None = None
    _terminated_at: float | None = None
    _orphaned_at: float | None = None
    _refused: set[int] = field(default_factory=set)

    def stop(self, now: float, left_s: float | None = None) -> None:
        """Request a graceful stop, once.

        `left_s` is the predicted time to the limit: SIGTERM follows the stop file at half of it at the latest, so that
        a program that only handles the signal still gets it.
        """
        if self.stage is not None or (self.stop_file is None and not self.enforce):
            return
        self.stage, self._requested_at = "stop", now
        self._term_after_s = self.grace_s if left_s is None else min(self.grace_s, left_s / 2)
        if self.stop_file is not None:
            try:
                self.stop_file.parent.mkdir(parents=True, exist_ok=True)
                self.stop_file.touch()
                self._made_file = True
            except OSError as error:
                self.report("stop", f"the stop file {self.stop_file} cannot be made: {error.strerror}")
        if self._made_file:
            delay = format_duration(self._term_after_s)
            signals = f"; SIGTERM in {delay} if it keeps running" if self.enforce else ""
            self.report("stop", f"asked it to stop with the stop file {self.stop_file}{signals}")
        elif self.enforce:
            self._terminate(now)

    def kill(self, now: float, why: str) -> None:
        """Kill the process tree."""
        if not self.enforce:
            return
        self._signal(self.members(), signal.SIGKILL)
        if self.stage != "kill":
            self.stage = "kill"
            self.report("kill", f"killed it: {why}")

    def step(self, now: float, has_main_ended: bool) -> None:
        """Take the next step if it is due."""
        if self.stage == "kill":
            self._signal(self.members(), signal.SIGKILL)  # processes that started during the first kill
        elif self.stage == "stop" and self.enforce:
            if has_main_ended:
                if self._orphaned_at is None:
                    self._orphaned_at = now
                    self._signal(self.members(), signal.SIGTERM)
                elif now - self._orphaned_at >= min(self.grace_s, _LEFTOVERS_S):
                    self._signal(self.members(), signal.SIGKILL)
            elif self._terminated_at is None:
                if now - (self._requested_at or now) >= self._term_after_s:
                    self._terminate(now)
            elif now - self._terminated_at >= self.grace_s:
                self.kill(now, f"it was still running {format_duration(self.grace_s)} after SIGTERM")

    def finish(self, is_over: bool = True) -> None:
        """Remove the stop file, which would stop the next run.

        A watch that ends before its process keeps a file that a person made: the process may not have read it yet.
        """
        if self.stop_file is not None and (is_over or self._made_file):
            forget_run(self.stop_file)

    def _terminate(self, now: float) -> None:
        """Signal only the command itself: workers that die would spoil a checkpoint that is being saved."""
        self._terminated_at = now
        self._signal(self.main(), signal.SIGTERM)
        self.report("term", f"sent SIGTERM; SIGKILL in {format_duration(self.grace_s)} if it keeps running")

    def _signal(self, pids: Iterable[int], number: signal.Signals) -> None:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
            except PermissionError:
                if pid not in self._refused:
                    self._refused.add(pid)
                    self.report("refused", f"no right to send {number.name} to process {pid}")


_READ_LOGS = 20
_MARGIN, _SHORTEST_S, _LONGEST_S = 1.5, 10.0, 1800.0


def lead_of(command: Iterable[str], *logs: Path) -> tuple[float, str]:
    """Return the lead of a command and its reason, which is empty for the default."""
    expected = list(command)
    for log in (*logs, *recent_logs()[:_READ_LOGS]):
        took_s = _stop_duration(log, expected)
        if took_s is not None:
            lead_s = min(max(_MARGIN * took_s, _SHORTEST_S), _LONGEST_S)
            return lead_s, f"it took {format_duration(took_s)} to stop last time"
    return DEFAULT_LEAD_S, ""


def _stop_duration(log: Path, command: list[str]) -> float | None:
    """Return the seconds from the stop request to the exit, of a run of this command that exited without a kill."""
    requested_t: float | None = None
    try:
        for _, record in read_records(log):
            if isinstance(record, Head) and list(record.command) != command:
                return None
            if isinstance(record, LogEvent) and record.kind == "kill":
                return None
            if isinstance(record, LogEvent) and record.kind == "stop" and requested_t is None:
                requested_t = record.t
            if (
                isinstance(record, End)
                and record.stopped == "stop"
                and requested_t is not None
                and record.t is not None
            ):
                return max(record.t - requested_t, 0.0)
    except OSError:
        return None
    return None

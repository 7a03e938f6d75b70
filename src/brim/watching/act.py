"""Ending what is watched: ask with the stop file, then SIGTERM, then SIGKILL to the whole tree.

Steps are taken in `step`, called at every sample, so that nothing here waits. How long a command needs to stop
is what the user says, what it took last time, or half a minute.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import field
from pathlib import Path

from brim.memory.guard import DEFAULT_LEAD_S, span_text
from brim.records import dataclass
from brim.state.stop import forget_run
from brim.watching.run_log import log_folder, read_log

Tell = Callable[[str, str], None]
_LEFTOVERS_S = 5.0


@dataclass(slots=True)
class Stopping:
    """`main` is who is asked first; `members` is everyone. Without `act` nobody is signalled."""

    members: Callable[[], Iterable[int]]
    tell: Tell
    stop_file: Path | None = None
    grace_s: float = 30.0
    act: bool = True
    main: Callable[[], Iterable[int]] = field(default=list)
    how: str | None = None  # "stop" or "kill", once begun
    _patience_s: float = 0.0  # from the stop file to SIGTERM
    _touched: bool = False
    _asked_at: float | None = None
    _terminated_at: float | None = None
    _orphaned_at: float | None = None
    _refused: set[int] = field(default_factory=set)

    def stop(self, now: float, left_s: float | None = None) -> None:
        """Begin the graceful way. Asking twice changes nothing.

        `left_s` is the predicted time to the limit: SIGTERM follows the stop file at half of it at the latest, so that
        a program that only handles the signal still gets it.
        """
        if self.how is not None:
            return
        if self.stop_file is None and not self.act:
            return
        self.how, self._asked_at = "stop", now
        self._patience_s = self.grace_s if left_s is None else min(self.grace_s, left_s / 2)
        if self.stop_file is not None and self._touch():
            later = f"; SIGTERM in {span_text(self._patience_s)} if it goes on" if self.act else ""
            self.tell("stop", f"asked it to stop with the stop file {self.stop_file}{later}")
        elif self.act:
            self._terminate(now)

    def kill(self, now: float, why: str) -> None:
        """End the tree at once."""
        if not self.act:
            return
        self._signal(self.members(), signal.SIGKILL)
        if self.how != "kill":
            self.how = "kill"
            self.tell("kill", f"killed it: {why}")

    def step(self, now: float, main_ended: bool) -> None:
        """The next rung, if its time has come."""
        if self.how == "kill":
            self._signal(self.members(), signal.SIGKILL)  # what was started while the others were killed
        elif self.how == "stop" and self.act:
            if main_ended:
                self._end_leftovers(now)
            elif self._terminated_at is None:
                if now - (self._asked_at or now) >= self._patience_s:
                    self._terminate(now)
            elif now - self._terminated_at >= self.grace_s:
                self.kill(now, f"it went on for {span_text(self.grace_s)} after SIGTERM")

    def finish(self, over: bool = True) -> None:
        """The stop file has done its work, whoever made it: left behind, it would stop the next run.

        A watch that ends before what it watches leaves a file that others made: it may still be wanted.
        """
        if self.stop_file is not None and (over or self._touched):
            forget_run(self.stop_file)

    def _terminate(self, now: float) -> None:
        """Only the command itself: workers that die under a program that is saving its state spoil that."""
        self._terminated_at = now
        self._signal(self.main(), signal.SIGTERM)
        self.tell("term", f"sent SIGTERM; SIGKILL in {span_text(self.grace_s)} if it goes on")

    def _end_leftovers(self, now: float) -> None:
        if self._orphaned_at is None:
            self._orphaned_at = now
            self._signal(self.members(), signal.SIGTERM)
        elif now - self._orphaned_at >= min(self.grace_s, _LEFTOVERS_S):
            self._signal(self.members(), signal.SIGKILL)

    def _touch(self) -> bool:
        assert self.stop_file is not None
        try:
            self.stop_file.parent.mkdir(parents=True, exist_ok=True)
            self.stop_file.touch()
        except OSError as error:
            self.tell("stop", f"the stop file {self.stop_file} cannot be made: {error.strerror}")
            return False
        self._touched = True
        return True

    def _signal(self, pids: Iterable[int], number: signal.Signals) -> None:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
            except PermissionError:
                if pid not in self._refused:
                    self._refused.add(pid)
                    self.tell("refused", f"no right to send {number.name} to process {pid}")


_LOOKED_AT = 20  # logs
_MARGIN, _SHORTEST_S, _LONGEST_S = 1.5, 10.0, 1800.0


def lead_of(command: Iterable[str], *logs: Path) -> tuple[float, str]:
    """The lead for a command, and why it is that, empty if it is the usual one."""
    wanted = list(command)
    try:
        folder = sorted(log_folder().glob("*.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        folder = []
    for log in (*logs, *folder[:_LOOKED_AT]):
        took_s = _took(log, wanted)
        if took_s is not None:
            lead_s = min(max(_MARGIN * took_s, _SHORTEST_S), _LONGEST_S)
            return lead_s, f"it took {span_text(took_s)} to stop last time"
    return DEFAULT_LEAD_S, ""


def _took(log: Path, command: list[str]) -> float | None:
    """Seconds from the stop to the end, of a run of this command that was stopped and ended by itself."""
    asked: float | None = None
    try:
        for entry in read_log(log):
            kind = entry["type"]
            if kind == "head" and entry.get("command") != command:
                return None
            if kind == "event" and entry.get("kind") == "kill":
                return None
            if kind == "event" and entry.get("kind") == "stop" and asked is None:
                asked = entry.get("t")
            if kind == "end" and entry.get("stopped") == "stop" and isinstance(asked, int | float):
                ended = entry.get("t")
                return max(float(ended) - asked, 0.0) if isinstance(ended, int | float) else None
    except OSError:
        return None
    return None

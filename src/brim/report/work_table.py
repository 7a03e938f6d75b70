"""The shards or units of a job and how far each is: gathered while it runs, logged with samples, read for the page.

A job may have a million of them, so what is logged is counts and those that are under way; the finished ones are the
log's own events, thinned as all events are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from brim.records import dataclass
from brim.watching.log_entries import objects, size, text, time_of_day

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

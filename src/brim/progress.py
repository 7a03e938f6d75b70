"""The progress of a running job: one object that counts, and renderers that draw snapshots of it.

Jobs know only `Progress`. A terminal bar, a notebook, plain lines, JSON lines and the run log are renderers
(`monitor/report/progress_renderers.py` and `recording.py` in the same folder).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from brim.memory.meter import tree_bytes
from brim.records import dataclass
from brim.wording import worded

Advance = Callable[[int], None]
Watch = Callable[["Progress | bool | None"], "Progress"]
_SLOW_S = 10.0
_MEMORY_EVERY_S = 0.5


@contextmanager
def notify_if_slow(say: Callable[[str], None], text: str) -> Iterator[None]:
    """Report `text` if the block takes long. For waits that come before there is progress to draw."""
    timer = threading.Timer(_SLOW_S, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A shard or unit that a worker has begun at the time of day `t`; `tries` is how often it was begun before."""

    name: str
    bytes: int
    t: float
    tries: int = 0


@dataclass(frozen=True, slots=True)
class ProgressSnapshot:
    """The state of a job at one moment. Counts are those of the present phase."""

    phase: str
    bytes: int
    total_bytes: int  # 0: unknown
    hashed_bytes: int
    rows: int
    shards: int  # 0: unknown
    shards_done: int
    commits: int
    running: tuple[RunningTask, ...]
    retries: Mapping[str, int]  # tasks that were lost and are not finished yet: how often they were begun
    nodes: Mapping[str, int]  # memory of the job on other machines now
    node_peaks: Mapping[str, int]
    memory_bytes: int
    limit_bytes: int
    elapsed_s: float
    job_s: float  # since the first phase

    @property
    def done_bytes(self) -> int:
        """Bytes that are done, at most the total: it counts files, and shards are a little larger."""
        return min(self.bytes, self.total_bytes) if self.total_bytes else self.bytes

    @property
    def rate(self) -> float:
        return self.bytes / max(self.elapsed_s, 1e-6)

    @property
    def left_s(self) -> float | None:
        """Seconds left at the present rate; None before anything has moved, or without a known total."""
        return (self.total_bytes - self.done_bytes) / self.rate if self.rate > 1 and self.total_bytes else None


class Renderer:
    """Draws a job. `draw` is called at most every `interval_s` while bytes move, `event` for every event."""

    interval_s = 1.0

    def draw(self, state: ProgressSnapshot) -> None:
        """Show how far the job is."""

    def event(self, name: str, state: ProgressSnapshot, /, **facts: Any) -> None:
        """Show a start, shard, commit, note or finish."""


class Progress:
    """Counts what a job has done. Its methods are called from several threads, must be quick and must not raise.

    Without renderers it is silent. A subclass may override any of the methods to follow a job itself.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Set up the state, so that a subclass need not call `super().__init__`."""
        self = super().__new__(cls)
        self._set_up()
        return self

    def _set_up(self) -> None:
        self._lock = threading.RLock()
        self._renderers: dict[Renderer, float] = {}  # when each was last drawn
        self._forward_to: object = None
        self._clock: Callable[[], float] = time.monotonic
        self._commits = self._memory_bytes = self.peak_bytes = 0
        self._nodes: Mapping[str, int] = {}
        self._node_peaks: dict[str, int] = {}
        self._joined: str | None = None
        self._joined_total = 0
        self._counts, self._began, self._measured = True, 0.0, -math.inf
        self._job_began: float | None = None
        self._begin_phase("", 0, 0, 0)

    def __init__(
        self, *renderers: Renderer, forward_to: object = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Draw with `renderers`. `forward_to` is any object with methods of this class: they are called too."""
        self._renderers = dict.fromkeys(renderers, 0.0)
        self._forward_to, self._clock = forward_to, clock

    @property
    def renderers(self) -> tuple[Renderer, ...]:
        """The renderers that draw this progress."""
        return tuple(self._renderers)

    @property
    def node_peak_bytes(self) -> int:
        """The largest memory of a cluster node."""
        return max(self._node_peaks.values(), default=0)

    def start(self, what: str, total_bytes: int, shards: int, limit_bytes: int) -> None:
        """Begin a phase of the job."""
        with self._lock:
            if self._joined is not None:
                self._counts = what == self._joined  # later phases are small, and not in the total
                if self._phase == self._joined:
                    return
                what, total_bytes, shards = self._joined, self._joined_total, 0
            self._forward("start", what, total_bytes, shards, limit_bytes)
            self._begin_phase(what, total_bytes, shards, limit_bytes)
            self._event("start", what=what, total_bytes=total_bytes, shards=shards, limit_bytes=limit_bytes)

    def advance(self, size: int) -> None:
        """Count bytes that are done."""
        with self._lock:
            size = size if self._counts else 0
            self._forward("advance", size)
            self._bytes += size
            self._draw_due()

    def hashed(self, size: int) -> None:
        """Count bytes that were hashed."""
        with self._lock:
            self._forward("hashed", size)
            self._hashed += size
            self._draw_due()

    def rows(self, count: int) -> None:
        """Count rows that are done."""
        with self._lock:
            self._forward("rows", count)
            self._rows += count

    def committed(self) -> None:
        """Count a commit."""
        with self._lock:
            self._forward("committed")
            self._commits += 1
            self._event("commit")

    def begin(self, name: str, size: int) -> None:
        """Note that a worker has begun a shard or unit."""
        with self._lock:
            self._forward("begin", name, size)
            self._running[name] = size, time.time()

    def again(self, name: str) -> None:
        """Note that a shard or unit was lost and will be retried."""
        with self._lock:
            self._forward("again", name)
            self._running.pop(name, None)
            self._retries[name] = self._retries.get(name, 0) + 1

    def shard(self, name: str, size: int, sha256: str, how: str) -> None:
        """Count a shard or unit that is finished."""
        with self._lock:
            self._forward("shard", name, size, sha256, how)
            self._running.pop(name, None)
            self._retries.pop(name, None)
            self._shards_done += 1
            self._event("shard", name=name, bytes=size, sha256=sha256, how=how)

    def note(self, text: str) -> None:
        """Show a text that the user should know, with options named as in the terminal or in Python."""
        text = worded(text)
        with self._lock:
            self._forward("note", text)
            self._event("note", text=text)

    def nodes(self, held: Mapping[str, int]) -> None:
        """Set the memory that the job uses on other machines, by their names."""
        with self._lock:
            self._forward("nodes", held)
            self._nodes = held
            for name, size in held.items():
                self._node_peaks[name] = max(size, self._node_peaks.get(name, 0))
            self._draw_due()

    def finish(self) -> None:
        """End the drawing. Within `joined` the next job continues it."""
        with self._lock:
            if self._joined is None:
                self._forward("finish")
                self._measure()
                self._event("finish")
                self._job_began = None

    @contextmanager
    def joined(self, what: str, total_bytes: Iterable[int | None]) -> Iterator[Progress]:
        """Show several jobs as one: it starts once, with the total of all, and finishes with the last."""
        known = list(total_bytes)
        self._joined, self._joined_total = what, 0 if None in known else sum(size or 0 for size in known)
        self._phase = ""
        try:
            yield self
        finally:
            self._joined, self._counts = None, True
            self.finish()

    @contextmanager
    def drawn_by(self, renderer: Renderer) -> Iterator[None]:
        """Draw with one more renderer within the block."""
        self._renderers[renderer] = self._clock()
        try:
            yield
        finally:
            self._renderers.pop(renderer, None)

    def snapshot(self) -> ProgressSnapshot:
        """Return the present state."""
        with self._lock:
            return ProgressSnapshot(
                phase=self._phase,
                bytes=self._bytes,
                total_bytes=self._total_bytes,
                hashed_bytes=self._hashed,
                rows=self._rows,
                shards=self._shards,
                shards_done=self._shards_done,
                commits=self._commits,
                running=tuple(
                    RunningTask(name, size, t, self._retries.get(name, 0)) for name, (size, t) in self._running.items()
                ),
                retries=dict(self._retries),
                nodes=dict(self._nodes),
                node_peaks=dict(self._node_peaks),
                memory_bytes=self._memory_bytes,
                limit_bytes=self._limit_bytes,
                elapsed_s=(now := self._clock()) - self._began,
                job_s=now - (now if self._job_began is None else self._job_began),
            )

    def _begin_phase(self, what: str, total_bytes: int, shards: int, limit_bytes: int) -> None:
        self._phase, self._total_bytes, self._shards, self._limit_bytes = what, total_bytes, shards, limit_bytes
        self._bytes = self._hashed = self._rows = self._shards_done = 0
        self._running: dict[str, tuple[int, float]] = {}
        self._retries: dict[str, int] = {}
        if self._renderers:
            self._began = self._clock()
            self._job_began = self._began if self._job_began is None else self._job_began
            self._renderers = dict.fromkeys(self._renderers, self._began)

    def _forward(self, method: str, *values: Any) -> None:
        target = getattr(self._forward_to, method, None)
        if target is not None:
            target(*values)

    def _measure(self) -> None:
        if self._renderers:
            self._memory_bytes = tree_bytes()
            self.peak_bytes = max(self.peak_bytes, self._memory_bytes)

    def _event(self, name: str, /, **facts: Any) -> None:
        if self._renderers:
            if not self._memory_bytes:
                self._measure()
            state = self.snapshot()
            for renderer in self._renderers:
                renderer.event(name, state, **facts)

    def _draw_due(self) -> None:
        if not self._renderers:
            return
        now = self._clock()
        due = [renderer for renderer, drawn in self._renderers.items() if now - drawn >= renderer.interval_s]
        if due or now - self._measured >= _MEMORY_EVERY_S:
            self._measured = now
            self._measure()
        if due:
            state = self.snapshot()
            for renderer in due:
                self._renderers[renderer] = now
                renderer.draw(state)


def as_progress(listener: object) -> Progress:
    """Return a `Progress` that forwards to any object with its methods; the object itself if it is a plain one."""
    return listener if type(listener) is Progress else Progress(forward_to=listener)


def given_or_silent(progress: Progress | bool | None) -> Progress:
    """Return the progress that was passed, or a silent one for True, False and None."""
    return Progress() if progress is None or isinstance(progress, bool) else progress

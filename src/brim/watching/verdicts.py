"""What a watch makes of its samples: alerts to people, the stop, the kill.

The order within `consider` matters: who must be killed is killed before anything is written down, because a
disk that is busy may take longer than the memory lasts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from brim.memory.guard import Alarm, Guard, Level, Line, span_text
from brim.memory.limit import headrooms
from brim.memory.prediction import Prediction
from brim.memory.sampler import Sample
from brim.sizes import format_size
from brim.watching.act import Stopping
from brim.watching.alerts import Alerts
from brim.watching.journal import Journal
from brim.watching.orders import Orders
from brim.watching.stacks import Stacks

_SWAP = Line("swap", Level(share=0.01), after_s=10.0, hysteresis=0.005)
_LOOK_AT_HEADROOM_S = 5.0
_DONE = {"stop": "asked to stop", "kill": "killed"}
_WORDS = {
    "alert": "memory is at",
    "stop": "over the stop line:",
    "kill": "over the kill line:",
    "exhaustion": "memory runs out:",
    "swap": "in swap, which is slow:",
    "system": "the machine's memory is at",
}


class Verdicts:
    """Guards over one watch, and what follows from them."""

    def __init__(
        self,
        orders: Orders,
        journal: Journal,
        alerts: Alerts,
        members: Callable[[], Iterable[int]],
        main: Callable[[], Iterable[int]],
    ) -> None:
        self._orders, self._journal, self._alerts, ladder = orders, journal, alerts, orders.ladder
        lines = [] if orders.target.kind == "machine" else ladder.lines(orders.limit_bytes)
        self._guard = Guard(orders.limit_bytes, lines, lead_s=ladder.lead_s)
        self._swap = Guard(orders.limit_bytes, [_SWAP], horizon_s=0.0, lead_s=0.0)
        self._system = Guard(1, ladder.system_lines(), horizon_s=0.0, lead_s=0.0)
        self._members, self._main = members, main
        self.stopping = self._new_stopping()
        self._stacks = Stacks(lambda text, lines: journal.event("stacks", text, lines=lines))
        self._looked_for: set[str] = set()
        self._oom_seen = self._machine_oom_seen = 0
        self._looked = time.monotonic()
        self._why: str | None = None
        self._stopped: str | None = None  # before what was watched began anew

    def _new_stopping(self) -> Stopping:
        ladder = self._orders.ladder
        return Stopping(
            self._members,
            self._told,
            Path(ladder.stop_file) if ladder.stop_file else None,
            ladder.grace_s,
            ladder.act and self._orders.target.kind != "machine",
            self._main,
        )

    @property
    def limit_bytes(self) -> int:
        return self._guard.limit_bytes

    @property
    def line_bytes(self) -> int:
        return self._guard.lowest_bytes()

    def coming(self, now: float) -> Prediction | None:
        """When the limit would be reached, as things are going."""
        return self._guard.forecast(now)

    def consider(self, sample: Sample, oom_kills: tuple[int, int], main_ended: bool) -> None:
        self._follow_headroom(sample)
        for alarm in self._guard.observe(sample.at, sample.total_bytes):
            self._answer(alarm, sample)
            self._look_at_stacks(alarm.kind, sample)
        self.stopping.step(sample.at, main_ended)
        self._see_kernel_kills(sample.at, *oom_kills)
        swapped = sample.reading.usage.swap_bytes
        for alarm in self._swap.observe(sample.at, swapped):
            self._raise(alarm, sample)
        machine = sample.machine
        if machine.total_bytes:
            self._system.limit_bytes = machine.total_bytes
            for alarm in self._system.observe(sample.at, machine.used_bytes):
                self._raise(alarm, sample)
        self._alerts.tend()

    def _look_at_stacks(self, kind: str, sample: Sample) -> None:
        """Once at the first alarm and once at a stop; a kill has happened before, and is not waited for."""
        occasion = "stop" if kind == "stop" else "alarm"
        if kind == "kill" or occasion in self._looked_for or self._orders.target.kind == "machine":
            return
        self._looked_for.add(occasion)
        largest = sorted(sample.reading.processes, key=lambda process: -process.usage.total_bytes)
        self._stacks.look([process.pid for process in largest[:10]], occasion)

    def _answer(self, alarm: Alarm, sample: Sample) -> None:
        if alarm.kind == "kill":
            self.stopping.kill(sample.at, f"{alarm.text}, over the kill line")
        if alarm.kind in ("stop", "kill"):
            self._why = alarm.text
            self._journal.ask_to_stop()
        if alarm.kind != "kill" or not self.stopping.act:
            self._raise(alarm, sample)
        if alarm.kind in ("stop", "kill"):
            self.stopping.stop(sample.at)

    def _raise(self, alarm: Alarm, sample: Sample) -> None:
        facts = {"used_bytes": alarm.used_bytes, "limit_bytes": alarm.limit_bytes, "level_bytes": alarm.level_bytes}
        if alarm.left_s is not None:
            facts |= {"left_s": round(alarm.left_s), "bytes_per_s": round(alarm.bytes_per_s or 0.0)}
        outlook = alarm.outlook(sample.t)
        text = f"{self._words(alarm)} {alarm.text}" + (f", {outlook}" if outlook else "")
        kind = alarm.kind
        if kind in ("stop", "kill") and not self._does(kind):
            kind = "alert"
            text += f"; only looking, so nothing is done: with --act it would have been {_DONE[alarm.kind]} now"
        self.say(kind, text, **facts)

    def _does(self, kind: str) -> bool:
        """Does anything come of it? A stop may be a file or a flag, a kill is nothing but a kill."""
        stop = self.stopping
        return stop.act or (kind == "stop" and (stop.stop_file is not None or self._orders.ladder.heard))

    def _words(self, alarm: Alarm) -> str:
        if alarm.kind == "stop" and alarm.left_s is not None and alarm.used_bytes < self._stop_bytes():
            lead = span_text(self._orders.ladder.lead_s)
            return f"soon less will be left than the {lead} that a stop needs:"
        return _WORDS[alarm.kind]

    def _stop_bytes(self) -> int:
        return min((line.level.of(self.limit_bytes) for line in self._guard.lines if line.kind == "stop"), default=0)

    def _told(self, kind: str, text: str) -> None:
        self.say(kind, text, used_bytes=self._journal.last_bytes, limit_bytes=self.limit_bytes)

    def say(self, kind: str, text: str, **facts: Any) -> None:
        """To people and to the log."""
        self._journal.event(kind, text, **facts)
        pid = self._orders.target.pid
        self._alerts.say(kind, text, {**facts, **({"pid": pid} if pid is not None else {})})

    def _see_kernel_kills(self, now: float, in_group: int, anywhere: int) -> None:
        if in_group > self._oom_seen:
            self._oom_seen = in_group
            self._why = f"the kernel held it to {format_size(self._orders.limit_bytes)}"
            self.say("oom", f"the kernel killed {in_group} of its processes at {format_size(self._orders.limit_bytes)}")
            # Half a tree hangs or lies: what the limit has hit is over as a whole (v2 does this by itself).
            self.stopping.kill(now, "the rest of it, for the kernel killed a part")
        if anywhere - self._oom_seen > self._machine_oom_seen:
            self._machine_oom_seen = anywhere - self._oom_seen
            # Evidence for later, and no alarm: on a shared machine it is somebody else most of the time.
            text = "the kernel killed a process for memory somewhere on this machine"
            self._journal.event("oom", text, machine=True)

    def _follow_headroom(self, sample: Sample) -> None:
        """A limit that nobody set is what the machine and the groups above leave now."""
        if self._orders.floating and sample.at - self._looked >= _LOOK_AT_HEADROOM_S:
            self._looked = sample.at
            pid = self._orders.target.pid or "self"
            rooms = headrooms(os.environ, held_bytes=sample.total_bytes, pid=pid)
            room = min((limit.bytes for limit in rooms), default=None)
            if room is not None:
                self._guard.limit_bytes = max(room, 1)

    def only_look(self, why: str) -> None:
        """From now on nothing is ended, for the reason that is said."""
        if self.stopping.act:
            self.stopping.act = False
            self.say("refused", why)

    def begin_anew(self) -> None:
        """What was watched has ended or started again: nothing that was said before holds."""
        self._guard = Guard(self._orders.limit_bytes, self._guard.lines, lead_s=self._orders.ladder.lead_s)
        self._stopped = self.stopping.how or self._stopped
        self.stopping.finish()
        self.stopping = self._new_stopping()

    def facts(self, oom_kills: int) -> dict[str, Any]:
        """For the log's last line: whether brim stopped it, and for what."""
        how = "oom" if oom_kills else self.stopping.how or self._stopped
        return {"stopped": how, "why": self._why if how else None}

    def settle(self) -> None:
        """Everything was said: what comes after it on the terminal comes after it."""
        self._stacks.settle()
        self._alerts.settle()

    def close(self) -> None:
        self._alerts.close()

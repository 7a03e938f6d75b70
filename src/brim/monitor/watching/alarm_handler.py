"""Act on samples: warn, request a stop, kill.

The order within `handle` matters: a kill comes before anything is written, because a busy disk may take longer than
the memory lasts. At the first alarm and at a stop, the stacks of Python processes are read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from brim.memory.limit import cgroup_headrooms, headrooms
from brim.memory.meter import largest_first
from brim.memory.prediction import Prediction
from brim.memory.sampler import Sample
from brim.memory.thresholds import Alarm, Guard, Level, Threshold
from brim.memory.tmpfs_files import TmpfsFiles
from brim.monitor.watching.alerts import Alerts, Stacks
from brim.monitor.watching.find_processes import ProcessNames
from brim.monitor.watching.journal import Journal
from brim.monitor.watching.launch import WatchConfig
from brim.monitor.watching.stop_sequence import StopSequence
from brim.sizes import format_duration, format_size

_SWAP = Threshold("swap", Level(share=0.01), after_s=10.0, hysteresis=0.005)
_CHECK_HEADROOM_S = 5.0
_NOTABLE, _MAX_LOCATIONS = 0.1, 2  # share of the memory from which a process is named, and how many are
_SHARED = 1.2  # processes whose sum exceeds the memory by this factor share pages
_WITH_ENFORCE = {"stop": "asked to stop", "kill": "killed"}
_PREFIXES = {
    "alert": "memory is at",
    "stop": "above the stop threshold:",
    "kill": "above the kill threshold:",
    "exhaustion": "memory runs out:",
    "swap": "in swap, which is slow:",
    "system": "the machine's memory is at",
}


class AlarmHandler:
    """Applies the guards of one watch and acts on their alarms."""

    def __init__(
        self,
        config: WatchConfig,
        journal: Journal,
        alerts: Alerts,
        members: Callable[[], Iterable[int]],
        main: Callable[[], Iterable[int]],
        files: TmpfsFiles,
    ) -> None:
        self._config, self._journal, self._alerts, self._files = config, journal, alerts, files
        self._levels, self._is_machine = config.levels, config.target.kind == "machine"
        self._members, self._main, self._names = members, main, ProcessNames()
        self._guard = self._new_guard()
        self._swap = Guard(config.limit.bytes, [_SWAP], horizon_s=0.0, lead_s=0.0)
        self._system = Guard(1, self._levels.system_thresholds(), horizon_s=0.0, lead_s=0.0)
        self.stopping = self._new_sequence()
        self._stacks = Stacks(lambda text, lines: journal.add_event("stacks", text, lines=lines))
        self._stack_occasions: set[str] = set()
        self._group_kills = self._machine_kills = 0
        self._headroom_at = time.monotonic()
        self._why: str | None = None
        self._earlier_stage: str | None = None  # of an earlier process that matched

    def _new_guard(self) -> Guard:
        limit_bytes = self._config.limit.bytes
        thresholds = [] if self._is_machine else self._levels.thresholds(limit_bytes)
        return Guard(limit_bytes, thresholds, lead_s=self._levels.lead_s)

    def _new_sequence(self) -> StopSequence:
        def report(kind: str, text: str) -> None:
            self.report(kind, text, used_bytes=self._journal.last_bytes, limit_bytes=self.limit_bytes)

        stop_file = Path(self._levels.stop_file) if self._levels.stop_file else None
        enforce = self._levels.enforce and not self._is_machine
        return StopSequence(self._members, report, stop_file, self._levels.grace_s, enforce, self._main)

    @property
    def limit_bytes(self) -> int:
        return self._guard.limit_bytes

    @property
    def lowest_threshold_bytes(self) -> int:
        """Return the lowest threshold. Below it no exact reading is needed."""
        limit_bytes = self._guard.limit_bytes
        return min((each.level.in_bytes(limit_bytes) for each in self._guard.thresholds), default=limit_bytes)

    def prediction(self, now: float) -> Prediction | None:
        """Return when the limit would be reached at the present rate."""
        return self._guard.prediction(now)

    def handle(self, sample: Sample, kernel_kills: tuple[int, int], has_main_ended: bool) -> None:
        """Act on a sample. `kernel_kills` are those in the command's cgroup and on the machine."""
        self._follow_headroom(sample)
        for alarm in self._guard.observe(sample.at, sample.total_bytes):
            self._act(alarm, sample)
            # Once at the first alarm and once at a stop; a kill has happened before, and is not delayed.
            occasion = "stop" if alarm.kind == "stop" else "alarm"
            if alarm.kind != "kill" and occasion not in self._stack_occasions and not self._is_machine:
                self._stack_occasions.add(occasion)
                self._stacks.read([process.pid for process in largest_first(sample.reading.processes)[:10]], occasion)
        self.stopping.step(sample.at, has_main_ended)
        self._handle_kernel_kills(sample.at, *kernel_kills)
        for alarm in self._swap.observe(sample.at, sample.reading.usage.swap_bytes):
            self._warn(alarm, sample)
        if sample.machine.total_bytes:
            self._system.limit_bytes = sample.machine.total_bytes
            for alarm in self._system.observe(sample.at, sample.machine.used_bytes):
                self._warn(alarm, sample)
        self._alerts.reap_hooks()

    def _act(self, alarm: Alarm, sample: Sample) -> None:
        if self.stopping.stage == "kill":
            return  # the memory of a dying process is not worth a message
        is_final = alarm.kind in ("stop", "kill")
        if alarm.kind == "kill":
            self.stopping.kill(sample.at, f"{alarm.text}, above the kill threshold{self._locations(sample)}")
        if is_final:
            self._why = alarm.text
            self._journal.request_stop()
            self._journal.write_sample(sample, self.prediction(sample.at))
        if alarm.kind != "kill" or not self.stopping.enforce:
            self._warn(alarm, sample)
        if is_final:
            self.stopping.stop(sample.at, alarm.left_s)

    def _warn(self, alarm: Alarm, sample: Sample) -> None:
        facts = {"used_bytes": alarm.used_bytes, "limit_bytes": alarm.limit_bytes, "level_bytes": alarm.level_bytes}
        if alarm.left_s is not None:
            facts |= {"left_s": round(alarm.left_s), "bytes_per_s": round(alarm.bytes_per_s or 0.0)}
        prefix, outlook = _PREFIXES[alarm.kind], alarm.outlook(sample.t)
        is_predicted = alarm.left_s is not None and alarm.used_bytes < (self._guard.level_bytes("stop") or 0)
        if alarm.kind == "stop" and is_predicted:
            prefix = f"time to stop, which may take {format_duration(self._levels.lead_s)}:"
        text = f"{prefix} {alarm.text}" + (f", {outlook}" if outlook else "")
        if alarm.kind in ("alert", "stop", "kill", "exhaustion") and not self._is_machine:
            text += self._locations(sample)
        kind, stopping = alarm.kind, self.stopping
        can_stop = stopping.stop_file is not None or self._levels.is_polled
        if kind in ("stop", "kill") and not (stopping.enforce or (kind == "stop" and can_stop)):
            option = "enforce=True" if self._levels.is_polled else "--enforce"
            text += f"; only watching, so nothing is done: with {option} it would have been {_WITH_ENFORCE[kind]} now"
            kind = "alert"
        self.report(kind, text, **facts)

    def _locations(self, sample: Sample) -> str:
        """Return which processes and files hold the memory; empty if it is simply the command itself."""
        usage, used = sample.reading.usage, sample.total_bytes
        processes = largest_first(sample.reading.processes)
        main, parts = set(self._main()), []

        def name_of(number: int) -> str:
            process = processes[number]
            role = "" if process.pid in main else ", a child"
            return f"{self._names.of(process.pid, process.name)} (pid {process.pid}{role})"

        if len(processes) > 1 and sum(process.usage.total_bytes for process in processes) > _SHARED * used:
            largest = format_size(processes[0].usage.total_bytes)
            parts.append(
                f"in {len(processes)} processes that share pages, the largest {name_of(0)} with up to {largest}"
            )
        elif len(processes) > 1:
            sizes = [process.usage.total_bytes for process in processes]
            count = min(sum(size >= _NOTABLE * used for size in sizes), _MAX_LOCATIONS)
            parts += [f"{format_size(sizes[number])} in {name_of(number)}" for number in range(count)]
            if sum(sizes[count:]) >= _NOTABLE * used:
                parts.append(f"{format_size(sum(sizes[count:]))} in {len(sizes) - count} smaller processes")
        if usage.shmem_bytes >= _NOTABLE * used:
            files = [f"{format_size(size)} in {path}" for path, size in self._files.left_behind()[:_MAX_LOCATIONS]]
            parts += files or [f"{format_size(usage.shmem_bytes)} in shared memory"]
        if usage.file_bytes >= used / 4:
            parts.append(f"not counted: {format_size(usage.file_bytes)} of file pages, which the kernel reclaims")
        return f"; {', '.join(parts)}" if parts else ""

    def report(self, kind: str, text: str, **facts: Any) -> None:
        """Write an event to the log and send it as an alert."""
        self._journal.add_event(kind, text, **facts)
        pid = self._config.target.pid
        self._alerts.send(kind, text, {**facts, **({"pid": pid} if pid is not None else {})})

    def _handle_kernel_kills(self, now: float, in_group: int, on_machine: int) -> None:
        if in_group > self._group_kills:
            self._group_kills = in_group
            limit = format_size(self.limit_bytes)
            self._why = f"the kernel held it to {limit}"
            self.report("oom", f"the kernel killed {in_group} of its processes at {limit}")
            # Half a tree hangs: if the kernel kills one process, all are killed (cgroup v2 does this automatically).
            self.stopping.kill(now, "the rest of it, because the kernel killed a part")
        if on_machine - self._group_kills > self._machine_kills:
            self._machine_kills = on_machine - self._group_kills
            # Evidence for later, not an alarm: on a shared machine it is mostly a process of another user.
            text = "the kernel killed a process for memory somewhere on this machine"
            self._journal.add_event("oom", text, machine=True)

    def _follow_headroom(self, sample: Sample) -> None:
        """Set the limit to the memory that the cgroups above leave now, and without --memory the machine too."""
        requested, is_floating = self._config.limit.asked_bytes, self._config.is_floating
        if sample.at - self._headroom_at < _CHECK_HEADROOM_S or not (is_floating or requested):
            return
        self._headroom_at = sample.at
        pid = self._config.target.pid or "self"
        if is_floating:
            limits = [limit.bytes for limit in headrooms(os.environ, held_bytes=sample.total_bytes, pid=pid)]
        else:
            limits = [requested, *cgroup_headrooms(sample.total_bytes, pid)]
        if limits:
            self._guard.limit_bytes = max(min(limits), 1)

    def only_watch(self, why: str) -> None:
        """Send no more signals, and report the reason."""
        if self.stopping.enforce:
            self.stopping.enforce = False
            self.report("refused", why)

    def start_over(self) -> None:
        """Forget the past, because the watched process has ended or was restarted."""
        self._guard = self._new_guard()
        self._earlier_stage = self.stopping.stage or self._earlier_stage
        self.stopping.finish()
        self.stopping = self._new_sequence()

    def end_facts(self, group_kills: int) -> dict[str, Any]:
        """Return what the last record of the log says about a stop: how the process was stopped, and why."""
        stopped = "oom" if group_kills else self.stopping.stage or self._earlier_stage
        return {"stopped": stopped, "why": self._why if stopped else None}

    def flush(self) -> None:
        """Wait until all messages are written, so that later output comes after them."""
        self._stacks.wait()
        self._alerts.flush()

    def close(self) -> None:
        self._alerts.close()

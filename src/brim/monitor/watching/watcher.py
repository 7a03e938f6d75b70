"""The watcher: a separate process that survives its parent.

It reads its configuration as one JSON line on stdin, answers {"ready": …} on stdout, then samples, warns, logs and acts
until the watched processes have ended. Later lines on stdin are messages of its owner: the started process, its exit
status, marks. Its last message is {"end": …}.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from brim.memory.meter import machine_now, oom_kills, started, tree
from brim.memory.sampler import GroupMeter, MachineMeter, Meter, Pace, Sample
from brim.memory.tmpfs_files import TmpfsFiles
from brim.memory.tree_meter import TreeMeter
from brim.monitor.watching.alarm_handler import AlarmHandler
from brim.monitor.watching.alerts import Alerts
from brim.monitor.watching.find_processes import Matching, leaders
from brim.monitor.watching.journal import Journal
from brim.monitor.watching.launch import WatchConfig
from brim.state.atomic_files import write_all

_MACHINE_EVERY_S = 0.2
_VMSTAT_EVERY_S = 1.0
_REMOVE_GROUP_S = 1.0
_MOST_FILES = 10
_EXIT_S = 2.0


class Inbox:
    """Messages of the owner, signals and ends of processes. `wait` never takes longer than requested."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._unread = b""
        self.is_open = True
        self.should_finish = False
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._finish)
        self._poll.register(self._woken.fileno(), select.POLLIN)
        self._pid_descriptors: set[int] = set()

    def _finish(self, number: int, frame: object) -> None:
        self.should_finish = True

    def wake_when_ended(self, pid: int) -> None:
        """Notice the end of a process at once, not at the next sample."""
        if hasattr(os, "pidfd_open"):
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:
                return
            self._pid_descriptors.add(descriptor)
            self._poll.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> list[dict[str, Any]]:
        """Return messages that come within that time, as soon as there is one."""
        for descriptor, _ in self._poll.poll(max(seconds, 0.0) * 1000):
            if descriptor in self._pid_descriptors:
                self._poll.unregister(descriptor)
                os.close(descriptor)
                self._pid_descriptors.remove(descriptor)
            elif descriptor != 0:
                self._woken.recv(64)
            elif data := os.read(0, 1 << 16):
                *lines, self._unread = (self._unread + data).split(b"\n")
                return [json.loads(line) for line in lines if line]
            else:
                self.is_open = False
                self._poll.unregister(0)
                return []
        return []


class Watcher:
    """The sampling loop. AlarmHandler acts on samples, Journal logs them."""

    def __init__(self, config: WatchConfig, inbox: Inbox) -> None:
        self.config, self._inbox = config, inbox
        target, levels, log = config.target, config.levels, Path(config.log)
        self._group = config.group
        self._starts: dict[int, int | None] = {}  # when the processes that brim knows by number were started
        self._matching: Matching | None = None
        self._terminated: dict[int, int | None] = {}
        self._files = TmpfsFiles([] if target.pid is None else tree([target.pid]))
        self._meter = self._open_meter()
        self.journal = Journal(config, log)
        alerts = Alerts(Path(levels.alerts) if levels.alerts else None, levels.on_alert, config.speak, log)
        self.handler = AlarmHandler(config, self.journal, alerts, self._meter.members, self._main, self._files)
        self._machine, self._machine_at = machine_now(), time.monotonic()
        self._kernel_kills_before, self._kernel_kills, self._kernel_kills_at = oom_kills() or 0, 0, 0.0
        self._group_kills_before = self._group.oom_kills() if self._group else 0
        self._command_pid: int | None = None
        self._exit: dict[str, Any] | None = None
        self._is_matching = False
        for pid in (target.pid, target.owner):
            if pid is not None:
                self._starts[pid] = started(pid)
                inbox.wake_when_ended(pid)

    def _open_meter(self) -> Meter:
        target = self.config.target
        if target.kind == "machine":
            return MachineMeter(time.monotonic)
        if self._group is not None:
            return GroupMeter(self._group)
        own = {os.getpid(), *self.config.excluded_pids}
        if target.kind == "match":
            self._matching = Matching(target.pattern or "", frozenset(own))
            return TreeMeter(self._matching, without=own)
        if target.kind == "command":
            own.add(target.owner or 0)  # adopts orphans of the command (a subreaper), and is not part of it
        return TreeMeter(self._roots, without=own, tmpfs=self._files)

    def _roots(self) -> list[int]:
        """Return the known roots that still run. A pid that now belongs to another process does not count."""
        return [pid for pid, start in self._starts.items() if start is not None and started(pid) == start]

    def _main(self) -> list[int]:
        """Return the processes that get SIGTERM first: the command itself, or the processes that match."""
        if self._command_pid is not None:
            return [self._command_pid] if self._exit is None else []
        if self.config.target.kind == "command":
            return []
        if self._matching is not None:
            self._terminated = {pid: started(pid) for pid in leaders(self._matching())}
            return list(self._terminated)
        return self._roots()

    def run(self) -> dict[str, Any]:
        pace, target = Pace(), self.config.target
        if target.kind == "command":
            while self._command_pid is None and self._inbox.is_open and not self._inbox.should_finish:
                self._handle_messages(self._inbox.wait(3600.0))
        self.journal.write_head(self._command_pid or target.pid)
        if self._command_pid is not None:
            self.journal.add_event("start", f"started process {self._command_pid}", pid=self._command_pid)
        while True:
            cpu_start = time.thread_time()
            sample = self._sample()
            self._report_matches(sample)
            self.handler.handle(sample, self._count_kernel_kills(), self._has_ended())
            self.journal.add_sample(sample, prediction=self.handler.prediction(sample.at))
            if self._is_finished(sample):
                break
            cost_s = time.thread_time() - cpu_start
            used, limit = sample.total_bytes, self.handler.limit_bytes
            if target.kind == "machine":
                used, limit = sample.machine.used_bytes, sample.machine.total_bytes or 1
            self._handle_messages(self._inbox.wait(pace.pause_s(sample.at, used, limit, cost_s)))
        return self._finish()

    def _sample(self) -> Sample:
        now = time.monotonic()
        if now - self._machine_at >= _MACHINE_EVERY_S:
            self._machine, self._machine_at = machine_now(), now
        reading = self._meter.read(self.handler.lowest_threshold_bytes)
        if self._group is not None and reading.usage.shmem_bytes:
            # The kernel counts the files of a cgroup; this finds their names, for messages and for those left behind.
            self._files.bytes_of(self._meter.members())
        return Sample(time.time(), now, reading, self._machine)

    def _count_kernel_kills(self) -> tuple[int, int]:
        """Return the kills by the kernel since the start: in the command's own group, and on the machine."""
        in_group = self._group.oom_kills() - self._group_kills_before if self._group else 0
        if self._kernel_kills_at < self._machine_at:  # /proc/vmstat is long
            self._kernel_kills_at = self._machine_at + _VMSTAT_EVERY_S
            self._kernel_kills = (oom_kills() or 0) - self._kernel_kills_before
        return in_group, self._kernel_kills

    def _handle_messages(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            action = message.pop("do")
            if action == "watch":
                self._command_pid = message["pid"]
                self._starts[message["pid"]] = started(message["pid"])
                self._inbox.wake_when_ended(message["pid"])
            elif action == "ended":
                self._exit = message
            elif action == "mark":
                self.journal.add_sample(self._sample(), at_once=True)
                self.journal.add_event("mark", message["text"], total_bytes=self.journal.last_bytes)
            elif action == "finish":
                self._inbox.should_finish = True

    def _has_ended(self) -> bool:
        """Check whether the main process has ended; of those that match, all that got SIGTERM."""
        if self._exit is not None:
            return True
        if self._terminated:
            return not any(started(pid) == start for pid, start in self._terminated.items())
        pid = self._command_pid or self.config.target.pid
        return pid is not None and started(pid) != self._starts.get(pid)

    def _report_matches(self, sample: Sample) -> None:
        """Report that matching processes have started or ended."""
        processes, pattern = sample.reading.processes, self.config.target.pattern
        if self._matching is None or bool(processes) == self._is_matching:
            return
        self._is_matching, self._terminated = bool(processes), {}
        if processes:
            pids = ", ".join(str(process.pid) for process in processes[:5])
            self.handler.report("found", f"found {pattern!r}: process {pids}")
        else:
            self.handler.report("gone", f"{pattern!r} has ended; searching for it again")
        self.handler.start_over()
        roots = leaders(self._matching()) if processes else []
        if len(roots) > 1 and not self.config.levels.enforce_all:
            listed = ", ".join(map(str, roots[:5]))
            self.handler.only_watch(
                f"{len(roots)} programs match ({listed}); none of them is stopped without --enforce-all"
            )

    def _is_finished(self, sample: Sample) -> bool:
        kind, owner, levels = self.config.target.kind, self.config.target.owner, self.config.levels
        if self._inbox.should_finish:
            return True
        if kind in ("match", "machine") or not self._has_ended():
            # A watch in the foreground ends with its parent; that of a command continues.
            return not (self._inbox.is_open or self.config.detached or kind == "command")
        if owner is not None and self._exit is None and started(owner) == self._starts.get(owner):
            return False  # its owner will report the exit status
        # After a stop the remaining processes are terminated too; otherwise a command may leave processes running.
        return not sample.reading.processes or self.handler.stopping.stage is None or not levels.enforce

    def _finish(self) -> dict[str, Any]:
        self._kernel_kills_at = 0.0
        in_group, on_machine = self._count_kernel_kills()
        remaining = self._remaining_processes() if self._exit else []
        usage = resource.getrusage(resource.RUSAGE_SELF)
        facts: dict[str, Any] = {
            **(self._exit or {"exit_code": None, "signal": None}),
            **self.handler.end_facts(in_group),
            "gone": self.config.target.kind == "process" and not self._roots(),
            "oom_kills": in_group,
            "machine_oom_kills": on_machine,
            "left": remaining,
            "left_limited": bool(remaining and self._group is not None and self._group.limited),
            "left_files": [list(file) for file in self._files.left_behind()[:_MOST_FILES]],
            "cgroup_peak_bytes": self._group.peak_bytes() if self._group else None,
            "sampler": {"cpu_s": round(usage.ru_utime + usage.ru_stime, 3), "max_rss_bytes": usage.ru_maxrss * 1024},
        }
        self.handler.stopping.finish(self._exit is not None or not self._roots())
        self.handler.flush()
        return self.journal.write_end(facts)

    def _remaining_processes(self) -> list[int]:
        """Return the processes that outlive the command. Those that brim has just terminated get time to exit."""
        has_terminated = self.handler.stopping.stage is not None and self.config.levels.enforce
        deadline = time.monotonic() + (_EXIT_S if has_terminated else 0.0)
        while True:
            remaining = [pid for pid in self._meter.members() if started(pid) is not None]
            if not remaining or time.monotonic() >= deadline:
                return remaining
            time.sleep(0.05)

    def close(self) -> None:
        """Close the log, and remove the cgroup when its last process has ended."""
        self.journal.close()
        self.handler.close()
        if self._group is not None:
            while not self._group.remove():
                time.sleep(_REMOVE_GROUP_S)


def _protect() -> None:
    """Make the watcher an unlikely victim of the kernel, and keep it out of swap, as far as the system allows it."""
    try:
        Path("/proc/self/oom_score_adj").write_text("-900")
    except OSError:
        pass
    if os.geteuid() == 0 and sys.platform == "linux":
        import ctypes

        current, future, on_fault = 1, 2, 4
        ctypes.CDLL(None).mlockall(current | future | on_fault)


def _reply(**facts: Any) -> None:
    """Send a message to the owner, if it still runs."""
    try:
        write_all(1, json.dumps(facts).encode() + b"\n")
    except OSError:
        pass


def main() -> None:
    try:
        os.fstat(2)
    except OSError:  # stderr was closed, so that its number would be taken by the log
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    inbox = Inbox()
    messages: list[dict[str, Any]] = []
    while not messages and inbox.is_open:
        messages = inbox.wait(60.0)
    if not messages:
        return
    config = WatchConfig.from_json(json.dumps(messages[0]))
    _protect()
    watcher = Watcher(config, inbox)
    _reply(ready=os.getpid())
    end = watcher.run()
    _reply(end=end)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):  # a reader of the output need not wait until the group is removed
        os.dup2(null, descriptor)
    watcher.close()

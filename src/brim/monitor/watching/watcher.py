"""The watcher: a separate process that survives its parent.

It reads its orders as one JSON line on stdin, answers {"ready": …} on stdout, then samples, warns, logs and acts until
the watched processes have ended. Later lines on stdin are messages of its owner: the started process, how it ended,
marks. Its last message is {"end": …}.
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

from brim.memory.cgroup import Cgroup
from brim.memory.meter import machine_now, oom_kills, started, tree
from brim.memory.sampler import GroupMeter, MachineMeter, Meter, Pace, Sample
from brim.memory.tmpfs_files import TmpfsFiles
from brim.memory.tree_meter import TreeMeter
from brim.monitor.watching.find_processes import Matching, leaders
from brim.monitor.watching.journal import Journal
from brim.monitor.watching.launch import Orders
from brim.monitor.watching.verdicts import Alerts, Verdicts
from brim.state.atomic_files import write_all

_MACHINE_EVERY_S = 0.2
_VMSTAT_EVERY_S = 1.0
_LINGER_S = 1.0
_NAMED_FILES = 10
_EXIT_S = 2.0


class Inbox:
    """What the owner says, and signals, without ever waiting longer than asked."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._rest = b""
        self.open = True
        self.told_to_end = False
        waker, self._woken = socket.socketpair()
        for end in (waker, self._woken):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        self._waker = waker
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        self._poll.register(self._woken.fileno(), select.POLLIN)
        self._watched: dict[int, int] = {}

    def _end(self, number: int, frame: object) -> None:
        self.told_to_end = True

    def wake_when_ended(self, pid: int) -> None:
        """An end is noticed at once rather than at the next sample."""
        if hasattr(os, "pidfd_open"):
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:
                return
            self._watched[descriptor] = pid
            self._poll.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> list[dict[str, Any]]:
        """Messages that came within that time; comes back early for one."""
        for descriptor, _ in self._poll.poll(max(seconds, 0.0) * 1000):
            if descriptor == 0:
                return self._read()
            if descriptor in self._watched:
                self._poll.unregister(descriptor)
                os.close(descriptor)
                del self._watched[descriptor]
            else:
                self._woken.recv(64)
        return []

    def _read(self) -> list[dict[str, Any]]:
        data = os.read(0, 1 << 16)
        if not data:
            self.open = False
            self._poll.unregister(0)
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines if line]


class Watcher:
    """The sampling loop. Verdicts acts on samples, Journal logs them."""

    def __init__(self, orders: Orders, inbox: Inbox) -> None:
        self.orders, self._inbox = orders, inbox
        self._group = _group_of(orders)
        self._born: dict[int, int | None] = {}
        self._matching: Matching | None = None
        self._asked: dict[int, int | None] = {}
        self._files = TmpfsFiles([] if orders.target.pid is None else tree([orders.target.pid]))
        self._meter = self._open_meter()
        log = Path(orders.log)
        self.journal = Journal(orders, log)
        ladder = orders.ladder
        alerts = Alerts(Path(ladder.alerts) if ladder.alerts else None, ladder.on_alert, orders.speak, log)
        self.verdicts = Verdicts(orders, self.journal, alerts, self._meter.members, self._main, self._files)
        self._machine = machine_now()
        self._machine_at = time.monotonic()
        self._kernel_kills = oom_kills() or 0
        self._kernel_killed = 0
        self._kernel_looked = 0.0
        self._group_kills = self._group.oom_kills() if self._group else 0
        self._command_pid: int | None = None
        self._ended: dict[str, Any] | None = None
        self._seen_any = False
        for pid in (orders.target.pid, orders.target.owner):
            if pid is not None:
                self._born[pid] = started(pid)
                inbox.wake_when_ended(pid)

    def _open_meter(self) -> Meter:
        target = self.orders.target
        if target.kind == "machine":
            return MachineMeter(time.monotonic)
        if self._group is not None:
            return GroupMeter(self._group)
        own = {os.getpid(), *self.orders.aside}
        if target.kind == "match":
            self._matching = Matching(target.pattern or "", frozenset(own))
            return TreeMeter(self._matching, without=own)
        if target.kind == "process":
            return TreeMeter(self._roots, without=own, tmpfs=self._files)
        # The command's parent takes in what the command loses (a subreaper), and is not part of it.
        own.add(target.owner or 0)
        return TreeMeter(self._roots, without=own, tmpfs=self._files)

    def _roots(self) -> list[int]:
        """Return the known roots that still run. A pid that now belongs to another process does not count."""
        return [pid for pid, born in self._born.items() if born is not None and started(pid) == born]

    def _main(self) -> list[int]:
        """Return the processes that get SIGTERM first: the command itself, or the processes that match."""
        if self._command_pid is not None:
            return [self._command_pid] if self._ended is None else []
        if self.orders.target.kind == "command":
            return []
        if self._matching is not None:
            self._asked = {pid: started(pid) for pid in leaders(self._matching())}
            return list(self._asked)
        return self._roots()

    def run(self) -> dict[str, Any]:
        pace = Pace()
        if self.orders.target.kind == "command":
            self._await_command()
        self.journal.begin(self._command_pid or self.orders.target.pid)
        if self._command_pid is not None:
            self.journal.event("start", f"started process {self._command_pid}", pid=self._command_pid)
        while True:
            begin = time.thread_time()
            sample = self._look()
            self._greet(sample)
            self.verdicts.consider(sample, self._kills(), self._over(sample))
            self.journal.sample(sample, coming=self.verdicts.coming(sample.at))
            if self._finished(sample):
                break
            cost_s = time.thread_time() - begin
            if self.orders.target.kind == "machine":
                used, limit = sample.machine.used_bytes, sample.machine.total_bytes or 1
            else:
                used, limit = sample.total_bytes, self.verdicts.limit_bytes
            self._heed(self._inbox.wait(pace.pause_s(sample.at, used, limit, cost_s)))
        return self._end()

    def _look(self) -> Sample:
        now = time.monotonic()
        if now - self._machine_at >= _MACHINE_EVERY_S:
            self._machine, self._machine_at = machine_now(), now
        return Sample(time.time(), now, self._meter.read(self.verdicts.line_bytes), self._machine)

    def _kills(self) -> tuple[int, int]:
        """Kills by the kernel since the beginning: in the command's own group, and anywhere."""
        in_group = self._group.oom_kills() - self._group_kills if self._group else 0
        if self._kernel_looked < self._machine_at:  # /proc/vmstat is long
            self._kernel_looked = self._machine_at + _VMSTAT_EVERY_S
            self._kernel_killed = (oom_kills() or 0) - self._kernel_kills
        return in_group, self._kernel_killed

    def _await_command(self) -> None:
        while self._command_pid is None and self._inbox.open and not self._inbox.told_to_end:
            self._heed(self._inbox.wait(3600.0))

    def _heed(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            what = message.pop("do")
            if what == "watch":
                self._command_pid = message["pid"]
                self._born[message["pid"]] = started(message["pid"])
                self._inbox.wake_when_ended(message["pid"])
            elif what == "ended":
                self._ended = message
            elif what == "mark":
                self.journal.sample(self._look(), at_once=True)
                self.journal.event("mark", message["text"], total_bytes=self.journal.last_bytes)
            elif what == "finish":
                self._inbox.told_to_end = True

    def _over(self, sample: Sample) -> bool:
        """Has the main process ended? Of those that match, all that were asked to."""
        if self._ended is not None:
            return True
        if self._asked:
            return not any(started(pid) == born for pid, born in self._asked.items())
        pid = self._command_pid or self.orders.target.pid
        if pid is None:
            return False
        return started(pid) != self._born.get(pid)

    def _greet(self, sample: Sample) -> None:
        """What matches has come, or gone."""
        alive = bool(sample.reading.processes)
        if self._matching is not None and alive != self._seen_any:
            self._seen_any, self._asked = alive, {}
            pids = [p.pid for p in sample.reading.processes]
            self.verdicts.say("found" if alive else "gone", _found_text(self.orders, pids))
            self.verdicts.begin_anew()
            roots = leaders(self._matching()) if alive else []
            if len(roots) > 1 and not self.orders.ladder.act_on_all:
                self.verdicts.only_look(
                    f"{len(roots)} programs match ({', '.join(map(str, roots[:5]))}); not acting on "
                    "any of them without --enforce-all"
                )

    def _finished(self, sample: Sample) -> bool:
        target, alive = self.orders.target.kind, bool(sample.reading.processes)
        if self._inbox.told_to_end:
            return True
        if target in ("match", "machine") or not self._over(sample):
            # A watch in the foreground ends with its parent; that of a command continues.
            return not (self._inbox.open or self.orders.detached or target == "command")
        owner = self.orders.target.owner
        if owner is not None and self._ended is None and started(owner) == self._born.get(owner):
            return False  # its owner will report how it ended
        # After a stop the remaining processes are terminated too; otherwise a command may leave processes running.
        return not alive or self.verdicts.stopping.how is None or not self.orders.ladder.act

    def _end(self) -> dict[str, Any]:
        self._kernel_looked = 0.0
        in_group, anywhere = self._kills()
        left = self._left_processes() if self._ended else []
        usage = resource.getrusage(resource.RUSAGE_SELF)
        facts: dict[str, Any] = {
            **(self._ended or {"exit_code": None, "signal": None}),
            **self.verdicts.facts(in_group),
            "gone": self.orders.target.kind == "process" and not self._roots(),
            "oom_kills": in_group,
            "machine_oom_kills": anywhere,
            "left": left,
            "left_limited": bool(left and self._group is not None and self._group.limited),
            "left_files": [list(one) for one in self._files.left_behind()[:_NAMED_FILES]],
            "cgroup_peak_bytes": self._group.peak_bytes() if self._group else None,
            "sampler": {"cpu_s": round(usage.ru_utime + usage.ru_stime, 3), "max_rss_bytes": usage.ru_maxrss * 1024},
        }
        self.verdicts.stopping.finish(self._ended is not None or not self._roots())
        self.verdicts.settle()
        return self.journal.end(facts)

    def _left_processes(self) -> list[int]:
        """Return the processes that outlive the command. Those that brim has just terminated get time to exit."""
        deadline = time.monotonic() + (_EXIT_S if self.verdicts.stopping.how and self.orders.ladder.act else 0.0)
        while (left := [pid for pid in self._meter.members() if started(pid) is not None]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        return left

    def close(self) -> None:
        """The group goes when the last process in it has ended."""
        self.journal.close()
        self.verdicts.close()
        if self._group is not None:
            while not self._group.remove():
                time.sleep(_LINGER_S)


def _found_text(orders: Orders, pids: list[int]) -> str:
    if pids:
        return f"found {orders.target.pattern!r}: process {', '.join(map(str, pids[:5]))}"
    return f"{orders.target.pattern!r} has ended; looking for it again"


def _group_of(orders: Orders) -> Cgroup | None:
    if orders.group is None:
        return None
    return Cgroup(Path(orders.group["folder"]), orders.group["version"], orders.group["limited"])


def _protect() -> None:
    """As far as the system lets us: not the one to be killed, and not swapped out when it matters."""
    try:
        Path("/proc/self/oom_score_adj").write_text("-900")
    except OSError:
        pass
    if os.geteuid() == 0 and sys.platform == "linux":
        import ctypes

        current, future, when_touched = 1, 2, 4
        ctypes.CDLL(None).mlockall(current | future | when_touched)


def _reply(**facts: Any) -> None:
    """To the owner, if there still is one."""
    try:
        write_all(1, json.dumps(facts).encode() + b"\n")
    except OSError:
        pass


def _fill_stderr() -> None:
    """Where stderr was closed, its number would be taken by the log."""
    try:
        os.fstat(2)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def main() -> None:
    _fill_stderr()
    inbox = Inbox()
    messages: list[dict[str, Any]] = []
    while not messages and inbox.open:
        messages = inbox.wait(60.0)
    if not messages:
        return
    orders = Orders.from_json(json.dumps(messages[0]))
    _protect()
    watcher = Watcher(orders, inbox)
    _reply(ready=os.getpid())
    end = watcher.run()
    _reply(end=end)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):  # a reader of our output need not wait until the group is removed
        os.dup2(nowhere, descriptor)
    watcher.close()

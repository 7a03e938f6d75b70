"""Act on samples: warn, request a stop, kill.

The order within `consider` matters: a kill comes before anything is written, because a busy disk may take longer than
the memory lasts. Alerts go to the terminal, to a text file and to the user's `--on-alert` command.

What Python processes are doing (their stacks by py-spy, extra `watch`) is written to the log. It is looked at when an
alarm is first raised and when a stop is given; in a thread, with a second for each process, so that neither a sample
nor a kill waits for it. The processes are not held (`--nonblocking`), and values of variables are never asked for. What
cannot be looked at, and why, is said in its place.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from brim.memory.limit import cgroup_headrooms, headrooms
from brim.memory.prediction import Prediction
from brim.memory.sampler import Sample
from brim.memory.thresholds import Alarm, Guard, Level, Threshold
from brim.memory.tmpfs_files import TmpfsFiles
from brim.monitor.watching.act import Stopping
from brim.monitor.watching.find_processes import ProcessNames
from brim.monitor.watching.journal import Journal
from brim.monitor.watching.launch import Orders
from brim.redact import redact
from brim.sizes import format_duration, format_size
from brim.state.atomic_files import write_all

_HOOK_LIMIT_S = 60.0
_UNSAID = 100  # lines that wait for a terminal that is not read; later ones are only in the files
_STDERR = 2


class _Voice(threading.Thread):
    """Writes to stderr in a thread, because a pipe that is not read, or a terminal at Ctrl-S, blocks."""

    def __init__(self) -> None:
        super().__init__(name="brim-voice", daemon=True)
        self.lines: queue.Queue[str | None] = queue.Queue(_UNSAID)

    def run(self) -> None:
        while (line := self.lines.get()) is not None:
            try:
                write_all(_STDERR, line.encode(errors="replace"))
            except OSError:
                continue  # the terminal is gone


class Alerts:
    """Sends alerts to the terminal, the file and the hook. None of them may block the watch."""

    def __init__(self, file: Path | None, hook: str | None, speak: bool, log: Path) -> None:
        self._file, self._hook, self._speak, self._log = file, hook, speak, log
        self._voice: _Voice | None = None
        self._running: list[tuple[float, subprocess.Popen[bytes]]] = []
        if file is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch(mode=0o600)
            except OSError as error:
                self._print(f"the alerts file {file} cannot be written: {error.strerror}")
                self._file = None

    def say(self, kind: str, text: str, facts: dict[str, Any]) -> None:
        self._print(text)
        if self._file is not None:
            try:
                with open(self._file, "a") as file:
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {kind}: {text}\n")
            except OSError:
                pass  # a full disk: the terminal and the log still say it
        if self._hook is not None:
            self._run_hook(kind, text, facts)

    def _print(self, text: str) -> None:
        if not self._speak:
            return
        if self._voice is None:
            self._voice = _Voice()
            self._voice.start()
        try:
            self._voice.lines.put_nowait(f"brim: {text}\n")
        except queue.Full:
            pass

    def settle(self, timeout_s: float = 1.0) -> None:
        """Wait until all lines are written, up to a time limit."""
        voice, self._voice = self._voice, None
        if voice is not None:
            try:
                voice.lines.put_nowait(None)
            except queue.Full:
                return
            voice.join(timeout_s)

    def _run_hook(self, kind: str, text: str, facts: dict[str, Any]) -> None:
        """Run the hook. The watcher's environment is already reduced (see launch.py) and has no secrets."""
        environment = {
            **os.environ,
            "BRIM_ALERT": kind,
            "BRIM_TEXT": text,
            "BRIM_LOG": str(self._log),
            **{f"BRIM_{name.upper()}": str(value) for name, value in facts.items()},
        }
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", self._hook or ""],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=_STDERR if self._speak else subprocess.DEVNULL,
                start_new_session=True,  # to be ended with all it started
            )
        except OSError as error:
            self._print(f"--on-alert could not be started: {error.strerror}")
            return
        self._running.append((time.monotonic(), process))

    def tend(self) -> None:
        """Reap hooks that have ended, kill those that hang."""
        for begun, process in list(self._running):
            if process.poll() is not None:
                self._running.remove((begun, process))
            elif time.monotonic() - begun > _HOOK_LIMIT_S:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def close(self) -> None:
        """Wait briefly for hooks, and remove an empty alerts file."""
        deadline = time.monotonic() + 2.0
        for _, process in self._running:
            try:
                process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                continue  # it may outlive the watch
        if self._file is not None and self._file.exists() and not self._file.stat().st_size:
            self._file.unlink(missing_ok=True)


_LIMIT_S = 1.0
_LARGEST = 3
_MOST_LINES = 200
_WITHOUT = "pip install py-spy writes down here what Python was doing"

Say = Callable[[str, list[str]], None]


class Stacks:
    """`look` returns at once; `say(text, lines)` is called from a thread, once for each process."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._thread: threading.Thread | None = None
        self._missing_said = False

    def look(self, pids: Iterable[int], why: str) -> None:
        """At the largest of these (the largest first); nothing if a look is still under way."""
        chosen = [pid for pid in pids if is_python(pid)][:_LARGEST]
        if not chosen or (self._thread is not None and self._thread.is_alive()):
            return
        program = find_program()
        if program is None:
            if not self._missing_said:
                self._missing_said = True
                self._say(f"no stacks at the {why}: py-spy is not installed", [_WITHOUT])
            return
        self._thread = threading.Thread(target=self._run, args=(program, chosen, why), name="brim-stacks", daemon=True)
        self._thread.start()

    def settle(self, timeout_s: float = _LIMIT_S) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, program: str, pids: list[int], why: str) -> None:
        for pid in pids:
            lines, problem = dump(program, pid)
            told = f"process {pid} at the {why}" + (f": {problem}" if problem else "")
            self._say(told, lines)


def dump(program: str, pid: int) -> tuple[list[str], str]:
    """The stacks of a process, and what went wrong, if anything did."""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return [], "its stacks could not be read within a second"
    except OSError as error:
        return [], f"py-spy could not be started: {error.strerror}"
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it does not say why"])[0]
        if "ermission" in done.stderr:
            reason = "this user may not look into it (ptrace): see /proc/sys/kernel/yama/ptrace_scope, or run as root"
        return [], f"its stacks could not be read: {redact(reason)[:200]}"
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    kept = [redact(line)[:300] for line in lines if line and not line.startswith("Process ")]
    return kept[:_MOST_LINES], ""


def is_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False


def find_program() -> str | None:
    """Return py-spy from the PATH or from the folder of the interpreter."""
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if os.access(beside, os.X_OK) else None)


_SWAP = Threshold("swap", Level(share=0.01), after_s=10.0, hysteresis=0.005)
_LOOK_AT_HEADROOM_S = 5.0
_NOTABLE, _NAMED = 0.1, 2  # share of the memory from which a process is named, and how many are
_SHARED = 1.2  # processes that together seem to hold so much more than there is share pages
_DONE = {"stop": "asked to stop", "kill": "killed"}
_WORDS = {
    "alert": "memory is at",
    "stop": "above the stop threshold:",
    "kill": "above the kill threshold:",
    "exhaustion": "memory runs out:",
    "swap": "in swap, which is slow:",
    "system": "the machine's memory is at",
}


class Verdicts:
    """Applies the guards of one watch and acts on their alarms."""

    def __init__(
        self,
        orders: Orders,
        journal: Journal,
        alerts: Alerts,
        members: Callable[[], Iterable[int]],
        main: Callable[[], Iterable[int]],
        files: TmpfsFiles,
    ) -> None:
        self._files, self._names = files, ProcessNames()
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
        self._stopped: str | None = None  # of an earlier process that matched

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
        return self._guard.prediction(now)

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
        if self.stopping.how == "kill":
            return  # the memory of a dying process is not worth a message
        if alarm.kind == "kill":
            self.stopping.kill(sample.at, f"{alarm.text}, above the kill threshold{self._where(sample)}")
        if alarm.kind in ("stop", "kill"):
            self._why = alarm.text
            self._journal.ask_to_stop()
        if alarm.kind != "kill" or not self.stopping.act:
            self._raise(alarm, sample)
        if alarm.kind in ("stop", "kill"):
            self.stopping.stop(sample.at, alarm.left_s)

    def _raise(self, alarm: Alarm, sample: Sample) -> None:
        facts = {"used_bytes": alarm.used_bytes, "limit_bytes": alarm.limit_bytes, "level_bytes": alarm.level_bytes}
        if alarm.left_s is not None:
            facts |= {"left_s": round(alarm.left_s), "bytes_per_s": round(alarm.bytes_per_s or 0.0)}
        outlook = alarm.outlook(sample.t)
        text = f"{self._words(alarm)} {alarm.text}" + (f", {outlook}" if outlook else "")
        if alarm.kind in ("alert", "stop", "kill", "exhaustion") and self._orders.target.kind != "machine":
            text += self._where(sample)
        kind = alarm.kind
        if kind in ("stop", "kill") and not self._does(kind):
            kind = "alert"
            option = "enforce=True" if self._orders.ladder.heard else "--enforce"
            text += f"; only watching, so nothing is done: with {option} it would have been {_DONE[alarm.kind]} now"
        self.say(kind, text, **facts)

    def _where(self, sample: Sample) -> str:
        """Return which processes and files hold the memory, empty if it is one process and obvious."""
        usage, used = sample.reading.usage, sample.total_bytes
        processes = sorted(sample.reading.processes, key=lambda process: -process.usage.total_bytes)
        main, parts = set(self._main()), []
        if sum(process.usage.total_bytes for process in processes) > _SHARED * used and len(processes) > 1:
            parts.append(f"shared by {len(processes)} processes")
        elif len(processes) > 1:
            large = [process for process in processes if process.usage.total_bytes >= _NOTABLE * used][:_NAMED]
            for process in large:
                role = "" if process.pid in main else ", a child"
                name = self._names.of(process.pid, process.name)
                parts.append(f"{format_size(process.usage.total_bytes)} in {name} (pid {process.pid}{role})")
            rest = processes[len(large) :]
            rest_bytes = sum(process.usage.total_bytes for process in rest)
            if rest_bytes >= _NOTABLE * used:
                parts.append(f"{format_size(rest_bytes)} in {len(rest)} smaller processes")
        if usage.shmem_bytes >= _NOTABLE * used:
            named = [f"{format_size(size)} in {path}" for path, size in self._files.left_behind()[:_NAMED]]
            parts += named or [f"{format_size(usage.shmem_bytes)} in shared memory"]
        if usage.file_bytes >= used / 4:
            parts.append(f"not counted: {format_size(usage.file_bytes)} of file pages, which the kernel reclaims")
        return f"; {', '.join(parts)}" if parts else ""

    def _does(self, kind: str) -> bool:
        """Does anything come of it? A stop may be a file or a flag, a kill is nothing but a kill."""
        stop = self.stopping
        return stop.act or (kind == "stop" and (stop.stop_file is not None or self._orders.ladder.heard))

    def _words(self, alarm: Alarm) -> str:
        if alarm.kind == "stop" and alarm.left_s is not None and alarm.used_bytes < self._stop_bytes():
            lead = format_duration(self._orders.ladder.lead_s)
            return f"soon less will be left than the {lead} that a stop needs:"
        return _WORDS[alarm.kind]

    def _stop_bytes(self) -> int:
        return self._guard.level_bytes("stop") or 0

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
            self._why = f"the kernel held it to {format_size(self.limit_bytes)}"
            self.say("oom", f"the kernel killed {in_group} of its processes at {format_size(self.limit_bytes)}")
            # Half a tree hangs: if the kernel kills one process, all are killed (cgroup v2 does this automatically).
            self.stopping.kill(now, "the rest of it, because the kernel killed a part")
        if anywhere - self._oom_seen > self._machine_oom_seen:
            self._machine_oom_seen = anywhere - self._oom_seen
            # Evidence for later, not an alarm: on a shared machine it is mostly a process of another user.
            text = "the kernel killed a process for memory somewhere on this machine"
            self._journal.event("oom", text, machine=True)

    def _follow_headroom(self, sample: Sample) -> None:
        """Lower or raise the limit to what the cgroups above leave now, and without --memory the machine too."""
        if sample.at - self._looked < _LOOK_AT_HEADROOM_S or not (self._orders.floating or self._orders.asked_bytes):
            return
        self._looked = sample.at
        pid = self._orders.target.pid or "self"
        if self._orders.floating:
            rooms = [limit.bytes for limit in headrooms(os.environ, held_bytes=sample.total_bytes, pid=pid)]
        else:
            rooms = [self._orders.asked_bytes, *cgroup_headrooms(sample.total_bytes, pid)]
        if rooms:
            self._guard.limit_bytes = max(min(rooms), 1)

    def only_look(self, why: str) -> None:
        """Stop acting, and report the reason."""
        if self.stopping.act:
            self.stopping.act = False
            self.say("refused", why)

    def begin_anew(self) -> None:
        """Start over, because the watched process has ended or was restarted."""
        self._guard = Guard(self._orders.limit_bytes, self._guard.thresholds, lead_s=self._orders.ladder.lead_s)
        self._stopped = self.stopping.how or self._stopped
        self.stopping.finish()
        self.stopping = self._new_stopping()

    def facts(self, oom_kills: int) -> dict[str, Any]:
        """Return the keys of the log's end: whether brim stopped it, and why."""
        how = "oom" if oom_kills else self.stopping.how or self._stopped
        return {"stopped": how, "why": self._why if how else None}

    def settle(self) -> None:
        """Wait until all messages are written, so that later output comes after them."""
        self._stacks.settle()
        self._alerts.settle()

    def close(self) -> None:
        self._alerts.close()

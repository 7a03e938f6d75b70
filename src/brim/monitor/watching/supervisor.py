"""Run a command under watch without changing anything for it.

The command is a child in the same process group and session: the terminal's Ctrl-C and Ctrl-Z reach it
directly, it reads the same stdin and writes the same stdout. brim only waits, passes on signals that were
sent to itself alone, and ends with the command's exit code. Watching is another process's work (watcher.py);
it continues if this process is killed.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from brim.errors import CommandStartError
from brim.memory.cgroup import Cgroup
from brim.monitor.watching.launch import Orders, WatcherProcess
from brim.records import dataclass
from brim.state.stop import forget_run, note_run

_PASSED_ON = {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGTSTP,
    signal.SIGCONT,
}
# Sent by the terminal to the whole group: the command has it already.
_FROM_TERMINAL = {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH}
_PR_SET_CHILD_SUBREAPER = 36
_SETTLE_S = 0.2
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
_WAIT_FOR_END_S = 10.0


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """How it ended. `end` is the log's last line, None if the watcher is gone."""

    exit_code: int
    signal: int | None
    pid: int
    end: dict[str, Any] | None

    @property
    def stopped_for_memory(self) -> bool:
        return bool(self.end and self.end.get("stopped"))


def run(command: Sequence[str], orders: Orders, group: Cgroup | None) -> CommandOutcome:
    """Run the command to its end. `orders` do not name its process yet."""
    _adopt_orphans()
    if orders.ladder.stop_file is not None:
        note_run(Path(orders.ladder.stop_file))
    target = replace(orders.target, kind="command", owner=os.getpid())
    facts = {**asdict(group), "folder": str(group.folder), "shelter": None} if group else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON | {signal.SIGCHLD})
    try:
        watcher = WatcherProcess(replace(orders, target=target, group=facts))
        try:
            child = _start(command, group, before)
        except CommandStartError:
            watcher.tell("finish")
            watcher.await_end(_WAIT_FOR_END_S)
            raise
        watcher.tell("watch", pid=child.pid)
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT
        status, usage = _await(child.pid, watcher)
        code = os.waitstatus_to_exitcode(status)
        child.returncode = code
        watcher.tell(
            "ended",
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            usage={**_facts(usage), "own_rss_bytes": own},
        )
        end = _await_last_word(watcher, orders.ladder.grace_s)
        watcher.let_go()
        return CommandOutcome(code if code >= 0 else 128 - code, -code if code < 0 else None, child.pid, end)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if group is not None:
            group.remove()
        if orders.ladder.stop_file is not None:  # a file that a person makes from now on is not stale
            forget_run(Path(orders.ladder.stop_file), keep=True)


def _start(command: Sequence[str], group: Cgroup | None, mask: set[int | signal.Signals]) -> subprocess.Popen[bytes]:
    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if group is not None:
            group.join()

    try:
        # Descriptors stay open: a shell may have given the command more than three. brim's own close by themselves.
        return subprocess.Popen(list(command), close_fds=False, preexec_fn=in_child)
    except FileNotFoundError as error:
        where = f"The command {command[0]!r} was not found."
        if os.path.exists(command[0]):
            where = f"The interpreter that {command[0]!r} names in its first line was not found."
        raise CommandStartError(where, hint="Check its name and PATH.", code=127) from error
    except subprocess.SubprocessError as error:
        raise CommandStartError(
            "The command could not enter the cgroup that brim made for it.", hint="Add --no-cgroup.", code=126
        ) from error
    except OSError as error:
        if os.path.isdir(command[0]) or not command[0]:
            what = "is a folder" if command[0] else "has no name"
            raise CommandStartError(f"The command {command[0]!r} {what}.", hint="Name a program.", code=126) from error
        raise CommandStartError(
            f"The command {command[0]!r} cannot be executed: {error.strerror}.",
            hint=f"If it is a script, make it executable: chmod +x {command[0]}",
            code=126,
        ) from error


def _facts(usage: resource.struct_rusage) -> dict[str, float]:
    """Return the resource usage of the command and its reaped children, like `time -v`."""
    return {
        "user_s": round(usage.ru_utime, 3),
        "system_s": round(usage.ru_stime, 3),
        "max_rss_bytes": usage.ru_maxrss * _MAXRSS_UNIT,
        "read_bytes": usage.ru_inblock * 512,
        "written_bytes": usage.ru_oublock * 512,
        "major_faults": usage.ru_majflt,
    }


def _await(pid: int, watcher: WatcherProcess) -> tuple[int, resource.struct_rusage]:
    """Wait for the command, pass signals on to it, and return its exit status and resource usage."""
    while True:
        number, from_kernel = _next_signal()
        if number == signal.SIGCHLD:
            ended = _reap(pid, watcher)
            if ended is not None:
                return ended
            continue
        if not (from_kernel and number in _FROM_TERMINAL):
            _send(pid, number)
        if number == signal.SIGTSTP:
            _stop_self()


def _next_signal() -> tuple[int, bool]:
    """The next signal, and whether the kernel sent it (then it went to the whole process group)."""
    wanted = _PASSED_ON | {signal.SIGCHLD}
    if sys.platform == "linux":
        info = signal.sigwaitinfo(wanted)
        return info.si_signo, info.si_code > 0
    number = signal.sigwait(wanted)  # elsewhere the sender is not known: assume the terminal if there is one
    return number, sys.stdin is not None and sys.stdin.isatty()


def _reap(pid: int, watcher: WatcherProcess | None) -> tuple[int, resource.struct_rusage] | None:
    """Collect every child that has ended, orphans of the command too; how `pid` ended if it is among them."""
    found = None
    while True:
        try:
            ended, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if ended == 0:
            return found
        if ended == pid:
            found = status, usage
        elif watcher is not None and ended == watcher.pid:
            watcher.reaped(status)
            if not watcher.silent and found is None:
                _warn_of_end()


def _warn_of_end() -> None:
    try:
        sys.stderr.write("brim: the watcher has ended; the command continues unwatched\n")
        sys.stderr.flush()
    except OSError:
        pass


def _await_last_word(watcher: WatcherProcess, grace_s: float) -> dict[str, Any] | None:
    """Wait for the end of the log, and reap processes that the watcher terminates after a stop."""
    waited_s = 0.0
    while not watcher.silent and waited_s < _WAIT_FOR_END_S + grace_s:
        end = watcher.await_end(_SETTLE_S)
        if end is not None:
            return end
        waited_s += _SETTLE_S
        _reap(0, None)
    return watcher.end


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # it has just ended, or is another user's (sudo), whom the terminal still reaches


def _stop_self() -> None:
    """Stop as the terminal asked; the shell sees the job stopped, and `fg` continues from here."""
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})


def _adopt_orphans() -> None:
    """Become the parent of orphans of the command, so that they stay in the tree."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

"""Run a command under watch without changing anything for it.

The command is a child in the same process group and session: the terminal's Ctrl-C and Ctrl-Z reach it directly, it
reads the same stdin and writes the same stdout. brim only waits, forwards signals that were sent to brim alone, and
ends with the command's exit code. Another process watches (watcher.py); it continues if this process is killed.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from brim.errors import CommandStartError
from brim.memory.cgroup import Cgroup
from brim.monitor.watching.launch import WatchConfig, WatcherProcess
from brim.records import dataclass
from brim.state.stop import forget_run, note_run

# Sent by the terminal to the process group: the command has it already.
_FROM_TERMINAL = {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH}
_FORWARDED = {*_FROM_TERMINAL, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.2
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
_WAIT_FOR_END_S = 10.0


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """The exit of a command. `end` is the log's last line, None if the watcher is gone."""

    exit_code: int
    signal: int | None
    pid: int
    end: dict[str, Any] | None

    @property
    def stopped_for_memory(self) -> bool:
        return bool(self.end and self.end.get("stopped"))


def run(command: Sequence[str], config: WatchConfig) -> CommandOutcome:
    """Run the command to its end. `config` does not name its process yet."""
    stop_file, group = config.levels.stop_file, config.group
    if sys.platform == "linux":  # adopt orphans of the command, so that they stay in the tree
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if stop_file is not None:
        note_run(Path(stop_file))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED | {signal.SIGCHLD})
    try:
        watcher = WatcherProcess(replace(config, target=replace(config.target, kind="command", owner=os.getpid())))
        try:
            child = _start(command, group, before)
        except CommandStartError:
            watcher.send("finish")
            watcher.await_end(_WAIT_FOR_END_S)
            raise
        watcher.send("watch", pid=child.pid)
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT
        status, usage = _await(child.pid, watcher)
        code = child.returncode = os.waitstatus_to_exitcode(status)
        exit_code, number = (code, None) if code >= 0 else (None, -code)
        watcher.send(
            "ended",
            exit_code=exit_code,
            signal=number,
            usage={  # of the command and its reaped children, like `time -v`
                "user_s": round(usage.ru_utime, 3),
                "system_s": round(usage.ru_stime, 3),
                "max_rss_bytes": usage.ru_maxrss * _MAXRSS_UNIT,
                "read_bytes": usage.ru_inblock * 512,
                "written_bytes": usage.ru_oublock * 512,
                "major_faults": usage.ru_majflt,
                "own_rss_bytes": own,
            },
        )
        waited_s = 0.0
        while not watcher.is_silent and waited_s < _WAIT_FOR_END_S + config.levels.grace_s:
            if watcher.await_end(_POLL_S) is not None:
                break
            waited_s += _POLL_S
            _reap(0, None)  # processes that the watcher terminates after a stop
        watcher.detach()
        return CommandOutcome(code if code >= 0 else 128 - code, number, child.pid, watcher.end)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if group is not None:
            group.remove()
        if stop_file is not None:  # a file that a person makes from now on is not a leftover
            forget_run(Path(stop_file), keep=True)


def _start(command: Sequence[str], group: Cgroup | None, mask: set[int | signal.Signals]) -> subprocess.Popen[bytes]:
    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if group is not None:
            group.join()

    name = command[0]
    try:
        # Descriptors stay open: a shell may have passed more than three. brim's own are closed automatically.
        return subprocess.Popen(list(command), close_fds=False, preexec_fn=in_child)
    except FileNotFoundError as error:
        problem = f"The command {name!r} was not found."
        if os.path.exists(name):
            problem = f"The interpreter that {name!r} names in its first line was not found."
        raise CommandStartError(problem, hint="Check its name and PATH.", code=127) from error
    except subprocess.SubprocessError as error:
        raise CommandStartError(
            "The command could not enter the cgroup that brim made for it.", hint="Add --no-cgroup.", code=126
        ) from error
    except OSError as error:
        if os.path.isdir(name) or not name:
            problem = "is a folder" if name else "has no name"
            raise CommandStartError(f"The command {name!r} {problem}.", hint="Name a program.", code=126) from error
        raise CommandStartError(
            f"The command {name!r} cannot be executed: {error.strerror}.",
            hint=f"If it is a script, make it executable: chmod +x {name}",
            code=126,
        ) from error


def _await(pid: int, watcher: WatcherProcess) -> tuple[int, resource.struct_rusage]:
    """Wait for the command, forward signals to it, and return its exit status and resource usage."""
    while True:
        number, is_from_kernel = _next_signal()
        if number == signal.SIGCHLD:
            if (ended := _reap(pid, watcher)) is not None:
                return ended
            continue
        if not (is_from_kernel and number in _FROM_TERMINAL):
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                pass  # it has just ended, or is another user's (sudo), which the terminal still reaches
        if number == signal.SIGTSTP:  # stop too; the shell shows the job as stopped, and `fg` continues from here
            os.kill(os.getpid(), signal.SIGTSTP)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})


def _next_signal() -> tuple[int, bool]:
    """Return the next signal, and whether the kernel sent it (then the process group has it)."""
    expected = _FORWARDED | {signal.SIGCHLD}
    if sys.platform == "linux":
        info = signal.sigwaitinfo(expected)
        return info.si_signo, info.si_code > 0
    number = signal.sigwait(expected)  # elsewhere the sender is unknown: assume the terminal if there is one
    return number, sys.stdin is not None and sys.stdin.isatty()


def _reap(pid: int, watcher: WatcherProcess | None) -> tuple[int, resource.struct_rusage] | None:
    """Collect every child that has ended, orphans of the command too; return the exit of `pid` if it is among them."""
    exit_of_pid = None
    while True:
        try:
            ended, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return exit_of_pid
        if ended == 0:
            return exit_of_pid
        if ended == pid:
            exit_of_pid = status, usage
        elif watcher is not None and ended == watcher.pid:
            watcher.set_exit_status(status)
            if not watcher.is_silent and exit_of_pid is None:
                try:
                    sys.stderr.write("brim: the watcher has ended; the command continues unwatched\n")
                    sys.stderr.flush()
                except OSError:
                    pass

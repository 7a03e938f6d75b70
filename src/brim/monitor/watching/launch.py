"""Start a watcher process and exchange messages with it.

It is a new interpreter, not a fork: small, without the libraries and secrets of its parent, and in a separate session,
where Ctrl-C and a closed terminal do not reach it. `WatchConfig` is its configuration.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, field
from pathlib import Path
from typing import IO, Any

from brim.errors import BrimError
from brim.memory.cgroup import Cgroup
from brim.memory.limit import Limit
from brim.memory.thresholds import DEFAULT_LEAD_S, Threshold, check_order, parse_level, standard_thresholds
from brim.records import dataclass


@dataclass(frozen=True, slots=True)
class StopLevels:
    """When and how to warn, stop and kill. Levels are like "80%", "40GB" or "off"."""

    alert: str = "80%"
    stop: str = "90%"
    kill: str = "97%"
    system: str = "90%"
    alert_after_s: float = 10.0
    stop_after_s: float = 3.0
    lead_s: float = DEFAULT_LEAD_S
    grace_s: float = 30.0
    stop_file: str | None = None
    alerts: str | None = None
    on_alert: str | None = None
    enforce: bool = True
    enforce_all: bool = False  # of several programs that match
    is_polled: bool = False  # the watched program itself asks whether it should stop

    def thresholds(self, limit_bytes: int) -> list[Threshold]:
        """Return the thresholds of the process tree; InputError if they are out of order."""
        alert, stop, kill = (parse_level(text) for text in (self.alert, self.stop, self.kill))
        thresholds = standard_thresholds(alert, stop, kill, self.alert_after_s, self.stop_after_s)
        check_order(thresholds, limit_bytes)
        return thresholds

    def system_thresholds(self) -> list[Threshold]:
        """Return the threshold of the machine, which only warns: the cause is unknown."""
        level = parse_level(self.system)
        return [Threshold("system", level, self.alert_after_s)] if level else []


@dataclass(frozen=True, slots=True)
class WatchTarget:
    """The processes to watch, by `kind`.

    `command`: the command that `owner` will start, and its descendants. `process`: `pid` and its descendants. `match`:
    processes with `pattern` in the name of their program or script, also after a restart. `machine`: all.
    """

    kind: str
    pid: int | None = None
    pattern: str | None = None
    owner: int | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """The configuration of a watcher, sent as one JSON line."""

    target: WatchTarget
    log: str
    limit: Limit
    is_floating: bool = False  # the limit is the available memory, which changes
    levels: StopLevels = field(default_factory=StopLevels)
    group: Cgroup | None = None
    fraction: float | None = None  # of the work, for `brim forecast sampled`
    values_descriptor: int | None = None
    speak: bool = True
    detached: bool = False
    excluded_pids: tuple[int, ...] = ()  # processes of brim that are not part of the command

    @property
    def enforced(self) -> str:
        return self.group.kind if self.group and self.group.limited else "best effort"

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str | bytes) -> WatchConfig:
        facts = json.loads(text)
        target, group = facts.pop("target"), facts.pop("group")
        target["command"] = tuple(target["command"])
        facts["excluded_pids"] = tuple(facts["excluded_pids"])
        # The shelter is the parent's to leave.
        joined = Cgroup(Path(group["folder"]), group["version"], group["limited"]) if group else None
        levels, limit = StopLevels(**facts.pop("levels")), Limit(**facts.pop("limit"))
        return cls(WatchTarget(**target), levels=levels, limit=limit, group=joined, **facts)


_FIELDS = ("t_ns", "total_bytes", "anon_bytes", "shmem_bytes", "swap_bytes", "file_bytes", "peak_bytes", "stop")
_SIZE = 4096


class SharedValues:
    """Numbers by name that a watcher shares with its parent. Make one, or open that of a descriptor."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._file: IO[bytes] | None = None
        if descriptor is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
            self._file.truncate(_SIZE)
            descriptor = self._file.fileno()
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, _SIZE)
        self._numbers = memoryview(self._page).cast("q")

    def set(self, **values: int) -> None:
        for name, value in values.items():
            self._numbers[_FIELDS.index(name)] = value

    def get(self, name: str) -> int:
        return self._numbers[_FIELDS.index(name)]

    def close(self) -> None:
        self._numbers.release()
        self._page.close()
        if self._file is not None:
            self._file.close()


HOME = Path(__file__).parents[3]  # the folder of the package: the watcher imports this brim and no other
_START = "import sys; sys.path.insert(0, sys.argv[1]); from brim.monitor.watching.watcher import main; main()"
# The environment of a watcher and an --on-alert command: nothing that may be a secret.
_PASSED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM", "DISPLAY"),
    *("WAYLAND_DISPLAY", "DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR"),
    "XDG_STATE_HOME",  # contains the notes about stop files
    *("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE", "SLURM_JOB_ID"),
)


class WatcherProcess:
    """A watcher that was started; `pid` is its own process."""

    def __init__(self, config: WatchConfig) -> None:
        environment = {name: value for name, value in os.environ.items() if name in _PASSED or name.startswith("LC_")}
        self.end: dict[str, Any] | None = None
        self._unread = b""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, str(HOME)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if config.detached and not config.speak else None,
            env=environment,
            start_new_session=True,
            pass_fds=() if config.values_descriptor is None else (config.values_descriptor,),
            cwd="/" if config.detached else None,
        )
        self.pid = self._process.pid
        self._write(config.to_json())
        if not self._receive("ready", 30.0):
            self._process.kill()
            raise BrimError(
                "The process that watches did not start.", hint="Run it again with --debug and report the output."
            )

    def send(self, action: str, **facts: Any) -> bool:
        """Send a message; return False if the watcher is gone."""
        return self._write(json.dumps({"do": action, **facts}))

    def _write(self, line: str) -> bool:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return False
        return True

    def await_end(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the end of the log, or None if it does not come in that time."""
        if self.end is None:
            self.end = self._receive("end", timeout_s)
        return self.end

    @property
    def is_silent(self) -> bool:
        """Return whether it has closed its output."""
        return self._process.stdout is None or self._process.stdout.closed

    def _receive(self, name: str, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while not self._process.stdout.closed:
            line, separator, unread = self._unread.partition(b"\n")
            if separator:
                self._unread = unread
                message = json.loads(line)
                if name in message:
                    return message[name]
                continue
            ready, _, _ = select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                return None
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                self._process.stdout.close()
            self._unread += data
        return None

    def set_exit_status(self, status: int) -> None:
        """Note its exit status, which was collected elsewhere."""
        self._process.returncode = os.waitstatus_to_exitcode(status)

    def detach(self) -> None:
        """Close the connection. The watcher may run longer than this process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                try:
                    stream.close()
                except OSError:
                    pass
        if self._process.returncode is None and self._process.poll() is None:
            self._process.returncode = 0  # it needs no wait

"""Start a watcher process and exchange messages with it.

It is a new interpreter, not a fork: small, without the libraries and secrets of its parent, and in a separate session,
where Ctrl-C and a closed terminal do not reach it. `Orders` are its configuration.
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
from brim.memory.thresholds import DEFAULT_LEAD_S, Threshold, check_order, parse_level, standard_thresholds
from brim.records import dataclass


@dataclass(frozen=True, slots=True)
class Ladder:
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
    act: bool = True
    act_on_all: bool = False  # of several programs that match
    heard: bool = False  # the watched program itself asks whether it should stop

    def lines(self, limit_bytes: int) -> list[Threshold]:
        """Return the thresholds of the tree; InputError if they are out of order."""
        alert, stop, kill = map(parse_level, (self.alert, self.stop, self.kill))
        lines = standard_thresholds(alert, stop, kill, self.alert_after_s, self.stop_after_s)
        check_order(lines, limit_bytes)
        return lines

    def system_lines(self) -> list[Threshold]:
        """Return the threshold of the machine, which only warns: its cause is not known."""
        level = parse_level(self.system)
        return [Threshold("system", level, self.alert_after_s)] if level else []


@dataclass(frozen=True, slots=True)
class Target:
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
class Orders:
    """The configuration of a watcher, sent as one JSON line."""

    target: Target
    log: str
    limit_bytes: int
    limit_why: str
    enforced: str = "best effort"
    floating: bool = False  # without --memory the limit is the free memory of the machine, which changes
    asked_bytes: int = 0  # what the user set; the limit is less while a cgroup above leaves less
    group: dict[str, Any] | None = None
    ladder: Ladder = field(default_factory=Ladder)
    fraction: float | None = None  # of the work, for `brim forecast sampled`
    board: int | None = None
    speak: bool = True
    detached: bool = False
    aside: tuple[int, ...] = ()  # processes of brim that are not part of the command

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Orders:
        facts = json.loads(text)
        target = facts.pop("target")
        target["command"] = tuple(target["command"])
        facts["aside"] = tuple(facts["aside"])
        return cls(target=Target(**target), ladder=Ladder(**facts.pop("ladder")), **facts)


_FIELDS = ("t_ns", "total_bytes", "anon_bytes", "shmem_bytes", "swap_bytes", "file_bytes", "peak_bytes", "stop")
_SIZE = 4096


class Board:
    """Numbers by name. Make one and hand its `descriptor` to a child, or open one by descriptor."""

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


HOME = Path(__file__).parents[3]  # where the package lies: the watcher imports this brim and no other
_START = "import sys; sys.path.insert(0, sys.argv[1]); from brim.monitor.watching.watcher import main; main()"
# What a watcher and an --on-alert command may know of the environment: nothing that could be a secret.
_PASSED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TMPDIR",
    "TERM",
    "DISPLAY",
    "WAYLAND_DISPLAY",
    "DBUS_SESSION_BUS_ADDRESS",
    "XDG_RUNTIME_DIR",
    "XDG_STATE_HOME",  # contains the notes about stop files
    "SLURM_MEM_PER_NODE",
    "SLURM_MEM_PER_CPU",
    "SLURM_CPUS_ON_NODE",
    "SLURM_JOB_ID",
)


class WatcherProcess:
    """A watcher that was started; `pid` is its own."""

    def __init__(self, orders: Orders) -> None:
        environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
        environment |= {name: value for name, value in os.environ.items() if name.startswith("LC_")}
        self.end: dict[str, Any] | None = None
        self._rest = b""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, str(HOME)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if orders.detached and not orders.speak else None,
            env=environment,
            start_new_session=True,
            pass_fds=() if orders.board is None else (orders.board,),
            cwd="/" if orders.detached else None,
        )
        self.pid = self._process.pid
        self._write(orders.to_json())
        if not self._receive("ready", 30.0):
            self._process.kill()
            raise BrimError(
                "The process that watches did not start.", hint="Run it again with --debug and report the output."
            )

    def tell(self, what: str, **facts: Any) -> bool:
        """False if the watcher is gone."""
        return self._write(json.dumps({"do": what, **facts}))

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
    def silent(self) -> bool:
        """Whether it has closed its output."""
        return self._process.stdout is None or self._process.stdout.closed

    def _receive(self, word: str, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while not self._process.stdout.closed:
            line, found, rest = self._rest.partition(b"\n")
            if found:
                self._rest = rest
                message = json.loads(line)
                if word in message:
                    return message[word]
                continue
            ready, _, _ = select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                return None
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                self._process.stdout.close()
            self._rest += data
        return None

    def reaped(self, status: int) -> None:
        """Note that its exit status was collected elsewhere."""
        self._process.returncode = os.waitstatus_to_exitcode(status)

    def let_go(self) -> None:
        """Detach from it."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                try:
                    stream.close()
                except OSError:
                    pass
        if self._process.returncode is None and self._process.poll() is None:
            self._process.returncode = 0  # it may outlive this process, and needs no wait

"""Write and read run logs: JSON lines, appended (docs/reference/run-log.md).

Each line is written with one system call, so that it can be read after a crash of all processes. A thread syncs events
to the disk: that takes a third of a second on a busy disk, for which the watch must not pause. A log has a maximum
size: when it is full, older samples are thinned to the higher one of each pair, in a new file that replaces the old
one.

`read_records` reads any log as typed records. Nothing in a log is trusted: fields of a wrong type are treated as
missing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from brim.errors import InputError
from brim.memory.meter import Usage
from brim.memory.thresholds import parse_level
from brim.progress import RunningTask
from brim.records import dataclass
from brim.state.atomic_files import private_folder, write_all

MAX_BYTES = 16 << 20
_RECENT_S = 600.0  # the last ten minutes stay as they are
_KEPT_LOGS = 100
_HELPED = 0.95


class LogWriter:
    """Appends to one file. On a full disk lines are lost, and the watch continues."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self.lost_lines = 0
        self._max_bytes = self._thin_at = max_bytes
        private_folder(path.parent)
        self._descriptor = _open(path)
        self._size = os.fstat(self._descriptor).st_size
        self._first_t: float | None = None
        self._thinning: _Thinning | None = None
        self._sync = _Sync(lambda: os.fsync(self._descriptor))
        self._sync.start()

    def write(self, kind: str, facts: Mapping[str, Any]) -> None:
        line = _line({"type": kind, **facts})
        try:
            write_all(self._descriptor, line)
        except OSError:
            self.lost_lines += 1
            return
        if kind != "sample":
            self._sync.wanted.set()
        self._size += len(line)
        if kind == "sample":
            self._first_t = facts["t"] if self._first_t is None else self._first_t
            self._keep_small(facts["t"])

    def _keep_small(self, now: float) -> None:
        if self._thinning is not None:
            if self._size > max(self._thin_at, self._max_bytes) + self._max_bytes // 2:
                self._thinning.join()
            if not self._thinning.is_alive():
                self._take_over(self._thinning)
        elif self._size > self._thin_at:
            first = now if self._first_t is None else self._first_t
            border = max(now - _RECENT_S, (first + now) / 2)
            self._thinning = _Thinning(self.path, self._size, border)
            self._thinning.start()

    def _take_over(self, thinning: _Thinning) -> None:
        """Append later entries to the thinned file and continue with that file."""
        self._thinning = None
        if not thinning.done:
            self._thin_at = self._size + self._max_bytes // 2  # the disk is full: try again later
            return
        try:
            with open(self.path, "rb") as old, open(thinning.temporary, "ab") as new:
                old.seek(thinning.end)
                shutil.copyfileobj(old, new)
                new.flush()
                os.fsync(new.fileno())
            thinning.temporary.replace(self.path)
            fresh = _open(self.path)
        except OSError:
            self._thin_at = self._size + self._max_bytes // 2
            return
        os.close(self._descriptor)
        self._descriptor = fresh
        before, self._size = self._size, os.fstat(fresh).st_size
        # Above the bound it is thinned again at once, unless that no longer helps: then events fill it.
        helped = self._size < _HELPED * before
        self._thin_at = self._max_bytes if helped else max(self._max_bytes, self._size + self._max_bytes // 4)

    def close(self) -> None:
        if self._thinning is not None:
            self._thinning.join()
            self._take_over(self._thinning)
        self._sync.finish()
        os.close(self._descriptor)


class _Sync(threading.Thread):
    """Syncs the log to the disk on request, and at the end."""

    def __init__(self, sync: Callable[[], None]) -> None:
        super().__init__(name="brim-sync", daemon=True)
        self._sync, self._over = sync, False
        self.wanted = threading.Event()

    def run(self) -> None:
        while not self._over:
            self.wanted.wait()
            self.wanted.clear()
            try:
                self._sync()
            except OSError:
                continue  # a pipe or a full disk: nothing to be done about it

    def finish(self) -> None:
        self._over = True
        self.wanted.set()
        self.join()


class _Thinning(threading.Thread):
    """Thins a log in a thread: it takes a second, for which sampling must not pause."""

    def __init__(self, path: Path, end: int, border_t: float) -> None:
        super().__init__(name="brim-thin", daemon=True)
        self.path, self.end, self.border_t = path, end, border_t
        self.temporary = path.with_name(f".{path.name}.thin")
        self.done = False

    def run(self) -> None:
        try:
            thin(self.path, self.temporary, self.end, self.border_t)
            self.done = True
        except OSError:
            self.temporary.unlink(missing_ok=True)


def thin(path: Path, target: Path, end: int, border_t: float) -> None:
    """Copy a log up to byte `end`; of every two samples before `border_t`, only the higher one."""
    with open(target, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as out:
        waiting: dict[str, Any] | None = None
        for entry in read_log(path, end):
            if entry["type"] == "sample" and entry["t"] < border_t:
                if waiting is None:
                    waiting = entry
                    continue
                entry, waiting = _higher(waiting, entry), None
            elif waiting is not None:
                out.write(_line(waiting))
                waiting = None
            out.write(_line(entry))
        if waiting is not None:
            out.write(_line(waiting))


def _higher(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    kept, dropped = (one, other) if one["total_bytes"] > other["total_bytes"] else (other, one)
    if "processes" in dropped and "processes" not in kept:
        kept = {**kept, "processes": dropped["processes"]}
    return kept


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":"), default=str).encode() + b"\n"


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def read_log(path: Path, end: int | None = None) -> Iterator[dict[str, Any]]:
    """Read the raw entries of a log, up to byte `end`, without lines that are torn or not brim's."""
    read = 0
    with open(path, "rb") as file:
        for line in file:
            read += len(line)
            if end is not None and read > end:
                return
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and isinstance(entry.get("type"), str):
                yield entry


def check_log(path: Path) -> None:
    """Refuse to replace a file that is neither empty nor a run log."""
    if not os.path.lexists(path):
        return
    try:
        if path.is_file() and (not path.stat().st_size or _begins_as_log(path)):
            return
    except OSError as error:
        raise _unwritable(path, error) from error
    raise InputError(f"{str(path)!r} exists and is not a run log of brim.", hint="Name a new file for the log.")


def _begins_as_log(path: Path) -> bool:
    mark = b'{"type":"head"'
    with open(path, "rb") as file:
        return file.read(len(mark)) == mark


def prepare_log(path: Path, *, anew: bool) -> None:
    """Check that the log can be written; `anew` removes an older one."""
    check_log(path)
    try:
        private_folder(path.parent)
        if anew:
            path.unlink(missing_ok=True)
        os.close(_open(path))
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"The log cannot be written to {str(path)!r}: {error.strerror}.", hint="Choose another: --log=FILE."
    )


def log_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Return the folder of logs without --log, in the user's state folder."""
    environment = os.environ if environment is None else environment
    state = environment.get("XDG_STATE_HOME") or os.path.join(environment.get("HOME") or "/tmp", ".local/state")
    return Path(state) / "brim" / "runs"


def new_log_path(name: str, folder: Path | None = None) -> Path:
    """Return a new path in the folder of logs, and remove the oldest logs."""
    folder = log_folder() if folder is None else folder
    private_folder(folder)
    for old in sorted(folder.glob("*.jsonl"), key=_age)[:-_KEPT_LOGS]:
        old.unlink(missing_ok=True)
        alerts_path(old).unlink(missing_ok=True)
    plain = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)[:40]
    return folder / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{plain or 'run'}.jsonl"


def alerts_path(log: Path) -> Path:
    """Return the text file of alerts that belongs to a log."""
    return log.with_suffix(".alerts.txt")


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


_LAST_SECOND = 253_402_214_400.0  # a day before the year 10000, where calendars end, whatever the time zone
_LARGEST = 1 << 62
_MOST_WORDS = 500
_LONGEST_LINE = 8 << 20
# Characters that must not be shown: controls, marks of text direction, unpaired surrogates.
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class LoggedForecast:
    """The forecast that was made before the run."""

    low_bytes: int
    high_bytes: int
    verdict: str


@dataclass(frozen=True, slots=True)
class Head:
    """The first entry of a run. Empty or None: the log does not say."""

    command: tuple[str, ...] = ()
    watched: str = ""
    pid: int | None = None
    limit_bytes: int | None = None
    limit_why: str = ""
    enforced: str = ""
    thresholds: tuple[tuple[str, int], ...] = ()
    ram_bytes: int | None = None
    swap_bytes: int | None = None
    cpus: int | None = None
    kernel: str = ""
    boot_id: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    not_seen: tuple[str, ...] = ()
    forecast: LoggedForecast | None = None
    stop_file: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoggedProcess:
    """A process of a sample. Pages that several processes share count for each."""

    pid: int
    name: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class WorkState:
    """The shards or units of a job. `total` is None where that is not known yet."""

    what: str = ""
    total: int | None = None
    done: int = 0
    running: tuple[RunningTask, ...] = ()
    more_running: int = 0
    again: tuple[tuple[str, int], ...] = ()  # tasks that wait to be tried again, and how often they were tried


@dataclass(frozen=True, slots=True)
class LogSample:
    """The memory at one moment. `processes` is None where the sample does not list them."""

    t: float
    usage: Usage
    total_bytes: int
    raw: Mapping[str, Any]
    available_bytes: int | None = None
    swap_free_bytes: int | None = None
    left_s: int | None = None
    bytes_per_s: int | None = None
    pressure: float | None = None
    processes: tuple[LoggedProcess, ...] | None = None
    work: WorkState | None = None


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Something that happened. `elsewhere`: on the machine, perhaps to another process."""

    t: float
    kind: str
    text: str
    lines: tuple[str, ...]
    elsewhere: bool
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class End:
    """The last entry of a watch that came to its end."""

    t: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    stopped: str | None = None
    why: str | None = None
    gone: bool = False
    overshoot_bytes: int = 0
    oom_kills: int = 0
    machine_oom_kills: int = 0
    peak_bytes: int = 0
    peak_t: float | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)


Record = Head | LogSample | LogEvent | End


def read_records(path: Path) -> Iterator[Record | None]:
    """Read a run log as typed records; None for each line that is not one. Lines longer than a bound are skipped."""
    with open(path, "rb") as file:
        while line := file.readline(_LONGEST_LINE):
            if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
                while (rest := file.readline(_LONGEST_LINE)) and not rest.endswith(b"\n"):
                    pass
                yield None
            elif line.strip():
                yield parse_record(line)


def parse_record(line: bytes | str) -> Record | None:
    """Parse one line of a run log. Fields that are missing or of a wrong type are empty; None: it is not a record."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    kind, t = entry.get("type"), time_of_day(entry.get("t"))
    if kind == "head":
        return head_of(entry)
    if kind == "end":
        return end_of(entry)
    if kind == "sample" and t is not None:
        return _sample(entry, t)
    if kind == "event" and t is not None:
        name = text(entry.get("kind"), 40) or "event"
        shown = text(entry.get("text"), 1000) or name
        return LogEvent(t, name, shown, texts(entry.get("lines"), 1000), bool(entry.get("machine")), entry)
    return None


def head_of(entry: dict[str, Any]) -> Head:
    limit, machine, versions, ladder = (_object(entry.get(name)) for name in ("limit", "machine", "versions", "ladder"))
    limit_bytes = size(limit.get("bytes")) or None
    command = entry.get("command")
    thresholds = []
    for name in ("alert", "stop", "kill"):
        try:
            level = parse_level(text(ladder.get(name), 40))
        except InputError:
            continue
        if level is not None and (level.bytes is not None or limit_bytes is not None):
            thresholds.append((name, level.in_bytes(limit_bytes or 0)))
    facts = _object(entry.get("forecast"))
    low, high = size(facts.get("low_bytes")), size(facts.get("high_bytes"))
    low, high = low if low is not None else high, high if high is not None else low
    forecast = None
    if low is not None and high is not None:
        forecast = LoggedForecast(min(low, high), max(low, high), text(facts.get("verdict"), 40))
    return Head(
        command=(text(command, 5000),) if isinstance(command, str) else texts(command, 5000),
        watched=text(entry.get("watched"), 40),
        pid=size(entry.get("pid")),
        limit_bytes=limit_bytes,
        limit_why=text(limit.get("why"), 200),
        enforced=text(limit.get("enforced"), 200),
        thresholds=tuple(thresholds),
        ram_bytes=size(machine.get("ram_bytes")),
        swap_bytes=size(machine.get("swap_bytes")),
        cpus=size(machine.get("cpus")),
        kernel=" ".join(filter(None, (text(machine.get("system"), 40), text(machine.get("kernel"), 80)))),
        boot_id=text(entry.get("boot_id"), 80),
        versions=tuple((text(name, 40), text(version, 80)) for name, version in list(versions.items())[:20]),
        not_seen=texts(entry.get("not_seen"), 300),
        forecast=forecast,
        stop_file=text(ladder.get("stop_file"), 1000),
        raw=entry,
    )


def _usage(entry: Mapping[str, Any]) -> Usage:
    return Usage(*(size(entry.get(f"{kind}_bytes")) or 0 for kind in ("anon", "shmem", "swap", "file")))


def _sample(entry: dict[str, Any], t: float) -> LogSample:
    usage, total = _usage(entry), size(entry.get("total_bytes"))
    if total is None:
        total = usage.total_bytes
    elif not usage.total_bytes:
        usage = Usage(total, 0, 0, usage.file_bytes)  # a log without the kinds of memory
    waited = entry.get("psi_some_avg10")
    processes = entry.get("processes")
    return LogSample(
        t=t,
        usage=usage,
        total_bytes=total,
        raw=entry,
        available_bytes=size(entry.get("available_bytes")),
        swap_free_bytes=size(entry.get("swap_free_bytes")),
        left_s=size(entry.get("left_s")),
        bytes_per_s=size(entry.get("bytes_per_s")),
        pressure=float(waited) if isinstance(waited, int | float) and 0 <= waited <= 100 else None,
        processes=tuple(
            LoggedProcess(pid, text(one.get("name"), 80) or "?", _usage(one))
            for one in objects(processes)
            if (pid := size(one.get("pid"))) is not None
        )
        if isinstance(processes, list)
        else None,
        work=_work(entry["work"]) if isinstance(entry.get("work"), dict) else None,
    )


def _work(entry: dict[str, Any]) -> WorkState:
    running = [
        RunningTask(name, size(one.get("bytes")) or 0, t, size(one.get("tries")) or 0)
        for one in objects(entry.get("running"))
        if (name := text(one.get("name"), 300)) and (t := time_of_day(one.get("t"))) is not None
    ]
    return WorkState(
        what=text(entry.get("what"), 40),
        total=size(entry.get("total")),
        done=size(entry.get("done")) or 0,
        running=tuple(running),
        more_running=size(entry.get("more_running")) or 0,
        again=tuple((text(one.get("name"), 300), size(one.get("tries")) or 1) for one in objects(entry.get("again"))),
    )


def end_of(entry: dict[str, Any]) -> End:
    return End(
        t=time_of_day(entry.get("t")),
        exit_code=_whole(entry.get("exit_code")),
        signal=_whole(entry.get("signal")),
        stopped=text(entry.get("stopped"), 40) or None,
        why=text(entry.get("why"), 300) or None,
        gone=bool(entry.get("gone")),
        overshoot_bytes=size(entry.get("overshoot_bytes")) or 0,
        oom_kills=size(entry.get("oom_kills")) or 0,
        machine_oom_kills=size(entry.get("machine_oom_kills")) or 0,
        peak_bytes=size(entry.get("peak_bytes")) or 0,
        peak_t=time_of_day(entry.get("peak_t")),
        raw=entry,
    )


def time_of_day(value: object) -> float | None:
    """Seconds since 1970, within what calendars can show."""
    number = _number(value)
    return number if number is not None and 0 <= number < _LAST_SECOND else None


def size(value: object) -> int | None:
    """Return a number of bytes, a count or a process number; None if it is not one."""
    number = _whole(value)
    return number if number is not None and number >= 0 else None


def _whole(value: object) -> int | None:
    number = _number(value)
    return round(number) if number is not None else None


def _number(value: object) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        return None  # not a number (NaN is not smaller than anything), or none that could be meant
    return value


def text(value: object, most: int) -> str:
    """Return a text that can be shown, cut to `most` characters; empty if it is not a text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = f"{value:g}" if isinstance(value, float) else str(value)[:most]
    if not isinstance(value, str):
        return ""
    shown = value if len(value) <= most else value[: most - 1] + "…"
    return _UNFIT.sub("\ufffd", shown)


def texts(value: object, most: int) -> tuple[str, ...]:
    """A list of texts, each cut to `most` characters."""
    return tuple(text(word, most) for word in value[:_MOST_WORDS]) if isinstance(value, list) else ()


def objects(value: object) -> Iterator[dict[str, Any]]:
    """The objects in a list."""
    return (item for item in value if isinstance(item, dict)) if isinstance(value, list) else iter(())


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}

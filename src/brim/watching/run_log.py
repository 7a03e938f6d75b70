"""The log of a watch: JSON lines, appended and complete at every moment (docs/log-format.md).

Each line is written with one system call, so that what was said before a crash of all processes can be read
after it. Events are synced to the disk as well, by a thread: a busy disk takes a third of a second for it, and
the watch must not be blind meanwhile. A log does not outgrow its bound: when it is full, older
samples are thinned to the higher one of each pair, in a new file that takes the old one's name.

Its entries are read as typed values. Nothing in a log is trusted: what is not as it should be is absent.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from brim.errors import InputError
from brim.memory.guard import parse_level
from brim.records import dataclass
from brim.state.durable import private_folder, write_all

MAX_BYTES = 16 << 20
_RECENT_S = 600.0  # the last ten minutes stay as they are
_KEPT_LOGS = 100
_HELPED = 0.95


class LogWriter:
    """Appends to one file. A disk that is full loses lines, never the watch."""

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
        """Add what was written meanwhile to the thinned file, and go on with that one."""
        self._thinning = None
        if not thinning.done:
            self._thin_at = self._size + self._max_bytes // 2  # no room: try again later
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
    """Brings to the disk what was written, as soon as that is wanted; once more at the end."""

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
    """Thins a log while samples go on: a second's work, which the watch must not stand still for."""

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
    """The entries of a log, up to byte `end`; lines that are torn or are none of brim's are left out."""
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
    """Refuse a log that would take the place of something else: there may be nothing, nothing in it, or a log."""
    if not os.path.lexists(path):
        return
    try:
        if path.is_file() and (not path.stat().st_size or _begins_as_log(path)):
            return
    except OSError as error:
        raise _unwritable(path, error) from error
    raise InputError(f"{str(path)!r} is there already, and is no log of brim.", hint="Name a new file for the log.")


def _begins_as_log(path: Path) -> bool:
    mark = b'{"type":"head"'
    with open(path, "rb") as file:
        return file.read(len(mark)) == mark


def prepare_log(path: Path, *, anew: bool) -> None:
    """Prove that the log can be written; `anew` takes away an older one."""
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
    """Where logs go that were given no name: the user's state folder."""
    environment = os.environ if environment is None else environment
    state = environment.get("XDG_STATE_HOME") or os.path.join(environment.get("HOME") or "/tmp", ".local/state")
    return Path(state) / "brim" / "runs"


def new_log_path(name: str, folder: Path | None = None) -> Path:
    """A new name in the folder of logs, from which the oldest are removed."""
    folder = log_folder() if folder is None else folder
    private_folder(folder)
    for old in sorted(folder.glob("*.jsonl"), key=_age)[:-_KEPT_LOGS]:
        old.unlink(missing_ok=True)
        alerts_path(old).unlink(missing_ok=True)
    plain = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)[:40]
    return folder / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{plain or 'run'}.jsonl"


def alerts_path(log: Path) -> Path:
    """The plain text beside a log."""
    return log.with_suffix(".alerts.txt")


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


_LAST_SECOND = 253_402_214_400.0  # a day before the year 10000, where calendars end, whatever the time zone
_LARGEST = 1 << 62
_MOST_WORDS = 500
# Characters that are nothing to look at: controls, marks that turn the direction of text around, halves of pairs.
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class LoggedForecast:
    """What was foretold before it ran."""

    low_bytes: int
    high_bytes: int
    verdict: str


@dataclass(frozen=True, slots=True)
class Head:
    """What was known at the beginning. Empty or None: the log does not say."""

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


@dataclass(frozen=True, slots=True)
class End:
    """The last line of a watch that came to its end."""

    exit_code: int | None = None
    signal: int | None = None
    stopped: str | None = None
    why: str | None = None
    overshoot_bytes: int = 0
    oom_kills: int = 0
    machine_oom_kills: int = 0
    peak_bytes: int = 0
    peak_t: float | None = None


def head_of(entry: dict[str, Any]) -> Head:
    limit, machine, versions = (_object(entry.get(name)) for name in ("limit", "machine", "versions"))
    limit_bytes = size(limit.get("bytes")) or None
    command = entry.get("command")
    return Head(
        command=(text(command, 5000),) if isinstance(command, str) else texts(command, 5000),
        watched=text(entry.get("watched"), 40),
        pid=size(entry.get("pid")),
        limit_bytes=limit_bytes,
        limit_why=text(limit.get("why"), 200),
        enforced=text(limit.get("enforced"), 200),
        thresholds=tuple(_thresholds(_object(entry.get("ladder")), limit_bytes)),
        ram_bytes=size(machine.get("ram_bytes")),
        swap_bytes=size(machine.get("swap_bytes")),
        cpus=size(machine.get("cpus")),
        kernel=" ".join(filter(None, (text(machine.get("system"), 40), text(machine.get("kernel"), 80)))),
        boot_id=text(entry.get("boot_id"), 80),
        versions=tuple((text(name, 40), text(version, 80)) for name, version in list(versions.items())[:20]),
        not_seen=texts(entry.get("not_seen"), 300),
        forecast=_forecast(_object(entry.get("forecast"))),
        stop_file=text(_object(entry.get("ladder")).get("stop_file"), 1000),
    )


def _thresholds(ladder: dict[str, Any], limit_bytes: int | None) -> Iterator[tuple[str, int]]:
    for name in ("alert", "stop", "kill"):
        try:
            level = parse_level(text(ladder.get(name), 40))
        except InputError:
            continue
        if level is not None and (level.bytes is not None or limit_bytes is not None):
            yield name, level.of(limit_bytes or 0)


def _forecast(facts: dict[str, Any]) -> LoggedForecast | None:
    low, high = size(facts.get("low_bytes")), size(facts.get("high_bytes"))
    low, high = low if low is not None else high, high if high is not None else low
    if low is None or high is None:
        return None
    return LoggedForecast(min(low, high), max(low, high), text(facts.get("verdict"), 40))


def end_of(entry: dict[str, Any]) -> End:
    return End(
        exit_code=_whole(entry.get("exit_code")),
        signal=_whole(entry.get("signal")),
        stopped=text(entry.get("stopped"), 40) or None,
        why=text(entry.get("why"), 300) or None,
        overshoot_bytes=size(entry.get("overshoot_bytes")) or 0,
        oom_kills=size(entry.get("oom_kills")) or 0,
        machine_oom_kills=size(entry.get("machine_oom_kills")) or 0,
        peak_bytes=size(entry.get("peak_bytes")) or 0,
        peak_t=time_of_day(entry.get("peak_t")),
    )


def time_of_day(value: object) -> float | None:
    """Seconds since 1970, within what calendars can show."""
    number = _number(value)
    return number if number is not None and 0 <= number < _LAST_SECOND else None


def size(value: object) -> int | None:
    """A whole number that is not negative: bytes, a count, a process."""
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
    """A text that can be shown, cut to `most` characters; empty if it is none."""
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

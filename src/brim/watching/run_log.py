"""The log of a watch: JSON lines, appended and complete at every moment (docs/log-format.md).

Each line is written with one system call, so that what was said before a crash of all processes can be read
after it. Events are synced to the disk as well, by a thread: a busy disk takes a third of a second for it, and
the watch must not be blind meanwhile. A log does not outgrow its bound: when it is full, older
samples are thinned to the higher one of each pair, in a new file that takes the old one's name.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from brim.errors import InputError
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
    mark = b'{"type":'
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

"""Write run logs: JSON lines, appended (docs/reference/run-log.md).

Each line is written with one system call, so that it can be read after a crash of all processes. A thread syncs events
to the disk: this takes a third of a second on a busy disk, for which the watch must not pause. A log has a maximum
size: when it is full, only the higher one of each pair of older samples is kept, in a new file that replaces the old
one.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from brim.errors import InputError
from brim.memory.limit import Limit
from brim.memory.meter import Machine, Process, Usage, boot_id, machine_facts, versions
from brim.monitor.watching.find_processes import ProcessNames
from brim.state.atomic_files import private_folder, write_all

MAX_BYTES = 16 << 20
SHOWN_PROCESSES = 20
_RECENT_S = 600.0  # the last ten minutes are not thinned
_KEPT_LOGS = 100
_HELPED = 0.95
_HEAD = b'{"type":"head"'


class LogWriter:
    """Appends to one file. If the disk is full, lines are lost, and the watch continues."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self.lost_lines = 0
        self._max_bytes = self._thin_at = max_bytes
        private_folder(path.parent)
        self._descriptor = _open(path)
        self._size = os.fstat(self._descriptor).st_size
        self._first_t: float | None = None
        self._thinning: threading.Thread | None = None
        self._thinned_to: int | None = None  # the bytes of the log that the thinned copy replaces
        self._temporary = path.with_name(f".{path.name}.thin")
        self._sync_requested, self._is_closing = threading.Event(), False
        self._syncing = threading.Thread(target=self._sync, name="brim-sync", daemon=True)
        self._syncing.start()

    def write(self, kind: str, facts: Mapping[str, Any]) -> None:
        line = _encode({"type": kind, **facts})
        try:
            write_all(self._descriptor, line)
        except OSError:
            self.lost_lines += 1
            return
        self._size += len(line)
        if kind == "sample":
            self._first_t = facts["t"] if self._first_t is None else self._first_t
            self._keep_small(facts["t"])
        else:
            self._sync_requested.set()

    def _sync(self) -> None:
        while not self._is_closing:
            self._sync_requested.wait()
            self._sync_requested.clear()
            try:
                os.fsync(self._descriptor)
            except OSError:
                continue  # a pipe, or a full disk

    def _keep_small(self, now: float) -> None:
        if self._thinning is not None:
            if self._size > max(self._thin_at, self._max_bytes) + self._max_bytes // 2:
                self._thinning.join()
            if not self._thinning.is_alive():
                self._use_thinned()
        elif self._size > self._thin_at:  # in a thread, because it takes a second
            first = now if self._first_t is None else self._first_t
            border_t = max(now - _RECENT_S, (first + now) / 2)
            self._thinning = threading.Thread(target=self._thin, args=(self._size, border_t), daemon=True)
            self._thinning.start()

    def _thin(self, end: int, border_t: float) -> None:
        self._thinned_to = None
        try:
            thin(self.path, self._temporary, end, border_t)
            self._thinned_to = end
        except OSError:
            self._temporary.unlink(missing_ok=True)

    def _use_thinned(self) -> None:
        """Append later lines to the thinned copy and continue with that file."""
        self._thinning = None
        self._thin_at = self._size + self._max_bytes // 2  # if it failed because the disk is full: try again later
        if self._thinned_to is None:
            return
        try:
            with open(self.path, "rb") as old, open(self._temporary, "ab") as new:
                old.seek(self._thinned_to)
                shutil.copyfileobj(old, new)
                new.flush()
                os.fsync(new.fileno())
            self._temporary.replace(self.path)
            descriptor = _open(self.path)
        except OSError:
            return
        os.close(self._descriptor)
        self._descriptor = descriptor
        before, self._size = self._size, os.fstat(descriptor).st_size
        # Above the bound it is thinned again at once, unless that no longer helps because events fill it.
        helped = self._size < _HELPED * before
        self._thin_at = self._max_bytes if helped else max(self._max_bytes, self._size + self._max_bytes // 4)

    def close(self) -> None:
        if self._thinning is not None:
            self._thinning.join()
            self._use_thinned()
        self._is_closing = True
        self._sync_requested.set()
        self._syncing.join()
        os.close(self._descriptor)


def thin(path: Path, target: Path, end: int, border_t: float) -> None:
    """Copy a log up to byte `end`; of every two samples before `border_t`, only the higher one."""
    with open(target, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as out:
        previous: dict[str, Any] | None = None  # a sample that waits for the second of its pair
        for entry in read_log(path, end):
            if entry["type"] == "sample" and entry["t"] < border_t:
                if previous is None:
                    previous = entry
                    continue
                is_higher = previous["total_bytes"] > entry["total_bytes"]
                higher, lower = (previous, entry) if is_higher else (entry, previous)
                listed = {name: lower[name] for name in ("processes",) if name in lower}
                entry, previous = {**listed, **higher}, None
            elif previous is not None:
                out.write(_encode(previous))
                previous = None
            out.write(_encode(entry))
        if previous is not None:
            out.write(_encode(previous))


def _encode(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":"), default=str).encode() + b"\n"


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def read_log(path: Path, end: int | None = None) -> Iterator[dict[str, Any]]:
    """Read the raw entries of a log, up to byte `end`, without lines that are torn or not brim's."""
    position = 0
    with open(path, "rb") as file:
        for line in file:
            position += len(line)
            if end is not None and position > end:
                return
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and isinstance(entry.get("type"), str):
                yield entry


def head_entry(
    watched: str, command: Sequence[str], limit: Limit, enforced: str, *, time_s: float | None = None, **facts: Any
) -> dict[str, Any]:
    """Return the head of a log. `facts` are keys that not every run has."""
    began = time.time() if time_s is None else time_s
    return {
        "time": datetime.fromtimestamp(began, UTC).isoformat(timespec="milliseconds"),
        "boot_id": boot_id(),
        "machine": machine_facts(),
        "limit": {"bytes": limit.bytes, "why": limit.origin, "enforced": enforced},
        "watched": watched,
        "command": list(command),
        "versions": versions(),
        **facts,
    }


def sample_entry(t: float, usage: Usage, machine: Machine) -> dict[str, Any]:
    return {
        "t": round(t, 3),
        **asdict(usage),
        "total_bytes": usage.total_bytes,
        "available_bytes": machine.available_bytes,
        "swap_free_bytes": machine.swap_free_bytes,
        "psi_some_avg10": machine.psi_some_avg10,
    }


def process_entries(processes: Sequence[Process], names: ProcessNames) -> list[dict[str, Any]]:
    """Return the `processes` of a sample."""
    return [{"pid": p.pid, "name": names.of(p.pid, p.name), **asdict(p.usage)} for p in processes]


def check_log(path: Path) -> None:
    """Refuse to replace a file that is neither empty nor a run log."""
    if not os.path.lexists(path):
        return
    try:
        if path.is_file():
            with open(path, "rb") as file:
                start = file.read(len(_HEAD))
            if not start or start == _HEAD:
                return
    except OSError as error:
        raise _unwritable(path, error) from error
    raise InputError(f"{str(path)!r} exists and is not a run log of brim.", hint="Name a new file for the log.")


def prepare_log(path: Path, *, replace: bool) -> None:
    """Check that the log can be written; `replace` removes an older one."""
    check_log(path)
    try:
        private_folder(path.parent)
        if replace:
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


def recent_logs(folder: Path | None = None) -> list[Path]:
    """Return the logs in a folder, the newest first."""

    def changed(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:
            return 0.0

    return sorted((folder or log_folder()).glob("*.jsonl"), key=changed, reverse=True)


def new_log_path(name: str, folder: Path | None = None) -> Path:
    """Return a new path in the folder of logs, and remove the oldest logs."""
    folder = log_folder() if folder is None else folder
    private_folder(folder)
    for old in recent_logs(folder)[_KEPT_LOGS:]:
        old.unlink(missing_ok=True)
        alerts_path(old).unlink(missing_ok=True)
    plain = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)[:40]
    return folder / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{plain or 'run'}.jsonl"


def alerts_path(log: Path) -> Path:
    """Return the text file of alerts that belongs to a log."""
    return log.with_suffix(".alerts.txt")

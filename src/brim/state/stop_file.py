"""Stop files: one that is there when a run begins, and the record that tells a stale one from a wish.

A run notes in the user's state folder that it obeys a stop file, and takes the note and the file away when it ends.
A file that is there at the start is stale if the run that it was made for has ended without taking it away (it was
killed); then it goes, with a word about it. Any other was made by somebody who means it: refused, before anything
is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from brim.errors import InputError
from brim.memory.machine import boot_id
from brim.memory.meter import started
from brim.state.durable import private_folder


def settle_stop_file(path: Path) -> str | None:
    """Before a run: None if there is no such file, a sentence if a stale one was removed; else an InputError."""
    if not stop_file_lies(path):
        return None
    path.unlink(missing_ok=True)
    _note_path(path).unlink(missing_ok=True)
    return f"removed the stop file {path}: the run that it was made for has ended"


def stop_file_lies(path: Path) -> bool:
    """Whether there is a stale one; an InputError if it is not stale. Changes nothing: for whoever begins to plan."""
    if path.is_dir():
        raise InputError(f"The stop file {str(path)!r} is a folder.", hint="Give the name of a file.")
    if not path.exists():
        return False
    note = _read(path)
    if note is not None and not _runs(note) and note["began"] <= path.stat().st_mtime:
        return True
    if note is not None and _runs(note):
        raise InputError(
            f"The stop file {str(path)!r} is there: it stops the run with process {note['pid']}, which still goes on.",
            hint="Wait for its end, or name another file.",
        )
    raise InputError(
        f"The stop file {str(path)!r} is there already: the run would stop at once.", hint=f"Remove it: rm {path}"
    )


def note_run(path: Path) -> bool:
    """This process obeys the file from now on. False if another does already: then the end is that one's to see to."""
    note = _read(path)
    if note is not None and _runs(note):
        return False
    place = _note_path(path)
    facts = {"pid": os.getpid(), "born": started(os.getpid()), "boot": boot_id(), "began": time.time()}
    try:
        private_folder(place.parent)
        place.write_text(json.dumps(facts))
    except OSError:
        return True  # without a note a file that is left behind is refused: said, and not lost
    return True


def forget_run(path: Path) -> None:
    """The run is over: what asked it to stop has been obeyed."""
    for done in (path, _note_path(path)):
        try:
            done.unlink(missing_ok=True)
        except OSError:
            continue


def _note_path(path: Path, environment: Mapping[str, str] | None = None) -> Path:
    environment = os.environ if environment is None else environment
    state = environment.get("XDG_STATE_HOME") or os.path.join(environment.get("HOME") or "/tmp", ".local/state")
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    return Path(state) / "brim" / "stop-files" / f"{name}.json"


def _read(path: Path) -> dict[str, float] | None:
    try:
        note = json.loads(_note_path(path).read_text())
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) and {"pid", "born", "boot", "began"} <= note.keys() else None


def _runs(note: Mapping[str, object]) -> bool:
    pid = note["pid"]
    return note["boot"] == boot_id() and isinstance(pid, int) and started(pid) == note["born"]

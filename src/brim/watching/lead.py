"""How long a command needs to stop: what the user says, what it took last time, or half a minute."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from brim.memory.guard import DEFAULT_LEAD_S, span_text
from brim.watching.run_log import log_folder, read_log

_LOOKED_AT = 20  # logs
_MARGIN, _SHORTEST_S, _LONGEST_S = 1.5, 10.0, 1800.0


def lead_of(command: Iterable[str], *logs: Path) -> tuple[float, str]:
    """The lead for a command, and why it is that, empty if it is the usual one."""
    wanted = list(command)
    try:
        folder = sorted(log_folder().glob("*.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        folder = []
    for log in (*logs, *folder[:_LOOKED_AT]):
        took_s = _took(log, wanted)
        if took_s is not None:
            lead_s = min(max(_MARGIN * took_s, _SHORTEST_S), _LONGEST_S)
            return lead_s, f"it took {span_text(took_s)} to stop last time"
    return DEFAULT_LEAD_S, ""


def _took(log: Path, command: list[str]) -> float | None:
    """Seconds from the stop to the end, of a run of this command that was stopped and ended by itself."""
    asked: float | None = None
    try:
        for entry in read_log(log):
            kind = entry["type"]
            if kind == "head" and entry.get("command") != command:
                return None
            if kind == "event" and entry.get("kind") == "kill":
                return None
            if kind == "event" and entry.get("kind") == "stop" and asked is None:
                asked = entry.get("t")
            if kind == "end" and entry.get("stopped") == "stop" and isinstance(asked, int | float):
                ended = entry.get("t")
                return max(float(ended) - asked, 0.0) if isinstance(ended, int | float) else None
    except OSError:
        return None
    return None

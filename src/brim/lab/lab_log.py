"""An experiment written down as a log, so that it can have a report too: its parts one after the other."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

from brim.lab.steps import Experiment
from brim.memory.limit import watch_limit
from brim.memory.machine import boot_id, machine_facts, versions
from brim.watching.run_log import LogWriter

_BETWEEN_S = 0.5


def write_log(seen: Experiment, path: Path) -> None:
    """A line for every sample; a mark for every step."""
    path.unlink(missing_ok=True)
    log = LogWriter(path)
    at = began = time.time() - sum(part.seconds + _BETWEEN_S for part in seen.parts)
    limit = watch_limit()
    log.write(
        "head",
        {
            "time": datetime.fromtimestamp(began, UTC).isoformat(timespec="milliseconds"),
            "boot_id": boot_id(),
            "machine": machine_facts(),
            "limit": {"bytes": limit.bytes, "why": limit.reason, "enforced": "nothing: an experiment"},
            "watched": "experiment",
            "command": ["brim", "lab", seen.name],
            "versions": versions(),
        },
    )
    peak, peak_t = 0, began
    for part in seen.parts:
        log.write("event", {"t": at, "kind": "start", "text": part.name})
        for sample in part.samples:
            t = at + sample.seconds
            held = {"anon_bytes": sample.held_bytes, "shmem_bytes": 0, "swap_bytes": 0}
            log.write("sample", {"t": t, **held, "file_bytes": sample.file_bytes, "total_bytes": sample.held_bytes})
            if sample.held_bytes > peak:
                peak, peak_t = sample.held_bytes, t
        for step in part.steps:
            log.write("event", {"t": at + step.seconds, "kind": "mark", "text": f"{part.name}: {step.name}"})
        at += part.seconds + _BETWEEN_S
    for sentence in seen.seen:
        log.write("event", {"t": at, "kind": "note", "text": sentence})
    log.write("end", {"t": at, "exit_code": 0, "signal": None, "peak_bytes": peak, "peak_t": peak_t})
    log.close()

"""Write the run log of a watch: head, samples, events and end; and keep track of the peak.

Every sample counts for the peak and for the board. A sample is logged when memory has moved by 1 % of the limit, at
most once per second when it has moved less, and every ten seconds when it does not move.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from brim.memory.meter import Process, blind_spots, boot_id, machine_facts, versions
from brim.memory.prediction import Prediction
from brim.memory.sampler import Gpus, Sample
from brim.monitor.watching.find_processes import ProcessNames
from brim.monitor.watching.launch import Board, Orders
from brim.monitor.watching.run_log import LogWriter

_MOVED, _STIRRED = 0.01, 0.001  # of the limit
_SOON_S, _LATER_S = 1.0, 10.0
_SHOWN_PROCESSES = 20
_PROCESSES_EVERY_S, _PROCESSES_AT_LEAST_S = 2.0, 60.0
_GPU_EVERY_S = 5.0


class Journal:
    """Writes the log and the board."""

    def __init__(self, orders: Orders, path: Path) -> None:
        self._orders, self._log = orders, LogWriter(path)
        self._board = Board(orders.board) if orders.board is not None else None
        self._gpus = Gpus()
        self._gpu_at = 0.0
        self._logged: Sample | None = None
        self._shown: dict[int, int] = {}
        self._shown_at = 0.0
        self._limit_bytes = orders.limit_bytes
        self.peak_bytes, self.peak_t = 0, time.time()
        self.peak_from = "samples"
        self._most_files: dict[int, int] = {}
        self._names = ProcessNames()
        self._coming: Prediction | None = None
        self.last_bytes = 0
        self.samples = 0

    def begin(self, pid: int | None) -> None:
        """Write the head."""
        target, orders = self._orders.target, self._orders
        self._log.write(
            "head",
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "boot_id": boot_id(),
                "machine": machine_facts(),
                "limit": {"bytes": orders.limit_bytes, "why": orders.limit_why, "enforced": orders.enforced},
                "watched": target.kind,
                "command": list(target.command),
                "pid": pid,
                "fraction": orders.fraction,
                "ladder": {
                    "alert": orders.ladder.alert,
                    "stop": orders.ladder.stop,
                    "kill": orders.ladder.kill,
                    "lead_s": orders.ladder.lead_s,
                    "stop_file": orders.ladder.stop_file,
                },
                "versions": versions(),
                "not_seen": blind_spots(),
            },
        )

    def sample(self, sample: Sample, *, at_once: bool = False, coming: Prediction | None = None) -> None:
        """Record a sample. `coming` is the prediction of when the limit is reached."""
        self._coming = coming
        self.samples += 1
        self.last_bytes = sample.total_bytes
        if sample.total_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_t, self.peak_from = sample.total_bytes, sample.t, "samples"
        if self._orders.target.kind != "machine":
            self._see_marks(sample)
        if self._board is not None:
            usage = sample.reading.usage
            self._board.set(
                **asdict(usage), total_bytes=usage.total_bytes, peak_bytes=self.peak_bytes, t_ns=int(sample.t * 1e9)
            )
        if at_once or self._worth_a_line(sample):
            self._write(sample)

    def _see_marks(self, sample: Sample) -> None:
        """Raise the peak to the highest resident size that the kernel keeps for each process, less its file pages.

        It shows a peak between two samples.
        """
        files = self._most_files
        for process in sample.reading.processes:
            files[process.pid] = most = max(files.get(process.pid, 0), process.usage.file_bytes)
            held = _held_at_most(process.most_resident_bytes, most)
            if held > self.peak_bytes:
                self.peak_bytes, self.peak_t = held, sample.t
                self.peak_from = "VmHWM, the kernel's own mark, less file pages"

    def _worth_a_line(self, sample: Sample) -> bool:
        if not sample.reading.processes:
            return False  # all have ended: this is not a low of the curve
        last = self._logged
        if last is None:
            return True
        moved = abs(sample.total_bytes - last.total_bytes)
        passed_s = sample.at - last.at
        if moved > _MOVED * self._limit_bytes or passed_s >= _LATER_S:
            return True
        files = abs(sample.reading.usage.file_bytes - last.reading.usage.file_bytes)
        return passed_s >= _SOON_S and max(moved, files) > _STIRRED * self._limit_bytes

    def _write(self, sample: Sample) -> None:
        self._logged = sample
        usage, machine = sample.reading.usage, sample.machine
        facts: dict[str, Any] = {
            "t": round(sample.t, 3),
            **asdict(usage),
            "total_bytes": usage.total_bytes,
            "available_bytes": machine.available_bytes,
            "swap_free_bytes": machine.swap_free_bytes,
            "psi_some_avg10": machine.psi_some_avg10,
        }
        if self._coming is not None:
            facts |= {"left_s": round(self._coming.left_s), "bytes_per_s": round(self._coming.bytes_per_s)}
        largest = self._news(sample)
        if largest:
            facts["processes"] = [
                {"pid": p.pid, "name": self._names.of(p.pid, p.name), **asdict(p.usage)} for p in largest
            ]
        if sample.at - self._gpu_at >= _GPU_EVERY_S:
            self._gpu_at = sample.at
            gpus = self._gpus.read()
            if gpus:
                facts["gpus"] = [asdict(gpu) for gpu in gpus]
        self._log.write("sample", facts)

    def _news(self, sample: Sample) -> list[Process]:
        """Return the largest processes if they differ notably from those that were last logged."""
        passed_s = sample.at - self._shown_at
        if self._shown and passed_s < _PROCESSES_EVERY_S:
            return []
        processes = sorted(sample.reading.processes, key=lambda p: -p.usage.total_bytes)[:_SHOWN_PROCESSES]
        sizes = {p.pid: p.usage.total_bytes for p in processes}
        notable = max(sample.total_bytes // 20, 1 << 20)
        changed = sizes.keys() != self._shown.keys() or any(
            abs(size - self._shown[pid]) > notable for pid, size in sizes.items()
        )
        if not changed and passed_s < _PROCESSES_AT_LEAST_S:
            return []
        self._shown, self._shown_at = sizes, sample.at
        return processes

    def event(self, kind: str, text: str, **facts: Any) -> None:
        self._log.write("event", {"t": round(time.time(), 3), "kind": kind, "text": text, **facts})

    def ask_to_stop(self) -> None:
        """Set the stop flag of the board, which `brim.watch` reads."""
        if self._board is not None:
            self._board.set(stop=1)

    def end(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Write the end and return it. It is durable after `close`."""
        self._see_usage(facts.get("usage") or {})
        over = 0 if self._orders.floating else max(self.peak_bytes - self._orders.limit_bytes, 0)
        whole = {
            "t": round(time.time(), 3),
            **facts,
            "peak_bytes": self.peak_bytes,
            "peak_t": round(self.peak_t, 3),
            "peak_from": self.peak_from,
            "overshoot_bytes": over,
            "samples": self.samples,
            "lost_lines": self._log.lost_lines,
        }
        self._log.write("end", whole)
        return whole

    def _see_usage(self, usage: dict[str, Any]) -> None:
        """Raise the peak to ru_maxrss, which includes children that lived between two samples.

        It starts at the size of brim itself when it started the command, and means nothing below that.
        """
        most, own = usage.get("max_rss_bytes", 0), usage.get("own_rss_bytes", 0)
        held = _held_at_most(most, max(self._most_files.values(), default=0))
        if most > own and held > self.peak_bytes:
            self.peak_bytes, self.peak_from = held, "ru_maxrss of an ended process, less file pages"

    def close(self) -> None:
        """Close the log when it is durable."""
        self._log.close()


def _held_at_most(resident_bytes: int, file_bytes: int) -> int:
    """Return the memory without file pages that a peak of resident memory proves; 0 if nothing.

    File pages may have grown between a sample and the peak: where they are a large part of it, it proves nothing.
    """
    return resident_bytes - file_bytes if 2 * file_bytes < resident_bytes else 0

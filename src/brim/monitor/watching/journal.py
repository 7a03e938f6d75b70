"""Write the run log of a watch: head, samples, events and end; and keep track of the peak.

Every sample counts for the peak and for the shared values. A sample is logged when memory has changed by 1 % of the
limit, at most once per second when it has changed less, and every ten seconds when it does not change.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from brim.memory.meter import Process, blind_spots, largest_first, proven_bytes
from brim.memory.prediction import Prediction
from brim.memory.sampler import Gpus, Sample
from brim.monitor.log_writer import SHOWN_PROCESSES, LogWriter, head_entry, process_entries, sample_entry
from brim.monitor.watching.find_processes import ProcessNames
from brim.monitor.watching.launch import SharedValues, WatchConfig

_LARGE_CHANGE, _SMALL_CHANGE = 0.01, 0.001  # of the limit
_SOON_S, _LATE_S = 1.0, 10.0
_PROCESSES_EVERY_S, _PROCESSES_AT_LEAST_S = 2.0, 60.0
_GPU_EVERY_S = 5.0


class Journal:
    """Writes the log and the shared values."""

    def __init__(self, config: WatchConfig, path: Path) -> None:
        self._config, self._log = config, LogWriter(path)
        descriptor = config.values_descriptor
        self._values = SharedValues(descriptor) if descriptor is not None else None
        self._gpus, self._gpu_at = Gpus(), 0.0
        self._logged: Sample | None = None
        self._listed: dict[int, int] = {}
        self._listed_at = 0.0
        self.peak_bytes, self.peak_t, self.peak_from = 0, time.time(), "samples"
        self._most_files: dict[int, int] = {}
        self._names = ProcessNames()
        self.last_bytes = 0
        self.samples = 0

    def write_head(self, pid: int | None) -> None:
        target, levels = self._config.target, self._config.levels
        names = ("alert", "stop", "kill", "lead_s", "stop_file")
        head = head_entry(
            target.kind,
            target.command,
            self._config.limit,
            self._config.enforced,
            pid=pid,
            fraction=self._config.fraction,
            ladder={name: getattr(levels, name) for name in names},
            not_seen=blind_spots(),
        )
        self._log.write("head", head)

    def add_sample(self, sample: Sample, *, at_once: bool = False, prediction: Prediction | None = None) -> None:
        """Count a sample, and log it if it has news. `prediction` is that of the limit."""
        self.samples += 1
        self.last_bytes = sample.total_bytes
        if sample.total_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_t, self.peak_from = sample.total_bytes, sample.t, "samples"
        if self._config.target.kind != "machine":
            # The highest resident size of each process, less its file pages, shows a peak between two samples.
            files = self._most_files
            for process in sample.reading.processes:
                files[process.pid] = file_peak = max(files.get(process.pid, 0), process.usage.file_bytes)
                proven = proven_bytes(process.most_resident_bytes, file_peak)
                if proven > self.peak_bytes:
                    self.peak_bytes, self.peak_t = proven, sample.t
                    self.peak_from = "VmHWM, the kernel's own mark, less file pages"
        if self._values is not None:
            usage = sample.reading.usage
            self._values.set(
                **asdict(usage), total_bytes=usage.total_bytes, peak_bytes=self.peak_bytes, t_ns=int(sample.t * 1e9)
            )
        if at_once or self._is_notable(sample):
            self.write_sample(sample, prediction)

    def _is_notable(self, sample: Sample) -> bool:
        if not sample.reading.processes:
            return False  # all have ended: this is not a low of the curve
        last = self._logged
        if last is None:
            return True
        change, limit = abs(sample.total_bytes - last.total_bytes), self._config.limit.bytes
        passed_s = sample.at - last.at
        if change > _LARGE_CHANGE * limit or passed_s >= _LATE_S:
            return True
        files = abs(sample.reading.usage.file_bytes - last.reading.usage.file_bytes)
        return passed_s >= _SOON_S and max(change, files) > _SMALL_CHANGE * limit

    def write_sample(self, sample: Sample, prediction: Prediction | None) -> None:
        self._logged, self.last_bytes = sample, sample.total_bytes
        facts = sample_entry(sample.t, sample.reading.usage, sample.machine)
        if prediction is not None:
            facts |= {"left_s": round(prediction.left_s), "bytes_per_s": round(prediction.bytes_per_s)}
        if processes := self._changed_processes(sample):
            facts["processes"] = process_entries(processes, self._names)
        if sample.at - self._gpu_at >= _GPU_EVERY_S:
            self._gpu_at = sample.at
            if gpus := self._gpus.read():
                facts["gpus"] = [asdict(gpu) for gpu in gpus]
        self._log.write("sample", facts)

    def _changed_processes(self, sample: Sample) -> list[Process]:
        """Return the largest processes if they differ notably from those that were last logged."""
        passed_s = sample.at - self._listed_at
        if self._listed and passed_s < _PROCESSES_EVERY_S:
            return []
        processes = largest_first(sample.reading.processes)[:SHOWN_PROCESSES]
        sizes = {process.pid: process.usage.total_bytes for process in processes}
        notable = max(sample.total_bytes // 20, 1 << 20)
        has_changed = sizes.keys() != self._listed.keys() or any(
            abs(size - self._listed[pid]) > notable for pid, size in sizes.items()
        )
        if not has_changed and passed_s < _PROCESSES_AT_LEAST_S:
            return []
        self._listed, self._listed_at = sizes, sample.at
        return processes

    def add_event(self, kind: str, text: str, **facts: Any) -> None:
        self._log.write("event", {"t": round(time.time(), 3), "kind": kind, "text": text, **facts})

    def request_stop(self) -> None:
        """Set the shared stop flag, which `brim.watch` reads."""
        if self._values is not None:
            self._values.set(stop=1)

    def write_end(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Write the end and return it. It is durable after `close`."""
        # ru_maxrss includes children that lived between two samples. It starts at the size of brim itself when it
        # started the command, and means nothing below that.
        usage = facts.get("usage") or {}
        proven = proven_bytes(usage.get("max_rss_bytes", 0), max(self._most_files.values(), default=0))
        if usage.get("max_rss_bytes", 0) > usage.get("own_rss_bytes", 0) and proven > self.peak_bytes:
            self.peak_bytes, self.peak_from = proven, "ru_maxrss of an ended process, less file pages"
        end = {
            "t": round(time.time(), 3),
            **facts,
            "peak_bytes": self.peak_bytes,
            "peak_t": round(self.peak_t, 3),
            "peak_from": self.peak_from,
            "overshoot_bytes": (0 if self._config.is_floating else max(self.peak_bytes - self._config.limit.bytes, 0)),
            "samples": self.samples,
            "lost_lines": self._log.lost_lines,
        }
        self._log.write("end", end)
        return end

    def close(self) -> None:
        """Close the log when it is durable."""
        self._log.close()

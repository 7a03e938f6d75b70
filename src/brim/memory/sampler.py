"""Sample memory, and decide how often.

The interval is 20 ms near the limit and one second far below it. It is shorter at the start and while memory changes,
so that short commands and short peaks are sampled too. Sampling uses at most a two-hundredth of a core while
memory does not change, and a quarter of a core near the limit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

from brim.memory.cgroup import Cgroup
from brim.memory.meter import Machine, Process, Usage, all_pids, machine_now, read_process
from brim.memory.tree_meter import TreeReading
from brim.records import dataclass

SHORTEST_S, LONGEST_S = 0.02, 1.0
_FASTEST_BYTES_PER_S = 2e9  # the rate of one thread; several threads show in the measured rate
_SAFETY = 4  # samples before the limit would be reached at that rate
_SAMPLES_PER_AGE = 10  # a command of any length is sampled at least that often
_CHANGING_BYTES_PER_S, _CHANGING_S = 20e6, 0.1
_REST_S = 5.0
_UNCHANGED = 0.01  # of the limit
_HALF_FULL = 0.4
_CPU_AT_REST, _CPU_BETWEEN_STEPS, _CPU_NEAR_LIMIT = 1 / 200, 1 / 20, 1 / 4


@dataclass(frozen=True, slots=True)
class Gpu:
    """The memory of a GPU, of all processes."""

    index: int
    used_bytes: int
    total_bytes: int


class _GpuMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Gpus:
    """The GPUs of this machine; `read` is empty without GPUs or if the driver does not answer."""

    def __init__(self, library: str = "libnvidia-ml.so.1") -> None:
        self._devices: list[ctypes.c_void_p] = []
        try:
            self._nvml = ctypes.CDLL(library)
            count = ctypes.c_uint()
            if self._nvml.nvmlInit_v2() != 0 or self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
                return
        except (OSError, AttributeError):
            return
        for index in range(count.value):
            device = ctypes.c_void_p()
            if self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) == 0:
                self._devices.append(device)

    def read(self) -> list[Gpu]:
        gpus = []
        for index, device in enumerate(self._devices):
            memory = _GpuMemory()
            if self._nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
                gpus.append(Gpu(index, memory.used, memory.total))
        return gpus


class Meter(Protocol):
    """Measures a process tree, a cgroup or the machine."""

    def read(self, threshold_bytes: int = 0) -> TreeReading: ...
    def members(self) -> list[int]: ...


@dataclass(slots=True)
class GroupMeter:
    """Measures a cgroup that brim made, in which the kernel counts every page once."""

    group: Cgroup

    def members(self) -> list[int]:
        return self.group.pids()

    def read(self, threshold_bytes: int = 0) -> TreeReading:
        processes = tuple(p for p in map(read_process, self.group.pids()) if p is not None)
        counted = self.group.usage() or Usage()
        mapped = sum(p.usage.file_bytes for p in processes)
        usage = Usage(counted.anon_bytes, counted.shmem_bytes, counted.swap_bytes, mapped)
        return TreeReading(usage, processes)


@dataclass(slots=True)
class MachineMeter:
    """Measures the machine. Its processes, of which there may be thousands, are listed every ten seconds."""

    clock: Callable[[], float]
    list_every_s: float = 10.0
    _listed: float | None = None
    _processes: tuple[Process, ...] = ()

    def members(self) -> list[int]:
        return []

    def read(self, threshold_bytes: int = 0) -> TreeReading:
        now = self.clock()
        if self._listed is None or now - self._listed >= self.list_every_s:
            self._listed = now
            self._processes = tuple(p for p in map(read_process, all_pids()) if p is not None)
        machine = machine_now()
        usage = Usage(machine.anon_bytes, machine.shmem_bytes, machine.swap_used_bytes, machine.file_bytes)
        return TreeReading(usage, self._processes)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement. `t` is the time of day, `at` that of a clock which never jumps."""

    t: float
    at: float
    reading: TreeReading
    machine: Machine

    @property
    def total_bytes(self) -> int:
        return self.reading.usage.total_bytes


@dataclass(slots=True)
class Pace:
    """Decides how long to pause after a sample, at least `shortest_s`."""

    shortest_s: float = SHORTEST_S
    _last: tuple[float, int] | None = None
    _changed_at: float | None = None
    _changed_bytes: int = 0
    _first: float | None = None

    def pause_s(self, at: float, used_bytes: int, limit_bytes: int, cost_s: float) -> float:
        """Return the pause after a sample. `cost_s` is the processor time that it took."""
        last, self._last = self._last, (at, used_bytes)
        rate = 0.0 if last is None or at <= last[0] else (used_bytes - last[1]) / (at - last[0])
        if self._changed_at is None or abs(used_bytes - self._changed_bytes) > _UNCHANGED * limit_bytes:
            self._changed_at, self._changed_bytes = at, used_bytes
        is_at_rest = at - self._changed_at > _REST_S
        self._first = at if self._first is None else self._first
        pause = max(limit_bytes - used_bytes, 0) / (_SAFETY * max(rate, _FASTEST_BYTES_PER_S))
        pause = min(pause, (at - self._first) / _SAMPLES_PER_AGE)
        if abs(rate) > _CHANGING_BYTES_PER_S:
            pause = min(pause, _CHANGING_S)
        elif not is_at_rest and used_bytes > _HALF_FULL * limit_bytes:  # between two steps of a leak memory is constant
            pause = min(pause, max(_CHANGING_S, cost_s / _CPU_BETWEEN_STEPS))
        least = cost_s / (_CPU_AT_REST if is_at_rest else _CPU_NEAR_LIMIT)
        return min(max(pause, self.shortest_s, least), LONGEST_S)

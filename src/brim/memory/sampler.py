"""Sample memory, and decide how often.

Close to the limit the interval is 20 ms, far from it one second. It is shorter at the start and while memory moves, so
that short commands and short peaks are sampled too. Sampling uses at most a two-hundredth of a core while memory does
not move, and a quarter when the limit is near.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from typing import Protocol

from brim.memory.cgroup import Cgroup
from brim.memory.meter import Machine, Process, Usage, machine_now, read_process
from brim.memory.tree_meter import TreeReading
from brim.records import dataclass

_LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a GPU holds, for whomever it is."""

    index: int
    used_bytes: int
    total_bytes: int


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Gpus:
    """The GPUs of this machine; `read` is empty without GPUs or if the driver does not answer."""

    def __init__(self, library: str = _LIBRARY) -> None:
        self._devices: list[ctypes.c_void_p] = []
        try:
            self._nvml = ctypes.CDLL(library)
            if self._nvml.nvmlInit_v2() != 0:
                return
            count = ctypes.c_uint()
            if self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
                return
        except (OSError, AttributeError):
            return
        for index in range(count.value):
            device = ctypes.c_void_p()
            if self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) == 0:
                self._devices.append(device)

    def read(self) -> list[Gpu]:
        found = []
        for index, device in enumerate(self._devices):
            memory = _Memory()
            if self._nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
                found.append(Gpu(index, memory.used, memory.total))
        return found


SHORTEST_S, LONGEST_S = 0.02, 1.0
_FASTEST_BYTES_PER_S = 2e9  # the rate of one thread; more threads show in the measured rate
_SAFETY = 4  # samples before the limit would be reached at that rate
_LOOKS_PER_AGE = 10  # a command of any length is looked at that often, and more
_MOVING_BYTES_PER_S, _MOVING_S = 20e6, 0.1
_REST_S = 5.0
_STILL = 0.01  # of the limit
_HALF_FULL = 0.4
_SHARE_AT_REST, _SHARE_BETWEEN_STEPS, _SHARE_IN_NEED = 1 / 200, 1 / 20, 1 / 4


class Meter(Protocol):
    """Something that can be read: a tree, a group, the machine."""

    def read(self, line_bytes: int = 0) -> TreeReading: ...
    def members(self) -> list[int]: ...


@dataclass(slots=True)
class GroupMeter:
    """A cgroup that brim made: the kernel has counted every page once."""

    group: Cgroup

    def members(self) -> list[int]:
        return self.group.pids()

    def read(self, line_bytes: int = 0) -> TreeReading:
        processes = tuple(p for p in map(read_process, self.group.pids()) if p is not None)
        counted = self.group.usage() or Usage()
        mapped = sum(p.usage.file_bytes for p in processes)
        usage = Usage(counted.anon_bytes, counted.shmem_bytes, counted.swap_bytes, mapped)
        return TreeReading(usage, processes)


@dataclass(slots=True)
class MachineMeter:
    """The whole machine. Its processes, of which there may be thousands, are listed every ten seconds."""

    clock: Callable[[], float]
    list_every_s: float = 10.0
    _listed: float | None = None
    _processes: tuple[Process, ...] = ()

    def members(self) -> list[int]:
        return []

    def read(self, line_bytes: int = 0) -> TreeReading:
        now = self.clock()
        if self._listed is None or now - self._listed >= self.list_every_s:
            self._listed, self._processes = now, tuple(_all_processes())
        machine = machine_now()
        usage = Usage(machine.anon_bytes, machine.shmem_bytes, machine.swap_used_bytes, machine.file_bytes)
        return TreeReading(usage, self._processes)


def _all_processes() -> Iterable[Process]:
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    return (p for p in map(read_process, map(int, filter(str.isdigit, names))) if p is not None)


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at everything. `t` is the time of day, `at` the clock that never jumps."""

    t: float
    at: float
    reading: TreeReading
    machine: Machine

    @property
    def total_bytes(self) -> int:
        return self.reading.usage.total_bytes


@dataclass(slots=True)
class Pace:
    """How long to pause after a sample, but not shorter than `shortest_s`."""

    shortest_s: float = SHORTEST_S
    _last: tuple[float, int] | None = None
    _moved_at: float | None = None
    _anchor: int = 0
    _first: float | None = None

    def pause_s(self, at: float, used_bytes: int, limit_bytes: int, cost_s: float) -> float:
        """`cost_s` is the processor time the sample took."""
        rate = self._rate(at, used_bytes)
        if self._moved_at is None or abs(used_bytes - self._anchor) > _STILL * limit_bytes:
            self._moved_at, self._anchor = at, used_bytes
        resting = at - self._moved_at > _REST_S
        fastest = max(rate, _FASTEST_BYTES_PER_S)
        wanted = max(limit_bytes - used_bytes, 0) / (_SAFETY * fastest)
        self._first = at if self._first is None else self._first
        wanted = min(wanted, (at - self._first) / _LOOKS_PER_AGE)
        if abs(rate) > _MOVING_BYTES_PER_S:
            wanted = min(wanted, _MOVING_S)
        elif not resting and used_bytes > _HALF_FULL * limit_bytes:  # between two steps of a leak memory is still
            wanted = min(wanted, max(_MOVING_S, cost_s / _SHARE_BETWEEN_STEPS))
        share = _SHARE_AT_REST if resting else _SHARE_IN_NEED
        return min(max(wanted, self.shortest_s, cost_s / share), LONGEST_S)

    def _rate(self, at: float, used_bytes: int) -> float:
        last, self._last = self._last, (at, used_bytes)
        if last is None or at <= last[0]:
            return 0.0
        return (used_bytes - last[1]) / (at - last[0])

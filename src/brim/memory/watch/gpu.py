"""Memory of NVIDIA GPUs, where their library (NVML) is installed; nothing elsewhere.

Called through ctypes, so that watching needs no package. Other makers' GPUs are not seen.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    used_bytes: int
    total_bytes: int


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Gpus:
    """The GPUs of this machine; `read` is empty if there are none or the driver does not answer."""

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

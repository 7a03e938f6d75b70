"""The C heap: blocks that a library has freed stay with the process unless someone asks. glibc only."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_LARGE_BYTES = 1 << 16


@cache
def _libc() -> Any:
    """None where the C library is another one."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
    except OSError:
        return None


def keep_heap_small() -> None:
    """From now on, threads share one heap, and blocks of 64 KB go back to the system when they are freed."""
    if _libc() is not None:
        _libc().mallopt(_M_ARENA_MAX, 1)
        _libc().mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def give_back_heap() -> None:
    """Return freed memory to the system."""
    if _libc() is not None:
        _libc().malloc_trim(0)

"""Return unused memory to the system: Python's garbage, free lists of the C library, Arrow's pool, CUDA's cache.

Only libraries that are already loaded are called. Memory that is still referenced is not freed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from functools import cache
from itertools import pairwise
from typing import Any

from brim.memory.meter import process_bytes
from brim.records import dataclass
from brim.sizes import format_size

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BLOCKS = 8  # free blocks at the end of the heap that are not returned
_LARGE_BYTES = 1 << 16


@cache
def _libc() -> Any:
    """Return glibc; None with another C library."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
    except OSError:
        return None


def keep_heap_small(*, large_bytes: int | None = _LARGE_BYTES) -> None:
    """Let all later threads share one heap, and return blocks of `large_bytes` to the system when they are freed.

    This costs system calls, and the next block is cleared again. A caller that allocates and frees blocks of one size
    all the time passes a larger size. A caller that frees much at once passes None and calls `give_back_heap`. A thread
    that already has its own heap keeps it.
    """
    if _libc() is not None:
        _libc().mallopt(_M_ARENA_MAX, 1)
        if large_bytes is not None:
            _libc().mallopt(_M_MMAP_THRESHOLD, large_bytes)
            _libc().mallopt(_M_TRIM_THRESHOLD, _KEPT_BLOCKS * large_bytes)


def give_back_heap() -> None:
    """Return freed memory to the system."""
    if _libc() is not None:
        _libc().malloc_trim(0)


@dataclass(frozen=True, slots=True)
class Released:
    """Measured bytes that each step returned to the system; `cuda_bytes` are on the GPU."""

    gc_bytes: int
    arrow_bytes: int
    malloc_bytes: int
    cuda_bytes: int

    @property
    def total_bytes(self) -> int:
        """Return by how much the memory of this process decreased, without the GPU."""
        return self.gc_bytes + self.arrow_bytes + self.malloc_bytes

    def __str__(self) -> str:
        steps = [
            ("garbage collection", self.gc_bytes),
            ("Arrow's pool", self.arrow_bytes),
            ("malloc_trim", self.malloc_bytes),
            ("CUDA's cache", self.cuda_bytes),
        ]
        texts = ", ".join(f"{name} {format_size(size)}" for name, size in steps if size)
        return f"released {format_size(self.total_bytes)}" + (f" ({texts})" if texts else "")


def release() -> Released:
    """Return unused memory of this process to the system: Python's garbage, Arrow's pool, the heap, CUDA's cache.

    Returns:
        How many bytes each of them returned.

    Raises:
        Nothing: memory that cannot be returned is kept.

    Examples:
        >>> brim.release().total_bytes >= 0
        True
    """

    def used() -> int:
        return process_bytes(os.getpid()) if sys.platform == "linux" else 0

    sizes = [used()]
    gc.collect()
    sizes.append(used())
    arrow = sys.modules.get("pyarrow")
    if arrow is not None and hasattr(arrow, "default_memory_pool"):
        arrow.default_memory_pool().release_unused()
    sizes.append(used())
    give_back_heap()
    sizes.append(used())
    cuda_bytes = 0
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_available() and cuda.is_initialized():
        before = int(cuda.memory_reserved())
        cuda.empty_cache()
        cuda_bytes = max(before - int(cuda.memory_reserved()), 0)
    gc_bytes, arrow_bytes, malloc_bytes = (max(before - after, 0) for before, after in pairwise(sizes))
    return Released(gc_bytes, arrow_bytes, malloc_bytes, cuda_bytes)

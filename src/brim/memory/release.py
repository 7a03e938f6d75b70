"""Give back what can be given back: garbage, the C library's free lists, Arrow's pool, CUDA's cache.

Only libraries that are already loaded are asked. What is still referenced stays: this frees nothing in use.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from functools import cache
from typing import Any

from brim.memory.meter import process_bytes
from brim.records import dataclass
from brim.sizes import format_size

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LEFT = 8  # blocks at the end of the heap that stay when they are freed
_LARGE_BYTES = 1 << 16


@cache
def _libc() -> Any:
    """None where the C library is another one."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
    except OSError:
        return None


def keep_heap_small(*, large_bytes: int | None = _LARGE_BYTES) -> None:
    """From now on, threads share one heap, and blocks of `large_bytes` go back to the system when they are freed.

    That costs system calls, and the next block is cleared anew: whoever takes and frees blocks of one size all the time
    gives a larger one, and whoever frees much together None, and gives it back by `give_back_heap`. A thread that has
    a heap of its own by then keeps it.
    """
    if _libc() is not None:
        _libc().mallopt(_M_ARENA_MAX, 1)
        if large_bytes is not None:
            _libc().mallopt(_M_MMAP_THRESHOLD, large_bytes)
            _libc().mallopt(_M_TRIM_THRESHOLD, _LEFT * large_bytes)


def give_back_heap() -> None:
    """Return freed memory to the system."""
    if _libc() is not None:
        _libc().malloc_trim(0)


@dataclass(frozen=True, slots=True)
class Released:
    """Bytes given back to the system by each step, as measured; `cuda_bytes` lie on the GPU."""

    gc_bytes: int
    arrow_bytes: int
    malloc_bytes: int
    cuda_bytes: int

    @property
    def total_bytes(self) -> int:
        """What this process holds less, not counting the GPU."""
        return self.gc_bytes + self.arrow_bytes + self.malloc_bytes

    def __str__(self) -> str:
        steps = [
            ("garbage collection", self.gc_bytes),
            ("Arrow's pool", self.arrow_bytes),
            ("malloc_trim", self.malloc_bytes),
            ("CUDA's cache", self.cuda_bytes),
        ]
        given = ", ".join(f"{name} {format_size(size)}" for name, size in steps if size)
        return f"released {format_size(self.total_bytes)}" + (f" ({given})" if given else "")


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
    before = _held()
    gc.collect()
    collected = _held()
    _release_arrow()
    without_arrow = _held()
    give_back_heap()
    trimmed = _held()
    return Released(
        max(before - collected, 0), max(collected - without_arrow, 0), max(without_arrow - trimmed, 0), _empty_cuda()
    )


def _held() -> int:
    import os

    return process_bytes(os.getpid()) if sys.platform == "linux" else 0


def _release_arrow() -> None:
    arrow = sys.modules.get("pyarrow")
    if arrow is not None and hasattr(arrow, "default_memory_pool"):
        arrow.default_memory_pool().release_unused()


def _empty_cuda() -> int:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_available() or not cuda.is_initialized():
        return 0
    before = int(cuda.memory_reserved())
    cuda.empty_cache()
    return max(before - int(cuda.memory_reserved()), 0)

"""Functions that allocate a stated amount of memory, in the ways that real ones do."""

from __future__ import annotations

import ctypes
import time
from typing import Any

KINDS = ("python", "numpy", "arrow", "native")


def take(kind: str, size: int) -> float:
    """Allocate and write about `size` bytes, and return a number computed from them."""
    if kind == "python":
        return float(len([float(number) for number in range(size // 32)]))  # a float and the reference to it
    if kind == "numpy":
        import numpy as np

        return float(np.ones(size // 8).sum())
    if kind == "arrow":
        import numpy as np
        import pyarrow as pa

        third = pa.array(np.ones(size // 24))
        return float(len(pa.concat_arrays([third, third])))  # a third, and two thirds for the copy
    buffer = ctypes.create_string_buffer(size)
    ctypes.memset(buffer, 1, size)
    return float(len(buffer))


def batch(rows: dict[str, list[Any]]) -> dict[str, list[float]]:
    """Allocate `take` bytes in total, for any number of rows."""
    retained = take(rows["kind"][0], sum(rows["take"]))
    time.sleep(0.02)
    return {"held": [retained] * len(rows["id"])}


def row(first: dict[str, Any]) -> dict[str, float]:
    retained = take(first["kind"], first["take"])
    time.sleep(0.002)
    return {"held": retained}

"""Where tensors lie: in a file that shall be written, and in one that is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from brim.tensors.spec import Tensor


@dataclass(frozen=True, slots=True)
class Body:
    """A file but for its values. `starts` are offsets, in the order of the file; nothing lies between tensors."""

    header: bytes
    starts: Mapping[str, int]
    size: int


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor in a file. A shape of nothing is a single value, which brim does not write and others do."""

    path: Path
    tensor: Tensor
    shape: tuple[int, ...]
    offset: int

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def size(self) -> int:
        return prod(self.shape) * self.tensor.carrier.itemsize

"""What brim asks of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Output:
    """The vectors that a model gives under one name: how long each is, and the type of its values."""

    dim: int
    dtype: str


class Model(Protocol):
    """Texts and images become vectors in two steps, so that one batch is prepared while another is in the model.

    `prepare_image` and `prepare` run on threads of their own. `prepare_image` is given one picture at a time and
    gives what the model needs of it, which is smaller. `encode` runs on one thread. Its arrays, of NumPy or torch,
    have a row for each text or image.
    """

    outputs: Mapping[str, Output] | None  # None until the first batch tells

    def lengths(self, texts: Sequence[str]) -> Sequence[int]:
        """How much of the model each text takes, so that texts of one length share a batch."""

    def prepare_image(self, image: Any) -> Any: ...

    def prepare(self, texts: Sequence[str] | None, images: Sequence[Any] | None) -> Any: ...

    def encode(self, prepared: Any) -> Mapping[str, Any]: ...

    def close(self) -> None: ...

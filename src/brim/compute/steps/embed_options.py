"""The options of an embedding step."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from brim.options.compute_options import ModelOptions, VectorOptions
from brim.records import dataclass
from brim.storage.location import Access

TEXT_WINDOW = 32
IMAGE_WINDOW = 4


@dataclass(frozen=True, kw_only=True)
class EmbedStepOptions(VectorOptions):
    """Which columns are embedded, and how rows become batches.

    A window of `window` batches is processed together. Its rows are sorted by the length of their texts, so that little
    of a batch is padding; rows with images are not sorted, and their window is small, because it is kept in memory.
    Relative paths of images start at `image_root`: a folder, or a prefix of a bucket that `image_access` reaches.
    `keep_bfloat16` returns such vectors as their bits in uint16, for a file that has the type; otherwise they become
    float32, which changes no value.
    """

    model: str = field(kw_only=False)
    window: int | None = None
    keep_bfloat16: bool = False
    image_root: str | None = None
    image_access: Access = field(default_factory=Access)
    loading: ModelOptions = field(default_factory=ModelOptions)

    @property
    def batches(self) -> int:
        """The number of batches per window."""
        return self.window or (TEXT_WINDOW if self.image is None else IMAGE_WINDOW)

    @property
    def window_rows(self) -> int:
        return self.batch_size * self.batches

    @property
    def facts(self) -> dict[str, Any]:
        """The fingerprint inputs, under the keys that ledgers have."""
        return {
            "text column": self.column,
            "image column": self.image,
            "kept columns": list(self.keep_columns),
            "batch size": self.batch_size,
            "batches in a window": self.batches,
            "normalize": self.normalize,
            "nan": self.nan,
            "empty": self.empty,
            "bfloat16 as bits": self.keep_bfloat16,
            "names": [list(pair) for pair in (self.name or {}).items()],
            **self.loading.fingerprint_inputs(),
        }

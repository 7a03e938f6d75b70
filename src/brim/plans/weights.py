"""How many bytes the metadata of each row takes, whatever its neighbours take."""

from __future__ import annotations

import numpy as np

from brim import cuts
from brim.fileset import Ints
from brim.sources.filetable import FileTable


def metadata_bytes(table: FileTable) -> Ints:
    """The bytes of each row's values outside of file columns."""
    total = np.zeros(len(table), np.int64)
    for name in table.rows.column_names:
        if name not in table.columns:
            total += cuts.column_bytes(table.rows.column(name))
    return total

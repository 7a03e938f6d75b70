"""The order in which people count: run-2 before run-10."""

from __future__ import annotations

import re


def natural(text: str) -> tuple[object, ...]:
    """A key for sorting: numbers by value (then by how they are written), everything else by character."""
    pieces = (piece for piece in re.split(r"([0-9]+)", text) if piece)
    return tuple((0, int(piece), piece) if piece[0] in "0123456789" else (1, 0, piece) for piece in pieces)

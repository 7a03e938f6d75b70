"""Code points on which tokenizers that compose characters (NFC) may differ, as their tables of Unicode do.

Found by trying all 1,112,064 code points, alone and among marks of several classes, with tokenizers 0.23.3 and 1.0.0rc3
and gigatoken 0.10 (tests/generators/code_points.py); scripts that Unicode brought since 9 with compositions are in
it as a whole, because there pairs decide. Without composition no code point was found on which they differ.
"""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np
import numpy.typing as npt

_SCRIPTS = ((0x105C0, 0x105FF), (0x11380, 0x113FF), (0x11900, 0x1195F), (0x16100, 0x1613F), (0x16D40, 0x16D7F))
_MARKS = (
    (0x7FD, 0x7FD), (0x897, 0x89F), (0x8CA, 0x8D3), (0x9FE, 0x9FE), (0xC3C, 0xC3C), (0xD3B, 0xD3C), (0xEBA, 0xEBA),
    (0x1715, 0x1715), (0x1ABF, 0x1ADD), (0x1AE0, 0x1AEB), (0x1DF6, 0x1DFA), (0xA82C, 0xA82C), (0x10D24, 0x10D27),
    (0x10D69, 0x10D6D), (0x10EAB, 0x10EAC), (0x10EFA, 0x10EFB), (0x10EFD, 0x10EFF), (0x10F46, 0x10F50), (0x10F82,
    0x10F85), (0x11070, 0x11070), (0x1133B, 0x1133B), (0x1145E, 0x1145E), (0x11839, 0x1183A), (0x119E0, 0x119E0),
    (0x11A34, 0x11A34), (0x11A47, 0x11A47), (0x11A99, 0x11A99), (0x11D42, 0x11D42), (0x11D44, 0x11D45), (0x11D97,
    0x11D97), (0x11F41, 0x11F42), (0x16FF0, 0x16FF1), (0x1E08F, 0x1E08F), (0x1E130, 0x1E136), (0x1E2AE, 0x1E2AE),
    (0x1E2EC, 0x1E2EF), (0x1E4EC, 0x1E4EF), (0x1E5EE, 0x1E5EF), (0x1E6E3, 0x1E6E3), (0x1E6E6, 0x1E6E6), (0x1E6EE,
    0x1E6EF), (0x1E6F5, 0x1E6F5),
)  # fmt: skip
_DOUBT, _MARK = 1, 2


@cache
def _table() -> npt.NDArray[np.uint8]:
    table = np.zeros(0x110000, np.uint8)
    for first, last in (*_SCRIPTS, *_MARKS):
        table[first : last + 1] = _DOUBT
    # Marks are the ones that this Python knows: those that are newer are all in doubt by themselves.
    for first, last in ((0x300, 0x20000), (0xE0000, 0xE0200)):
        marks = [point for point in range(first, last) if unicodedata.combining(chr(point))]
        table[marks] |= _MARK
    return table


def doubtful(points: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """The places of code points in doubt, and of marks that follow a mark: their order is the tables' to decide."""
    kinds = _table()[points]
    marks = kinds & _MARK != 0
    bad = kinds & _DOUBT != 0
    bad[1:] |= marks[1:] & marks[:-1]
    return np.flatnonzero(bad)

"""Print the code points on which two encoders differ: `python -m tests.generators.code_points TOKENIZER.json`, 40 s.

Prints the ranges for which gigatoken and the `tokenizers` of this environment give other ids, for each code point
among letters, digits and white space, and among marks of four combining classes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from brim.compute.steps.gigatoken_encoder import FastEncoder
from brim.compute.steps.tokenizers import LoadedTokenizer

_SHAPES = (
    "a{0}b {0} 1{0}2 {0}{0}x\n{0}!{0}  {0}\u0301e{0}",
    "e{0}\u0334{0}\u0345\u0323{0}\u0301 \u0301{0} \u0345{0}",
)


def _batched(points: Iterator[int] | range, count: int) -> Iterator[list[int]]:
    points = iter(points)
    while some := list(itertools.islice(points, count)):
        yield some


def differing(data: bytes, points: Iterator[int] | range) -> list[int]:
    """Return the code points in order."""
    fast, reference = FastEncoder(data), LoadedTokenizer(data, "this")
    actual = []
    for some in _batched(points, 256):
        texts = pa.array([shape.format(chr(point)) for point in some for shape in _SHAPES])
        ours, theirs = fast.encode(texts), reference.encode(texts)
        if not np.array_equal(ours.values, theirs.values):
            rows = [row for row in range(len(texts)) if not np.array_equal(ours[row], theirs[row])]
            actual += sorted({some[row // len(_SHAPES)] for row in rows})
    return actual


if __name__ == "__main__":
    every = (point for point in range(0x110000) if not 0xD800 <= point < 0xE000)
    for number in differing(Path(sys.argv[1]).read_bytes(), every):
        sys.stdout.write(f"U+{number:04X}\n")

"""Find the ends of rows in text: lines, JSON lines, and CSV whose quoted values may contain line ends.

A scanner reads blocks in order and returns the ends of rows in each, with NumPy and without a Python object per row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from brim.file_set import Ints

Octets = np.ndarray[Any, np.dtype[np.uint8]]

_NEWLINE, _QUOTE, _RETURN = 10, 34, 13
BOM = b"\xef\xbb\xbf"


class RowScanner:
    """Scan consecutive blocks of a file, beginning with the start of a row."""

    def __init__(self, kind: str, delimiter: str = ",") -> None:
        self.kind = kind
        self.in_quotes = False
        self._delimiter = ord(delimiter)
        self._last = b"\n"  # the last byte of the previous block
        self._closed = False  # whether that byte is a quote that closed a value
        self._first = True
        self._empty = True  # whether the current line has only blanks so far

    def feed(self, block: bytes) -> Ints:
        """Return the position after each row that ends in the block. Blank lines of JSON and CSV are not rows."""
        if not block:
            return np.zeros(0, np.int64)
        if self._first and self.kind == "csv" and block.startswith(BOM):
            block = bytes([self._delimiter]) * len(BOM) + block[len(BOM) :]  # a quote may follow the mark
        self._first = False
        data = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero(data == _NEWLINE)
        if self.kind == "csv":
            ends = self._outside_quotes(block, data, ends)
        ends = ends + 1
        if self.kind != "lines":
            ends = self._without_blank(block, data, ends)
        self._last = block[-1:]
        return ends.astype(np.int64)

    def rest(self) -> int:
        """Return the number of rows that end with the file: one if its last line has no line end."""
        return 0 if (self._last == b"\n" and not self.in_quotes) or (self.kind != "lines" and self._empty) else 1

    def _without_blank(self, block: bytes, data: Octets, ends: Ints) -> Ints:
        starts = np.concatenate([np.zeros(1, np.int64), ends])
        blank_bytes = b"\r\n" if self.kind == "csv" else b" \t\r\n"
        table = np.zeros(256, bool)
        table[list(blank_bytes)] = True
        first = data[np.minimum(starts, len(data) - 1)]  # only a line that starts with a blank can be blank
        suspects = np.flatnonzero(table[first])
        keep = np.ones(len(ends), bool)
        for number in suspects.tolist():
            if number < len(ends) and not block[starts[number] : ends[number]].strip(blank_bytes):
                keep[number] = False
        if len(ends):
            if not self._empty:
                keep[0] = True
            self._empty = True
        self._empty = self._empty and not block[starts[-1] :].removeprefix(BOM).strip(blank_bytes)
        return ends[keep]

    def _outside_quotes(self, block: bytes, data: Octets, ends: Ints) -> Ints:
        """Remove line ends inside quoted values."""
        quotes = np.flatnonzero(data == _QUOTE)
        was_in = self.in_quotes
        if not len(quotes):
            self._closed = False
            return ends[:0] if was_in else ends
        # Usually each quote that would open a value is at the start of one, or doubles another.
        opening = quotes[1 if was_in else 0 :: 2]
        before = np.where(opening > 0, data[opening - 1], self._last[0])
        regular = (before == self._delimiter) | (before == _NEWLINE) | (before == _RETURN) | (before == _QUOTE)
        is_cut = bool(len(opening)) and opening[0] == 0 and self._last == b'"' and not self._closed
        if is_cut or not regular.all():
            quotes = np.array(self._real_quotes(block, quotes.tolist()), np.int64)
        odd = (np.searchsorted(quotes, ends) + was_in) % 2
        self.in_quotes = bool((len(quotes) + was_in) % 2)
        self._closed = not self.in_quotes and bool(len(quotes)) and quotes[-1] == len(block) - 1
        return np.asarray(ends[odd == 0], np.int64)

    def _real_quotes(self, block: bytes, quotes: list[int]) -> list[int]:
        """Return the quotes that open or close a value. Others, as in `5" disk`, are part of a value."""
        starters = bytes([self._delimiter]) + b"\r\n"
        inside, real = self.in_quotes, list[int]()
        for position in quotes:
            before = block[position - 1 : position] if position else self._last
            doubled = real[-1] == position - 1 if real else self._closed and not position
            if inside or doubled or before in starters:
                inside = not inside
                real.append(position)
        return real

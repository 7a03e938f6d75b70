"""Rows to compute on: which inputs there are, how they are cut into units, and how a unit is read."""

from __future__ import annotations

from brim.sources.rows.options import RowOptions
from brim.sources.rows.read import cut_batches, read_unit, where
from brim.sources.rows.schemas import cast, unify
from brim.sources.rows.source import open_rows
from brim.sources.rows.unit import Reading, RowSource, Span, Unit

__all__ = [
    "Reading",
    "RowOptions",
    "RowSource",
    "Span",
    "Unit",
    "cast",
    "cut_batches",
    "open_rows",
    "read_unit",
    "unify",
    "where",
]

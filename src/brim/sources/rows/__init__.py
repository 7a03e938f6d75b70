"""Rows to compute on: which inputs there are, how they are cut into units, and how a unit is read."""

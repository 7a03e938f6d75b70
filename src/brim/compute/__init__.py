"""Computed jobs: units of rows through a function, in workers that obey the limit."""

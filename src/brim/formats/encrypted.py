"""Recognize encrypted Parquet files, for which brim has no keys.

This module imports nothing large, because every worker loads it.
"""

from __future__ import annotations

from brim.errors import InputError


def is_encrypted(error: BaseException) -> bool:
    """Return whether pyarrow refused a file, or one of its columns, because it has no key."""
    return "encrypt" in str(error) or "decrypt" in str(error)


def encrypted(name: str) -> InputError:
    return InputError(f"{name} is encrypted, and brim has no key.", hint="Write it again without encryption.")

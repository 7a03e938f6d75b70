"""Parquet files that are encrypted: brim has no keys, and says so. Imports nothing large: every worker loads it."""

from __future__ import annotations

from brim.errors import InputError


def is_encrypted(error: BaseException) -> bool:
    """Whether pyarrow has refused a file, or a column of one, for want of a key."""
    return "encrypt" in str(error) or "decrypt" in str(error)


def encrypted(name: str) -> InputError:
    return InputError(f"{name} is encrypted, and brim has no key.", hint="Write it again without encryption.")

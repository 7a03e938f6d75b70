"""Provide a small disk that can be filled: a tmpfs, which only root can mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(disk: Path, megabytes: int = 8) -> Iterator[Path]:
    """Create a folder on a separate disk; skip the test with the reason if this is not possible."""
    if os.geteuid() != 0:
        pytest.skip("a full disk is not proved here: mounting a small tmpfs takes root")
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(disk)], check=False)
    if mounted.returncode != 0:
        pytest.skip("a full disk is not proved here: this system does not let root mount a tmpfs")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Fill the disk with a file, and free the space by removing it."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return ballast

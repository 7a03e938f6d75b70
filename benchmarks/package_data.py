"""Create the data of package.py once, keep it below --data, and load it into the page cache or evict it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

MB, GB = 10**6, 10**9
ROWS, ROW_BYTES = 12, 300 * MB
SMALL_FILES, SMALL_BYTES = 20_000, 10_000
FOLDERS, FOLDER_FILES, TINY_BYTES = 100, 10_000, 500


def made(folder: Path, make: Callable[[Path], None], need_bytes: int) -> Path:
    """Return the folder, and create it if it is missing or incomplete."""
    if not folder.exists():
        free = shutil.disk_usage(folder.parent).free
        if free < need_bytes:
            raise SystemExit(f"{folder.name} needs {need_bytes / GB:.0f} GB of disk, {free / GB:.0f} GB are free")
        print(f"  making {folder.name}", file=sys.stderr, flush=True)
        partial = folder.with_name(folder.name + ".partial")
        remove(partial)
        partial.mkdir()
        make(partial)
        partial.rename(folder)
    return folder


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


def make_scans(folder: Path) -> None:
    for number in range(1, ROWS + 1):
        with open(folder / f"sub-{number:02d}_bold.nii.gz", "wb") as file:
            for _ in range(ROW_BYTES // (10 * MB)):
                file.write(os.urandom(10 * MB))


def make_sparse(folder: Path, files: int, file_bytes: int) -> None:
    for number in range(files):
        with open(folder / f"scan-{number:03d}.nii.gz", "wb") as file:
            file.truncate(file_bytes)


def make_small(folder: Path) -> None:
    for number in range(SMALL_FILES):
        (folder / f"image-{number:05d}.png").write_bytes(os.urandom(SMALL_BYTES))


def make_million(folder: Path) -> None:
    with get_context("spawn").Pool() as pool:
        pool.map(_make_tiny, [folder / f"folder-{number:03d}" for number in range(FOLDERS)], chunksize=1)


def _make_tiny(folder: Path) -> None:
    folder.mkdir()
    within = os.open(folder, os.O_RDONLY)
    content = memoryview(os.urandom(FOLDER_FILES * TINY_BYTES))
    for number in range(FOLDER_FILES):
        file = os.open(f"image-{number:05d}.png", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=within)
        os.write(file, content[number * TINY_BYTES : (number + 1) * TINY_BYTES])
        os.close(file)
    os.close(within)


def warm(source: Path) -> None:
    """Read all files, so that every contender finds them in the page cache."""
    buffer = bytearray(MB)
    for descriptor in _opened(source):
        while os.readv(descriptor, [buffer]):
            pass


def cool(source: Path) -> None:
    """Evict the content of the files from the page cache, which needs no root; names and inodes stay cached."""
    os.sync()
    for descriptor in _opened(source):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _opened(source: Path) -> Iterator[int]:
    """Yield every file below a folder, or the file itself, opened."""
    if source.is_file():
        paths = iter([str(source)])
    else:
        paths = (f"{folder}/{name}" for folder, _, names in os.walk(source) for name in names)
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

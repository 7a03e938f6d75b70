"""A list that grows, and a memory-mapped file that is read: RSS rises alike, and only one of them is a leak."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from brim.lab.measure import measure, need_room, step
from brim.lab.steps import Experiment, ExperimentPart, Watch
from brim.records import dataclass
from brim.sizes import format_size

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class LeakOptions:
    """How much is held or read in all, and in how many steps."""

    size_bytes: int = 200_000_000
    pieces: int = 4


def run(folder: Path, options: LeakOptions, watch: Watch) -> Experiment:
    need_room(folder, options.size_bytes, options.size_bytes)
    path = folder / "mapped.bin"
    _write(path, options.size_bytes)
    grown = measure("a list that grows", "leak_experiment:grow", asdict(options), folder, watch)
    touched = measure(
        "a mapped file", "leak_experiment:touch", {"path": str(path), "pieces": options.pieces}, folder, watch
    )
    numbers = {"options": asdict(options), "verdicts": {part.name: judge(part) for part in (grown, touched)}}
    return Experiment("leak", (grown, touched), _seen(grown, touched), (), numbers)


def judge(part: ExperimentPart) -> str:
    """ "leak" if what the steps added cannot be taken back, "mapping" if it can."""
    first, last = part.steps[0], part.steps[-2]  # the last step is after the giving back
    rose = last.rss_bytes - first.rss_bytes
    return "leak" if last.usage.total_bytes - first.usage.total_bytes > rose / 2 else "mapping"


def _seen(grown: ExperimentPart, touched: ExperimentPart) -> tuple[str, str]:
    high = [part.steps[-2] for part in (grown, touched)]
    after = [part.steps[-1] for part in (grown, touched)]
    rss = [format_size(step.rss_bytes) for step in high]
    held = [format_size(step.usage.total_bytes) for step in high]
    looks = "looks like one" if judge(touched) == "mapping" else "should look like one, and is one here"
    return (
        f"RSS rose to {rss[0]} with the list and to {rss[1]} with the mapped file, but of that {held[0]} and "
        f"{held[1]} are memory that nobody can take back: the list is a {judge(grown)}'s shape, "
        f"the file only {looks}.",
        f"Asked to give back what it could, the list kept {format_size(after[0].rss_bytes)} and the mapped file "
        f"{format_size(after[1].rss_bytes)}; a kernel that needs the room takes file pages without asking.",
    )


def _write(path: Path, size: int) -> None:
    block = os.urandom(1 << 20)
    with open(path, "wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])


def grow(size_bytes: int, pieces: int) -> None:
    """Child: keep piece after piece."""
    step("started")
    kept = []
    for number in range(1, pieces + 1):
        kept.append(b"\1" * (size_bytes // pieces))
        step(f"{number} of {pieces} pieces kept")
    _give_back()
    step("after gc and malloc_trim")
    assert kept


def touch(path: str, pieces: int) -> None:
    """Child: read piece after piece of a mapped file."""
    import mmap

    step("started")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        size = len(mapped)
        for number in range(1, pieces + 1):
            sum(mapped[size * (number - 1) // pieces : size * number // pieces : _PAGE])
            step(f"{number} of {pieces} pieces read")
        if hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)
        step("after giving its pages back")


def _give_back() -> None:
    import ctypes
    import gc

    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)

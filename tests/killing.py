"""kill -9 of a computed job, again and again: its parent, or one of its workers."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from brim.memory.meter import tree
from tests.forked import start


def kills(subset: int) -> int:
    """How many, where more prove more: BRIM_KILLS sets it for a long run."""
    return int(os.environ.get("BRIM_KILLS") or subset)


def kill_at_random_moments(
    arguments: Sequence[str],
    folder: Path,
    count: int,
    between_s: tuple[float, float],
    whenever_done: Callable[[], None],
) -> None:
    """Run brim until it was hit `count` times; `whenever_done` looks at what a run has left, and removes it.

    A worker that dies is replaced and the run continues; every fourth run loses only workers, so that some end.
    """
    moments = random.Random("brim")
    killed = runs = 0
    while killed < count:
        process = start(*arguments, cwd=folder)
        runs += 1
        while process.poll() is None and killed < count:
            time.sleep(moments.uniform(*between_s))
            children = tree([process.pid])[1:]
            if children and moments.random() < 0.6:
                _kill(moments.choice(children))
                killed += 1
            elif runs % 4 and process.poll() is None:
                process.kill()
                killed += 1
        if process.wait() == 0:
            whenever_done()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass

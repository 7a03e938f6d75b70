"""Repeatedly kill the parent or a worker of a computed job with SIGKILL."""

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
    """Return the number of kills: BRIM_KILLS if it is set, for a longer run with more evidence."""
    return int(os.environ.get("BRIM_KILLS") or subset)


def kill_at_random_moments(
    arguments: Sequence[str],
    folder: Path,
    count: int,
    between_s: tuple[float, float],
    whenever_done: Callable[[], None],
) -> None:
    """Run brim until it was killed `count` times. `whenever_done` checks the output of a finished run and removes it.

    A worker that dies is replaced and the run continues. Every fourth run only kills workers, so that some runs finish.
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

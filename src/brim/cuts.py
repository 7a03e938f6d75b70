"""Cut a row of weights into consecutive runs: rows into shards, row groups and pages."""

from __future__ import annotations

import numpy as np

from brim.fileset import Ints


def running(values: Ints) -> Ints:
    """The sum of all values before each place; one longer than the values."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(values)]).astype(np.int64)


def fill(weights: Ints, limit: int, max_count: int | None = None) -> Ints:
    """Boundaries of runs, each as long as its weight stays within `limit`; a heavier item stands alone.

    A cut depends only on what comes before it, so items added at the end leave earlier runs as they are.
    """
    total = running(weights)
    cuts = [0]
    while cuts[-1] < len(weights):
        start = cuts[-1]
        end = int(np.searchsorted(total, total[start] + limit, side="right")) - 1
        if max_count is not None:
            end = min(end, start + max_count)
        cuts.append(min(max(end, start + 1), len(weights)))
    return np.array(cuts, np.int64)


def share(weights: Ints, count: int) -> Ints:
    """Boundaries of exactly `count` runs of about equal weight, none empty (so `count` ≤ items)."""
    total = np.cumsum(weights)
    goal = total[-1] * np.arange(1, count, dtype=np.float64) / count
    cuts = np.concatenate([[0], np.searchsorted(total, goal, side="left") + 1, [len(weights)]])
    for i in range(1, count):  # heavy items pull neighbouring cuts together: push them apart again
        cuts[i] = min(max(cuts[i], cuts[i - 1] + 1), len(weights) - (count - i))
    return cuts.astype(np.int64)

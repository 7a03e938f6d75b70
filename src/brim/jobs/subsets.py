"""The configs and splits of a dataset that is there: which shards each has, and whether they are all of them.

Known from the manifests, else from the card, else from the names of the shards. What verify, check, info and unpack
look at is chosen here (`--from-config`, `--from-split`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from brim.errors import InputError
from brim.formats.card_configs import UNFINISHED, card_entries, fits, patterns_of
from brim.records import dataclass
from brim.state.ledger import Receipt

SHARD_NAME = re.compile(
    r"(?P<folder>.+)/(?P<split>[^/]+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.(?:parquet|tar|arrow)"
)
State = Literal["whole", "unfinished", "incomplete", "not brim's"]
Key = tuple[str, str]  # config and split


@dataclass(frozen=True, slots=True)
class Subset:
    """A split of a config. `wanted` is how many shards it should have, as far as anybody knows."""

    config: str
    split: str
    names: tuple[str, ...]
    wanted: int | None
    state: State

    @property
    def name(self) -> str:
        return self.split if self.config == "default" else f"{self.config}/{self.split}"

    @property
    def words(self) -> str:
        """What is to be said of it."""
        if self.state == "unfinished":
            of = f" of {self.wanted:,}" if self.wanted else ""
            return f"unfinished: {len(self.names):,}{of} shards; run the same build to finish"
        if self.state == "incomplete":
            return f"incomplete: {len(self.names):,} of {self.wanted or 0:,} shards"
        return self.state


def find_subsets(
    sizes: Mapping[str, int],
    receipts: Mapping[str, Receipt],
    listed: Mapping[Key, Sequence[str]],
    fields: dict[str, Any],
    unfinished: bool,
) -> list[Subset]:
    """Every config and split that a manifest (`listed`: the shards that it names), the card or a shard's name tells of.

    `unfinished`: the ledger that is there says so, of all of it.
    """
    found: dict[Key, list[str]] = {key: list(names) for key, names in listed.items()}
    claimed = set(receipts)
    open_keys: set[tuple[str, str | None]] = set()
    for entry in card_entries(fields):
        config = str(entry["config_name"])
        patterns = patterns_of(entry)
        waiting = [split for split, path in patterns if path == UNFINISHED]
        if waiting:
            open_keys |= {(config, None if len(waiting) == len(patterns) else split) for split in waiting}
        for split, pattern in patterns:
            fitting = [name for name in sizes if pattern != UNFINISHED and fits(name, pattern)]
            of_others = claimed - set(found.get((config, split), ()))
            fitting = [name for name in fitting if name not in of_others or name not in receipts]
            if fitting or (split, config) not in found:
                of = found.setdefault((config, split), [])
                of += [name for name in fitting if name not in of]
                claimed |= set(fitting)
    for name in sizes:
        if name not in claimed:
            found.setdefault(_by_name(name), []).append(name)
    return [s for key, names in found.items() if (s := _subset(key, names, sizes, receipts, open_keys, unfinished))]


def _by_name(name: str) -> Key:
    match = SHARD_NAME.fullmatch(name)
    folder = match["folder"] if match else name.rpartition("/")[0]
    return ("default" if folder in ("data", "") else folder, match["split"] if match else "train")


def _subset(
    key: Key,
    names: list[str],
    sizes: Mapping[str, int],
    receipts: Mapping[str, Receipt],
    open_keys: set[tuple[str, str | None]],
    unfinished: bool,
) -> Subset | None:
    here = sorted(name for name in names if name in sizes)
    told = [name for name in names if name in receipts]
    if unfinished or (key[0], None) in open_keys or key in open_keys:
        # Those of an earlier version may still be there, under names that its manifest knows.
        fresh = here if unfinished else [name for name in here if name not in receipts] or here
        counts = {int(match["count"]) for name in fresh if (match := SHARD_NAME.fullmatch(name))}
        if not fresh and not told and any(config == key[0] and split is None for config, split in open_keys):
            return Subset(*key, (), None, "unfinished")
        wanted = max(counts, default=0) or None
        fresh = fresh if unfinished else [n for n in fresh if f"-of-{wanted or 0:05d}" in n] or fresh
        return Subset(*key, tuple(fresh), wanted, "unfinished")
    if told:
        whole = all(sizes.get(name) == receipts[name].size for name in told)
        return Subset(*key, tuple(here), len(told), "whole" if whole else "incomplete")
    if not here:
        return None
    missing = list(missing_numbers(here))
    return Subset(*key, tuple(here), len(here) + len(missing), "incomplete" if missing else "not brim's")


def missing_numbers(names: Sequence[str]) -> Iterator[tuple[str, str, int, int, str]]:
    """(folder, split, number, count, extension) of shards that names tell of and that are not there. Where rows were
    appended the numbers go on, and the largest count is that of all."""
    seen: dict[tuple[str, str, str], tuple[set[int], int]] = {}
    for name in names:
        if match := SHARD_NAME.fullmatch(name):
            kind = (match["folder"], match["split"], f".{name.rpartition('.')[2]}")
            numbers, count = seen.get(kind, (set(), 0))
            seen[kind] = (numbers | {int(match["number"])}, max(count, int(match["count"])))
    for (folder, split, extension), (numbers, count) in seen.items():
        for number in sorted(set(range(count)) - numbers):
            yield folder, split, number, count, extension


def chosen_subsets(subsets: Sequence[Subset], config: str | None, split: str | None, address: str) -> list[Subset]:
    """Those that were asked for; InputError if there is none."""
    configs = list(dict.fromkeys(subset.config for subset in subsets))
    if config is not None and config not in configs:
        raise InputError(f"{address!r} has no config {config!r}.", hint=f"It has: {', '.join(configs) or 'none'}.")
    found = [subset for subset in subsets if config in (None, subset.config)]
    splits = list(dict.fromkeys(subset.split for subset in found))
    if split is not None and split not in splits:
        raise InputError(f"{address!r} has no split {split!r}.", hint=f"It has: {', '.join(splits) or 'none'}.")
    return [subset for subset in found if split in (None, subset.split)]

"""Results of jobs: how they are printed, as JSON, and the next commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import InputError
from brim.execution.scheduler import UnitStats
from brim.options.declare import warn_deprecated
from brim.records import dataclass
from brim.sizes import format_size, plural
from brim.state.ledger import Receipt
from brim.storage.location import is_object_address
from brim.wording import Result

if TYPE_CHECKING:
    from brim.jobs.cache_entries import CachedFiles

_READERS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}  # packages with which `datasets` reads an object store


@dataclass(frozen=True, slots=True, repr=False)
class BuildResult(Result):
    """The dataset that a build or a selection has written.

    On the Hub also the bytes that were uploaded, the number of commits, and what the Hub lists.
    """

    destination: str
    rows: int
    files: int
    bytes: int
    shards: int
    written: int
    kept: int
    left_out: tuple[str, ...]
    sent_bytes: int = 0
    commits: int = 0
    visibility: str = ""
    pull_request: int = 0
    proved: str = ""
    file_bytes: int = 0  # of the source's files, as the plan reports them; `bytes` is the size of the shards
    steps: tuple[tuple[str, str], ...] = ()
    shard_noun: str = "shard"  # in the summary; "file" if not every file is a shard that can be read alone

    def as_dict(self) -> dict[str, Any]:
        internal = ("steps", "shard_noun")
        return {name: getattr(self, name) for name in BuildResult.__dataclass_fields__ if name not in internal}

    def next_steps(self) -> list[tuple[str, str]]:
        """Return the commands that load and verify the result."""
        return list(self.steps)

    @property
    def place(self) -> str:
        """The destination, and the visibility of a Hub repository."""
        return f"{self.destination} ({self.visibility})" if self.visibility else self.destination

    @property
    def commits_made(self) -> str:
        """The number of commits on the Hub, as text; "" elsewhere."""
        if not self.visibility:
            return ""
        pull = f", by pull request {self.pull_request}" if self.pull_request else ""
        return f" in {plural(self.commits, 'commit')}{pull}"

    def summary(self) -> list[tuple[str, str]]:
        """Return the contents of the destination, for people."""
        files = f", {plural(self.files, 'file')}" if self.files else ""
        unchanged = f", {self.kept:,} kept" if self.kept else ""
        written = f"sent, {format_size(self.sent_bytes)}" if self.visibility else "written"
        shards = f"{self.shards:,} ({self.written:,} {written}{unchanged}){self.commits_made}"
        lines = [("destination", self.place), ("contents", f"{plural(self.rows, 'row')}{files}")]
        if self.file_bytes:
            lines.append(("size of the files", format_size(self.file_bytes)))
        lines += [("shards", shards), ("size", format_size(self.bytes))]
        if self.left_out:
            count = plural(len(self.left_out), "file")
            lines.append(("skipped", f"{count} too large for the format, listed in README.md"))
        return [*lines, ("verified", self.proved)] if self.proved else lines


@dataclass(frozen=True, slots=True, repr=False)
class MapResult(BuildResult):
    """The dataset that map, tokenize or embed has written, and counts of the units that were computed for it.

    A job that was finished before has computed no units.
    """

    stats: UnitStats = field(default_factory=UnitStats)
    quarantine: Path | str | None = None  # an address, if it is next to a file in an object store
    counts: Mapping[str, int] = field(default_factory=dict)
    cached: CachedFiles | None = None  # the files of a result that stays in the cache

    @classmethod
    def from_build(cls, built: BuildResult, stats: UnitStats | None = None, **values: Any) -> MapResult:
        """Add the counts of units to the result of a build."""
        return cls(
            **built.as_dict(), steps=built.steps, shard_noun=built.shard_noun, stats=stats or UnitStats(), **values
        )

    @property
    def units(self) -> int:
        """The number of units of the job."""
        return len(self.stats.receipts)

    @property
    def computed(self) -> int:
        """The number of units that this run has computed."""
        return self.stats.computed

    @property
    def retries(self) -> int:
        """The number of units that were computed again after a failure."""
        return self.stats.retries

    @property
    def bad_rows(self) -> int:
        """The number of rows that were skipped because they failed."""
        return self.stats.bad_rows

    @property
    def bad_batches(self) -> int:
        """The number of batches that were skipped as a unit."""
        return self.stats.bad_batches

    @property
    def encoders(self) -> Mapping[str, int]:
        """The number of units that each encoder of tokenize has processed."""
        return self.stats.encoders

    @property
    def peak_bytes(self) -> int:
        """The largest memory of a worker."""
        return self.stats.peak_bytes

    @property
    def built(self) -> BuildResult:
        """Deprecated: the result itself."""
        warn_deprecated("MapResult.built is the result itself: write result.rows.")
        return self

    @property
    def outcome(self) -> UnitStats:
        """Deprecated: the result has these values itself."""
        warn_deprecated("MapResult.outcome is part of the result: write result.retries.")
        return self.stats

    def as_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {**BuildResult.as_dict(self), "units": self.units, "computed": self.computed}
        values |= {"retries": self.retries, "bad_rows": self.bad_rows, "bad_batches": self.bad_batches}
        values |= {"peak_bytes": self.peak_bytes, **({"encoders": self.encoders} if self.encoders else {})}
        return {**values, **self.counts, "quarantine": self.quarantine}

    def summary(self) -> list[tuple[str, str]]:
        """Return the result as text lines."""
        stats, units = self.stats, self.units
        contents = f"{plural(self.rows, 'row')}, {format_size(self.bytes)} in {plural(self.shards, self.shard_noun)}"
        lines = [("destination", self.place), ("contents", contents)]
        lines += [(name, f"{number:,}") for name, number in self.counts.items()]
        unchanged = f", {units - stats.computed:,} kept" if units > stats.computed else ""
        retried = f", {stats.retries:,} retried" if stats.retries else ""
        workers = f", {plural(stats.workers, 'worker')}" if stats.workers else ""
        computed = f"{stats.computed:,} done{unchanged}{retried}{workers}"
        lines.append(("units", computed if units else "nothing to do: all were done before"))
        if self.visibility:
            lines.append(("sent", f"{format_size(self.sent_bytes)}{self.commits_made}"))
        if stats.bad_rows:
            quarantine = f", kept in {self.quarantine}" if self.quarantine else ""
            lines.append(("skipped", f"{_skipped_text(stats)}{quarantine}"))
        if self.proved:
            lines.append(("verified", self.proved))
        return [*lines, ("peak memory", format_size(stats.peak_bytes))] if stats.peak_bytes else lines


def _skipped_text(stats: UnitStats) -> str:
    """Return the skipped rows as text. Rows of a batch that may not be split are counted as a batch."""
    batches, rows = stats.bad_batches, stats.bad_rows - stats.bad_batch_rows
    if not batches:
        return f"{plural(rows, 'row')} that failed"
    total = plural(stats.bad_batch_rows, "row")
    text = f"1 batch of {total}" if batches == 1 else f"{batches:,} batches, {total} together,"
    single = f" and {plural(rows, 'row')}" if rows else ""
    return f"{text}{single} that failed (--splittable finds the rows)"


@dataclass(frozen=True, slots=True, repr=False)
class PartResult(Result):
    """The result of one part of a saved plan. `next` is the command that publishes when all parts are done."""

    part: int
    parts: int
    destination: str
    bytes: int
    shards: int
    written: int
    kept: int
    sent_bytes: int
    next: str
    of_units: bool = False  # of a computed job; otherwise shards were uploaded

    def next_steps(self) -> list[tuple[str, str]]:
        """Return the command that publishes when all parts are done."""
        last = f"  (when all {self.parts:,} parts are done)" if self.parts > 1 else ""
        return [("next step", f"{self.next}{last}")]

    def summary(self) -> list[tuple[str, str]]:
        """Return the result and the next command as text lines."""
        noun, verb, preposition = ("units", "computed", "for") if self.of_units else ("shards", "written", "at")
        unchanged = f", {self.kept:,} kept" if self.kept else ""
        return [
            ("part", f"{self.part} of {self.parts}, {preposition} {self.destination}"),
            (noun, f"{self.shards:,} ({self.written:,} {verb}{unchanged}), {format_size(self.bytes)}"),
            *self.next_steps(),
        ]


@dataclass(frozen=True, slots=True)
class PlanStatus:
    """The progress of a saved plan. `parts` is into how many it is divided, None before the first was begun.

    `shards` and `done` count units for a computed job. Parts with missing shards are listed by their numbers.
    """

    path: str
    destination: str
    shards: int
    done: int
    parts: int | None
    missing_parts: list[int]
    unfinished_parts: list[int]
    finished: bool

    def lacking(self, count: int) -> list[int]:
        """Return those of `count` parts that have work left. InputError if the plan is divided differently."""
        if self.finished:
            return []
        if self.parts is None:
            return list(range(1, count + 1))
        if self.parts != count:
            raise InputError(
                f"This plan is divided into {self.parts} parts, not into {count}.", hint=f"Use {self.parts} for N."
            )
        return sorted([*self.missing_parts, *self.unfinished_parts])

    def lines(self, command: Callable[..., str], noun: str) -> list[tuple[str, str]]:
        """Return the progress and the next command, for people."""
        lines = [("destination", self.destination)]
        if self.finished:
            return [*lines, ("parts", "all finished and published")]
        if self.parts is None:
            return [*lines, ("parts", "none started"), ("next step", command("--part", "1/N"))]
        missing, unfinished = self.missing_parts, self.unfinished_parts
        complete = self.parts - len(missing) - len(unfinished)
        lines.append(("parts", f"{complete:,} of {self.parts:,} done, {self.done:,} of {self.shards:,} {noun}"))
        lines += [("unfinished", f"part {number_ranges(unfinished)}")] if unfinished else []
        lines += [("not started", f"part {number_ranges(missing)}")] if missing else []
        next_part = f"{[*unfinished, *missing][0]}/{self.parts}" if missing or unfinished else None
        return [*lines, ("next step", command(*(["--part", next_part] if next_part else ["--finish"])))]


def number_ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers for people, such as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def next_steps(
    destination: str,
    config: str,
    receipts: Sequence[Receipt],
    *,
    is_file: bool,
    state_dir: object,
    endpoint: str | None,
) -> tuple[tuple[str, str], ...]:
    """Return labels and commands for a finished job: how to load the result, and how to verify it."""
    if is_file:
        # An expression that opens a file of vectors without loading it.
        load = f"brim.open_tensors({destination!r})"
        if destination.endswith(".parquet"):
            load = f"datasets.load_dataset('parquet', data_files={destination!r})"
        return () if is_object_address(destination) else (("load", load),)
    suffix = Path(receipts[0].name).suffix if receipts else ""
    command = ["brim", "verify", destination]
    command += ["--state-dir", str(state_dir)] if state_dir else []
    command += ["--endpoint-url", endpoint] if endpoint and is_object_address(destination) else []
    verify = ("verify with", shlex.join(command))
    splits = {receipt.split for receipt in receipts}
    if suffix in (".parquet", ".arrow"):
        load = load_dataset(destination, config, splits, endpoint, suffix.removeprefix("."))
        return ("load", load), verify
    tokens = next((Path(destination) / receipt.name for receipt in receipts if receipt.name.endswith(".bin")), None)
    if tokens is None or "://" in destination:
        return (verify,)
    if any(receipt.name.endswith(".idx") for receipt in receipts):
        reader = "megatron.core.datasets.indexed_dataset.IndexedDataset"
        return ("load", f"{reader}({str(tokens.with_suffix(''))!r})"), verify
    dtype = f"json.load(open({str(tokens.with_suffix('.json'))!r}))['dtype']"
    return ("load", f"numpy.memmap({str(tokens)!r}, {dtype}, 'r')"), verify


def load_dataset(
    destination: str, config: str, splits: Iterable[str], endpoint: str | None = None, format: str = "parquet"
) -> str:
    """Return the Python expression that loads a dataset.

    It works where the environment names the keys and the object store as it does for brim.
    """
    if is_object_address(destination):
        scheme = destination.partition("://")[0]
        files = {split: f"{destination.rstrip('/')}/data/{split}-*.{format}" for split in sorted(set(splits))}
        # adlfs takes another endpoint only from a connection string, which the environment has.
        has_endpoint = endpoint and scheme in ("s3", "gs")
        storage = f", storage_options={{'endpoint_url': {endpoint!r}}}" if has_endpoint else ""
        needs = f"  # pip install {_READERS[scheme]}" if scheme in _READERS else ""  # Hub buckets need nothing
        return f"datasets.load_dataset({format!r}, data_files={files!r}{storage}){needs}"
    path, _, revision = destination.removeprefix("hf://datasets/").partition("@")
    if not destination.startswith("hf://"):
        return f"datasets.load_dataset({destination!r})"
    arguments = [repr(path.rstrip("/")), *([] if config == "default" else [repr(config)])]
    return f"datasets.load_dataset({', '.join([*arguments, *([f'revision={revision!r}'] if revision else [])])})"

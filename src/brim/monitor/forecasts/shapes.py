"""Forecasts from numbers alone: embed files, map, collect and concatenate.

The factors were measured with `datasets` 5.2 and pyarrow 26 on 200 MB and 600 MB of files and on texts of
200 KB per row; `brim lab push`, `map` and `embed-list` repeat the measurements with the installed versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, field
from enum import StrEnum
from typing import Any

from brim.errors import ArgumentError, InputError
from brim.memory.limit import Limit, watch_limit
from brim.records import dataclass
from brim.sizes import format_both, format_size, parse_count, parse_size
from brim.wording import Described

Size = str | int | float

MODERATE_FROM = 0.70
HIGH_ABOVE = 0.90
# An interpreter with `datasets` (90 MB measured), and the memory that a forked worker does not share.
PROCESS_BYTES = (90_000_000, 150_000_000)
WORKER_BYTES = (20_000_000, 130_000_000)
# A shard's files as Python objects and as Arrow arrays, then the row group that the Parquet writer encodes,
# and the page of a large file: it is built, copied and compressed in one piece.
EMBED_FACTORS = (2, 3)
ROW_GROUP_FACTORS = (1, 2)
LARGEST_FILE_FACTORS = (3, 6)
# A batch as Python objects; the result of the function, as Python objects and twice as Arrow arrays.
INPUT_FACTORS = (1.0, 2.0)
OUTPUT_FACTORS = (3.0, 6.0)
DTYPE_BYTES = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("float8", "int8", "uint8", "bool"), 1),
}


class Verdict(StrEnum):
    """The risk that the work runs out of memory."""

    LOW = "LOW"
    MODERATE = "MODERATE"
    HIGH = "HIGH"


_FIT_TEXTS = {Verdict.LOW: "fits", Verdict.MODERATE: "fits closely", Verdict.HIGH: "hardly fits"}


def verdict_of(need_bytes: float, limit_bytes: float) -> Verdict:
    """Return LOW below 70 % of the limit, MODERATE up to 90 %, HIGH above."""
    if need_bytes > HIGH_ABOVE * limit_bytes:
        return Verdict.HIGH
    return Verdict.MODERATE if need_bytes >= MODERATE_FROM * limit_bytes else Verdict.LOW


@dataclass(frozen=True, slots=True)
class Component:
    """One thing that takes memory, as a range if it is not known exactly."""

    name: str
    low_bytes: int
    high_bytes: int
    why: str

    @classmethod
    def exactly(cls, name: str, size: int, why: str) -> Component:
        return cls(name, size, size, why)

    @classmethod
    def times(cls, name: str, size: float, factors: tuple[float, float], why: str) -> Component:
        return cls(name, round(size * factors[0]), round(size * factors[1]), why)


@dataclass(frozen=True, slots=True)
class Reasons:
    """Reasons for and against a crash in addition to the numbers, and better ways."""

    for_crash: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    better: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Forecast(Described):
    """Components that are in memory at the same time. Print it; `facts` is for programs."""

    shape: str
    components: tuple[Component, ...]
    limit: Limit
    reasons: Reasons = Reasons()
    peak_label: str = "at the peak"
    remark: tuple[str, str] | None = None  # an additional line
    details: dict[str, Any] = field(default_factory=dict)
    notes: tuple[tuple[str, str], ...] = ()  # lines about the machine

    @property
    def low_bytes(self) -> int:
        """The lower end of the estimated peak."""
        return sum(component.low_bytes for component in self.components)

    @property
    def high_bytes(self) -> int:
        """The upper end of the estimated peak."""
        return sum(component.high_bytes for component in self.components)

    @property
    def verdict(self) -> Verdict:
        """Return the verdict of the high end: a forecast should rather be too careful than too bold."""
        return verdict_of(self.high_bytes, self.limit.bytes)

    @property
    def verdict_low(self) -> Verdict:
        """Return the verdict of the low end."""
        return verdict_of(self.low_bytes, self.limit.bytes)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Return the table and the verdict as (label, text)."""
        rows = [(c.name, format_both(c.low_bytes, c.high_bytes), c.why) for c in self.components]
        rows.append((self.peak_label, format_both(self.low_bytes, self.high_bytes), "all of it together"))
        rows.append(("limit", format_both(self.limit.bytes), self.limit.reason))
        width = max(len(size) for _, size, _ in rows)
        high = self._fit(self.high_bytes, self.verdict)
        if self.verdict_low != self.verdict:
            low = self._fit(self.low_bytes, self.verdict_low)
            verdict = f"{high}, if the high end comes true; {low}, if the low end does"
        else:
            verdict = high + self._base()
        return [
            *((name, f"{size:<{width}}  {why}") for name, size, why in rows),
            *([self.remark] if self.remark is not None else []),
            *self.notes,
            ("verdict", verdict),
            *(("risk", text) for text in self.reasons.for_crash),
            *(("reassuring", text) for text in self.reasons.against),
            *(("better", text) for text in self.reasons.better),
        ]

    def _fit(self, need_bytes: int, verdict: Verdict) -> str:
        need, limit, ratio = format_size(need_bytes), format_size(self.limit.bytes), need_bytes / self.limit.bytes
        # With a decimal if rounding would move it onto a verdict's border.
        digits = 1 if min(abs(ratio - MODERATE_FROM), abs(ratio - HIGH_ABOVE)) < 0.005 else 0
        usage = f"({100 * ratio:,.{digits}f} %, risk {verdict})"
        if need_bytes > self.limit.bytes:
            return f"does not fit: needs {need}, {limit} available {usage}"
        return f"{_FIT_TEXTS[verdict]}: needs {need} of {limit} {usage}"

    def _base(self) -> str:
        """Return the base of a low risk: the process itself, of which a model may be the largest part."""
        if self.verdict is not Verdict.LOW or self.shape not in ("concat", "map", "embed-files"):
            return ""
        base = next((part for part in self.components if part.name == "process"), None)
        if base is None:
            return ", for a base of nothing: the process, its libraries and its model come on top (--base)"
        assumed = "" if base.why.startswith("--base") else " (assumed; set it with --base)"
        low, high = format_size(base.low_bytes), format_size(base.high_bytes)
        return f", for a base of {low if low == high else f'{low} to {high}'}{assumed}"

    @property
    def facts(self) -> dict[str, Any]:
        """Return the forecast for programs."""
        return {
            "shape": self.shape,
            "components": [asdict(component) for component in self.components],
            "low_bytes": self.low_bytes,
            "high_bytes": self.high_bytes,
            "limit_bytes": self.limit.bytes,
            "limit_reason": self.limit.reason,
            "verdict": str(self.verdict),
            "verdict_low": str(self.verdict_low),
            **{name: list(reasons) for name, reasons in asdict(self.reasons).items()},
            **self.details,
        }


def embed_files(
    *,
    shard_bytes: Size,
    workers: int = 1,
    largest_file: Size | None = None,
    row_group: Size | None = None,
    base: Size | None = None,
    memory: Size | None = None,
) -> Forecast:
    """Forecast reading files into a table, shard by shard, and writing each table as Parquet.

    `row_group` is the size that the writer encodes at a time (by default the shard).
    """
    largest = 0 if largest_file is None else parse_size(largest_file)
    shard = max(parse_size(shard_bytes), largest)  # a shard contains at least one file
    group = shard if row_group is None else min(max(parse_size(row_group), largest), shard)
    count = _count("workers", workers)
    times = f"{count} × " if count > 1 else ""
    processes, pages = _processes(base, count), []
    if largest:
        why = f"{times}3 to 6 × {format_size(largest)}: its page is built, copied and compressed in one piece"
        pages.append(Component.times("largest file", count * largest, LARGEST_FILE_FACTORS, why))
    shard_why = f"{times}2 to 3 × {format_size(shard)}: a shard's files as Python objects and as Arrow arrays"
    group_why = f"{times}1 to 2 × {format_size(group)}: the data that the Parquet writer encodes at a time"
    tables = (
        Component.times("files embedded", count * shard, EMBED_FACTORS, shard_why),
        Component.times("row group", count * group, ROW_GROUP_FACTORS, group_why),
    )
    limit = watch_limit(memory)
    better = ["`brim build` splices files into shards without reading them into memory: about 60 MB for any size"]
    available = MODERATE_FROM * limit.bytes - sum(part.high_bytes for part in (*processes, *pages))
    fits = int(available / count / (EMBED_FACTORS[1] + ROW_GROUP_FACTORS[1]))
    if max(largest, 1) <= fits < shard:
        better.append(f"shards of at most {format_size(fits)} would be LOW")
    unknown = "writing a file takes 3 to 6 times its size in memory: give the size of the largest with --largest-file"
    reasons = Reasons(
        for_crash=() if largest else (unknown,),
        against=("the files of one shard are released before the next: the largest shard decides, not the dataset",),
        better=tuple(better),
    )
    details = {"shard_bytes": shard, "row_group_bytes": group, "largest_file_bytes": largest or None, "workers": count}
    return Forecast("embed-files", (*processes, *tables, *pages), limit, reasons, details=details)


def map_rows(
    *,
    row_bytes: Size,
    output_bytes: Size | None = None,
    batch_size: int | str = 1000,
    writer_batch_size: int | str = 1000,
    workers: int | str = 1,
    per_worker: Size | None = None,
    factor: float | None = None,
    base: Size | None = None,
    memory: Size | None = None,
) -> Forecast:
    """Forecast `datasets.map` or a tokenizer: batches in, batches out, in some workers.

    `per_worker` is the additional memory of each worker (a tokenizer, a model); `factor`, measured on a small sample,
    replaces the usual ranges.
    """
    row = parse_size(row_bytes)
    out = row if output_bytes is None else parse_size(output_bytes)
    batch, writer = _count("batch-size", batch_size), _count("writer-batch-size", writer_batch_size)
    count = _count("workers", workers)
    if factor is not None and not 0 < factor < 1e6:
        raise InputError("--factor takes a number above zero and below a million.")
    into, outof = (INPUT_FACTORS, OUTPUT_FACTORS) if factor is None else ((factor, factor), (factor, factor))
    times = f"{count} × " if count > 1 else ""
    gathered = max(batch, writer)
    rows = f"{batch:,}" if gathered == batch else f"{batch:,} to {gathered:,}"
    fixed = _processes(base, count)
    if per_worker is not None:
        own = parse_size(per_worker)
        fixed.append(Component.exactly("in each worker", count * own, f"{times}{format_size(own)} for the function"))
    spans = [f"{low:g}" if low == high else f"{low:g} to {high:g}" for low, high in (into, outof)]
    in_why = f"{times}{batch:,} rows × {format_size(row)} × {spans[0]}: as Python objects"
    out_why = f"{times}{rows} rows × {format_size(out)} × {spans[1]}: as Python objects, then as Arrow arrays"
    batches = (
        Component.times("batches in", count * batch * row, into, in_why),
        Component(
            "batches out", round(count * batch * out * outof[0]), round(count * gathered * out * outof[1]), out_why
        ),
    )
    risks = ["rows differ: a batch of the longest rows decides, and the average hides it"]
    if per_worker is None:
        risks.append("the memory of the function itself (a tokenizer, a model) is not counted: give --per-worker")
    against = ["input and output files are memory-mapped: they add to RSS, but the kernel reclaims them"]
    if gathered > batch:
        against.append("`datasets` 5.2 writes every batch of a batched map at once, so the low end is the likely one")
    limit = watch_limit(memory)
    available = MODERATE_FROM * limit.bytes - sum(part.high_bytes for part in fixed)
    fits = int(available / count / (row * into[1] + out * outof[1]))
    better = (f"--batch-size {fits} --writer-batch-size {fits} would be LOW",) if 1 <= fits < gathered else ()
    details = {"row_bytes": row, "output_bytes": out, "batch_size": batch, "writer_batch_size": writer}
    reasons = Reasons(tuple(risks), tuple(against), better)
    return Forecast("map", (*fixed, *batches), limit, reasons, details={**details, "workers": count})


def concat(
    *,
    rows: int | str,
    dims: int | str | Sequence[int | str],
    dtype: str = "float32",
    copies: int = 2,
    base: Size | None = None,
    memory: Size | None = None,
) -> Forecast:
    """Forecast vectors that are appended to lists, one list for each of `dims`, and concatenated at the end.

    `copies` is how often the data is in memory at the end: as pieces and as one array (2); 3 if saving copies again.
    """
    count = _count("rows", rows)
    listed = [dims] if isinstance(dims, int | str) else list(dims)
    texts = [text for each in listed for text in (each.split(",") if isinstance(each, str) else [each])]
    widths = [_count("dims", text) for text in texts]
    if not widths:
        raise InputError("Give the length of the vectors.", hint="Write it like --dims=768 or --dims=768,1024.")
    if dtype not in DTYPE_BYTES:
        raise ArgumentError(f"--dtype takes {', '.join(DTYPE_BYTES)}, not {dtype!r}.", option="dtype")
    row_bytes = sum(widths) * DTYPE_BYTES[dtype]
    data = count * row_bytes
    shown = f"({' + '.join(map(str, widths))})" if len(widths) > 1 else str(widths[0])
    copy = "again" if copies == 2 else f"{copies - 1} times more"
    parts = [
        *([] if base is None else [_base_component(base)]),
        Component.exactly(
            "pieces in lists", data, f"{count:,} rows × {shown} numbers × {DTYPE_BYTES[dtype]} bytes ({dtype})"
        ),
        Component.exactly(
            "joined copy", data * (copies - 1), f"{copy}: the pieces are kept until the array is complete"
        ),
    ]
    risks = ["the peak comes at the very end, when all the work is done and none of it is saved"]
    if base is None:
        risks.append("the model, the libraries and one batch are not counted: give --base")
    if copies == 2:
        risks.append("some ways of saving make another copy: then use --copies 3")
    reasons = Reasons(
        for_crash=tuple(risks),
        against=("nothing is estimated: rows, dimensions and bytes are exact",),
        better=(
            f"brim.TensorWriter, brim.save_file and brim embed write each batch to its final position: a batch of 512 "
            f"rows ({format_size(512 * row_bytes)}) and about 25 MB, for any number of rows",
        ),
    )
    details = {"data_bytes": data, "rows": count, "dims": widths, "dtype": dtype}
    return Forecast("concat", tuple(parts), watch_limit(memory), reasons, "at the concatenation", details=details)


def _processes(base: Size | None, workers: int) -> list[Component]:
    first = Component("process", *PROCESS_BYTES, "Python with `datasets`") if base is None else _base_component(base)
    if workers == 1:
        return [first]
    why = f"{workers} × {format_size(WORKER_BYTES[0])} to {format_size(WORKER_BYTES[1])} that they do not share"
    return [first, Component.times("workers", workers, WORKER_BYTES, why)]


def _base_component(base: Size) -> Component:
    return Component.exactly("process", parse_size(base), "--base: the memory of the process itself")


def _count(name: str, value: int | str) -> int:
    """Return a number of rows, workers or dimensions; texts like "3M" are numbers too."""
    count = parse_count(value) if isinstance(value, str) else value
    if not 1 <= count < 2**53:
        raise ArgumentError(f"--{name} takes a number above zero, not {value!r}.", option=name)
    return count

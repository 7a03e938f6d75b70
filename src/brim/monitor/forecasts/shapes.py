"""Forecasts from numbers alone: embed files, map, accumulate and concatenate.

The factors were measured with `datasets` 5.2 and pyarrow 26 on 200 MB and 600 MB of files and on texts of
200 KB per row; `brim lab push`, `map` and `embed-list` repeat the measurements with the installed versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from enum import StrEnum
from typing import Any

from brim.errors import ArgumentError, InputError
from brim.memory.limit import Limit, watch_limit
from brim.records import dataclass
from brim.sizes import format_both, format_size, parse_count, parse_size
from brim.wording import Described

MODERATE_FROM = 0.70
HIGH_ABOVE = 0.90


class Verdict(StrEnum):
    """How likely the work is to run out of memory."""

    LOW = "LOW"
    MODERATE = "MODERATE"
    HIGH = "HIGH"


def verdict_of(need_bytes: float, limit_bytes: float) -> Verdict:
    """LOW below 70 % of the limit, MODERATE up to 90 %, HIGH above."""
    if need_bytes > HIGH_ABOVE * limit_bytes:
        return Verdict.HIGH
    return Verdict.MODERATE if need_bytes >= MODERATE_FROM * limit_bytes else Verdict.LOW


@dataclass(frozen=True, slots=True)
class Component:
    """One thing that takes memory, as a range where it is not known exactly."""

    name: str
    low_bytes: int
    high_bytes: int
    why: str

    @classmethod
    def exactly(cls, name: str, size: int, why: str) -> Component:
        return cls(name, size, size, why)


@dataclass(frozen=True, slots=True)
class Reasons:
    """What speaks for a crash and what against, beyond the numbers; and what to do instead."""

    for_crash: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    better: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Forecast(Described):
    """Components that are held at the same time. Print it; `facts` is for programs."""

    shape: str
    components: tuple[Component, ...]
    limit: Limit
    reasons: Reasons = Reasons()
    moment: str = "at the peak"
    remark: tuple[str, str] | None = None  # an additional line
    details: dict[str, Any] = field(default_factory=dict)
    notes: tuple[tuple[str, str], ...] = ()  # lines about the machine

    @property
    def low_bytes(self) -> int:
        return sum(component.low_bytes for component in self.components)

    @property
    def high_bytes(self) -> int:
        return sum(component.high_bytes for component in self.components)

    @property
    def verdict(self) -> Verdict:
        """Of the high end: a forecast that may be too careful is better than one that may be too bold."""
        return verdict_of(self.high_bytes, self.limit.bytes)

    @property
    def verdict_low(self) -> Verdict:
        """Of the low end."""
        return verdict_of(self.low_bytes, self.limit.bytes)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The table and the judgement, as (label, text)."""
        rows = [(c.name, format_both(c.low_bytes, c.high_bytes), c.why) for c in self.components]
        rows.append((self.moment, format_both(self.low_bytes, self.high_bytes), "all of it together"))
        rows.append(("limit", format_both(self.limit.bytes), self.limit.reason))
        width = max(len(size) for _, size, _ in rows)
        lines = [(name, f"{size:<{width}}  {why}") for name, size, why in rows]
        if self.remark is not None:
            lines.append(self.remark)
        lines += self.notes
        lines.append(("verdict", self._judgement()))
        lines += [("for a crash", text) for text in self.reasons.for_crash]
        lines += [("against", text) for text in self.reasons.against]
        lines += [("better", text) for text in self.reasons.better]
        return lines

    def _judgement(self) -> str:
        """Say whether it fits, at both ends of the range if they differ."""
        high = self._fit(self.high_bytes, self.verdict)
        if self.verdict_low != self.verdict:
            low = self._fit(self.low_bytes, self.verdict_low)
            return f"{high}, if the high end comes true; {low}, if the low end does"
        return high + self._base()

    def _fit(self, need_bytes: int, verdict: Verdict) -> str:
        need, limit = format_size(need_bytes), format_size(self.limit.bytes)
        share = f"({_percent(need_bytes / self.limit.bytes)} %, risk {verdict})"
        if need_bytes > self.limit.bytes:
            return f"does not fit: needs {need}, {limit} available {share}"
        words = {Verdict.LOW: "fits", Verdict.MODERATE: "fits closely", Verdict.HIGH: "hardly fits"}
        return f"{words[verdict]}: needs {need} of {limit} {share}"

    def _base(self) -> str:
        """LOW says nothing without what the process holds besides: a model may be most of it."""
        if self.verdict is not Verdict.LOW or self.shape not in ("concat", "map", "embed-files"):
            return ""
        base = next((part for part in self.components if part.name == "process"), None)
        if base is None:
            return ", for a base of nothing: the process, its libraries and its model come on top (--base)"
        assumed = "" if base.why.startswith("--base") else " (assumed: --base says it better)"
        low, high = format_size(base.low_bytes), format_size(base.high_bytes)
        return f", for a base of {low if low == high else f'{low} to {high}'}{assumed}"

    @property
    def facts(self) -> dict[str, Any]:
        """The forecast for programs."""
        return {
            "shape": self.shape,
            "components": [
                {"name": c.name, "low_bytes": c.low_bytes, "high_bytes": c.high_bytes, "why": c.why}
                for c in self.components
            ],
            "low_bytes": self.low_bytes,
            "high_bytes": self.high_bytes,
            "limit_bytes": self.limit.bytes,
            "limit_reason": self.limit.reason,
            "verdict": str(self.verdict),
            "verdict_low": str(self.verdict_low),
            "for_crash": list(self.reasons.for_crash),
            "against": list(self.reasons.against),
            "better": list(self.reasons.better),
            **self.details,
        }


def _percent(share: float) -> str:
    """With a decimal where rounding would move it onto a verdict's border."""
    near = min(abs(share - MODERATE_FROM), abs(share - HIGH_ABOVE)) < 0.005
    return f"{100 * share:,.{1 if near else 0}f}"


Size = str | int | float

# An interpreter with `datasets` (90 MB measured), and the memory that a forked worker does not share.
PROCESS_BYTES = (90_000_000, 150_000_000)
WORKER_BYTES = (20_000_000, 130_000_000)
# A shard's files as Python objects and as Arrow arrays, then the row group that the Parquet writer encodes,
# and the page of a large file: it is built, copied and compressed in one piece.
EMBED_FACTORS = (2, 3)
ROW_GROUP_FACTORS = (1, 2)
LARGEST_FILE_FACTORS = (3, 6)
# A batch as Python objects; what the function returns, as Python objects and twice as Arrow arrays.
INPUT_FACTORS = (1.0, 2.0)
OUTPUT_FACTORS = (3.0, 6.0)

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
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
    """Files are read into a table, shard by shard, and the table is then written as Parquet.

    `row_group` is what the writer encodes at a time (the whole shard if it is not given).
    """
    largest = 0 if largest_file is None else parse_size(largest_file)
    shard = max(parse_size(shard_bytes), largest)  # a shard holds at least one file
    group = shard if row_group is None else min(max(parse_size(row_group), largest), shard)
    count = _count("workers", workers)
    times = f"{count} × " if count > 1 else ""
    processes = _processes(base, count)
    held = [
        Component(
            "files embedded",
            *_times(count * shard, EMBED_FACTORS),
            f"{times}2 to 3 × {format_size(shard)}: a shard's files as Python objects and as Arrow arrays",
        ),
        Component(
            "row group",
            *_times(count * group, ROW_GROUP_FACTORS),
            f"{times}1 to 2 × {format_size(group)}: what the Parquet writer encodes at a time",
        ),
    ]
    page = Component(
        "largest file",
        *_times(count * largest, LARGEST_FILE_FACTORS),
        f"{times}3 to 6 × {format_size(largest)}: its page is built, copied and compressed in one piece",
    )
    limit = watch_limit(memory)
    better = ["`brim build` splices files into shards without holding them: some 60 MB, whatever their size"]
    room = MODERATE_FROM * limit.bytes - page.high_bytes - sum(part.high_bytes for part in processes)
    fits = int(room / count / (EMBED_FACTORS[1] + ROW_GROUP_FACTORS[1]))
    if max(largest, 1) <= fits < shard:
        better.append(f"shards of at most {format_size(fits)} would be LOW")
    unknown = "a large file takes 3 to 6 times its size while its page is written: give --largest-file"
    reasons = Reasons(
        for_crash=() if largest else (unknown,),
        against=("the files of one shard are released before the next: the largest shard decides, not the dataset",),
        better=tuple(better),
    )
    parts = (*processes, *held, page) if largest else (*processes, *held)
    details = {"shard_bytes": shard, "row_group_bytes": group, "largest_file_bytes": largest or None, "workers": count}
    return Forecast("embed-files", parts, limit, reasons, details=details)


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
    """`datasets.map` or a tokeniser: batches in, batches out, in some workers.

    `per_worker` is what each worker holds besides (a tokeniser, a model); `factor`, measured on a small sample,
    takes the place of the usual ranges.
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
    batches = (
        Component(
            "batches in",
            *_times(count * batch * row, into),
            f"{times}{batch:,} rows × {format_size(row)} × {_span(into)}: as Python objects",
        ),
        Component(
            "batches out",
            _times(count * batch * out, outof)[0],
            _times(count * gathered * out, outof)[1],
            f"{times}{rows} rows × {format_size(out)} × {_span(outof)}: as Python objects, then as Arrow arrays",
        ),
    )
    risks = ["rows differ: a batch of the longest rows decides, and the average hides it"]
    if per_worker is None:
        risks.append("what the function itself holds (a tokeniser, a model) is not counted: give --per-worker")
    against = ["input and output files are memory-mapped: they add to RSS, but the kernel takes them back"]
    if gathered > batch:
        against.append("`datasets` 5.2 writes every batch of a batched map at once, so the low end is the likely one")
    limit = watch_limit(memory)
    room = MODERATE_FROM * limit.bytes - sum(part.high_bytes for part in fixed)
    fits = int(room / count / (row * into[1] + out * outof[1]))
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
    """Batches of vectors are appended to lists, one list for each of `dims`, and joined at the end.

    `copies` is how often the data is held at the end: as pieces and as one array (2); 3 if saving copies again.
    """
    count = _count("rows", rows)
    listed = [dims] if isinstance(dims, int | str) else list(dims)
    texts = [text for one in listed for text in (one.split(",") if isinstance(one, str) else [one])]
    widths = [_count("dims", text) for text in texts]
    if not widths:
        raise InputError("Give the length of the vectors.", hint="Write it like --dims=768 or --dims=768,1024.")
    width = sum(widths)
    if dtype not in DTYPE_BYTES:
        raise ArgumentError(f"--dtype takes {', '.join(DTYPE_BYTES)}, not {dtype!r}.", option="dtype")
    data = count * width * DTYPE_BYTES[dtype]
    shown = " + ".join(map(str, widths))
    shown = f"({shown})" if len(widths) > 1 else shown
    parts = [] if base is None else [_given_base(base)]
    again = "again" if copies == 2 else f"{copies - 1} times more"
    parts += [
        Component.exactly(
            "pieces in lists", data, f"{count:,} rows × {shown} numbers × {DTYPE_BYTES[dtype]} bytes ({dtype})"
        ),
        Component.exactly(
            "joined copy", data * (copies - 1), f"{again}: the pieces are kept until the array is complete"
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
            f"brim.TensorWriter, brim.save_file and brim embed write each batch where it belongs: a batch of 512 rows "
            f"({format_size(512 * width * DTYPE_BYTES[dtype])}) and about 25 MB, whatever the number of rows",
        ),
    )
    details = {"data_bytes": data, "rows": count, "dims": widths, "dtype": dtype}
    return Forecast("concat", tuple(parts), watch_limit(memory), reasons, "at the concatenation", details=details)


def _processes(base: Size | None, workers: int) -> list[Component]:
    first = Component("process", *PROCESS_BYTES, "Python with `datasets`") if base is None else _given_base(base)
    if workers == 1:
        return [first]
    why = f"{workers} × {format_size(WORKER_BYTES[0])} to {format_size(WORKER_BYTES[1])} that they do not share"
    return [first, Component("workers", *_times(workers, WORKER_BYTES), why)]


def _given_base(base: Size) -> Component:
    return Component.exactly("process", parse_size(base), "--base: what the process holds besides")


def _times(size: float, factors: tuple[float, float]) -> tuple[int, int]:
    return round(size * factors[0]), round(size * factors[1])


def _span(factors: tuple[float, float]) -> str:
    low, high = (f"{factor:g}" for factor in factors)
    return low if low == high else f"{low} to {high}"


def _count(name: str, value: int | str) -> int:
    """Return a number of rows, workers or dimensions; texts like "3M" are numbers too."""
    count = parse_count(value) if isinstance(value, str) else value
    if not 1 <= count < 2**53:
        raise ArgumentError(f"--{name} takes a number above zero, not {value!r}.", option=name)
    return count

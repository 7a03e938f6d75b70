"""The arithmetic of forecasts: exact results where possible, otherwise a range."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.api.forecast_api import forecast, largest_shard
from brim.errors import InputError
from brim.memory.limit import Limit
from brim.memory.meter import Machine, Usage
from brim.monitor.forecasts.measured import (
    MeasuredPoint,
    Surroundings,
    TreeUsage,
    addition,
    forecast_step,
    parse_fraction,
    read_point,
    surroundings,
    theil_sen,
    tree_usage,
    upper_bend,
)
from brim.monitor.forecasts.shapes import Component, Forecast, Verdict, verdict_of
from brim.sizes import format_both, parse_size

GB = 10**9
MB = 10**6


def line(estimate: Forecast, label: str) -> str:
    return dict(estimate.lines)[label]


def test_the_case_of_two_point_eight_million_rows() -> None:
    """2,857,545 × (768 + 1024) × 4 bytes are 20.5 GB (19.1 GiB), and concatenation needs 41.0 GB (38.2 GiB)."""
    estimate = forecast("concat", rows=2_857_545, dims=[768, 1024], memory="64GB")
    assert estimate.details["data_bytes"] == 2_857_545 * 1792 * 4 == 20_482_882_560
    assert estimate.low_bytes == estimate.high_bytes == 40_965_765_120
    assert line(estimate, "pieces in lists").startswith("20.5 GB (19.1 GiB)")
    assert "2,857,545 rows × (768 + 1024) numbers × 4 bytes" in line(estimate, "pieces in lists")
    assert line(estimate, "at the concatenation").startswith("41.0 GB (38.2 GiB)")
    assert line(estimate, "verdict").startswith(
        "fits: needs 41.0 GB of 64.0 GB (64 %, risk LOW), for a base of nothing"
    )
    assert forecast("concat", rows=2_857_545, dims=[768, 1024], memory="40GB").verdict is Verdict.HIGH


def test_concat_counts_what_it_is_told() -> None:
    """The sum includes the data type, a third copy and the base memory of the process."""
    plain = forecast("concat", rows=1000, dims=100, dtype="float16", memory="1GB")
    assert plain.high_bytes == 2 * 1000 * 100 * 2
    extra = forecast("concat", rows=1000, dims=100, dtype="float16", copies=3, base="1MB", memory="1GB")
    assert extra.high_bytes == 3 * 1000 * 100 * 2 + MB


@pytest.mark.parametrize(
    ("fraction", "verdict"),
    [(0.0, "LOW"), (0.6999, "LOW"), (0.70, "MODERATE"), (0.90, "MODERATE"), (0.9001, "HIGH"), (5.0, "HIGH")],
)
def test_verdicts_change_at_70_and_90_percent(fraction: float, verdict: str) -> None:
    """LOW is below 70 %, MODERATE is up to and including 90 %, and HIGH is above."""
    assert verdict_of(fraction * 1000, 1000) == verdict


def test_a_range_across_a_border_is_said() -> None:
    """The high end of a range decides, and both verdicts are named if they differ."""
    estimate = Forecast("x", (Component("a", 50, 95, "why"),), Limit(100, "r"))
    assert (estimate.verdict_low, estimate.verdict) == (Verdict.LOW, Verdict.HIGH)
    assert (
        line(estimate, "verdict") == "hardly fits: needs 95 B of 100 B (95 %, risk HIGH), if the high end comes true; "
        "fits: needs 50 B of 100 B (50 %, risk LOW), if the low end does"
    )
    same = Forecast("x", (Component("a", 10, 20, "why"),), Limit(100, "r"))
    assert line(same, "verdict") == "fits: needs 20 B of 100 B (20 %, risk LOW)"
    close = Forecast("x", (Component.exactly("a", 899, "why"),), Limit(1000, "r"))
    assert line(close, "verdict") == "fits closely: needs 899 B of 1.00 KB (89.9 %, risk MODERATE)"


def test_sizes_in_both_units() -> None:
    """A range repeats its unit only if the two ends have different units."""
    assert format_both(20_482_882_560) == "20.5 GB (19.1 GiB)"
    assert format_both(2 * GB, 3 * GB) == "2.00 to 3.00 GB (1.86 to 2.79 GiB)"
    assert format_both(900 * MB, 1.8 * GB) == "900 MB to 1.80 GB (858 MiB to 1.68 GiB)"


def test_embed_files_adds_its_parts() -> None:
    """Each worker needs 2 to 3 times the shard, 1 to 2 times the row group and 3 to 6 times the largest file."""
    estimate = forecast(
        "embed-files", shard_bytes="1GB", row_group="100MB", largest_file="10MB", base="1MB", memory="32GB"
    )
    assert estimate.low_bytes == MB + 2 * GB + 100 * MB + 30 * MB
    assert estimate.high_bytes == MB + 3 * GB + 200 * MB + 60 * MB
    four = forecast("embed-files", shard_bytes="1GB", largest_file="10MB", workers=4, base="1MB", memory="32GB")
    workers = next(part for part in four.components if part.name == "workers")
    assert four.high_bytes - workers.high_bytes == MB + 4 * (3 * GB + 2 * GB + 60 * MB)
    assert four.verdict_low is Verdict.LOW


@pytest.mark.parametrize(
    ("files", "file_mb", "row_group", "measured_mb"),
    # Peak memory of `datasets` 5.2 with pyarrow 26 in total: with pq.write_table, and with to_parquet.
    [
        (200, 1, None, 1014),
        (20, 10, None, 939),
        (4, 50, None, 1152),
        (1, 200, None, 1890),
        (600, 1, None, 2518),
        (200, 1, "100MB", 747),
        (20, 10, "100MB", 805),
        (4, 50, "100MB", 743),
        (1, 200, "100MB", 2101),
        (600, 1, "100MB", 1813),
    ],
)
def test_embed_files_agrees_with_what_was_measured(
    files: int, file_mb: int, row_group: str | None, measured_mb: int
) -> None:
    """Every measurement lies within its predicted range."""
    estimate = forecast(
        "embed-files", shard_bytes=files * file_mb * MB, largest_file=file_mb * MB, row_group=row_group, memory="64GB"
    )
    assert estimate.low_bytes <= measured_mb * MB <= estimate.high_bytes


def test_the_advice_is_right() -> None:
    """A suggested shard or batch size with the verdict LOW gets LOW when it is forecast itself."""
    big = forecast("embed-files", shard_bytes="20GB", largest_file="10MB", memory="10GB")
    size = next(text for text in big.reasons.better if "shards of at most" in text).split("at most ")[1]
    size = size.removesuffix(" would be LOW").replace(" ", "")
    smaller = forecast("embed-files", shard_bytes=parse_size(size) * 0.99, largest_file="10MB", memory="10GB")
    assert (big.verdict, smaller.verdict) == (Verdict.HIGH, Verdict.LOW)
    wide = forecast("map", row_bytes="5MB", workers=3, memory="10GB")
    batch = int(wide.reasons.better[0].split()[1])
    less = forecast("map", row_bytes="5MB", workers=3, batch_size=batch, writer_batch_size=batch, memory="10GB")
    extra = {"batch_size": 2 * batch, "writer_batch_size": 2 * batch}
    assert (wide.verdict, less.verdict) == (Verdict.HIGH, Verdict.LOW)
    assert forecast("map", row_bytes="5MB", workers=3, memory="10GB", **extra).verdict is not Verdict.LOW


def test_map_multiplies() -> None:
    """Memory of a map is workers × (batch × input + written rows × output), with the measured factor."""
    estimate = forecast(
        "map", row_bytes=1000, output_bytes=500, batch_size=10, writer_batch_size=40, factor=2, base=1, memory="1GB"
    )
    assert estimate.low_bytes == 1 + 2 * (10 * 1000 + 10 * 500)
    assert estimate.high_bytes == 1 + 2 * (10 * 1000 + 40 * 500)
    model = forecast("map", row_bytes=1000, workers=3, per_worker="1MB", base=1, memory="1GB")
    assert Component.exactly("in each worker", 3 * MB, "3 × 1.00 MB for the function") in model.components


numbers = st.integers(1, 10**6)


@given(numbers, numbers, numbers, st.integers(1, 8))
def test_more_rows_never_take_less(rows: int, more: int, width: int, workers: int) -> None:
    """Increasing an input never lowers either end of the forecast."""

    def ends(estimate: Forecast) -> tuple[int, int]:
        return estimate.low_bytes, estimate.high_bytes

    def grows(shape: Any, name: str, **remainder: Any) -> None:
        before = ends(forecast(shape, **{name: rows}, memory="1GB", **remainder))
        after = ends(forecast(shape, **{name: rows + more}, memory="1GB", **remainder))
        assert before[0] <= after[0]
        assert before[1] <= after[1]
        assert before[0] <= before[1]

    grows("concat", "rows", dims=width)
    grows("concat", "dims", rows=width)
    grows("map", "row_bytes", workers=workers)
    grows("map", "batch_size", row_bytes=width, workers=workers)
    grows("embed-files", "shard_bytes", workers=workers, largest_file=width)
    grows("embed-files", "workers", shard_bytes=width)


@pytest.mark.parametrize(
    ("shape", "given_numbers", "arguments"),
    [
        ("nothing", {}, "embed-files, map, concat"),
        ("concat", {"row": 1}, "It takes: rows, dims, dtype, copies, base, memory"),
        ("concat", {"rows": 0, "dims": 1}, "rows= takes a number above zero"),
        ("concat", {"rows": 1.5, "dims": 1}, "rows= takes a whole number above zero"),
        ("concat", {"rows": 1, "dims": []}, "length of the vectors"),
        ("concat", {"rows": 1, "dims": 1, "dtype": "x"}, "dtype= takes"),
        ("concat", {"rows": 1, "dims": 1, "copies": 1}, "copies= takes a number of at least 2"),
        ("map", {"row_bytes": "many"}, "takes a size such as 500MB or 2GB"),
        ("map", {"row_bytes": 1, "factor": 0}, "above zero"),
        ("map", {"row_bytes": 1, "factor": float("inf")}, "factor= takes a number"),
        ("embed-files", {}, "SOURCE"),
        ("embed-files", {"shard_bytes": 1, "num_shards": 2}, "SOURCE"),
        ("embed-files", {"shard_bytes": 1, "source": "x"}, "Leave out one of them"),
        ("sampled", {}, "two different fractions"),
        ("sampled", {"points": ["1/8=1GB", "1/8=2GB"]}, "two different fractions"),
        ("sampled", {"points": ["1/8"]}, "not a point"),
        ("sampled", {"points": ["0=1GB", "1=1GB"]}, "not a fraction"),
    ],
)
def test_wrong_numbers_are_refused(shape: Any, given_numbers: dict[str, Any], arguments: str) -> None:
    """Input without a possible forecast is an input error that names the missing or wrong value."""
    with pytest.raises(InputError) as caught:
        forecast(shape, **given_numbers)
    assert arguments in str(caught.value)


def test_datasets_cuts_by_rows() -> None:
    """The largest shard is the one with the most bytes among shards of equal row counts."""
    rows = np.array([1, 1, 1, 9, 9, 1])
    assert largest_shard(rows, 1) == 22
    assert largest_shard(rows, 3) == 10
    assert largest_shard(rows, 99) == 9


HELD = TreeUsage(4242, "python3", 1, Usage(150 * GB, 2 * GB, 0, 7 * GB), 152 * GB)


def test_a_running_process_among_others() -> None:
    """Memory of other processes counts and file pages do not: 162 GB in use and 19 GB more are 181 GB of 188 GB."""
    around = Surroundings(162 * GB, Limit(188 * GB, "all of this machine's memory"))
    estimate = forecast_step(HELD, Component.exactly("next step", 19 * GB, "--adds"), around, Machine())
    assert line(estimate, "sum").startswith("162 + 19 = 181 of 188 GB")
    assert [part.high_bytes for part in estimate.components] == [152 * GB, 10 * GB, 19 * GB]
    assert estimate.verdict is Verdict.HIGH
    assert "anonymous 150 GB, shared 2.00 GB; 7.00 GB of file pages do not count" in line(estimate, "process 4242")


def test_a_running_process_against_its_own_limit() -> None:
    """With a separate limit for the process, memory of other processes does not count."""
    step, around = Component.exactly("next step", 8 * GB, "--adds"), Surroundings(0, Limit(200 * GB, "--memory"))
    estimate = forecast_step(HELD, step, around, Machine(), is_own_limit=True)
    assert estimate.high_bytes == 160 * GB
    assert estimate.verdict is Verdict.MODERATE


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(10**6, 10**12))
def test_the_addition_adds_up(now: int, added: int, limit: int) -> None:
    """The printed sum equals the sum of the printed parts."""
    tokens = addition(now, added, limit).split()
    assert float(tokens[0]) + float(tokens[2]) == pytest.approx(float(tokens[4]))
    unit = {"GB:": GB, "MB:": MB}[tokens[7]]
    assert float(tokens[4]) * unit == pytest.approx(now + added, abs=unit)


def test_the_cgroup_of_a_process_counts(tmp_path: Path) -> None:
    """The limit is that of the machine or of a cgroup, with the usage of each (a v1 tree of plain files)."""
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/cgroup").write_text("3:memory:/job\n")
    folder = tmp_path / "sys/fs/cgroup/memory/job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{4 * GB}")
    (folder / "memory.usage_in_bytes").write_text(f"{3 * GB}")
    (folder / "memory.stat").write_text(f"total_inactive_file {GB}\ntotal_active_file 0\n")
    machine = Machine(total_bytes=100 * GB, available_bytes=90 * GB)
    actual = surroundings(7, machine, tmp_path)
    assert [(item.used_bytes, item.limit.bytes) for item in actual] == [(10 * GB, 100 * GB), (2 * GB, 4 * GB)]
    assert "/job" in actual[1].limit.reason


def test_what_this_process_holds_is_seen() -> None:
    """50 MB of anonymous memory appear in the memory of the process tree."""
    before = tree_usage(os.getpid()).high_bytes
    # not from a heap that may have free space
    with mmap.mmap(-1, 50 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for start in range(0, 50 * MB, MB):
            block[start : start + MB] = b"x" * MB
        assert 40 * MB < tree_usage(os.getpid()).high_bytes - before < 70 * MB


def test_a_line_is_found_through_noise() -> None:
    """One outlier does not change the fitted line."""
    runs = [MeasuredPoint(f, round(500 * MB + f * 16 * GB)) for f in (1 / 64, 1 / 32, 1 / 16, 1 / 8)]
    fit = theil_sen([*runs, MeasuredPoint(1 / 16, 9 * GB)])
    assert fit.fixed_bytes == pytest.approx(500 * MB, rel=0.2)
    assert fit.slope == pytest.approx(16 * GB, rel=0.05)
    estimate = forecast("sampled", points=[(run.fraction, run.peak_bytes) for run in runs], memory="64GB")
    assert 15 * GB < estimate.low_bytes < 16.5 * GB < estimate.high_bytes < 18 * GB
    assert not estimate.details["curves_upwards"]


def test_two_points_are_not_trusted_too_far() -> None:
    """Two runs always lie on a line, so the range is a quarter of the slope wider in both directions."""
    estimate = forecast("sampled", points=["1/4=1GB", "1/2=2GB"], memory="10GB")
    assert (estimate.low_bytes, estimate.high_bytes) == (3_500_000_000, 4_500_000_000)
    assert any("± 25%" in text for text in estimate.reasons.for_crash)


def test_a_bend_upwards_is_noticed() -> None:
    """Memory that grows with the square of the data is forecast with a quadratic term, not with a line."""
    runs = [(f, round(GB + f * f * 64 * GB)) for f in (1 / 16, 1 / 8, 1 / 4)]
    estimate = forecast("sampled", points=runs, memory="64GB")
    assert estimate.details["curves_upwards"]
    assert 65 * GB < estimate.high_bytes < 75 * GB  # an error of 2 % in a peak has this much effect at such a distance
    assert any("bend upwards" in text for text in estimate.reasons.for_crash)


def test_levelling_off_is_no_bend() -> None:
    """A curve that flattens, or noise of one percent, is not treated as quadratic growth."""
    assert upper_bend([MeasuredPoint(f, round(f**0.5 * GB)) for f in (0.1, 0.2, 0.4)], 1) is None
    assert (
        upper_bend([MeasuredPoint(0.1, 1000 * MB), MeasuredPoint(0.2, 1010 * MB), MeasuredPoint(0.4, 1040 * MB)], 1)
        is None
    )


@given(st.lists(st.tuples(st.sampled_from([1 / 32, 1 / 16, 1 / 8, 1 / 4]), st.integers(1, 10**12)), min_size=2))
def test_any_points_give_a_range(points: list[tuple[float, int]]) -> None:
    """Two or more measured fractions give a range that starts at the measured memory; fewer are refused."""
    if len({fraction for fraction, _ in points}) < 2:
        with pytest.raises(InputError):
            forecast("sampled", points=points, memory="1GB")
        return
    estimate = forecast("sampled", points=points, memory="1GB")
    assert estimate.components[0].low_bytes <= estimate.low_bytes <= estimate.high_bytes


@pytest.mark.parametrize(("text", "value"), [("1/32", 1 / 32), ("3%", 0.03), (" 0.5 ", 0.5), (2, 2.0), ("1e-1", 0.1)])
def test_fractions_are_read_as_people_write_them(text: str | float, value: float) -> None:
    """A fraction is a quotient, a number or a percentage."""
    assert parse_fraction(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "x", "1/0", "-1/2", "0", "nan", float("inf"), "1/2/3", "1/", "%", "1e9999999999"])
def test_nonsense_is_no_fraction(text: str | float) -> None:
    """A fraction that is not a number above zero is refused."""
    with pytest.raises(InputError, match="1/32"):
        parse_fraction(text)


def log(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"type": "sam')
    return path


def test_a_log_gives_a_point(tmp_path: Path) -> None:
    """The last run in a log counts, a torn line is ignored, and the peak of a killed run is marked as uncertain."""
    head, end = {"type": "head", "fraction": 0.25}, {"type": "end", "peak_bytes": 5 * MB, "exit_code": 0}
    old = {"type": "head", "fraction": 0.5}
    assert read_point(log(tmp_path / "a", old, {"type": "end", "peak_bytes": 1}, head, end)) == MeasuredPoint(
        0.25, 5 * MB
    )
    assert "exit code 3" in read_point(log(tmp_path / "b", head, {**end, "exit_code": 3})).doubt
    assert "stopped for its memory" in read_point(log(tmp_path / "c", head, {**end, "stopped": "kill"})).doubt


@pytest.mark.parametrize(
    ("entries", "arguments"),
    [
        ([], "not a log"),
        ([{"type": "head", "fraction": None}, {"type": "end", "peak_bytes": 1}], "point='1/32=1.2GB'"),
        ([{"type": "head", "fraction": 0.5}], "cut off"),
    ],
)
def test_a_log_that_does_not_say_is_refused(tmp_path: Path, entries: list[dict[str, Any]], arguments: str) -> None:
    """A log without a run, a fraction or an end is an error that names the file and the fix."""
    with pytest.raises(InputError, match=r"log\.jsonl") as caught:
        read_point(log(tmp_path / "log.jsonl", *entries))
    assert arguments in str(caught.value)


def test_the_next_step_from_rows_and_dims() -> None:
    """The forecast adds one copy for the concatenation of the next step; adding --adds as well is refused.

    The output also breaks down the memory of the machine.
    """
    estimate = forecast("pid", pid=os.getpid(), rows=1_000_000, dims=[768, 1024])
    step = estimate.components[-1]
    assert step.high_bytes == 1_000_000 * (768 + 1024) * 4
    text = str(estimate)
    assert "after the kernel has taken page cache back" in text
    assert "need not be contiguous" in text
    with pytest.raises(InputError):
        forecast("pid", pid=os.getpid(), rows=10, dims=[3], adds="1GB")


def test_low_is_never_said_without_its_base() -> None:
    """A verdict of LOW states the base memory that it assumes for the process."""
    assert "LOW" in str(forecast("concat", rows=10, dims=[8], memory="1GB"))
    assert "for a base of nothing" in str(forecast("concat", rows=10, dims=[8], memory="1GB"))
    assert "for a base of 100 MB" in str(forecast("concat", rows=10, dims=[8], memory="1GB", base="100MB"))
    assert "assumed" in str(forecast("map", row_bytes=100, memory="10GB"))


def test_falling_points_do_not_hide_the_highest_peak() -> None:
    """A forecast for all data is never below the peak of a measured subset, here 3.4 GB for an eighth."""
    estimate = forecast("sampled", points=["1/8=3.4GB", "1/4=1.2GB"], memory="2GB")
    assert estimate.high_bytes >= 3_400_000_000
    assert estimate.verdict is Verdict.HIGH
    assert any("needed 3.40 GB" in text for text in estimate.reasons.for_crash)


def test_a_shard_is_at_least_as_large_as_its_largest_file() -> None:
    estimate = forecast("embed-files", shard_bytes="1MB", largest_file="300MB", memory="1GB")
    assert estimate.details["shard_bytes"] == estimate.details["largest_file_bytes"] == 300_000_000
    assert estimate.verdict is Verdict.HIGH


def test_counts_may_be_written_as_people_do() -> None:
    plain = forecast("concat", rows=3_000_000, dims=[768, 1024], memory="64GB")
    assert forecast("concat", rows="3M", dims="768,1024", memory="64GB").facts == plain.facts

"""The report: reading and thinning logs, the content of the page, and protection against harmful input."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.errors import InputError, VerificationError
from brim.memory.limit import Limit
from brim.monitor.report import run_summary
from brim.monitor.report.page import live_parts, render, write_page
from brim.monitor.report.progress_renderers import PlainLines, TerminalBar
from brim.monitor.report.recording import RunRecorder, recorded
from brim.monitor.run_log import MOST_SAMPLES, SeriesPoint, read_run, thin
from brim.progress import Progress
from tests.generators import memory_log
from tests.generators.memory_log import GB

NOW = memory_log.BEGAN + 10**6
SERIES = ("total_bytes", "anon_bytes", "shmem_bytes", "swap_bytes", "file_bytes")
HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\"'&\u2028"


class Page(HTMLParser):
    """Collects the elements of a page; fails on tags that are not closed or not nested correctly."""

    EMPTY = ("meta", "rect", "line", "path")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def scripts(self) -> list[str]:
        return [text for tag, text in self.texts if tag == "script"]


def page_of(tmp_path: Path, entries: list[dict[str, Any]], cut_bytes: int = 0) -> str:
    return render(read_run(memory_log.write(tmp_path / "run.jsonl", entries, cut_bytes)), NOW)


def test_a_log_is_read(tmp_path: Path) -> None:
    """Head, samples, events, processes and end are read as they were written."""
    run = read_run(memory_log.write(tmp_path / "run.jsonl", memory_log.leaking()))
    assert run.head.command == ("python", "train.py", "--epochs", "8")
    assert run.head.thresholds == (("alert", 3_200_000_000), ("stop", 3_600_000_000), ("kill", 3_880_000_000))
    assert (run.sample_count, len(run.samples), run.bad_lines) == (500, 500, 0)
    assert [event.kind for event in run.events] == ["start", "exhaustion", "alert", "stop", "stop", "term", "kill"]
    assert run.events[1].x == pytest.approx(300)
    assert {process.pid for process in run.processes} == {4242, 4250, 4251, 4252, 4253}
    assert run.processes[0].peak_bytes >= (run.processes[0].last_bytes or 0) > GB
    assert run.end is not None
    assert (run.end.signal, run.end.stopped) == (9, "kill")
    assert run.peak is not None
    assert run.peak.total_bytes == run.end.peak_bytes
    assert run.trend.verdict == "leak"


@pytest.mark.parametrize(
    ("entries", "grade", "message"),
    [
        (memory_log.fine(), "fine", "57 % of its limit"),
        (memory_log.leaking(), "killed", "Killed by brim"),
        (memory_log.killed_by_kernel(), "killed", "Died of SIGKILL"),
        (memory_log.leaking()[:-1], "cut", "no end"),
        ([memory_log.head(GB), memory_log.sample(1, 0.9 * GB), memory_log.end(2)], "near", "90 % of its limit"),
        ([memory_log.head(), memory_log.sample(1, GB), memory_log.end(2, exit_code=1)], "failed", "Exit code 1"),
        ([memory_log.head(), memory_log.sample(1, GB), memory_log.end(2, signal=15)], "failed", "SIGTERM"),
        ([memory_log.head(), memory_log.sample(1, GB), memory_log.end(2, exit_code=None)], "fine", "Watch ended"),
        (
            [memory_log.sample(1, GB), memory_log.end(2, stopped="stop", why="90 %")],
            "stopped",
            "Stopped by brim (90 %)",
        ),
    ],
)
def test_verdicts(tmp_path: Path, entries: list[dict[str, Any]], grade: str, message: str) -> None:
    """The first sentence states the outcome of the run."""
    run = read_run(memory_log.write(tmp_path / "run.jsonl", entries))
    verdict = run_summary.verdict_of(run, NOW)
    assert verdict.grade == grade
    assert message in verdict.sentence
    assert bool(run_summary.postmortem_of(run, NOW)) == (grade in ("killed", "stopped", "cut"))


def test_a_run_that_may_still_go_on(tmp_path: Path) -> None:
    """A log without an end but with recent samples is not reported as dead."""
    run = read_run(memory_log.write(tmp_path / "run.jsonl", memory_log.fine()[:-1]))
    assert "still runs" in run_summary.verdict_of(run, memory_log.BEGAN + 610).sentence
    assert "still runs" not in run_summary.verdict_of(run, memory_log.BEGAN + 6100).sentence


def test_the_postmortem_is_shown(tmp_path: Path) -> None:
    """Lines that were added after the end are on the page and do not lengthen the run."""
    run = read_run(memory_log.write(tmp_path / "run.jsonl", memory_log.killed_by_kernel()))
    assert run.seconds == pytest.approx(240.4)
    text = render(run, NOW)
    assert "anon-rss:2512345kB" in text
    # a kill of an unknown process on the machine is a hint about this run, not a fact
    assert '<tr class="warn">' in text
    assert '<tr class="grave">' not in text


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [(1.0, 2.0, "25 % more"), (2.0, 3.0, "within that"), (5.0, 6.0, "50 % less"), (2.5, 2.5, "100 % of that")],
)
def test_forecast_against_fact(tmp_path: Path, low: float, high: float, message: str) -> None:
    """The page states the error of the forecast."""
    forecast = {"low_bytes": int(low * GB), "high_bytes": int(high * GB), "verdict": "LOW"}
    entries = [memory_log.head(forecast=forecast), memory_log.sample(1, 2.5 * GB), memory_log.end(2)]
    assert message in page_of(tmp_path, entries)


def test_a_long_command_is_shown_in_part_and_whole(tmp_path: Path) -> None:
    """A long script on the command line is shortened in the heading and complete further down."""
    script = "\n".join(f"step_{n}()" for n in range(200))
    text = page_of(tmp_path, [memory_log.head(command=["python", "-c", script]), memory_log.sample(0, GB)])
    heading, _, remainder = text.partition("</h1>")
    assert "step_199" not in heading
    assert f"python\n-c\n{script}" in remainder


@pytest.mark.parametrize("cut_bytes", [1, 20, 150, 20_000])
def test_a_cut_log_gives_a_page(tmp_path: Path, cut_bytes: int) -> None:
    """A run that was killed while writing still has its curve and its peak; the torn line is counted."""
    log = memory_log.write(tmp_path / "run.jsonl", memory_log.leaking()[:-1], cut_bytes)
    run = read_run(log)
    assert run.bad_lines == (0 if log.read_bytes().endswith((b"\n", b"}")) else 1)
    assert run.end is None
    Page(render(run, NOW))


def test_what_is_not_a_log_line_is_counted(tmp_path: Path) -> None:
    """Invalid lines are skipped, and the page states their number."""
    log = memory_log.write(tmp_path / "run.jsonl", memory_log.fine())
    good = len(log.read_bytes().splitlines())
    lines = log.read_bytes().splitlines(keepends=True)
    garbage = [
        b"\x00\xff\xfe\n",
        b"[1, 2]\n",
        b'{"type": "sample"}\n',
        b'{"type": "other", "t": 1}\n',
        b"[" * 100_000 + b"\n",
    ]
    log.write_bytes(b"".join([*garbage, *lines[:100], *garbage, *lines[100:]]))
    run = read_run(log)
    assert (run.good_lines, run.bad_lines, run.earlier_runs) == (good, 10, 0)
    assert "10 of the log&#x27;s lines could not be read" in render(run, NOW)


def test_a_line_without_end_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line beyond the maximum length counts as one bad line, and the lines after it are read."""
    monkeypatch.setattr("brim.monitor.log_records._LONGEST_LINE", 1000)
    (tmp_path / "run.jsonl").write_bytes(b"x" * 54_321 + b"\n" + json.dumps(memory_log.sample(0, GB)).encode() + b"\n")
    run = read_run(tmp_path / "run.jsonl")
    assert (run.bad_lines, run.sample_count) == (1, 1)


def test_the_last_of_several_runs_is_shown(tmp_path: Path) -> None:
    """A log with several runs is reported by its last run."""
    run = read_run(memory_log.write(tmp_path / "run.jsonl", [*memory_log.leaking(), *memory_log.fine()]))
    assert (run.sample_count, run.earlier_runs, run_summary.verdict_of(run, NOW).grade) == (600, 1, "fine")


def test_clocks_that_jump(tmp_path: Path) -> None:
    """A clock that moves back or leaps years ahead does not distort the curve; a suspended night is a gap."""
    seconds = [*range(100), *range(-7200, -7100), *range(10**9, 10**9 + 100), *range(10**9 + 30_000, 10**9 + 30_050)]
    run = read_run(memory_log.write(tmp_path / "run.jsonl", [memory_log.sample(when, GB) for when in seconds]))
    assert [round(step) for _, step in run.clock_jumps] == [-7299, 10**9 + 7101]
    assert run.seconds == pytest.approx(99 + 99 + 60 + 99 + 29_901 + 49)
    xs = [sample.x for sample in run.samples]
    assert xs == sorted(xs)
    assert [round(end - start) for start, end in run.gaps] == [29_901]
    text = render(run, NOW)
    assert "went back by" in text
    assert "No samples for 8 h" in text


samples = st.lists(
    st.builds(
        lambda step, sizes: (step, sizes),
        st.floats(0, 1000) | st.just(0.0),
        st.tuples(*[st.integers(0, 10**12)] * 4),
    ),
    min_size=1,
    max_size=400,
)


def timeline(steps: list[tuple[float, tuple[int, ...]]]) -> list[SeriesPoint]:
    created, x = [], 0.0
    for step, (anon, shmem, swap, file) in steps:
        x += step
        created.append(SeriesPoint(x, x, anon, shmem, swap, file, anon + shmem + swap))
    return created


@given(samples, st.integers(20, 200))
def test_thinning_keeps_the_peaks(steps: list[tuple[float, tuple[int, ...]]], most: int) -> None:
    """Thinning keeps the order, the first and last sample and the highest value of every series."""
    before = timeline(steps)
    after = thin(before, most)
    assert len(after) <= most
    remaining = {id(sample) for sample in after}  # samples may be equal, so they are compared by identity
    assert [sample for sample in before if id(sample) in remaining] == after
    assert (after[0], after[-1]) == (before[0], before[-1])
    for name in SERIES:
        assert max(getattr(sample, name) for sample in after) == max(getattr(sample, name) for sample in before)
    assert min(sample.total_bytes for sample in after) == min(sample.total_bytes for sample in before)


def test_a_long_log_keeps_every_peak_that_can_be_seen(tmp_path: Path) -> None:
    """Thinning while reading keeps every peak that stands out over a five-hundredth of the run."""
    spikes = set(range(777, 40_000, 997))
    entries = [memory_log.sample(n, 2 * GB + n if n in spikes else GB + n % 13) for n in range(40_000)]
    run = read_run(memory_log.write(tmp_path / "run.jsonl", entries))
    assert run.sample_count == 40_000
    assert len(run.samples) <= MOST_SAMPLES
    remaining = {sample.total_bytes for sample in run.samples}
    assert {2 * GB + n for n in spikes} <= remaining
    assert "every peak is among them" in render(run, NOW)


def test_many_events_stay_few_and_even(tmp_path: Path) -> None:
    """Of ten thousand shard events a few are shown, spread over the run, and a kill is always shown."""
    shards = [memory_log.event(n, "shard", f"shard {n}") for n in range(10_000)]
    kill = memory_log.event(5000, "kill", "killed it")
    run = read_run(memory_log.write(tmp_path / "run.jsonl", [*shards[:5000], kill, *shards[5000:]]))
    assert run.event_counts == {"shard": 10_000, "kill": 1}
    remaining = [event.x for event in run.events if event.kind == "shard"]
    assert len(remaining) <= 401
    assert (remaining[0], remaining[-1]) == (0, 9999)
    assert max(later_value - earlier for earlier, later_value in pairwise(remaining)) <= 64
    assert "killed it" in render(run, NOW)


def test_nothing_from_a_log_becomes_markup(tmp_path: Path) -> None:
    """Names, commands and texts are shown as text; the only script on the page is brim's."""
    entries = [
        memory_log.head(command=["python", HOSTILE], versions={HOSTILE: HOSTILE}, boot_id=HOSTILE, not_seen=[HOSTILE]),
        memory_log.sample(0, GB, processes=[memory_log.process(1, HOSTILE, GB)]),
        memory_log.event(1, HOSTILE, HOSTILE),
        memory_log.event(1, "postmortem", HOSTILE, lines=[HOSTILE]),
        memory_log.end(2, stopped=HOSTILE, why=HOSTILE),
    ]
    text = page_of(tmp_path, entries)
    page = Page(text)
    assert [tag for tag, _ in page.seen].count("script") == 2
    assert not [tag for tag, _ in page.seen if tag == "img"]
    assert not [attributes for _, attributes in page.seen for name in attributes if name.startswith("on")]
    data = json.loads(page.scripts()[0])
    assert data["events"][0]["text"] == HOSTILE
    assert text.count("<script") == 2


@pytest.mark.parametrize(
    "entries", [memory_log.fine(), memory_log.mapping(), [memory_log.head()], memory_log.building()]
)
def test_the_page_stands_alone(tmp_path: Path, entries: list[dict[str, Any]]) -> None:
    """The page is well-formed, contains no URL except the SVG namespace, and its data parse."""
    text = page_of(tmp_path, entries)
    page = Page(text)
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not [attributes for _, attributes in page.seen if "src" in attributes or "href" in attributes]
    assert len(json.loads(page.scripts()[0])["x"]) == sum(entry["type"] == "sample" for entry in entries)
    policy = next(a["content"] or "" for _, a in page.seen if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=9), v, max_size=3))
FIELDS = {
    "head": ("time", "command", "pid", "limit", "machine", "versions", "ladder", "forecast", "not_seen", "watched"),
    "sample": ("t", "anon_bytes", "swap_bytes", "file_bytes", "total_bytes", "available_bytes", "processes", "gpus"),
    "event": ("t", "kind", "text", "lines"),
    "end": ("t", "exit_code", "signal", "stopped", "why", "peak_bytes", "peak_t", "overshoot_bytes"),
}
INNER = ("bytes", "why", "pid", "name", "index", "used_bytes", "low_bytes", "high_bytes", "alert", "stop", "ram_bytes")
inner = st.dictionaries(st.sampled_from(INNER), values)
strange = values | inner | st.lists(inner, max_size=3) | st.floats(0, 1e12)
lines = st.sampled_from(sorted(FIELDS)).flatmap(
    lambda kind: st.dictionaries(st.sampled_from(FIELDS[kind]), strange).map(
        lambda facts: json.dumps({"type": kind, **facts}).encode()
    )
)


@given(st.lists(lines | st.binary(max_size=40), max_size=12))
def test_no_log_is_too_strange(content: list[bytes]) -> None:
    """Any content of a log is read without an error, and the page is well-formed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "run.jsonl")
        log.write_bytes(b"\n".join(content))
        page = Page(render(read_run(log), NOW))
    json.loads(page.scripts()[0])


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"hello\nworld\n", b"{}\n"])
def test_what_is_no_log_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """A missing, empty or foreign file is an error that names it, and no page is written."""
    log = tmp_path / "run.jsonl"
    if content is not None:
        log.write_bytes(content)
    with pytest.raises(InputError, match=r"run\.jsonl"):
        write_page(log, tmp_path / "run.html")
    with pytest.raises(InputError, match="is not a file"):
        write_page(tmp_path, tmp_path / "run.html")
    assert not list(tmp_path.glob("*.html"))


def test_where_a_page_cannot_be(tmp_path: Path) -> None:
    """A folder, a missing parent folder and the log itself are refused as the page; the log stays unchanged."""
    log = memory_log.write(tmp_path / "run.jsonl", memory_log.fine())
    before = log.read_bytes()
    for html in (tmp_path, tmp_path / "none" / "run.html", log):
        with pytest.raises(InputError):
            write_page(log, html)
    assert log.read_bytes() == before
    write_page(log, tmp_path / "run.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "run.jsonl"]
    assert (tmp_path / "run.html").stat().st_mode & 0o777 == 0o600  # the page contains paths and command lines


class Heard:
    """A listener that records the calls it receives."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, label: str, total_bytes: int, shards: int, limit_bytes: int) -> None:
        self.calls.append("start")

    def advance(self, size: int) -> None:
        self.calls.append("advance")

    def hashed(self, size: int) -> None:
        self.calls.append("hashed")

    def shard(self, name: str, size: int, sha256: str, method: str) -> None:
        self.calls.append("shard")

    def note(self, text: str) -> None:
        self.calls.append("note")

    def finish(self) -> None:
        self.calls.append("finish")


def test_nodes_of_a_cluster_count(tmp_path: Path) -> None:
    """The verdict and the figures use the machine with the highest memory use, not only the driver."""
    nodes = [{"name": "10.0.0.7", "peak_bytes": GB}, {"name": "10.0.0.8", "peak_bytes": int(3.4 * GB)}]
    entries = [memory_log.head(4 * GB), memory_log.sample(1, 90e6, nodes=nodes)]
    entries.append(memory_log.end(2, entries))
    run = read_run(memory_log.write(tmp_path / "run.jsonl", entries))
    verdict = run_summary.verdict_of(run, NOW)
    assert (verdict.grade, "fullest of its machines used 3.40 GB" in verdict.sentence) == ("near", True)
    records = {figure.label: (figure.value, figure.detail) for figure in run_summary.figures_of(run)}
    assert records["fullest node"] == ("3.40 GB", "10.0.0.8, of 2")
    assert records["of the limit"] == ("85 %", "600 MB left at the peak")
    page = render(run, NOW)
    Page(page)
    assert page.index('id="over-time"') < page.index('id="nodes"') < page.index("<footer")


def test_a_peak_between_two_lines_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peak between two lines of the log counts, because memory is sampled more often than lines are written."""
    retained = iter([60, 130, 60, 60, 60])
    now = [0.0]
    monkeypatch.setattr("brim.progress.tree_bytes", lambda: next(retained))
    out = io.StringIO()
    progress = Progress(PlainLines(out), clock=lambda: now[0])
    progress.start("build", 100, 1, GB)
    for _ in range(3):
        now[0] += 1
        progress.advance(10)
    progress.finish()
    assert (progress.peak_bytes, out.getvalue()) == (130, "")


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (80, "286 MB of 1.20 GB .* left .*node max 134 MB"),
        (120, "286 MB of 1.20 GB .* left  1/30 shards .*memory .*, 2 nodes up to 134 MB"),
        (160, "286 MB of 1.20 GB .* left  1/30 shards  300 MB hashed .*memory .* of 10.0 GB, 2 nodes up to 134 MB"),
    ],
)
def test_a_bar_shows_what_fits(
    columns: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bar is always shown, no number is cut off, and the node with the highest memory use is included."""
    for name, value in (("COLUMNS", str(columns)), ("FORCE_COLOR", "1"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    bar = Progress(TerminalBar())
    bar.start("publish", 1_200_000_000, 30, 10 * GB)
    bar.advance(286_000_000)
    bar.hashed(300_000_000)
    bar.nodes({"10.0.0.7": 134_000_000, "10.0.0.8": 101_000_000})
    bar.shard("data/train-00000-of-00030.parquet", 5, "ab", "written")
    bar.finish()
    assert re.search(f"━.* {shown}", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capsys.readouterr().err))
    assert bar.node_peak_bytes == 134_000_000


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (60, "286 MB of 1.20 GB .*mem.*10.0 GB"),
        (80, "286 MB of 1.20 GB .*/s .*left.*mem.*10.0 GB"),
        (100, "286 MB of 1.20 GB .*/s .*left  1,234 rows .*mem.*10.0 GB"),
        (160, "286 MB of 1.20 GB .*/s .*left  1,234 rows  1/30 shards .*memory .* of 10.0 GB"),
    ],
)
def test_bar_keeps_rate_and_memory_limit_and_adds_rows_where_they_fit(
    columns: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("COLUMNS", str(columns)), ("FORCE_COLOR", "1"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    now = [0.0]
    bar = Progress(TerminalBar(), clock=lambda: now[0])
    bar.start("map", 1_200_000_000, 30, 10 * GB)
    now[0] = 9.0
    bar.rows(1_234)
    bar.advance(286_000_000)
    bar.shard("unit 1", 5, "ab", "computed")
    bar.finish()
    drawn = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert re.search(f"━.* {shown}", drawn)
    assert max(len(line) for line in re.split(r"[\r\n]", drawn)) <= columns


def test_a_recording_tells_and_writes(tmp_path: Path) -> None:
    """The previous listener still receives every call, and the log has samples of this process and all events."""
    receiver = Heard()
    progress = Progress(forward_to=receiver)
    recording = RunRecorder(
        progress, tmp_path / "build.jsonl", ["brim", "build"], Limit(GB, "--memory"), {"low_bytes": GB}
    )
    with progress.drawn_by(recording):
        progress.start("build", GB, 2, GB)
        progress.advance(5)
        progress.hashed(5)
        progress.shard("data/train-00000-of-00002.parquet", 5, "ab", "written")
        progress.note("two files are empty")
        progress.finish()
    recording.close(0)
    recording.close(0)
    assert receiver.calls == ["start", "advance", "hashed", "shard", "note", "finish"]
    run = read_run(tmp_path / "build.jsonl")
    assert [(event.kind, event.text) for event in run.events] == [
        ("start", "build: 1.00 GB in 2 shards"),
        ("shard", "data/train-00000-of-00002.parquet: 5 B written"),
        ("note", "two files are empty"),
    ]
    assert run.sample_count >= 2
    assert run.end is not None
    assert run.end.peak_bytes == recording.peak_bytes > 10_000_000
    assert (run.head.limit_bytes, run.head.forecast is not None, run.bad_lines) == (GB, True, 0)


def test_a_recording_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of recorded events is bounded, so a job of a million shards does not fill the disk."""
    monkeypatch.setattr("brim.monitor.report.recording._MAX_EVENTS", 10)
    progress = Progress()
    recording = RunRecorder(progress, tmp_path / "build.jsonl", ["brim"], Limit(GB, "--memory"))
    with progress.drawn_by(recording):
        for number in range(100):
            progress.shard(f"shard {number}", 1, "", "written")
    recording.close(0)
    assert sum(read_run(tmp_path / "build.jsonl").event_counts.values()) == 10
    assert json.loads((tmp_path / "build.jsonl").read_bytes().splitlines()[-1])["events_left_out"] == 90


def test_a_failed_job_has_a_page(tmp_path: Path) -> None:
    """The error is raised to the caller; the page shows it with the exit code."""

    def job() -> None:
        with recorded(Heard(), tmp_path / "build.html", ["brim", "build"], Limit(GB, "--memory")) as listener:
            listener.start("build", 5, 1, GB)
            raise VerificationError("the footer of shard 3 is gone")

    with pytest.raises(VerificationError):
        job()
    text = (tmp_path / "build.html").read_text()
    assert "Exit code 3" in text
    assert "the footer of shard 3 is gone" in text


def test_without_a_report_nothing_is_recorded(tmp_path: Path) -> None:
    """Without a report, the original listener is used unchanged."""
    receiver = Heard()
    with recorded(receiver, None, ["brim"], Limit(GB, "--memory")) as listener:
        assert listener is receiver
    for html in (tmp_path, tmp_path / "none" / "x.html", tmp_path / "x.jsonl"):
        with pytest.raises(InputError), recorded(receiver, html, ["brim"], Limit(GB, "--memory")):
            pass


def test_no_time_is_foretold_before_bytes_move(capsys: pytest.CaptureFixture[str]) -> None:
    """A progress line shows the remaining time only after bytes have been processed."""
    now = [0.0]
    lines = Progress(PlainLines(), clock=lambda: now[0])
    lines.start("build", 1_000_000, 2, 10**9)
    now[0] = 10.0
    lines.advance(0)
    assert " left, " not in capsys.readouterr().err
    now[0] = 20.0
    lines.advance(500_000)
    assert "left, memory" in capsys.readouterr().err


def test_the_shards_of_a_job_have_a_state(tmp_path: Path) -> None:
    """Active and retried shards come first, then finished ones; names are shown as text and counts are complete."""
    progress = Progress()
    recording = RunRecorder(
        progress, tmp_path / "build.jsonl", ["brim"], Limit(GB, "--memory"), stop_file=tmp_path / "my stop"
    )
    stack = contextlib.ExitStack()
    stack.enter_context(progress.drawn_by(recording))
    progress.start("build", GB, 9, GB)
    progress.begin("data/<b>0.parquet", 7_000_000)
    progress.begin("unit 3", 5)
    progress.again("unit 3")
    progress.begin("unit 4", 5)
    progress.again("unit 4")
    progress.begin("unit 4", 5)
    progress.begin("data/1.parquet", 5)
    progress.shard("data/1.parquet", 5_000, "ab", "already there")
    progress.shard("data/2.parquet", 0, "", "damaged")
    stack.close()
    live_log = tmp_path / "live.jsonl"
    recording.close(0)
    lines = (tmp_path / "build.jsonl").read_text().splitlines()
    live_log.write_text("\n".join(lines[:-1]) + "\n")
    shown = live_parts(read_run(live_log), NOW)
    assert f"touch &#x27;{tmp_path}/my stop&#x27;" in shown["header"]
    page = shown["work"]
    assert "build: 2 of 9 done, 2 under way, 5 waiting" in page
    assert "<b>" not in page
    order = ["data/&lt;b&gt;0.parquet", "under way</td>", "unit 4", "under way, tried 2 times", "unit 3"]
    order += [
        "to be tried again (tried 1×)",
        "data/2.parquet",
        ">damaged<",
        "data/1.parquet",
        ">already there<",
        "5.00 KB<",
    ]
    destinations = [page.index(text) for text in order]
    assert destinations == sorted(destinations)
    ended = render(read_run(tmp_path / "build.jsonl"), NOW)
    Page(ended)
    assert "begun and not finished" in ended


def test_a_job_that_was_asked_to_stop_has_not_failed(tmp_path: Path) -> None:
    """Exit code 6 means a requested stop for brim's own job; for any other command it is a failure."""
    for watched, grade in (("job", "stopped"), ("command", "failed")):
        entries = [memory_log.head(GB) | {"watched": watched}, memory_log.sample(1, 9e6)]
        entries.append(memory_log.end(2, entries) | {"exit_code": 6})
        run = read_run(memory_log.write(tmp_path / "run.jsonl", entries))
        assert run_summary.verdict_of(run, NOW).grade == grade


def test_ctrl_c_is_a_stop(tmp_path: Path) -> None:
    """The log of an interrupted job reports a stop, not a failure."""
    with pytest.raises(KeyboardInterrupt), recorded(Progress(), tmp_path / "a.html", ["brim"], Limit(GB, "--memory")):
        raise KeyboardInterrupt
    run = read_run(tmp_path / "a.jsonl")
    assert (run.end.exit_code if run.end else None, run_summary.verdict_of(run, NOW).grade) == (6, "stopped")

"""The report in a real browser and from real jobs: one that finished, one that was killed.

Tests that need Chromium are skipped with a reason if it is missing. tests/monitor/test_report_page.py checks without
a browser that the page is well-formed and self-contained.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import brim
from tests.generators import memory_log

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="the page was not looked at in a browser: no Chromium")
NARROWEST = 380
Browse = Callable[..., str]


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """Open a file in a headless browser and return the resulting page; a script error fails the test."""

    def open_page(path: Path, query: str = "", *options: str) -> str:
        assert CHROMIUM is not None
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr")
        flags += ("--disable-dev-shm-usage",)  # containers have little shared memory
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        command = [CHROMIUM, *flags, profile, "--virtual-time-budget=2000", *options, f"{path.as_uri()}{query}"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert "CONSOLE" not in result.stderr, result.stderr
        return result.stdout

    return open_page


@pytest.fixture
def screenshot(browse: Browse, tmp_path: Path) -> Callable[..., np.ndarray]:
    def take(path: Path, query: str = "", size: tuple[int, int] = (1100, 1400)) -> np.ndarray:
        image = tmp_path / "shot.png"
        browse(path, query, f"--screenshot={image}", f"--window-size={size[0]},{size[1]}")
        return np.asarray(Image.open(image).convert("RGB")).astype(int)

    return take


def page(tmp_path: Path, entries: list[memory_log.Entry], cut_bytes: int = 0) -> Path:
    brim("report", memory_log.write(tmp_path / "run.jsonl", entries, cut_bytes))
    return tmp_path / "run.html"


def near(image: np.ndarray, colour: tuple[int, int, int]) -> int:
    """Count the pixels that are close to a color."""
    return int((np.abs(image - np.array(colour)).max(axis=2) < 8).sum())


def in_frame(tmp_path: Path, script: str, width: int = 900) -> Path:
    """Write a page that shows the report in a frame, runs a script on it and displays the result of the script."""
    holder = tmp_path / "holder.html"
    holder.write_text(
        f"""<body style="margin:0"><iframe src="run.html" width="{width}" height="900" style="border:0"></iframe>
<pre id="out"></pre><script>
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => setTimeout(() => {{
  const page = frame.contentDocument, view = frame.contentWindow, out = {{}};
  {script}
  document.getElementById("out").textContent = JSON.stringify(out);
}}, 200));
</script>"""
    )
    return holder


def outcome(dom: str) -> dict[str, str | int | bool]:
    actual = re.search(r'<pre id="out">(.+?)</pre>', dom)
    assert actual is not None, dom[-2000:]
    return json.loads(html.unescape(actual[1]))  # type: ignore[no-any-return]


@needs_chromium
def test_light_and_dark(tmp_path: Path, screenshot: Callable[..., np.ndarray]) -> None:
    """The curve is drawn in the light and in the dark theme, each with its own colors."""
    path = page(tmp_path, memory_log.leaking())
    light, dark = screenshot(path, "?theme=light"), screenshot(path, "?theme=dark")
    assert tuple(light[2, 2]) == (255, 255, 255)
    assert tuple(dark[2, 2]) == (0x15, 0x18, 0x1C)
    for image, anonymous, shared, limit in (
        (light, (0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00), (0xB3, 0x26, 0x1E)),
        (dark, (0x56, 0xA8, 0xE0), (0xF0, 0xB4, 0x29), (0xFF, 0x7B, 0x72)),
    ):
        assert near(image, anonymous) > 50_000
        assert near(image, shared) > 5_000
        assert near(image, limit) > 1_000


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_system_decides_the_colours(tmp_path: Path, browse: Browse, scheme: str) -> None:
    """Without a choice by the reader, the page follows prefers-color-scheme."""
    path = page(tmp_path, memory_log.fine())
    image = tmp_path / "shot.png"
    setting = f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"
    browse(path, "", f"--screenshot={image}", "--window-size=800,600", setting)
    assert (sum(Image.open(image).convert("RGB").getpixel((2, 2))) > 600) == (scheme == "light")  # type: ignore[arg-type]


@needs_chromium
@pytest.mark.parametrize(
    "entries",
    [
        pytest.param(memory_log.fine(), id="fine"),
        pytest.param(memory_log.leaking(), id="leaking"),
        pytest.param(memory_log.killed_by_kernel(), id="killed"),
        pytest.param(memory_log.mapping(), id="mapping"),
        pytest.param(memory_log.building(), id="building"),
        pytest.param(memory_log.leaking()[:-3], id="cut"),
        pytest.param([memory_log.head(), memory_log.sample(0, 1e9)], id="one sample"),
        pytest.param([memory_log.head()], id="no samples"),
    ],
)
def test_every_page_is_drawn(tmp_path: Path, browse: Browse, entries: list[memory_log.Entry]) -> None:
    """No script fails; every page with samples has a curve, and its axes have numbers without NaN."""
    dom = browse(page(tmp_path, entries), "", "--dump-dom")
    body = dom.partition("<script")[0]
    assert ('class="layer anon"' in body) == any(entry["type"] == "sample" for entry in entries)
    assert "NaN" not in body
    assert "undefined" not in body


@needs_chromium
def test_values_at_the_pointer_and_by_keys(tmp_path: Path, browse: Browse) -> None:
    """Values are shown at the pointer and with the arrow keys, which also announce them to screen readers."""
    page(tmp_path, memory_log.leaking())
    script = """
  const plot = page.querySelector(".plot"), readout = page.querySelector(".readout");
  const box = plot.getBoundingClientRect();
  out.before = readout.hidden;
  const middle = { clientX: box.left + box.width / 2, clientY: box.top + 100 };
  plot.dispatchEvent(new view.PointerEvent("pointermove", middle));
  out.hovered = readout.textContent;
  plot.dispatchEvent(new view.PointerEvent("pointerleave", {}));
  out.left = readout.hidden;
  plot.dispatchEvent(new view.KeyboardEvent("keydown", { key: "End" }));
  out.last = plot.getAttribute("aria-valuetext");
  plot.dispatchEvent(new view.KeyboardEvent("keydown", { key: "ArrowLeft" }));
  out.earlier = plot.getAttribute("aria-valuetext");
  page.querySelector("tr.warn button").click();
  out.event = readout.textContent;"""
    observed = outcome(browse(in_frame(tmp_path, script), "", "--dump-dom", "--allow-file-access-from-files"))
    assert (observed["before"], observed["left"]) == (True, True)
    assert re.search(
        r"4:\d\d min in, 2026-11-14 .*memory.* GB, \d+ % of the limit.*anonymous.*file pages", str(observed["hovered"])
    )
    assert str(observed["last"]).startswith("8:19 min in: memory 3.87 GB")
    assert str(observed["earlier"]).startswith("8:18 min in")
    assert "exhaustion: memory runs out" in str(observed["event"])


@needs_chromium
def test_the_scale_can_be_chosen(tmp_path: Path, browse: Browse) -> None:
    """A mapped file much larger than the limit does not flatten the curve unless the reader selects that scale."""
    page(tmp_path, memory_log.mapping())
    script = """
  const texts = () => [...page.querySelectorAll(".axes text")].map((text) => text.textContent);
  const highest = () => texts().filter((text) => text.endsWith("B")).pop();
  out.first = highest();
  page.querySelectorAll(".controls button")[2].click();
  out.files = highest();"""
    observed = outcome(browse(in_frame(tmp_path, script), "", "--dump-dom", "--allow-file-access-from-files"))
    assert observed == {"first": "400 MB", "files": "10 GB"}


@needs_chromium
@pytest.mark.parametrize("width", [NARROWEST, 1000])
@pytest.mark.parametrize("shape", [memory_log.fine, memory_log.leaking, memory_log.mapping, memory_log.building])
def test_small_and_large_screens(
    tmp_path: Path, browse: Browse, shape: Callable[[], list[memory_log.Entry]], width: int
) -> None:
    """At the width of a phone the page needs no horizontal scrolling, and no labels of the plot overlap."""
    page(tmp_path, shape())
    script = """
  out.width = page.documentElement.scrollWidth;
  const texts = [...page.querySelectorAll(".curve text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
  const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom - 3 <= b.top || b.bottom - 3 <= a.top;
  out.overlaps = [];
  texts.forEach(([one, a], i) => texts.slice(i + 1).forEach(([other, b]) => {
    if (!apart(a, b)) out.overlaps.push(`${one} / ${other}`);
  }));"""
    holder = in_frame(tmp_path, script, width)
    observed = outcome(browse(holder, "", "--dump-dom", "--allow-file-access-from-files"))
    assert observed == {"width": width, "overlaps": []}


@needs_chromium
def test_a_hostile_log_runs_nothing(tmp_path: Path, browse: Browse) -> None:
    """A name that contains a script is shown as text and never executed."""
    bad = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    entries = [
        memory_log.head(command=["python", bad]),
        *[memory_log.sample(n, 1e9, processes=[memory_log.process(1, bad, 1e9)]) for n in range(9)],
        memory_log.event(3, "alert", bad),
        memory_log.event(4, bad, bad),
    ]
    dom = browse(page(tmp_path, entries), "?at=3", "--dump-dom")
    assert "<title>owned" not in dom
    assert "<img" not in dom


def test_the_verb(tmp_path: Path) -> None:
    """The page is written next to the log or to the requested path; a wrong file exits with code 2 and one sentence."""
    log = memory_log.write(tmp_path / "run.jsonl", memory_log.fine())
    assert str(tmp_path / "run.html") in brim("report", log).stdout
    assert json.loads(brim("report", log, tmp_path / "other.html", "--json").stdout)["page"] == str(
        tmp_path / "other.html"
    )
    assert (tmp_path / "other.html").stat().st_size > 10_000
    assert "does not exist" in brim("report", tmp_path / "none.jsonl", check=2).stderr
    assert "is not a log" in brim("report", tmp_path / "other.html", check=2).stderr


JOB = """
import sys, time
from pathlib import Path
from brim.progress import Progress
from brim.memory.limit import Limit
from brim.monitor.report.recording import recorded
with recorded(Progress(), Path(sys.argv[1]), ["brim", "build"], Limit(10**9, "--memory")) as progress:
    progress.start("build", 100, 2, 10**9)
    progress.shard("data/train-00000-of-00002.parquet", 50, "ab", "written")
    block = bytearray(100_000_000)
    time.sleep(1.2)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_killed_job_still_has_a_page(tmp_path: Path) -> None:
    """After kill -9 the log has all samples up to then, and `brim report` creates a page that states the kill."""
    job = subprocess.Popen([sys.executable, "-c", JOB, str(tmp_path / "build.html")], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    job.kill()
    job.wait()
    job.stdout.close()
    assert not (tmp_path / "build.html").exists()
    brim("report", tmp_path / "build.jsonl")
    text = (tmp_path / "build.html").read_text()
    assert "cut off" in text
    assert "data/train-00000-of-00002.parquet" in text
    peak = re.search(r"It used (\d+) MB at most", text)
    assert peak is not None
    assert 100 < int(peak[1]) < 300


def test_a_build_is_recorded(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """The page of a real build shows its shards and its memory."""
    import brim as library
    from brim.monitor.report.recording import recorded
    from brim.monitor.run_log import read_run
    from brim.progress import Progress

    plan = library.plan(library.files(many_files(9)), tmp_path / "out", shard_size="50KB", memory="1GB")
    forecast = {"low_bytes": plan.forecast.total, "high_bytes": plan.forecast.total, "verdict": "LOW"}
    with recorded(Progress(), tmp_path / "build.html", ["brim", "build"], plan.limit, forecast) as progress:
        plan.run(progress)
    run = read_run(tmp_path / "build.jsonl")
    assert run.event_counts["shard"] == len(plan.plan.shards)
    assert run.end is not None
    assert run.end.exit_code == 0
    assert "Forecast and measurement" in (tmp_path / "build.html").read_text()


def test_the_parts_of_the_page_are_packaged() -> None:
    """The parts of the page are loaded as package data, not from the source tree."""
    from importlib.resources import files

    names = {part.name for part in files("brim.monitor.report").iterdir()}
    assert {"page.html", "page.css", "dark.css", "scale.js", "chart.js", "cursor.js"} <= names


def test_report_of_a_build_and_of_an_experiment(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """--report writes a page at the end, also for a failed build.

    A path that is not writable is refused before the start.
    """
    source = many_files(6)
    brim("build", source, tmp_path / "out", "--report", tmp_path / "build.html")
    assert "data/train-00000-of-00001.parquet" in (tmp_path / "build.html").read_text()
    brim("build", source, tmp_path / "out", "--num-shards", "3", "--report", tmp_path / "failed.html", check=2)
    assert "another dataset" in (tmp_path / "failed.html").read_text()
    brim("lab", "leak", "--size", "30MB", "--report", tmp_path / "leak.html")
    assert "brim lab leak" in (tmp_path / "leak.html").read_text()
    refused = brim("build", source, tmp_path / "new", "--report", tmp_path / "none" / "r.html", check=2)
    assert "existing folder" in refused.stderr
    assert not (tmp_path / "new").exists()

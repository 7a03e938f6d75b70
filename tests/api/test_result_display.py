"""Display in Python: results as text and as tables, and the progress bar of a notebook."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import brim
from brim.api.recorded_run import shown
from brim.jobs.results import BuildResult, MapResult
from brim.monitor.report.progress_renderers import NotebookBar, NotesOnly, PlainLines, TerminalBar
from brim.progress import Progress
from brim.state.ledger import Receipt


def test_results_show_themselves() -> None:
    """Results are lines of text, and tables in a notebook; file names are escaped."""
    built = BuildResult("<b>out</b>", 3, 2, 1000, 1, 1, 0, (), proved="all of it")
    assert str(built) == repr(built)
    assert repr(built).splitlines()[0].split() == ["destination", "<b>out</b>"]
    assert "<b>" not in built._repr_html_()
    assert "&lt;b&gt;out&lt;/b&gt;" in built._repr_html_()
    stats = brim.UnitStats([Receipt("a", "", 1, 1, "", "", "", "")] * 10_000, computed=10_000, retries=2)
    items = MapResult.from_build(built, stats, counts={"tokens": 7})
    assert len(repr(items)) < 1000
    assert items.summary() == items.lines
    assert ("units", "10,000 done, 2 retried") in items.lines


def test_results_are_flat() -> None:
    """The values of a result are its attributes; `built` and `outcome` of earlier versions work with a warning."""
    built = BuildResult("out", 3, 2, 1000, 1, 1, 0, (), steps=(("load", "brim.open_tensors('out')"),))
    result = MapResult.from_build(built, brim.UnitStats(computed=4, retries=2), counts={"tokens": 7})
    assert (result.rows, result.bytes, result.computed, result.retries, result.units) == (3, 1000, 4, 2, 0)
    assert result.next_steps() == built.next_steps() == [("load", "brim.open_tensors('out')")]
    assert {"destination", "rows", "written", "units", "retries", "tokens", "quarantine"} <= result.as_dict().keys()
    assert "steps" not in result.as_dict() | built.as_dict()
    assert built.as_dict().items() <= result.as_dict().items()
    with pytest.warns(DeprecationWarning, match="result itself"):
        assert result.built.rows == 3
    with pytest.warns(DeprecationWarning, match="part of the result"):
        assert result.outcome.retries == 2


def test_plans_forecasts_and_why(tmp_path: Path) -> None:
    """Plans, forecasts and `why` have a table and a plain text with the same content."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.bin").write_bytes(b"a")
    plan = brim.plan(tmp_path / "in", tmp_path / "out")
    forecast = brim.forecast("concat", rows=1000, dims=16, memory="1GB")
    why = brim.why(logs=[tmp_path / "in" / "a.bin"])
    for item in (
        plan,
        forecast,
        plan.run(progress=False),
        brim.verify(tmp_path / "out"),
        brim.check(tmp_path / "in"),
        why,
    ):
        assert str(item) == repr(item)
        assert item._repr_html_().startswith(("<table>", "<pre>"))
    assert repr(plan).splitlines()[0].startswith(" ")


class Shown:
    """The part of IPython's display interface that the bar uses."""

    def __init__(self) -> None:
        self.first: list[Any] = []
        self.later: list[Any] = []

    def __call__(self, bundle: Any, raw: bool, display_id: bool) -> Any:
        assert (raw, display_id) == (True, True)
        self.first.append(bundle)
        return self

    def update(self, bundle: Any, raw: bool) -> None:
        self.later.append(bundle)


def test_a_notebook_has_one_bar() -> None:
    """A short job shows no bar; a longer one updates one display, which has a text form too."""
    clock = [0.0]
    display = Shown()
    bar = Progress(NotebookBar(display), clock=lambda: clock[0])
    bar.start("map", 1000, 0, 10**9)
    bar.advance(100)
    bar.finish()
    assert not display.first  # the job ended immediately
    bar.start("<map>", 1000, 0, 10**9)
    for _ in range(4):
        clock[0] += 0.6
        bar.advance(250)
    bar.start("finish", 10, 0, 10**9)
    bar.finish()
    assert len(display.first) == 1
    assert len(display.later) == 4
    assert 'value="0.2500"' in display.first[0]["text/html"]
    assert display.first[0]["text/plain"].startswith("<map>: 250 B of 1.00 KB, ")
    assert "&lt;map&gt;" in display.later[-1]["text/html"]
    assert 'value="1.0000"' in display.later[-1]["text/html"]
    bar.start("map", 0, 0, 10**9)  # the total is unknown
    clock[0] += 1
    bar.advance(7)
    assert "value=" not in display.later[-1]["text/html"]


def test_who_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel gets a notebook bar, a terminal a terminal bar, and a log only notes; `False` prints nothing."""
    assert renderer_types(None) == [NotesOnly]
    assert renderer_types(True) == [PlainLines]
    assert renderer_types(False) == []
    own = Progress()
    assert shown(own) is own
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert renderer_types(None) == [TerminalBar]
    kernel = SimpleNamespace(
        get_ipython=lambda: SimpleNamespace(kernel=object()), display=SimpleNamespace(display=Shown())
    )
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    assert renderer_types(None) == [NotebookBar]
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert renderer_types(None) == [TerminalBar]


def renderer_types(progress: bool | None) -> list[type]:
    return [type(renderer) for renderer in shown(progress).renderers]


def test_jobs_under_one_bar() -> None:
    """The bar starts with the total of all jobs, counts only rows, and ends once; if any total is unknown, its total is
    0."""
    messages: list[Any] = []
    inner: Any = SimpleNamespace(
        start=lambda *report: messages.append(report),
        advance=lambda size: messages.append(size),
        finish=lambda: messages.append("end"),
    )
    with Progress(forward_to=inner).joined("map", [10, 20]) as both:
        for size in (10, 20):
            both.start("map", size, 0, 99)
            both.advance(size)
            both.start("finish", 5, 0, 99)
            both.advance(5)
            both.finish()
    assert messages == [("map", 30, 0, 99), 10, 0, 20, 0, "end"]
    messages.clear()
    with Progress(forward_to=inner).joined("map", [10, None]) as both:
        both.start("map", 10, 0, 99)
    assert messages == [("map", 0, 0, 99), "end"]

"""The live page: its access rules, and its content in a real browser while a run continues, stops and ends.

Tests that need Chromium and selenium are skipped with a reason if they are missing (`make test-browser` installs
them).
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from brim.monitor.log_writer import read_log
from brim.monitor.watching.alerts import find_program
from tests.conftest import brim
from tests.forked import brim as forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory commands see little elsewhere")
PYTHON = sys.executable
ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)/#key=([0-9a-f]{32})")
LEAK = """
import os, sys, time
def train(stop):
    held = []
    while not os.path.exists(stop):
        if len(held) * 1_000_000 < float(sys.argv[2]) * 1e6:
            held.append(bytearray(b"x") * 1_000_000)
        time.sleep(0.05)
train(sys.argv[1])
"""


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@contextmanager
def running(tmp_path: Path, *options: str, script: Path | None = None, size: int = 60) -> Iterator[Any]:
    """Start a run with a live page; yield (process, port, key, stop file, log)."""
    script = script or tmp_path / "train.py"
    script.write_text(LEAK)
    stop, log, errors = tmp_path / "stop", tmp_path / "l.jsonl", tmp_path / "stderr"
    command = [PYTHON, "-m", "brim", "run", "--memory", "300MB", "--no-cgroup", "--live", "--log", str(log)]
    command += ["--stop-file", str(stop), *options, "--", PYTHON, str(script), str(stop), str(size)]
    with open(errors, "w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, env={**os.environ, "HF_TOKEN": "hf_sesame"})
    try:
        actual = eventually(lambda: ADDRESS.search(errors.read_text()), 30)
        yield process, int(actual[1]), actual[2], stop, log
    finally:
        stop.touch()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def eventually(true: Callable[[], Any], seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (match := true()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)
    return match


def ask(port: int, path: str = "/stream", method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    inputs = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.putrequest(method, path, skip_host="Host" in inputs)
    for name, value in inputs.items():
        connection.putheader(name, value)
    connection.endheaders()
    return connection.getresponse()


def test_who_may_read(tmp_path: Path) -> None:
    """Reading needs the key, a loopback Host and a matching Origin; the page changes nothing and the log is private."""
    with running(tmp_path) as (_, port, key, _, log):
        eventually(lambda: log.exists() and any(e["type"] == "sample" for e in read_log(log)))
        good = ask(port, X_Brim_Key=key)
        assert good.status == 200
        first = json.loads(good.readline())
        assert "running" in first["header"]
        assert key not in json.dumps(first)
        assert ask(port, Host=f"localhost:{port + 1}", X_Brim_Key=key).status == 200  # through ssh -L
        assert ask(port, X_Brim_Key=key, Origin=f"http://127.0.0.1:{port}").status == 200
        assert ask(port).status == 403
        assert ask(port, X_Brim_Key=key[:-1] + ("0" if key[-1] != "0" else "1")).status == 403
        assert ask(port, f"/stream?key={key}").status == 404
        assert ask(port, Host="evil.example", X_Brim_Key=key).status == 421
        assert ask(port, Host="127.0.0.1.evil.example", X_Brim_Key=key).status == 421
        assert ask(port, X_Brim_Key=key, Origin="http://evil.example").status == 403
        assert ask(port, X_Brim_Key=key, Origin="null").status == 403
        assert ask(port, method="POST", X_Brim_Key=key).status == 501
        page = ask(port, "/")
        policy = page.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe-inline" not in policy.partition("script-src")[2]
        assert key not in page.read().decode()
        assert stat.S_IMODE(log.stat().st_mode) == 0o600


def _next(stream: Any) -> bytes:
    """Return the next line; empty lines only keep the stream alive."""
    return bytes(stream.readline()).strip() or b"{}"


def test_names_are_text(tmp_path: Path) -> None:
    """A script name that looks like markup is shown as text, and secrets of a command line are hidden."""
    evil = tmp_path / "<script>alert(1)<script>.py"
    with running(tmp_path, script=evil) as (_, port, key, _, log):
        eventually(lambda: log.exists() and any(e.get("processes") for e in read_log(log)))
        stream = ask(port, X_Brim_Key=key)
        parts = eventually(lambda: (p := json.loads(_next(stream))).get("processes") and p)
        assert "&lt;script&gt;" in parts["processes"]
        for name in ("header", "processes", "events", "figures"):
            assert "<script" not in parts[name]


def test_the_server_is_no_part_of_what_is_watched(tmp_path: Path) -> None:
    """The memory and the stacks of the server are not those of the command, and the server ends with the run."""
    with running(tmp_path) as (process, port, key, stop, log):
        eventually(lambda: log.exists() and any(e.get("processes") for e in read_log(log)))
        names = {p["name"] for e in read_log(log) for p in e.get("processes", [])}
        assert names == {"train.py"}
        stream = ask(port, X_Brim_Key=key)
        stop.touch()
        process.wait(30)
        *_, last = [json.loads(line) for line in stream.read().splitlines() if line]
        assert last["over"]
        eventually(lambda: _refused(port))


def _refused(port: int) -> bool:
    try:
        ask(port, "/")
    except OSError:
        return True
    return False


def test_follow_and_side_by_side(tmp_path: Path) -> None:
    """A log that another process writes can be followed, and two logs are shown on one page."""
    logs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for log in logs:
        brim("run", "--log", log, "--", PYTHON, "-c", "import time; b = bytearray(b'x') * 50_000_000; time.sleep(0.5)")
    page = tmp_path / "both.html"
    brim("report", *logs, page)
    text = page.read_text()
    assert text.count('class="small-curve"') == 2
    assert "b.jsonl" in text
    assert brim("report", *logs, "--follow", check=2).stderr
    with running(tmp_path) as (_, _, _, _, log):
        eventually(lambda: log.exists() and any(e["type"] == "sample" for e in read_log(log)))
        follower = subprocess.Popen(
            [PYTHON, "-m", "brim", "report", str(log), "--follow"], stderr=subprocess.PIPE, text=True
        )
        assert follower.stderr is not None
        actual = ADDRESS.search(follower.stderr.readline())
        assert actual is not None
        assert "figures" in json.loads(ask(int(actual[1]), X_Brim_Key=actual[2]).readline())
        follower.send_signal(signal.SIGINT)
        assert follower.wait(20) == 0


@pytest.mark.skipif(find_program() is None, reason="what Python was doing is not proved here: py-spy is not installed")
def test_stacks_at_the_alarm(tmp_path: Path) -> None:
    """At the first alarm, the stacks of the largest process are in the log and on the page, without values."""
    with running(tmp_path, "--alert", "15%", "--alert-after", "0.5") as (_, _, _, _, log):
        actual = eventually(lambda: log.exists() and [e for e in read_log(log) if e.get("kind") == "stacks"])
    assert any("train (" in line for line in actual[0]["lines"])
    brim("report", log, tmp_path / "page.html")
    assert "Stacks of its Python processes" in (tmp_path / "page.html").read_text()


def test_every_long_verb_is_shown_live(tmp_path: Path) -> None:
    """build, select, verify, unpack, check and map print the page's address and report shards.

    Their results are the same as without the page.
    """
    source, out = tmp_path / "files", tmp_path / "out"
    source.mkdir()
    for number in range(3):
        (source / f"{number}.txt").write_text("hello")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "same.py").write_text("def same(row):\n    return row\n")
    for arguments in (
        ("build", source, out, "--rows-per-shard", "1"),
        ("select", out, tmp_path / "chosen", "--limit", "2"),
        ("verify", out),
        ("unpack", out, tmp_path / "back"),
        ("check", source),
        ("map", tmp_path / "rows.jsonl", tmp_path / "mapped", "--fn", f"{tmp_path}/same.py:same"),
    ):
        result = forked(*arguments, "--live")
        assert ADDRESS.search(result.stderr), arguments[0]
    logs = {path.name.split("-brim-")[1]: path for path in (tmp_path / "state" / "brim" / "runs").glob("*.jsonl")}
    for verb, shards in (("build", 3), ("verify", 3), ("unpack", 3), ("map", 1)):
        work = [entry["work"] for entry in read_log(logs[f"{verb}.jsonl"]) if entry.get("work")]
        assert (work[-1]["done"], work[-1]["running"]) == (shards, []), verb
    head = next(iter(read_log(logs["build.jsonl"])))
    assert head["ladder"]["stop_file"] == str(out / ".brim" / "stop")


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def browser(width: int, dark: bool = False) -> Iterator[Any]:
    selenium = pytest.importorskip("selenium", reason="the live page was not looked at in a browser: no selenium")
    if CHROMIUM is None or shutil.which("chromedriver") is None:
        pytest.skip("the live page was not looked at in a browser: no Chromium with its driver")
    assert selenium
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},1400"):
        options.add_argument(flag)
    options.add_argument("--disable-dev-shm-usage")  # containers have little shared memory
    if dark:
        options.add_argument("--force-dark-mode")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 1400, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        yield driver
    finally:
        driver.quit()


@pytest.mark.parametrize(("width", "theme"), [(1200, "light"), (380, "dark")])
def test_a_browser_watches_a_run(tmp_path: Path, width: int, theme: str) -> None:
    """The page is live before and after a reload, names the stop file, and shows the final state.

    Nothing is wider than the screen, and the console stays empty.
    """
    with browser(width, theme == "dark") as driver, running(tmp_path, size=200) as (process, port, key, stop, _):

        def script(text: str) -> Any:
            return driver.execute_script(f"return {text}")

        driver.get(f"http://127.0.0.1:{port}/?theme={theme}#key={key}")
        eventually(lambda: script("document.querySelector('#chart svg.curve')") is not None, 40)
        assert script("document.getElementById('connection').textContent") == "live"
        assert str(stop) in script("document.querySelector('.stop code').textContent")
        first = script("document.querySelector('.verdict').textContent")
        eventually(lambda: script("document.querySelector('.verdict').textContent") != first, 40)
        driver.refresh()
        eventually(lambda: script("document.querySelector('#chart svg.curve')") is not None, 40)
        assert script("document.documentElement.scrollWidth <= window.innerWidth")
        keep(driver, f"live-{width}-{theme}")
        stop.touch()
        process.wait(60)
        eventually(lambda: script("document.getElementById('connection').textContent") == "the run has ended", 40)
        assert "running" not in script("document.querySelector('.verdict strong').textContent")
        keep(driver, f"ended-{width}-{theme}")
        grave = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert [entry for entry in grave if "favicon" not in entry["message"]] == []


def test_a_browser_watches_a_job(tmp_path: Path) -> None:
    """The page shows the units of a job with their state; after the displayed stop command it reports the stop."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(9000)))
    (tmp_path / "slow.py").write_text("import time\ndef f(row):\n    time.sleep(0.02)\n    return row\n")
    command = [PYTHON, "-m", "brim", "map", "rows.jsonl", "out", "--fn", "slow.py:f", "--unit-size", "500", "--live"]
    errors = tmp_path / "stderr"
    with browser(380) as driver, open(errors, "w") as stderr:
        process = subprocess.Popen([*command, "--workers", "2"], cwd=tmp_path, stderr=stderr, stdout=subprocess.DEVNULL)
        try:
            driver.get(eventually(lambda: ADDRESS.search(errors.read_text()), 40)[0])

            def text(part: str) -> str:
                return str(driver.execute_script(f"return document.querySelector('{part}')?.innerText || ''"))

            eventually(
                lambda: "under way" in text('[data-part="work"]') and "computed" in text('[data-part="work"]'), 60
            )
            keep(driver, "job-380")
            assert driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
            eventually(lambda: "brim.execution.worker" in text('[data-part="processes"]'), 40)
            subprocess.run(text(".stop code"), shell=True, check=True)
            assert process.wait(60) == 6
            eventually(lambda: text("#connection") == "the run has ended", 40)
            assert "stopped" in text(".verdict").lower()
        finally:
            process.kill()
            process.wait()


def test_a_browser_without_the_key(tmp_path: Path) -> None:
    """A page without the key names the missing key and shows no data."""
    with browser(900) as driver, running(tmp_path) as (_, port, _, _, _):
        driver.get(f"http://127.0.0.1:{port}/#key={'0' * 32}")
        report = "return document.getElementById('connection').textContent"
        eventually(lambda: "missing or wrong" in driver.execute_script(report), 30)
        assert driver.execute_script("return document.querySelector('main').textContent.trim()") == ""


def keep(driver: Any, name: str) -> None:
    """Save a screenshot for manual review if BRIM_SCREENSHOTS names a folder."""
    folder = os.environ.get("BRIM_SCREENSHOTS")
    if folder:
        driver.save_screenshot(str(Path(folder) / f"{name}.png"))

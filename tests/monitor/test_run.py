"""`brim run` and `brim watch` from the command line: real commands, real signals, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from brim.monitor.log_writer import read_log
from brim.monitor.watching import launch
from tests.conftest import brim, started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory commands see little elsewhere")
PYTHON = sys.executable
HOLD = "import sys, time; block = bytearray(b'x') * (int(sys.argv[1]) * 1_000_000); time.sleep(float(sys.argv[2]))"


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Redirect logs without an explicit path to a folder of the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def begin(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [PYTHON, "-m", "brim", *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def entries(log: Path, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in read_log(log) if entry["type"] == kind]


def kinds(log: Path) -> list[str]:
    """Return the kinds of events of this run.

    Kills elsewhere on the machine may come from another test, and stacks depend on the installed tools: both are left
    out.
    """
    return [event["kind"] for event in entries(log, "event") if not event.get("machine") and event["kind"] != "stacks"]


def eventually(true: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (match := true()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)
    return match


def test_stdin_stdout_and_the_exit_code_are_the_commands(tmp_path: Path) -> None:
    """Standard input and output pass through unchanged; brim writes its own messages to stderr."""
    data = os.urandom(300_000).hex()
    script = "import sys; sys.stdout.write(sys.stdin.read()); sys.stderr.write('err'); sys.exit(7)"
    result = started("run", "--quiet", "--", PYTHON, "-c", script, input=data, check=7)
    assert result.stdout == data
    assert result.stderr == "err"


def test_the_end_is_one_screen(tmp_path: Path) -> None:
    """The summary fits one screen and stdout stays empty.

    It shows the peak and its time, the limit and its origin, the curve, the trend and the log.
    """
    grow = "import time; held = []\nfor _ in range(10): held.append(bytearray(b'x') * 6_000_000); time.sleep(0.1)"
    result = brim("run", "--memory", "500MB", "--log", tmp_path / "l.jsonl", "--", PYTHON, "-c", grow)
    assert result.stdout == ""
    for label in ("ended  exit code 0", "peak  6", "limit  500 MB: --memory", "memory  ", "trend  too short", "log  "):
        assert label in result.stderr
    assert "█" in result.stderr


def test_json_is_one_line_on_stderr(tmp_path: Path) -> None:
    """With --json, stdout stays the command's and stderr is one object."""
    result = brim("run", "--json", "--memory", "500MB", "--", PYTHON, "-c", "print('out')")
    facts = json.loads(result.stderr)
    assert result.stdout == "out\n"
    assert (facts["event"], facts["exit_code"], facts["stopped"]) == ("ran", 0, None)
    assert Path(facts["log"]).is_relative_to(tmp_path / "state" / "brim" / "runs")


@pytest.mark.parametrize(("code", "script"), [(0, "exit 0"), (3, "exit 3"), (130, "exit 130"), (143, "kill -TERM $$")])
def test_exit_codes_pass_through(code: int, script: str) -> None:
    """brim exits with the command's exit code, or with 128 plus the signal number, as shells do."""
    brim("run", "--quiet", "--", "sh", "-c", script, check=code)


def test_death_by_ctrl_c_is_passed_on_as_such() -> None:
    """If the command dies of SIGINT, brim does too, because a shell ends its loop only then."""
    assert brim("run", "--quiet", "--", "sh", "-c", "kill -INT $$", check=None).returncode == -signal.SIGINT


def test_a_command_that_cannot_be_started(tmp_path: Path) -> None:
    """A missing command exits with 127 and one that is not executable with 126 and a hint; neither writes a log."""
    script = tmp_path / "script.sh"
    script.write_text("echo hi\n")
    assert "not found" in brim("run", "--", "no-such-command-here", check=127).stderr
    assert "chmod +x" in brim("run", "--", script, check=126).stderr
    assert not list((tmp_path / "state").rglob("*.jsonl"))


def test_options_behind_the_dashes_are_the_commands() -> None:
    """--debug, --json and -h after -- belong to the command."""
    result = brim("run", "--quiet", "--", "echo", "--debug", "--json", "-h", "--memory", "x")
    assert result.stdout == "--debug --json -h --memory x\n"


def test_wrong_levels_are_refused_before_anything_runs(tmp_path: Path) -> None:
    """Invalid thresholds and an existing stop file exit with code 2 before the command starts."""
    (tmp_path / "stop").touch()
    for options in (["--stop-at", "99%"], ["--alert", "lots"], ["--stop-file", str(tmp_path / "stop")]):
        brim("run", *options, "--", "touch", tmp_path / "ran", check=2)
    assert not (tmp_path / "ran").exists()


def test_a_report_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    """--report into a missing folder exits with code 2 before the command starts."""
    brim("run", "--report", tmp_path / "none" / "r.html", "--", "touch", tmp_path / "ran", check=2)
    assert not (tmp_path / "ran").exists()


def test_extra_descriptors_pass_through(tmp_path: Path) -> None:
    """File descriptors that a shell opened for the command, as with <(…), stay open."""
    read, write = os.pipe()
    os.write(write, b"through")
    os.close(write)
    assert started("run", "-q", "--", "cat", f"/dev/fd/{read}", pass_fds=(read,)).stdout == "through"
    os.close(read)


SAYS_SIGNALS = """
import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, lambda n, _: print(signal.Signals(n).name, flush=True))
print("ready", flush=True)
while True:
    time.sleep(0.01) if len(sys.argv) < 2 else sys.exit(0)
"""


def test_signals_to_brim_reach_the_command() -> None:
    """Each signal reaches the command once, and none of them ends brim itself."""
    process = begin("run", "--quiet", "--", PYTHON, "-c", SAYS_SIGNALS)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name}\n"
    child = [pid for pid in _children(process.pid) if "ready" in _command(pid)]
    os.kill(child[0], signal.SIGKILL)
    process.communicate()
    assert process.returncode == 137


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_a_stopped_command_stops_brim_and_goes_on_with_it() -> None:
    """SIGTSTP to brim stops both processes, and SIGCONT continues both."""
    # In a separate group: SIGTSTP does not stop processes of an orphaned process group.
    process = begin("run", "--quiet", "--", "sleep", "1", process_group=0)
    # Between fork and exec the child has brim's own command line, which also contains "sleep".
    child = eventually(lambda: [pid for pid in _children(process.pid) if _command(pid).startswith("sleep\0")])[0]
    process.send_signal(signal.SIGTSTP)
    for pid in (process.pid, child):
        eventually(lambda pid=pid: _state_of(pid) == "T")
    process.send_signal(signal.SIGCONT)
    eventually(lambda: _state_of(child) != "T")
    assert process.wait(10) == 0
    process.communicate()


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_the_log_says_what_was_seen(tmp_path: Path) -> None:
    """The log contains head, start, samples by kind and process, and end, but no secret of the command line."""
    log = tmp_path / "l.jsonl"
    secret = "--token=hf_abcdefghijklmnop"
    brim("run", "-q", "--memory", "400MB", "--log", log, "--", PYTHON, "-c", HOLD, "80", "0.4", secret)
    head, samples, end = entries(log, "head")[0], entries(log, "sample"), entries(log, "end")[0]
    assert head["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert head["limit"]["bytes"] == 400_000_000
    assert head["limit"]["why"] == "--memory"
    assert head["limit"]["enforced"] in ("cgroup v1", "cgroup v2", "best effort")
    assert head["machine"]["ram_bytes"] > 0
    assert "hf_abc" not in log.read_text()
    assert head["command"][0] == PYTHON
    top = max(samples, key=lambda sample: sample["total_bytes"])
    assert end["peak_bytes"] > 80e6
    assert end["peak_bytes"] - top["total_bytes"] <= 0.01 * 400e6  # one line per hundredth of the limit
    assert 0 < top["anon_bytes"] <= top["total_bytes"] < 110e6
    assert top["available_bytes"] > 0
    assert any(p["pid"] == head["pid"] for sample in samples for p in sample.get("processes", []))
    assert (end["exit_code"], end["stopped"], end["overshoot_bytes"]) == (0, None, 0)
    assert end["peak_bytes"] >= top["total_bytes"]
    assert samples[-1]["total_bytes"] > 0  # the end of the process does not add a sample
    assert kinds(log) == ["start"]


def test_the_ladder(tmp_path: Path) -> None:
    """The run warns, requests a stop through the stop file and sends SIGTERM; every channel reports it; exit code 4."""
    log, stop = tmp_path / "l.jsonl", tmp_path / "stop"
    script = """
import os, signal, sys, time
block = bytearray(b"x") * 190_000_000
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
while True:
    if os.path.exists(sys.argv[1]) and "asked" not in globals():
        asked = print("asked", flush=True)
    time.sleep(0.01)
"""
    result = brim(
        *("run", "--memory", "210MB", "--no-cgroup", "--alert-after", "0.2", "--stop-after", "2", "--grace", "3"),
        # thresholds only: on a busy machine filling memory is a climb, for which a stop would be predicted
        *("--stop-lead", "0"),
        *("--stop-file", stop, "--log", log, "--on-alert", f"env > {tmp_path}/hook-$BRIM_ALERT"),
        *("--", PYTHON, "-c", script, stop),
        env={**os.environ, "MY_API_TOKEN": "sesame"},
        check=4,
    )
    assert result.stdout == "asked\nsaved\n"
    assert kinds(log) == ["start", "alert", "stop", "stop", "term", "postmortem"]
    assert not stop.exists()
    text = log.with_suffix(".alerts.txt").read_text()
    assert len(text.splitlines()) == 4
    assert "asked it to stop" in text
    for arguments in ("memory is at", "above the stop threshold", "sent SIGTERM", "stopped by brim"):
        assert arguments in result.stderr
    hook = (tmp_path / "hook-alert").read_text()
    assert "BRIM_LIMIT_BYTES=210000000" in hook
    assert f"BRIM_LOG={log}" in hook
    assert "sesame" not in hook
    end = entries(log, "end")[0]
    assert (end["stopped"], end["exit_code"]) == ("stop", 0)


def test_what_ignores_sigterm_is_killed_with_all_it_started(tmp_path: Path) -> None:
    """After the grace period the complete tree is killed, including daemons."""
    script = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(60)
    os._exit(0)
block = bytearray(b"x") * 190_000_000
time.sleep(60)
"""
    options = ("--memory", "210MB", "--no-cgroup", "--stop-after", "0.2", "--grace", "0.3", "--quiet")
    result = brim("run", *options, "--", PYTHON, "-c", script, tmp_path / "pid", check=4)
    assert "it was still running 0.3 s after SIGTERM" in result.stderr
    daemon = int((tmp_path / "pid").read_text())
    eventually(lambda: not Path(f"/proc/{daemon}").exists())


def test_a_forked_daemon_is_left_and_named(tmp_path: Path) -> None:
    """A daemon that the command started on purpose continues; brim does not wait for it and names it."""
    script = "sleep 60 >/dev/null 2>&1 & echo $! > $0"
    started_at = time.monotonic()
    process = begin("run", "--", "sh", "-c", script, str(tmp_path / "pid"))
    assert process.wait(30) == 0
    assert time.monotonic() - started_at < 30
    pid = int((tmp_path / "pid").read_text())
    try:
        assert process.stderr is not None
        assert f"no longer watched: {pid}" in process.stderr.read()
        os.kill(pid, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        process.communicate()


CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "b = bytearray(b'x') * 185_000_000; import time; time.sleep(60)"])
time.sleep(60)
"""


def test_warning_and_stop_name_the_process_that_holds_the_memory(tmp_path: Path) -> None:
    log = tmp_path / "l.jsonl"
    options = ("--memory", "202MB", "--no-cgroup", "--alert-after", "0.2", "--stop-after", "1", "--grace", "0.5")
    brim("run", *options, "--lead", "0", "--log", log, "--", PYTHON, "-c", CHILD, check=4)
    messages = {event["kind"]: event["text"] for event in reversed(entries(log, "event"))}
    for kind in ("alert", "stop"):
        assert re.search(r"; 1\d\d MB in \S+ \(pid \d+, a child\)", messages[kind]), messages[kind]


@pytest.mark.parametrize("measured", [["--no-cgroup"], []], ids=["tree", "cgroup, where there is one"])
def test_warning_names_the_file_in_shared_memory(tmp_path: Path, measured: list[str]) -> None:
    log, name = tmp_path / "l.jsonl", f"/dev/shm/brim-test-{os.getpid()}"
    script = "import sys, time; f = open(sys.argv[1], 'wb'); f.write(bytes(90_000_000)); f.flush(); time.sleep(2)"
    options = ("--memory", "110MB", *measured, "--alert-after", "0.2", "--stop-at", "off", "--kill-at", "off")
    try:
        result = brim("run", *options, "--log", log, "--", PYTHON, "-c", script, name)
    finally:
        os.unlink(name)
    (alert,) = [event["text"] for event in entries(log, "event") if event["kind"] == "alert"]
    assert f"MB in {name}" in alert
    assert f"left  90.0 MB of memory in files that remain: {name}" in result.stderr


def test_a_killed_run_is_not_said_to_be_above_the_stop_threshold_afterwards(tmp_path: Path) -> None:
    log = tmp_path / "l.jsonl"
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {HOLD}"
    options = ("--memory", "150MB", "--no-cgroup", "--lead", "0", "--log", log)
    result = brim("run", *options, "--", PYTHON, "-c", deaf, "300", "20", check=4)
    happened = kinds(log)
    assert happened[happened.index("kill") + 1 :] == ["postmortem"]
    (killed,) = [event["text"] for event in entries(log, "event") if event["kind"] == "kill"]
    assert "above the kill threshold" in killed
    assert entries(log, "end")[0]["why"] in killed
    (position,) = re.findall(r"brim killed \S+ \(pid \d+\) at (\S+ MB)", result.stderr)
    assert f"killed it: {position} of 150 MB" in killed


def test_a_short_command_is_short() -> None:
    """Running `true` with `brim run` takes less than six times as long as printing the help of a command."""

    def best(*arguments: str) -> float:
        times = []
        for _ in range(5):
            started_at = time.monotonic()
            started(*arguments)
            times.append(time.monotonic() - started_at)
        return min(times)

    assert best("run", "--quiet", "--", "true") < 6 * best("doctor", "--help")


def test_the_screen_comes_from_the_log_alone(tmp_path: Path) -> None:
    """A truncated log still gives the trend, and the summary states that the log was truncated."""
    from brim.monitor.report.run_summary import screen
    from brim.monitor.run_log import read_run

    log = tmp_path / "l.jsonl"
    head = {"type": "head", "limit": {"bytes": 10**9, "why": "--memory", "enforced": "best effort"}}
    samples = [{"type": "sample", "t": t, "total_bytes": 10**8 + t * 10**6, "file_bytes": 0} for t in range(300)]
    log.write_text("\n".join(map(json.dumps, [head, *samples])) + '\n{"type":"sam')
    text = "\n".join(text for _, text in screen(read_run(log)))
    assert "the log was cut off" in text
    assert "60.0 MB per minute" in text
    assert "looks like a leak" in text


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([PYTHON, "-c", HOLD, "100", "30", "brim-sleeper"])
    time.sleep(0.3)
    yield process
    process.kill()
    process.wait()


def test_watch_a_process(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """A process that is watched by pid is measured and never signaled, and the watch ends with it."""
    process = begin("watch", str(sleeper.pid), "--memory", "105MB", "--stop-after", "0", "--log", str(tmp_path / "l"))
    eventually(lambda: (tmp_path / "l").exists() and "alert" in kinds(tmp_path / "l"))
    assert "stop" not in kinds(tmp_path / "l")
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "only watching, so nothing is done: with --enforce it would have been asked to stop now" in stderr
    assert "peak  1" in stderr
    assert "the process has ended (brim did not start it" in stderr


def test_watch_acts_when_told(sleeper: subprocess.Popen[bytes]) -> None:
    """With --enforce, a process above the kill threshold is killed and the exit code is 4."""
    result = brim("watch", str(sleeper.pid), "--memory", "100MB", "--enforce", check=4)
    assert sleeper.wait(5) == -signal.SIGKILL
    assert "killed by brim" in result.stderr


def test_watch_finds_it_again(tmp_path: Path) -> None:
    """--match finds a process by its script, reports its end, and finds it again after a restart."""
    log, script = tmp_path / "l.jsonl", tmp_path / "brim-restarts.py"
    script.write_text(HOLD)
    process = begin("watch", "--match", "brim-restarts", "--log", str(log), "--json")
    for _ in range(2):
        actual = len([kind for kind in kinds(log) if kind == "found"]) if log.exists() else 0
        target = subprocess.Popen([PYTHON, script, "20", "30"])
        eventually(lambda result=actual: log.exists() and kinds(log).count("found") == result + 1)
        target.kill()
        target.wait()
        eventually(lambda matches=actual: kinds(log).count("gone") == matches + 1)
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert json.loads(stdout.splitlines()[-1])["peak_bytes"] > 20e6


def test_watch_in_the_background(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """--background returns immediately; the watch continues and ends with the watched process."""
    log = tmp_path / "l.jsonl"
    alerts = tmp_path / "mine.txt"
    result = brim("watch", str(sleeper.pid), "--background", "--json", "--log", log, "--alerts", alerts)
    watcher = json.loads(result.stdout)["pid"]
    assert json.loads(result.stdout)["alerts"] == str(alerts)
    eventually(lambda: any(sample["total_bytes"] > 100e6 for sample in entries(log, "sample")))
    os.kill(watcher, 0)
    sleeper.kill()
    sleeper.wait()
    assert eventually(lambda: entries(log, "end"))[0]["peak_bytes"] > 100e6
    eventually(lambda: not Path(f"/proc/{watcher}").exists())


def test_watch_the_machine() -> None:
    """--system watches the whole machine for the requested time."""
    result = brim("watch", "--system", "--for", "1.2", "--json")
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["event"] == "watched"
    assert last["limit"]["why"] == "the machine's memory"
    assert last["peak_bytes"] > 0


def test_watch_says_what_is_wrong() -> None:
    """No target, two targets and a missing process are errors."""
    brim("watch", check=2)
    brim("watch", "1", "--system", check=2)
    assert "no process 4194000" in brim("watch", "4194000", check=2).stderr


def test_a_file_that_is_no_log_is_never_overwritten(tmp_path: Path) -> None:
    """--log refuses a file that is not a log and a path that is not writable, with a clear message."""
    text = tmp_path / "thesis.txt"
    text.write_text("precious")
    assert "not a run log of brim" in brim("run", "--log", text, "--", "true", check=2).stderr
    assert "not a run log of brim" in brim("watch", "--system", "--for", "1", "--log", text, check=2).stderr
    assert text.read_text() == "precious"
    assert "cannot be written" in brim("run", "--log", "/proc/x.jsonl", "--", "true", check=2).stderr


def test_an_older_log_is_kept_until_the_options_are_right(tmp_path: Path) -> None:
    """An invalid option keeps the old log; the next valid run replaces it."""
    log = tmp_path / "l.jsonl"
    brim("run", "--quiet", "--log", log, "--", "true")
    first = log.read_bytes()
    brim("run", "--log", log, "--alert", "99%", "--", "true", check=2)
    assert log.read_bytes() == first
    brim("run", "--quiet", "--log", log, "--", "true")
    assert len(entries(log, "head")) == 1


@pytest.mark.parametrize("option", ["--grace", "--alert-after", "--stop-after"])
@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
def test_times_are_times(option: str, seconds: str) -> None:
    """A value that is not a finite, nonnegative number of seconds is refused."""
    assert "takes seconds" in brim("run", option, seconds, "--", "true", check=2).stderr


def test_a_stderr_that_nobody_reads_does_not_hold_the_watch_up(tmp_path: Path) -> None:
    """A command that fills the pipe of stderr is still stopped, and the log has all messages."""
    script = """
import os, threading, time
def fill():
    while True:
        os.write(2, b"z" * 65536)
threading.Thread(target=fill, daemon=True).start()
time.sleep(0.3)
kept = [bytearray(b"x") * 5_000_000 for _ in range(37) if not time.sleep(0.02)]
time.sleep(30)
"""
    log = tmp_path / "l.jsonl"
    options = ["--memory", "200MB", "--alert-after", "0", "--stop-after", "0", "--grace", "0", "--no-cgroup"]
    process = begin("run", "--log", str(log), *options, "--", PYTHON, "-c", script)
    eventually(lambda: log.exists() and "term" in kinds(log), 20)
    process.communicate(timeout=20)
    assert process.returncode == 4


def test_a_closed_stderr_does_not_end_the_watch(tmp_path: Path) -> None:
    """With a closed stderr, warnings are not printed and the log is complete."""
    log = tmp_path / "l.jsonl"
    options = ["--memory", "100MB", "--alert", "50%", "--alert-after", "0", "--on-alert", "echo said"]
    command = [PYTHON, "-m", "brim", "run", "--log", str(log), *options, "--", PYTHON, "-c", HOLD, "60", "1"]
    result = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *command], timeout=60)
    assert result.returncode == 0
    assert "alert" in kinds(log)
    assert entries(log, "end")[0]["exit_code"] == 0


def test_the_watcher_runs_the_same_brim() -> None:
    """The watcher imports this package and not another installed version."""
    assert (launch.HOME / "brim" / "monitor" / "watching" / "launch.py").samefile(launch.__file__)


LEAVE = """
import pathlib, signal, sys, time
def leave(*_):
    pathlib.Path(sys.argv[1]).touch()
    sys.exit()
signal.signal(signal.SIGTERM, leave)
block = bytearray(b"x") * 60_000_000
time.sleep(60)
"""


def test_all_that_match_are_asked_to_stop_and_bystanders_are_not(tmp_path: Path) -> None:
    """--match --enforce acts on several programs only with --enforce-all.

    It never acts on a process that only has the name in its arguments.
    """
    script, first, two, three = (tmp_path / name for name in ("brim-asked.py", "1", "2", "3"))
    script.write_text(LEAVE)
    processes = [
        subprocess.Popen([PYTHON, script, first]),
        subprocess.Popen(["sh", "-c", '"$@"; true', "sh", PYTHON, script, two]),
        subprocess.Popen([PYTHON, "-c", LEAVE, three, script]),
    ]
    try:
        time.sleep(0.5)
        options = ["--memory", "100MB", "--enforce", "--kill-at", "off", "--stop-after", "0", "--grace", "5"]
        refused = brim("watch", "--match", "brim-asked", *options, "--for", "1", check=2).stderr
        assert "2 programs match" in refused
        assert str(processes[0].pid) in refused
        assert str(processes[2].pid) not in refused
        result = brim("watch", "--match", "brim-asked", *options, "--enforce-all", "--for", "6", check=4)
        assert f"acting on process {processes[0].pid}" in result.stderr
        assert (first.exists(), two.exists(), three.exists()) == (True, True, False)
        assert processes[2].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_one_that_joins_later_is_not_acted_on(tmp_path: Path) -> None:
    """Without --enforce-all, a watch that finds a second program stops neither of them."""
    script, log = tmp_path / "brim-two.py", tmp_path / "l.jsonl"
    script.write_text(LEAVE)
    watching = begin(
        "watch", "--match", "brim-two.py", "--memory", "100MB", "--enforce", "--kill-at", "off", "--log", str(log)
    )
    eventually(lambda: log.exists() and entries(log, "head"))
    processes = [subprocess.Popen([PYTHON, script, tmp_path / name]) for name in "ab"]
    try:
        eventually(lambda: "found" in kinds(log))
        time.sleep(1.5)
        assert all(process.poll() is None for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=20)


def test_a_watch_ends_when_asked_and_with_who_looks(tmp_path: Path) -> None:
    """--for ends the watch on time; a killed `brim watch` leaves no watcher running."""
    started_at = time.monotonic()
    brim("watch", "--system", "--for", "1", "--log", tmp_path / "a.jsonl")
    assert time.monotonic() - started_at < 6
    assert "takes seconds" in brim("watch", "--system", "--for", "nan", check=2).stderr
    log = tmp_path / "b.jsonl"
    process = begin("watch", "--system", "--log", str(log))
    eventually(lambda: log.exists() and entries(log, "sample"))
    process.kill()
    process.communicate()
    eventually(lambda: entries(log, "end"))


def test_a_part_of_the_work(tmp_path: Path) -> None:
    """--fraction is passed to the command and recorded, and several such logs give a forecast."""
    script = "import os; b = bytearray(b'x') * int(400e6 * float(os.environ['BRIM_FRACTION']))"
    logs = []
    for part in ("1/8", "1/4", "1/2"):
        logs.append(tmp_path / f"{part.replace('/', '-')}.jsonl")
        slow = f"{script}; import time; time.sleep(0.3)"
        brim("run", "--fraction", part, "--log", logs[-1], "--quiet", "--", PYTHON, "-c", slow)
    output = brim("forecast", "sampled", *logs, "--memory", "2GB", "--json").stdout
    forecast = json.loads(output.splitlines()[-1])
    assert 380e6 < forecast["high_bytes"] < 520e6
    assert "between 0 and 1" in brim("run", "--fraction", "2", "--", "true", check=2).stderr


def test_a_kill_by_the_kernel_is_explained_at_the_end(tmp_path: Path) -> None:
    """With a hard limit, the summary shows the kernel's record or states the reason for its absence."""
    from brim.memory.cgroup import open_group

    group = open_group(200_000_000)
    if isinstance(group, str):
        pytest.skip(f"a kill by the kernel is not proved here: {group}")
    group.remove()
    page = tmp_path / "r.html"
    result = brim(
        *("run", "--memory", "120MB", "--kill-at", "off", "--stop-at", "off", "--alert", "off", "--report", page),
        *("--", PYTHON, "-c", "b = bytearray(b'x') * 400_000_000"),
        check=4,
    )
    assert "killed" in result.stderr
    assert "120 MB" in result.stderr
    assert "why it died" in page.read_text() or "The kernel killed" in page.read_text()


LEAK = """
import os, sys, time
held, rate, stop = [], float(sys.argv[1]), sys.argv[2]
while not os.path.exists(stop):
    held.append(bytearray(b"x") * int(rate * 100_000))
    time.sleep(0.1)
print("obeyed", flush=True)
"""


@pytest.mark.slow
def test_a_leak_is_stopped_in_time_and_the_next_run_starts(tmp_path: Path) -> None:
    """The run is stopped in time before the kill threshold and its stop file is removed.

    The next run uses the measured stop time of this run as its lead.
    """
    stop, log = tmp_path / "stop", tmp_path / "l.jsonl"
    options = ["--memory", "300MB", "--no-cgroup", "--stop-file", stop, "--log", log]
    result = brim("run", *options, "--stop-lead", "4", "--", PYTHON, "-c", LEAK, "12", stop, check=4)
    assert result.stdout == "obeyed\n"
    assert "than the 4 s that a stop needs" in result.stderr
    assert "at this rate the limit is reached at" in result.stderr
    assert "kill" not in kinds(log)
    assert entries(log, "end")[0]["peak_bytes"] < 0.9 * 300e6
    assert not stop.exists()
    repeated = begin("run", *map(str, options), "--", PYTHON, "-c", LEAK, "12", str(stop))
    time.sleep(3)
    stop.touch()
    stdout, stderr = repeated.communicate(timeout=30)
    assert (repeated.returncode, stdout) == (0, "obeyed\n")
    assert "lead 10 s: it took" in stderr
    assert not stop.exists()


def test_a_stop_file_is_stale_or_refused(tmp_path: Path) -> None:
    """A stop file of a killed run is removed with a note; any other is refused before the command starts."""
    stop = tmp_path / "stop"
    stop.touch()
    refused = brim("run", "--stop-file", stop, "--", "touch", tmp_path / "ran", check=2).stderr
    assert f"rm {stop}" in refused
    assert not (tmp_path / "ran").exists()
    stop.unlink()
    process = begin("run", "--stop-file", str(stop), "--", "sleep", "60")
    watcher, command = eventually(lambda: children(process.pid) if len(children(process.pid)) == 2 else None, 20)
    stop.touch()
    busy = brim("run", "--stop-file", stop, "--", "true", check=2).stderr
    assert f"process {process.pid}" in busy
    for pid in (watcher, process.pid, command):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    result = brim("run", "--stop-file", stop, "--", "true")
    assert "the run that it was made for has ended" in result.stderr
    assert not stop.exists()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_stop_file_made_after_a_stopped_run_is_refused(tmp_path: Path) -> None:
    """The earlier run removed its own stop file when it ended, so an existing one was created on purpose."""
    stop = tmp_path / "stop"
    stopped = begin("run", "--stop-file", str(stop), "--quiet", "--", PYTHON, "-c", LEAK, "0", str(stop))
    eventually(lambda: len(children(stopped.pid)) == 2, 20)
    stop.touch()
    assert stopped.communicate(timeout=30)[0] == "obeyed\n"
    assert not stop.exists()
    stop.touch()
    refused = brim("run", "--stop-file", stop, "--", "touch", tmp_path / "ran", check=2).stderr
    assert "already exists" in refused
    assert stop.exists()
    assert not (tmp_path / "ran").exists()


LEAK_UNTIL_SIGTERM = """
import signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
held = []
while True:
    held.append(bytearray(b"x") * 1_500_000)
    time.sleep(0.05)
"""


@pytest.mark.long
def test_sigterm_comes_before_the_kill_when_the_leak_is_faster_than_the_grace(tmp_path: Path) -> None:
    log = tmp_path / "l.jsonl"
    options = ["--memory", "300MB", "--no-cgroup", "--stop-file", tmp_path / "stop", "--log", log]
    result = brim("run", *options, "--", PYTHON, "-c", LEAK_UNTIL_SIGTERM, check=4)
    assert result.stdout == "saved\n"
    assert "kill" not in kinds(log)


def test_options_of_brim_after_the_command_are_pointed_out() -> None:
    result = brim("run", "echo", "--memory", "300MB")
    assert result.stdout == "--memory 300MB\n"
    assert "--memory is given to echo" in result.stderr
    assert "--memory is given" not in brim("run", "--", "echo", "--memory", "300MB").stderr


def test_memory_above_that_of_the_machine_is_pointed_out() -> None:
    assert "but this machine has" in brim("run", "--memory", "900TB", "--", "true").stderr

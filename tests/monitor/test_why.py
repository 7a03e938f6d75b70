"""`brim why` from the command line: real logs, compressed and large ones, and a real kill."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from brim.monitor.oom.why import why
from tests.conftest import started
from tests.forked import brim

LOGS = Path(__file__).parents[1] / "fixtures" / "oom"
V1 = Path("/sys/fs/cgroup/memory")


def reported(
    *arguments: str | os.PathLike[str], **options: object
) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Return the kills and the final object of `brim why --json`."""
    result = brim("why", "--json", *arguments, **options)  # type: ignore[arg-type]
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["event"] for line in lines] == ["kill"] * (len(lines) - 1) + ["why"]
    return lines[:-1], lines[-1]


def test_help_has_examples() -> None:
    """The help states the purpose of the command and shows examples."""
    text = brim("why", "--help").stdout
    assert "Example" in text
    assert "brim why 1540763 --since 3d" in text


def test_a_log_for_people() -> None:
    """The text names the kill, the limit, the certainty, the lines and a suggestion, within 80 columns."""
    text = brim("why", "--log", LOGS / "k6.18_memcg_v1_shmem.log").stdout
    assert max(map(len, text.splitlines())) <= 80
    for message in ("python3 (pid 24601)", "157 MB", "146 MB shared memory", "certain", "line 116", "/dev/shm"):
        assert message in " ".join(text.split())


def test_a_log_for_programs() -> None:
    """--json prints one object per kill, then one for the whole report."""
    kills, whole = reported("--log", LOGS / "k5.4_memcg_v1_multiline_stats.log")
    (kill,) = kills
    assert (kill["pid"], kill["killer"], kill["scope"], kill["sure"]) == (64214, "kernel", "cgroup", "certain")
    assert kill["bound"]["bytes"] == 204800 * 1024  # type: ignore[index]
    assert whole["sources"][0]["found"] == 1  # type: ignore[index]


def test_several_logs_packed_and_plain(tmp_path: Path) -> None:
    """Compressed files are recognized by their first bytes; several kills are summarized."""
    packed = tmp_path / "messages-20240502"
    packed.write_bytes(gzip.compress((LOGS / "k5.14_iso_user_session.log").read_bytes()))
    later_value = (
        (LOGS / "k5.14_iso_user_session.log").read_text().replace("2024-05-02", "2024-05-10").replace("1540763", "77")
    )
    (tmp_path / "messages").write_text(later_value)
    kills, whole = reported("--log", packed, "--log", tmp_path / "messages")
    assert [kill["pid"] for kill in kills] == [1540763, 77]
    assert whole["summary"] == "2 kills of python in 8 d, 62.8 and 62.8 GB"


def test_a_packed_log_that_was_cut(tmp_path: Path) -> None:
    """Records before the damage are explained, and the damage is reported."""
    noise = "".join(f"[{i}.000000] usb {os.urandom(20).hex()}\n" for i in range(20_000))
    whole = gzip.compress(((LOGS / "k5.14_iso_user_session.log").read_text() + noise).encode())
    (tmp_path / "kern.log.gz").write_bytes(whole[: len(whole) // 2])
    kills, report = reported("--log", tmp_path / "kern.log.gz")
    assert [kill["pid"] for kill in kills] == [1540763]
    assert "ended before" in report["sources"][0]["problem"]  # type: ignore[index]


def test_wrong_input(tmp_path: Path) -> None:
    """A missing file, a folder and an invalid time are input errors with exit code 2."""
    assert "No such file" in brim("why", "--log", tmp_path / "none", check=2).stderr
    assert "is a folder" in brim("why", "--log", tmp_path, check=2).stderr
    assert "not a time" in brim("why", "--since", "soon", "--log", LOGS / "k3.13_memcg.log", check=2).stderr


def test_a_pipe() -> None:
    """`… | brim why --log -` reads standard input."""
    result = started("why", "--log", "-", input=(LOGS / "k3.13_memcg.log").read_text())
    assert "tokenise (pid 13001)" in result.stdout


def test_no_kills(tmp_path: Path) -> None:
    """A log without kills exits with code 0 and names the sources that were read."""
    (tmp_path / "x.log").write_text("all is well\n")
    result = brim("why", "--log", tmp_path / "x.log")
    assert "No record of an out-of-memory kill was found." in result.stdout
    assert "x.log" in result.stdout


@pytest.mark.slow
def test_a_large_log_is_streamed(tmp_path: Path) -> None:
    """A log of 200 MB takes as little memory as one of 2 MB, and the kill in the middle is found."""
    noise = "".join(
        f"May  9 11:17:{i % 60:02d} node-03 sshd[{i}]: Accepted publickey for user from 10.0.0.{i % 250}\n"
        for i in range(12_000)
    )
    record = (LOGS / "k3.10_el7_syslog_uid.log").read_text()
    block = noise.encode()
    code = (
        "import sys, resource; from brim.monitor.oom.why import why; report = why(logs=sys.argv[1:]);"
        "print(report.kills[0].pid, len(report.kills), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )

    def peak_kib(size: int) -> int:
        log = tmp_path / "kern.log"
        with open(log, "wb") as file:
            for index in range(0, size, len(block)):
                file.write(block)
                if index <= size // 2 < index + len(block):
                    file.write(record.encode())
        result = subprocess.run([sys.executable, "-c", code, log], capture_output=True, text=True, check=True)
        pid, count, peak = map(int, result.stdout.split())
        assert (pid, count) == (24100, 1)
        log.unlink()
        return peak

    small, large = peak_kib(2 << 20), peak_kib(200 << 20)
    assert large - small < 4 << 10


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """Create a v1 memory cgroup of 80 MB below this process's group."""
    if os.geteuid() != 0:
        pytest.skip("a real kill needs root")
    if not (V1 / "memory.limit_in_bytes").exists():
        pytest.skip("a real kill needs the v1 memory controller at /sys/fs/cgroup/memory")
    own = next(
        line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line
    )
    group = V1 / own.strip("/") / f"brim-why-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(80 << 20))
    except OSError as error:
        pytest.skip(f"a real kill needs a separate cgroup, which cannot be made here: {error}")
    yield group
    for _ in range(50):
        try:
            group.rmdir()
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            time.sleep(0.1)


def test_a_real_kill_is_explained(limited_group: Path, tmp_path: Path) -> None:
    """The kernel kills a process at the limit of its cgroup; `brim why` reports it from the record or the counter."""
    code = (
        f"open('{limited_group}/cgroup.procs', 'w').write('0');"
        "hold = [];\nwhile True: hold.append(bytearray(b'x' * (8 << 20)))"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    assert child.wait(60) == -9
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    kills, whole = reported(env=environment)
    name = "/" + str(limited_group.relative_to(V1))
    ours = [kill for kill in kills if kill["bound"]["group"] == name]  # type: ignore[index]
    (kill,) = ours
    assert kill["killer"] == "kernel"
    assert kill["bound"]["bytes"] == 80 << 20  # type: ignore[index]
    problems = {source["name"]: source["problem"] for source in whole["sources"]}  # type: ignore[attr-defined]
    if problems["dmesg"]:
        assert kill["sure"] == "likely"  # the counter identifies the group, not the process
        return
    assert (kill["pid"], kill["sure"], kill["scope"]) == (child.pid, "certain", "cgroup")
    assert 60 << 20 < kill["sizes"]["anon_bytes"] < 100 << 20  # type: ignore[index, operator]
    text = brim("why", str(child.pid), env=environment).stdout
    assert f"(pid {child.pid})" in text
    assert "reached its limit of 83.9 MB" in " ".join(text.split())


def test_without_rights_the_counter_tells(limited_group: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If dmesg is not readable, the counter still shows the kill, and dmesg is listed with the reason."""
    code = f"open('{limited_group}/cgroup.procs', 'w').write('0'); x = bytearray(b'x' * (200 << 20))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    root = tmp_path / "root"  # this machine without /dev and /var/log, and without the commands that read them
    root.mkdir()
    (root / "sys").symlink_to("/sys")
    (root / "proc").symlink_to("/proc")
    monkeypatch.setenv("PATH", str(root))
    monkeypatch.setenv("XDG_STATE_HOME", str(root))
    report = why(root=root)
    (kill,) = [kill for kill in report.kills if (kill.bound.group or "").endswith(limited_group.name)]
    assert (kill.pid, kill.sure, kill.count, kill.bound.bytes) == (None, "likely", 1, 80 << 20)
    assert "dmesg: No such file" in " ".join(str(report).split())

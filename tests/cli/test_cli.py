"""The command line in real processes: output and exit codes."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.conftest import brim, random_bytes, tree_digest, write_files

COMMANDS = ["plan", "check", "build", "verify", "unpack", "recipes", "run", "watch", "why", "report"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    """The help of every command has a description and its arguments."""
    text = brim(command, "--help").stdout
    assert "Example" in text
    assert f"brim {command} " in text


def test_help_and_version() -> None:
    """Without arguments, brim lists the commands."""
    text = brim("--help").stdout
    assert all(command in text for command in COMMANDS)
    assert re.fullmatch(r"brim \d+\.\d+\.\d+\n", brim("--version").stdout)


def test_start_up_is_quick() -> None:
    """`brim --help` takes at most twice the processor time of importing click, and the help of a command four times."""

    def best(*command: str) -> float:
        """Return the processor time, which other programs hardly influence."""
        times = []
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *command], check=True, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(times)

    parser = best("-c", "import click")
    assert best("-m", "brim", "--help") <= 2 * parser
    assert best("-m", "brim", "build", "--help") <= 4 * parser


def test_unpacked_files_equal_the_source(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """After plan, build, verify and unpack, the unpacked files equal the source files."""
    source, out = many_files(9), tmp_path / "out"
    text = brim("plan", source, out, "--shard-size", "50KB").stdout
    assert re.search(r"rows +9", text)
    assert "size of the paths" in text
    assert "memory if loaded at once" in text
    assert re.search(r"destination .*\(new\)", text)
    assert not out.exists()
    text = brim("build", source, out, "--shard-size", "50KB").stdout
    assert "has 5 of 5 shards" in brim("plan", source, out, "--shard-size", "50KB").stdout
    assert "another dataset" in brim("plan", source, out, "--limit", "2").stdout
    assert "load_dataset" in text
    shards = sorted(p.name for p in (out / "data").iterdir())
    assert shards[0] == f"train-00000-of-{len(shards):05d}.parquet"
    assert "complete" in brim("verify", out).stdout
    assert "9 files are inside" in brim("verify", out, source).stdout
    brim("unpack", out, tmp_path / "back")
    assert tree_digest(tmp_path / "back") == tree_digest(source)
    repeated = brim("unpack", out, tmp_path / "back").stdout
    assert "9 existed" in repeated


def test_json_option_prints_only_json(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """With --json, stdout has one object per line, for success and for failure."""
    source, out = many_files(5), tmp_path / "out"
    events = [json.loads(line) for line in brim("plan", source, "--json").stdout.splitlines()]
    assert events[0]["rows"] == 5
    assert events[0]["memory"]["need_bytes"] < 100_000_000
    result = brim("build", source, out, "--json", "--rows-per-shard", "2")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [e["event"] for e in events] == ["start", "shard", "shard", "shard", "done"]
    assert result.stderr == ""
    events = [json.loads(line) for line in brim("verify", out, source, "--json").stdout.splitlines()]
    assert events[-1]["event"] == "verified"
    failed = json.loads(brim("plan", tmp_path / "nothing", "--json", check=2).stdout)
    assert failed["event"] == "error"
    assert failed["exit_code"] == 2


def test_dry_run_prints_the_plan(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """build --dry-run prints the plan and writes nothing."""
    source = many_files(3)
    dry = brim("build", source, tmp_path / "out", "--dry-run").stdout
    assert _without_memory(dry) == _without_memory(brim("plan", source).stdout)
    assert not (tmp_path / "out").exists()


def _without_memory(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not re.match(r" +(memory|destination) ", line))


def test_running_again_writes_nothing(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """A second run of the same command rewrites no shard."""
    source, out = many_files(6), tmp_path / "out"
    brim("build", source, out, "--num-shards", "3")
    before = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in (out / "data").iterdir()}
    assert "0 written, 3 kept" in brim("build", source, out, "--num-shards", "3").stdout
    assert {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in (out / "data").iterdir()} == before


def test_other_job_at_the_destination_needs_fresh_or_update(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """A destination with another dataset is refused with the differences; --fresh starts over."""
    source, out = many_files(6), tmp_path / "out"
    brim("build", source, out, "--num-shards", "3")
    write_files(source, {"new.bin": b"new"})
    refused = brim("build", source, out, "--num-shards", "2", check=2).stderr
    assert "it had 6 rows and would have 7" in refused
    assert "--update" in refused
    assert "--fresh" in refused
    brim("build", source, out, "--num-shards", "2", "--fresh")
    assert len(list((out / "data").iterdir())) == 2
    brim("verify", out, source)


def test_too_small_memory_limit_exits_with_4(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """A limit below the need of the build exits with 4 and names a sufficient limit."""
    source = many_files(3)
    refused = brim("build", source, tmp_path / "out", "--memory", "10MB", check=4).stderr
    sufficient = re.search(r"--memory (\d+MB)", refused)
    assert sufficient
    brim("build", source, tmp_path / "out", "--memory", sufficient[1])


def test_second_run_at_a_locked_destination_is_refused(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """A second build at one destination is refused; the first continues."""
    import fcntl

    source, out = many_files(3), tmp_path / "out"
    (out / ".brim").mkdir(parents=True)
    with open(out / ".brim" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "Another brim" in brim("build", source, out, check=2).stderr
    brim("build", source, out)


def test_a_second_build_does_not_disturb_the_first(tmp_path: Path) -> None:
    """While a build is writing, another build at the same destination is refused and removes no file."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for i in range(12):
        with open(source / f"{i:02d}.bin", "wb") as file:
            file.truncate(60_000_000)
    command = [sys.executable, "-m", "brim", "build", str(source), str(out), "--rows-per-shard", "1", "--quiet"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while first.poll() is None and not list(out.glob("data/.*.tmp")):
        time.sleep(0.005)
    assert "Another brim" in brim(*command[3:], check=2).stderr
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 0, errors
    brim("verify", out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_stop_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    """A signal ends the build with exit code 6 and without partial files; the next run finishes it."""
    source = tmp_path / "source"
    source.mkdir()
    for i in range(12):
        with open(source / f"{i:02d}.bin", "wb") as file:
            file.truncate(60_000_000)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "brim", "build", str(source), str(out), "--rows-per-shard", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(out.glob("data/*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 6, errors
    assert "Run the same command to continue" in errors
    assert not list(out.glob("data/.*"))
    rows_done = len(list(out.glob("data/*.parquet")))
    assert 0 < rows_done < 12
    assert re.search(rf"12 \({12 - rows_done} written, {rows_done} kept\)", brim(*command[3:]).stdout)


@pytest.mark.parametrize("columns", [80, 160])
def test_terminal_shows_a_progress_bar(many_files: Callable[..., Path], tmp_path: Path, columns: int) -> None:
    """The bar of a terminal shows percent, bytes, rate and memory; shards and the limit if they fit."""
    import pty

    source = many_files(30, size=2_000_000)
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "brim", "build", str(source), str(tmp_path / "out"), "--num-shards", "10"]
    process = subprocess.Popen(command, stdout=child, stderr=child, env=environment)
    os.close(child)
    shown = b""
    while True:
        try:
            segment = os.read(parent, 65536)
        except OSError:
            break
        if not segment:
            break
        shown += segment
    assert process.wait(timeout=60) == 0
    os.close(parent)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "/10 shards" in text or columns < 160
    assert re.search(r"memory [\d.]+ MB", text)
    assert re.search(r"━.* \d+ % ", text)
    assert "…" not in text
    assert "MB/s" in text or "GB/s" in text


def test_tables_of_every_format(tmp_path: Path) -> None:
    """CSV, TSV, JSONL and Parquet tables give the same dataset."""
    source = write_files(tmp_path / "source", {"x/a.bin": b"aaa", "x/b.bin": b"bb"})
    (source / "t.csv").write_text('id,file,note\n007,x/a.bin,"two\nlines"\n008,x/b.bin,plain\n')
    (source / "t.tsv").write_text('id\tfile\tnote\n007\tx/a.bin\t"two\nlines"\n008\tx/b.bin\tplain\n')
    lines = [{"id": "007", "file": "x/a.bin", "note": "two\nlines"}, {"id": "008", "file": "x/b.bin", "note": "plain"}]
    (source / "t.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    import pyarrow as pa

    pq.write_table(pa.Table.from_pylist(lines), source / "t.parquet")
    observed = []
    for name in ("t.csv", "t.tsv", "t.jsonl", "t.parquet"):
        out = tmp_path / name
        assert "guessed" in brim("plan", source / name).stdout
        brim("build", source / name, out)
        observed.append(tree_digest(out / "data"))
    assert all(item == observed[0] for item in observed)
    rows = pq.read_table(tmp_path / "t.csv" / "data").to_pylist()
    assert rows[0] == {"id": "007", "file": {"bytes": b"aaa", "path": "x/a.bin"}, "note": "two\nlines"}


def test_selection(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """--include, --exclude and --limit select a subset for a trial run."""
    source = many_files(10)
    facts = [
        json.loads(brim("plan", source, "--json", *options).stdout)["rows"]
        for options in (
            ["--limit", "4"],
            ["--include", "f00[0-4]*"],
            ["--include", "f00*", "--exclude", "*3.bin", "--exclude", "f009.bin"],
        )
    ]
    assert facts == [4, 5, 8]
    assert "no files that --include" in brim("plan", source, "--include", "*.png", check=2).stderr


def test_shards_by_value(tmp_path: Path) -> None:
    """--shard-by keeps the rows of a value in one shard, at any position in the table."""
    source = write_files(tmp_path / "source", {f"{i}.bin": random_bytes(100 + i) for i in range(9)})
    names = ["b", "a", "b", "c", "a", "c", "b", "c", "c"]
    (source / "t.csv").write_text("file,who\n" + "".join(f"{i}.bin,{n}\n" for i, n in enumerate(names)))
    brim("build", source / "t.csv", tmp_path / "out", "--shard-by", "who")
    shards = [
        set(pq.read_table(p, columns=["who"])["who"].to_pylist()) for p in sorted((tmp_path / "out/data").iterdir())
    ]
    assert shards == [{"b"}, {"a"}, {"c"}]
    brim("build", source / "t.csv", tmp_path / "two", "--shard-by", "who", "--num-shards", "2")
    shards = [
        set(pq.read_table(p, columns=["who"])["who"].to_pylist()) for p in sorted((tmp_path / "two/data").iterdir())
    ]
    assert len(shards) == 2
    assert not shards[0] & shards[1]


def test_workers_do_not_change_the_bytes(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """One worker and eight workers give the same folder, including ledger and card."""
    source = many_files(20)
    for number, workers in enumerate("18"):
        brim("build", source, tmp_path / f"out{number}", "--num-shards", "7", "--workers", workers)
    assert tree_digest(tmp_path / "out0") == tree_digest(tmp_path / "out1")


def test_a_hand_written_card_keeps_its_prose(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """brim changes its own fields of an existing card and nothing else."""
    source, out = many_files(3), tmp_path / "out"
    write_files(out, {"README.md": b"---\nlicense: mit\ntags:\n- brain\n---\n# Mine\n\nMy words.\n"})
    brim("build", source, out)
    text = (out / "README.md").read_text()
    assert "license: mit" in text
    assert "# Mine\n\nMy words." in text
    assert "num_examples: 3" in text
    brim("verify", out)


def test_source_and_destination_may_nest(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """A destination inside the source is not packaged, on the second run either."""
    source = many_files(3)
    brim("build", source, source / "out")
    assert "0 written, 1 kept" in brim("build", source, source / "out").stdout
    assert "source itself" in brim("build", source, source, check=2).stderr


DEAF = """
import hashlib
import threading
from brim.state.stop import handle_all_signals, stopping_at_once

handle_all_signals()
with stopping_at_once():
    threading.Timer(0.5, print, ["busy"], {"flush": True}).start()  # when the library has begun
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 400_000_000)
"""


def test_signal_stops_brim_while_a_library_hangs() -> None:
    """A signal during start-up stops the command at once; Python alone would wait until a library call returns."""
    process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    process.send_signal(signal.SIGTERM)
    _, output = process.communicate(timeout=30)
    assert process.returncode == 6
    assert "Stopped by SIGTERM" in output

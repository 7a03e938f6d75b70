"""The forecast command from the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import brim

BIG = ("concat", "--rows", "2857545", "--dims", "768", "--dims", "1024")


def test_the_whole_table() -> None:
    """The table shows components, limit, verdict and reasons in both units; a verdict of HIGH is not a failure."""
    text = brim("forecast", *BIG, "--memory", "40GB").stdout
    assert re.search(r"pieces in lists +20\.5 GB \(19\.1 GiB\)", text)
    assert re.search(r"at the concatenation +41\.0 GB \(38\.2 GiB\)", text)
    assert re.search(r"limit +40\.0 GB \(37\.3 GiB\) +--memory", text)
    assert "does not fit: needs" in text
    assert "(102 %, risk HIGH)" in text
    assert re.search(r"^ +risk  the peak comes at the very end", text, re.MULTILINE)
    assert re.search(r"^ +reassuring  nothing is estimated", text, re.MULTILINE)


def test_json() -> None:
    """--json prints one object with the numbers; without --memory the limit is the memory available on this machine."""
    lines = brim("forecast", *BIG, "--json").stdout.splitlines()
    assert len(lines) == 1
    facts = json.loads(lines[0])
    assert facts["event"] == "forecast"
    assert facts["high_bytes"] == 40_965_765_120
    assert sum(part["high_bytes"] for part in facts["components"]) == facts["high_bytes"]
    assert facts["limit_bytes"] > 10**8
    assert facts["verdict"] in ("LOW", "MODERATE", "HIGH")


def test_help_has_examples() -> None:
    """The help of the command and of each of its shapes shows examples."""
    assert "brim forecast concat" in brim("forecast", "--help").stdout
    for shape in ("embed-files", "map", "concat", "pid", "sampled"):
        assert f"brim forecast {shape} " in brim("forecast", shape, "--help").stdout


def test_a_source_is_forecast_by_its_true_bytes(many_files: Callable[..., Path]) -> None:
    """NIfTI files become one shard unless --num-shards is set, and images are always split.

    The forecast uses the sizes of the files.
    """
    source = many_files(12, 20_000, ".nii.gz")
    total = sum(path.stat().st_size for path in source.iterdir())
    facts = json.loads(brim("forecast", "embed-files", source, "--json").stdout)
    assert (facts["file_bytes"], facts["shard_bytes"], facts["num_shards"]) == (total, total, 1)
    assert facts["brim_bytes"] < 100_000_000
    assert "by their paths" in facts["for_crash"][0]
    cut = json.loads(brim("forecast", "embed-files", source, "--num-shards", "4", "--json").stdout)
    assert total / 4 <= cut["shard_bytes"] < total / 3
    assert not cut["for_crash"]


def test_a_process_that_runs() -> None:
    """The memory of a running process is measured from outside, and the memory of its next step is added."""
    code = "block = b'x' * 60_000_000; print('ready', flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        actual = json.loads(
            brim("forecast", "pid", str(process.pid), "--adds", "20MB", "--memory", "100MB", "--json").stdout
        )
        text = brim("forecast", "pid", str(process.pid), "--adds", "1GB").stdout
    finally:
        process.communicate("\n", timeout=30)
    assert 60_000_000 < actual["anon_bytes"] < 80_000_000
    assert actual["high_bytes"] == actual["anon_bytes"] + actual["shared_bytes"] + actual["swap_bytes"] + 20_000_000
    assert actual["verdict"] in ("MODERATE", "HIGH")
    assert re.search(r"sum +[\d.]+ \+ 1(\.0|000\.0)? = [\d.]+ of [\d.]+ [GM]B", text)
    assert "others" in text


def test_forked_processes_are_counted_once() -> None:
    """A parent of 80 MB with three forked children that share it holds 80 MB, not 320 MB."""
    code = (
        "import os, sys, time\n"
        "block = b'x' * 80_000_000\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(60); os._exit(0)\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "import signal; os.killpg(0, signal.SIGKILL)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        actual = json.loads(brim("forecast", "pid", str(process.pid), "--memory", "1GB", "--json").stdout)
    finally:
        process.communicate("\n", timeout=30)
    assert actual["processes"] == 4
    assert 80_000_000 < actual["high_bytes"] < 160_000_000


def test_samples_from_logs_and_points(tmp_path: Path) -> None:
    """Logs of brim run and points on the command line are combined in one linear fit."""
    for name, fraction, peak in (("a", 1 / 32, 600_000_000), ("b", 1 / 8, 900_000_000)):
        records = [{"type": "head", "fraction": fraction}, {"type": "end", "peak_bytes": peak, "exit_code": 0}]
        (tmp_path / name).write_text("\n".join(map(json.dumps, records)))
    text = brim("forecast", "sampled", tmp_path / "a", tmp_path / "b", "--point", "1/4=1.3GB", "--memory", "8GB").stdout
    assert re.search(r"with all the data +3\.6\d to 3\.7\d GB", text)
    assert re.search(r"line +500 MB \+ 3\.20 GB × fraction, fitted to 3 runs", text)
    assert "LOW" in text


@pytest.mark.parametrize(
    ("arguments", "args"),
    [
        (("sampled", "--point", "1/8=1GB"), "two different fractions"),
        (("sampled", "nowhere.jsonl"), "'nowhere.jsonl' does not exist"),
        (("pid", "99999999"), "Process 99999999 does not exist"),
        (("concat", "--rows", "0", "--dims", "3"), "--rows"),
        (("concat", "--rows", "3"), "--dims"),
        (("embed-files",), "--shard-bytes"),
        (("embed-files", "nowhere"), "nowhere"),
        (("map", "--row-bytes", "x"), "500MB"),
        (("nothing",), "nothing"),
    ],
)
def test_wrong_input_exits_2(arguments: tuple[str, ...], args: str) -> None:
    """A forecast with invalid input states the reason and exits with code 2."""
    assert args in brim("forecast", *arguments, check=2).stderr

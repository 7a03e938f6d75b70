"""What publishing costs: brim beside `push_to_hub` and the usual loop, and a dataset of 273 GB.

Two parts. *speed*: 12 files of 300 MB to a local Hub, by LFS and by Xet, against what `datasets` does.
*whole*: 902 sessions, 273 GB of sparse files, in one go, with the memory curve.

The Hub is tests/hub in a process of its own on the same machine: it hashes what it gets and stores nothing.
Its time counts for everybody alike, and both cores are shared with it. Contenders take turns; memory is
that of the publishing process tree, as peak.py has it, without the server. Not measured: a real network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from package_data import GB, MB, ROW_BYTES, ROWS, made, make_scans, warm
from peak import Measured, measure
from tables import Part, at_least, at_most, machine, print_goals, print_machine, print_part, progress, write_json

from tests.generators.arc import make_arc

HERE = Path(__file__).parent
BRIM = [sys.executable, "-m", "brim"]
PACKAGES = ("brim", "pyarrow", "datasets", "huggingface_hub", "hf-xet")
REPO = "ada/scans"
SESSIONS, TENTHS = 902, 10
CACHE = "cache"  # of the Hub's libraries: not temporary, and not brim's


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    command: list[str]
    repeats: int
    xet: bool = False


@dataclass(slots=True)
class Run:
    measured: Measured
    disk_bytes: int  # the most that lay under its temporary and state folders
    disk_files: tuple[str, ...]


@contextlib.contextmanager
def local_hub(xet: bool) -> Iterator[str]:
    """A fresh Hub, as its address."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "hub_server.py"), folder, *(["--xet"] if xet else [])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            try:
                yield server.stdout.readline().strip()
            finally:
                server.stdin.close()


def environment(endpoint: str, home: Path, xet: bool) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    folders = {"HF_HOME": str(home / CACHE)} | {name: str(home / name.lower()) for name in ("XDG_STATE_HOME", "TMPDIR")}
    for folder in folders.values():
        os.makedirs(folder)
    hub = {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_write", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {**kept, **folders, **hub, "HF_HUB_DISABLE_XET": "0" if xet else "1"}


class DiskUse:
    """The most that lies under a folder while something runs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stop = folder, threading.Event()
        self.most = 0
        self.names: set[str] = set()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self._look()

    def _look(self) -> None:
        total = 0
        for path in self._folder.rglob("*"):
            with contextlib.suppress(OSError):
                if path.relative_to(self._folder).parts[0] != CACHE and path.is_file() and path.stat().st_size:
                    total += path.stat().st_size
                    self.names.add(path.name)
        self.most = max(self.most, total)

    def __enter__(self) -> DiskUse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()


def publish(command: Sequence[str], xet: bool, *, curve: bool = False, period_s: float = 0.01) -> Run:
    """Run a command against a fresh Hub with fresh folders of its own."""
    with tempfile.TemporaryDirectory() as folder, local_hub(xet) as endpoint:
        env: Mapping[str, str] = environment(endpoint, Path(folder), xet)
        with DiskUse(Path(folder)) as disk:
            measured = measure(command, env=env, curve=curve, period_s=period_s)
    if measured.exit_code:
        raise SystemExit(f"{' '.join(command)} ended with {measured.exit_code}:\n{measured.output[-2000:]}")
    return Run(measured, disk.most, tuple(sorted(disk.names)))


def speed(arguments: argparse.Namespace) -> Part:
    source = made(arguments.data / "speed", make_scans, ROWS * ROW_BYTES)
    shards = ["--num-shards", str(ROWS)]
    brim = [*BRIM, "build", str(source), f"hf://datasets/{REPO}", *shards, "--quiet"]
    peer = [sys.executable, str(HERE / "publish_peers.py")]
    contenders = [
        Contender("brim, by LFS", [*brim, "--via", "lfs"], arguments.repeats),
        Contender("brim, by Xet", [*brim, "--via", "xet"], arguments.repeats, xet=True),
        Contender("push_to_hub, by LFS", [*peer, "push_to_hub", str(source), REPO, *shards], arguments.peer_repeats),
        Contender("push_to_hub, by Xet", [*peer, "push_to_hub", str(source), REPO, *shards], 1, xet=True),
        Contender("the usual loop, by LFS", [*peer, "loop", str(source), REPO, *shards], arguments.peer_repeats),
    ]
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    for number in range(max(contender.repeats for contender in contenders)):
        for contender in contenders:
            if number < contender.repeats:
                warm(source)
                run = publish(contender.command, contender.xet)
                runs[contender.name].append(run)
                seconds, peak = run.measured.seconds, run.measured.peak_bytes
                progress(f"{contender.name}: {seconds:.2f} s, {peak / MB:.0f} MB, {run.disk_bytes:,} bytes on disk")
    return _speed_part(runs)


def _speed_part(runs: dict[str, list[Run]]) -> Part:
    median = {name: statistics.median(run.measured.seconds for run in of) for name, of in runs.items()}
    peak = {name: max(run.measured.peak_bytes for run in of) for name, of in runs.items()}
    lfs, xet, push, _, loop = runs
    part = Part(
        f"speed: {ROWS} files of {ROW_BYTES // MB} MB to a local Hub, {ROWS} shards",
        ("what", "runs", "median s", "min–max s", "MB/s", "time against brim", "peak MB", "temporary disk"),
    )
    for name, of in runs.items():
        seconds = [run.measured.seconds for run in of]
        disk = max(run.disk_bytes for run in of)
        part.runs[name] = [{"seconds": r.measured.seconds, "peak_bytes": r.measured.peak_bytes} for r in of]
        part.rows.append(
            (
                name,
                str(len(of)),
                f"{median[name]:.2f}",
                f"{min(seconds):.2f}–{max(seconds):.2f}",
                f"{ROWS * ROW_BYTES / MB / median[name]:.0f}",
                f"{median[name] / median[lfs]:.2f}×",
                f"{peak[name] / MB:.0f}",
                f"{disk / 1000:.0f} kB ({', '.join(of[-1].disk_files[:3])})",
            )
        )
    # The finished ledger is written under a temporary name of its own and renamed.
    ledger = {"ledger.jsonl", ".ledger.jsonl.tmp"}
    ledger_only = all(set(run.disk_files) <= ledger for name in (lfs, xet) for run in runs[name])
    part.goals = [
        at_least("brim by LFS faster than push_to_hub", median[push] / median[lfs], 4, "×"),
        at_least("brim by LFS faster than the usual loop", median[loop] / median[lfs], 4, "×"),
        at_most("peak anonymous memory by LFS", peak[lfs] / MB, 110, " MB"),
        at_most("peak anonymous memory by Xet", peak[xet] / MB, 300, " MB"),
        at_most("files on disk beside the ledger (0: none)", float(not ledger_only), 0, ""),
    ]
    return part


def whole(arguments: argparse.Namespace) -> Part:
    source = arguments.data / "arc"
    if not source.exists():
        make_arc(source, sessions=SESSIONS, sparse_sizes=True)
    command = [*BRIM, "build", str(source), f"hf://datasets/{REPO}", "--recipe", "arc", "--rows-per-shard", "1"]
    run = publish([*command, "--via", "lfs", "--json"], xet=False, curve=True, period_s=0.05)
    built = json.loads(run.measured.output.splitlines()[-1])
    points = run.measured.curve
    first, last = points[: len(points) // TENTHS], points[-(len(points) // TENTHS) :]
    means = [statistics.mean(size for _, size in tenth) / MB for tenth in (first, last)]
    part = Part(
        f"whole: {SESSIONS} sessions, {built['bytes'] / GB:.0f} GB of sparse files, by LFS",
        ("seconds", "GB/s", "shards", "commits", "peak MB", "first tenth MB", "last tenth MB", "on disk"),
        notes=["Sparse files cost no disk: this measures memory over a long run, not a disk."],
    )
    part.rows.append(
        (
            f"{run.measured.seconds:.0f}",
            f"{built['bytes'] / GB / run.measured.seconds:.2f}",
            str(built["shards"]),
            str(built["commits"]),
            f"{run.measured.peak_bytes / MB:.0f}",
            f"{means[0]:.1f}",
            f"{means[1]:.1f}",
            f"{run.disk_bytes / 1000:.0f} kB ({', '.join(run.disk_files)})",
        )
    )
    step = max(len(points) // 60, 1)
    part.notes.append("MB over time: " + " ".join(f"{size / MB:.0f}" for _, size in points[::step]))
    part.goals = [
        at_most("peak anonymous memory", run.measured.peak_bytes / MB, 150, " MB"),
        at_most("mean of the last tenth above the first", means[1] - means[0], 15, " MB"),
    ]
    return part


PARTS = {"speed": speed, "whole": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description="What publishing costs, beside `push_to_hub`.")
    parser.add_argument("--data", type=Path, default=Path("bench-data"), help="where sources go")
    parser.add_argument("--repeats", type=int, default=3, help="runs of brim (default: 3)")
    parser.add_argument("--peer-repeats", type=int, default=2, help="runs of the slow ones (default: 2)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables here")
    arguments = parser.parse_args()
    arguments.data = arguments.data.resolve()
    arguments.data.mkdir(parents=True, exist_ok=True)
    facts = machine(arguments.data, PACKAGES)
    parts: dict[str, Part] = {}
    for name in arguments.only:
        progress(name)
        parts[name] = PARTS[name](arguments)
        print_part(parts[name])
    print_goals(parts)
    print_machine(facts)
    write_json(arguments.json, facts, parts)


if __name__ == "__main__":
    main()

"""Compare publishing by brim, `push_to_hub` and the usual loop, and publish a dataset of 273 GB.

Three parts. *speed*: 12 files of 300 MB to a local Hub, by LFS, compared with `datasets`. *ways*: the same by Xet,
with little and with more memory, to a storage bucket of the Hub, and an update of one file, compared with `hf upload`
of existing shards. *whole*: 902 sessions, 273 GB of sparse files, in a single run, with the memory curve; then
four sessions more, appended.

The Hub is tests/hub in a separate process on the same machine: it hashes uploads and stores nothing.
Its time counts for all contenders alike, and both cores are shared with it. Contenders take turns; memory is
that of the publishing process tree, measured by peak.py, without the server. Not measured: a real network.
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

from package_data import GB, MB, ROW_BYTES, ROWS, made, make_scans, remove, warm
from peak import Measured, measure
from tables import Goal, Part, at_least, at_most, machine, print_goals, print_machine, print_part, progress, write_json

from tests.generators.arc import make_arc

HERE = Path(__file__).parent
BRIM = [sys.executable, "-m", "brim"]
PACKAGES = ("brim", "pyarrow", "datasets", "huggingface_hub", "hf-xet")
REPO = "ada/scans"
SESSIONS, APPENDED, TENTHS = 902, 4, 10
CACHE = "cache"  # of the Hub's libraries: neither temporary files nor brim's


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    command: list[str]
    repeats: int
    xet: bool = False


@dataclass(slots=True)
class Run:
    measured: Measured
    disk_bytes: int  # the largest size of its temporary and state folders
    disk_files: tuple[str, ...]
    seen: dict[str, int]  # by the Hub, in this run


class LocalHub:
    """A Hub in a separate process."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        self._in, self._out = server.stdin, server.stdout
        self.endpoint = self._out.readline().strip()

    def seen(self) -> dict[str, int]:
        """Return the Hub's counters of received and sent bytes and of requests."""
        self._in.write("\n")
        self._in.flush()
        return dict(json.loads(self._out.readline()))


@contextlib.contextmanager
def local_hub(xet: bool, tail_bytes: int = 0) -> Iterator[LocalHub]:
    """Start a new Hub."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "hub_server.py"), folder, "--tail", str(tail_bytes)]
        command += ["--xet"] if xet else []
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            try:
                yield LocalHub(server)
            finally:
                server.stdin.close()


def environment(endpoint: str, home: Path, xet: bool) -> dict[str, str]:
    remaining = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    folders = {"HF_HOME": str(home / CACHE)} | {name: str(home / name.lower()) for name in ("XDG_STATE_HOME", "TMPDIR")}
    for folder in folders.values():
        os.makedirs(folder)
    hub = {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_write", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {**remaining, **folders, **hub, "HF_HUB_DISABLE_XET": "0" if xet else "1"}


class DiskUse:
    """The largest size of a folder while a command runs."""

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
        for path in self._files():
            with contextlib.suppress(OSError):
                if path.relative_to(self._folder).parts[0] != CACHE and path.is_file() and path.stat().st_size:
                    total += path.stat().st_size
                    self.names.add(path.name)
        self.most = max(self.most, total)

    def _files(self) -> Iterator[Path]:
        """Yield the present files; folders may be removed during the iteration."""
        for folder, _, names in os.walk(self._folder):
            yield from (Path(folder, name) for name in names)

    def __enter__(self) -> DiskUse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()


def publish(command: Sequence[str], xet: bool) -> Run:
    """Run a command with a new Hub."""
    with local_hub(xet) as hub:
        return publish_to(hub, command, xet)


def publish_to(
    hub: LocalHub,
    command: Sequence[str],
    xet: bool,
    *,
    curve: bool = False,
    period_s: float = 0.01,
    cache: Path | None = None,
) -> Run:
    """Run a command with a Hub and new folders; `cache` is that of another run."""
    before = hub.seen()
    with tempfile.TemporaryDirectory() as folder:
        env: Mapping[str, str] = environment(hub.endpoint, Path(folder), xet)
        env = {**env, "HF_HOME": str(cache)} if cache is not None else env
        with DiskUse(Path(folder)) as disk:
            measured = measure(command, env=env, curve=curve, period_s=period_s)
    if measured.exit_code:
        raise SystemExit(f"{' '.join(command)} ended with {measured.exit_code}:\n{measured.output[-2000:]}")
    observed = {name: count - before[name] for name, count in hub.seen().items()}
    return Run(measured, disk.most, tuple(sorted(disk.names)), observed)


def speed(arguments: argparse.Namespace) -> Part:
    source = made(arguments.data / "speed", make_scans, ROWS * ROW_BYTES)
    shards = ["--num-shards", str(ROWS)]
    brim = [*BRIM, "build", str(source), f"hf://datasets/{REPO}", *shards, "--quiet"]
    peer = [sys.executable, str(HERE / "publish_peers.py")]
    contenders = [
        Contender("brim, by LFS", [*brim, "--via", "lfs"], arguments.repeats),
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
    median = {name: statistics.median(run.measured.seconds for run in source) for name, source in runs.items()}
    peak = {name: max(run.measured.peak_bytes for run in owner) for name, owner in runs.items()}
    lfs, push, _, loop = runs
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
    # The finished ledger is written under a temporary name and renamed.
    ledger = {"ledger.jsonl", ".ledger.jsonl.tmp"}
    names = {file for run in runs[lfs] for file in run.disk_files}
    ledger_only = all(name in ledger or name.endswith(".json") for name in names)  # .json: processes with a stop file
    part.goals = [
        at_least("brim by LFS faster than push_to_hub", median[push] / median[lfs], 4, "×"),
        at_least("brim by LFS faster than the usual loop", median[loop] / median[lfs], 4, "×"),
        at_most("peak anonymous memory by LFS", peak[lfs] / MB, 110, " MB"),
        at_most("other files on disk than the ledger (0: none)", float(not ledger_only), 0, ""),
    ]
    return part


def ways(arguments: argparse.Namespace) -> Part:
    """Measure Xet, a bucket of the Hub, and an update, compared with `hf upload` of the same shards."""
    source = made(arguments.data / "speed", make_scans, ROWS * ROW_BYTES)
    shards = ["--num-shards", str(ROWS)]
    packed = arguments.data / "packed"
    subprocess.run([*BRIM, "build", str(source), str(packed), *shards, "--quiet"], check=True)
    build = [*BRIM, "build", str(source)]
    to, bucket, quiet = f"hf://datasets/{REPO}", "hf://buckets/ada/b/x", [*shards, "--quiet"]
    hf = str(Path(sys.executable).with_name("hf"))
    upload = [hf, "upload", REPO, str(packed), "--repo-type", "dataset", "--quiet"]
    contenders = [
        Contender("hf upload of shards on disk, by Xet", upload, arguments.repeats, xet=True),
        Contender("brim, by Xet", [*build, to, *quiet, "--via", "xet"], arguments.repeats, xet=True),
        Contender(
            "brim, by Xet, --memory 2GB",
            [*build, to, *quiet, "--via", "xet", "--memory", "2GB"],
            arguments.repeats,
            xet=True,
        ),
        Contender("brim, to a bucket of the Hub", [*build, bucket, *quiet], arguments.repeats, xet=True),
        Contender("brim, by LFS", [*build, to, *quiet, "--via", "lfs"], arguments.repeats),
    ]
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    for _ in range(arguments.repeats):
        for contender in contenders:
            warm(source)
            warm(packed / "data")
            runs[contender.name].append(publish(contender.command, contender.xet))
            run = runs[contender.name][-1]
            progress(f"{contender.name}: {run.measured.seconds:.2f} s, {run.measured.peak_bytes / MB:.0f} MB")
    for via in ("lfs", "xet"):
        runs[f"brim --update of one file of {ROWS}, by {via}"] = [_updated(arguments.data, source, via)]
    return _ways_part(runs)


def _updated(data: Path, source: Path, via: str) -> Run:
    """Change the end of one shard, and measure how much of it LFS and Xet upload."""
    changed = data / "changed"
    remove(changed)
    changed.mkdir()
    for path in source.iterdir():
        os.link(path, changed / path.name)
    command = [*BRIM, "build", str(changed), f"hf://datasets/{REPO}", "--num-shards", str(ROWS), "--via", via]
    with local_hub(xet=True) as hub, tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)  # the cache in which Xet records the uploads of this machine
        publish_to(hub, [*command, "--quiet"], xet=True, cache=cache)
        last = max(changed.iterdir())
        remaining = last.read_bytes()
        last.unlink()
        last.write_bytes(remaining[:-MB] + os.urandom(MB))
        return publish_to(hub, [*command, "--update", "--quiet"], xet=True, cache=cache)


def _ways_part(runs: dict[str, list[Run]]) -> Part:
    part = Part(
        f"ways: {ROWS} files of {ROW_BYTES // MB} MB to a local Hub, {ROWS} shards",
        ("what", "runs", "median s", "time against hf upload", "peak MB", "sent MB", "requests"),
    )
    upload, xet, extra, bucket, *_ = runs
    median = {name: statistics.median(run.measured.seconds for run in source) for name, source in runs.items()}
    peak = {name: max(run.measured.peak_bytes for run in owner) / MB for name, owner in runs.items()}
    for name, of in runs.items():
        part.runs[name] = [{"seconds": r.measured.seconds, "peak_bytes": r.measured.peak_bytes, **r.seen} for r in of]
        part.rows.append(
            (
                name,
                str(len(of)),
                f"{median[name]:.2f}",
                f"{median[name] / median[upload]:.2f}×",
                f"{peak[name]:.0f}",
                f"{of[-1].seen['received'] / MB:.0f}",
                str(of[-1].seen["requests"]),
            )
        )
    part.notes.append("`hf upload` has the shards on disk: the time of packaging them is not in its row.")
    part.goals = [
        at_most("peak anonymous memory by Xet", peak[xet], 150, " MB"),
        at_most("peak anonymous memory to a bucket of the Hub", peak[bucket], 150, " MB"),
        at_most("by Xet, with 2 GB, against `hf upload`", median[extra] / median[upload], 1.5, "×"),
    ]
    return part


def whole(arguments: argparse.Namespace) -> Part:
    source = arguments.data / f"arc-{arguments.sessions}"
    if not source.exists():
        make_arc(source, sessions=arguments.sessions, sparse_sizes=True)
    extra = arguments.data / "arc-more"
    if not extra.exists():
        make_arc(extra, sessions=APPENDED, sparse_sizes=True)
    args = [f"hf://datasets/{REPO}", "--recipe", "arc", "--rows-per-shard", "1", "--via", "lfs", "--json"]
    with local_hub(xet=False, tail_bytes=MB) as hub:
        run = publish_to(hub, [*BRIM, "build", str(source), *args], xet=False, curve=True, period_s=0.05)
        progress(f"{arguments.sessions} sessions: {run.measured.seconds:.0f} s")
        added = publish_to(hub, [*BRIM, "build", str(extra), *args, "--append"], xet=False)
    built = json.loads(run.measured.output.splitlines()[-1])
    points = run.measured.curve
    first, last = points[: len(points) // TENTHS], points[-(len(points) // TENTHS) :]
    means = [statistics.mean(size for _, size in tenth) / MB for tenth in (first, last)]
    part = Part(
        f"whole: {arguments.sessions} sessions, {built['bytes'] / GB:.0f} GB of sparse files, by LFS",
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
    total = json.loads(added.measured.output.splitlines()[-1])
    new_bytes = int(total["sent_bytes"])
    ratio = added.seen["received"] / max(new_bytes, 1)
    part.rows.append(
        (
            f"{added.measured.seconds:.0f} (append of {new_bytes / GB:.2f} GB)",
            f"{new_bytes / GB / added.measured.seconds:.2f}",
            str(total["shards"]),
            str(total["commits"]),
            f"{added.measured.peak_bytes / MB:.0f}",
            "",
            "",
            f"{added.disk_bytes / 1000:.0f} kB ({', '.join(added.disk_files)})",
        )
    )
    part.runs["brim build"] = [{"seconds": run.measured.seconds, "peak_bytes": run.measured.peak_bytes, **run.seen}]
    part.runs["append"] = [
        {
            "seconds": added.measured.seconds,
            "peak_bytes": added.measured.peak_bytes,
            "new_bytes": new_bytes,
            **added.seen,
        }
    ]
    part.notes.append(
        f"The append sent {added.seen['received'] / MB:,.1f} MB for {new_bytes / MB:,.1f} MB of new shards, with "
        f"{added.seen['requests']} requests; it read {added.seen['objects_read']} old object(s) and "
        f"{added.seen['sent'] / MB:.2f} MB in all (listing, manifest, footer)."
    )
    step = max(len(points) // 60, 1)
    part.notes.append("MB over time: " + " ".join(f"{size / MB:.0f}" for _, size in points[::step]))
    part.goals = [
        at_most("peak anonymous memory", run.measured.peak_bytes / MB, 150, " MB"),
        at_most("mean of the last tenth above the first", means[1] - means[0], 15, " MB"),
        at_most("append: sent, of what is new", ratio, 1.01, "×"),
        at_most("append: old objects of which something is read", added.seen["objects_read"], 1, ""),
        at_most("append: peak anonymous memory", added.measured.peak_bytes / MB, 150, " MB"),
    ]
    return part


PARTS = {"speed": speed, "ways": ways, "whole": whole}


def earlier(path: Path | None) -> dict[str, Part]:
    """Return the stored parts of the file, so that --only can repeat some of them; each takes minutes."""
    if path is None or not path.exists():
        return {}
    actual = json.loads(path.read_text())["parts"]
    return {name: Part(**{**part, "goals": [Goal(**goal) for goal in part["goals"]]}) for name, part in actual.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="What publishing costs, beside `push_to_hub`.")
    parser.add_argument("--data", type=Path, default=Path("bench-data"), help="where sources go")
    parser.add_argument("--repeats", type=int, default=3, help="runs of brim (default: 3)")
    parser.add_argument("--peer-repeats", type=int, default=2, help="runs of the slow ones (default: 2)")
    parser.add_argument("--sessions", type=int, default=SESSIONS, help="of the whole (default: 902, 273 GB)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables here")
    arguments = parser.parse_args()
    arguments.data = arguments.data.resolve()
    arguments.data.mkdir(parents=True, exist_ok=True)
    facts = machine(arguments.data, PACKAGES)
    parts = earlier(arguments.json)
    for name in arguments.only:
        progress(name)
        load = os.getloadavg()[0]
        parts[name] = PARTS[name](arguments)
        parts[name].notes.append(f"Load before this part: {load:.1f}.")
        print_part(parts[name])
        write_json(arguments.json, facts, parts)
    print_goals(parts)
    print_machine(facts)


if __name__ == "__main__":
    main()

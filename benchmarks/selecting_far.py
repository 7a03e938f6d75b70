"""The remote part of selecting.py: rows of a dataset on a local Hub and in a bucket, with 20 ms latency per request.

The data are two shards of 1,000 values of 300 kB, written by brim, and one shard by each of several other writers.
Counted are the requests for shards and their bytes; requests once per dataset (commit, tree, card, manifest) are a
separate column. Peers read the same shards: Polars and pyarrow from the bucket, pyarrow and `datasets` streaming from
the Hub.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tables import MB, Part, at_most, progress

from tests.hub import TestHub
from tests.s3 import FaultProxy, S3Server

HERE = Path(__file__).parent
REPO, BUCKET = "ada/far", "far"
DELAY_S = 0.02
VALUE_BYTES, VALUES, SHARDS = 300_000, 1000, 2
FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
SUBJECT = "n >= 400 and n < 420"
SCATTERED = list(range(7, 7 + 20 * 41, 41))


class FarHub(TestHub):
    """A Hub that returns the addresses of the proxies in front of it."""

    fronts: tuple[str, str] | None = None

    @property
    def endpoint(self) -> str:
        return super().endpoint if self.fronts is None else self.fronts[0]

    @property
    def storage(self) -> str:
        return super().storage if self.fronts is None else self.fronts[1]


def remote(work: Path, arguments: argparse.Namespace) -> Part:
    source = work / "raw.parquet"
    _write(source)
    part = Part(
        f"remote: {SHARDS} shards of {VALUES:,} values of {VALUE_BYTES // 1000} kB, "
        f"{DELAY_S * 1000:.0f} ms per request",
        (
            "where",
            "what",
            "tool",
            "s",
            "requests for shards",
            "other requests",
            "MB of shards",
            "other MB",
            "× its bytes",
        ),
    )
    with FarHub(work / "hub", keep=True) as hub, S3Server(work / "s3") as s3:
        _from_the_hub(part, hub, source, work)
        s3.create_bucket(BUCKET)
        _from_a_bucket(part, s3, source, work)
    part.notes += [
        "Shards of other tools have no manifest. Their small columns are in each row group, so reading all of them "
        "takes a request per row group and one for the footer. The size of a value precedes it: in pages of "
        "pyarrow, which contain 300 values here with and without an index, a value is found by following all sizes "
        "before it, a request each, or by reading all values before it. There, few bytes and few requests are not "
        "possible at the same time.",
    ]
    return part


def _write(path: Path, count: int = VALUES * SHARDS, **options: bool) -> None:
    rng, step = np.random.default_rng(1), 300
    schema = pa.schema([("n", pa.int64()), ("key", pa.int64()), ("image", FILE)])
    with pq.ParquetWriter(path, schema, compression="none", **options) as writer:
        for start in range(0, count, step):
            rows = range(start, min(start + step, count))
            files = [{"bytes": rng.bytes(VALUE_BYTES), "path": f"{row}.jpg"} for row in rows]
            columns = {"n": list(rows), "key": list(rows), "image": pa.array(files, FILE)}
            writer.write_table(pa.table(columns, schema=schema))


def _write_indexed(path: Path) -> None:
    _write(path, VALUES, write_page_index=True)


def _write_by_datasets(path: Path) -> None:
    import datasets

    rng = np.random.default_rng(1)
    files = [{"bytes": rng.bytes(VALUE_BYTES), "path": f"{row}.jpg"} for row in range(VALUES)]
    features = datasets.Features(
        {"n": datasets.Value("int64"), "key": datasets.Value("int64"), "image": datasets.Image(decode=False)}
    )
    rows = list(range(VALUES))
    datasets.Dataset.from_dict({"n": rows, "key": rows, "image": files}, features).to_parquet(str(path))


OTHER_VALUES: dict[str, Callable[[Path], None]] = {
    "pyarrow": lambda path: _write(path, VALUES),
    "pyarrow with a page index": _write_indexed,
    "datasets": _write_by_datasets,
}


def _from_the_hub(part: Part, hub: FarHub, source: Path, work: Path) -> None:
    destination = f"hf://datasets/{REPO}"
    own = {"HF_TOKEN": "hf_write", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    own |= {"HF_HOME": str(work / "hf"), "XDG_STATE_HOME": str(work / "state")}
    _publish(source, destination, own | {"HF_ENDPOINT": hub.endpoint})
    with FaultProxy(TestHub.endpoint.fget(hub)) as front, FaultProxy(TestHub.storage.fget(hub)) as storage:  # type: ignore[attr-defined]
        front.delay_s = storage.delay_s = DELAY_S
        hub.fronts = (front.endpoint, storage.endpoint)
        far = _Far(part, "Hub", [front, storage], own | {"HF_ENDPOINT": front.endpoint}, work)
        far.brim(destination)
        for peer in ("datasets", "pyarrow-hub"):
            far.peer(peer, REPO)
        hub.fronts = None


def _from_a_bucket(part: Part, s3: S3Server, source: Path, work: Path) -> None:
    destination = f"s3://{BUCKET}/far"
    _publish(source, destination, {**s3.environment, "XDG_STATE_HOME": str(work / "state")})
    with FaultProxy(s3.endpoint) as front:
        front.delay_s = DELAY_S
        far = _Far(part, "bucket", [front], s3.environment_at(front.endpoint), work)
        far.brim(destination)
        for peer in ("polars", "pyarrow"):
            far.peer(peer, f"{BUCKET}/far/data")
        for writer, write in OTHER_VALUES.items():
            theirs = work / "theirs.parquet"
            write(theirs)
            s3.write(BUCKET, f"{writer}/theirs.parquet", theirs.read_bytes())
            theirs.unlink()
            far.not_brims(writer, f"s3://{BUCKET}/{writer}")


def _publish(source: Path, destination: str, env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "brim", "select", str(source), destination, "--num-shards", str(SHARDS), "--quiet"]
    subprocess.run(command, env={**os.environ, **env}, check=True, stdout=subprocess.DEVNULL)


class _Far:
    """Run selections on a location and record the requests and bytes."""

    def __init__(self, part: Part, where: str, fronts: list[FaultProxy], env: dict[str, str], work: Path) -> None:
        self._part, self._where, self._fronts, self._work = part, where, fronts, work
        self._env = {**os.environ, **env}
        self._count = 0

    def brim(self, place: str) -> None:
        folder = f"{self._work}/{self._where}"
        listing = f"print(len(brim.dataset({place!r}).where('key < 0')))"
        requests, size = self._run("list all rows", "brim", ["-c", f"import brim; {listing}"], 0)
        self._goal("list, requests a shard", requests / SHARDS, 3, "")
        self._goal("list, kB a shard", size / SHARDS / 1000, 300, "")
        first = f"import brim; brim.unpack({place!r}, {folder + '-a'!r}, where={SUBJECT!r})"
        expected = 20 * VALUE_BYTES
        requests, size = self._run("one subject", "brim", ["-c", first], expected)
        self._goal("one subject, against its bytes", size / expected, 1.1, "×")
        self._goal("one subject, requests a shard", requests / SHARDS, 10, "")
        some = f"import brim; brim.unpack({place!r}, {folder + '-b'!r}, where='n in {SCATTERED}')"
        requests, size = self._run("20 scattered rows", "brim", ["-c", some], expected)
        self._goal("scattered rows, against their bytes", size / expected, 1.1, "×")

    def not_brims(self, writer: str, destination: str) -> None:
        """Measure a shard of another writer, without a manifest of its rows and sizes."""
        listing = f"print(len(brim.dataset({destination!r}).where('key < 0')))"
        requests, _ = self._run(f"{writer}: list what cannot be", "brim", ["-c", f"import brim; {listing}"], 0)
        self._goal(f"{writer}, list by statistics, requests", requests, 3, "")
        listing = f"print(len(brim.dataset({destination!r}).where('key != 1')))"
        requests, size = self._run(f"{writer}: list all rows", "brim", ["-c", f"import brim; {listing}"], 0)
        self._goal(f"{writer}, list, requests", requests, 3, "")
        self._goal(f"{writer}, list, kB", size / 1000, 300, "")
        for item, location in (("one subject", SUBJECT), ("20 scattered rows", f"n in {SCATTERED}")):
            folder = str(self._work / f"{writer}-{item}")
            single = f"import brim; brim.unpack({destination!r}, {folder!r}, where={location!r})"
            requests, size = self._run(f"{writer}: {item}", "brim", ["-c", single], 20 * VALUE_BYTES)
            if item == "one subject":
                self._goal(f"{writer}, one subject, requests", requests, 10, "")
                self._goal(f"{writer}, one subject, against its bytes", size / (20 * VALUE_BYTES), 1.1, "×")

    def peer(self, name: str, target: str) -> None:
        for what, rows in (("one subject", "subject"), ("20 scattered rows", "scattered")):
            numbers = list(range(400, 420)) if rows == "subject" else SCATTERED
            command = [str(HERE / "selecting_peers.py"), f"far-{name}", target, ",".join(map(str, numbers)), "0"]
            self._run(what, name, command, 20 * VALUE_BYTES)

    def _goal(self, text: str, value: float, limit: float, unit: str) -> None:
        self._part.goals.append(at_most(f"{self._where}: {text}", value, limit, unit))

    def _run(self, label: str, actor: str, command: list[str], required: int) -> tuple[int, int]:
        """Return the number and bytes of requests for shards; for a listing, the bytes of all requests."""
        for front in self._fronts:
            front.requests.clear()
        started_at = time.monotonic()
        result = subprocess.run([sys.executable, *command], env=self._env, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - started_at
        if result.returncode:
            raise SystemExit(f"{actor} ended with {result.returncode}:\n{result.stderr[-2000:]}")
        requested = [entry for front in self._fronts for entry in front.requests]
        shards = [element for element in requested if _of_a_shard(unquote(element.path))]
        size = sum(one.received_bytes for one in shards)
        times = f"{size / required:.2f}×" if required else ""
        other_items = len(requested) - len(shards)
        concurrent = sum(one.received_bytes for one in requested) - size
        counted = (str(len(shards)), str(other_items), f"{size / MB:.3f}", f"{concurrent / MB:.3f}", times)
        row = (self._where, label, actor, f"{seconds:.1f}", *counted)
        self._part.rows.append(row)
        run = {
            "seconds": seconds,
            "requests": len(shards),
            "bytes": size,
            "other_requests": other_items,
            "other_bytes": concurrent,
        }
        self._part.runs.setdefault(f"{self._where}, {label}, {actor}", []).append(run)
        progress(" | ".join(row))
        return len(shards), size + (0 if required else concurrent)


def _of_a_shard(path: str) -> bool:
    """Return whether a path belongs to a shard. The Hub redirects to its storage, where objects are named by their
    hash."""
    return path.endswith(".parquet") or path.startswith("/object/")

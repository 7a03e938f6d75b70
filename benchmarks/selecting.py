"""What choosing rows costs: brim select beside a plain copy, and beside DuckDB, Polars, datasets and pyarrow.

Parts. *large*: values of 5 MB written by brim; filter, split, join, re-shard, shuffle and sort against `cp`, sync and
`sha256sum` of the bytes that were written, in the same run. *small*: 100,000 values of 10 kB, *snappy* and *zstd*:
1 GB of images that do not compress in row groups of 100 MB; half of the rows, shuffled, beside the peers. *remote*: a
shard 20 ms away, by requests and bytes.

Not called select.py: a script of that name would hide the standard library's module. Memory is that of the process
tree, as peak.py has it. Sizes are smaller with --scale; the machine should be idle, and the page cache holds what fits.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from peak import Measured, measure

HERE = Path(__file__).parent
BRIM = [sys.executable, "-m", "brim", "select"]
PEERS = str(HERE / "selecting_peers.py")
FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
MB = 1_000_000


def write(path: Path, rows: int, size: int, **options: object) -> Path:
    """A Parquet file of random values, a row group of about 100 MB at a time."""
    rng, step = np.random.default_rng(rows), max(100 * MB // size, 1)
    schema = pa.schema([("n", pa.int64()), ("key", pa.int64()), ("image", FILE)])
    with pq.ParquetWriter(path, schema, use_dictionary=["n", "key"], **options) as writer:  # type: ignore[arg-type]
        for start in range(0, rows, step):
            count = min(step, rows - start)
            data = rng.bytes(count * size)
            files = [{"bytes": data[n * size : (n + 1) * size], "path": f"{start + n}.jpg"} for n in range(count)]
            numbers = np.arange(start, start + count)
            keys = rng.permutation(count) + start
            table = pa.table({"n": numbers, "key": keys, "image": pa.array(files, FILE)}, schema=schema)
            writer.write_table(table, row_group_size=step)
    return path


def took(name: str, command: list[str], out: Path | None = None) -> Measured:
    if out is not None:
        shutil.rmtree(out, ignore_errors=True)
    os.sync()
    done = measure(command)
    if done.exit_code:
        print(f"  {name}: failed ({done.output.strip().splitlines()[-1][:150] if done.output.strip() else 'killed'})")
    return done


def copied(files: list[Path], folder: Path) -> float:
    """Seconds of cp, sync and sha256sum of the same bytes."""
    os.sync()
    begin = time.monotonic()
    folder.mkdir()
    subprocess.run(["cp", *map(str, files), str(folder)], check=True)
    subprocess.run(["sync", *(str(folder / file.name) for file in files)], check=True)
    subprocess.run(["sha256sum", *(str(folder / file.name) for file in files)], check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - begin
    shutil.rmtree(folder)
    return seconds


def large(work: Path, rows: int, found: dict[str, object]) -> None:
    """Values of 5 MB: each operation against a copy of what it wrote."""
    write(work / "raw.parquet", rows, 5 * MB, compression="none", write_page_index=True)
    subprocess.run(
        [*BRIM, str(work / "raw.parquet"), str(work / "in"), "--quiet"], check=True, stdout=subprocess.DEVNULL
    )
    (work / "raw.parquet").unlink()
    ways = {
        "filter": ["--where", f"key < {rows // 2}"],
        "split": ["--split-into", "train=0.9,test=0.1"],
        "join": ["--also", str(work / "in")],
        "re-shard": ["--shard-size", "200MB"],
        "shuffle": ["--shuffle", "7"],
        "sort": ["--sort-by", "key"],
    }
    for name, options in ways.items():
        out = work / "out"
        done = took(name, [*BRIM, str(work / "in"), str(out), "--quiet", *options], out)
        seconds = copied(sorted((out / "data").iterdir()), work / "copy")
        shutil.rmtree(out)
        ratio = done.seconds / seconds
        found[f"large {name}"] = {"s": done.seconds, "copy_s": seconds, "ratio": ratio, "peak": done.peak_bytes}
        print(
            f"  {name:9} {done.seconds:7.1f} s  copy {seconds:6.1f} s  {ratio:5.2f} ×  {done.peak_bytes / MB:6.0f} MB"
        )
    shutil.rmtree(work / "in")


def beside(part: str, source: Path, rows: int, values: int, work: Path, found: dict[str, object]) -> None:
    """Half of the rows, shuffled, beside the peers."""
    out = work / "out"
    where = f"key < {rows // 2}"
    contenders = {"brim": [*BRIM, str(source), str(out), "--quiet", "--where", where, "--shuffle", "7"]}
    for peer in ("duckdb-200MB", "duckdb-1GB", "polars", "datasets", "pyarrow"):
        contenders[peer] = [sys.executable, PEERS, peer, str(source), str(out), str(rows // 2)]
    best = None
    for name, command in contenders.items():
        done = took(name, command, out)
        shutil.rmtree(out, ignore_errors=True)
        if done.exit_code:
            found[f"{part} {name}"] = {"failed": True, "peak": done.peak_bytes}
            continue
        found[f"{part} {name}"] = {"s": done.seconds, "peak": done.peak_bytes}
        print(f"  {name:13} {done.seconds:6.1f} s  {done.peak_bytes / MB:6.0f} MB")
        if name != "brim":
            best = min(done.seconds, best or done.seconds)
    own = found[f"{part} brim"]
    if best is not None and isinstance(own, dict) and "s" in own:
        allowed = 120 * MB + 500 * values
        print(f"  best peer / brim: {best / own['s']:.2f}; memory allowed {allowed / MB:.0f} MB")


class _Far(http.server.SimpleHTTPRequestHandler):
    """A server of files 20 ms away, which counts what is asked for."""

    protocol_version = "HTTP/1.1"
    requests = sent = 0

    def do_GET(self) -> None:
        time.sleep(0.02)
        path = self.translate_path(self.path)
        size = os.path.getsize(path)
        first, _, last = (self.headers.get("Range") or f"bytes=0-{size - 1}").removeprefix("bytes=").partition("-")
        length = int(last) + 1 - int(first)
        _Far.requests, _Far.sent = _Far.requests + 1, _Far.sent + length
        self.send_response(206)
        self.send_header("ETag", f'"{size}"')
        self.send_header("Content-Length", str(length))
        self.end_headers()
        with open(path, "rb") as file:
            file.seek(int(first))
            self.wfile.write(file.read(length))

    def log_message(self, *_: object) -> None:
        return None


def remote(work: Path, rows: int, found: dict[str, object]) -> None:
    """One shard of 300 kB values, written by brim, 20 ms away: its rows, twenty of them, twenty scattered ones."""
    write(work / "raw.parquet", rows, 300_000, compression="none")
    subprocess.run([*BRIM, str(work / "raw.parquet"), str(work / "in"), "--num-shards", "1", "--quiet"], check=True)
    name = next((work / "in" / "data").iterdir()).name
    handler = functools.partial(_Far, directory=str(work / "in" / "data"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/{name}"
        scattered = list(range(7, 7 + 20 * 41, 41))
        ways = {
            "list": f"print(len(brim.dataset({address!r}).where('key < 0')))",
            "one subject": f"brim.unpack({address!r}, {str(work / 'a')!r}, where='n >= 400 and n < 420')",
            "scattered": f"brim.unpack({address!r}, {str(work / 'b')!r}, where='n in {scattered}')",
        }
        for way, code in ways.items():
            _Far.requests = _Far.sent = 0
            done = took(way, [sys.executable, "-c", f"import brim; {code}"])
            found[f"remote {way}"] = {"s": done.seconds, "requests": _Far.requests, "bytes": _Far.sent}
            print(f"  {way:12} {done.seconds:5.1f} s  {_Far.requests:4} requests  {_Far.sent / MB:8.3f} MB")
        server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--scale", type=float, default=1.0, help="of the 10 GB and 1 GB")
    parser.add_argument("--parts", default="large,small,snappy,zstd,remote")
    parser.add_argument("--work", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    arguments = parser.parse_args()
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="brim-select-", dir=arguments.work) as folder:
        work = Path(folder)
        for part in arguments.parts.split(","):
            print(part)
            if part == "remote":
                remote(work, 1000, found)
                continue
            if part == "large":
                large(work, max(int(2000 * arguments.scale), 8), found)
                continue
            rows, size = (int(100_000 * arguments.scale), 10_000)
            if part != "small":
                rows, size = int(3000 * arguments.scale), 330_000
            codec = "none" if part == "small" else part
            source = write(work / "in.parquet", rows, size, compression=codec, write_page_index=True)
            beside(part, source, rows, rows, work, found)
            source.unlink()
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""Compare brim.Loader with other readers of training data, on the same rows, each in its own format.

Rows of tokens (4 kB), images (100 kB) and scans (10 MB), shuffled, from a local folder and from a local S3 server with
a latency of 20 ms. Tools take turns, each in a separate process: rows per second, MB per second, the time
from opening to the first batch, and the peak memory of the process. Not measured: a real network, decoding, workers.
Peers that cannot be imported are skipped by name.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peak import as_installed
from tables import Part, at_least, at_most, machine, print_goals, print_machine, print_part, write_json

from tests.s3 import S3Server

LATENCY_S = 0.02
# Rows, bytes per row, rows per file, rows per row group, rows per batch.
KINDS = {
    "tokens": (40_000, 4096, 2000, 500, 64),
    "images": (2000, 100_000, 100, 50, 16),
    "scans": (40, 10_000_000, 5, 1, 1),
}
MODULES = {
    "brim": "brim",
    "datasets-map": "datasets",
    "datasets-stream": "datasets",
    "litdata": "litdata",
    "mosaic": "streaming",
    "webdataset": "webdataset",
}
PEERS = {"datasets", "litdata", "webdataset"}  # module and package have the same name
REMOTE = ("brim", "datasets-stream", "webdataset")


def values_of(kind: str) -> Iterator[tuple[int, bytes]]:
    rows, size, *_ = KINDS[kind]
    noise = np.random.default_rng(0).bytes(2 * size)
    for row in range(rows):
        start = row * 997 % size
        yield row, noise[start : start + size]


def write_parquet(kind: str, folder: Path) -> None:
    _, _, per_file, per_group, _ = KINDS[kind]
    folder.mkdir()
    retained: list[bytes] = []
    for row, value in values_of(kind):
        retained.append(value)
        if len(retained) == per_file:
            column = pa.array(retained, pa.binary())
            if kind == "tokens":
                numbers = np.frombuffer(b"".join(retained), np.int32)
                column = pa.FixedSizeListArray.from_arrays(pa.array(numbers), 1024).cast(pa.list_(pa.int32()))
            table = pa.table({"data": column})
            pq.write_table(
                table, folder / f"train-{row:06d}.parquet", row_group_size=per_group, compression="none",
                use_dictionary=False, write_batch_size=8,
            )  # fmt: skip
            retained.clear()


def write_litdata(kind: str, folder: Path) -> None:
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_bytes="64MB")
    for row, value in values_of(kind):
        writer[row] = value
    writer.done()
    writer.merge()


def write_mosaic(kind: str, folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"data": "bytes"}) as out:
        for _, value in values_of(kind):
            out.write({"data": value})


def write_webdataset(kind: str, folder: Path) -> None:
    import webdataset

    folder.mkdir()
    writer = None
    for row, value in values_of(kind):
        if row % KINDS[kind][2] == 0:
            if writer is not None:
                writer.close()
            writer = webdataset.TarWriter(str(folder / f"train-{row:06d}.tar"))
        writer.write({"__key__": f"{row:06d}", "bin": value})
    writer.close()


FORMATS: dict[str, tuple[str, Callable[[str, Path], None]]] = {
    "brim": ("parquet", write_parquet),
    "datasets-map": ("parquet", write_parquet),
    "datasets-stream": ("parquet", write_parquet),
    "litdata": ("litdata", write_litdata),
    "mosaic": ("mosaic", write_mosaic),
    "webdataset": ("webdataset", write_webdataset),
}


def batches_of(tool: str, kind: str, source: str, names: list[str], scratch: str) -> Iterator[int]:
    """Yield the rows of each batch that a tool reads, shuffled as its documentation advises."""
    batch = KINDS[kind][-1]
    window = max(64_000_000 // KINDS[kind][1] // 4, batch)  # rows of 16 MB, which share one buffer
    if tool == "brim":
        import brim

        for match in brim.Loader(source, batch_size=batch, shuffle=True, shuffle_window=window, last="keep"):
            yield len(match["data"])
    elif tool.startswith("datasets"):
        import datasets

        files = [f"{source}/{name}" for name in names]
        streaming = tool == "datasets-stream"
        rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=streaming, cache_dir=scratch)
        rows = rows.with_format("numpy") if kind == "tokens" else rows
        rows = rows.shuffle(seed=0, **({"buffer_size": window} if streaming else {}))
        for match in rows.iter(batch_size=batch):
            yield len(match["data"])
    elif tool == "litdata":
        from litdata import StreamingDataset

        yield from _grouped(StreamingDataset(source, shuffle=True, seed=0), batch)
    elif tool == "mosaic":
        from streaming import StreamingDataset

        yield from _grouped(StreamingDataset(local=source, shuffle=True, batch_size=batch), batch)
    else:
        import webdataset

        urls = [f"{source}/{name}" for name in names]
        rows = webdataset.WebDataset(urls, shardshuffle=len(urls), seed=0).shuffle(window)
        yield from _grouped(rows, batch)


def _grouped(rows: Any, batch: int) -> Iterator[int]:
    retained = []
    for row in rows:
        retained.append(row)
        if len(retained) == batch:
            yield len(retained)
            retained = []
    if retained:
        yield len(retained)


def read_once(tool: str, kind: str, source: str, scratch: str, names: list[str]) -> None:
    """Read an epoch in this process and print the measurements."""
    module = importlib.import_module(MODULES[tool])
    if tool == "brim":
        assert module.Loader  # modules that brim imports on first use
    start, cpu_before = time.perf_counter(), time.process_time()
    first, rows = 0.0, 0
    for count in batches_of(tool, kind, source, names, scratch):
        first = first or time.perf_counter() - start
        rows += count
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_before
    assert rows == KINDS[kind][0], f"{tool} read {rows} rows"
    status = Path("/proc/self/status").read_text()  # not ru_maxrss, which a process inherits from its parent
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    print(json.dumps({"rows_s": rows / seconds, "cpu_seconds": cpu, "first_s": first, "peak_mb": peak}))


async def relay(port: int, target: tuple[str, int]) -> None:
    """Forward connections with a delay of LATENCY_S for data from the client."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
        try:
            while data := await reader.read(1 << 18):
                await asyncio.sleep(delay_s)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*target)
        await asyncio.gather(pump(reader, far_writer, LATENCY_S), pump(far_reader, writer, 0))

    async with await asyncio.start_server(serve, "127.0.0.1", port) as server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs="+")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.child:
        tool, kind, source, scratch, *names = options.child
        read_once(tool, kind, source, scratch, names)
        return
    tools = [tool for tool, module in MODULES.items() if importlib.util.find_spec(module) is not None]
    for tool in MODULES:
        if tool not in tools:
            print(f"SKIPPED {tool}: it is not installed")
    results: dict[str, Any] = {}
    facts = machine(
        Path(tempfile.gettempdir()), ("brim", "pyarrow", "torch", *sorted({MODULES[t] for t in tools} & PEERS))
    )
    with tempfile.TemporaryDirectory(prefix="brim-bench-") as work, S3Server(Path(work) / "s3") as s3:
        port = int(s3.endpoint.rpartition(":")[2])
        listener = _free_port()
        threading.Thread(target=lambda: asyncio.run(relay(listener, ("127.0.0.1", port))), daemon=True).start()
        endpoint = f"http://127.0.0.1:{listener}"
        for kind in options.kinds:
            run_kind(kind, tools, Path(work), s3, endpoint, options.rounds, results)
    parts = parts_of(results)
    for part in parts.values():
        print_part(part)
    print_goals(parts)
    print_machine(facts)
    write_json(options.json, facts, parts)


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_kind(
    kind: str, tools: list[str], work: Path, s3: S3Server, endpoint: str, rounds: int, results: dict[str, Any]
) -> None:
    """Write the rows in each format, and run the readers in turns."""
    able = []
    for tool in tools:
        name, write = FORMATS[tool]
        folder = work / f"{kind}-{name}"
        try:
            if not folder.exists():
                write(kind, folder)
            able.append(tool)
        except Exception as error:  # noqa: BLE001  a peer that does not work here is skipped by name
            print(f"SKIPPED {tool}: {type(error).__name__}: {error}"[:160])
            shutil.rmtree(folder, ignore_errors=True)
    for name in ("parquet", "webdataset"):
        for file in sorted((work / f"{kind}-{name}").glob("*")):
            s3.write("public", f"{kind}-{name}/{file.name}", file.read_bytes())
    for number in range(rounds):
        for destination in ("local", "s3"):
            for tool in able if destination == "local" else [tool for tool in able if tool in REMOTE]:
                key = f"{kind} {destination} {tool}"
                folder = work / f"{kind}-{FORMATS[tool][0]}"
                names = sorted(file.name for file in folder.glob("*") if not file.name.startswith("."))
                source = str(folder)
                if destination == "s3":
                    source = f"s3://public/{folder.name}" if tool == "brim" else f"{endpoint}/public/{folder.name}"
                scratch = tempfile.mkdtemp(dir=work)
                command = [sys.executable, __file__, "--child", tool, kind, source, scratch, *names]
                environment = as_installed(os.environ | s3.environment_at(endpoint))
                result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
                shutil.rmtree(scratch, ignore_errors=True)
                if result.returncode:
                    if number == 0:
                        print(f"SKIPPED {key}: {result.stderr.strip().splitlines()[-1][:160]}")
                    continue
                results.setdefault(key, []).append(json.loads(result.stdout.strip().splitlines()[-1]))
                print(key, results[key][-1], file=sys.stderr, flush=True)
    for folder in work.glob(f"{kind}-*"):
        shutil.rmtree(folder)


def parts_of(results: dict[str, list[dict[str, float]]]) -> dict[str, Part]:
    """Return tables of medians, one for each kind of rows and location, with the goals."""
    parts: dict[str, Part] = {}
    header = ("tool", "rows/s", "MB/s", "CPU s", "first batch s", "peak MB", "brim's speed to it")
    for place in dict.fromkeys(key.rpartition(" ")[0] for key in results):
        kind = place.split()[0]
        part = parts[place] = Part(f"{KINDS[kind][0]:,} rows of {KINDS[kind][1]:,} bytes, {place.split()[1]}", header)
        medians = {}
        for tool in MODULES:
            if runs := results.get(f"{place} {tool}"):
                part.runs[tool] = runs
                medians[tool] = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        brim = medians.get("brim")
        for tool, found in medians.items():
            speed = "" if brim is None else f"{brim['rows_s'] / found['rows_s']:.2f}×"
            mb_s = found["rows_s"] * KINDS[kind][1] / 1e6
            times = (
                f"{found['rows_s']:,.0f}",
                f"{mb_s:,.0f}",
                f"{found['cpu_seconds']:.2f}",
                f"{found['first_s']:.2f}",
            )
            part.rows.append((tool, *times, f"{found['peak_mb']:,.0f}", speed))
        peers = {tool: found for tool, found in medians.items() if tool != "brim"}
        if brim is None or not peers:
            continue
        for tool in ("datasets-stream", "webdataset"):
            if tool in peers:
                part.goals.append(at_least(f"speed to {tool}", brim["rows_s"] / peers[tool]["rows_s"], 1, "×"))
        fastest = max(found["rows_s"] for found in peers.values())
        part.goals.append(at_least("speed to the fastest", brim["rows_s"] / fastest, 0.8, "×"))
        least = min(found["peak_mb"] for tool, found in peers.items() if tool != "datasets-map")
        part.goals.append(at_most("peak memory to the least of a streaming peer", brim["peak_mb"] / least, 1, "×"))
        part.goals.append(at_most("first batch", brim["first_s"], 1, " s"))
    return parts


if __name__ == "__main__":
    main()

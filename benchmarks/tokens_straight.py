"""Tokenize JSONL without a limit, resuming, checks or verification, as a baseline. `SOURCE TOKENIZER FOLDER`

Two processes, half of the file each: blocks of lines, orjson, gigatoken, row groups of 2 million ids in Parquet with
zstd-1 without statistics, and SHA-256 while writing. An upper bound for brim's own pipeline, compared in CPU-seconds.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES, GROUP_IDS = 4 << 20, 1 << 21


def main() -> None:
    source, tokenizer, folder = sys.argv[1:4]
    Path(folder).mkdir(parents=True)
    size, cores = os.path.getsize(source), 2
    edges = [size * number // cores for number in range(cores + 1)]
    fork = multiprocessing.get_context("fork")
    jobs = [
        fork.Process(target=half, args=(source, *edges[number : number + 2], tokenizer, f"{folder}/{number}.parquet"))
        for number in range(cores)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    sys.exit(any(job.exitcode for job in jobs))


def half(source: str, start: int, end: int, tokenizer: str, target: str) -> None:
    import gigatoken
    import numpy as np
    import orjson
    import pyarrow as pa
    import pyarrow.parquet as pq

    encode = gigatoken.Tokenizer.from_json(Path(tokenizer).read_bytes()).backend.encode
    schema = pa.schema([("input_ids", pa.list_(pa.int32()))])
    digest = hashlib.sha256()
    with open(target, "wb") as file:

        class Hashed:
            closed = False

            def write(self, data: bytes) -> int:
                digest.update(data)
                return file.write(data)

            def flush(self) -> None: ...
            def close(self) -> None: ...

        writer = pq.ParquetWriter(
            pa.PythonFile(Hashed(), mode="w"),
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=False,
            write_statistics=False,
        )
        retained: list[np.ndarray] = []
        count = 0

        def write_group() -> None:
            offsets = np.zeros(len(retained) + 1, np.int32)
            np.cumsum([len(ids) for ids in retained], out=offsets[1:])
            values = np.concatenate(retained).view(np.int32)
            column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
            writer.write_table(pa.Table.from_arrays([column], schema=schema), row_group_size=len(retained))
            retained.clear()

        for block in blocks(source, start, end):
            for line in block.split(b"\n"):
                if line:
                    retained.append(encode(orjson.loads(line)["text"]))
                    count += len(retained[-1])
            if count >= GROUP_IDS:
                write_group()
                count = 0
        if retained:
            write_group()
        writer.close()


def blocks(source: str, start: int, end: int) -> Iterator[bytes]:
    """Yield blocks of whole lines that begin between the two offsets."""
    with open(source, "rb") as file:
        file.seek(max(start - 1, 0))
        if start:
            file.readline()
        while file.tell() < end:
            block = file.read(min(BLOCK_BYTES, end - file.tell()))
            yield block + file.readline()


if __name__ == "__main__":
    main()

"""The same selection by other libraries: rows whose key is below a number, shuffled, written as Parquet.

The output is synced, as brim's shards are, and the time for this is printed. None of the libraries hashes it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

SYNCED = "seconds to sync:"


def duckdb_way(limit: str, source: str, out: Path, maximum: int) -> None:
    import duckdb

    with duckdb.connect(config={"memory_limit": limit, "temp_directory": str(out / "tmp")}) as connection:
        query = f"SELECT * FROM '{source}' WHERE key < {maximum} ORDER BY hash(n)"
        connection.execute(f"COPY ({query}) TO '{out / 'out.parquet'}' (FORMAT parquet)")


def polars_way(source: str, out: Path, maximum: int) -> None:
    import polars

    rows = polars.scan_parquet(source).filter(polars.col("key") < maximum).sort(polars.col("n").hash())
    rows.sink_parquet(out / "out.parquet")


def datasets_way(source: str, out: Path, maximum: int) -> None:
    import datasets

    rows = datasets.load_dataset("parquet", data_files=source, split="train", cache_dir=str(out / "cache"))
    selection = rows.filter(lambda key: key < maximum, input_columns="key").shuffle(seed=7)
    selection.save_to_disk(out / "out")


def pyarrow_way(source: str, out: Path, maximum: int) -> None:
    import numpy as np
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    table = ds.dataset(source).to_table(filter=ds.field("key") < maximum)
    pq.write_table(table.take(np.random.default_rng(7).permutation(len(table))), out / "out.parquet")


def far(peer: str, destination: str, numbers: list[int]) -> None:
    """Read rows of remote shards by their numbers and keep the values in memory."""
    actual: list[bytes]
    if peer == "polars":
        import polars

        options = {"aws_endpoint_url": os.environ["AWS_ENDPOINT_URL"], "aws_allow_http": "true"}
        rows = polars.scan_parquet(f"s3://{destination}/*.parquet", storage_options=options)
        selection = rows.filter(polars.col("n").is_in(numbers)).collect()
        actual = [item["bytes"] for item in selection["image"].to_list()]
    elif peer == "datasets":
        import datasets

        filters = [("n", "in", numbers)]
        stream = datasets.load_dataset(destination, split="train", streaming=True, filters=filters)
        actual = [row["image"]["bytes"] for row in stream.cast_column("image", datasets.Image(decode=False))]
    else:
        import pyarrow.dataset as ds

        if peer == "pyarrow-hub":
            from huggingface_hub import HfFileSystem

            reader = ds.dataset(f"datasets/{destination}/data", filesystem=HfFileSystem())
        else:
            from pyarrow.fs import S3FileSystem

            position = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
            reader = ds.dataset(destination, filesystem=S3FileSystem(endpoint_override=position, scheme="http"))
        table = reader.to_table(filter=ds.field("n").isin(numbers))
        actual = [entry["bytes"] for entry in table.column("image").to_pylist()]
    assert len(actual) == len(numbers)
    os._exit(0)  # libraries with threads may abort the process at exit


def main() -> None:
    peer, source, folder, maximum = sys.argv[1:]
    if peer.startswith("far-"):
        far(peer.removeprefix("far-"), source, [int(number) for number in folder.split(",")])
        return
    out = Path(folder)
    out.mkdir(parents=True)
    if peer.startswith("duckdb"):
        duckdb_way(peer.partition("-")[2], source, out, int(maximum))
    else:
        {"polars": polars_way, "datasets": datasets_way, "pyarrow": pyarrow_way}[peer](source, out, int(maximum))
    started_at = time.monotonic()
    for file in [path for path in out.glob("out*/**/*") if path.is_file()] + list(out.glob("out.*")):
        with open(file, "rb+") as reader:
            os.fsync(reader.fileno())
    print(SYNCED, time.monotonic() - started_at)


if __name__ == "__main__":
    main()

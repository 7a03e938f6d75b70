"""The same selection by other libraries: rows whose key is below a number, shuffled, written as Parquet.

What they wrote is synced, as brim's shards are, and how long that took is printed. None of them hashes it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

SYNCED = "seconds to sync:"


def duckdb_way(limit: str, source: str, out: Path, most: int) -> None:
    import duckdb

    with duckdb.connect(config={"memory_limit": limit, "temp_directory": str(out / "tmp")}) as connection:
        query = f"SELECT * FROM '{source}' WHERE key < {most} ORDER BY hash(n)"
        connection.execute(f"COPY ({query}) TO '{out / 'out.parquet'}' (FORMAT parquet)")


def polars_way(source: str, out: Path, most: int) -> None:
    import polars

    rows = polars.scan_parquet(source).filter(polars.col("key") < most).sort(polars.col("n").hash())
    rows.sink_parquet(out / "out.parquet")


def datasets_way(source: str, out: Path, most: int) -> None:
    import datasets

    rows = datasets.load_dataset("parquet", data_files=source, split="train", cache_dir=str(out / "cache"))
    chosen = rows.filter(lambda key: key < most, input_columns="key").shuffle(seed=7)
    chosen.save_to_disk(out / "out")


def pyarrow_way(source: str, out: Path, most: int) -> None:
    import numpy as np
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    table = ds.dataset(source).to_table(filter=ds.field("key") < most)
    pq.write_table(table.take(np.random.default_rng(7).permutation(len(table))), out / "out.parquet")


def far(peer: str, place: str, numbers: list[int]) -> None:
    """Rows by number of shards that are far away: their values, held."""
    found: list[bytes]
    if peer == "polars":
        import polars

        options = {"aws_endpoint_url": os.environ["AWS_ENDPOINT_URL"], "aws_allow_http": "true"}
        rows = polars.scan_parquet(f"s3://{place}/*.parquet", storage_options=options)
        chosen = rows.filter(polars.col("n").is_in(numbers)).collect()
        found = [one["bytes"] for one in chosen["image"].to_list()]
    elif peer == "datasets":
        import datasets

        filters = [("n", "in", numbers)]
        stream = datasets.load_dataset(place, split="train", streaming=True, filters=filters)
        found = [row["image"]["bytes"] for row in stream.cast_column("image", datasets.Image(decode=False))]
    else:
        import pyarrow.dataset as ds

        if peer == "pyarrow-hub":
            from huggingface_hub import HfFileSystem

            opened = ds.dataset(f"datasets/{place}/data", filesystem=HfFileSystem())
        else:
            from pyarrow.fs import S3FileSystem

            at = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
            opened = ds.dataset(place, filesystem=S3FileSystem(endpoint_override=at, scheme="http"))
        table = opened.to_table(filter=ds.field("n").isin(numbers))
        found = [one["bytes"] for one in table.column("image").to_pylist()]
    assert len(found) == len(numbers)
    os._exit(0)  # libraries with threads of their own may abort a process that ends


def main() -> None:
    peer, source, folder, most = sys.argv[1:]
    if peer.startswith("far-"):
        far(peer.removeprefix("far-"), source, [int(number) for number in folder.split(",")])
        return
    out = Path(folder)
    out.mkdir(parents=True)
    if peer.startswith("duckdb"):
        duckdb_way(peer.partition("-")[2], source, out, int(most))
    else:
        {"polars": polars_way, "datasets": datasets_way, "pyarrow": pyarrow_way}[peer](source, out, int(most))
    begin = time.monotonic()
    for file in [path for path in out.glob("out*/**/*") if path.is_file()] + list(out.glob("out.*")):
        with open(file, "rb+") as opened:
            os.fsync(opened.fileno())
    print(SYNCED, time.monotonic() - begin)


if __name__ == "__main__":
    main()

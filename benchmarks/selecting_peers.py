"""The same selection by other libraries: rows whose key is below a number, shuffled, written as Parquet."""

from __future__ import annotations

import sys
from pathlib import Path


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


def main() -> None:
    peer, source, folder, most = sys.argv[1:]
    out = Path(folder)
    out.mkdir(parents=True)
    if peer.startswith("duckdb"):
        duckdb_way(peer.partition("-")[2], source, out, int(most))
    else:
        {"polars": polars_way, "datasets": datasets_way, "pyarrow": pyarrow_way}[peer](source, out, int(most))


if __name__ == "__main__":
    main()

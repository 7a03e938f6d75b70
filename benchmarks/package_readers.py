"""Worker of package.py: read Parquet files of one struct<bytes, path> column in turn, several times.

The turns are taken within one process, so that other load on the machine affects all files alike. Prints
JSON for each file: the seconds of each read (without imports, start and the check of the result), and
the bytes and rows that were read, so that the caller can compare the content of the files.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from typing import Any, Protocol


class Reader(Protocol):
    def read(self, path: str, column: str) -> Any: ...
    def totals(self, result: Any, column: str) -> tuple[int, int]: ...


class PyArrow:
    def __init__(self) -> None:
        import pyarrow.compute
        import pyarrow.parquet

        self._compute, self._parquet = pyarrow.compute, pyarrow.parquet

    def read(self, path: str, column: str) -> Any:
        return self._parquet.read_table(path)

    def totals(self, result: Any, column: str) -> tuple[int, int]:
        content = self._compute.struct_field(result.column(column), "bytes")
        return self._compute.sum(self._compute.binary_length(content)).as_py(), result.num_rows


class DuckDB:
    def __init__(self) -> None:
        import duckdb

        self._connection = duckdb.connect()

    def read(self, path: str, column: str) -> Any:
        content = f"struct_extract(\"{column}\", 'bytes')"
        query = f"SELECT sum(octet_length({content})), count(*) FROM read_parquet(?)"
        return self._connection.execute(query, [path]).fetchone()

    def totals(self, result: Any, column: str) -> tuple[int, int]:
        return int(result[0]), int(result[1])


class Polars:
    def __init__(self) -> None:
        import polars

        self._polars = polars

    def read(self, path: str, column: str) -> Any:
        return self._polars.read_parquet(path)

    def totals(self, result: Any, column: str) -> tuple[int, int]:
        return int(result[column].struct.field("bytes").bin.size().sum()), result.height


READERS: dict[str, type[Reader]] = {"pyarrow": PyArrow, "duckdb": DuckDB, "polars": Polars}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("column")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--reads", type=int, required=True)
    arguments = parser.parse_args()
    reader = READERS[arguments.reader]()
    actual: dict[str, dict[str, Any]] = {file: {"seconds": []} for file in arguments.files}
    for number in range(arguments.reads):
        for file in arguments.files[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            result = reader.read(file, arguments.column)
            actual[file]["seconds"].append(time.perf_counter() - start)
            actual[file]["bytes"], actual[file]["rows"] = reader.totals(result, arguments.column)
            del result
            gc.collect()
    print(json.dumps(list(actual.values())))


if __name__ == "__main__":
    main()

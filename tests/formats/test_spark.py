"""Shards read by Spark, which uses the Java reader of Parquet. Too large for every run: `make test-spark`."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.conftest import brim, random_bytes, write_files

pytestmark = pytest.mark.spark


def test_spark_reads_every_byte(tmp_path: Path) -> None:
    """Spark reads scalar and list columns with nulls, empty values and large files as pyarrow does."""
    pyspark = pytest.importorskip("pyspark.sql", reason="Spark is not proved here: pyspark is not installed")
    contents = {f"f{i}.bin": random_bytes(size, i) for i, size in enumerate((0, 1, 700, 3_000_000, 40))}
    source = write_files(tmp_path / "source", contents)
    (source / "t.jsonl").write_text(
        '{"id": 1, "one": "f1.bin", "many": ["f0.bin", "f2.bin"]}\n'
        '{"id": 2, "one": null, "many": []}\n'
        '{"id": 3, "one": "f3.bin", "many": null}\n'
        '{"id": 4, "one": "f4.bin", "many": ["f4.bin", null]}\n'
    )
    out = tmp_path / "out"
    brim("build", source / "t.jsonl", out, "--files", "one", "--files", "many", "--allow-empty")
    session = (
        pyspark.SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    try:
        rows = session.read.parquet(str(out / "data")).orderBy("id").collect()
        spark = [_plain(row.asDict(recursive=True)) for row in rows]
        actual = session.read.parquet(str(out / "data")).where("id = 3").select("one.bytes").collect()
    finally:
        session.stop()
    assert spark == [_plain(row) for row in pq.read_table(out / "data").to_pylist()]
    assert bytes(actual[0]["bytes"]) == contents["f3.bin"]


def _plain(value: object) -> object:
    """Convert the byte arrays of Spark to bytes."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return bytes(value) if isinstance(value, bytearray) else value

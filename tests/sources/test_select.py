"""Selecting rows of existing datasets by small columns: locally, from buckets, from the Hub and from web servers."""

import base64
import functools
import http.server
import json
import os
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import brim as library
from brim.errors import DestinationError, InputError, VerificationError
from brim.progress import Progress
from brim.sources.selection import keyed
from tests.forked import brim
from tests.hub import TestHub
from tests.publishing import DEST, Machine
from tests.s3 import S3Server
from tests.s3.server import PRIVATE

KEYED = [
    7829738945804519827,
    7262244526134052342,
    5433552763931472952,
    17698183260061588086,
    6170008901454732507,
]  # the order must never change
FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def people(rows: int = 90, size: int = 4000) -> pa.Table:
    """Return three rows per subject, each with an incompressible scan."""
    rng = random.Random(rows)
    return pa.table(
        {
            "subject": [f"s{n // 3:02d}" for n in range(rows)],
            "age": pa.array([None if n % 10 == 9 else 20 + n for n in range(rows)]),
            "sex": [("F", "M", None)[n % 3] for n in range(rows)],
            "scan": pa.array([{"bytes": rng.randbytes(size), "path": f"s{n}/scan.png"} for n in range(rows)], FILE),
        }
    )


def shards(folder: Path, table: pa.Table, count: int = 3, split: str = "train", **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    step = -(-len(table) // count)
    for number in range(count):
        name = f"{split}-{number:05d}-of-{count:05d}.parquet"
        pq.write_table(table.slice(number * step, step), folder / name, **options)
    return folder


def read(folder: Path, split: str = "train") -> pa.Table:
    files = sorted((folder / "data").glob(f"{split}-*.parquet"))
    return pa.concat_tables([pq.read_table(file) for file in files]).replace_schema_metadata(None)


def test_where_is_pyarrows_filter(tmp_path: Path) -> None:
    """Rows, values and schema of a filter equal those of pyarrow, and the result verifies."""
    table = people()
    source = shards(tmp_path / "in", table)
    result = brim("select", source, tmp_path / "out", "--where", 'age > 40 and sex == "F"', "--shard-size", "40KB")
    assert "of 90 rows" in result.stdout
    import pyarrow.compute as pc

    expected = table.filter((pc.field("age") > 40) & (pc.field("sex") == "F"))
    assert read(tmp_path / "out").equals(expected)
    brim("verify", tmp_path / "out")
    brim("verify", tmp_path / "out", source)
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'from in; where age > 40 and sex == "F"; chosen' in card
    assert str(tmp_path) not in card
    ledger = (tmp_path / "out" / ".brim" / "ledger.jsonl").read_text()
    assert json.dumps('age > 40 and sex == "F"')[1:-1] in ledger


def test_several_conditions_hold_together(tmp_path: Path) -> None:
    """Several --where options are combined by `and` in every command. Each must be a complete expression."""
    table = people()
    source = shards(tmp_path / "in", table)
    inputs = ["--where", "age > 40 or age < 27", "--where", 'sex == "F"']
    expected = library.dataset(source).where('(age > 40 or age < 27) and sex == "F"').small(["age"])
    brim("select", source, tmp_path / "out", *inputs)
    assert read(tmp_path / "out").column("age").to_pylist() == expected.column("age").to_pylist()
    (tmp_path / "same.py").write_text("def same(row):\n    return row\n")
    brim("map", source, tmp_path / "mapped", "--fn", f"{tmp_path}/same.py:same", *inputs)
    assert read(tmp_path / "mapped").column("age").to_pylist() == expected.column("age").to_pylist()
    for verb in (("unpack", source, tmp_path / "files"), ("check", source)):
        none = brim(*verb, "--where", "age > 40", "--where", "age < 40", check=2)
        assert "No row was selected" in none.stderr
    result = brim("select", source, tmp_path / "no", *inputs, "--where", "1) or (1", check=2)
    assert "--where is not an expression" in result.stderr


def test_a_shuffle_is_the_same_for_ever(tmp_path: Path) -> None:
    """The order of a shuffle depends only on the seed and the row numbers."""
    source = shards(tmp_path / "in", people(30))
    first = library.dataset(source).shuffle(7).small(["age"]).column("age").to_pylist()
    assert library.dataset(source).shuffle(7).where("age is not None").small(["age"]).column("age").to_pylist() == [
        age for age in first if age is not None
    ]
    assert keyed(np.arange(5), 7, "shuffle").tolist() == KEYED
    assert library.dataset(source).shuffle(8).small(["age"]).column("age").to_pylist() != first


def test_a_split_leaks_no_subject(tmp_path: Path) -> None:
    """With --group-by, all rows of a subject are in the same split, and every row is in one split."""
    source = shards(tmp_path / "in", people())
    result = brim("select", source, tmp_path / "out", "--split-into", "train=0.8,test=0.2", "--group-by", "subject")
    train, test = (read(tmp_path / "out", split) for split in ("train", "test"))
    assert f"train {len(train)}, test {len(test)}" in result.stdout
    assert not set(train["subject"].to_pylist()) & set(test["subject"].to_pylist())
    assert len(train) + len(test) == 90
    assert 9 <= len(test) <= 27
    names = [*train["scan"].to_pylist(), *test["scan"].to_pylist()]
    assert sorted(item["path"] for item in names) == sorted(entry["path"] for entry in people()["scan"].to_pylist())


def test_join_sort_unique(tmp_path: Path) -> None:
    """Two datasets can be concatenated, sorted, and reduced to unique contents."""
    table = people(30)
    first, two = shards(tmp_path / "one", table.slice(0, 20), 1), shards(tmp_path / "two", table.slice(10, 20), 2)
    out = tmp_path / "out"
    brim("select", first, out, "--also", two, "--unique", "content", "--sort-by", "-subject,sex", "--num-shards", "1")
    expected = table.sort_by([("subject", "descending"), ("sex", "ascending")])
    assert read(out).column("scan").to_pylist() == expected.column("scan").to_pylist()


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (["--where", "agee > 4"], "Did you mean age"),
        (["--where", "age >"], "is not an expression"),
        (["--columns", "nothing"], "no column 'nothing'"),
        (["--split-into", "train=0.9"], "add up to 1"),
        (["--group-by", "subject"], "can only be used with --split-into"),
        (["--shuffle", "1", "--sort-by", "age"], "cannot be used with --shuffle"),
        (["--sample", "many"], "number of rows or a percentage"),
        (["--from-split", "test"], "no split 'test'"),
        (["--where", "sex == 'F' and nothing > 1"], "Columns: subject, age, sex, scan"),
        (["--where", "sex == F"], 'A text is in quotes, "F"'),
        (["--where", "age > 'old'"], "it does not work on int64 and string"),
        (["--where", " "], "--where is empty"),
        (["--sql", ""], "--sql is empty"),
        (["--columns", ","], "takes the names of columns"),
        (["--where", "age in ['old']"], "looks for 'old' in a column of int64"),
        (["--where", "age > 1000"], "No row was selected"),
        (["--sql", "age > 1) or (1 = 1"], "DuckDB cannot run"),
        (["--sql", "age"], "a condition that is true or false"),
        (["--split-into", "a=nan,b=0.5"], "add up to 1"),
        (["--split-into", "a=0.5,a=0.5"], "names 'a' twice"),
        (["--split-into", "a=0.5,b=0.5", "--group-by", "scan"], "cannot be grouped by the files"),
    ],
)
def test_what_is_wrong_is_said_before(tmp_path: Path, options: list[str], arguments: str) -> None:
    """Invalid options are refused before anything is written."""
    source = shards(tmp_path / "in", people(9), 1)
    result = brim("select", source, tmp_path / "out", *options, check=2)
    assert arguments in result.stderr
    assert not (tmp_path / "out").exists()


def test_shards_in_another_order_of_columns(tmp_path: Path) -> None:
    """Shards may differ in the order and nullability of columns, but not in their types."""
    table = people(9).append_column("deep", pa.array([{"raw": b"x", "n": n} if n else None for n in range(9)]))
    fields = [field.with_nullable(False) for field in table.schema]
    full = table.filter(pc.is_valid(pc.field("age")) & pc.is_valid(pc.field("sex")) & pc.is_valid(pc.field("deep")))
    (tmp_path / "in").mkdir()
    pq.write_table(full.cast(pa.schema(fields)), tmp_path / "in" / "a.parquet")
    pq.write_table(table.select(["deep", "scan", "age", "subject", "sex"]), tmp_path / "in" / "b.parquet")
    pq.write_table(table.slice(0, 0), tmp_path / "in" / "c.parquet")
    brim("select", tmp_path / "in", tmp_path / "out", "--where", "age < 27 or age is None")
    expected = pa.concat_tables([full, table]).filter((pc.field("age") < 27) | pc.is_null(pc.field("age")))
    assert read(tmp_path / "out").to_pylist() == expected.to_pylist()
    pq.write_table(table.set_column(1, "age", table["age"].cast(pa.string())), tmp_path / "in" / "d.parquet")
    result = brim("select", tmp_path / "in", tmp_path / "out2", check=2)
    assert "d.parquet has different columns than a.parquet: age (string, not int64)" in result.stderr


def test_steps_on_every_type(tmp_path: Path) -> None:
    """Sorting, grouping and unique work for types that pyarrow cannot compare. Invalid arguments are refused."""
    table = pa.table(
        {
            "n": range(6),
            "word": pa.array(["b", "a", None, "b", "a", "c"]).dictionary_encode(),
            "half": pa.array(np.array([2, 1, np.nan, -1, 1, 0], np.float16)),
            "zero": [0.0, -0.0, None, 0.0, -0.0, 1.0],
            "deep": [{"raw": b"x", "n": 1}] * 6,
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    rows = library.dataset(tmp_path / "in.parquet")
    order = lambda some: some.small(["n"]).column("n").to_pylist()  # noqa: E731
    assert order(rows.sort("word")) == [1, 4, 0, 3, 5, 2]
    assert order(rows.sort(["-half", "-n"])) == [0, 4, 1, 5, 3, 2]
    assert order(rows.sort("zero")) == [0, 1, 3, 4, 5, 2]
    assert order(rows.unique("word")) == [0, 1, 2, 5]
    assert order(rows.unique("zero")) == [0, 2, 5]
    (_, train), (_, test) = rows.split({"train": 0.5, "test": 0.5}, group_by="word").rows_of
    assert not {table["word"][n].as_py() for n in train} & {table["word"][n].as_py() for n in test}
    assert len(rows.sample("100%")) == 6
    assert len(rows.sample("0.3e1")) == len(rows.sample(3)) == 3
    assert len(rows.sample("2,857,545")) == 6
    assert order(rows.shuffle(-1)) != order(rows.shuffle(1))
    for wrong in (lambda: len(rows.sample("inf%")), lambda: rows.take([0.5]), lambda: rows.take([True] * 6),
                  lambda: rows.shuffle(1.5), lambda: rows.shuffle(True), lambda: len(rows.limit(0)),
                  lambda: len(rows.sort("deep"))):  # fmt: skip
        with pytest.raises(InputError):
            wrong()


def test_the_source_is_never_the_destination(tmp_path: Path) -> None:
    """The destination cannot be the source, for any spelling of the path, and DEST is required."""
    brim("select", shards(tmp_path / "in", people(9), 1), tmp_path / "out")
    before = sorted((tmp_path / "out" / "data").iterdir())
    assert "is the source itself" in brim("select", tmp_path / "out", tmp_path / "in/../out", check=2).stderr
    brim("select", tmp_path / "out", check=2)
    assert sorted((tmp_path / "out" / "data").iterdir()) == before
    for inside in (".", "data", "new/one"):
        assert "is the source itself" in brim("select", tmp_path / "in", tmp_path / "in" / inside, check=2).stderr
    assert len(list((tmp_path / "in").iterdir())) == 1


def test_a_split_without_rows_is_told(tmp_path: Path) -> None:
    """A split without rows is reported."""
    source = shards(tmp_path / "in", people(9), 1)
    result = brim("select", source, tmp_path / "out", "--split-into", "train=0.99,test=0.01", "--limit", "3")
    assert "no row is left for the split 'test'" in result.stderr
    assert len(read(tmp_path / "out")) == 3


def test_unpack_of_one_subject(tmp_path: Path) -> None:
    """Unpacking a selection writes exactly the files of its rows.

    Paths that leave the folder or occur twice are refused.
    """
    table = people(9)
    source = shards(tmp_path / "in", table, 1)
    brim("unpack", source, tmp_path / "files", "--where", 'subject == "s01"', "--columns", "scan")
    actual = {str(path.relative_to(tmp_path / "files")) for path in (tmp_path / "files").rglob("*") if path.is_file()}
    assert actual == {"s3/scan.png", "s4/scan.png", "s5/scan.png"}
    assert (tmp_path / "files/s4/scan.png").read_bytes() == table["scan"][4].as_py()["bytes"]
    refused = [("../out.png", VerificationError), ("/etc/x", VerificationError), ("a/", VerificationError)]
    refused += [(path, InputError) for path in ("a.png", "./a.png", "a.png/b", ".brim-unpack/file", "x" * 300)]
    for path, error in refused:
        bad = pa.table(
            {"n": [1, 2], "f": pa.array([{"bytes": b"1", "path": path}, {"bytes": b"2", "path": "a.png"}], FILE)}
        )
        pq.write_table(bad, tmp_path / "bad.parquet")
        with pytest.raises(error):
            library.unpack(tmp_path / "bad.parquet", tmp_path / "bad", where="n > 0")
        assert not list((tmp_path / "bad").iterdir())


def test_every_verb_takes_what_was_chosen(tmp_path: Path) -> None:
    """map, unpack and check work on selected rows with nested bytes, and cannot write into the source."""
    scans = [{"bytes": row["bytes"], "path": f"{n}.dat"} for n, row in enumerate(people(9)["scan"].to_pylist())]
    table = people(9).drop_columns(["scan"]).append_column("scan", pa.array(scans, FILE))
    table = table.append_column("deep", pa.array([{"raw": bytes([n]), "n": n} for n in range(9)]))
    source = shards(tmp_path / "in", table, 2)
    rows = library.dataset(source).where("age > 22").shuffle(3)
    order = rows.small(["age"])["age"].to_pylist()

    def sizes(row: dict[str, Any]) -> dict[str, Any]:
        return {"size": len(row["scan"]["bytes"]), "first": row["deep"]["raw"][0]}

    library.map(rows, sizes, destination=tmp_path / "mapped")
    mapped = read(tmp_path / "mapped").to_pylist()
    first = {row["age"]: row["deep"]["raw"][0] for row in table.filter(pc.field("age") > 22).to_pylist()}
    assert [(row["age"], row["size"], row["first"]) for row in mapped] == [(age, 4000, first[age]) for age in order]
    assert "nothing to do" in str(library.map(rows, sizes, destination=tmp_path / "mapped"))
    assert library.unpack(rows, tmp_path / "files").files == len(order)
    assert library.check(rows).ok
    with pytest.raises(DestinationError, match="is inside it"):
        library.map(rows, sizes, destination=source)
    parts = rows.split(train=0.5, test=0.5)
    with pytest.raises(InputError, match="several splits"):
        library.map(parts, sizes, destination=tmp_path / "split")
    library.map(parts, sizes, destination=tmp_path / "split", from_split="test")
    assert len(read(tmp_path / "split")) == len(parts.rows_of[1][1])


@pytest.mark.parametrize("inputs", ["*.parquet", "train-00000-of-00001.parquet"])
def test_unpack_of_files(tmp_path: Path, inputs: str) -> None:
    """Shards can be unpacked by name, but not into their own folder."""
    source = shards(tmp_path / "in", people(9), 1)
    assert "9 files" in brim("unpack", source / inputs, tmp_path / "files").stdout
    assert len(list((tmp_path / "files").rglob("*.png"))) == 9
    result = brim("unpack", source, source / "files", "--where", "age > 22", check=2)
    assert "is inside the folder of the shards" in result.stderr
    assert [path.name for path in source.iterdir()] == ["train-00000-of-00001.parquet"]


def test_two_columns_of_one_name_are_told(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([b"x"])], names=["a", "a"]), tmp_path / "in.parquet")
    result = brim("select", tmp_path / "in.parquet", tmp_path / "out", check=2)
    assert "in.parquet has two columns of the name 'a'" in result.stderr


def test_encrypted_files_are_told(tmp_path: Path) -> None:
    """An encrypted file or column without a known key is an error."""
    from pyarrow.parquet import encryption

    class Keys(encryption.KmsClient):  # type: ignore[misc]
        def wrap_key(self, key: bytes, name: str) -> bytes:
            return base64.b64encode(key)

    factory = encryption.CryptoFactory(lambda _: Keys())
    table = people(9)
    for name, plain in (("whole", False), ("column", True)):
        configuration = encryption.EncryptionConfiguration(
            footer_key="f", column_keys={"c": ["sex"]}, plaintext_footer=plain
        )
        properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), configuration)
        with pq.ParquetWriter(tmp_path / f"{name}.parquet", table.schema, encryption_properties=properties) as writer:
            writer.write_table(table)
    result = brim("select", tmp_path / "whole.parquet", tmp_path / "out", check=2)
    assert "whole.parquet is encrypted, and brim has no key" in result.stderr
    result = brim("select", tmp_path / "column.parquet", tmp_path / "out", check=2)
    assert "The column 'sex' of column.parquet is encrypted" in result.stderr
    assert len(library.dataset(tmp_path / "column.parquet").columns(["age"]).where("age > 22")) == 6
    (tmp_path / "step.py").write_text("def step(row):\n    return {'k': 1}\n")
    for name in ("whole", "column"):
        options = ("--fn", f"{tmp_path}/step.py:step", "--workers", "1")
        for command, extra in (("map", options), ("build", ())):
            result = brim(command, tmp_path / f"{name}.parquet", tmp_path / "out", *extra, check=2)
            assert re.search(rf"{name}\.parquet'? is encrypted, and brim has no key", result.stderr)


def test_unpack_of_somebody_elses_dataset(tmp_path: Path) -> None:
    """All files of a foreign dataset are unpacked, with a note that it has no receipt."""
    table = people(9)
    result = brim("unpack", shards(tmp_path / "in", table, 2), tmp_path / "files")
    assert "9 files" in result.stdout
    assert "without a receipt" in result.stdout
    actual = {path.parent.name: path.read_bytes() for path in (tmp_path / "files").rglob("*.png")}
    assert actual == {f"s{n}": row["bytes"] for n, row in enumerate(table["scan"].to_pylist())}


def test_bytes_deep_inside(tmp_path: Path) -> None:
    """Files in structs and in lists of lists are copied without decoding."""
    rng = random.Random(3)
    deep = [{"image": {"bytes": rng.randbytes(3000), "path": f"{n}.png"}, "site": "ab"[n % 2]} for n in range(40)]
    lists = [[[rng.randbytes(50)], []] if n % 3 else None for n in range(40)]
    table = pa.table({"n": range(40), "sample": pa.array(deep), "more": pa.array(lists)})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=7)
    result = brim(
        "select", tmp_path / "in.parquet", tmp_path / "out", "--where", "sample.site == 'b'", "--shuffle", "1"
    )
    assert "decoded" not in result.stderr + result.stdout
    assert read(tmp_path / "out").sort_by("n").to_pylist() == [row for row in table.to_pylist() if row["n"] % 2]
    with pytest.raises(InputError, match="has bytes inside"):
        library.dataset(tmp_path / "in.parquet").unique("sample").table()


def test_bytes_in_maps_are_decoded(tmp_path: Path) -> None:
    """Bytes in maps and fixed-size lists are decoded, but only for the selected rows, and a note is printed."""
    maps = [[("a", b"1" * n), ("b", None)] if n % 5 else None for n in range(40)]
    fixed = [[bytes([n]), b""] for n in range(40)]
    kinds = {"map": pa.map_(pa.string(), pa.binary()), "fixed": pa.list_(pa.binary(), 2)}
    table = pa.table({"n": range(40), "map": pa.array(maps, kinds["map"]), "fixed": pa.array(fixed, kinds["fixed"])})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=7)
    result = brim("select", tmp_path / "in.parquet", tmp_path / "out", "--where", "n > 20", "--shuffle", "1")
    assert "bytes inside of 'map', 'fixed' are decoded to disk" in result.stderr
    assert read(tmp_path / "out").sort_by("n").to_pylist() == table.slice(21).to_pylist()


def test_views_are_read(tmp_path: Path) -> None:
    """String and binary views, which pyarrow cannot take rows of, are selected and sorted."""
    texts = pa.array(["a", None, "b" * 50], pa.string_view())
    raw = pa.array([b"1", b"2" * 99, None], pa.binary_view())
    inside = pa.array([[("k", "c" * 50)], [], None], pa.map_(pa.string(), pa.string_view()))
    pq.write_table(pa.table({"text": texts, "raw": raw, "map": inside}), tmp_path / "in.parquet")
    library.select(tmp_path / "in.parquet", tmp_path / "out", sort_by="-text")
    assert read(tmp_path / "out").to_pylist() == [
        {"text": "b" * 50, "raw": None, "map": None}, {"text": "a", "raw": b"1", "map": [("k", "c" * 50)]},
        {"text": None, "raw": b"2" * 99, "map": []},
    ]  # fmt: skip


def test_features_of_the_card(tmp_path: Path) -> None:
    """Features of the card are used for columns without stored features if they fit, as in `datasets`."""
    import datasets
    import yaml

    from brim.sources.features import features_in

    features = datasets.Features(
        {
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "scan": datasets.Image(),
            "age": datasets.Value("int32"),
            "tags": datasets.List(datasets.Value("string")),
            "more": {"a": datasets.Value("timestamp[us, tz=UTC]")},
            "big": datasets.LargeList({"x": datasets.Value("float32")}),
            "pair": datasets.List(datasets.Value("int8"), 2),
        }
    )
    messages = {"dataset_info": {"features": yaml.safe_load(yaml.safe_dump(features._to_yaml_list()))}}
    read_back = features_in(messages, "default")
    assert read_back is not None
    assert datasets.Features.from_dict(read_back) == features
    table = people(4).select(["age", "scan"]).append_column("label", pa.array([0, 1, 1, 0]))
    source = shards(tmp_path / "in", table, 1)
    (source / "README.md").write_text(f"---\n{yaml.safe_dump(messages)}---\n")
    actual = library.dataset(source)
    assert actual.features is not None
    assert actual.features["label"]["names"] == ["cat", "dog"]
    assert actual.features["age"] == {"dtype": "int64", "_type": "Value"}  # the card has another type
    assert len(actual.where("label == 'dog'")) == 2


def test_licences_and_citations(tmp_path: Path) -> None:
    """The card names both licenses and citations of concatenated datasets.

    Different licenses become `other`, with a warning.
    """
    for name, licence in (("one", "mit"), ("two", "cc-by-4.0")):
        cited = "```bibtex\n@misc{" + name + ", title={T}}\n```\n"
        (shards(tmp_path / name, people(6), 1) / "README.md").write_text(f"---\nlicense: {licence}\n---\n{cited}")
    result = brim("select", tmp_path / "one", tmp_path / "out", "--also", tmp_path / "two", "--where", "age > 21")
    assert "the sources have different licenses: mit; cc-by-4.0" in result.stderr
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: other" in card
    assert "@misc{one" in card
    assert "@misc{two" in card
    assert "one + two" in card
    assert "of 12 rows" in card
    result = brim("select", tmp_path / "out", tmp_path / "again", "--limit", "2")
    assert "the sources have different licenses: mit; cc-by-4.0" in result.stderr
    reread = (tmp_path / "again" / "README.md").read_text()
    assert "license_name: several" in reread
    assert "- **License**: mit; cc-by-4.0 (the licenses of the sources differ" in reread
    assert "```bibtex\n@misc{one, title={T}}\n\n@misc{two, title={T}}\n```" in reread


def test_joined_features_must_agree(tmp_path: Path) -> None:
    """Concatenating columns with different types is refused by name, unless these columns are dropped."""
    second = people(6).set_column(1, "age", pa.array(["old"] * 6))
    first, two = shards(tmp_path / "one", people(6), 1), shards(tmp_path / "two", second, 1)
    result = brim("select", first, tmp_path / "out", "--also", two, check=2)
    assert "'age' has different types in one and in two" in result.stderr
    brim("select", first, tmp_path / "out", "--also", two, "--columns", "subject,scan")
    assert len(read(tmp_path / "out")) == 12


def test_joined_by_what_is_the_same(tmp_path: Path) -> None:
    """Concatenated datasets may differ in the order of columns and in dropped columns, and can be filtered by any."""
    table = people(12)
    extra = table.append_column("more", [[1] * 12]).select(["more", "scan", "sex", "age", "subject"])
    first, two = shards(tmp_path / "one", table, 1), shards(tmp_path / "two", extra, 1)
    location = ["--where", "age > 25", "--drop", "more,age"]
    brim("select", first, tmp_path / "out", "--also", two, *location)
    expected = table.filter(pc.greater(table.column("age"), 25)).drop_columns("age")
    assert read(tmp_path / "out").to_pylist() == expected.to_pylist() * 2
    assert "no column 'moer'" in brim("select", first, tmp_path / "no", "--also", two, "--drop", "moer", check=2).stderr


def test_what_is_no_dataset_says_what_it_is(tmp_path: Path) -> None:
    """Text files and folders of save_to_disk are refused with a suggestion. A Parquet file may have any name."""
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    assert "not a Parquet or tar file" in brim("select", tmp_path / "rows.csv", tmp_path / "out", check=2).stderr
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    assert "load_from_disk()" in brim("select", tmp_path / "saved", tmp_path / "out", check=2).stderr
    pq.write_table(people(6), tmp_path / "people.pq")
    brim("select", tmp_path / "people.pq", tmp_path / "out")
    assert len(read(tmp_path / "out")) == 6


def test_webdataset(tmp_path: Path) -> None:
    """Tars of brim or of the webdataset library are sources like any other."""
    import webdataset

    table = people(12)
    source = shards(tmp_path / "in", table, 1)
    brim("select", source, tmp_path / "tars", "--format", "webdataset", "--rows-per-shard", "5")
    brim("select", tmp_path / "tars", tmp_path / "back", "--where", "age > 24")
    assert read(tmp_path / "back")["scan"].to_pylist() == [
        row["scan"] for row in table.to_pylist() if row["age"] is not None and row["age"] > 24
    ]
    with webdataset.TarWriter(str(tmp_path / "a-00000.tar")) as writer:
        for row in table.to_pylist():
            writer.write({"__key__": row["scan"]["path"].partition("/")[0], "png": row["scan"]["bytes"], "cls": 3})
    actual = library.dataset(tmp_path / "a-00000.tar")
    assert actual.column_names == ["__key__", "cls", "png"]
    library.select(tmp_path / "a-00000.tar", tmp_path / "other", where="cls == 3")
    files = [row["png"]["bytes"] for row in read(tmp_path / "other").to_pylist()]
    assert files == [row["scan"]["bytes"] for row in table.to_pylist()]


def test_changed_meanwhile(tmp_path: Path) -> None:
    """A shard that changes after planning is an error, and nothing is published."""
    source = shards(tmp_path / "in", people(9), 1)
    plan = library.plan(library.dataset(source).where("age > 20"), tmp_path / "out")
    os.utime(next(source.iterdir()), ns=(1, 1))
    with pytest.raises(InputError, match="was written to since"):
        plan.run()
    assert not list((tmp_path / "out").glob("data/train*"))


def test_map_of_chosen_rows(tmp_path: Path) -> None:
    """`brim map` with --where and --columns computes batches of the selected rows only."""
    source = shards(tmp_path / "in", people(30).drop_columns(["scan"]), 2)
    (tmp_path / "double.py").write_text("def double(row):\n    return {'twice': row['age'] * 2}\n")
    brim(
        "map", source, tmp_path / "out", "--fn", f"{tmp_path}/double.py:double",
        "--where", "age > 30", "--columns", "age,subject", cwd=tmp_path,
    )  # fmt: skip
    ages = [age for age in people(30)["age"].to_pylist() if age is not None and age > 30]
    assert read(tmp_path / "out")["twice"].to_pylist() == [2 * age for age in ages]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[TestHub]:
    with TestHub(tmp_path / "hub", regular_bytes=1000) as running:
        yield running


def test_from_the_hub(hub: TestHub, tmp_path: Path) -> None:
    """Unpacking one subject from the Hub downloads only its bytes, and no other host gets the token."""
    table = people(300, 30_000)
    source = shards(
        tmp_path / "in", table, 2, write_page_index=True, use_dictionary=["subject", "sex"], compression="none"
    )
    machine = Machine(hub, tmp_path)
    brim("select", source, DEST, "--shard-size", "5MB", env=machine.environment)
    hub.log.clear()
    out = tmp_path / "files"
    brim("unpack", DEST, out, "--where", 'subject == "s40"', "--columns", "scan", env=machine.environment)
    actual = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert actual == {item["path"]: item["bytes"] for item in table["scan"].to_pylist()[120:123]}
    ranged = [line for line in hub.log if "/resolve/" not in line and "/api/" not in line]
    assert len(ranged) <= 6 * 3, hub.log  # three shards: both ends, small columns and the pages of one shard
    brim("select", DEST, tmp_path / "out", "--where", "age > 300", env=machine.environment)
    expected = [row for row in table.to_pylist() if row["age"] is not None and row["age"] > 300]
    assert read(tmp_path / "out").to_pylist() == expected
    assert f"{DEST}@" in (tmp_path / "out" / "README.md").read_text()
    nobody = Machine(hub, tmp_path / "nobody", token=None)
    refused = brim("select", DEST, tmp_path / "no", "--where", "age > 300", env=nobody.environment, check=2)
    assert "hf auth login" in refused.stderr


def test_tokens_from_the_hub(hub: TestHub, tmp_path: Path) -> None:
    """`brim map` reads its rows from the Hub without a local copy of them."""
    source = shards(tmp_path / "in", people(30).drop_columns(["scan"]), 2)
    machine = Machine(hub, tmp_path)
    brim("select", source, DEST, env=machine.environment)
    (tmp_path / "double.py").write_text("def double(row):\n    return {'twice': (row['age'] or 0) * 2}\n")
    function = f"{tmp_path}/double.py:double"
    brim("map", DEST, tmp_path / "out", "--fn", function, env=machine.environment, cwd=tmp_path)
    assert read(tmp_path / "out")["twice"].to_pylist() == [2 * (age or 0) for age in people(30)["age"].to_pylist()]


def test_rows_of_datasets(tmp_path: Path) -> None:
    """`brim.shuffle` and similar functions return the rows, order and features of `datasets`, mapped from disk."""
    import datasets

    table = people(40)
    features = datasets.Features(
        {
            "subject": datasets.Value("string"),
            "age": datasets.Value("int64"),
            "sex": datasets.Value("string"),
            "scan": datasets.Image(decode=False),
        }
    )
    first = datasets.Dataset(table.cast(features.arrow_schema)).cast(features)
    cache = tmp_path / "cache"

    def same(mine: Any, theirs: Any) -> None:
        assert mine.features == theirs.features
        assert mine._indices is None
        assert mine.cache_files
        assert mine.to_list() == theirs.to_list()

    same(library.shuffle(first, seed=3, cache_dir=cache), first.shuffle(seed=3))
    same(library.sort(first, "age", reverse=True, cache_dir=cache), first.sort("age", reverse=True))
    second = first.select(range(5, 9))
    same(library.concatenate_datasets([first, second], cache_dir=cache), datasets.concatenate_datasets([first, second]))
    same(library.flatten_indices(second, cache_dir=cache), second)
    mine = library.train_test_split(first, test_size=0.25, seed=1, cache_dir=cache)
    theirs = first.train_test_split(test_size=0.25, seed=1)
    for split in ("train", "test"):
        same(mine[split], theirs[split])
    several = datasets.DatasetDict(a=first, b=second)
    for seed in (3, {"a": 1, "b": 2}):
        shuffled, expected = library.shuffle(several, seed, cache_dir=cache), several.shuffle(seed)
        for split in several:
            same(shuffled[split], expected[split])
    for wrong in (library.shuffle, library.train_test_split, lambda rows: library.sort(rows, "age")):
        with pytest.raises(InputError, match="This is a list, not a datasets"):
            wrong([1])


def test_rows_of_datasets_have_a_bar(tmp_path: Path) -> None:
    """One progress bar covers all splits and counts their rows. A cached result shows no bar."""
    import datasets

    messages: list[Any] = []

    class Listening(Progress):
        def start(self, label: str, total_bytes: int, shards: int, limit_bytes: int) -> None:
            messages.extend([label, total_bytes])

        def advance(self, size: int) -> None:
            messages.append(size)

        def finish(self) -> None:
            messages.append("finish")

    first, watched = datasets.Dataset.from_dict({"n": list(range(2500))}), Listening()
    for _ in range(2):
        library.train_test_split(first, test_size=500, seed=1, cache_dir=tmp_path, progress=watched)
    subject, total, *sizes, end = messages
    assert (subject, total, sum(sizes), end) == ("split", 8 * 2500, 8 * 2500, "finish")


def test_from_a_bucket(s3: S3Server, s3_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset in a bucket is a source like any other."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    table, destination = people(60, 20_000), f"s3://{PRIVATE}/{s3_prefix.rstrip('/')}"
    brim("select", shards(tmp_path / "in", table, 2), destination, "--shard-size", "300KB")
    brim("select", destination, tmp_path / "out", "--where", "age > 60", "--shuffle", "2")
    actual = read(tmp_path / "out").to_pylist()
    expected = [row for row in table.to_pylist() if row["age"] is not None and row["age"] > 60]
    assert sorted(actual, key=lambda row: row["age"]) == expected
    for itself in (f"{destination}/", f"{destination}/data/*.parquet"):
        assert "is the source itself" in brim("select", itself, destination, "--limit", "1", "--fresh", check=2).stderr
    brim("unpack", destination, tmp_path / "files", "--where", "age == 61")
    assert [path.read_bytes() for path in (tmp_path / "files").rglob("*.png")] == [expected[0]["scan"]["bytes"]]


class _Ranges(http.server.SimpleHTTPRequestHandler):
    """A plain file server with ranges and ETags."""

    asked: list[str] = []  # noqa: RUF012 - shared by all requests of a test

    def do_GET(self) -> None:
        data = Path(self.translate_path(self.path)).read_bytes()
        first, _, last = (self.headers.get("Range") or f"bytes=0-{len(data) - 1}").removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1]
        self.asked.append(f"{self.headers.get('Authorization')} {len(part)}")
        self.send_response(206)
        self.send_header("ETag", f'"{len(data)}"')
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        return None


def test_from_a_web_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file on a web server is read by ranges, without sending a token."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    table = people(60, 100_000)
    pq.write_table(table, tmp_path / "a.parquet", compression="none", row_group_size=3)
    handler = functools.partial(_Ranges, directory=str(tmp_path))
    _Ranges.asked.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/a.parquet"
        brim("unpack", address, tmp_path / "files", "--where", 'subject == "s07"')
        server.shutdown()
    actual = {path.parent.name: path.read_bytes() for path in (tmp_path / "files").rglob("*.png")}
    assert actual == {f"s{n}": table["scan"][n].as_py()["bytes"] for n in (21, 22, 23)}
    assert all(line.startswith("None ") for line in _Ranges.asked)
    assert sum(int(line.split()[1]) for line in _Ranges.asked) < 700_000

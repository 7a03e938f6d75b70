"""Values of JSON lines and CSV are never changed by type inference: they stay text, or the file is refused."""

import gzip
from pathlib import Path

import pytest

from brim.errors import SourceError
from brim.sources.exact_values import exact, is_parseable, load_row, may_differ
from brim.sources.read_table import read_table

CHANGED_JSON = [
    (b'{"a": 12345678901234567890}', "12345678901234567890"),
    (b'{"a": -9223372036854775809}', "-9223372036854775809"),
    (b'{"a": [1, 12345678901234567890]}', "12345678901234567890"),
    (b'{"a": {"b": 12345678901234567890}}', "12345678901234567890"),
    (b'{"a": 9007199254740993}\n{"a": 1.5}', "9007199254740993"),
    (b'{"a": 1e400}', "1e400"),
    (b'{"a": 1, "a": 2}', "'a' occurs twice"),
    (b'{"a": {"b": 1, "b": 2}}', "'b' occurs twice"),
    (b'{"a": [{"b": 1}, {"b": 1, "b": 2}]}', "'b' occurs twice"),
    (b"null", "null, not an object"),
    (b'{"a": 1}\n  null', "null, not an object"),
]


@pytest.mark.parametrize(("lines", "message"), CHANGED_JSON)
@pytest.mark.parametrize("zipped", [False, True])
def test_read_table_refuses_json_that_would_change_and_names_the_line(
    tmp_path: Path, lines: bytes, message: str, zipped: bool
) -> None:
    path = tmp_path / ("t.jsonl.gz" if zipped else "t.jsonl")
    content = b'{"f": "x"}\n\n' + lines + b"\n"
    path.write_bytes(gzip.compress(content) if zipped else content)
    number = 3 + (b"null" in lines and b"\n" in lines)
    with pytest.raises(SourceError, match=f"line {number}: .*{message}"):
        read_table(str(path))


def test_read_table_keeps_json_numbers_that_fit(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": 9223372036854775807, "b": 1e300, "c": 1152921504606846976, "d": -9007199254740992}\n' * 2)
    path.write_text(path.read_text() + '{"a": -9223372036854775808, "b": 1, "c": 0.5, "d": 0.5}\n')
    rows = read_table(str(path)).to_pylist()
    assert rows[0] == {"a": 2**63 - 1, "b": 1e300, "c": float(2**60), "d": -float(2**53)}
    assert rows[2]["a"] == -(2**63)


@pytest.mark.parametrize("value", ["0x10", "0X1f", "007", "1e400", "-1e309", "12345678901234567890", "00"])
@pytest.mark.parametrize("extension", ["csv", "tsv"])
def test_read_table_keeps_csv_values_as_text_that_would_change(tmp_path: Path, value: str, extension: str) -> None:
    path = tmp_path / f"t.{extension}"
    path.write_text(f"a\n1\n{value}\n")
    assert read_table(str(path)).column("a").to_pylist() == ["1", value]


@pytest.mark.parametrize("value", ["1e308", "-1.5E+300", "0.1234567890123456789", "+1", "123456789012345"])
def test_read_table_reads_csv_numbers_that_fit(tmp_path: Path, value: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"a\n1\n{value}\n")
    assert read_table(str(path)).column("a").to_pylist() == [1.0, float(value)]


@pytest.mark.parametrize("header", ["a,a", "a,b,a", "a,b,"])
@pytest.mark.parametrize("row", ["1,2,3", "x,y,z", "007,1,2"])
def test_read_table_refuses_csv_with_columns_of_one_name_or_none(tmp_path: Path, header: str, row: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{header}\n{','.join(row.split(',')[: header.count(',') + 1])}\n")
    with pytest.raises(SourceError, match=r"several columns named 'a'|a column without a name"):
        read_table(str(path))


def test_load_row_ignores_repeated_keys_of_columns_that_are_not_read() -> None:
    assert load_row(b'{"a": 1, "b": 2, "b": 3}', ("a",)) == {"a": 1}
    with pytest.raises(ValueError, match="'b' occurs twice"):
        load_row(b'{"a": 1, "b": 2, "b": 3}', ("b",))


def test_load_row_refuses_keys_with_half_of_a_surrogate_pair() -> None:
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        load_row(b'{"\\ud83d": 1}')


def test_load_row_refuses_deep_nesting() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        load_row(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}")


def test_exact_and_may_differ_agree_at_the_edge_of_a_float() -> None:
    import pyarrow as pa

    assert exact([2**53, {"x": 1}], pa.list_(pa.float64())) == [float(2**53), {"x": 1}]
    with pytest.raises(ValueError, match="9007199254740993"):
        exact(2**53 + 1, pa.float64())
    assert exact(2**53 + 1, pa.int64()) == 2**53 + 1
    assert not may_differ(b"", pa.table({"a": [float(2**53 - 1), None]}))
    assert may_differ(b"", pa.table({"a": [[float(2**53)], None]}))


@pytest.mark.parametrize(
    "text", [b"null\n{}\n", b' null\n{"a": 1}\n', b'\n\r\n\tnull\n{"a": null}\n', b"null\n", b"nonsense"]
)
def test_is_parseable_refuses_text_on_which_the_reader_of_pyarrow_crashes(text: bytes) -> None:
    assert not is_parseable(text)
    assert is_parseable(b'{"a": null}\n' + text)


def test_may_differ_finds_null_lines_among_rows() -> None:
    import pyarrow as pa

    assert may_differ(b'{"a": 1}\n null\n', pa.table({"a": [1, None]}))
    assert may_differ(b"{}\nnull\n", pa.table({"a": [1, 2]}).select([]))
    assert not may_differ(b'{"a": 1}\n{"a": null}\n', pa.table({"a": [1, None]}))

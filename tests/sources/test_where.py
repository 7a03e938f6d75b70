"""`--where` selects rows with the semantics of SQL, and errors show the position."""

from __future__ import annotations

import datetime
import operator
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from brim.errors import InputError
from brim.file_set import Ranges, Segments
from brim.sources.selection import keyed
from brim.sources.where import MOST_CHARACTERS, MOST_DEPTH, may_choose, names_in, sql_mask, where_mask

TABLE = pa.table(
    {
        "age": [1, 50, None, 60],
        "sex": ["F", "M", "F", None],
        "tags": [["x"], [], None, ["y", "x"]],
        "day": [datetime.date(2020, 1, 1), datetime.date(2024, 2, 1), None, datetime.date(2025, 1, 1)],
        "meta": [{"site": "Oslo"}, {"site": "Bern"}, None, {"site": None}],
        "label": [0, 1, 1, None],
        "cost": pa.nulls(4, pa.decimal128(4, 2)),
    }
)
SAME = [
    ("age > 40", "age > 40"),
    ("not age > 40", "not age > 40"),
    ("age > 40 or sex == 'F'", "age > 40 or sex = 'F'"),
    ("sex in ['F', 'X']", "sex in ('F', 'X')"),
    ("sex not in ['F']", "sex not in ('F')"),
    ("'x' in tags", "list_contains(tags, 'x')"),
    ("day >= '2024-01-31'", "day >= date '2024-01-31'"),
    ("meta.site == 'Oslo'", "meta.site = 'Oslo'"),
    ("age is None and sex is not None", "age is null and sex is not null"),
    ("10 < age < 55", "10 < age and age < 55"),
    ("len(tags) > 1", "len(tags) > 1"),
    ("age + 1 > 51 and -age < 0", "age + 1 > 51 and -age < 0"),
    ("sex.lower().startswith('f')", "lower(sex) like 'f%'"),
    ("day.year == 2024", "year(day) = 2024"),
    ("age / 40 > 1.2", "age / 40 > 1.2"),
    ("age / (age - 1) > 1", "age / nullif(age - 1, 0) > 1"),
    ("age in [1, 60.0, 2.5]", "age in (1, 60.0, 2.5)"),
    ("age not in [1, None]", "age not in (1, null)"),
    ("age in [50, None]", "age in (50, null)"),
]


@pytest.mark.parametrize(("text", "sql"), SAME)
def test_what_sql_means(text: str, sql: str) -> None:
    """A condition selects the rows that DuckDB selects, including the treatment of nulls."""
    expected = duckdb.from_arrow(TABLE).project(f"coalesce({sql}, false)").fetchall()
    assert where_mask(text, TABLE).tolist() == [row[0] for row in expected]
    assert sql_mask(sql, TABLE).tolist() == [row[0] for row in expected]


def test_class_labels_by_name() -> None:
    """A label name can be used instead of its number."""
    assert where_mask("label == 'dog'", TABLE, {"label": ["cat", "dog"]}).tolist() == [False, True, True, False]
    with pytest.raises(InputError, match="a class that label does not have"):
        where_mask("label == 'cow'", TABLE, {"label": ["cat", "dog"]})


@pytest.mark.parametrize(
    ("text", "arguments", "position"),
    [
        ("age > 3 and agee > 4", "no|agee", 12),
        ("age > ", "not an expression", None),
        ("sex.foo() == 'a'", "calls an unknown function", 0),
        ("age == 1 and __import__('os').system('x')", "unknown function", 13),
        ("[age for age in sex]", "is not supported", 0),
        ("(lambda: 1)()", "unknown function", 0),
        ("age > 'x'", "it does not work on int64 and string", 0),
        ("cost > 'x'", r"it does not work on decimal128\(4, 2\) and string|Not an integer type", 0),  # pyarrow 21
        ("meta.bytes is None", "asks for 'bytes', which struct<site: string> does not have", 0),
        ("day > 'never'", "compares a date with a text that is not one", 6),
        ("age", "true or false", 0),
        ("age in ['1']", "looks for '1' in a column of int64", 7),
        ("sex in [1]", "looks for 1 in a column of string", 7),
        ("age == 99999999999999999999999", "too large", 7),
        ("  ", "is empty", None),
    ],
)
def test_errors_point(text: str, arguments: str, position: int | None) -> None:
    """Errors in a condition point to their position."""
    with pytest.raises(InputError, match=arguments) as error:
        where_mask(text, TABLE)
    assert "^" in error.value.message or not text.strip()
    if position is not None:
        assert error.value.facts["position"] == position


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("class == 'cat'", 'Write column("class") for the column'),
        ("age > 3 AND sex == 'F'", "Write and in lower case"),
        ("age > 3 OR sex == 'F'", "Write or in lower case"),
        ("NOT age > 3", "Write not in lower case"),
        ("sex like 'F%'", "Use --sql"),
        ("sex LIKE 'F%'", "Use --sql"),
        ("sex = 'F'", "=="),
        ("age > 3 && sex == 'F'", "Write and instead of &&"),
        ("age > 3 || sex == 'F'", "Write or instead of ||"),
        ("age <> 3", "Write != instead of <>"),
        ("sex == 'a AND b' age", ""),  # words within a string are values
    ],
)
def test_syntax_error_hints_at_what_to_write(text: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brim.wording._in_terminal", True)
    with pytest.raises(InputError, match="not an expression") as error:
        where_mask(text, TABLE)
    assert "^" in error.value.message
    assert hint in error.value.hint
    assert bool(hint) == bool(error.value.hint)


@pytest.mark.parametrize(("text", "hint"), [("sex is null", "Write None"), ("sex is 'F'", "Equality is written ==")])
def test_test_for_null_hints_at_none(text: str, hint: str) -> None:
    with pytest.raises(InputError, match="not None") as error:
        where_mask(text, TABLE)
    assert hint in error.value.hint


NUMBERS = pa.table(
    {
        "row": [0, 1, 2, 3],
        "hash": pa.array([0, 5, 2**64 - 1, None], pa.uint64()),
        "large": [2**53, 2**53 + 1, -(2**63), None],
        "small": pa.array([-128, 0, 127, None], pa.int8()),
        "half": pa.array(np.array([0.5, 1.5, np.nan, -1], np.float16)),
        "word": pa.array(["a", "b", None, "a"]).dictionary_encode(),
        "time": [datetime.time(5), datetime.time(17, 30), datetime.time(0), None],
        "seen": pa.array(
            [datetime.datetime(2024, 1, day, 12) for day in (1, 2, 3, 4)], pa.timestamp("ms", "Asia/Tokyo")
        ),
        "a b": [1, 2, 3, None],
        "zero": [0.0, -0.0, 1.0, None],
        "float": pa.array([0.5, 2**24, 2.0**30, None], pa.float32()),
        "day": [datetime.date(2024, 1, 31), datetime.date(2024, 2, 1), datetime.date(1969, 1, 1), None],
        "second": pa.array([0, 1, 2, None], pa.timestamp("s")),
        "nano": pa.array([0, 1, 2**63 - 1, None], pa.timestamp("ns")),
        "meta": pa.StructArray.from_arrays([pa.array(["a", "b", None, "a"]).dictionary_encode()], ["word"]),
        "numbers": [[1, 2], [2**53 + 1], None, []],
        "days": [[datetime.date(2024, 1, 31), None], [], None, [datetime.date(2024, 2, 1)]],
        "pair": pa.array([[1, 2], [3, 4], None, [None, 1]], pa.list_(pa.int8(), 2)),
        "halves": pa.array([[np.float16(0.5)], [], None, [np.float16(1)]], pa.list_(pa.float16())),
        "hidden": pa.ListArray.from_arrays(
            pa.array([0, 1, 2, 2, 3], pa.int32()), pa.array([3, 3, 4]), mask=pa.array([True, False, False, False])
        ),
    }
)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("hash > 4", [1, 2]),
        ("hash == 18446744073709551615", [2]),
        ("hash in [18446744073709551615, -1, 0.0]", [0, 2]),
        ("hash > -1.5", [0, 1, 2]),
        ("not hash > -1", []),
        ("large > 9007199254740992.0", [1]),
        ("large >= 0.5", [0, 1]),
        ("-0.5 < large", [0, 1]),
        ("large == -9223372036854775808", [2]),
        ("large < 18446744073709551615", [0, 1, 2]),
        ("large != 1e300", [0, 1, 2]),
        ("large in [9007199254740993, 0.5]", [1]),
        ("small < 300", [0, 1, 2]),
        ("small == 300 or small >= 126.5", [2]),
        ("small <= -127.5", [0]),
        ("half > 1", [1]),
        ("word in ['a']", [0, 3]),
        ("time > '05:00:00'", [1]),
        ("time in ['17:30', '00:00:00']", [1, 2]),
        ("seen >= '2024-01-03T12:00:00'", [2, 3]),
        ("seen >= '2024-01-03T13:00:00+01:00'", [2, 3]),
        ("seen > '2024-01-03T12:00:00Z'", [3]),
        ("column('a b') > 1 and\n column('row') < 2", [1]),
        ("column('a b') is None", [3]),
        ("zero in [0, 3]", [0, 1]),
        ("zero in [-0.0]", [0, 1]),
        ("float > 20000000", [2]),
        ("float in [16777216, 16777217]", [1]),
        ("day == '2024-01-31'", [0]),
        ("day == '2024-01-31T10:00:00'", []),
        ("day < '2024-01-31T10:00:00'", [0, 2]),
        ("day in ['2024-01-31 00:00:00', '2024-02-01T10:00:00']", [0]),
        ("second < '1970-01-01T00:00:01.5'", [0, 1]),
        ("'1970-01-01T00:00:01.5' <= second", [2]),
        ("second in ['1970-01-01T00:00:01', '1970-01-01T00:00:01.5']", [1]),
        ("nano < '9999-12-31' and nano > '1500-01-01'", [0, 1, 2]),
        ("nano != '9999-12-31'", [0, 1, 2]),
        ("nano in ['9999-12-31', '1970-01-01T00:00:00.000000001']", [1]),
        ("time == '17:30:00.5' or time < '17:30:00.5'", [0, 1, 2]),
        ("meta.word in ['a'] and meta.word.upper() == 'A'", [0, 3]),
        ("2.0 in numbers", [0]),
        ("9007199254740992.0 in numbers", []),
        ("'2024-01-31' in days", [0]),
        ("1 in pair and len(pair) == 2", [0, 3]),
        ("0.5 in halves", [0]),
        ("3 in hidden", [1]),
    ],
)
def test_numbers_and_times_are_exact(text: str, rows: list[int]) -> None:
    """Numbers and times of all types are compared exactly as in Python, and columns may have any name."""
    assert np.flatnonzero(where_mask(text, NUMBERS)).tolist() == rows


def test_names_that_are_none_in_python() -> None:
    """Columns with names that are not identifiers can be used by `column()`, also with statistics.

    A name that differs only in case is suggested.
    """
    assert names_in("column('a b') > 1 or row == 2", ["a b", "row", "hash"]) == ["a b", "row"]
    assert may_choose("column('a b') > 5", NUMBERS.schema, [{"a b": (1, 3)}, {"a b": (1, 6)}]) == [False, True]
    assert may_choose("5 < column('a b')", NUMBERS.schema, [{"a b": (1, 3)}, {"a b": (1, 6)}]) == [False, True]
    with pytest.raises(InputError) as error:
        where_mask("Row > 1", NUMBERS)
    assert error.value.hint.startswith("Did you mean row?")
    with pytest.raises(InputError, match="compares a time with a text that is not one"):
        where_mask("time > 'noon'", NUMBERS)
    for text in ("time > '10:30:00+01:00'", "second > '2024-01-31T10:00:00Z'"):  # the columns have no time zone
        with pytest.raises(InputError) as error:
            where_mask(text, NUMBERS)
        assert error.value.hint.endswith("without a zone.")


def test_sql_of_half_floats() -> None:
    """Half-precision floats are converted for --sql, because DuckDB does not support them."""
    assert sql_mask("half > 1 and half < 2", NUMBERS.select(["half"])).tolist() == [False, True, False, False]


def test_sql_of_a_column_of_the_name_that_rows_are_counted_by() -> None:
    """A column with the internal name for row numbers (in another case) is not confused with it."""
    assert sql_mask("__brim_row > 1", pa.table({"__BRIM_row": [0, 3, 2]})).tolist() == [False, True, True]


def test_caps() -> None:
    """A condition that is too long, too deep or too expensive is refused before it is evaluated."""
    for text in ("age > 1" + " " * MOST_CHARACTERS + "1", "not " * (MOST_DEPTH + 1) + "age > 1", "(" * 5000):
        with pytest.raises(InputError):
            where_mask(text, TABLE)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="agesx tgdy.()[]'\"<>=!+-*/0123456789,notirl_\n\0:", max_size=40))
@example("age\0")
@example("age > 1 if age else 2")
@example("age > 10**10**10")
def test_any_text(text: str) -> None:
    """Any text is either a valid condition or an input error."""
    try:
        assert len(where_mask(text, TABLE)) == 4
    except InputError:
        pass


@pytest.mark.parametrize(
    "text",
    [
        "age > 1; drop table rows",
        "(select count(*) from read_csv('/etc/passwd')) > 0",
        "(select count(*) from TABLE) > 0",
        "(select count(*) from glob('/*')) > 0",
        "age > 1) union all (select 1",
        "getenv('HOME') <> ''",
        "SET enable_external_access=true",
        "age > 1) or (1 = 1",
        "age > 1] or [1 = 1",
        "age",
        "",
        "(select max(content) from read_blob('/etc/hostname')) is not null",
    ],
)
def test_sql_is_shut_off(text: str) -> None:
    """--sql allows only one expression: no statements, files, Python variables or settings."""
    with pytest.raises(InputError):
        sql_mask(text, TABLE)


def test_the_order_of_a_shuffle_is_fixed() -> None:
    """Shuffle keys are unique and stay the same across versions."""
    keys = keyed(np.arange(100_000), 7, "shuffle")
    assert len(np.unique(keys)) == 100_000
    assert keys[:2].tolist() == [7829738945804519827, 7262244526134052342]


def test_pieces_are_taken_with_their_values() -> None:
    """Values in several segments keep them when rows are taken in another order."""
    segments = Segments(np.array([0, 2, 5]), np.array([10, 30, 50, 70, 90]), np.array([1, 2, 3, 4, 5]))
    starts = np.array([-2, 7, -1])
    remaining, anew = segments.take(starts)
    assert anew.tolist() == [-1, 7, -2]
    assert remaining.starts.tolist() == [50, 70, 90, 10, 30]
    assert remaining.edges.tolist() == [0, 3, 5]
    ranges = Ranges(None, np.zeros(3, np.int32), starts, segments)  # type: ignore[arg-type]
    assert ranges.first_bytes(np.arange(3)).tolist() == [50, 7, 10]


_NUMBERS = st.none() | st.integers(-5, 5) | st.sampled_from([-0.0, 0.5, 2.5, float("nan")])
_SIDES = st.sampled_from(["n", "x", "t", "3", "-2", "0.5", "'b'", "'bé'", "None", "n + 1", "len(t)"])
_SIGNS = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
_CHAINED = st.builds(
    lambda first, sign, second, extra: f"{first} {sign} {second}{extra}",
    _SIDES, _SIGNS, _SIDES, st.sampled_from(["", " < 2", " >= 'a'"]),
)  # fmt: skip
_OTHER_VALUES = st.sampled_from(
    ["n in [3, 4]", "n not in [3]", "t in ('b',)", "t is None", "x in [0.5, -1]", "not n > 2"]
)
_ARGUMENTS = st.sampled_from(["and", "or"])
_TEXTS = st.recursive(
    _CHAINED | _OTHER_VALUES, lambda inner: st.builds(lambda a, text, b: f"({a} {text} {b})", inner, _ARGUMENTS, inner)
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(_NUMBERS, _NUMBERS, st.none() | st.sampled_from(["a", "b", "bé", "z"])), min_size=1, max_size=4),
    _TEXTS,
)
def test_no_row_is_left_out_by_bounds(rows: list[tuple[Any, Any, str | None]], text: str) -> None:
    """A row group that statistics exclude contains no row that --where selects."""
    n = [None if row[0] is None else int(row[0]) if row[0] == row[0] else 0 for row in rows]
    x = [None if row[1] is None else float(row[1]) for row in rows]
    table = pa.table({"n": pa.array(n, pa.int64()), "x": pa.array(x, pa.float64()), "t": [row[2] for row in rows]})
    table = table.set_column(2, "t", table["t"].cast(pa.string()))
    file = pa.BufferOutputStream()
    pq.write_table(table, file)
    columns = pq.read_metadata(pa.BufferReader(file.getvalue())).row_group(0)
    records = {columns.column(number).path_in_schema: columns.column(number).statistics for number in range(3)}
    bounds = {name: (item.min, item.max) for name, item in records.items() if item.has_min_max}
    try:
        mask = where_mask(text, table)
    except InputError:
        return
    assert may_choose(text, table.schema, [bounds]) == [True] or not mask.any()


BOUNDS_SCHEMA = pa.schema(
    [("n", pa.int64()), ("t", pa.string()), ("x", pa.float64()), ("day", pa.date32()), ("seen", pa.timestamp("us"))]
)
BOUNDS = {
    "n": (10, 20),
    "t": ("b", "d"),
    "x": (1.0, 2.0),
    "day": (datetime.date(2024, 1, 10), datetime.date(2024, 1, 20)),
    "seen": (datetime.datetime(2024, 1, 10), datetime.datetime(2024, 1, 20)),
}


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ("n > 20", False),
        ("20 < n", False),
        ("n == 9 or t == 'a'", False),
        ("n > 5 and t >= 'e'", False),
        ("n in [1, 30]", False),
        ("5 < n < 10", False),
        ("n < -1", False),
        ("n > 1e300", False),
        ("not n < 30", False),
        ("x > 3", False),
        ("day >= '2024-01-31'", False),
        ("seen < '2024-01-02T10:00:00.5'", False),
        ("n > 20 and t is None", False),
        ("n >= 20", True),
        ("n != 1", True),
        ("n > 20 or n is None", True),
        ("n is not None and t.lower() == 'x'", True),
        ("not x < 3", True),  # NaN
        ("x != 1.5", True),
        ("k == 1", True),
        ("n == '1'", True),
        ("n >", True),
        ("t.lower() == 'x'", True),
        ("day >= '2024-01-20'", True),
    ],
)
def test_bounds_leave_out_what_they_can(text: str, may: bool) -> None:
    """Comparisons with constants exclude row groups. An invalid condition excludes none."""
    assert may_choose(text, BOUNDS_SCHEMA, [BOUNDS, {}]) == [may, True]


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(
    ("text", "compute"),
    [
        ("abs(x)", lambda x, y: abs(x)),
        ("-x", lambda x, y: -x),
        ("x + y", lambda x, y: x + y),
        ("x - y", lambda x, y: x - y),
        ("x * y", lambda x, y: x * y),
        ("abs(x) * 2 - 1", lambda x, y: abs(x) * 2 - 1),
        ("x * x * x", lambda x, y: x**3),
    ],
)
def test_where_computes_whole_numbers_beyond_the_ends_of_their_type(
    bits: int, signed: bool, text: str, compute: Any
) -> None:
    """Integers are computed as in Python, even beyond the smallest and largest value of their type."""
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    kind = pa.type_for_alias(f"{'' if signed else 'u'}int{bits}")
    values = [low, low + 1, 0, 1, high - 1, high]
    table = pa.table({"x": pa.array([*values, None], kind), "y": pa.array([*reversed(values), 1], kind)})
    results = [compute(x, y) for x, y in zip(values, reversed(values), strict=True)]
    for limit in (0, -1, 127, 128, -128, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64 - 1):
        for sign, compare in ((">", operator.gt), ("==", operator.eq), ("<=", operator.le)):
            expected = [compare(result, limit) for result in results]
            assert where_mask(f"{text} {sign} {limit}", table).tolist() == [*expected, False]

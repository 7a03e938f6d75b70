"""--where chooses rows as SQL does, and says where it is wrong."""

from __future__ import annotations

import datetime

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from brim.errors import InputError
from brim.file_set import Pieces, Ranges
from brim.sources.selection import keyed
from brim.sources.where import MOST_CHARACTERS, MOST_DEPTH, sql_mask, where_mask

TABLE = pa.table(
    {
        "age": [1, 50, None, 60],
        "sex": ["F", "M", "F", None],
        "tags": [["x"], [], None, ["y", "x"]],
        "day": [datetime.date(2020, 1, 1), datetime.date(2024, 2, 1), None, datetime.date(2025, 1, 1)],
        "meta": [{"site": "Oslo"}, {"site": "Bern"}, None, {"site": None}],
        "label": [0, 1, 1, None],
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
    """A condition chooses the rows that DuckDB chooses, nulls included."""
    expected = duckdb.from_arrow(TABLE).project(f"coalesce({sql}, false)").fetchall()
    assert where_mask(text, TABLE).tolist() == [row[0] for row in expected]
    assert sql_mask(sql, TABLE).tolist() == [row[0] for row in expected]


def test_class_labels_by_name() -> None:
    """The name of a label stands for its number."""
    assert where_mask("label == 'dog'", TABLE, {"label": ["cat", "dog"]}).tolist() == [False, True, True, False]
    with pytest.raises(InputError, match="not one of label"):
        where_mask("label == 'cow'", TABLE, {"label": ["cat", "dog"]})


@pytest.mark.parametrize(
    ("text", "words", "position"),
    [
        ("age > 3 and agee > 4", "no|agee", 12),
        ("age > ", "not an expression", None),
        ("sex.foo() == 'a'", "calls what it does not know", 0),
        ("age == 1 and __import__('os').system('x')", "does not know", 13),
        ("[age for age in sex]", "does not understand", 0),
        ("(lambda: 1)()", "does not know", 0),
        ("age > 'x'", "cannot be computed", 0),
        ("day > 'never'", "compares a date with what is none", 6),
        ("age", "yes or no", 0),
        ("age in ['1']", "looks for '1' in a column of int64", 7),
        ("sex in [1]", "looks for 1 in a column of string", 7),
        ("age == 99999999999999999999999", "too large", 7),
        ("  ", "is empty", None),
    ],
)
def test_errors_point(text: str, words: str, position: int | None) -> None:
    """What is wrong is said with the place where it is."""
    with pytest.raises(InputError, match=words) as error:
        where_mask(text, TABLE)
    assert "^" in error.value.message or not text.strip()
    if position is not None:
        assert error.value.facts["position"] == position


def test_caps() -> None:
    """A text that is too long, too deep or too much is refused before it is looked at."""
    for text in ("age > 1" + " " * MOST_CHARACTERS + "1", "not " * (MOST_DEPTH + 1) + "age > 1", "(" * 5000):
        with pytest.raises(InputError):
            where_mask(text, TABLE)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="agesx tgdy.()[]'\"<>=!+-*/0123456789,notirl_\n\0:", max_size=40))
@example("age\0")
@example("age > 1 if age else 2")
@example("age > 10**10**10")
def test_any_text(text: str) -> None:
    """Whatever is typed: rows, or an error of the command."""
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
    """--sql is one expression: no statements, files, variables of Python or settings."""
    with pytest.raises(InputError):
        sql_mask(text, TABLE)


def test_the_order_of_a_shuffle_is_fixed() -> None:
    """No two rows have the same key, and keys do not change from release to release."""
    keys = keyed(np.arange(100_000), 7, "shuffle")
    assert len(np.unique(keys)) == 100_000
    assert keys[:2].tolist() == [7829738945804519827, 7262244526134052342]


def test_pieces_are_taken_with_their_values() -> None:
    """Values in several pieces keep them when some are taken in another order."""
    pieces = Pieces(np.array([0, 2, 5]), np.array([10, 30, 50, 70, 90]), np.array([1, 2, 3, 4, 5]))
    starts = np.array([-2, 7, -1])
    kept, anew = pieces.take(starts)
    assert anew.tolist() == [-1, 7, -2]
    assert kept.starts.tolist() == [50, 70, 90, 10, 30]
    assert kept.edges.tolist() == [0, 3, 5]
    ranges = Ranges(None, np.zeros(3, np.int32), starts, pieces)  # type: ignore[arg-type]
    assert ranges.first_bytes(np.arange(3)).tolist() == [50, 7, 10]

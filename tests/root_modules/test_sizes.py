import re

import pytest

from brim.errors import InputError
from brim.sizes import format_size, parse_count, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("500MB", 500_000_000), ("2GB", 2 * 10**9), ("2GiB", 2 << 30), ("1.5 kb", 1500), (".5K", 500), (7, 7)],
)
def test_sizes_are_read_as_people_write_them(text: str | int, size: int) -> None:
    """GB is 10⁹ and GiB is 2³⁰, in any case, with or without a space."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "x", "5 apples", "-1", "0", "1e9", "GB", 0, "1..5GB", "1 GB 2", float("nan"), float("inf")]
)
def test_nonsense_is_refused(text: str | float) -> None:
    """A value that is not a size above zero is an input error that shows a correct size."""
    with pytest.raises(InputError, match="500MB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 KB"), (58_300_000, "58.3 MB"), (273e9, "273 GB"), (999_999, "1.00 MB")],
)
def test_sizes_are_printed_with_three_digits(size: int, text: str) -> None:
    """A printed size has a unit."""
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1", 1),
        ("2,857,545", 2_857_545),
        ("2_857_545", 2_857_545),
        ("3M", 3_000_000),
        ("1.5k", 1500),
        (".5M", 500_000),
        ("1e6", 1_000_000),
        ("2.5E3", 2500),
        (" 7 ", 7),
        (12, 12),
        ("999999999999999999", 10**18 - 1),
    ],
)
def test_parse_count_accepts_common_spellings(text: str | int, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text", ["", "M", "e6", "-1", "1.5", "1e-3", "28,57", "1,0000", "3MB", "ten", "1e99", "1e18", "9" * 50, "1 M x"]
)
def test_parse_count_refuses_other_texts_and_names_them(text: str) -> None:
    with pytest.raises(InputError, match=re.escape(repr(text))):
        parse_count(text)

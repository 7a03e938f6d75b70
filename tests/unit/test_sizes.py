import pytest

from brim.errors import InputError
from brim.sizes import format_size, parse_size


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
    """What is not a size above zero is an input error that shows how to write one."""
    with pytest.raises(InputError, match="500MB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 KB"), (58_300_000, "58.3 MB"), (273e9, "273 GB"), (999_999, "1.00 MB")],
)
def test_sizes_are_printed_with_three_digits(size: int, text: str) -> None:
    """A printed size carries its unit."""
    assert format_size(size) == text

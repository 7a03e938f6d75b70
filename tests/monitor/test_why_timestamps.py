"""Timestamps of all styles are parsed, and text that only looks like one is not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.errors import InputError
from brim.monitor.oom.log_lines import Clock
from brim.monitor.oom.why import parse_since

REFERENCE = datetime(2026, 6, 1, 12, tzinfo=UTC)


def local(*parts: int) -> datetime:
    return datetime(*parts).astimezone()  # type: ignore[arg-type, misc]


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("May  9 11:17:26 node-03 kernel: x", local(2026, 5, 9, 11, 17, 26)),
        ("May 09 11:17:26.123456 node-03 kernel: x", local(2026, 5, 9, 11, 17, 26, 123456)),
        ("Jun 12 06:39:16: x", local(2025, 6, 12, 6, 39, 16)),  # dates are never in the future
        ("Feb 29 01:02:03 h kernel: x", local(2024, 2, 29, 1, 2, 3)),
        ("[Thu Feb 20 07:12:03 2025] x", local(2025, 2, 20, 7, 12, 3)),
        ("[ven. nov. 28 07:26:44 2025] x", local(2025, 11, 28, 7, 26, 44)),
        ("[Do Mär  6 07:26:44 2025] x", local(2025, 3, 6, 7, 26, 44)),
        ("2024-05-02T09:31:41,678628+02:00 x", datetime(2024, 5, 2, 7, 31, 41, 678628, UTC)),
        ("2026-02-08T00:40:07.136582+00:00 web2 systemd[1]: x", datetime(2026, 2, 8, 0, 40, 7, 136582, UTC)),
        ("2024-05-02T09:31:41+0200 h kernel: x", datetime(2024, 5, 2, 7, 31, 41, 0, UTC)),
        ("2024-05-02T09:31:41-05:30 x", datetime(2024, 5, 2, 15, 1, 41, 0, UTC)),
        ("kern: info: [2025-05-18T15:40:20.654325542Z]: x", datetime(2025, 5, 18, 15, 40, 20, 654325, UTC)),
        ("[2026-01-12 10:14:02 UTC] kernel: x", datetime(2026, 1, 12, 10, 14, 2, 0, UTC)),
        ("2024/05/02 09:31:41 x", local(2024, 5, 2, 9, 31, 41)),
        ("мар 27 23:40:33 PC earlyoom[1]: x", local(2026, 3, 27, 23, 40, 33)),
        ("mars 01 10:28:39 systemd-oomd[666]: x", local(2026, 3, 1, 10, 28, 39)),
        ("5月 29 23:06:20 Analyse systemd-oomd[1]: x", local(2026, 5, 29, 23, 6, 20)),
        ("1700000000.250000 host kernel: x", datetime.fromtimestamp(1700000000.25, UTC)),
    ],
)
def test_dates(text: str, when: datetime) -> None:
    """The parsed date is the one a reader would expect."""
    assert Clock(REFERENCE).stamp(text).when == when


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("[62279.421100] x", 62279.4211),
        ("[  694.796250] x", 694.79625),
        ("6,339,5140900,-;x", 5.1409),
        ("<6>[1.5] x", 1.5),
    ],
)
def test_seconds_since_boot(text: str, seconds: float) -> None:
    """Seconds since boot become a date if the boot time is known."""
    boot = datetime(2026, 5, 31, tzinfo=UTC)
    assert Clock(REFERENCE).stamp(text).boot_s == pytest.approx(seconds)
    assert Clock(REFERENCE).stamp(text).when is None
    when = Clock(REFERENCE, boot).stamp(text).when
    assert when is not None
    assert abs(when - boot - timedelta(seconds=seconds)) < timedelta(milliseconds=1)


def test_boot_time_is_learned() -> None:
    """The boot time is derived from the message with which the kernel sets its clock."""
    clock = Clock(REFERENCE)
    clock.learn("[    2.500000] rtc_cmos 00:01: setting system clock to 2023-11-14T22:13:20 UTC (1700000000)")
    when = clock.stamp("[  102.500000] x").when
    assert when is not None
    assert when.timestamp() == pytest.approx(1700000100)


def test_hosts() -> None:
    """The host is distinguished from the program."""
    clock = Clock(REFERENCE)
    assert clock.stamp("May  9 11:17:26 node-03 kernel: x").host == "node-03"
    assert clock.stamp("2024-05-02T09:31:41+0200 web2.lan systemd[1]: x").host == "web2.lan"
    assert clock.stamp("Jun 12 06:39:16: sending SIGTERM").host is None
    assert clock.stamp("[62279.421100] x: y").host is None


@pytest.mark.parametrize(
    "text", ["", "Feb 31 01:02:03 h", "2024-99-99T99:99:99", "[Thu Foo 20 07:12:03 2025]", "mem 12:00"]
)
def test_no_date(text: str) -> None:
    """A text without a date gives no date."""
    assert Clock(REFERENCE).stamp(text).when is None


@given(st.text() | st.from_regex(r"\[?\w{3} \d{1,2} \d\d:\d\d:\d\d( \d{4})?|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}"))
def test_stamps_never_raise(text: str) -> None:
    """No line raises an error."""
    Clock(REFERENCE).stamp(text)


def test_since() -> None:
    """--since accepts words, durations and dates."""
    now = local(2026, 6, 1, 12)
    assert parse_since("today", now) == local(2026, 6, 1)
    assert parse_since("yesterday", now) == local(2026, 5, 31)
    assert parse_since("2h", now) == now - timedelta(hours=2)
    assert parse_since("3d", now) == now - timedelta(days=3)
    assert parse_since("2026-05-31T14:00", now) == local(2026, 5, 31, 14)
    with pytest.raises(InputError, match="'tomorrow-ish' is not a time"):
        parse_since("tomorrow-ish", now)

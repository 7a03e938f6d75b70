"""When a log line was written, whatever its prefix: dmesg, dmesg -T, journalctl, syslog, ISO, kmsg, klog.

Lines with seconds since boot get a date only where the time of boot is known; dates without a year get the
latest year that does not lie after the log's own last change.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone, tzinfo

# The first letters of month names as glibc's locales write them. Ambiguous ones are left out.
_MONTHS: dict[str, int] = {}
for _number, _names in enumerate(
    (
        "jan ene gen янв sty tam led oca",
        "feb fév fev févr fevr febr фев lut hel úno şub",
        "mar mär mrz mars maart märz мар",
        "apr avr avril abr апр kwi huh dub nis",
        "may mai mag maj mei мая май tou kvě",
        "jun juin giu июн cze kes čvn haz",
        "jul juil lug июл lip hei čvc tem",
        "aug août aou ago авг sie elo srp ağu",
        "sep sept set sett сен wrz syy zář eyl",
        "oct okt ott out окт paź lok říj eki",
        "nov ноя lis kas",
        "dec dez déc dic дек gru jou pro ara",
    ),
    start=1,
):
    for _name in _names.split():
        _MONTHS.setdefault(_name, _number)

_BOOT_SECONDS = re.compile(r"\[\s*(\d{1,10}\.\d{1,9})\]")
_KMSG = re.compile(r"^\d+,\d+,(\d+),[^;]*;")
_ISO = re.compile(
    r"(?<!\d)(\d{4})[-/](\d\d)[-/](\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?\s?(Z\b|UTC\b|[+-]\d\d:?\d\d(?!\d))?"
)
_CTIME = re.compile(r"\[?\b[^\W\d_]{2,5}\.? ([^\W\d_]{3,9})\.? +(\d{1,2}) (\d\d):(\d\d):(\d\d) (\d{4})\]?")
_SYSLOG = re.compile(
    r"(?:^|[\s>|])([^\W\d_]{3,9})\.? +(\d{1,2})(?: (\d{4}))? (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?=[\s:,]|$)"
)
_SYSLOG_ASIAN = re.compile(r"(?:^|\s)(\d{1,2})[月월] +(\d{1,2})日? (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?")
_EPOCH = re.compile(r"^\[?(1[0-9]{9})\.(\d{3,9})\]?[ :]")
_HOST = re.compile(
    r"(?:\d\d:\d\d:\d\d(?:[.,]\d+)?\s?(?:Z|UTC|[+-]\d\d:?\d\d)?)\s+([\w.:-]*[A-Za-z][\w.:-]*|\d+(?:\.\d+){3})"
    r"\s+(?:kernel|[\w.@()/-]+(?:\[\d+\])?):"
)
_SYSTEM_CLOCK = re.compile(r"setting system clock to .*\((\d{9,11})\)")
_SCANNED = 160  # a prefix is not longer


@dataclass(frozen=True, slots=True)
class Stamp:
    when: datetime | None = None
    boot_s: float | None = None
    host: str | None = None

    def seconds_to(self, other: Stamp) -> float | None:
        """How much later the other one is, if both tell the same kind of time."""
        if self.boot_s is not None and other.boot_s is not None:
            return other.boot_s - self.boot_s
        if self.when is not None and other.when is not None:
            return (other.when - self.when).total_seconds()
        return None


class Clock:
    """Reads the stamps of one log."""

    def __init__(self, reference: datetime | None = None, boot_time: datetime | None = None) -> None:
        self.reference = reference or datetime.now().astimezone()
        self.boot_time = boot_time

    def learn(self, text: str) -> None:
        """Take the time of boot from the line in which the kernel sets its clock."""
        match, seconds = _SYSTEM_CLOCK.search(text), _BOOT_SECONDS.search(text)
        if match and seconds:
            self.boot_time = datetime.fromtimestamp(int(match[1]) - float(seconds[1]), UTC).astimezone()

    def stamp(self, text: str) -> Stamp:
        """The stamp of a line; empty if it has none that can be understood."""
        head = text[:_SCANNED]
        boot_s = _boot_seconds(head)
        try:
            when = self._date(head)
            if when is None and boot_s is not None and self.boot_time is not None:
                when = self.boot_time + timedelta(seconds=boot_s)
        except (ValueError, OverflowError, OSError):
            when = None  # "Feb 31", year 0: a line that only looks stamped
        host = _HOST.search(head)
        return Stamp(when, boot_s, host[1] if host else None)

    def _date(self, head: str) -> datetime | None:
        if match := _ISO.search(head):
            return _dated(int(match[1]), int(match[2]), match.group(3, 4, 5, 6), match[7], _zone(match[8]))
        if (match := _CTIME.search(head)) and (month := month_number(match[1])):
            return _dated(int(match[6]), month, match.group(2, 3, 4, 5))
        if (match := _SYSLOG.search(head)) and (month := month_number(match[1])):
            if match[3]:
                return _dated(int(match[3]), month, match.group(2, 4, 5, 6), match[7])
            return self._with_year(month, match.group(2, 4, 5, 6), match[7])
        if match := _SYSLOG_ASIAN.search(head):
            return self._with_year(int(match[1]), match.group(2, 3, 4, 5), match[6])
        if match := _EPOCH.search(head):
            return datetime.fromtimestamp(float(f"{match[1]}.{match[2]}"), UTC).astimezone()
        return None

    def _with_year(self, month: int, rest: Sequence[str], fraction: str | None) -> datetime | None:
        latest = self.reference + timedelta(days=1)
        for year in range(latest.year, latest.year - 9, -1):  # 29 February comes every fourth year, or eighth
            try:
                when = _dated(year, month, rest, fraction)
            except ValueError:
                continue
            if when <= latest:
                return when
        return None


def month_number(name: str) -> int | None:
    name = name.lower()
    return _MONTHS.get(name) or _MONTHS.get(name[:3])


def _boot_seconds(head: str) -> float | None:
    if match := _BOOT_SECONDS.search(head):
        return float(match[1])
    if match := _KMSG.match(head):
        return int(match[1]) / 1e6
    return None


def _zone(text: str | None) -> tzinfo | None:
    if not text:
        return None
    if text in ("Z", "UTC"):
        return UTC
    digits = text[1:].replace(":", "")
    offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
    return timezone(-offset if text[0] == "-" else offset)


def _dated(
    year: int, month: int, rest: Sequence[str], fraction: str | None = None, zone: tzinfo | None = None
) -> datetime:
    """A time with a zone: this machine's where the log names none."""
    day, hour, minute, second = map(int, rest)
    micro = int((fraction or "0").ljust(6, "0")[:6])
    when = datetime(year, month, day, hour, minute, second, micro, zone)
    return when.astimezone() if zone is None else when

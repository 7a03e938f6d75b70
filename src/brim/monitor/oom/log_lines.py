"""Read log files as a stream of lines: plain, gzip, xz or bzip2, of any size and encoding; and the times of lines.

Most lines of a log are not about memory. Needles are searched in blocks of bytes, and only the lines with a needle
become text, so that a log of any size takes the memory of one block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Any

from brim.monitor.log_files import open_decompressed
from brim.records import dataclass

# The first letters of month names in the locales of glibc, without ambiguous ones.
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
    r"(?<!\d)(\d{4})[-/](\d\d)[-/](\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?"
    r"\s?(Z\b|UTC\b|[+-]\d\d:?\d\d(?!\d)|(?:[A-Z]{3,4})\b)?"
)
_CTIME = re.compile(
    r"\[?\b[^\W\d_]{2,5}\.? ([^\W\d_]{3,9})\.? +(\d{1,2}) (\d\d):(\d\d):(\d\d)(?: ([A-Z]{3,4}))? (\d{4})\]?"
)
# Hours from UTC of zones whose short name is (almost) unambiguous.
_ZONES = {
    **{"GMT": 0, "WET": 0, "WEST": 1, "BST": 1, "CET": 1, "CEST": 2, "EET": 2, "EEST": 3, "MSK": 3, "JST": 9, "KST": 9},
    **{"EST": -5, "EDT": -4, "CST": -6, "CDT": -5, "MST": -7, "MDT": -6, "PST": -8, "PDT": -7, "AEST": 10, "AEDT": 11},
}
_SYSLOG = re.compile(
    r"(?:^|[\s>|])([^\W\d_]{3,9})\.? +(\d{1,2})(?: (\d{4}))? (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?=[\s:,]|$)"
)
_MAIL = re.compile(r"\b(\d{1,2}) ([A-Z][a-z]{2}) (\d{4}) (\d\d):(\d\d):(\d\d) ([+-]\d{4})")
_SYSLOG_ASIAN = re.compile(r"(?:^|\s)(\d{1,2})[月월] +(\d{1,2})日? (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?")
_EPOCH = re.compile(r"^\[?(1[0-9]{9})\.(\d{3,9})\]?[ :]")
_HOST = re.compile(
    r"(?:\d\d:\d\d:\d\d(?:[.,]\d+)?\s?(?:Z|UTC|[+-]\d\d:?\d\d)?)\s+"
    r"(?!(?:TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL|SEVERE)\b)([\w.:-]*[A-Za-z][\w.:-]*(?<!:)|\d+(?:\.\d+){3})"
    r"\s+(?:kernel|[\w.@()/-]+(?:\[\d+\])?):"
)
_SYSTEM_CLOCK = re.compile(r"setting system clock to .*\((\d{9,11})\)")
_SCANNED = 160  # a prefix is not longer


@dataclass(frozen=True, slots=True)
class Stamp:
    """The time and host of a line: a date, seconds since boot, or neither."""

    when: datetime | None = None
    boot_s: float | None = None
    host: str | None = None

    def seconds_to(self, second: Stamp) -> float | None:
        """Return how much later the other stamp is, if both have the same kind of time."""
        if self.boot_s is not None and second.boot_s is not None:
            return second.boot_s - self.boot_s
        if self.when is not None and second.when is not None:
            return (second.when - self.when).total_seconds()
        return None


class Clock:
    """Reads the times of one log."""

    def __init__(self, reference: datetime | None = None, boot_time: datetime | None = None) -> None:
        self.reference = reference or datetime.now().astimezone()
        self.boot_time = boot_time

    def learn(self, text: str) -> None:
        """Learn the time of boot from the kernel's message about the system clock."""
        match, seconds = _SYSTEM_CLOCK.search(text), _BOOT_SECONDS.search(text)
        if match and seconds:
            self.boot_time = datetime.fromtimestamp(int(match[1]) - float(seconds[1]), UTC).astimezone()

    def stamp(self, text: str) -> Stamp:
        """Return the stamp of a line; empty without a known time."""
        head = text[:_SCANNED]
        seconds, micros = _BOOT_SECONDS.search(head), _KMSG.match(head)
        boot_s = float(seconds[1]) if seconds else int(micros[1]) / 1e6 if micros else None
        try:
            when = self._date(head)
            if when is None and boot_s is not None and self.boot_time is not None:
                when = self.boot_time + timedelta(seconds=boot_s)
        except (ValueError, OverflowError, OSError):
            when = None  # "Feb 31", year 0: text that only looks like a date
        host = _HOST.search(head)
        return Stamp(when, boot_s, host[1] if host else None)

    def _date(self, head: str) -> datetime | None:
        if match := _ISO.search(head):
            return _dated(int(match[1]), int(match[2]), match.group(3, 4, 5, 6), match[7], _zone(match[8]))
        if (match := _CTIME.search(head)) and (month := month_number(match[1])):
            return _dated(int(match[7]), month, match.group(2, 3, 4, 5), zone=_zone(match[6]))
        if (match := _SYSLOG.search(head)) and (month := month_number(match[1])):
            if match[3]:
                return _dated(int(match[3]), month, match.group(2, 4, 5, 6), match[7])
            return self._with_year(month, match.group(2, 4, 5, 6), match[7])
        if (match := _MAIL.search(head)) and (month := month_number(match[2])):
            return _dated(int(match[3]), month, match.group(1, 4, 5, 6), zone=_zone(match[7]))
        if match := _SYSLOG_ASIAN.search(head):
            return self._with_year(int(match[1]), match.group(2, 3, 4, 5), match[6])
        if match := _EPOCH.search(head):
            return datetime.fromtimestamp(float(f"{match[1]}.{match[2]}"), UTC).astimezone()
        return None

    def _with_year(self, month: int, clock: Sequence[str], fraction: str | None) -> datetime | None:
        latest = self.reference + timedelta(days=1)
        for year in range(latest.year, latest.year - 9, -1):  # 29 February comes every fourth year, or eighth
            try:
                when = _dated(year, month, clock, fraction)
            except ValueError:
                continue
            if when <= latest:
                return when
        return None


def month_number(name: str) -> int | None:
    name = name.lower()
    return _MONTHS.get(name) or _MONTHS.get(name[:3])


def _zone(text: str | None) -> tzinfo | None:
    if not text:
        return None
    if text in ("Z", "UTC"):
        return UTC
    if text[0] not in "+-":
        return timezone(timedelta(hours=_ZONES[text])) if text in _ZONES else None
    digits = text[1:].replace(":", "")
    offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
    return timezone(-offset if text[0] == "-" else offset)


def _dated(
    year: int, month: int, clock: Sequence[str], fraction: str | None = None, zone: tzinfo | None = None
) -> datetime:
    """Return a time with a zone, by default that of this machine."""
    day, hour, minute, second = map(int, clock)
    micro = int((fraction or "0").ljust(6, "0")[:6])
    when = datetime(year, month, day, hour, minute, second, micro, zone)
    return when.astimezone() if zone is None else when


BLOCK_BYTES = 256 << 10
LINE_BYTES = 16 << 10  # the kernel writes at most 1 KiB; longer lines are cut

_COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def blocks_of(path: Path) -> Iterator[bytes]:
    """Yield the content of a file, decompressed. A damaged file gives the readable part before it fails."""
    with open_decompressed(path) as (file, is_compressed):
        read = file.read1 if is_compressed else file.read  # type: ignore[attr-defined]
        while block := read(BLOCK_BYTES):
            yield block


def lines_of(
    blocks: Iterable[bytes],
    needles: tuple[bytes, ...] = (),
    busy: Callable[[], bool] = lambda: False,
    inspect: Callable[[bytes], None] = lambda _: None,
    skipped: Callable[[], int] = lambda: 0,
) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of the lines with a needle, each with the previous line; of all lines while `busy()`.

    Without needles, yield all lines. `inspect` receives every block. `skipped` returns the number of lines that were
    left out before a block.
    """
    number, partial = 1, b""
    for block in blocks:
        number += skipped()
        cut = block.rfind(b"\n") + 1
        if not cut:
            if len(partial) < 4 * LINE_BYTES:
                partial += block[: 4 * LINE_BYTES]
            continue
        complete, partial = partial + block[:cut], block[cut:]
        inspect(complete)
        if needles:
            yield from _lines_with_needles(complete, number, needles, busy)
        else:
            yield from enumerate(map(_text, complete.split(b"\n")[:-1]), number)
        number += complete.count(b"\n")
    if partial:
        inspect(partial)
        yield number, _text(partial)


def _lines_with_needles(
    block: bytes, number: int, needles: tuple[bytes, ...], busy: Callable[[], bool]
) -> Iterator[tuple[int, str]]:
    """Yield the lines with a needle. Searching the block is many times faster than searching every line."""
    starts = sorted(_line_starts(block, needles))
    offset, counted = 0, 0  # the block before `offset` is done; the lines before `counted` are numbered
    index = 0
    while offset < len(block):
        if not busy():
            while index < len(starts) and starts[index] < offset:
                index += 1
            if index == len(starts):
                return
            offset = starts[index]
        number += block.count(b"\n", counted, offset)
        counted = offset
        end = block.index(b"\n", offset)
        yield number, _text(block[offset:end])
        offset = end + 1


def _line_starts(block: bytes, needles: tuple[bytes, ...]) -> set[int]:
    starts: set[int] = set()
    for needle in needles:
        hit = block.find(needle)
        while hit >= 0:
            start = block.rfind(b"\n", 0, hit) + 1
            starts.add(start)
            if start:
                starts.add(block.rfind(b"\n", 0, start - 1) + 1)
            end = block.find(b"\n", hit)
            hit = block.find(needle, end + 1) if end >= 0 else -1
    return starts


def _text(raw: bytes) -> str:
    if len(raw) > LINE_BYTES:  # a progress bar that was redrawn many times: keep its beginning and end
        raw = raw[: LINE_BYTES // 2] + b"\r" + raw[-LINE_BYTES // 2 :]
    return raw.rstrip(b"\r\n").decode("utf-8", "replace").replace("\x00", "")


def unwrap(text: str) -> list[str]:
    """Return the lines inside a line: redrawn progress bars, journalctl -o json, JSON logs of Docker and others.

    Terminal colors are removed.
    """
    if "\x1b" in text:
        text = _COLOR.sub("", text)
    if "\r" in text:
        parts = [part for part in text.split("\r") if part]
        return parts[:1] + parts[1:][-2:]
    stripped = text.lstrip()
    if not stripped.startswith("{") or not stripped.endswith("}"):
        return [text]
    try:
        entry = json.loads(stripped)
    except (ValueError, RecursionError):
        return [text]
    message = next((entry[key] for key in ("MESSAGE", "message", "msg", "log") if entry.get(key)), None)
    if isinstance(message, list):  # journalctl writes text that is not UTF-8 as numbers
        message = bytes(b for b in message if isinstance(b, int) and 0 <= b < 256).decode("utf-8", "replace")
    if not isinstance(message, str):
        return [text]
    prefix = _prefix(entry)
    return [prefix + text for text in message.splitlines()]


def _prefix(entry: dict[str, Any]) -> str:
    """Return the prefix of journalctl -o short-iso from the fields of a JSON entry."""
    parts = []
    micros = entry.get("_SOURCE_REALTIME_TIMESTAMP") or entry.get("__REALTIME_TIMESTAMP")
    when = next((entry[key] for key in ("time", "timestamp", "@timestamp", "ts") if entry.get(key)), None)
    if isinstance(micros, str) and micros.isdigit() and len(micros) < 18:
        parts.append(datetime.fromtimestamp(int(micros) / 1e6, UTC).isoformat())
    elif isinstance(when, str):
        parts.append(when)
    host = entry.get("_HOSTNAME") or entry.get("hostname") or entry.get("host")
    if parts and isinstance(host, str):
        parts.append(host.replace(" ", "_"))
    program = entry.get("SYSLOG_IDENTIFIER") or entry.get("_COMM")
    if isinstance(program, str):
        pid = entry.get("_PID")
        parts.append(f"{program}[{pid}]:" if isinstance(pid, str) else f"{program}:")
    return " ".join(parts) + " " if parts else ""

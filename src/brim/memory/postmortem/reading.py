"""Log files as lines, streamed: plain, gzip, xz or bzip2, of any size, in any encoding.

A gigabyte of log is mostly lines that say nothing about memory. Telling words are looked for in blocks of
bytes, and only the lines around them become text; memory stays at a block whatever the file's size.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BLOCK_BYTES = 256 << 10
LINE_BYTES = 16 << 10  # the kernel writes at most 1 KiB; what is longer is cut

# What a decompressor says about a file that was cut or is damaged.
UNREADABLE = (OSError, EOFError, lzma.LZMAError, ValueError, zlib.error)

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
ZSTANDARD = b"\x28\xb5\x2f\xfd"


def blocks_of(path: Path) -> Iterator[bytes]:
    """A file's content, unpacked if its first bytes say that it is packed; a pipe is taken as it is."""
    with open(path, "rb") as raw:
        magic = b""
        if raw.seekable():
            magic = raw.read(6)
            raw.seek(0)
        if magic.startswith(ZSTANDARD):
            raise OSError(f"it is packed with zstd; unpack it first: zstd -d {path}")
        if magic.startswith(b"\x1f\x8b"):
            with gzip.open(raw) as packed:
                yield from _blocks(packed.read1)
        elif magic.startswith(b"\xfd7zXZ\x00"):
            with lzma.open(raw) as packed_xz:
                yield from _blocks(packed_xz.read1)
        elif magic.startswith(b"BZh"):
            with bz2.open(raw) as packed_bz2:
                yield from _blocks(packed_bz2.read1)
        else:
            yield from _blocks(raw.read)


def _blocks(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Blocks until the end. `read1` of a packed file that was cut gives what can be unpacked before it fails."""
    while block := read(BLOCK_BYTES):
        yield block


def lines_of(
    blocks: Iterable[bytes],
    needles: tuple[bytes, ...] = (),
    busy: Callable[[], bool] = lambda: False,
    glance: Callable[[bytes], None] = lambda _: None,
) -> Iterator[tuple[int, str]]:
    """(number, text) of the lines that hold a needle, each with the line before it; of all lines while `busy()`.

    Without needles, all lines. `glance` sees every block, for what does not depend on a line.
    """
    number, rest = 1, b""
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        if not cut:
            if len(rest) < 4 * LINE_BYTES:
                rest += block[: 4 * LINE_BYTES]
            continue
        whole, rest = rest + block[:cut], block[cut:]
        glance(whole)
        if needles:
            yield from _telling(whole, number, needles, busy)
        else:
            yield from enumerate(map(_text, whole.split(b"\n")[:-1]), number)
        number += whole.count(b"\n")
    if rest:
        glance(rest)
        yield number, _text(rest)


def _telling(
    whole: bytes, number: int, needles: tuple[bytes, ...], busy: Callable[[], bool]
) -> Iterator[tuple[int, str]]:
    """The telling lines of a block. Looking for needles in the block is many times faster than in every line."""
    starts = sorted(_starts(whole, needles))
    at, counted = 0, 0  # everything before `at` was given or passed over; lines up to `counted` are numbered
    index = 0
    while at < len(whole):
        if not busy():
            while index < len(starts) and starts[index] < at:
                index += 1
            if index == len(starts):
                return
            at = starts[index]
        number += whole.count(b"\n", counted, at)
        counted = at
        end = whole.index(b"\n", at)
        yield number, _text(whole[at:end])
        at = end + 1


def _starts(whole: bytes, needles: tuple[bytes, ...]) -> set[int]:
    found: set[int] = set()
    for needle in needles:
        hit = whole.find(needle)
        while hit >= 0:
            start = whole.rfind(b"\n", 0, hit) + 1
            found.add(start)
            if start:
                found.add(whole.rfind(b"\n", 0, start - 1) + 1)
            end = whole.find(b"\n", hit)
            hit = whole.find(needle, end + 1) if end >= 0 else -1
    return found


def _text(line: bytes) -> str:
    if len(line) > LINE_BYTES:  # a progress bar that was drawn over and over: its beginning and its end
        line = line[: LINE_BYTES // 2] + b"\r" + line[-LINE_BYTES // 2 :]
    return line.rstrip(b"\r\n").decode("utf-8", "replace").replace("\x00", "")


def unwrap(text: str) -> list[str]:
    """The lines inside a line: what a progress bar drew over, journalctl -o json, Docker's JSON logs and the like.

    Colours are taken off.
    """
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
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
    if isinstance(message, list):  # journalctl writes what is not UTF-8 as numbers
        message = bytes(b for b in message if isinstance(b, int) and 0 <= b < 256).decode("utf-8", "replace")
    if not isinstance(message, str):
        return [text]
    prefix = _prefix(entry)
    return [prefix + line for line in message.splitlines()]


def _prefix(entry: dict[str, Any]) -> str:
    """A prefix as journalctl -o short-iso writes it, from the fields of a JSON entry."""
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
    who = entry.get("SYSLOG_IDENTIFIER") or entry.get("_COMM")
    if isinstance(who, str):
        pid = entry.get("_PID")
        parts.append(f"{who}[{pid}]:" if isinstance(pid, str) else f"{who}:")
    return " ".join(parts) + " " if parts else ""

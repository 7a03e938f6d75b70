"""Logs in which one entry takes several lines, as lines: journalctl -o export, verbose and json-pretty, dmesg --json,
and what kubectl prints of pods as JSON or YAML.

The first kilobytes say which it is; anything else passes through untouched. Every line that goes in comes out, most
of them empty, so that line numbers stay those of the file; the entry stands where its last line was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator

from brim.oom.kubernetes_pods import PodReader

_SNIFFED = 4096
_LONGEST_LINE = 1 << 20
_MOST_FIELDS = 200
_VERBOSE = re.compile(rb"^\w{3} \d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\n\[]*\[s=", re.M)
_JSON_FIELD = re.compile(r'^\s*"(?P<key>[\w@]+)"\s*:\s*(?P<value>.*?),?\s*$')


def unfold(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The same log with one line for each entry."""
    iterator = iter(blocks)
    first = b""
    for block in iterator:
        first += block
        if len(first) >= _SNIFFED:
            break
    reader = _reader(first[:_SNIFFED])
    if reader is None:
        if first:
            yield first
        yield from iterator
        return
    rest = b""
    for block in _chained(first, iterator):
        *lines, rest = (rest + block).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            rest = b""
        yield b"".join(reader(line.decode("utf-8", "replace")).encode() + b"\n" for line in lines)
    yield b"".join(reader(line).encode() + b"\n" for line in (rest.decode("utf-8", "replace"), ""))


def _chained(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def _reader(head: bytes) -> Callable[[str], str] | None:
    text = head.lstrip()
    if text.startswith(b"__CURSOR=") or b"\n__CURSOR=" in head:
        return _Export().line
    if _VERBOSE.search(head) and b"\n    " in head:
        return _Verbose().line
    if text.startswith(b"{") and b'"dmesg"' in head[:200]:
        return _Dmesg().line
    if re.match(rb"\{\s*\n", text) and (b'"__CURSOR"' in head or b'"MESSAGE"' in head or b'"_BOOT_ID"' in head):
        return _JsonPretty().line
    kubernetes = re.search(rb'"?kind"?\s*:\s*"?(Pod|List|PodList)\b', head) or re.search(rb'"?apiVersion"?\s*:', head)
    return PodReader().line if kubernetes else None


class _Fields:
    """Fields of an entry until it ends."""

    def __init__(self) -> None:
        self._fields: dict[str, object] = {}

    def _keep(self, key: str, value: object) -> None:
        if len(self._fields) < _MOST_FIELDS:
            self._fields[key] = value

    def _flush(self) -> str:
        fields, self._fields = self._fields, {}
        return json.dumps(fields) if "MESSAGE" in fields else ""


class _Export(_Fields):
    """KEY=value, an empty line behind each entry; a value that is not text has its length before it."""

    def __init__(self) -> None:
        super().__init__()
        self._binary: str | None = None

    def line(self, text: str) -> str:
        if self._binary is not None:
            key, self._binary = self._binary, None
            self._keep(key, text[8:] if len(text) > 8 else text)
            return ""
        if not text:
            return self._flush()
        key, found, value = text.partition("=")
        if found:
            self._keep(key, value)
        elif key.isupper():
            self._binary = key
        return ""


class _Verbose(_Fields):
    """A line with the time, then fields that are set in."""

    def line(self, text: str) -> str:
        if text.startswith("    "):
            key, found, value = text.strip().partition("=")
            if found:
                self._keep(key, value)
            return ""
        told = self._flush()
        when = re.match(r"\w{3} (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?(?: [A-Z]{2,5}| ?[+-]\d\d:?\d\d)?)", text)
        if when:
            self._keep("time", when[1])
        return told


class _JsonPretty(_Fields):
    """An object of several lines."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: tuple[str, list[int]] | None = None

    def line(self, text: str) -> str:
        bare = text.strip()
        if self._numbers is not None:
            key, numbers = self._numbers
            numbers += [int(number) for number in re.findall(r"\d+", bare)]
            if "]" in bare:
                self._keep(key, bytes(number for number in numbers if number < 256).decode("utf-8", "replace"))
                self._numbers = None
            return ""
        if bare in ("}", "},", "}{"):
            return self._flush()
        if match := _JSON_FIELD.match(text):
            if match["value"].startswith("[") and "]" not in match["value"]:
                self._numbers = match["key"], [int(number) for number in re.findall(r"\d+", match["value"])]
                return ""
            try:
                self._keep(match["key"], json.loads(match["value"]))
            except ValueError:
                return ""
        return ""


class _Dmesg(_Fields):
    """dmesg --json: "time" and "msg" of each entry."""

    def line(self, text: str) -> str:
        if match := _JSON_FIELD.match(text):
            if match["key"] == "time":
                self._keep("time", match["value"])
            elif match["key"] == "msg":
                try:
                    message = json.loads(match["value"])
                except ValueError:
                    return ""
                return f"[{self._fields.get('time', '0.0')!s:>12}] {message}"
        return ""

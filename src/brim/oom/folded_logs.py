"""Logs in which one entry takes several lines, as lines: journalctl -o export, verbose and json-pretty, dmesg --json,
and what kubectl prints of pods as JSON or YAML.

The first kilobytes say which it is; anything else passes through untouched. Every line that goes in comes out, most of
them empty, so that line numbers stay those of the file; the entry stands where its last line was.

Of pods, each container that ended becomes a line. They are read line by line with the path of keys above each, by
indentation, which both have. The order of keys does not matter, and no more than one container is held.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator

_LINE = re.compile(r'^(?P<indent>\s*)(?P<dash>(?:- )*)(?:"?(?P<key>[\w./-]+)"?\s*:(?:\s+|$)(?P<value>.*?))?,?\s*$')
_STATUSES = ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")
_CONTAINERS = ("containers", "initContainers", "ephemeralContainers")
_OPENING = ("{", "[", "{}", "[]")
_MOST = 200  # containers of a pod


class PodReader:
    """Given the lines of a listing, gives a line for each container that was killed, and else empty ones."""

    def __init__(self) -> None:
        self._path: list[tuple[int, str]] = []
        self._pod = ""
        self._limits: dict[str, str] = {}
        self._container: dict[str, str] = {}  # of the spec: its name and its limit
        self._name = ""  # of the status that is being read
        self._ends: list[dict[str, str]] = []

    def line(self, text: str) -> str:
        """What an entry that has just ended tells."""
        if text.lstrip().startswith("{") and text.strip() != "{":
            return self._compact(text)
        match = _LINE.match(text)
        if not text.strip() or text.startswith("---"):
            self._path = []
            return self._flush()
        if match is None or (match["key"] is None and not match["dash"] and text.strip() != "{"):
            return self._climb(len(text) - len(text.lstrip()))
        indent = len(match["indent"])
        told = ""
        if match["dash"] or match["key"] is None:  # an item of a list, whose key may stand as far in as itself
            told = self._climb(indent + 1)
            if self._keys()[-1:] == ["items"]:
                self._pod, self._limits = "", {}
            if self._keys()[-1:] and self._keys()[-1] in (*_STATUSES, *_CONTAINERS):
                told, self._container = told or self._flush(), {}
            indent += len(match["dash"])
        if match["key"] is not None:
            told = self._climb(indent) or told
            value = match["value"].strip().strip('"') if match["value"] not in _OPENING else ""
            self._path.append((indent, match["key"]))
            self._take(self._keys(), value)
        return told

    def _compact(self, text: str) -> str:
        """A whole listing on one line."""
        try:
            lines = json.dumps(json.loads(text), indent=1).splitlines()
        except (ValueError, RecursionError):
            return ""
        return "\n".join(filter(None, map(self.line, [*lines, ""])))

    def _keys(self) -> list[str]:
        return [key for _, key in self._path]

    def _climb(self, indent: int) -> str:
        """Leave what stands as far in as `indent`, or further."""
        before = self._within(_STATUSES)
        while self._path and self._path[-1][0] >= indent:
            self._path.pop()
        return self._flush() if before and not self._within(_STATUSES) else ""

    def _within(self, names: tuple[str, ...]) -> bool:
        return any(key in names for _, key in self._path)

    def _take(self, keys: list[str], value: str) -> None:
        key = keys[-1]
        if keys[-2:] == ["metadata", "name"] and keys[:-2] in ([], ["items"]):
            self._pod = value
        elif len(keys) > 1 and keys[-2] in _CONTAINERS and key == "name":
            self._note(name=value)
        elif keys[-3:] == ["resources", "limits", "memory"] and self._within(_CONTAINERS):
            self._note(limit=value)
        elif len(keys) > 1 and keys[-2] in _STATUSES and key == "name":
            self._name = value
        elif key == "terminated" and self._within(_STATUSES):
            self._ends.append({})
        elif keys[-2:-1] == ["terminated"] and self._ends:
            self._ends[-1][key] = value

    def _note(self, **known: str) -> None:
        self._container |= known
        if {"name", "limit"} <= self._container.keys() and len(self._limits) < _MOST:
            self._limits[self._container["name"]] = self._container["limit"]

    def _flush(self) -> str:
        """The last time that this container was killed, if it was."""
        name, ends, self._name, self._ends = self._name, self._ends, "", []
        killed = [end for end in ends if end.get("exitCode") == "137" or end.get("reason") == "OOMKilled"]
        if not killed:
            return ""
        last = max(killed, key=lambda end: end.get("finishedAt", ""))
        limit = f" limit {self._limits[name]}" if name in self._limits else ""
        return (
            f"{last.get('finishedAt', '')} kubernetes: pod {self._pod or '?'} container {name or '?'} exit code "
            f"{last.get('exitCode', '?')} reason {last.get('reason', '?')}{limit}"
        ).strip()


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

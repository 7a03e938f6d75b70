"""Turn log formats in which one entry takes several lines into one line per entry.

journalctl -o export, verbose and json-pretty; dmesg --json; pods as kubectl prints them (JSON, YAML, describe); docker
inspect; jetsam reports of macOS; tables of sacct.

The first kilobytes show the format; any other text passes unchanged. Every input line gives one output line, mostly
empty, so that line numbers stay those of the file; the entry is on its last line. Documents are read line by line with
the path of keys above each line, which the indentation shows, so that a document of any size takes little memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

_SNIFFED = 4096
_LONGEST_LINE = 1 << 20
_MOST_FIELDS = 200
_MOST_LINES = 20_000  # of an object
_VERBOSE = re.compile(rb"^\w{3} \d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\n\[]*\[s=", re.M)
_OUTLINE = re.compile(
    r'^(?P<indent>\s*)(?P<dash>(?:- )*)(?:"?(?P<key>[\w./-]+(?: [A-Z]\w+)*)"?\s*:(?:\s+|$)(?P<value>.*?))?,?\s*$'
)
_OPENING = ("{", "[", "{}", "[]")
_STATUSES = ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")
_CONTAINERS = ("containers", "initContainers", "ephemeralContainers")
_STATE_FIELDS = {"Reason": "reason", "Exit Code": "exitCode", "Finished": "finishedAt"}
_DESCRIBED = ("Containers", "Init Containers")


def unfold(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same log with one line per entry."""
    iterator = iter(blocks)
    first = b""
    for block in iterator:
        first += block
        if len(first) >= _SNIFFED:
            break
    reader = _choose_reader(first[:_SNIFFED])
    if reader is None:
        yield from chain([first] if first else [], iterator)
        return
    partial = b""
    for block in chain([first], iterator):
        *lines, partial = (partial + block).split(b"\n")
        if len(partial) > _LONGEST_LINE:
            partial = b""
        yield b"".join(reader(entry.decode("utf-8", "replace")).encode() + b"\n" for entry in lines)
    yield b"".join(reader(entry).encode() + b"\n" for entry in (partial.decode("utf-8", "replace"), ""))


def _choose_reader(head: bytes) -> Callable[[str], str] | None:
    text = head.lstrip()
    if text.startswith(b"__CURSOR=") or b"\n__CURSOR=" in head:
        return _Export().read
    if _VERBOSE.search(head) and b"\n    " in head:
        return _Verbose().read
    if text.startswith(b"{") and b'"dmesg"' in head[:200]:
        return _JsonObjects().read
    if re.match(rb"\{\s*\n", text) and (b'"__CURSOR"' in head or b'"MESSAGE"' in head or b'"_BOOT_ID"' in head):
        return _JsonObjects().read
    if b'"bug_type"' in head and (b'"298"' in head or b'"memoryStatus"' in head):
        return _JetsamReport().read
    if re.search(rb'"State"\s*:\s*\{[^}]*"OOMKilled"', head):
        return _DockerInspect().read
    if re.match(rb"Name:\s+\S+\s*\nNamespace:", text):
        return _DescribedPod().read
    kubernetes = re.search(rb'"?kind"?\s*:\s*"?(Pod|List|PodList)\b|"?apiVersion"?\s*:', head)
    fragment = b"exitCode" in head and re.match(
        rb'[\s{]*"?(?:status|containerStatuses|lastState|state|terminated)"?\s*:', text
    )
    return _Pods().read if kubernetes or fragment else None


class _Fields:
    """Collects the fields of an entry until it ends."""

    def __init__(self) -> None:
        self._fields: dict[str, object] = {}

    def _keep(self, key: str, value: object) -> None:
        if len(self._fields) < _MOST_FIELDS:
            self._fields[key] = value

    def _flush(self) -> str:
        fields, self._fields = self._fields, {}
        return json.dumps(fields) if "MESSAGE" in fields else ""


class _Export(_Fields):
    """KEY=value, an empty line after each entry; a binary value has its length before it."""

    def __init__(self) -> None:
        super().__init__()
        self._binary: str | None = None

    def read(self, text: str) -> str:
        if self._binary is not None:
            key, self._binary = self._binary, None
            self._keep(key, text[8:] if len(text) > 8 else text)
            return ""
        if not text:
            return self._flush()
        key, separator, value = text.partition("=")
        if separator:
            self._keep(key, value)
        elif key.isupper():
            self._binary = key
        return ""


class _Verbose(_Fields):
    """A line with the time, then indented fields."""

    def read(self, text: str) -> str:
        if text.startswith("    "):
            key, separator, value = text.strip().partition("=")
            if separator:
                self._keep(key, value)
            return ""
        entry = self._flush()
        when = re.match(r"\w{3} (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?(?: [A-Z]{2,5}| ?[+-]\d\d:?\d\d)?)", text)
        if when:
            self._keep("time", when[1])
        return entry


class _JsonObjects:
    """journalctl -o json-pretty and dmesg --json: objects of several lines without objects inside."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def read(self, text: str) -> str:
        bare = text.strip()
        entry: dict[str, object] = {}
        if bare.startswith("}") and self._lines:
            try:
                entry = json.loads("\n".join([*self._lines, "}"]))
            except (ValueError, RecursionError):
                entry = {}
            self._lines = []
        if bare.endswith("{"):
            self._lines = ["{"]
        elif self._lines and not bare.startswith("}") and len(self._lines) < _MOST_LINES:
            self._lines.append(text)
        if "msg" in entry:  # dmesg, whose time is in seconds since boot
            return f"[{entry.get('time', 0.0)!s:>12}] {entry['msg']}"
        return json.dumps(entry, separators=(",", ":")) if "MESSAGE" in entry else ""


class _Outline:
    """Reads an indented document line by line, with the path of keys above each line."""

    def __init__(self) -> None:
        self._path: list[tuple[int, str]] = []

    def read(self, text: str) -> str:
        """Read one line; return the summary of an entry that has ended."""
        if text.lstrip().startswith(("{", "[{")) and text.strip() != "{" and text.rstrip().endswith(("}", "]")):
            return self._compact(text)
        match = _OUTLINE.match(text)
        if not text.strip() or text.startswith("---"):
            self._path = []
            return self.end([])
        if match is None or (match["key"] is None and not match["dash"] and text.strip() not in ("{", "[")):
            return self._leave(len(text) - len(text.lstrip()))
        indent = len(match["indent"])
        summary = ""
        if match["dash"] or match["key"] is None:  # a list item, whose key may have the same indentation
            summary = self._leave(indent + 1)
            summary = self.item(self.keys) or summary
            indent += len(match["dash"])
        if match["key"] is not None:
            summary = self._leave(indent) or summary
            value = match["value"].strip().strip('"') if match["value"] not in _OPENING else ""
            self._path.append((indent, match["key"]))
            self.value(self.keys, value)
        return summary

    def _compact(self, text: str) -> str:
        """Read a document that is on one line."""
        try:
            lines = json.dumps(json.loads(text), indent=1).splitlines()
        except (ValueError, RecursionError):
            return ""
        return "\n".join(filter(None, map(self.read, [*lines, ""])))

    @property
    def keys(self) -> list[str]:
        return [key for _, key in self._path]

    def _leave(self, indent: int) -> str:
        """Drop the keys that are indented as far as `indent` or further."""
        before = self.keys
        while self._path and self._path[-1][0] >= indent:
            self._path.pop()
        return self.end(before) if len(self._path) < len(before) else ""

    def value(self, keys: list[str], value: str) -> None:
        """Handle a key and its value."""

    def item(self, keys: list[str]) -> str:
        """Handle the begin of a list item; return the summary of the previous one."""
        return ""

    def end(self, before: list[str]) -> str:
        """Handle the end of the block at the path `before` ([] for the end of the document); return its summary."""
        return ""


class _Pods(_Outline):
    """kubectl get pod -o json or -o yaml, complete or a fragment: one line per container that was killed."""

    def __init__(self) -> None:
        super().__init__()
        self._pod = ""
        self._limits: dict[str, str] = {}
        self._container: dict[str, str] = {}  # of the spec: name and limit
        self._name = ""  # of the status
        self._ends: list[dict[str, str]] = []

    def value(self, keys: list[str], value: str) -> None:
        key, above = keys[-1], keys[-2] if len(keys) > 1 else ""
        if keys[-2:] == ["metadata", "name"] and keys[:-2] in ([], ["items"]):
            self._pod = value
        elif (above in _CONTAINERS and key == "name") or (
            keys[-3:] == ["resources", "limits", "memory"] and any(name in keys for name in _CONTAINERS)
        ):
            self._container["name" if key == "name" else "limit"] = value
            if len(self._container) == 2 and len(self._limits) < _MOST_FIELDS:
                self._limits[self._container["name"]] = self._container["limit"]
        elif above in _STATUSES and key == "name":
            self._name = value
        elif key == "terminated":
            self._ends.append({})
        elif above == "terminated" and self._ends:
            self._ends[-1][key] = value

    def item(self, keys: list[str]) -> str:
        if keys[-1:] == ["items"]:
            self._pod, self._limits = "", {}
        if keys[-1:] and keys[-1] in (*_STATUSES, *_CONTAINERS):
            self._container = {}
            return self._summary()
        return ""

    def end(self, before: list[str]) -> str:
        is_complete = any(name in before for name in _STATUSES) and not any(name in self.keys for name in _STATUSES)
        return self._summary() if is_complete or not before else ""

    def _summary(self) -> str:
        """Return the last kill of a container, if there was one."""
        name, ends, self._name, self._ends = self._name, self._ends, "", []
        killed = [end for end in ends if end.get("exitCode") == "137" or end.get("reason") == "OOMKilled"]
        if not killed:
            return ""
        last = max(killed, key=lambda end: end.get("finishedAt", ""))
        return pod_line(self._pod, name, last, self._limits.get(name, ""))


def pod_line(pod: str, container: str, end: dict[str, str], limit: str) -> str:
    """Return the text that the phrases of services recognize."""
    return (
        f"{end.get('finishedAt', '')} kubernetes: pod {pod or '?'} container {container or '?'} exit code "
        f"{end.get('exitCode', '?')} reason {end.get('reason', '?')}{f' limit {limit}' if limit else ''}"
    ).strip()


class _DescribedPod(_Outline):
    """kubectl describe pod: one line per container that was killed."""

    def __init__(self) -> None:
        super().__init__()
        self._pod = self._container = self._limit = ""
        self._ends: list[dict[str, str]] = []

    def read(self, text: str) -> str:
        return super().read(text) or (text if self.keys[:1] == ["Events"] else "")

    def value(self, keys: list[str], value: str) -> None:
        if keys == ["Name"]:
            self._pod = value
        elif keys[0] in _DESCRIBED and len(keys) == 2:
            self._container = keys[1]
        elif keys[0] in _DESCRIBED and keys[-2:] == ["Limits", "memory"]:
            self._limit = value
        elif keys[-1] in ("State", "Last State") and value == "Terminated":
            self._ends.append({})
        elif keys[-2:-1] in (["State"], ["Last State"]) and self._ends and keys[-1] in _STATE_FIELDS:
            self._ends[-1][_STATE_FIELDS[keys[-1]]] = value

    def end(self, before: list[str]) -> str:
        if before and not (before[0] in _DESCRIBED and len(self.keys) <= 1):
            return ""
        ends = [end for end in self._ends if end.get("exitCode") == "137" or end.get("reason") == "OOMKilled"]
        container, limit, self._container, self._limit, self._ends = self._container, self._limit, "", "", []
        return pod_line(self._pod, container, ends[-1], limit) if ends else ""


class _DockerInspect(_Outline):
    """docker inspect: one line per container whose OOMKilled flag is set."""

    def __init__(self) -> None:
        super().__init__()
        self._container: dict[str, str] = {}

    def value(self, keys: list[str], value: str) -> None:
        if keys[-1] in ("Id", "Name", "OOMKilled", "FinishedAt", "Memory") and len(keys) <= 2:
            self._container.setdefault(keys[-1], value)

    def item(self, keys: list[str]) -> str:
        return self._summary() if not keys else ""

    def end(self, before: list[str]) -> str:
        return "" if before else self._summary()

    def _summary(self) -> str:
        container, self._container = self._container, {}
        if container.get("OOMKilled") != "true":
            return ""
        name = container.get("Name", "").lstrip("/") or container.get("Id", "?")[:12]
        limit = container.get("Memory", "0")
        shown = f" limit {limit}" if limit.isdigit() and int(limit) else ""
        return f"{container.get('FinishedAt', '')} docker: container {name} OOMKilled{shown}".strip()


class _JetsamReport(_Outline):
    """A JetsamEvent report of macOS: the processes that were killed, or else the largest process."""

    def __init__(self) -> None:
        super().__init__()
        self._process: dict[str, str] = {}
        self._time = self._largest = ""
        self._page_bytes, self._killed, self._largest_pages = 16384, 0, 0

    def read(self, text: str) -> str:
        header = re.search(r'"timestamp"\s*:\s*"([^"]+)"', text)
        if header:
            self._time = header[1]
        return super().read(re.sub(r'"\s+:', '":', text)) if not (header and text.startswith("{")) else ""

    def value(self, keys: list[str], value: str) -> None:
        if keys[-1] == "pageSize" and value.isdigit():
            self._page_bytes = int(value)
        elif keys[-1] == "largestProcess":
            self._largest = value
        elif "processes" in keys and keys[-1] in ("name", "pid", "rpages", "reason"):
            self._process[keys[-1]] = value

    def item(self, keys: list[str]) -> str:
        return self._summary() if keys[-1:] == ["processes"] else ""

    def end(self, before: list[str]) -> str:
        if before:
            return ""
        summary = self._summary()
        if self._largest and not self._killed:
            size = f" size {self._largest_pages * self._page_bytes}" if self._largest_pages else ""
            summary, self._largest = f"{self._time} macos: jetsam report, largest process {self._largest}{size}", ""
        return summary

    def _summary(self) -> str:
        process, self._process = self._process, {}
        pages = int(process["rpages"]) if process.get("rpages", "").isdigit() else 0
        if process.get("name") == self._largest:
            self._largest_pages = max(self._largest_pages, pages)
        if "reason" not in process or "name" not in process or not process.get("pid", "").isdigit():
            return ""
        self._killed += 1
        return (
            f"{self._time} macos: jetsam killed {process['name']} pid {process['pid']} "
            f"size {pages * self._page_bytes} reason {process['reason']}"
        )


class SlurmTable:
    """Adds the columns MaxRSS and ReqMem of a sacct table, by name, to the rows of jobs that ran out of memory."""

    NEEDLES = (b"JobID", b"-- --")

    def __init__(self) -> None:
        self._header = ""
        self._spans: list[tuple[str, int, int]] = []

    def read(self, text: str) -> str:
        if "JobID" in text:
            self._header, self._spans = text, []
        elif self._header and re.fullmatch(r"-+( +-+)+\s*", text):
            self._spans = [(self._header[a:b].strip(), a, b) for a, b in (m.span() for m in re.finditer(r"-+", text))]
        elif self._header and "OUT_OF_ME" in text:
            if "|" in self._header:
                cells = dict(zip(self._header.split("|"), text.split("|"), strict=False))
            else:
                cells = {name: text[start:end].strip() for name, start, end in self._spans}
            values = [f" {name}={cells[name]}" for name in ("MaxRSS", "ReqMem") if cells.get(name, "")[:1].isdigit()]
            return text + "".join(value for value in values if not value.endswith("c"))  # 4Gc is per core
        return text

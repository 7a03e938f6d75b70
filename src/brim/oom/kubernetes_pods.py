"""Containers that ended, in what kubectl prints of pods as JSON or YAML: a line of a log for each.

Read line by line with the path of keys above each, by indentation, which both have. The order of keys does not matter,
and no more than one container is held.
"""

from __future__ import annotations

import json
import re

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

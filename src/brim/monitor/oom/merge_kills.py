"""Merge the reports of one death into one kill.

The kernel, a service, the batch system, the launcher and the shell may all report the same death, and one record may
be in dmesg, the journal and a log file. The most reliable report leads; the others fill the fields that it lacks.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from brim.monitor.oom.kills import SURENESS, Bound, GroupMemory, Kill, MachineRoom, Sizes, same_group

_SAME_PID_S = 120.0  # a process is killed once, and its number is not reused that soon
_SAME_DEATH_S = 90.0
_UNIT_S = 5.0  # between the kernel's line and that of systemd about the unit
_REPEAT_S = 5.0  # between two copies of a line in two logs
_NEAR_LINES = 60
_MOST_QUOTES = 16  # per kill
_EMPTY = (None, (), "", "unknown", Bound(), MachineRoom(), Sizes(), GroupMemory())
_CONTAINER_ID = re.compile(r"[0-9a-f]{12,64}")
_SLURM_JOB = re.compile(r"(?:step|job) (\d+(?:_\d+)?)")


def merge(kills: Iterable[Kill]) -> list[Kill]:
    """Return each kill once, in the order of its first report.

    Reports with a process id come first: they are the anchors to which reports without one are compared.
    """
    ordered = list(enumerate(kills))
    index = _Index()
    for position, kill in sorted(ordered, key=lambda entry: entry[1].pid is None):
        names = _identities(kill)
        slot = next(
            (
                candidate
                for candidate in index.candidates(kill, names)
                if _is_same_death(index.kills[candidate], kill, not names.isdisjoint(index.names[candidate]))
            ),
            None,
        )
        if slot is None:
            index.insert(len(index.kills), position, kill)
        else:
            existing = index.kills[slot]
            lead, extra = (existing, kill) if _reliability(existing) >= _reliability(kill) else (kill, existing)
            index.insert(slot, min(index.positions[slot], position), combine(lead, extra))
    return [index.kills[slot] for slot in sorted(index.kills, key=index.positions.__getitem__)]


def in_order(kills: Iterable[Kill]) -> list[Kill]:
    """Return kills by time; those without a date come first, in the order of their log."""

    def key(kill: Kill) -> tuple[bool, float, float, int]:
        seconds = kill.when.timestamp() if kill.when is not None else 0.0
        return kill.when is not None, seconds, kill.boot_s or 0.0, (kill.evidence[0].line or 0) if kill.evidence else 0

    return sorted(kills, key=key)


def gap_s(first: Kill, second: Kill) -> float | None:
    """Return the seconds between two kills, if both have the same kind of time."""
    if first.when is not None and second.when is not None:
        return abs((first.when - second.when).total_seconds())
    if first.boot_s is not None and second.boot_s is not None:
        return abs(first.boot_s - second.boot_s)
    return None


def uncounted(counters: list[Kill], kills: list[Kill]) -> list[Kill]:
    """Return the kills that cgroups counted and no record explains."""
    unexplained = []
    for counter in counters:
        matching = sum(
            kill.boot in (0, None)
            and kill.scope == "cgroup"
            and any(same_group(group, counter.bound.group or "") for group in _groups(kill))
            for kill in kills
        )
        if matching < counter.count:
            unexplained.append(replace(counter, count=counter.count - matching))
    return unexplained


def combine(lead: Kill, extra: Kill) -> Kill:
    """Return the leading report with the fields that only the other one has."""
    values: dict[str, Any] = {
        field.name: getattr(extra, field.name) for field in fields(Kill) if getattr(lead, field.name) in _EMPTY
    }
    for name in ("bound", "room", "sizes") if lead.killer == extra.killer else ("bound", "room"):
        values[name] = _filled(getattr(lead, name), getattr(extra, name))
    if extra.reason and SURENESS.index(extra.sure) < SURENESS.index(lead.sure):
        values |= {"sure": extra.sure, "reason": extra.reason}
    if lead.unit and lead.unit.startswith("task ") and extra.unit:
        values["unit"] = extra.unit  # a Slurm step says more than the number of a task
    if "killed" in (lead.effect, extra.effect):
        values["effect"] = "killed"
    if 9 in (lead.signal, extra.signal):
        values["signal"] = 9
    values["count"] = lead.count if lead.pid is not None else max(lead.count, extra.count)
    values["notes"] = tuple(dict.fromkeys((*lead.notes, *extra.notes)))
    quotes = lead.evidence
    if len(quotes) < _MOST_QUOTES:
        quotes = tuple(dict.fromkeys((*quotes, *extra.evidence)))
        if len({quote.source for quote in quotes}) == 1:
            quotes = tuple(sorted(quotes, key=lambda quote: quote.line or 0))
    values["evidence"] = quotes
    return replace(lead, **values)


def _filled(lead: Any, extra: Any) -> Any:
    missing = {
        field.name: getattr(extra, field.name) for field in fields(lead) if getattr(lead, field.name) in (None, "")
    }
    return replace(lead, **missing)


def _reliability(kill: Kill) -> tuple[int, int]:
    """Rank reports: the killer's own record, then a service, then a launcher or shell; then by known fields."""
    if kill.killer in ("kernel", "rlimit"):
        rank = 4 if kill.pid is not None else 1
    elif kill.killer == "unknown":
        rank = 0
    else:
        rank = 3 if kill.pid is not None or kill.name is not None else 2
    sizes = sum(getattr(kill.sizes, field.name) is not None for field in fields(Sizes))
    facts = (kill.bound.bytes, kill.bound.group, kill.room.ram_bytes, kill.when, kill.name, kill.invoked_by, kill.pid)
    certainty = len(SURENESS) - SURENESS.index(kill.sure)
    return rank, sizes + len(kill.tasks) + sum(value is not None for value in facts) + 4 * certainty


def _groups(kill: Kill) -> list[str]:
    return [group for group in (kill.bound.task_group, kill.bound.group) if group]


def _identities(kill: Kill) -> set[str]:
    """Return the jobs, units and containers that a report names, in its unit or in the path of a control group."""
    names = set()
    if kill.unit is not None and not kill.unit.startswith("task "):
        job = _SLURM_JOB.match(kill.unit)
        container = _CONTAINER_ID.search(kill.unit)
        names.add(f"job {job[1]}" if job else container[0][:12] if container else kill.unit)
    for part in "/".join(_groups(kill)).split("/"):
        container = _CONTAINER_ID.search(part)
        if part.startswith("job_"):
            names.add(f"job {part[4:]}")
        elif container:
            names.add(container[0][:12])
        elif part.endswith((".service", ".scope", ".slice")):
            names.add(part)
    return names


class _Index:
    """Kills merged so far, with the lookups that keep the number of comparisons small in logs full of kills."""

    def __init__(self) -> None:
        self.kills: dict[int, Kill] = {}
        self.names: dict[int, set[str]] = {}
        self.positions: dict[int, int] = {}
        self._by_pid: dict[int, list[int]] = {}
        self._by_name: dict[str, list[int]] = {}
        self._by_line: dict[str, list[tuple[int, int]]] = {}  # by source
        self._by_time: dict[str, list[tuple[float, int]]] = {}  # by source

    def insert(self, slot: int, position: int, kill: Kill) -> None:
        """Set the kill of a slot, new or existing."""
        self.kills[slot], self.positions[slot], self.names[slot] = kill, position, _identities(kill)
        if kill.pid is not None:
            slots = self._by_pid.setdefault(kill.pid, [])
            if slot not in slots[-1:]:
                slots.append(slot)
        for name in self.names[slot]:
            self._by_name.setdefault(name, []).append(slot)
        for quote in kill.evidence[-2:]:
            if quote.line is not None:
                insort(self._by_line.setdefault(quote.source, []), (quote.line, slot))
            if kill.when is not None:
                insort(self._by_time.setdefault(quote.source, []), (kill.when.timestamp(), slot))

    def candidates(self, kill: Kill, names: set[str]) -> list[int]:
        """Return the slots that a report may belong to, the most specific ones first."""
        if kill.pid is not None:
            return self._by_pid.get(kill.pid, [])
        slots = [slot for name in names for slot in self._by_name.get(name, ())]
        sources = {quote.source for quote in kill.evidence}
        for quote in kill.evidence:
            if quote.line is not None:
                nearby = _between(self._by_line.get(quote.source, []), quote.line, _NEAR_LINES)
                slots += [slot for _, slot in sorted(nearby, key=lambda entry: abs(entry[0] - (quote.line or 0)))]
        if kill.when is not None:  # copies of a line in another log
            for source, times in self._by_time.items():
                if source not in sources:
                    slots += [slot for _, slot in _between(times, kill.when.timestamp(), _REPEAT_S)]
        return list(dict.fromkeys(slots))


def _between(entries: list[tuple[Any, int]], center: float, width: float) -> list[tuple[Any, int]]:
    start = bisect_left(entries, (center - width, -1))
    return entries[start : bisect_right(entries, (center + width, sys.maxsize))]


def _is_same_death(first: Kill, second: Kill, share_name: bool) -> bool:
    """Return whether two reports are about one death; `share_name` if both name the same job, unit or container."""
    if first.host and second.host and first.host.partition(".")[0] != second.host.partition(".")[0]:
        return False
    gap = gap_s(first, second)
    silent = ("refused", "restarted")
    if first.effect in silent or second.effect in silent:
        if first.effect != second.effect or first.killer != second.killer:
            return False
        if first.pid is not None and second.pid is not None:
            return first.pid == second.pid and _is_same_process(first, second, gap)
        distance = _distance(first, second)
        return distance is not None and distance <= _NEAR_LINES
    if first.pid is not None and second.pid is not None:
        return first.pid == second.pid and _is_same_process(first, second, gap)
    if gap is not None and gap > _SAME_DEATH_S:
        return False
    if first.killer == second.killer == "kernel":
        nameless = first if first.pid is None else second
        if nameless.unit is None:  # a counter; a record that was cut is a kill of its own
            return nameless.when is None and any(
                same_group(group, second_group) for group in _groups(first) for second_group in _groups(second)
            )
    if share_name:
        return True
    distance = _distance(first, second)
    if distance is None:  # two logs: only a copy of the same line
        alike = first.killer == second.killer and first.unit == second.unit and first.bound.group == second.bound.group
        return alike and gap is not None and gap <= _REPEAT_S and not _share_source(first, second)
    if distance > _NEAR_LINES:
        return False
    if first.killer == second.killer == "kernel":  # systemd names the unit, the kernel's line only the process
        slices = any((kill.unit or "").endswith(".slice") for kill in (first, second))  # they repeat a unit's kill
        is_record = first.pid is not None or second.pid is not None
        return (is_record or slices) and not (_groups(first) or _groups(second)) and (gap is None or gap <= _UNIT_S)
    if first.killer == second.killer:
        if first.killer in ("batch system", "container runtime") and first.reason != second.reason:
            return False
        units = [kill.unit for kill in (first, second) if kill.unit and not kill.unit.startswith("task ")]
        return len(units) < 2
    return "unknown" in (first.killer, second.killer) and "earlyoom" not in (first.killer, second.killer)


def _is_same_process(first: Kill, second: Kill, gap: float | None) -> bool:
    """Return whether two reports with one process id are about the same process."""
    if gap is not None:
        names_agree = first.name is None or second.name is None or first.name == second.name
        return gap <= _SAME_PID_S and (names_agree or first.killer != second.killer)
    if first.killer != second.killer:
        return first.name is None or second.name is None or first.name == second.name or _share_source(first, second)
    if first.name is not None and second.name is not None and first.name != second.name:
        return False
    bare = [replace(kill.sizes, swap_bytes=None, rss_bytes=None) for kill in (first, second)]
    return first.sizes == second.sizes or Sizes() in bare


def _share_source(first: Kill, second: Kill) -> bool:
    return not {quote.source for quote in first.evidence}.isdisjoint(quote.source for quote in second.evidence)


def _distance(first: Kill, second: Kill) -> int | None:
    """Return the number of lines between two reports of one log."""
    return min(
        (
            abs(a.line - b.line)
            for a in first.evidence
            for b in second.evidence
            if a.source == b.source and a.line is not None and b.line is not None
        ),
        default=None,
    )

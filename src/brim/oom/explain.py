"""Kills in sentences: who killed what, against which limit, how sure that is, and what several have in common."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from brim.oom.advice import suggestion
from brim.oom.kills import ASKED_FOR, CurvePoint, Kill, owner_of
from brim.oom.terminal_log import called_job
from brim.sizes import format_size

_BARS = "▁▂▃▄▅▆▇█"
_YEAR = 365.25 * 86400


def explained(kill: Kill) -> Kill:
    """A kill with notes on what is easily misread, and a suggestion."""
    notes = list(kill.notes)
    group, task_group = kill.bound.group, kill.bound.task_group
    if kill.scope == "cgroup" and group and task_group and group != task_group and task_group.startswith(group):
        notes.append(f"The limit is that of {group}, above the process's own group {task_group}.")
    shmem, held = kill.contents.shmem_bytes or 0, kill.sizes.held_bytes
    if kill.scope == "cgroup" and held is not None and shmem > 2 * held:
        notes.append("The victim held little: what filled the group was shared memory, which no kill gives back.")
    if kill.scope == "machine" and kill.killer == "kernel" and task_group and owner_of(task_group).kind in _CONTAINED:
        notes.append(
            f"It ran in {owner_of(task_group).text}, but the whole machine was full: no limit of that was hit."
        )
    job = kill.job or called_job(kill.command or "")
    explained = replace(kill, notes=tuple(dict.fromkeys(notes)), job=job)
    return replace(explained, advice=suggestion(explained))


_CONTAINED = ("pod", "docker", "ecs", "lxc", "slurm")


def headline(kill: Kill) -> str:
    """One sentence: what happened."""
    who, limit = victim(kill), limit_text(kill)
    if kill.effect == "restarted":
        return f"The machine went down while {who} ran."
    if kill.effect == "refused":
        return _refusal(kill, who)
    if kill.killer == "kernel":
        return _by_the_kernel(kill, who, limit)
    if kill.killer == "systemd-oomd":
        return f"systemd-oomd killed {who}: {kill.bound.text or 'memory was short'}."
    if kill.killer == "oomd":
        verb = "killed" if kill.sure == "certain" else "would have killed"
        return f"oomd {verb} {who}: memory was short{f' (its rule {kill.bound.text!r})' if kill.bound.text else ''}."
    if kill.killer == "earlyoom":
        verb = "killed" if kill.effect == "killed" else "asked"
        return f"earlyoom {verb} {who}{'' if verb == 'killed' else ' to end'}: the machine was almost out of memory."
    if kill.killer == "slurm":
        return f"Killed at the memory limit of Slurm: {who}{f' ({limit})' if limit else ''}."
    if kill.killer == "brim":
        verb = "killed" if kill.effect == "killed" else "stopped"
        return f"brim {verb} {who}{f' at {format_size(kill.bound.bytes)}' if kill.bound.bytes else ''}."
    if kill.killer in ("ray", "dask", "batch system", "kubelet", "container runtime"):
        verb = "evicted" if kill.effect == "evicted" else "killed"
        name = {"kubelet": "Kubernetes", "batch system": "The batch system"}.get(kill.killer, kill.killer.capitalize())
        because = limit or kill.bound.text
        if kill.killer == "container runtime" and kill.scope == "unknown":
            return f"{who[:1].upper()}{who[1:]} was ended by SIGKILL; whether for memory is not proved."
        if kill.killer == "container runtime":
            return f"Killed for memory inside a container: {who}."
        return f"{name} {verb} {who}{f': {because}' if because else ' for memory'}."
    who = f"A{who[1:]}" if who.startswith("a ") else who
    if kill.signal == 9:
        proof = "likely for lack of memory" if kill.sure == "likely" else "and by whom is not proved"
        return f"{who} was killed by SIGKILL, {proof}."
    return f"{who} vanished; why is not proved."


def _by_the_kernel(kill: Kill, who: str, limit: str) -> str:
    if ASKED_FOR in kill.notes:
        return f"The kernel killed {who}: somebody asked it to (SysRq)."
    if kill.scope == "machine":
        return f"The kernel killed {who}: the machine was out of memory."
    if kill.scope == "cgroup":
        return f"The kernel killed {who}: {limit or 'a cgroup reached its memory limit'}."
    return f"The kernel killed {who} for lack of memory."


def brief(kill: Kill) -> str:
    """What happened in half a line."""
    if kill.effect in ("refused", "restarted"):
        return headline(kill).rstrip(".")
    held = f", {format_size(size)}" if (size := kill.sizes.held_bytes) else ""
    by = {"unknown": "SIGKILL, by whom is not proved", "gpu": "the GPU"}.get(kill.killer, kill.killer)
    if kill.scope == "machine":
        by += ", machine out of memory"
    elif kill.scope == "cgroup" or kill.killer == "brim":
        limit = f" {format_size(kill.bound.bytes)}" if kill.bound.bytes is not None else ""
        group = f" of {kill.bound.group.rstrip('/').rsplit('/', 1)[-1]}" if kill.bound.group else ""
        by += f", limit{limit}{group}" if limit or group else ""
    return f"{victim(kill)}{held}: {by}"


def _refusal(kill: Kill, who: str) -> str:
    asked = kill.bound.usage_bytes
    if kill.killer == "rlimit" and kill.bound.bytes is not None:
        return (
            f"The kernel refused memory to {who}: its data limit (RLIMIT_DATA) is {format_size(kill.bound.bytes)}"
            f"{f', and it would have held {format_size(asked)}' if asked else ''}."
        )
    if kill.killer == "gpu":
        return f"The GPU's memory was full{f': {format_size(asked)} more were asked for' if asked else ''}."
    if kill.killer == "kernel":
        return "The kernel ran out of memory and found nothing that it may kill."
    if asked is not None:
        return f"An allocation of {format_size(asked)} failed; nobody was killed."
    what = kill.bound.text or "an allocation"
    return f"{what[:1].upper()}{what[1:]} ran out of memory; nobody was killed."


def victim(kill: Kill) -> str:
    """Who died, as far as it is known."""
    if kill.pid is not None or kill.name is not None:
        name = kill.name or "a process"
        return f"{name} (pid {kill.pid})" if kill.pid is not None else name
    if kill.unit is not None:
        what = "a process" if kill.count == 1 else f"{kill.count} processes"
        return f"{what} of {kill.unit}"
    if kill.count > 1:
        return f"{kill.count} processes"
    return "a process that is not named"


def limit_text(kill: Kill) -> str:
    """Whose limit was reached, in words."""
    bound = kill.bound
    size = f" of {format_size(bound.bytes)}" if bound.bytes is not None else ""
    if bound.group:
        text = owner_of(bound.group).text
        if text == f"the cgroup {bound.group}":
            return f"{text} reached its limit{size}"
        return f"{text} reached its {'memory+swap ' if bound.kind == 'memory+swap' else ''}limit{size}"
    return f"the limit{size} was reached" if size else ""


def sizes_text(kill: Kill) -> str:
    """How much the victim held, by kind."""
    sizes = kill.sizes
    named = [
        (sizes.anon_bytes, "anonymous"),
        (sizes.shmem_bytes, "shared"),
        (sizes.file_bytes, "file-backed"),
        (sizes.swap_bytes, "swapped"),
    ]
    parts = [f"{format_size(size)} {name}" for size, name in named if size is not None and (size or name != "swapped")]
    if not parts and sizes.rss_bytes is not None:
        parts = [f"{format_size(sizes.rss_bytes)} resident"]
    if parts and sizes.total_vm_bytes is not None:
        parts.append(f"of {format_size(sizes.total_vm_bytes)} address space")
    return ", ".join(parts)


def room_text(kill: Kill) -> str:
    room = kill.room
    parts = []
    if room.ram_bytes is not None:
        parts.append(f"{format_size(room.ram_bytes)} RAM")
    if room.available_bytes is not None:
        parts.append(f"{format_size(room.available_bytes)} available")
    if room.swap_bytes is not None:
        free = f" ({format_size(room.swap_free_bytes)} free)" if room.swap_free_bytes is not None else ""
        parts.append(f"{format_size(room.swap_bytes)} swap{free}" if room.swap_bytes else "no swap")
    return ", ".join(parts)


def contents_text(kill: Kill) -> str:
    named = [
        (kill.contents.anon_bytes, "anonymous"),
        (kill.contents.shmem_bytes, "shared memory (tmpfs)"),
        (kill.contents.file_bytes, "file pages"),
    ]
    return ", ".join(f"{format_size(size)} {name}" for size, name in named if size is not None)


def when_text(kill: Kill, now: datetime) -> str:
    if kill.when is None:
        return f"{kill.boot_s:,.1f} s after boot" if kill.boot_s is not None else "not recorded"
    ago = (now - kill.when).total_seconds()
    passed = f" ({span(ago)} ago)" if ago >= 60 else " (just now)" if ago >= 0 else ""
    return f"{kill.when:%Y-%m-%d %H:%M:%S %z}{passed}"


def curve_text(points: Sequence[CurvePoint], width: int = 40) -> str:
    """The last minute as a line of bars."""
    if len(points) < 2:
        return ""
    first, last = points[0], points[-1]
    length = max(last.t - first.t, 1e-9)
    columns: list[int] = [0] * width
    for point in points:
        column = min(int((point.t - first.t) / length * width), width - 1)
        columns[column] = max(columns[column], point.total_bytes)
    top = max(columns) or 1
    held = 0
    bars = []
    for value in columns:
        held = value or held  # no sample in this part: what was last seen
        bars.append(_BARS[min(held * len(_BARS) // top, len(_BARS) - 1)])
    change = f"{format_size(first.total_bytes)} → {format_size(last.total_bytes)}"
    return f"{''.join(bars)} {change} in {span(last.t - first.t)}"


def span(seconds: float) -> str:
    """A length of time in its largest unit."""
    if seconds >= 2 * _YEAR:
        return f"{seconds / _YEAR:.1f} years"
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length or (unit == "day" and seconds >= 1.5 * length):
            return f"{round(seconds / length)} {unit}s"
    return f"{seconds:.0f} s"


def summary(kills: Sequence[Kill]) -> str:
    """What several kills have in common: how often, how far apart, how large."""
    dead = [kill for kill in kills if kill.effect in ("killed", "asked to end", "evicted")]
    if not dead:
        return ""
    lines = []
    names = Counter(_title(kill) for kill in dead)
    for name, count in names.most_common(3):
        if count > 1:
            lines.append(_series(name, [kill for kill in dead if _title(kill) == name]))
    if not lines and len(dead) > 1:
        lines.append(_series("", dead))
    return "; ".join(lines)


def _title(kill: Kill) -> str:
    return kill.name or kill.unit or (kill.bound.group or "")


def _series(name: str, kills: Sequence[Kill]) -> str:
    text = f"{len(kills)} kills" + (f" of {name}" if name else "")
    dated = sorted(kill.when for kill in kills if kill.when is not None)
    if len(dated) == len(kills) and dated[-1] - dated[0] >= timedelta(seconds=1):
        length = (dated[-1] - dated[0]).total_seconds()
        text += f" in {span(length)}"
        if len(dated) > 2:
            text += f" (one every {span(length / (len(dated) - 1))})"
    sizes = [held for kill in kills if (held := kill.sizes.held_bytes)]
    if len(sizes) == len(kills):
        text += f", {_sizes(sizes)}"
        tops = {_top(kill) for kill in kills}
        top = tops.pop() if len(tops) == 1 else None
        if top is not None:
            text += f" of {format_size(top)}"
    return text


def _top(kill: Kill) -> int | None:
    return kill.bound.bytes if kill.scope == "cgroup" else kill.room.ram_bytes


def _sizes(sizes: Sequence[int]) -> str:
    """ "50.8 and 58.8 GB", or from the smallest to the largest."""
    shown = [format_size(size) for size in sizes]
    if len(shown) > 3:
        shown, word = [format_size(min(sizes)), format_size(max(sizes))], " to "
    else:
        word = " and "
    units = {text.split()[1] for text in shown}
    if len(units) == 1:
        shown[:-1] = [text.split()[0] for text in shown[:-1]]
    return re.sub(", (?=[^,]*$)", word, ", ".join(shown)) if len(shown) > 1 else shown[0]

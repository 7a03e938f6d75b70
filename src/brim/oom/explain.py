"""Kills in sentences: who killed what, against which limit, how sure that is, and what several have in common.

And one suggestion that fits the case: what to change, and the command that does it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from brim.oom.kills import ASKED_FOR, LEAK, CurvePoint, Job, Kill, ListedTask, owner_of
from brim.oom.terminal_log import called_job
from brim.sizes import format_size

_LEAST_BYTES = 50_000_000  # an interpreter with its libraries does not start below that
_SHARE = 0.85  # of a limit: room for the interpreter, the page cache and a late signal


def suggestion(kill: Kill) -> str:
    """What to do about a kill."""
    if kill.effect == "restarted":
        return (
            "Run it again with a line below the machine's memory, so that it is stopped before the machine is: "
            f"{_run(kill.room.ram_bytes)}. To keep the kernel's record over a restart: mkdir -p /var/log/journal "
            "&& systemctl restart systemd-journald."
        )
    if kill.job is not None and kill.killer != "gpu":
        return _same_job(kill, kill.job)
    if ASKED_FOR in kill.notes:
        return "Ask who pressed SysRq f, or wrote f to /proc/sysrq-trigger: the victim is simply the largest process."
    special = _BY_KILLER.get(kill.killer)
    if special is not None:
        return special(kill)
    if kill.scope == "cgroup" and kill.killer in ("kernel", "container runtime"):
        return _cgroup(kill)
    if kill.scope == "machine":
        return _machine(kill)
    return (
        "Nobody wrote down why. Run it again under watch, and the next time there will be a curve and a cause: "
        f"{_run(kill.room.ram_bytes)}."
    )


def _same_job(kill: Kill, job: Job) -> str:
    """The brim command that does the same within a limit."""
    limit = kill.bound.bytes if kill.scope == "cgroup" else kill.room.ram_bytes
    memory = f" --memory {short_size(round(limit * _SHARE))}" if limit else " --memory SIZE"
    options = {
        "map": " --fn PACKAGE.MODULE:FUNCTION",
        "tokenize": " --tokenizer NAME",
        "embed": " --model NAME",
        "build": "",
    }
    return (
        f"brim {job} SOURCE DEST{options[job]}{memory} does such a job within a limit, and after a kill it continues "
        "where it was."
    )


def _machine(kill: Kill) -> str:
    if kill.effect == "refused":
        return (
            "Look at what held the memory before the end; if it was shared memory or huge pages, no kill gives it "
            "back: df -h /dev/shm; grep Huge /proc/meminfo."
        )
    held = kill.sizes.held_bytes or 0
    largest = kill.tasks[0] if kill.tasks else None
    if largest is not None and largest.pid != kill.pid and (_held(largest) or 0) > 2 * held > 0:
        return (
            f"The victim was not the largest: {largest.name} ({largest.pid}) held {format_size(_held(largest) or 0)}. "
            f"Start there: brim watch {largest.pid}."
        )
    alike = [task for task in kill.tasks if task.name == kill.name]
    if len(alike) >= 3:
        total = sum(_held(task) or 0 for task in alike)
        return (
            f"{len(alike)} processes named {kill.name} held {format_size(total)} together: start half as many "
            f"(num_proc, num_workers), or give all of them one line: {_run(kill.room.ram_bytes, held)}."
        )
    return (
        f"Give it a line of its own, below the machine's memory: {_run(kill.room.ram_bytes, held)}. It is warned, "
        "then stopped cleanly, before the kernel has to choose; a dataset job fits any line with brim build or "
        "brim map --memory."
    )


def _cgroup(kill: Kill) -> str:
    limit, group = kill.bound.bytes, kill.bound.group or kill.bound.task_group or ""
    shmem = kill.contents.shmem_bytes or 0
    if limit and shmem > limit // 2:
        return (
            f"{format_size(shmem)} of the limit were shared memory: files in /dev/shm or another tmpfs, which stay "
            "until they are deleted. Look with ls -lS /dev/shm; use fewer DataLoader workers or a smaller "
            "prefetch_factor; put temporary files on a disk (TMPDIR)."
        )
    owner = owner_of(group) if group else None
    more = f"more than {format_size(limit)}" if limit else "more"
    raise_it = {
        "pod": f"raise resources.limits.memory of the container to {more}",
        "docker": f"raise the container's limit to {more} (docker run --memory)",
        "ecs": f"raise the memory of the task definition to {more}",
        "slurm": f"ask for {more} (sbatch --mem)",
        "lxc": f"raise the container's memory to {more}",
        "vm": f"raise its memory to {more}",
        "session": f"raise MemoryMax= of the unit to {more}, or ask who set it",
        "service": f"raise MemoryMax= of the unit to {more}",
    }.get(owner.kind if owner else (kill.unit or "").partition(" ")[0], f"raise the limit to {more}")
    if owner is not None and owner.shared:
        return f"The limit belongs to {owner.text}: others use it up too. Run with a line of its own: {_run(limit)}."
    return f"Keep it within the limit ({_run(limit)} stops it cleanly and shows where it grows), or {raise_it}."


def _oomd(kill: Kill) -> str:
    return (
        f"{kill.killer} ends a whole group when it stalls for memory. Run the job in a unit of its own, so that the "
        "terminal survives, with a line that is hit first: systemd-run --user --scope brim run --memory 8GB -- COMMAND."
    )


def _earlyoom(kill: Kill) -> str:
    return (
        "earlyoom acts while some memory is still free. Give the job a line below that: "
        f"{_run(kill.room.ram_bytes, kill.sizes.held_bytes or 0)}."
    )


def _slurm(kill: Kill) -> str:
    limit = kill.bound.bytes
    more = f"--mem above {format_size(limit)}" if limit else "more --mem"
    return f"Ask for {more} in sbatch, or stay within what was given: {_run(limit)} (seff JOB shows what it had)."


def _batch(kill: Kill) -> str:
    return f"Ask for more memory when the job is submitted, or stay within: {_run(kill.bound.bytes)}."


def _rlimit(kill: Kill) -> str:
    return (
        "A ulimit stopped it, not a lack of memory: see ulimit -d (LimitDATA= in a unit) and raise it, or use a limit "
        f"that programs survive better: {_run(kill.bound.bytes)}."
    )


def _program(kill: Kill) -> str:
    asked = kill.bound.usage_bytes
    if kill.bound.kind == "shared memory":
        return "Make it larger (docker run --shm-size, a larger emptyDir in a pod), or use fewer DataLoader workers."
    if kill.bound.kind == "heap":
        return f"The heap's own limit was hit, not the machine's: raise it. It was {kill.bound.text}."
    if asked is not None:
        return (
            f"One allocation of {format_size(asked)} was more than there was. Work in pieces (brim map, brim embed), "
            "or see beforehand whether it fits: brim forecast concat."
        )
    return "Run it again under watch to see which step it is: brim run -- COMMAND; brim forecast says whether it fits."


def _gpu(kill: Kill) -> str:
    return (
        "This is the GPU's memory, not the machine's: use a smaller batch, gradient checkpointing or a smaller type; "
        "brim embed chooses the batch by itself."
    )


def _kubelet(kill: Kill) -> str:
    return "The node was short, and the pod used more than it asked for: raise its resources.requests.memory."


def _worker(kill: Kill) -> str:
    return (
        "A worker held more than its share: use smaller partitions or fewer tasks at a time, or let "
        f"{_run(kill.room.ram_bytes)} show which one grows."
    )


def _brim(kill: Kill) -> str:
    if LEAK in kill.notes:
        return "More memory only delays it: see in brim report when it grows, and what is kept there."
    raised = round((kill.bound.bytes or 0) * 1.5)
    if not raised or raised > (kill.room.ram_bytes or raised):
        return "This machine does not have much more: use smaller batches, or brim map, tokenize or embed."
    return f"If it needs more, and the machine has it: brim run --memory {short_size(raised)} -- COMMAND."


_BY_KILLER = {
    "systemd-oomd": _oomd,
    "oomd": _oomd,
    "earlyoom": _earlyoom,
    "slurm": _slurm,
    "batch system": _batch,
    "rlimit": _rlimit,
    "program": _program,
    "gpu": _gpu,
    "kubelet": _kubelet,
    "ray": _worker,
    "dask": _worker,
    "brim": _brim,
}


def _held(task: ListedTask) -> int | None:
    return task.sizes.held_bytes


def _run(bytes_: int | None, held: int = 0) -> str:
    """The command, with a limit a little below the one that was hit."""
    basis = bytes_ or (held if held else None)
    if not basis:
        return "brim run -- COMMAND"
    return f"brim run --memory {short_size(max(round(basis * _SHARE), _LEAST_BYTES))} -- COMMAND"


def short_size(size: int) -> str:
    """A size as an option takes it: "52GB"."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= 3 * factor:
            return f"{size // factor}{unit}"
    return str(size)


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
        held = f" at {format_size(kill.sizes.held_bytes)}" if kill.sizes.held_bytes else ""
        limit = f" of {format_size(kill.bound.bytes)}" if kill.bound.bytes else ""
        return f"brim {verb} {who}{held}{limit}."
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
    passed = f" ({span(ago)} ago)" if ago >= 60 else ""  # nothing in a post-mortem, which is read later
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
    dead = [kill for kill in kills if kill.effect in ("killed", "asked to end", "evicted") and not is_clean_stop(kill)]
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


def is_clean_stop(kill: Kill) -> bool:
    """Whether brim asked the process to stop, and it did."""
    return kill.killer == "brim" and kill.effect == "asked to end"


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

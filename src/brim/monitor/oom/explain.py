"""Explain kills in sentences: a headline, notes, one suggestion, and a summary of several kills.

Headlines and suggestions are tables by killer, effect and scope.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from brim.monitor.oom.kills import ASKED_FOR, LEAK, UNKNOWN_TREND, CurvePoint, Kill, owner_of
from brim.monitor.oom.phrases import called_job
from brim.monitor.oom.program_phrases import SEMAPHORE_NOTE
from brim.monitor.text_formats import sparkline
from brim.sizes import format_duration, format_size

_LEAST_BYTES = 50_000_000  # an interpreter with its libraries needs that much
_SAFE_PART = 0.85  # of a limit: leaves memory for the page cache and for a late signal
_SMALL_VICTIM = 1_000_000_000  # a smaller victim is not the reason why a machine is full
_CONTAINED = ("pod", "docker", "ecs", "lxc", "slurm")

# "killer effect scope" and the text; the first row that fits is used, "*" fits all.
_HEADLINES = {
    "* restarted *": "The machine went down while {victim} was running.",
    "rlimit refused *": "The kernel refused memory to {victim}: its data limit (RLIMIT_DATA) is {limit}{would_use}.",
    "gpu refused *": "{The_text} was full{requested_more}.",
    "kernel refused *": "The kernel ran out of memory and found no process that it may kill.",
    "program refused *": "{refused}; no process was killed.",
    "kernel * machine": "The kernel killed {victim}: the machine was out of memory.",
    "kernel * cgroup": "The kernel killed {victim}: {reached|a cgroup reached its memory limit}.",
    "kernel * *": "The kernel killed {victim} for lack of memory.",
    "systemd-oomd * *": "systemd-oomd killed {victim}: {text|memory was short}.",
    "oomd * *": "oomd {killed_or_would_have} {victim}: memory was short{rule}.",
    "earlyoom killed *": "earlyoom killed {victim}: the machine was almost out of memory.",
    "earlyoom * *": "earlyoom sent SIGTERM to {victim}: the machine was almost out of memory.",
    "nohang killed *": "nohang killed {victim}: the machine was almost out of memory.",
    "nohang * *": "nohang sent SIGTERM to {victim}: the machine was almost out of memory.",
    "macos * *": "macOS killed {victim}: the machine was short of memory.",
    "slurm * *": "Slurm killed {victim} at its memory limit{limit_note}.",
    "brim killed *": "brim killed {victim}{used_of_limit}.",
    "brim * *": "brim stopped {victim}{used_of_limit}.",
    "ray * *": "Ray killed {victim}: {reached|memory was short}.",
    "dask * *": "Dask killed {victim}: it used more than {text}.",
    "batch_system * *": "{system} killed {victim}: {reached|it reached its memory limit}.",
    "kubelet * *": "Kubernetes evicted {victim}: {text|the node was low on memory}.",
    "container_runtime * unknown": "SIGKILL ended {victim}; the log does not give the reason.",
    "container_runtime * machine": "The container runtime killed {victim}: the machine was short of memory.",
    "container_runtime * *": "A container ran out of memory: {victim} was killed.",
}
_DAEMON = (
    "{killer} kills a whole cgroup when it stalls for memory. Run the job in its own unit, so that the terminal "
    "survives, with a limit that is reached first: systemd-run --user --scope brim run --memory 8GB -- COMMAND."
)
_WORKER = (
    "A worker used more than its part of the memory. Use smaller partitions or fewer tasks at a time; {run_below_ram} "
    "shows which process grows."
)
_SUGGESTIONS = {
    "* restarted *": (
        "Run it again with a limit below the machine's memory, so that it is stopped first: {run_below_ram}. To keep "
        "the kernel's record over a restart: mkdir -p /var/log/journal && systemctl restart systemd-journald."
    ),
    "systemd-oomd * *": _DAEMON,
    "oomd * *": _DAEMON,
    "earlyoom * *": "earlyoom acts while some memory is still free. Give the job a lower limit: {run_below_ram}.",
    "nohang * *": "nohang acts while some memory is still free. Give the job a lower limit: {run_below_ram}.",
    "macos * *": (
        "macOS kills large processes when memory and swap run out. Use smaller batches, or process the dataset in "
        "parts with brim build or brim map --memory SIZE."
    ),
    "slurm * *": (
        "Request {more_mem} in sbatch, or keep the job below the limit: {run_below_limit} (seff JOB shows its memory)."
    ),
    "batch_system * *": "Request more memory for the job, or keep it below the limit: {run_below_limit}.",
    "rlimit * *": (
        "A ulimit stopped the process; the machine may have had memory. Check ulimit -d (LimitDATA= in a unit), or "
        "use a limit that stops a program cleanly: {run_below_limit}."
    ),
    "gpu * *": (
        "This is the memory of the GPU, not of the machine. Use a smaller batch, gradient checkpointing or a smaller "
        "data type; brim embed chooses the batch size."
    ),
    "kubelet * *": (
        "The node was low on memory and the pod used more than it requested. Raise its resources.requests.memory."
    ),
    "ray * *": _WORKER,
    "dask * *": _WORKER,
    "kernel refused machine": (
        "Check shared memory and huge pages, which no kill frees: df -h /dev/shm; grep Huge /proc/meminfo."
    ),
}
_RAISE_LIMIT = {
    "pod": "raise resources.limits.memory of the container{to_more}",
    "docker": "raise the container's limit{to_more} (docker run --memory)",
    "container": "raise the container's limit{to_more} (docker run --memory)",
    "ecs": "raise the memory of the task definition{to_more}",
    "slurm": "request {more_mem} (sbatch)",
    "lxc": "raise the container's memory{to_more}",
    "vm": "raise its memory{to_more}",
    "session": "raise MemoryMax= of the unit{to_more}",
    "service": "raise MemoryMax= of the unit{to_more}",
}
_JOB_OPTIONS = {
    "map": " --fn PACKAGE.MODULE:FUNCTION",
    "tokenize": " --tokenizer NAME",
    "embed": " --model NAME",
    "build": "",
}


def explain(kill: Kill) -> Kill:
    """Return a kill with notes on values that may be misread, and with a suggestion."""
    notes = list(kill.notes)
    group, task_group = kill.bound.group, kill.bound.task_group
    if kill.scope == "cgroup" and group and task_group and group != task_group and task_group.startswith(group):
        notes.append(f"The limit is that of {group}, above the process's own group {task_group}.")
    shmem, used = kill.contents.shmem_bytes or 0, kill.sizes.held_bytes
    if kill.scope == "cgroup" and used is not None and shmem > 2 * used:
        notes.append("The victim used little: the group was full of shared memory, which no kill frees.")
    if kill.scope == "machine" and kill.killer == "kernel" and task_group and owner_of(task_group).kind in _CONTAINED:
        notes.append(f"It ran in {owner_of(task_group).text}, but the whole machine was full: no limit was reached.")
    result = replace(kill, notes=tuple(dict.fromkeys(notes)), job=kill.job or called_job(kill.command))
    return replace(result, advice=suggestion(result))


def _row(rows: dict[str, str], kill: Kill) -> str:
    """Return the text of the first row that fits a kill."""
    case = [value.replace(" ", "_") for value in (kill.killer, kill.effect, kill.scope)]
    for key, text in rows.items():
        if all(pattern in ("*", value) for pattern, value in zip(key.split(), case, strict=True)):
            return text
    return ""


def _expand(text: str, values: dict[str, str]) -> str:
    """Replace `{name}` by a value, and `{name|default}` by the default if the value is empty."""
    return re.sub(r"\{(\w+)(?:\|([^}]*))?\}", lambda match: values.get(match[1]) or match[2] or "", text)


def _size(size: int | None, prefix: str = "", suffix: str = "") -> str:
    return f"{prefix}{format_size(size)}{suffix}" if size is not None else ""


def headline(kill: Kill) -> str:
    """Return one sentence: what happened."""
    subject, bound = victim(kill), kill.bound

    def capitalized(text: str) -> str:
        """Capitalize text that begins with an article; the name of a program stays as it is."""
        is_phrase = text.startswith(("a ", "an ", "the ", "shared "))
        return f"{text[0].upper()}{text[1:]}" if is_phrase else text

    if ASKED_FOR in kill.notes:
        return f"The kernel killed {subject}: a user requested it (SysRq)."
    system = re.split(r" (?:logged|put|counted) ", kill.reason, maxsplit=1)
    values = {
        "victim": subject,
        "limit": _size(bound.bytes),
        "reached": limit_text(kill),
        "limit_note": _size(bound.bytes, " (", ")"),
        "would_use": _size(bound.usage_bytes or None, ", and it would have used "),
        "requested_more": _size(bound.requested_bytes, ": ", " more were requested"),
        "refused": _size(bound.requested_bytes, "An allocation of ", " failed")
        or f"{capitalized(bound.text or 'an allocation')} ran out of memory",
        "The_text": capitalized(bound.text or "the GPU's memory"),
        "text": bound.text,
        "system": system[0] if len(system) > 1 else "The batch system",
        "killed_or_would_have": "killed" if kill.sure != "possible" else "would have killed",
        "rule": f" ({bound.text})" if bound.text else "",
        "used_of_limit": _size(kill.sizes.held_bytes, " at ") + _size(bound.bytes, " of "),
    }
    if sentence := _row(_HEADLINES, kill):
        return _expand(sentence, values)
    event, unknown = ("was killed by SIGKILL", "name the killer") if kill.signal == 9 else ("died", "give the reason")
    end = "likely for lack of memory" if kill.sure == "likely" else f"and the log does not {unknown}"
    return f"{capitalized(subject)} {event}, {end}."


def suggestion(kill: Kill) -> str:
    """Return the one thing to do about a kill."""
    bound, ram = kill.bound, kill.room.ram_bytes
    values = {
        "run_below_ram": _run(ram, kill.sizes.held_bytes),
        "run_below_limit": _run(bound.bytes),
        "to_more": _size(bound.bytes or None, " to more than "),
        "more_mem": _size(bound.bytes or None, "--mem above ") or "more --mem",
        "killer": kill.killer,
    }
    if kill.effect == "restarted":
        return _expand(_row(_SUGGESTIONS, kill), values)
    if kill.job is not None and kill.killer != "gpu":
        limit = bound.bytes if kill.scope == "cgroup" else ram
        memory = short_size(round(limit * _SAFE_PART)) if limit else "SIZE"
        return (
            f"brim {kill.job} SOURCE DEST{_JOB_OPTIONS[kill.job]} --memory {memory} does such a job within a memory "
            "limit, and resumes after an interruption."
        )
    if ASKED_FOR in kill.notes:
        return "Ask which user pressed SysRq f or wrote f to /proc/sysrq-trigger. The victim was the largest process."
    if kill.killer == "brim":
        return _after_brim(kill)
    if kill.killer == "program":
        return _after_refusal(kill)
    if text := _row(_SUGGESTIONS, kill):
        return _expand(text, values)
    if kill.scope == "cgroup":
        return _below_group_limit(kill, values)
    if kill.scope == "machine":
        return _below_machine(kill, values)
    if SEMAPHORE_NOTE in kill.notes:
        return (
            "If it prepared or uploaded a dataset: brim build SOURCE DEST --memory SIZE does that within a memory "
            f"limit, and resumes after an interruption. Otherwise watch the next run: {_run(ram)}."
        )
    return f"The log does not give the reason. Run it again under brim, to see the cause next time: {_run(ram)}."


def _after_brim(kill: Kill) -> str:
    if LEAK in kill.notes:
        return "More memory only delays the end. brim report shows when the memory grows."
    if above := kill.bound.text.partition("; but ")[2]:
        return f"The limit was lower than --memory, because {above}. Raise that one, or use smaller batches."
    raised = round((kill.bound.bytes or 0) * 1.5)
    if not raised or raised > (kill.room.ram_bytes or raised):
        return "This machine does not have much more memory. Use smaller batches, or brim map, tokenize or embed."
    doubt = "is not leaking (brim report shows when its memory grows) and " if UNKNOWN_TREND in kill.notes else ""
    return f"If it {doubt}needs more, and the machine has it: brim run --memory {short_size(raised)} -- COMMAND."


def _after_refusal(kill: Kill) -> str:
    if kill.bound.kind == "shared memory":
        return "Make it larger (docker run --shm-size, a larger emptyDir in a pod), or use fewer DataLoader workers."
    if kill.bound.kind == "heap":
        return f"The limit of {kill.bound.text} was reached, not that of the machine. Raise it."
    if kill.bound.requested_bytes is not None:
        return (
            f"One allocation of {_size(kill.bound.requested_bytes)} was more than the free memory. Work in parts (brim "
            "map, brim embed), or check the size in advance: brim forecast concat."
        )
    return "Run it again under brim to see which step it is: brim run -- COMMAND. brim forecast estimates the memory."


def _below_machine(kill: Kill, values: dict[str, str]) -> str:
    used, tasks = kill.sizes.held_bytes or 0, kill.tasks
    largest = tasks[0] if tasks else None
    if largest is not None and largest.pid != kill.pid and (largest.sizes.held_bytes or 0) > 2 * used > 0:
        return (
            f"The victim was not the largest process: {largest.name} ({largest.pid}) used "
            f"{_size(largest.sizes.held_bytes or 0)}. Start there: brim watch {largest.pid}."
        )
    alike = [task for task in tasks if task.name == kill.name]
    if len(alike) >= 3:
        total = sum(task.sizes.held_bytes or 0 for task in alike)
        return (
            f"{len(alike)} processes named {kill.name} used {format_size(total)} together. Start half as many "
            f"(num_proc, num_workers), or give all of them one limit: {values['run_below_ram']}."
        )
    if 0 < used < _SMALL_VICTIM and not tasks:
        return (
            f"The victim used only {_size(used)}, so other processes filled the machine. Find them with brim watch "
            f"--system, or run the largest job with a limit: {_run(kill.room.ram_bytes)}."
        )
    return (
        f"Give it a limit below the machine's memory: {values['run_below_ram']}. brim warns and stops it "
        "before the kernel has to choose. brim build and brim map --memory SIZE keep a dataset job within a limit."
    )


def _below_group_limit(kill: Kill, values: dict[str, str]) -> str:
    limit, group = kill.bound.bytes, kill.bound.group or kill.bound.task_group or ""
    shmem = kill.contents.shmem_bytes or 0
    if limit and shmem > limit // 2:
        return (
            f"{format_size(shmem)} of the limit were shared memory: files in /dev/shm or another tmpfs, which stay "
            "until they are deleted. Check ls -lS /dev/shm. Use fewer DataLoader workers or a smaller prefetch_factor, "
            "and put temporary files on a disk (TMPDIR)."
        )
    owner = owner_of(group) if group else None
    if owner is not None and owner.shared:
        return f"The limit belongs to {owner.text}, so others use it too. Give the job its own limit: {_run(limit)}."
    kind = owner.kind if owner else (kill.unit or "").partition(" ")[0]
    raise_limit = _expand(_RAISE_LIMIT.get(kind, "raise the limit{to_more}"), values)
    return f"Keep it below the limit ({_run(limit)} stops it cleanly and shows where it grows), or {raise_limit}."


def _run(limit: int | None, used: int | None = None) -> str:
    """Return the command with a limit slightly below the one that was reached, or below a large victim's memory."""
    basis = limit or (used if used and used >= _SMALL_VICTIM else None)
    if not basis:
        return "brim run -- COMMAND"
    return f"brim run --memory {short_size(max(round(basis * _SAFE_PART), _LEAST_BYTES))} -- COMMAND"


def short_size(size: int) -> str:
    """Return a size as an option takes it: "52GB"."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= 3 * factor:
            return f"{size // factor}{unit}"
    return str(size)


def brief(kill: Kill) -> str:
    """Return what happened in half a line."""
    if kill.effect in ("refused", "restarted"):
        return headline(kill).rstrip(".")
    killer: str = kill.killer
    if killer == "unknown":
        killer = "SIGKILL, killer unknown" if kill.signal == 9 else "reason unknown"
    if kill.scope == "machine":
        killer += ", machine out of memory"
    elif kill.scope == "cgroup" or kill.killer == "brim":
        group = f" of {kill.bound.group.rstrip('/').rsplit('/', 1)[-1]}" if kill.bound.group else ""
        limit = _size(kill.bound.bytes, " ") + group
        killer += f", limit{limit}" if limit else ""
    return f"{victim(kill)}{_size(kill.sizes.held_bytes or None, ', ')}: {killer}"


def victim(kill: Kill) -> str:
    """Return the name of the victim, as far as it is known."""
    if kill.pid is not None or kill.name is not None:
        name = kill.name or "a process"
        return f"{name} (pid {kill.pid})" if kill.pid is not None else name
    number = "a process" if kill.count == 1 else f"{kill.count} processes"
    if kill.unit is not None:
        return f"{number} of {kill.unit}"
    return number if kill.count > 1 else "an unnamed process"


def limit_text(kill: Kill) -> str:
    """Return which limit was reached."""
    bound = kill.bound
    size = _size(bound.bytes, " of ")
    if bound.group:
        kind = "memory+swap " if bound.kind == "memory+swap" else ""
        return f"{owner_of(bound.group).text} reached its {kind}limit{size}"
    return f"the limit{size} was reached" if size else ""


def memory_rows(kill: Kill) -> dict[str, str]:
    """Return the memory of the victim, of its cgroup and of the machine by kind."""
    sizes, contents, machine = kill.sizes, kill.contents, kill.room
    used = [_size(sizes.rss_bytes, suffix=" resident")] if sizes.anon_bytes is None else []
    used += [
        _size(sizes.anon_bytes, suffix=" anonymous"),
        _size(sizes.shmem_bytes, suffix=" shared"),
        _size(sizes.file_bytes, suffix=" file-backed"),
        _size(sizes.swap_bytes or None, suffix=" swapped"),
    ]
    if any(used):
        used.append(_size(sizes.total_vm_bytes, "of ", " address space"))
    swap = _size(machine.swap_bytes, suffix=" swap") + _size(machine.swap_free_bytes, " (", " free)")
    by_label = {
        "memory used": used,
        "breakdown": [
            _size(contents.anon_bytes, suffix=" anonymous"),
            _size(contents.shmem_bytes, suffix=" shared memory (tmpfs)"),
            _size(contents.file_bytes, suffix=" file pages"),
        ],
        "machine": [
            _size(machine.ram_bytes, suffix=" RAM"),
            _size(machine.available_bytes, suffix=" available"),
            "no swap" if machine.swap_bytes == 0 else swap if machine.swap_bytes else "",
        ],
    }
    return {label: ", ".join(filter(None, parts)) for label, parts in by_label.items()}


def when_text(kill: Kill, now: datetime) -> str:
    """Return the time of a kill."""
    if kill.when is None:
        return f"{kill.boot_s:,.1f} s after boot" if kill.boot_s is not None else "not recorded"
    ago = (now - kill.when).total_seconds()
    passed = f" ({format_duration(ago)} ago)" if ago >= 60 else ""  # not in the report of a run, which is read later
    return f"{kill.when:%Y-%m-%d %H:%M:%S %z}{passed}"


def curve_text(points: Sequence[CurvePoint], width: int = 40) -> str:
    """Return the last minute as a row of bars."""
    if len(points) < 2:
        return ""
    first, last = points[0], points[-1]
    change = f"{format_size(first.total_bytes)} → {format_size(last.total_bytes)}"
    bars = sparkline([(point.t, point.total_bytes) for point in points], width)
    return f"{bars} {change} in {format_duration(last.t - first.t)}"


def summary(kills: Sequence[Kill]) -> str:
    """Return what several kills have in common: how often, how far apart, how large. Clean stops do not count."""
    counted = [
        kill
        for kill in kills
        if kill.effect in ("killed", "asked to end", "evicted")
        and not (kill.killer == "brim" and kill.effect == "asked to end")
    ]

    def title(kill: Kill) -> str:
        return kill.name or kill.unit or (kill.bound.group or "")

    frequent = [name for name, count in Counter(map(title, counted)).most_common(3) if count > 1]
    lines = [_series(name, [kill for kill in counted if title(kill) == name]) for name in frequent]
    if not lines and len(counted) > 1:
        lines.append(_series("", counted))
    return "; ".join(lines)


def _series(name: str, kills: Sequence[Kill]) -> str:
    text = f"{len(kills)} kills" + (f" of {name}" if name else "")
    dates = sorted(kill.when for kill in kills if kill.when is not None)
    if len(dates) == len(kills) and dates[-1] - dates[0] >= timedelta(seconds=1):
        length = (dates[-1] - dates[0]).total_seconds()
        text += f" in {format_duration(length)}"
        if len(dates) > 2:
            text += f" (one every {format_duration(length / (len(dates) - 1))})"
    sizes = [size for kill in kills if (size := kill.sizes.held_bytes)]
    if len(sizes) == len(kills):
        shown = [format_size(size) for size in (sizes if len(sizes) <= 3 else (min(sizes), max(sizes)))]
        if len({text.split()[1] for text in shown}) == 1:
            shown[:-1] = [text.split()[0] for text in shown[:-1]]
        text += ", " + (" to " if len(sizes) > 3 else " and ").join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
        tops = {kill.bound.bytes if kill.scope == "cgroup" else kill.room.ram_bytes for kill in kills}
        if len(tops) == 1 and (top := tops.pop()) is not None:
            text += f" of {format_size(top)}"
    return text

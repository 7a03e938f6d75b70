"""One suggestion that fits the case: what to change, and the command that does it."""

from __future__ import annotations

from brim.oom.kills import ASKED_FOR, Job, Kill, ListedTask, owner_of
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
    if kill.bound.bytes is None:
        return "brim stopped it at its limit: see the curve, then raise --memory or use smaller batches."
    raised = format_size(round(kill.bound.bytes * 1.5)).replace(" ", "")
    return f"It reached the limit that brim held. If the machine has more: brim run --memory {raised} -- COMMAND."


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

"""Killers beside the kernel: systemd-oomd, earlyoom, Slurm and other batch systems, Kubernetes, containers.

Each reports in its own words: a table of patterns, and the kill that each one tells of. Some say things over two
lines, so a line may add to the kill before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from brim.oom.kills import Bound, Evidence, Kill, MachineRoom, Sizes
from brim.oom.log_lines import Clock, Stamp
from brim.redact import redact
from brim.sizes import format_size, parse_size

MIB = 1 << 20
Match = re.Match[str]


def _oomd(m: Match) -> Kill:
    limit, usage = None, None
    why = m["why"].strip().rstrip(".")
    if used := re.search(r"memory used \((\d+)\) / total \((\d+)\)", why):
        usage, limit = int(used[1]), int(used[2])
        swap = re.search(r"swap used \((\d+)\) / total \((\d+)\)", why)
        percent = re.search(r"more than ([\d.]+%)", why)
        why = f"memory {format_size(usage)} of {format_size(limit)}"
        if swap:
            why += f" and swap {format_size(int(swap[1]))} of {format_size(int(swap[2]))}"
        why += f" used, more than {percent[1]}" if percent else " used"
    watched = re.search(r"memory pressure for (/\S*) being", why)
    return Kill(
        "systemd-oomd",
        "cgroup" if watched else "machine",
        reason="systemd-oomd says so" if m["verb"] == "Killed" else "systemd-oomd chose it",
        unit=m["group"].rsplit("/", 1)[-1],
        signal=9,
        bound=Bound(
            kind="memory pressure" if watched else "memory and swap",
            group=watched[1] if watched else None,
            task_group=m["group"],
            text=why,
        ),
        room=MachineRoom(ram_bytes=limit, available_bytes=None if limit is None or usage is None else limit - usage),
    )


def _earlyoom(m: Match) -> Kill:
    signal = m["number"] or {"KILL": "9", "TERM": "15"}.get(m["signal"] or "", "")
    return Kill(
        "earlyoom",
        "machine",
        "killed" if signal == "9" else "asked to end",
        reason="earlyoom says so",
        pid=int(m["pid"] or m["pid2"]),
        name=m["name"] or m["name2"],
        uid=int(m["uid"]) if m["uid"] else None,
        command=redact(m["cmdline"]) if m["cmdline"] not in (None, "", "...") else None,
        signal=int(signal) if signal else None,
        sizes=Sizes(rss_bytes=int(m["mib"]) * MIB),
    )


def old_earlyoom(m: Match) -> Kill:
    return Kill("earlyoom", "machine", reason="earlyoom says so", pid=int(m["pid"]), name=m["name"].strip(), signal=9)


def _slurm_step(m: Match) -> Kill:
    return Kill(
        "slurm",
        "cgroup",
        sure="likely",
        reason="Slurm counted kills in the step's cgroup, and does not say which process",
        unit=f"step {m['step']}",
        count=int(m["n"]),
        signal=9,
        bound=Bound(kind="memory"),
    )


def _slurm_poll(m: Match) -> Kill:
    return Kill(
        "slurm",
        "cgroup",
        reason="Slurm says so",
        unit=f"{m['kind'].lower()} {m['step']}",
        signal=9,
        bound=Bound(int(m["limit"]) * 1024, int(m["usage"]) * 1024, "memory"),
    )


def _slurm_task(m: Match) -> Kill:
    reason = "srun says so, and not which process"
    return Kill("slurm", "cgroup", sure="likely", reason=reason, unit=f"task {m['task']}", host=m["host"], signal=9)


def _slurm_vague(m: Match) -> Kill:
    reason = "Slurm says that the limit was reached, not that anything was killed"
    return Kill("slurm", "cgroup", sure="possible", reason=reason, signal=9)


def _pbs(m: Match) -> Kill:
    bound = Bound(int(m["limit"]) * 1024, int(m["usage"]) * 1024, m["kind"])
    return Kill("batch system", "cgroup", reason="PBS says so", bound=bound)


def _lsf(m: Match) -> Kill:
    return Kill("batch system", "cgroup", reason="LSF says so", bound=Bound(text="LSF's memory limit"))


def _rlimit(m: Match) -> Kill:
    return Kill(
        "rlimit",
        "process",
        "refused",
        reason="the kernel refused an allocation and says why",
        pid=int(m["pid"]),
        name=m["name"],
        bound=Bound(int(m["limit"]), int(m["usage"]), "RLIMIT_DATA"),
    )


def _unit(m: Match) -> Kill:
    reason = "systemd says that the kernel killed a process of this unit, and not which"
    return Kill("kernel", sure="likely", reason=reason, unit=m["unit"], signal=9)


def _kubelet(m: Match) -> Kill:
    return Kill("kernel", "machine", reason="the kubelet says so", pid=int(m["pid"]), name=m["name"], signal=9)


def _evicted(m: Match) -> Kill:
    text = f"the node was low on memory; container {m['unit']} was using {m['usage']}"
    return Kill("kubelet", "machine", "evicted", reason="the kubelet says so", unit=m["unit"], bound=Bound(text=text))


def _pod(m: Match) -> Kill:
    reason = "Kubernetes says OOMKilled; the kernel's record would tell how much it held"
    return Kill("container runtime", "cgroup", sure="likely", reason=reason, signal=9)


def _container(m: Match) -> Kill:
    named = re.search(r"\bname=([\w./-]+)", m["rest"] or "")
    unit = f"container {named[1]}" if named else f"container {m['id'][:12]}"
    reason = "the container runtime says so, and not which process"
    return Kill("container runtime", "cgroup", sure="likely", reason=reason, unit=unit, signal=9)


def _inspected(m: Match) -> Kill:
    reason = "Docker's OOMKilled flag is set, which is right more often than not"
    return Kill("container runtime", "cgroup", sure="possible", reason=reason, signal=9)


def _talos(m: Match) -> Kill:
    group = m["group"].removeprefix("/sys/fs/cgroup")
    return Kill(
        "container runtime",
        "machine",
        reason="the Talos controller says so",
        unit=group.rsplit("/", 1)[-1],
        bound=Bound(kind="memory pressure", task_group=group),
        signal=9,
    )


def _ray(m: Match) -> Kill:
    used, total = (round(float(m[key]) * 1e9) for key in ("used", "total"))
    bound = Bound(round(total * float(m["threshold"])), used, "memory", text=f"Ray's threshold of {m['threshold']}")
    task = re.search(r"name=(?P<name>[^,)]+), pid=(?P<pid>\d+), memory used=(?P<held>[\d.]+)GB", m.string)
    low = re.search(r"killing latest task with name (?P<name>\S+)", m.string)
    named = task or low
    return Kill(
        "ray",
        "machine",
        reason="Ray says so",
        pid=int(task["pid"]) if task else None,
        name=named["name"] if named else None,
        sizes=Sizes(rss_bytes=round(float(task["held"]) * 1e9)) if task else Sizes(),
        bound=bound,
        room=MachineRoom(ram_bytes=total),
        signal=9,
    )


def _ray_count(m: Match) -> Kill:
    reason = "Ray's driver says how many and where, not which"
    unit = f"node {m['ip']}" if m["ip"] else None
    return Kill("ray", "machine", sure="likely", reason=reason, unit=unit, count=int(m["n"]), signal=9)


def _meta_oomd(m: Match) -> Kill:
    effect = "would have killed" if m["dry"] else "killed"
    return Kill(
        "oomd",
        "cgroup",
        sure="possible" if m["dry"] else "certain",
        reason=f"oomd says that it {effect} the group ({m['killer']})",
        unit=m["group"].rsplit("/", 1)[-1],
        bound=Bound(usage_bytes=int(m["usage"]), kind="memory pressure", task_group=m["group"], text=m["rule"]),
        signal=9,
    )


def _sacct(m: Match) -> Kill:
    reason = "Slurm's accounting says OUT_OF_MEMORY"
    return Kill("slurm", "cgroup", sure="likely", reason=reason, unit=f"job {m['job']}", signal=9)


def _seff(m: Match) -> Kill:
    return Kill("slurm", "cgroup", sure="likely", reason="Slurm's accounting says OUT_OF_MEMORY", signal=9)


def _kube_ended(m: Match) -> Kill:
    for_memory = m["reason"] == "OOMKilled"
    reason = "Kubernetes says OOMKilled" if for_memory else "it ended with 137, which is SIGKILL; nothing here says why"
    return Kill(
        "container runtime",
        "cgroup" if for_memory else "unknown",
        sure="likely" if for_memory else "possible",
        reason=reason,
        unit=f"pod {m['pod']}, container {m['name']}",
        signal=9,
        bound=Bound(parse_size(f"{m['limit']}{m['unit'] or ''}B") if m["limit"] else None, kind="memory"),
    )


def _yarn(m: Match) -> Kill:
    unit = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    used, limit = (round(float(m[a]) * unit[m[b]]) for a, b in (("used", "used_unit"), ("limit", "limit_unit")))
    return Kill(
        "batch system", "cgroup", reason="YARN says so", bound=Bound(limit, used, "memory", text="YARN"), signal=9
    )


def _dask(m: Match) -> Kill:
    pid = int(m["pid"]) if m["pid"] else None
    text = f"{m['percent']} % of the worker's memory limit"
    return Kill("dask", "process", reason="Dask's nanny says so", pid=pid, bound=Bound(text=text), signal=9)


# (a word that must be there, the pattern, what it makes); the first that matches counts
PATTERNS: list[tuple[str, re.Pattern[str], Callable[[Match], Kill]]] = [
    (
        "due to",
        re.compile(r"\b(?P<verb>Killed|Marked) (?P<group>/\S+) (?:for killing )?due to (?P<why>memory .*)"),
        _oomd,
    ),
    (
        "process ",
        re.compile(
            r"(?:sending SIG(?P<signal>\w+) to process (?P<pid>\d+)(?: uid (?P<uid>\d+))? \"(?P<name>.*?)\""
            r"|killing process (?P<pid2>\d+) \"(?P<name2>.*?)\" with signal (?P<number>\d+))"
            r": (?:badness|oom_score) -?\d+,(?: oom_score_adj -?\d+,)? VmRSS (?P<mib>\d+) MiB"
            r"(?:, cmdline \"(?P<cmdline>.*)\")?"
        ),
        _earlyoom,
    ),
    (
        "Detected ",
        re.compile(
            r"Detected (?P<n>\d+) oom[-_]kill events?(?:\(s\))? in "
            r"(?:step |StepId=)(?P<step>\w+(?:[.+_\[\]]\w+)*)(?=[. ])"
        ),
        _slurm_step,
    ),
    (
        "exceeded memory limit",
        re.compile(r"(?P<kind>Job|Step) (?P<step>[\w.]+) exceeded memory limit \((?P<usage>\d+) > (?P<limit>\d+)\)"),
        _slurm_poll,
    ),
    (
        "Out Of Memory",
        re.compile(r"srun: error: (?P<host>[\w.-]+): tasks? (?P<task>[\d,-]+): Out Of Memory"),
        _slurm_task,
    ),
    (
        "memory limit at some point",
        re.compile(r"slurmstepd\S*: (?:error: )?Exceeded (?:job|step) memory limit at some point"),
        _slurm_vague,
    ),
    (
        "PBS: job killed",
        re.compile(r"PBS: job killed: (?P<kind>\w+) (?P<usage>\d+)kb exceeded limit (?P<limit>\d+)kb"),
        _pbs,
    ),
    ("TERM_MEMLIMIT", re.compile(r"TERM_MEMLIMIT: job killed after reaching LSF memory usage limit"), _lsf),
    (
        "exceed data ulimit",
        re.compile(r"mmap: (?P<name>.*?) \((?P<pid>\d+)\): VmData (?P<usage>\d+) exceed data ulimit (?P<limit>\d+)\."),
        _rlimit,
    ),
    ("OOM killer", re.compile(r"(?P<unit>\S+): A process of this unit has been killed by the OOM killer"), _unit),
    ("'oom-kill'", re.compile(r"(?P<unit>\S+): Failed with result 'oom-kill'"), _unit),
    (
        "System OOM",
        re.compile(r"System OOM encountered, victim process: (?P<name>.*?), pid: (?P<pid>\d+)(?=\D)"),
        _kubelet,
    ),
    (
        "low on resource: memory",
        re.compile(r"low on resource: memory\..*?Container (?P<unit>\S+) was using (?P<usage>[\w.]+)"),
        _evicted,
    ),
    (
        "kubernetes: pod",
        re.compile(
            r"kubernetes: pod (?P<pod>\S+) container (?P<name>\S+) exit code (?P<code>\S+) reason (?P<reason>\S+)"
            r"(?: limit (?P<limit>[\d.]+)(?P<unit>[kKMGTPE]i?)?(?![\w.]))?"
        ),
        _kube_ended,
    ),
    ('"OOMKilled": true', re.compile(r'"OOMKilled": true'), _inspected),
    ("OOMKilled", re.compile(r"(?:[Rr]eason\"?:?\s+\"?|\s)OOMKilled\b"), _pod),
    ("container oom ", re.compile(r"container oom (?P<id>[0-9a-f]{12,64})(?P<rest> \(.*)?"), _container),
    (
        "askOOM",
        re.compile(r"TaskOOM event.*?(?:ContainerID:|container_id[=:]\s*\"?)(?P<id>[0-9a-f]{12,64})(?P<rest>.*)"),
        _container,
    ),
    ("SIGKILL to cgroup", re.compile(r"Sending SIGKILL to cgroup .*\"cgroup\": \"(?P<group>/[^\"]+)\""), _talos),
    (
        "memory pressure (OOM)",
        re.compile(
            r"(?P<n>\d+) Workers \(tasks / actors\) killed due to memory pressure \(OOM\)(?:.*?IP: (?P<ip>[\w.:]+))?"
        ),
        _ray_count,
    ),
    (
        "System memory low at node",
        re.compile(
            r"System memory low at node.*?Used memory \((?P<used>[\d.]+)GB\) / total capacity \((?P<total>[\d.]+)GB\)"
            r"[^,]*?threshold (?P<threshold>\d+(?:\.\d+)?)"
        ),
        _ray,
    ),
    (
        "oomd kill:",
        re.compile(
            r"oomd kill: [\d.]+ [\d.]+ [\d.]+ (?P<group>\S+) (?P<usage>\d+) ruleset:\[(?P<rule>[^\]]*)\]"
            r".*?killer:(?P<dry>\(dry\))?\[?(?P<killer>\w+)"
        ),
        _meta_oomd,
    ),
    ("OUT_OF_ME", re.compile(r"^\s*(?P<job>\d+(?:_\d+)?(?:\.\w+)?)[\s|].*?\bOUT_OF_ME(?:MORY|\+)"), _sacct),
    ("OUT_OF_ME", re.compile(r"State: OUT_OF_MEMORY"), _seff),
    (
        "physical memory used",
        re.compile(
            r"(?P<used>[\d.]+) ?(?P<used_unit>[KMGT]B) of (?P<limit>[\d.]+) ?(?P<limit_unit>[KMGT]B) "
            r"physical memory used"
        ),
        _yarn,
    ),
    (
        "memory usage threshold",
        re.compile(
            r"was (?P<used>\d+(?:\.\d+)?)GB / (?P<total>\d+(?:\.\d+)?)GB \([\d.]+\), which exceeds the memory usage "
            r"threshold of (?P<threshold>\d+(?:\.\d+)?)"
        ),
        _ray,
    ),
    ("memory budget", re.compile(r"(?:\(pid=(?P<pid>\d+)\) )?exceeded (?P<percent>\d+)% memory budget"), _dask),
]


NEEDLES = (
    b"OOM",
    b"sending SIG",
    b"illing process ",
    b"ow memory!",
    b"ut of memory!",
    b"escalating to SIGKILL",
    b"kill failed",
    b"mem avail",
    b"emory limit",
    b"Out Of Memory",
    b"exceed data ulimit",
    b"exceeded limit",
    b"TERM_MEMLIMIT",
    b"low on resource: memory",
    b"Sending SIGKILL to cgroup",
    b"memory usage threshold",
    b"memory budget",
    b"killed due to memory pressure",
    b"System memory low at node",
    b"oomd kill:",
    b"OUT_OF_ME",
    b"Job ID: ",
    b"Memory Efficiency: ",
    b"kubernetes: pod",
    b"physical memory used",
)
_NEAR_LINES = 60
_SEFF_MEMORY = re.compile(r"(?P<share>[\d.]+)% of (?P<size>[\d.]+) (?P<unit>[KMGT]B)")
_SEFF_UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
_OOMD_COUNT = re.compile(r"(?P<unit>\S+): systemd-oomd killed (?P<n>\d+|some) process\(es\) in this unit")
_EARLY_ROOM = re.compile(
    r"mem avail:\s*(?P<avail>\d+) of\s*(?P<ram>\d+) MiB.*?swap free:\s*(?P<free>\d+) of\s*(?P<swap>\d+) MiB"
)
_EARLY_LIMIT = re.compile(r"low memory! at or below SIG\w+ limits: (?P<text>mem\s+[\d.]+ ?%, swap\s+[\d.]+ ?%)", re.I)
_EARLY_OLD_LIMIT = re.compile(r"Out of memory! avail: (?P<avail>\d+) MiB < min: (?P<min>\d+) MiB")
_EARLY_OLD = re.compile(r"Killing process (?P<pid>\d+) (?P<name>\S.*?)(?:, badness .*)?$")
_EARLY_AFTER = re.compile(r"escalating to SIGKILL after|kill failed: |process (?:\d+ )?did not exit")


class Killers:
    """Feed it lines; `kills` grows."""

    def __init__(self, source: str, clock: Clock) -> None:
        self.source, self.clock = source, clock
        self.kills: list[Kill] = []
        self._room = MachineRoom()
        self._limit = ""
        self._job_line: tuple[int, str] | None = None
        self._limit_line = -_NEAR_LINES

    def feed(self, number: int, text: str) -> None:
        for word, pattern, make in PATTERNS:
            if word in text and (match := pattern.search(text)):
                self._add(make(match), number, text)
                return
        if text.startswith(("Job ID: ", "Array Job ID: ", "Memory Efficiency: ")):
            self._seff(number, text)
        elif "systemd-oomd killed" in text and (match := _OOMD_COUNT.search(text)):
            self._oomd_count(match, number, text)
        elif (
            "mem avail:" in text
            or "low memory!" in text.lower()
            or "rocess " in text
            or "SIGKILL" in text
            or "avail:" in text
        ):
            self._earlyoom_context(number, text)

    def _add(self, kill: Kill, number: int, text: str) -> None:
        stamp = self.clock.stamp(text)
        quote = self._quote(number, text)
        kill = replace(kill, when=stamp.when, boot_s=stamp.boot_s, host=kill.host or stamp.host, evidence=(quote,))
        if kill.killer == "slurm" and kill.unit is None and self._job_line and number - self._job_line[0] < 20:
            kill = replace(kill, unit=f"job {self._job_line[1]}")
        if kill.killer == "earlyoom":
            near = number - self._limit_line < _NEAR_LINES
            kill = replace(
                kill, room=self._room if near else MachineRoom(), bound=Bound(text=self._limit if near else "")
            )
            self._limit_line = -_NEAR_LINES  # said once before each kill
        last = self.kills[-1] if self.kills else None
        if last is not None and _says_more(last, kill, number):
            self.kills[-1] = _joined(last, kill)
        else:
            self.kills.append(kill)

    def _seff(self, number: int, text: str) -> None:
        """seff tells of a job over several lines: its number before the state, its memory after it."""
        label, _, value = text.partition(": ")
        if label.endswith("Job ID"):
            self._job_line = number, value.strip()
            return
        last = self.kills[-1] if self.kills else None
        share = _SEFF_MEMORY.search(value)
        if last is None or share is None or last.killer != "slurm" or number - (last.evidence[-1].line or 0) > 20:
            return
        limit = round(float(share["size"]) * _SEFF_UNITS[share["unit"]])
        bound = Bound(limit, round(limit * float(share["share"]) / 100), "memory")
        self.kills[-1] = replace(last, bound=bound, evidence=(*last.evidence, self._quote(number, text)))

    def _oomd_count(self, match: Match, number: int, text: str) -> None:
        count = int(match["n"]) if match["n"].isdigit() else 1
        quote, stamp = self._quote(number, text), self.clock.stamp(text)
        for index in range(len(self.kills) - 1, max(len(self.kills) - 10, -1), -1):
            kill = self.kills[index]
            if kill.killer == "systemd-oomd" and kill.unit == match["unit"] and _close(kill, stamp):
                self.kills[index] = replace(kill, count=count, evidence=(*kill.evidence, quote))
                return
        self.kills.append(
            Kill(
                "systemd-oomd",
                reason="systemd says so",
                unit=match["unit"],
                count=count,
                when=stamp.when,
                boot_s=stamp.boot_s,
                host=stamp.host,
                signal=9,
                evidence=(quote,),
            )
        )

    def _earlyoom_context(self, number: int, text: str) -> None:
        if match := _EARLY_ROOM.search(text):
            avail, ram, free, swap = (int(match[key]) * MIB for key in ("avail", "ram", "free", "swap"))
            self._room = MachineRoom(ram, swap, free, avail)
        elif match := _EARLY_LIMIT.search(text):
            self._limit, self._limit_line = f"it acts at or below {' '.join(match['text'].split())} available", number
        elif match := _EARLY_OLD_LIMIT.search(text):
            self._limit, self._limit_line = f"it acts below {match['min']} MiB available", number
            self._room = MachineRoom(available_bytes=int(match["avail"]) * MIB)
        elif number - self._limit_line < 5 and (match := _EARLY_OLD.search(text)):
            self._add(old_earlyoom(match), number, text)
        elif self.kills and self.kills[-1].killer == "earlyoom" and _EARLY_AFTER.search(text):
            kill = self.kills[-1]
            escalated = "escalating" in text
            self.kills[-1] = replace(
                kill,
                effect="killed" if escalated else kill.effect,
                signal=9 if escalated else kill.signal,
                evidence=(*kill.evidence, self._quote(number, text)),
            )

    def _quote(self, number: int, text: str) -> Evidence:
        return Evidence(self.source, number, redact(text.strip()[:300]))


def _close(kill: Kill, stamp: Stamp) -> bool:
    gap = Stamp(kill.when, kill.boot_s).seconds_to(stamp)
    return gap is None or abs(gap) < 60


def _says_more(last: Kill, kill: Kill, number: int) -> bool:
    """Whether a line tells of the same kill as the one before it."""
    line = last.evidence[-1].line
    if line is None or number - line > _NEAR_LINES or not _close(last, Stamp(kill.when, kill.boot_s)):
        return False
    if last.killer != kill.killer or (last.killer == "earlyoom" and last.pid != kill.pid):
        return False
    if kill.killer == "slurm":  # srun and slurmstepd both speak up, and only one of them knows the step
        same = last.unit == kill.unit
        return (
            same
            or kill.unit is None
            or kill.unit.startswith("task ")
            or last.unit is None
            or last.unit.startswith("task ")
        )
    return last.unit == kill.unit and last.pid == kill.pid and last.reason == kill.reason


def _joined(last: Kill, kill: Kill) -> Kill:
    """What two lines say about one kill."""
    named = kill if (last.unit is None or last.unit.startswith("task ")) and kill.unit else last
    other = last if named is kill else kill
    return replace(
        named,
        effect="killed" if "killed" in (last.effect, kill.effect) else last.effect,
        signal=9 if 9 in (last.signal, kill.signal) else last.signal,
        when=last.when or kill.when,
        boot_s=last.boot_s if last.boot_s is not None else kill.boot_s,
        host=named.host or other.host,
        bound=named.bound if named.bound.bytes is not None else other.bound,
        sizes=named.sizes if named.sizes != Sizes() else other.sizes,
        sure=min(last.sure, kill.sure, key=("certain", "likely", "possible").index),
        evidence=(*last.evidence, *kill.evidence),
    )

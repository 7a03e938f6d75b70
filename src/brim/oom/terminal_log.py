"""What a terminal or a job's own log shows of a process that ran out of memory.

"Killed" alone proves a SIGKILL and nothing else. Python's "leaked semaphore objects" is no leak: it is the
helper process that cleans up after its parent was killed, so the two together are read as one death. An
allocation that failed (MemoryError, CUDA) is told apart from a kill.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from brim.oom.kills import Bound, Evidence, Job, Kill, MachineRoom
from brim.oom.log_lines import Clock
from brim.redact import redact

JOB_NEEDLES = (b"Map (num_proc", b"Map: ", b"tokenizer on", b"dataset shards", b"from Arrow format", b"Batches: ")

# Progress bars of datasets, transformers' examples and sentence-transformers.
_PRINTED: list[tuple[re.Pattern[str], Job]] = [
    (re.compile(r"[Rr]unning tokenizer on|[Tt]okeni[sz]ing\b.*\d+%"), "tokenize"),
    (re.compile(r"\bMap(?: \(num_proc=\d+\))?: +\d+%|died during map operation"), "map"),
    (re.compile(r"Uploading the dataset shards|Creating parquet from Arrow format"), "build"),
    (re.compile(r"\bBatches: +\d+%"), "embed"),
]
_CALLED: list[tuple[re.Pattern[str], Job]] = [
    (re.compile(r"tokeni[sz]e", re.I), "tokenize"),
    (re.compile(r"embed|encode", re.I), "embed"),
    (re.compile(r"push_to_hub|to_parquet|upload", re.I), "build"),
]


def printed_job(text: str) -> Job | None:
    """The job that a line of output belongs to."""
    return next((job for pattern, job in _PRINTED if pattern.search(text)), None)


def called_job(command: str) -> Job | None:
    """The job that a command line names."""
    return next((job for pattern, job in _CALLED if pattern.search(command)), None)


TERMINAL_NEEDLES = (
    *JOB_NEEDLES,
    b"illed",
    b"leaked ",
    b"emoryError",
    b"ut of memory",
    b"ode 137",
    b"ode=137",
    b"ode: 137",
    b"ode:    137",
    b'ode": 137',
    b"tatus 137",
    b"tatus=137",
    b"SIGKILL",
    b"ignal 9",
    b"exitcode",
    b"bad_alloc",
    b"annot allocate memory",
    b"nable to allocate",
    b"can't allocate memory",
    b"bruptly",
    b"unexpectedly terminated",
    b"memory allocation of ",
    b"rror 137",
    b"shared memory",
    b"Executor",
)
_NEAR_LINES = 60
_MORE_QUOTES = 4
_UNPROVEN = "it was killed by SIGKILL; memory is the usual reason, and nothing here proves it"
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_SEMAPHORES = re.compile(r"There appear to be (\d+) leaked (semaphore|shared_memory) objects to clean up at shutdown")
_SEMAPHORE_NOTE = (
    'The warning about "leaked" objects is not the cause: it is what Python\'s helper process prints '
    "when the process it served is gone without a goodbye, as after SIGKILL."
)

Match = re.Match[str]


def _shell(m: Match) -> Kill:
    command = (m.groupdict().get("command") or "").strip()
    pid = m.groupdict().get("pid")
    return Kill(
        "unknown",
        sure="possible",
        reason=_UNPROVEN,
        pid=int(pid) if pid else None,
        name=_program(command),
        command=redact(command) or None,
        signal=9,
    )


def _worker(m: Match) -> Kill:
    pid = m.groupdict().get("pid")
    return Kill("unknown", sure="possible", reason=_UNPROVEN, pid=int(pid) if pid else None, signal=9)


def _pool(m: Match) -> Kill:
    reason = "a worker process vanished; out of memory is the usual reason, and nothing here proves it"
    return Kill("unknown", sure="possible", reason=reason)


def _make(m: Match) -> Kill:
    return Kill("unknown", sure="possible", reason=_UNPROVEN, unit=f"make target {m['command']}", signal=9)


def _shared(m: Match) -> Kill:
    """A bus error: /dev/shm was full, which is a limit of its own (docker run --shm-size)."""
    pid = m.groupdict().get("pid")
    return Kill(
        "program",
        "process",
        "refused",
        reason="PyTorch says that shared memory (/dev/shm) was too small",
        pid=int(pid) if pid else None,
        bound=Bound(kind="shared memory", text="shared memory (/dev/shm)"),
    )


def _array(m: Match) -> Kill:
    asked = _bytes(m["size"], m["unit"])
    return _refused(asked, f"an array {m['rest'].strip()}".rstrip())


def _asked(m: Match) -> Kill:
    return _refused(int(m["bytes"]), "an allocation")


def _memory_error(m: Match) -> Kill:
    return _refused(None, "an allocation")


def _refused(asked: int | None, what: str) -> Kill:
    return Kill(
        "program",
        "process",
        "refused",
        reason="the program says that an allocation failed",
        bound=Bound(usage_bytes=asked, kind="allocation", text=what),
    )


def _heap(m: Match) -> Kill:
    what = "the Java heap (-Xmx)" if "java" in m[0] else "the JavaScript heap (--max-old-space-size)"
    return Kill("program", "process", "refused", reason="the program says so", bound=Bound(text=what, kind="heap"))


def _cuda(m: Match) -> Kill:
    rest = m["rest"] or ""
    asked = re.search(r"Tried to allocate ([\d.]+) ([KMGT]iB)", rest)
    total = re.search(r"([\d.]+) ([KMGT]iB) total capacity|total capacity of ([\d.]+) ([KMGT]iB)", rest)
    capacity = None
    if total:
        capacity = _bytes(total[1] or total[3], total[2] or total[4])
    return Kill(
        "gpu",
        "gpu",
        "refused",
        reason="the program says that the GPU's memory was full; the machine's own is another matter",
        bound=Bound(capacity, _bytes(asked[1], asked[2]) if asked else None, "allocation", text="the GPU's memory"),
    )


# (a word that must be there, the pattern, what it makes); the first that matches counts
_PATTERNS: list[tuple[str, re.Pattern[str], Callable[[Match], Kill]]] = [
    # bash, in a script: "job.sh: line 28:  8156 Killed                  python3 main.py"
    ("Killed", re.compile(r": line \d+:\s+(?P<pid>\d+) Killed(?::? 9)?(?:\s{2,}(?P<command>\S.*))?$"), _shell),
    # bash and zsh, a job: "[1]+  Killed   python x.py", "[1]    75076 killed     python main.py"
    ("illed", re.compile(r"^\s*\[\d+\][+-]?\s+(?:(?P<pid>\d+)\s+)?[Kk]illed(?::? 9)?\s{2,}(?P<command>\S.*)$"), _shell),
    ("illed", re.compile(r"(?:^|[^ ]\])(?:zsh: |fish: .*)?[Kk]illed(?:: 9)?(?:\s{2,}(?P<command>\S.*))?\s*$"), _shell),
    ("illed", re.compile(r"^zsh: killed\s+(?P<command>\S.*)$"), _shell),
    ("SIGKILL", re.compile(r"terminated by signal SIGKILL \(Forced quit\)"), _worker),
    (
        "is killed by signal: Killed",
        re.compile(r"DataLoader worker(?: \(pid (?P<pid>\d+)\))? is killed by signal: Killed"),
        _worker,
    ),
    ("Killed signal", re.compile(r"fatal error: Killed signal terminated program (?P<command>\S+)"), _shell),
    ("make", re.compile(r"make(?:\[\d+\])?: \*\*\* \[(?P<command>[^\]]*)\] (?:Killed|Error 137)"), _make),
    (
        "shared memory",
        re.compile(
            r"DataLoader worker(?: \(pid (?P<pid>\d+)\))? is killed by signal: Bus error|insufficient shared memory"
        ),
        _shared,
    ),
    (
        "ExecutorLostFailure",
        re.compile(r"ExecutorLostFailure .*?(?:exit(?:ed)? (?:code|status):? ?137|[Oo]ut of memory)"),
        _worker,
    ),
    ("exitcode", re.compile(r"exitcode\s*: -9\b.*?(?:\(?pid: (?P<pid>\d+)\))?"), _worker),
    (
        "SIGKILL",
        re.compile(r"died with <Signals\.SIGKILL: 9>|interrupted by signal 9: SIGKILL|[Ss]ignal 9 \(SIGKILL\)"),
        _worker,
    ),
    (
        "137",
        re.compile(
            r"(?:exit(?:ed)?(?: with)?(?: code| status)|exit_code"
            r"|return(?:ed)?(?: non-zero)? (?:code|exit status)|\bStatus:?)[ =:]+137\b",
            re.I,
        ),
        _worker,
    ),
    ("signal 9", re.compile(r"(?:killed by|got|received|terminated by|with) signal 9\b", re.I), _worker),
    (
        "bruptly",
        re.compile(r"A process in the process pool was terminated abruptly|One of the subprocesses has abruptly died"),
        _pool,
    ),
    (
        "unexpectedly terminated",
        re.compile(r"worker process managed by the executor was unexpectedly terminated"),
        _pool,
    ),
    # allocations that failed
    (
        "nable to allocate",
        re.compile(r"[Uu]nable to allocate (?P<size>[\d.]+) (?P<unit>[KMGTP]?i?B)\b(?: for an array)?(?P<rest>.*)"),
        _array,
    ),
    ("memory allocation of", re.compile(r"memory allocation of (?P<bytes>\d+) bytes failed"), _asked),
    ("allocate", re.compile(r"you tried to allocate (?P<bytes>\d+) bytes"), _asked),
    ("ArrowMemoryError", re.compile(r"ArrowMemoryError: (?:malloc|realloc) of size (?P<bytes>\d+) failed"), _asked),
    ("CUDA", re.compile(r"CUDA(?: error:)? out of memory\.?(?P<rest>.*)|CUDA_ERROR_OUT_OF_MEMORY"), _cuda),
    ("java.lang.OutOfMemoryError", re.compile(r"java\.lang\.OutOfMemoryError: .*"), _heap),
    ("JavaScript heap", re.compile(r"JavaScript heap out of memory"), _heap),
    ("MemoryError", re.compile(r"(?:^|\s)(?:\w+\.)*(?:_?Array)?MemoryError\b(?!\()"), _memory_error),
    ("bad_alloc", re.compile(r"std::bad_alloc"), _memory_error),
    ("allocate memory", re.compile(r"[Cc]annot allocate memory"), _memory_error),
]


class Terminal:
    """Feed it lines; `kills` grows."""

    def __init__(self, source: str, clock: Clock) -> None:
        self.source, self.clock = source, clock
        self.kills: list[Kill] = []
        self._semaphores: tuple[int, Evidence] | None = None
        self._job: Job | None = None

    def feed(self, number: int, text: str) -> None:
        self._job = printed_job(text) or self._job
        if "leaked " in text and _SEMAPHORES.search(text):
            self._leaked(number, text)
            return
        for word, pattern, make in _PATTERNS:
            if word in text and (match := pattern.search(text)):
                self._add(make(match), number, text)
                return

    def _leaked(self, number: int, text: str) -> None:
        quote = Evidence(self.source, number, redact(text.strip()[:300]))
        self._semaphores = number, quote
        if self.kills and number - (self.kills[-1].evidence[-1].line or 0) < _NEAR_LINES:
            self.kills[-1] = _with_semaphores(self.kills[-1], quote)
            self._semaphores = None

    def _add(self, kill: Kill, number: int, text: str) -> None:
        stamp = self.clock.stamp(text)
        quote = Evidence(self.source, number, redact(text.strip()[:300]))
        kill = replace(kill, when=stamp.when, boot_s=stamp.boot_s, host=stamp.host, evidence=(quote,))
        kill = replace(kill, job=called_job(kill.command or "") or self._job)
        if self._semaphores is not None:
            line, before = self._semaphores
            self._semaphores = None
            if number - line < _NEAR_LINES and kill.signal == 9:
                kill = _with_semaphores(kill, before)
        last = self.kills[-1] if self.kills else None
        if last is not None and number - (last.evidence[-1].line or 0) < _NEAR_LINES and _one_death(last, kill):
            self.kills[-1] = _joined(last, kill)
        else:
            self.kills.append(kill)


def _with_semaphores(kill: Kill, quote: Evidence) -> Kill:
    if kill.signal != 9:
        return kill
    evidence = sorted((*kill.evidence, quote), key=lambda e: e.line or 0)
    if _SEMAPHORE_NOTE in kill.notes:
        return kill
    reason = "a Python process that had workers was killed by SIGKILL; only a lack of memory or a kill -9 does that"
    return replace(
        kill,
        name=kill.name or "python",
        sure="likely",
        reason=reason,
        notes=(*kill.notes, _SEMAPHORE_NOTE),
        evidence=tuple(evidence),
    )


def _one_death(last: Kill, kill: Kill) -> bool:
    """A death is often reported by the worker, the pool, the launcher and the shell, one after the other."""
    if last.killer != kill.killer:
        return False
    return last.pid is None or kill.pid is None or last.pid == kill.pid


def _joined(last: Kill, kill: Kill) -> Kill:
    evidence = last.evidence if len(last.evidence) >= _MORE_QUOTES else (*last.evidence, *kill.evidence)
    sure = min(last.sure, kill.sure, key=("certain", "likely", "possible").index)
    return replace(
        last,
        pid=last.pid if last.pid is not None else kill.pid,
        name=last.name or kill.name,
        command=last.command or kill.command,
        signal=last.signal or kill.signal,
        bound=last.bound if last.bound.usage_bytes is not None or last.bound.text == "" else _fuller(last, kill),
        sure=sure,
        reason=last.reason if last.sure == sure else kill.reason,
        room=last.room if last.room != MachineRoom() else kill.room,
        evidence=evidence,
    )


def _fuller(last: Kill, kill: Kill) -> Bound:
    return kill.bound if kill.bound.usage_bytes is not None else last.bound


def _program(command: str) -> str | None:
    words = [word for word in command.split() if "=" not in word]
    return words[0].rsplit("/", 1)[-1] if words else None


def _bytes(number: str, unit: str) -> int | None:
    try:
        return round(float(number) * _UNITS[unit])
    except (KeyError, ValueError):
        return None

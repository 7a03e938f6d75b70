"""Phrases that a terminal or a job's own output shows about a process that ran out of memory.

"Killed" alone proves a SIGKILL and no reason. Python's warning about "leaked semaphore objects" is not a leak: a helper
process of the killed process prints it during cleanup. A failed allocation (MemoryError, CUDA) is not a kill.
"""

from __future__ import annotations

import re
from dataclasses import replace

from brim.monitor.oom.kills import Bound, Kill
from brim.monitor.oom.phrases import Phrase, table

SEMAPHORE_NOTE = (
    'The warning about "leaked" objects is not the cause. A helper process of Python prints it after its parent '
    "process was killed."
)
_UNPROVEN = "SIGKILL ended the process; memory is the usual reason, but the log does not prove it"
_SHELL = Kill("unknown", sure="possible", reason=_UNPROVEN, signal=9)
_POOL = replace(
    _SHELL, reason="a worker process vanished; memory is the usual reason, but the log does not prove it", signal=None
)
_NOTEBOOK = replace(
    _POOL,
    reason="the kernel of the notebook died; memory is the usual reason, but the log does not prove it",
    name="the notebook kernel",
)
_REFUSED = Kill(
    "program",
    "process",
    "refused",
    reason="the program reports a failed allocation",
    bound=Bound(kind="allocation", text="an allocation"),
)
_SHARED = replace(
    _REFUSED,
    reason="PyTorch reports that shared memory (/dev/shm) was too small",
    bound=Bound(kind="shared memory", text="shared memory (/dev/shm)"),
)
_GPU = Kill(
    "gpu",
    "gpu",
    "refused",
    reason="the program reports that the memory of the GPU was full",
    bound=Bound(kind="GPU memory", text="the GPU's memory"),
)
_EXIT_137 = (
    r"(?i:exit(?:ed)?(?: with)?(?: code| status)|exit_?code|return(?:ed)?(?: non-zero)? (?:code|exit status)"
    r"|\bStatus:?)\"?[ =:]+137\b"
)
_ERROR = r"(?:^|[\s\]])(?:[\w.]+\.)?"  # a traceback's last line: the class, possibly after a time or a rank

_KILLS = table(
    "kill",
    # bash in a script, jobs of bash and zsh, the shell itself, and terminals
    ("Killed", r": line \d+:\s+(?P<pid>\d+) Killed(?::? 9)?(?:\s{2,}(?P<command>\S.*))?$", _SHELL),
    ("illed", r"^\s*\[\d+\][+-]?\s+(?:(?P<pid>\d+)\s+)?[Kk]illed(?::? 9)?\s{2,}(?P<command>\S.*)$", _SHELL),
    ("illed", r"(?:^|[^ ]\])(?:zsh: |fish: .*)?[Kk]illed(?:: 9)?(?:\s{2,}(?P<command>\S.*))?\s*$", _SHELL),
    ("zsh: killed", r"zsh: killed\s+(?P<command>\S.*)$", _SHELL),
    ("[Process killed]", r"^\s*\[Process killed\]\s*$", _SHELL),
    ("SIGKILL", r"terminated by signal SIGKILL \(Forced quit\)", _SHELL),
    ("killed by signal: Killed", r"DataLoader worker(?: \(pid (?P<pid>\d+)\))? is killed by signal: Killed", _SHELL),
    ("Killed signal", r"fatal error: Killed signal terminated program (?P<command>\S+)", _SHELL),
    ("make", r"make(?:\[\d+\])?: \*\*\* \[(?P<target>[^\]]*)\] (?:Killed|Error 137)",
     replace(_SHELL, unit="make target {target}")),
    # PyTorch, Spark, process pools
    ("shared memory", r"DataLoader worker(?: \(pid (?P<pid>\d+)\))? is killed by signal: Bus error"
     r"|Unexpected bus error encountered in worker\. This might be caused by insufficient shared memory", _SHARED),
    ("ExecutorLostFailure", r"ExecutorLostFailure .*?(?:exit(?:ed)? (?:code|status):? ?137|[Oo]ut of memory)", _SHELL),
    ("exitcode",
     r"exitcode\s*: -9\b\)?(?: local_rank: \d+)?(?: \(pid: (?P<pid>\d+)\))?(?: of binary: (?P<command>\S+))?", _SHELL),
    ("received by PID", r"Signal 9 \(SIGKILL\) received by PID (?P<pid>\d+)", _SHELL),
    ("SIGKILL", r"died with <Signals\.SIGKILL: 9>|interrupted by signal 9: SIGKILL|[Ss]ignal 9 \(SIGKILL\)"
     r"|terminated with signal SIGKILL", _SHELL),
    *(
        (needle, _EXIT_137, _SHELL)
        for needle in (
            *("ode 137", "ode=137", "ode: 137", "ode:    137", 'ode": 137', "tatus 137", "tatus=137", "tatus: 137"),
            "rror 137",
        )
    ),
    ("ignal 9", r"(?i:killed by|got|received|terminated by|with) signal 9\b", _SHELL),
    ("abruptly", r"A process in the process pool was terminated abruptly|One of the subprocesses has abruptly died",
     _POOL),
    ("unexpectedly terminated", r"worker process managed by the executor was unexpectedly terminated", _POOL),
    # notebooks
    ("using all available RAM", r"[Ss]ession crashed after using all available RAM",
     Kill("unknown", "machine", sure="likely", reason="Colab reports that the session used all available RAM",
          name="the Colab session")),
    ("KernelRestarter", r"KernelRestarter: restarting kernel \(\d+/\d+\)", _NOTEBOOK),
    ("appears to have died", r"The kernel (?:for \S+ )?appears to have died\. It will restart automatically",
     _NOTEBOOK),
    ("Kernel died", r"DeadKernelError: Kernel died|^Kernel died, restarting", _NOTEBOOK),
    # failed allocations
    ("nable to allocate",
     r"[Uu]nable to allocate (?P<requested>[\d.]+ [KMGTP]?i?B)\b(?: for an array(?P<shape> with shape \([^)]*\))?)?",
     replace(_REFUSED, bound=Bound(kind="allocation", text="an array{shape}"))),
    ("memory allocation of", r"memory allocation of (?P<requested>\d+) bytes failed", _REFUSED),
    ("tried to allocate", r"you tried to allocate (?P<requested>\d+) bytes", _REFUSED),
    ("ArrowMemoryError", r"ArrowMemoryError: (?:malloc|realloc) of size (?P<requested>\d+) failed", _REFUSED),
    ("CUDA",
     r"(?:Error: |^)CUDA(?: error:)? out of memory\b(?=(?:.*?Tried to allocate (?P<requested>[\d.]+ [KMGT]iB))?)"
     r"(?=(?:.*?(?P<limit>[\d.]+ [KMGT]iB) total capacity)?)"
     r"(?=(?:.*?total capaci?ty of (?P<limit2>[\d.]+ [KMGT]iB))?)"
     r"(?=(?:.*?(?P<usage>[\d.]+ [KMGT]iB) already allocated)?)"
     r"(?=(?:.*?(?:this process|Process \d+) has (?P<usage2>[\d.]+ [KMGT]iB) memory in use)?)"
     r"(?=(?:.*?(?P<usage3>[\d.]+ [KMGT]iB) is allocated by PyTorch)?)", _GPU),
    ("CUDA_ERROR_OUT_OF_MEMORY", r"(?:failed|error|: )[^\"'`]*CUDA_ERROR_OUT_OF_MEMORY", _GPU),
    ("while trying to allocate",
     r"(?:RESOURCE_EXHAUSTED|Resource exhausted): Out of memory while trying to allocate (?P<requested>\d+) bytes",
     replace(_GPU, reason="XLA (JAX, TensorFlow) reports that the memory of the device was full",
             bound=Bound(kind="GPU memory", text="the memory of the XLA device"))),
    ("java.lang.OutOfMemoryError", r"(?:^|[\s:])java\.lang\.OutOfMemoryError: .*",
     replace(_REFUSED, bound=Bound(kind="heap", text="the Java heap (-Xmx)"))),
    ("JavaScript heap", r"JavaScript heap out of memory",
     replace(_REFUSED, bound=Bound(kind="heap", text="the JavaScript heap (--max-old-space-size)"))),
    ("MemoryError", _ERROR + r"(?:_?Array)?MemoryError(?::? *$|: )", _REFUSED),
    ("bad_alloc", r"(?:throwing an instance of '|what\(\):\s+|Error: )std::bad_alloc", _REFUSED),
    ("annot allocate memory", r"(?:\[Errno 12\] |: )[Cc]annot allocate memory", _REFUSED),
)  # fmt: skip

# Progress bars of datasets, of the examples of transformers, and of sentence-transformers.
_WORK = [
    Phrase(needle, re.compile(pattern), template, "context", reach=1 << 40)
    for needle, pattern, template in (
        ("okeni", r"[Rr]unning tokenizer on|[Tt]okeni[sz]ing\b.*\d+%", Kill("unknown", job="tokenize")),
        ("Map", r"\bMap(?: \(num_proc=\d+\))?: +\d+%|died during map operation", Kill("unknown", job="map")),
        ("dataset shards", r"Uploading the dataset shards", Kill("unknown", job="build")),
        ("from Arrow format", r"Creating parquet from Arrow format", Kill("unknown", job="build")),
        ("Batches: ", r"\bBatches: +\d+%", Kill("unknown", job="embed")),
    )
]
_DETAILS = [
    Phrase(
        "leaked ",
        re.compile(r"There appear to be \d+ leaked (?:semaphore|shared_memory)"),
        Kill(
            "unknown",
            sure="likely",
            reason="SIGKILL ended a Python process with workers; memory or kill -9 are the possible reasons",
            name="python",
            notes=(SEMAPHORE_NOTE,),
        ),
        "detail",
        signal=9,
    ),
    Phrase("SIGKILL(-9)", re.compile(r"exit codes of the workers are \{.*SIGKILL\(-9\)"), _SHELL, "detail"),
]

PROGRAM_PHRASES = [*_WORK, *_DETAILS, *_KILLS]

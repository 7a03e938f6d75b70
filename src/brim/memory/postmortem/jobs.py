"""What a process was doing when it died, from what it printed or how it was called: work that brim can do too."""

from __future__ import annotations

import re

from brim.memory.postmortem.records import Job

NEEDLES = (b"Map (num_proc", b"Map: ", b"tokenizer on", b"dataset shards", b"from Arrow format", b"Batches: ")

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

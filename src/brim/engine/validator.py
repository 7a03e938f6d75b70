"""The official BIDS validator, run as a check.

It is a program of its own (the package bids-validator-deno), so its memory is not brim's. It needs no network,
except for datasets whose events use a HED library schema that it does not carry.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

from brim.engine.check import Check
from brim.errors import InputError, MissingExtra

_PROGRAM = "bids-validator-deno"
_LIST = '"issues":['
_READ = 1 << 20


def bids_validator(folder: str | os.PathLike[str]) -> Check:
    """What the validator says of a folder. Its errors fail the check, its warnings are counted."""
    beside = os.path.join(os.path.dirname(sys.executable), _PROGRAM)
    program = beside if os.path.isfile(beside) else shutil.which(_PROGRAM)
    if program is None:
        raise MissingExtra(
            "The BIDS validator is not installed.", hint=f"Install it with: pip install {_PROGRAM}", extra=_PROGRAM
        )
    if not os.path.isdir(folder):
        raise InputError(f"{os.fspath(folder)!r} is not a folder: --bids-validator is for BIDS folders.")
    command = [program, "--format", "json", "--no-color", os.path.abspath(folder)]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, errors="replace") as process,
    ):
        assert process.stdout is not None
        try:
            return _summed(_Answer(process.stdout))
        except (ValueError, KeyError) as error:
            process.kill()
            code = process.wait()
            said.seek(0)
            lines = said.read().split("\n")
            raise InputError(
                f"The BIDS validator could not run: {lines[0].strip() or f'exit code {code}'}.",
                hint=f"See what it says itself: {_PROGRAM} {os.fspath(folder)}",
            ) from error


class _Answer:
    """The validator's JSON, read an issue at a time: a large dataset has a million of them."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.files = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        decoder = json.JSONDecoder()
        text = ""
        while _LIST not in text:
            text += self._more()
        text = text.partition(_LIST)[2]
        while not text.startswith("]"):
            try:
                issue, end = decoder.raw_decode(text)
            except json.JSONDecodeError:
                text += self._more()
                continue
            yield issue
            text = text[end:].lstrip(",") or self._more().lstrip(",")
        text += self._stream.read()
        total = re.search(r'"totalFiles":\s*(\d+)', text)
        self.files = int(total[1]) if total else 0

    def _more(self) -> str:
        piece = self._stream.read(_READ)
        if not piece:
            raise ValueError("the answer ends early")
        return piece


def _summed(answer: _Answer) -> Check:
    codes_of: dict[str, dict[str, None]] = {}  # file → its errors, each once
    codes: Counter[str] = Counter()
    severities: Counter[str] = Counter()
    for issue in answer:
        severities[issue["severity"]] += 1
        if issue["severity"] == "error":
            place = issue.get("location") or next(iter(issue.get("affects") or ()), "(the dataset)")
            codes_of.setdefault(place.lstrip("/"), {})[issue["code"]] = None
            codes[issue["code"]] += 1
    common = ", ".join(f"{code} {count:,}" for code, count in codes.most_common(3))
    detail = f"{severities['error']:,} errors, {severities['warning']:,} warnings" + (f" ({common})" if common else "")
    failed = sorted(codes_of)
    faults = [", ".join(codes_of[path]) for path in failed]
    return Check("BIDS validator", not failed, answer.files, failed, detail, faults)

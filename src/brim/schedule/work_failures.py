"""What went wrong in a worker, told for people: which rows, of which file, and the function's own words."""

from __future__ import annotations

import os
import signal
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from brim.errors import BrimError, DoesNotFit, FunctionFailed, InputError
from brim.memory.limit import gives_less
from brim.rows.read_unit import where
from brim.rows.unit import Reading, Unit
from brim.schedule.function_errors import frames_of, parts_of
from brim.schedule.messages import At
from brim.sizes import format_size
from brim.steps.step import BadRow, Step

if TYPE_CHECKING:  # workers explain bad rows, and hold no line
    from brim.schedule.memory_line import WorkerRoom
    from brim.schedule.scheduler import Attempt

_MEMORY_WORDS = ("memory allocation of", "bad_alloc", "Cannot allocate memory", "out of memory", "MemoryError")
_CAUSES = {-signal.SIGKILL: "Somebody or something kills it; brim does not, and there was memory left."}


_MACHINE_FULL = "the machine had no memory left"
_WITHIN = "Ask for more there, or give --memory less than that, so that brim keeps within it."
_ELSEWHERE = "Give --memory what is really free, or end what else takes memory."
_OURS = str(Path(__file__).parents[1]) + os.sep  # frames of brim itself


def reason(error: BadRow) -> str:
    """The function's error in one line."""
    cause = error.__cause__
    return f"{type(cause).__name__}: {cause}" if cause is not None else "unknown"


def explain(error: BadRow, unit: Unit, reading: Reading, offset: int) -> InputError:
    """The function's error with the rows and the file it happened at; brim's own words where it is brim's."""
    place = where(unit, reading, offset + error.row)
    if isinstance(error.__cause__, BrimError):
        message, hint = error.__cause__.words
        return InputError(
            f"{place} (unit {unit.number}): {message}",
            hint=f"{hint} Or leave such rows out with --on-error=skip or --on-error=quarantine.".strip(),
            unit=unit.number,
            row=offset + error.row,
            rows=error.rows,
        )
    rows = "at" if error.rows == 1 else f"in the {error.rows:,} rows that begin at"
    cause = error.__cause__
    return FunctionFailed(
        f"The function failed {rows} {place} (unit {unit.number}): {reason(error)}{_where_in_code(error)}",
        hint="Mend it and run the same command with --keep-done: finished units are kept. Or leave "
        "such rows out with --on-error=skip, or --on-error=quarantine, which keeps them in a file.",
        unit=unit.number,
        row=offset + error.row,
        rows=error.rows,
        traceback="".join(traceback.format_exception(cause)) if cause else "",
        place=f"{rows} {place} (unit {unit.number})",
        parts=parts_of(cause) if cause else b"",
        frames=frames_of(cause, _OURS) if cause else (),
    )


def _where_in_code(error: BadRow) -> str:
    """The last line of the user's code on the way to the error."""
    if error.__cause__ is None:
        return ""
    frames = traceback.extract_tb(error.__cause__.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    if not theirs:
        return ""
    last = theirs[-1] if len(theirs) == 1 else theirs[0]
    code = f": {last.line}" if last.line else ""
    return f", in line {last.lineno} of {last.name}{code}"


def too_small(room: WorkerRoom, *, known: bool) -> DoesNotFit:
    """The limit leaves no room for any work. `known`: a worker was seen, so this is no guess."""
    least = "" if known else "at least "
    return DoesNotFit(
        f"{format_size(room.limit_bytes)} of memory is too little: brim itself takes {format_size(room.parent_bytes)} "
        f"and a worker with its imports {least}{format_size(room.worker_bytes)}, before any work.",
        hint=f"The smallest --memory that would do is {least}{format_size(room.smallest_bytes)}.",
        limit_bytes=room.limit_bytes,
        need_bytes=room.smallest_bytes,
    )


def does_not_fit(
    attempt: Attempt,
    at: At | None,
    held_bytes: int,
    step: Step,
    reading: Reading,
    limit_bytes: int,
    *,
    by_kernel: bool = False,
) -> DoesNotFit:
    """The end of the road: which rows, what they took, whose limit it was, and what to change."""
    at = at or attempt.at or At(0, 0, 0)
    place = where(attempt.unit, reading, at.offset)
    rows = f"The batch of {at.rows:,} rows that begins at {place}" if at.rows > 1 else f"The row {place}"
    held, limit = format_size(held_bytes), format_size(limit_bytes)
    if by_kernel:
        who = gives_less(limit_bytes)
        struck = f"the kernel ended the worker at {held}, not brim at its limit of {limit}: {who or _MACHINE_FULL}."
        hint = f"{_WITHIN if who else _ELSEWHERE} Finished units are kept."
    else:
        struck = f"the worker held {held} when it reached the limit of {limit}, with nothing else running."
        hint = "Run it again with more --memory: finished units are kept."
    return DoesNotFit(
        f"{rows} (unit {attempt.unit.number}) does not fit: {struck}",
        hint=f"{hint} {step.smaller(at.rows)}".strip(),
        limit_bytes=limit_bytes,
        need_bytes=held_bytes,
        unit=attempt.unit.number,
        row=at.offset,
        rows=at.rows,
    )


def crashed(attempt: Attempt, reading: Reading, code: int, words: str, at: At | None) -> InputError:
    at = at or attempt.at or At(0, 0, 0)
    place = where(attempt.unit, reading, at.offset)
    return InputError(
        f"The worker's process ended {attempt.crashes + 1} times ({exit_words(code)}) at or after {place} "
        f"(unit {attempt.unit.number}).{_last_line(words)}",
        hint=(_CAUSES.get(code, "Something in native code fails there.") if code < 0 else "Does it call os._exit()?")
        + " Finished units are kept; run the same command to continue.",
        unit=attempt.unit.number,
        row=at.offset,
    )


def does_not_start(code: int, words: str, limit_bytes: int = 0) -> BrimError:
    if code == -signal.SIGKILL and limit_bytes and (who := gives_less(limit_bytes)):
        return DoesNotFit(
            f"The kernel ended a worker before its first row, not brim at its limit of {format_size(limit_bytes)}: "
            f"{who}.",
            hint=_WITHIN,
            limit_bytes=limit_bytes,
        )
    return InputError(f"A worker ended before its first row ({exit_words(code)}).{_last_line(words)}")


def aborted_for_memory(code: int, words: str) -> bool:
    """Whether native code gave up because it could not have more."""
    return code == -signal.SIGABRT and any(word in words for word in _MEMORY_WORDS)


def exit_words(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _last_line(words: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return f" Its last words: {lines[-1][:300]}" if lines else ""

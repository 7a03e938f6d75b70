"""Errors of workers, explained for users: the rows, their file, and the message of the user's function.

The exception of a user's function arrives at the caller as a UserFunctionError that also has the user's type, so that
`except ZeroDivisionError` works. Where the two types cannot be combined, the user's exception is its `__cause__`. Its
notes contain the row, the file, the unit, and the traceback of the worker as text.
"""

from __future__ import annotations

import os
import pickle
import signal
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.compute.rows.read_unit import describe_row
from brim.compute.rows.unit import Reading, Unit
from brim.compute.steps.functions import pack
from brim.compute.steps.step import BadBatch, BadRow, Step
from brim.errors import BrimError, InputError, MemoryLimitError, UserFunctionError
from brim.execution.worker_messages import RowRange
from brim.memory.limit import gives_less
from brim.sizes import format_size

if TYPE_CHECKING:
    from brim.execution.memory_limiter import MemoryBudget
    from brim.execution.scheduler import Attempt

_MOST_BYTES = 1 << 20  # of an exception that contains data
_C_FIELDS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def pack_exception(error: BaseException) -> bytes:
    """Pickle the parts of an exception, without its traceback; nothing if its type cannot be pickled."""
    attributes = {name: value for name, value in vars(error).items() if name != "__notes__" and _pack((name, value))}
    fields = {name: value for name, value in _c_fields(error) if _pack((name, value))}
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    args = error.args if _pack(error.args) else tuple(map(str, error.args))
    return _pack((type(error), args, attributes, fields, notes)) or b""


def _c_fields(error: BaseException) -> Iterator[tuple[str, Any]]:
    """Yield what types written in C store in addition to `args`, such as errno or the name of a NameError."""
    for kind in type(error).__mro__:
        for name, field in vars(kind).items():
            if isinstance(field, _C_FIELDS) and not name.startswith("__") and name not in ("args", "obj"):
                value = getattr(error, name, None)
                if value is not None:
                    yield name, value


def _pack(value: Any) -> bytes | None:
    try:
        data = pack(value, "The function's error")
    except (InputError, MemoryError):
        return None
    return data if len(data) <= _MOST_BYTES else None


@contextmanager
def raising_user_errors() -> Iterator[None]:
    """Let a UserFunctionError from this block also have the type of the user's exception."""
    raised: BaseException
    try:
        yield
    except UserFunctionError as failed:
        raised = user_error(failed)
        if isinstance(raised.__cause__, KeyboardInterrupt):
            raised = raised.__cause__  # it means the program, not a row
        if raised is failed:
            raise
    else:
        return
    raise raised from raised.__cause__  # not in the context of the error that it replaces


def user_error(failed: UserFunctionError) -> UserFunctionError:
    """Return the error for the caller in Python: of the user's type too, or with the user's exception as its cause."""
    original = _unpack_exception(failed.parts)
    combined = None if original is None else _combine(original, failed)
    text = str(failed.facts.get("traceback", "")).rstrip()
    if combined is None:
        failed.__cause__ = original
        notes = [text]
    else:
        notes = [*getattr(original, "__notes__", ()), f"It failed {failed.facts['place']}.", failed.hint, text]
    error = combined or failed
    for note in filter(None, notes):
        error.add_note(note)
    return error


def _unpack_exception(parts: bytes) -> BaseException | None:
    if not parts:
        return None
    try:
        kind, args, attributes, fields, notes = pickle.loads(parts)
        error = _fill(kind.__new__(kind), args, attributes, fields)
        if notes:
            error.__notes__ = notes
        return error
    except Exception:  # noqa: BLE001  the user's own code decides what this raises
        return None


def _fill(error: Any, args: tuple[Any, ...], attributes: dict[str, Any], fields: dict[str, Any]) -> BaseException:
    """Set the content of an exception without calling the constructor of the user."""
    error.args = args
    error.__dict__.update(attributes)
    for name, value in fields.items():
        try:
            setattr(error, name, value)
        except (AttributeError, TypeError):
            continue  # it follows from the others
    return error  # type: ignore[no-any-return]


def _combine(original: BaseException, failed: UserFunctionError) -> UserFunctionError | None:
    """Make an exception of both types; None if that is impossible. Attributes of the user's exception come first."""
    kind = type(original)
    if not isinstance(original, Exception) or isinstance(original, StopIteration):
        return None  # SystemExit would end more than the call, and StopIteration a generator
    namespace: dict[str, Any] = {
        "__str__": lambda self: kind.__str__(self),
        "__repr__": lambda self: kind.__repr__(self),
        "__reduce__": lambda self: (user_error, (failed,)),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        **{name: value for name, value in vars(original).items() if hasattr(UserFunctionError, name)},
    }
    try:
        both: Any = types.new_class(kind.__name__, (kind, UserFunctionError), {}, lambda space: space.update(namespace))
        error = both.__new__(both)
        _fill(error, original.args, {**vars(failed), **vars(original)}, dict(_c_fields(original)))
    except Exception:  # noqa: BLE001  the user's own code decides what this raises
        return None
    error.__dict__.pop("__notes__", None)
    return error  # type: ignore[no-any-return]


_MEMORY_MESSAGES = ("memory allocation of", "bad_alloc", "Cannot allocate memory", "out of memory", "MemoryError")
_WITHIN_HINT = "Raise that limit, or give --memory less, so that brim stays within it."
_ELSEWHERE_HINT = "Give --memory the free memory, or stop other programs that use memory."
_KEPT_BYTES = 64 << 20
_BRIM = str(Path(__file__).parents[1]) + os.sep


def error_text(cause: BaseException | None) -> str:
    """Return an exception in one line."""
    return f"{type(cause).__name__}: {cause}" if cause is not None else "unknown"


def explain(error: BadRow, unit: Unit, reading: Reading, offset: int) -> InputError:
    """Return the error of the user's function, or of brim, with the rows and the file where it happened."""
    text, cause = describe_row(unit, reading, offset + error.row), error.__cause__
    location = {"unit": unit.number, "row": offset + error.row, "rows": error.rows}
    if isinstance(cause, BrimError):
        message, hint = cause.words
        hint = f"{hint} Or skip such rows with --on-error=skip or --on-error=quarantine.".strip()
        return InputError(f"{text} (unit {unit.number}): {message}", hint=hint, **location)
    rows = "at" if error.rows == 1 else f"in the {error.rows:,} rows that begin at"
    hint = (
        "Fix it and run the same command with --keep-done: finished units are kept. Or skip such rows with "
        "--on-error=skip, or with --on-error=quarantine, which keeps them in a file."
    )
    if isinstance(error, BadBatch):
        rows = f"in a batch of {error.rows:,} rows, and on none of them alone; the first is"
        hint = "Try another --batch-size, or fix the model. Finished units are kept."
    code = ""
    frames = traceback.extract_tb(cause.__traceback__) if cause is not None else []
    if theirs := [frame for frame in frames if not frame.filename.startswith(_BRIM)]:
        code = f", in line {theirs[0].lineno} of {theirs[0].name}{f': {theirs[0].line}' if theirs[0].line else ''}"
    return UserFunctionError(
        f"The function failed {rows} {text} (unit {unit.number}): {error_text(cause)}{code}",
        hint=hint,
        traceback="".join(traceback.format_exception(cause)) if cause else "",
        place=f"{rows} {text} (unit {unit.number})",
        parts=pack_exception(cause) if cause else b"",
        **location,
    )


def too_small(budget: MemoryBudget, held_bytes: int = 0, enough_bytes: int = 0) -> MemoryLimitError:
    """Make the error for a limit that no worker fits in.

    How much would do is unknown: the worker was stopped before it had imported everything. `enough_bytes` is free for
    sure; `held_bytes` belong to the caller, and were added to the limit that it gave.
    """
    limit, own = budget.limit_bytes - held_bytes, max(budget.parent_bytes - held_bytes, 0)
    hint = "Raise it with --memory."
    if enough_bytes > budget.smallest_limit_bytes:
        suggestion = f"{enough_bytes // 10**9}GB" if enough_bytes >= 10**10 else f"{enough_bytes // 10**6}MB"
        hint = f"Try --memory={suggestion}, half of the free memory: the summary then shows how much the job needed."
    return MemoryLimitError(
        f"{format_size(limit)} of memory is too little: brim itself needs {format_size(own)}, and a worker at least "
        f"{format_size(budget.worker_bytes)} before its first row.",
        hint=hint,
        limit_bytes=limit,
        need_bytes=budget.smallest_limit_bytes - held_bytes,
    )


def does_not_fit(
    attempt: Attempt,
    rows: RowRange | None,
    held_bytes: int,
    step: Step,
    reading: Reading,
    limit_bytes: int,
    *,
    killed_by_kernel: bool = False,
    base_bytes: int = 0,
    caller_bytes: int = 0,
) -> MemoryLimitError:
    """Make the error for rows that do not fit with all memory: their need, the limit, and what to change.

    `base_bytes`: memory of the worker before its first row. `caller_bytes` were added to the limit of the user.
    """
    rows, unit = rows or attempt.rows or RowRange(0, 0, 0), attempt.task.work
    location = describe_row(unit, reading, rows.offset)
    subject = f"The batch of {rows.rows:,} rows that begins at {location}" if rows.rows > 1 else f"The row {location}"
    held_text, limit = format_size(held_bytes), format_size(limit_bytes - caller_bytes)
    problem = f"{subject} (unit {unit.number}) does not fit"
    advice = step.smaller(rows.rows)
    kept_bytes = rows.held_bytes - base_bytes
    if base_bytes and rows.offset and kept_bytes > max(_KEPT_BYTES, held_bytes - rows.held_bytes):
        before = f"{format_size(rows.held_bytes)} before {location} (unit {unit.number})"
        problem = f"The function keeps memory: its worker used {format_size(base_bytes)} at first and {before}"
        advice = "Let the function release data of earlier rows, or use smaller units with --unit-size."
    if killed_by_kernel:
        lower_limit = gives_less(limit_bytes)
        reason = (
            f"the kernel killed the worker at {held_text}, not brim at its limit of {limit}: "
            f"{lower_limit or 'the machine had no memory left'}."
        )
        hint = f"{_WITHIN_HINT if lower_limit else _ELSEWHERE_HINT} Finished units are kept."
    else:
        reason = f"the worker used {held_text} when it reached the limit of {limit}, while no other ran."
        hint = "Run it again with more --memory: finished units are kept."
    return MemoryLimitError(
        f"{problem}: {reason}",
        hint=f"{hint} {advice}".strip(),
        limit_bytes=limit_bytes - caller_bytes,
        need_bytes=held_bytes,
        unit=unit.number,
        row=rows.offset,
        rows=rows.rows,
    )


def crashed(attempt: Attempt, reading: Reading, code: int, output: str, rows: RowRange | None) -> InputError:
    """Make the error for rows on which the worker process dies."""
    rows, unit = rows or attempt.rows or RowRange(0, 0, 0), attempt.task.work
    hint = "Does the function call os._exit()?"
    if code < 0:
        hint = "Native code fails there."
    if code == -signal.SIGKILL:
        hint = "Another program kills it; brim does not, and there was memory left."
    return InputError(
        f"The worker process ended {attempt.crashes + 1} times ({exit_text(code)}) at or after "
        f"{describe_row(unit, reading, rows.offset)} (unit {unit.number}).{_last_line(output)}",
        hint=f"{hint} Finished units are kept; run the same command to continue.",
        unit=unit.number,
        row=rows.offset,
    )


def does_not_start(code: int, output: str, limit_bytes: int = 0) -> BrimError:
    if code == -signal.SIGKILL and limit_bytes and (lower_limit := gives_less(limit_bytes)):
        return MemoryLimitError(
            f"The kernel killed a worker before its first row, not brim at its limit of {format_size(limit_bytes)}: "
            f"{lower_limit}.",
            hint=_WITHIN_HINT,
            limit_bytes=limit_bytes,
        )
    return InputError(f"A worker ended before its first row ({exit_text(code)}).{_last_line(output)}")


def is_memory_abort(code: int, output: str) -> bool:
    """Return whether native code aborted because an allocation failed."""
    return code == -signal.SIGABRT and any(message in output for message in _MEMORY_MESSAGES)


def exit_text(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f" Its last output: {lines[-1][:300]}" if lines else ""

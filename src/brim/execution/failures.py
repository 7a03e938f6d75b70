"""What went wrong in a worker, told for people: which rows, of which file, and the function's own words.

The exception of a user's function arrives at whoever called as what it was. What is raised is of the user's type, so
that `except ZeroDivisionError` works, and a UserFunctionError. Its traceback ends inside the function, made anew from
names and lines; its notes tell the row, the file and the unit.
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

from brim.compute.rows.read_unit import where
from brim.compute.rows.unit import Reading, Unit
from brim.compute.steps.functions import pack
from brim.compute.steps.step import BadBatch, BadRow, Step
from brim.errors import BrimError, InputError, MemoryLimitError, UserFunctionError
from brim.execution.worker_messages import At
from brim.memory.limit import gives_less
from brim.sizes import format_size

if TYPE_CHECKING:
    from brim.execution.memory_limiter import WorkerRoom
    from brim.execution.scheduler import Attempt

_MOST_BYTES = 1 << 20  # of an exception that carries data
_COMPUTED = (types.MemberDescriptorType, types.GetSetDescriptorType)


def parts_of(error: BaseException) -> bytes:
    """What an exception is made of, without its traceback; nothing if its type cannot travel."""
    kept = {name: value for name, value in vars(error).items() if name != "__notes__" and _packed((name, value))}
    fields = {name: value for name, value in _fields(error) if _packed((name, value))}
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    args = error.args if _packed(error.args) else tuple(map(str, error.args))
    return _packed((type(error), args, kept, fields, notes)) or b""


def _fields(error: BaseException) -> Iterator[tuple[str, Any]]:
    """What types written in C keep beside `args`: errno, the name that is not defined."""
    for kind in type(error).__mro__:
        for name, field in vars(kind).items():
            if isinstance(field, _COMPUTED) and not name.startswith("__") and name not in ("args", "obj"):
                value = getattr(error, name, None)
                if value is not None:
                    yield name, value


def _packed(value: Any) -> bytes | None:
    try:
        made = pack(value, "The function's error")
    except (InputError, MemoryError):
        return None
    return made if len(made) <= _MOST_BYTES else None


def frames_of(error: BaseException, ours: str) -> tuple[tuple[str, int, str], ...]:
    """File, line and name of each call from the user's function on."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((at for at, frame in enumerate(frames) if not frame.filename.startswith(ours)), len(frames))
    return tuple((frame.filename, frame.lineno or 1, frame.name) for frame in frames[first:])


@contextmanager
def users_own() -> Iterator[None]:
    """UserFunctionError from here is of the type that the function raised, too."""
    raised: BaseException
    try:
        yield
    except UserFunctionError as failed:
        raised = own_error(failed)
        if isinstance(raised.__cause__, KeyboardInterrupt):
            raised = raised.__cause__  # who raises it means the program
        if raised is failed:
            raise
    else:
        return
    raise raised from raised.__cause__  # and not while something else was handled


def own_error(failed: UserFunctionError) -> UserFunctionError:
    """The error as the caller gets it. Where types do not combine, the user's own is the cause."""
    original = _original(failed.parts)
    made = failed if original is None else _combined(original, failed) or failed
    if made is failed:
        made.__cause__ = original
        notes = [] if original is not None else [str(failed.facts.get("traceback", ""))]
    else:
        notes = [*getattr(original, "__notes__", ()), f"It failed {failed.facts['place']}.", failed.hint]
    for note in filter(None, notes):
        made.add_note(note)
    return made.with_traceback(_traceback(failed.frames))


def _original(parts: bytes) -> BaseException | None:
    if not parts:
        return None
    try:
        kind, args, kept, fields, notes = pickle.loads(parts)
        return _filled(kind.__new__(kind), args, kept, fields, notes)
    except Exception:  # noqa: BLE001  the user's own code decides what this raises
        return None


def _filled(
    error: Any, args: tuple[Any, ...], kept: dict[str, Any], fields: dict[str, Any], notes: list[str]
) -> BaseException:
    """An exception as it was, without a call of what its author wrote to make one."""
    error.args = args
    error.__dict__.update(kept)
    for name, value in fields.items():
        try:
            setattr(error, name, value)
        except (AttributeError, TypeError):
            continue  # it follows from the others
    if notes:
        error.__notes__ = notes
    return error  # type: ignore[no-any-return]


def _combined(original: BaseException, failed: UserFunctionError) -> UserFunctionError | None:
    """An exception of both types. The user's attributes come first, where both have one of a name."""
    kind = type(original)
    if not isinstance(original, Exception) or isinstance(original, StopIteration):
        return None  # SystemExit and the like would end more than the call, and the other a generator
    namespace: dict[str, Any] = {
        "__str__": lambda self: kind.__str__(self),
        "__repr__": lambda self: kind.__repr__(self),
        "__reduce__": lambda self: (own_error, (failed,)),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        **{name: value for name, value in vars(original).items() if hasattr(UserFunctionError, name)},
    }
    try:
        both: Any = types.new_class(kind.__name__, (kind, UserFunctionError), {}, lambda space: space.update(namespace))
        made = both.__new__(both)
        fields = dict(_fields(original))
        _filled(made, original.args, {**vars(failed), **vars(original)}, fields, [])
    except Exception:  # noqa: BLE001  the user's own code decides what this raises
        return None
    made.__dict__.pop("__notes__", None)
    return made  # type: ignore[no-any-return]


def _traceback(frames: tuple[tuple[str, int, str], ...]) -> types.TracebackType | None:
    """A traceback that shows these lines. The frames are stand-ins: their variables stayed in the worker."""
    made: types.TracebackType | None = None
    for file, line, name in reversed(frames):
        code = compile("raise KeyError", file, "exec")
        # All of it is one line without columns, or they would be marked under the user's own line.
        units, table = len(code.co_code) // 2, b""
        for start in range(0, units, 8):
            table += bytes([0x80 | (13 << 3) | (min(units - start, 8) - 1), 0])
        code = code.replace(co_name=name, co_qualname=name, co_firstlineno=line, co_linetable=table)
        try:
            exec(code, {"__name__": name, "__file__": file})
        except KeyError as error:
            at = error.__traceback__
            assert at is not None
            assert at.tb_next is not None
            made = types.TracebackType(made, at.tb_next.tb_frame, at.tb_next.tb_lasti, line)
    return made


_MEMORY_WORDS = ("memory allocation of", "bad_alloc", "Cannot allocate memory", "out of memory", "MemoryError")
_CAUSES = {-signal.SIGKILL: "Somebody or something kills it; brim does not, and there was memory left."}


_MACHINE_FULL = "the machine had no memory left"
_WITHIN = "Ask for more there, or give --memory less than that, so that brim keeps within it."
_ELSEWHERE = "Give --memory what is really free, or end what else takes memory."
_OURS = str(Path(__file__).parents[1]) + os.sep  # frames of brim itself


def reason(cause: BaseException | None) -> str:
    """The function's error in one line."""
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
    hint = (
        "Mend it and run the same command with --keep-done: finished units are kept. Or leave "
        "such rows out with --on-error=skip, or --on-error=quarantine, which keeps them in a file."
    )
    if isinstance(error, BadBatch):
        rows = f"in a batch of {error.rows:,} rows, and on none of them alone; the first is"
        hint = "Try another --batch-size, or fix the model. Finished units are kept."
    cause = error.__cause__
    return UserFunctionError(
        f"The function failed {rows} {place} (unit {unit.number}): {reason(error.__cause__)}{_where_in_code(error)}",
        hint=hint,
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


def too_small(room: WorkerRoom, held_bytes: int = 0, enough_bytes: int = 0) -> MemoryLimitError:
    """The limit leaves no room for any work.

    How much would do is not known: the worker was stopped before it had loaded everything. `enough_bytes` is what is
    surely free; `held_bytes` is what the caller held, which is beside the limit that it gave.
    """
    limit, own = room.limit_bytes - held_bytes, max(room.parent_bytes - held_bytes, 0)
    least = f"a worker at least {format_size(room.worker_bytes)} before its first row"
    hint = "Give it more with --memory."
    if enough_bytes > room.smallest_bytes:
        enough = f"{enough_bytes // 10**9}GB" if enough_bytes >= 10**10 else f"{enough_bytes // 10**6}MB"
        hint = f"Try --memory={enough}, half of what is free here: the summary then says how much the job took."
    return MemoryLimitError(
        f"{format_size(limit)} of memory is too little: brim itself takes {format_size(own)} and {least}.",
        hint=hint,
        limit_bytes=limit,
        need_bytes=room.smallest_bytes - held_bytes,
    )


_KEPT_BYTES = 64 << 20


def does_not_fit(
    attempt: Attempt,
    at: At | None,
    held_bytes: int,
    step: Step,
    reading: Reading,
    limit_bytes: int,
    *,
    by_kernel: bool = False,
    base_bytes: int = 0,
    caller_bytes: int = 0,
) -> MemoryLimitError:
    """The end of the road: which rows, what they took, whose limit it was, and what to change.

    `base_bytes` is what the worker held before its first row. `caller_bytes` is what the caller of the job holds, which
    is beside the limit that it gave.
    """
    at = at or attempt.at or At(0, 0, 0)
    place = where(attempt.unit, reading, at.offset)
    rows = f"The batch of {at.rows:,} rows that begins at {place}" if at.rows > 1 else f"The row {place}"
    held, limit = format_size(held_bytes), format_size(limit_bytes - caller_bytes)
    fault = f"{rows} (unit {attempt.unit.number}) does not fit"
    more = step.smaller(at.rows)
    kept = at.held_bytes - base_bytes
    if base_bytes and at.offset and kept > max(_KEPT_BYTES, held_bytes - at.held_bytes):
        before = f"{format_size(at.held_bytes)} before {place} (unit {attempt.unit.number})"
        fault = f"The function keeps memory: its worker held {format_size(base_bytes)} at first and {before}"
        more = "Let the function release what it keeps of earlier rows, or take smaller units with --unit-size."
    if by_kernel:
        who = gives_less(limit_bytes)
        struck = f"the kernel ended the worker at {held}, not brim at its limit of {limit}: {who or _MACHINE_FULL}."
        hint = f"{_WITHIN if who else _ELSEWHERE} Finished units are kept."
    else:
        struck = f"the worker held {held} when it reached the limit of {limit}, with nothing else running."
        hint = "Run it again with more --memory: finished units are kept."
    return MemoryLimitError(
        f"{fault}: {struck}",
        hint=f"{hint} {more}".strip(),
        limit_bytes=limit_bytes - caller_bytes,
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
        return MemoryLimitError(
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

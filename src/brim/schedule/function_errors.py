"""The exception of a user's function on its way from a worker to whoever called: it arrives as what it was.

What is raised is of the user's type, so that `except ZeroDivisionError` works, and a FunctionFailed. Its traceback ends
inside the function, made anew from names and lines; its notes tell the row, the file and the unit.
"""

from __future__ import annotations

import pickle
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from brim.errors import FunctionFailed, InputError
from brim.steps.functions import pack

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
    """FunctionFailed from here is of the type that the function raised, too."""
    raised: BaseException
    try:
        yield
    except FunctionFailed as failed:
        raised = own_error(failed)
        if isinstance(raised.__cause__, KeyboardInterrupt):
            raised = raised.__cause__  # who raises it means the program
        if raised is failed:
            raise
    else:
        return
    raise raised from raised.__cause__  # and not while something else was handled


def own_error(failed: FunctionFailed) -> FunctionFailed:
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


def _combined(original: BaseException, failed: FunctionFailed) -> FunctionFailed | None:
    """An exception of both types. The user's attributes come first, where both have one of a name."""
    kind = type(original)
    if not isinstance(original, Exception):
        return None  # SystemExit and the like would end more than the call
    namespace: dict[str, Any] = {
        "__str__": lambda self: kind.__str__(self),
        "__repr__": lambda self: kind.__repr__(self),
        "__reduce__": lambda self: (own_error, (failed,)),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        **{name: value for name, value in vars(original).items() if hasattr(FunctionFailed, name)},
    }
    try:
        both: Any = types.new_class(kind.__name__, (kind, FunctionFailed), {}, lambda space: space.update(namespace))
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

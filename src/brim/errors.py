"""Every error brim raises, by what the caller can do about it.

BrimError                      1  a bug in brim, or a base for `except`
├── InputError                 2  the command or its input is wrong: change it
│   ├── ArgumentError             an option has a value that cannot be; a ValueError too
│   ├── SourceError               the source cannot be read as rows
│   ├── FilesRefused              files are missing, empty, pointers, unreadable or too large
│   ├── SourceChanged             a source file is not what it was when the job was planned
│   ├── DestinationError          the destination is busy, or holds what brim did not write
│   │   └── PlanChanged           the destination holds another job: --fresh or --update
│   ├── MissingExtra              an optional library is not installed
│   ├── FunctionFailed            the user's function raised; in Python it is of the type that was raised, too
│   └── CommandNotStarted  127/126  brim run: the command was not found, or cannot be executed
├── DamageFound                3  a check or verification found damage
├── DoesNotFit                 4  the work does not fit the memory limit
├── SinkFailed                 5  the destination failed: run again to continue
└── Stopped                    6  stopped on request: run again to continue

An error says what is wrong and where (`message`) and what to do next (`hint`); what a program may want
to know is in `facts`. Both name options in the words of the reader (`wording`): flags in the terminal, else keywords.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from brim.wording import renamed, worded


class BrimError(Exception):
    """The root of brim's errors."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", **facts: object) -> None:
        super().__init__(message)
        self._message, self._hint = message, hint
        self.facts: dict[str, Any] = facts

    @property
    def message(self) -> str:
        return worded(self._message)

    @property
    def hint(self) -> str:
        return worded(self._hint)

    @property
    def words(self) -> tuple[str, str]:
        """Message and hint as they were written: for another error, which may be read elsewhere."""
        return self._message, self._hint

    def with_names(self, names: Mapping[str, str]) -> None:
        """Name options as a function does that has other names for some."""
        self._message, self._hint = renamed(self._message, names), renamed(self._hint, names)

    def with_hint(self, hint: str) -> None:
        """Say what to do next where it happened, which may be another thing than where it was found."""
        self._hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._message, self._hint, self.facts)


def _rebuild(kind: type[BrimError], message: str, hint: str, facts: dict[str, Any]) -> BrimError:
    return kind(message, hint=hint, **facts)


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Errors from here have the caller's names for some options: `{"workers": "num-proc"}`."""
    try:
        yield
    except BrimError as error:
        error.with_names(names)
        raise


class InputError(BrimError):
    """The command or its input is wrong."""

    exit_code = 2


class ArgumentError(InputError, ValueError):
    """An option has a value that cannot be."""


class SourceError(InputError):
    """The source cannot be read as rows. `path` names it."""


class FilesRefused(InputError):
    """Files that would ruin the build, found before the first byte. `problems` lists them by kind."""


class SourceChanged(InputError):
    """A source file is no longer what was planned. `path` names it."""


class DestinationError(InputError):
    """The destination is in use, or holds something brim did not write."""


class PlanChanged(DestinationError):
    """The destination holds another job. `changes` says how it differs."""


class MissingExtra(InputError):
    """An optional library is needed. `extra` names the one to install."""


class FunctionFailed(InputError):
    """The user's function failed. `unit`, `row` and `rows` tell where, `traceback` what it looked like there.

    What travels from a worker holds the exception itself (`parts`, pickled) and where it came from (`frames`):
    schedule/work_failures.py makes of it what Python's callers get, which is of the user's own type too.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        parts: bytes = b"",
        frames: tuple[tuple[str, int, str], ...] = (),
        **facts: Any,
    ) -> None:
        super().__init__(message, hint=hint, **facts)
        self.parts, self.frames = parts, frames

    def __reduce__(self) -> tuple[Any, ...]:
        facts = {**self.facts, "parts": self.parts, "frames": self.frames}
        return _rebuild, (FunctionFailed, self._message, self._hint, facts)


class CommandNotStarted(InputError):
    """A command that cannot be run at all. Exits with the shells' `code`: 127 not found, 126 not executable."""

    def __init__(self, message: str, *, hint: str = "", **facts: object) -> None:
        super().__init__(message, hint=hint, **facts)
        self.exit_code = self.facts.get("code", 127)


class DamageFound(BrimError):
    """A check or verification found damage. `findings` lists it."""

    exit_code = 3


class DoesNotFit(BrimError):
    """The work needs more memory than the limit. `need_bytes`, `limit_bytes`."""

    exit_code = 4


class SinkFailed(BrimError):
    """The destination failed (disk full, connection lost). What is finished stays finished."""

    exit_code = 5


class Stopped(BrimError):
    """Stopped by a signal or a stop file. What is finished stays finished."""

    exit_code = 6

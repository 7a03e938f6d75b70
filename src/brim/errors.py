"""The errors that brim raises, grouped by how the caller can react.

BrimError                            1  a bug in brim, or a base for `except`
├── InputError                       2  the command or its input is wrong: change it
│   ├── ArgumentError                   an option has an invalid value; also a ValueError
│   ├── SourceError                     the source cannot be read as rows
│   ├── InvalidFilesError               files are missing, empty, pointers, unreadable or too large
│   ├── SourceChangedError              a source file changed after the job was planned
│   ├── DestinationError                the destination is in use, or contains foreign files
│   │   └── PlanMismatchError           the destination contains another job: --fresh or --update
│   ├── MissingDependencyError          an optional library is not installed
│   ├── UserFunctionError               the user's function raised; in Python also of the type that it raised
│   └── CommandStartError      127/126  brim run: the command was not found, or cannot be executed
├── VerificationError                3  a check or verification found damage
├── MemoryLimitError                 4  the work does not fit the memory limit
├── DestinationUnavailableError      5  the destination failed: run the command again to resume
└── StoppedError                     6  stopped on request: run the command again to resume

An error has a description of the problem (`message`), a next step (`hint`), and details for programs (`facts`).
Both texts name options as flags in the terminal and as keyword arguments in Python (`wording`). `json_name` is the
value of "error" in the output of `--json`, which does not change when a class gets a better name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from brim.wording import renamed, worded


class BrimError(Exception):
    """The root of brim's errors."""

    exit_code = 1
    json_name = "BrimError"

    def __init_subclass__(cls, json_name: str | None = None) -> None:
        super().__init_subclass__()
        cls.json_name = json_name or cls.__name__

    def __init__(self, message: str, *, hint: str = "", **facts: object) -> None:
        super().__init__(message)
        self._message, self._hint = message, hint
        self.facts: dict[str, Any] = facts

    @property
    def message(self) -> str:
        """The description of the problem."""
        return worded(self._message)

    @property
    def hint(self) -> str:
        """The next step; may be empty."""
        return worded(self._hint)

    @property
    def words(self) -> tuple[str, str]:
        """Return message and hint without option names translated, to build another error from them."""
        return self._message, self._hint

    def with_names(self, names: Mapping[str, str]) -> None:
        """Replace option names by those of the function that was called, such as num-proc for workers."""
        self._message, self._hint = renamed(self._message, names), renamed(self._hint, names)

    def with_hint(self, hint: str) -> None:
        """Replace the hint, because the caller knows the next step better than the code that raised."""
        self._hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._message, self._hint, self.facts)


def _rebuild(kind: type[BrimError], message: str, hint: str, facts: dict[str, Any]) -> BrimError:
    return kind(message, hint=hint, **facts)


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Replace option names in errors raised inside this context: `{"workers": "num-proc"}`."""
    try:
        yield
    except BrimError as error:
        error.with_names(names)
        raise


class InputError(BrimError):
    """The command or its input is wrong."""

    exit_code = 2


class ArgumentError(InputError, ValueError):
    """An option has an invalid value."""


class SourceError(InputError):
    """The source cannot be read as rows. `path` names it."""


class InvalidFilesError(InputError, json_name="FilesRefused"):
    """Files cannot be built; raised before anything is written. `problems` lists them by kind."""


class SourceChangedError(InputError, json_name="SourceChanged"):
    """A source file changed after the job was planned. `path` names it."""


class DestinationError(InputError):
    """The destination is in use, or contains foreign files."""


class PlanMismatchError(DestinationError, json_name="PlanChanged"):
    """The destination contains another job. `changes` lists the differences."""


class MissingDependencyError(InputError, json_name="MissingExtra"):
    """An optional library is needed. `extra` names the one to install."""


class UserFunctionError(InputError, json_name="FunctionFailed"):
    """The user's function failed. `unit`, `row` and `rows` locate the row, and `traceback` is that of the worker.

    The error that a worker sends contains the pickled exception (`parts`). execution/failures.py turns it into the
    error for callers in Python, which also has the type of the exception.
    """

    def __init__(self, message: str, *, hint: str = "", parts: bytes = b"", **facts: Any) -> None:
        super().__init__(message, hint=hint, **facts)
        self.parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        facts = {**self.facts, "parts": self.parts}
        return _rebuild, (UserFunctionError, self._message, self._hint, facts)


class CommandStartError(InputError, json_name="CommandNotStarted"):
    """The command cannot be started. `code` is the exit code of a shell: 127 not found, 126 not executable."""

    def __init__(self, message: str, *, hint: str = "", **facts: object) -> None:
        super().__init__(message, hint=hint, **facts)
        self.exit_code = self.facts.get("code", 127)


class VerificationError(BrimError, json_name="DamageFound"):
    """A check or verification found damage. `findings` lists it."""

    exit_code = 3


class MemoryLimitError(BrimError, json_name="DoesNotFit"):
    """The work needs more memory than the limit. `need_bytes`, `limit_bytes`."""

    exit_code = 4


class DestinationUnavailableError(BrimError, json_name="SinkFailed"):
    """The destination failed (disk full, connection lost). Finished work is kept."""

    exit_code = 5


class StoppedError(BrimError, json_name="Stopped"):
    """Stopped by a signal or a stop file. Finished work is kept."""

    exit_code = 6


# Names of an earlier version, which still work.
RENAMED = {
    "CommandNotStarted": "CommandStartError",
    "DamageFound": "VerificationError",
    "DoesNotFit": "MemoryLimitError",
    "FilesRefused": "InvalidFilesError",
    "FunctionFailed": "UserFunctionError",
    "MissingExtra": "MissingDependencyError",
    "PlanChanged": "PlanMismatchError",
    "SinkFailed": "DestinationUnavailableError",
    "SourceChanged": "SourceChangedError",
    "Stopped": "StoppedError",
}


def __getattr__(name: str) -> Any:
    if name not in RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import warnings

    warnings.warn(f"brim.errors.{name} is now {RENAMED[name]}.", DeprecationWarning, stacklevel=2)
    return globals()[RENAMED[name]]

"""Functions whose options and result depend on whether they have a destination."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from brim.errors import InputError
from brim.options.declare import declared_options
from brim.options.groups import EngineOptions, HubOptions, JobOptions, StateOptions

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R", covariant=True)
S = TypeVar("S", covariant=True)


class Overloaded(Protocol[P, R, Q, S]):
    """A function with two signatures, for type checkers and editors."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> S: ...


def with_optional_destination(name: str, written: Callable[P, R], cached: Callable[Q, S]) -> Overloaded[P, R, Q, S]:
    """Make one function of two: `written` is called with a destination, `cached` without."""

    @functools.wraps(cached)
    def call(*args: Any, **kwargs: Any) -> Any:
        function: Any = cached if kwargs.get("destination") is None else written
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


def refuse_without_destination(options: JobOptions, *names: str) -> None:
    """Raise for options about publishing, and for those in `names`, because the result stays in the cache."""
    refused = {
        *names,
        *(name for group in (HubOptions, StateOptions, EngineOptions) for name in declared_options(group)),
    }
    for item in options.changed():
        if item.name in refused:
            raise InputError(
                f"{item.spelling} needs a destination: without one, the result stays in brim's cache.",
                hint="Add destination=, or leave it out.",
            )

"""Texts, numbers and switches of the command line without pydantic, which typer loads for them in 0.1 s.

This is the one place that touches private names of typer (`tests/unit/test_private_names.py`). A value that is no
number goes to typer's own way, which knows the words for it; so does everything else, and all of it in a typer that
has no such place.
"""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import typer.core as core

_PLACE = "build_runtime_param"
_PLAIN = (str, bool, int, float)


def take_plain_values() -> None:
    usual = getattr(core, _PLACE, None)
    if usual is None or getattr(usual, "is_plain", False):
        return

    def build(descriptor: Any) -> Any:
        kind = _plain_kind(descriptor)
        return usual(descriptor) if kind is None else _PlainParam(kind, lambda: usual(descriptor))

    build.is_plain = True  # type: ignore[attr-defined]
    setattr(core, _PLACE, build)


def _plain_kind(descriptor: Any) -> Any:
    """str, bool, int, float, or a list of one of them; None where more is to be looked at."""
    kind, about = descriptor.annotation, descriptor.parameter_info
    if get_origin(kind) in (Union, UnionType):
        kinds = [each for each in get_args(kind) if each is not NoneType]
        kind = kinds[0] if len(kinds) == 1 else None
    inner = get_args(kind)[0] if get_origin(kind) is list else kind
    settings = ("min", "max", "parser", "click_type")
    if inner not in _PLAIN or any(getattr(about, name, None) is not None for name in settings):
        return None
    return kind


class _PlainParam:
    """What typer asks to make a value of the words on the line."""

    def __init__(self, kind: Any, usual: Any) -> None:
        self._many = get_origin(kind) is list
        self._kind = get_args(kind)[0] if self._many else kind
        self._usual = usual

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        given = value if self._many else [value]
        if isinstance(given, list | tuple):
            found = [self._one(each) for each in given]
            if None not in found:
                return found if self._many else found[0]
        return self._usual().coerce(value, param, ctx)

    def _one(self, value: Any) -> Any:
        """None if it does not look like one."""
        if self._kind is bool or isinstance(value, self._kind):
            return value if type(value) is self._kind else None
        if not isinstance(value, str) or not value.isascii():
            return None
        try:
            return self._kind(value)
        except ValueError:
            return None

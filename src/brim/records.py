"""`@dataclass` at a quarter of its price: what it generates is generated when it is first used.

The standard decorator compiles up to eight methods for each class, 0.6 ms in Python 3.11: a quarter of a small command,
for classes most of which it never makes an instance of. Here the fields, the slots and the order of the fields are
there at once; `__init__`, `__repr__`, `__eq__` and `__hash__` are the standard ones, made by the standard decorator,
from the first call of any of them on. Type checkers see the standard decorator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, **options):
        """Takes `frozen`, `slots`, `eq`, `repr` and `kw_only`, which mean what they mean in `dataclasses`."""
        return (lambda given: _recorded(given, **options)) if cls is None else _recorded(cls, **options)


def _recorded(
    cls: type[Any],
    *,
    frozen: bool = False,
    slots: bool = False,
    eq: bool = True,
    repr: bool = True,
    kw_only: bool = False,
) -> type[Any]:
    own = frozenset(vars(cls))
    cls.__doc__ = cls.__doc__ or cls.__name__  # or the standard decorator writes the signature there, at its price
    bare = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)
    made: Any = bare(cls)
    if cls.__dict__.get("__hash__") is None:  # Python's own, where there is an __eq__
        own -= {"__hash__"}
    wanted = {"__init__": True, "__repr__": repr, "__eq__": eq, "__hash__": eq and frozen}
    later = [name for name, asked in wanted.items() if asked and name not in own]
    if eq and not frozen and "__hash__" not in own:
        made.__hash__ = None

    def settle(name: str) -> None:
        """Put the standard method in the place of the one that stands for it."""
        fields = dataclasses.fields(made)
        about = [(each.name, object, _again(each)) for each in fields]  # types as texts would be looked at, at a price
        more = {"__doc__": "", **({"__post_init__": None} if hasattr(made, "__post_init__") else {})}
        whole = dataclasses.make_dataclass(
            made.__name__,
            about,
            namespace=more,
            init=name == "__init__",
            repr=name == "__repr__",
            eq=name in ("__eq__", "__hash__"),
            frozen=frozen and name != "__eq__",
        )
        method = vars(whole)[name]
        if name == "__init__":
            method.__annotations__ = {each.name: each.type for each in fields if each.init} | {"return": None}
        method.__qualname__ = f"{made.__qualname__}.{name}"
        setattr(made, name, method)

    for name in later:
        setattr(made, name, _standing_for(name, made, settle))
    made.__signature__ = _Signature(made, settle if "__init__" in later else None)
    if frozen:
        made.__setattr__, made.__delattr__ = _set_frozen, _delete_frozen
        if slots and not {"__getstate__", "__setstate__"} & own:
            made.__getstate__, made.__setstate__ = _state, _set_state
    return made  # type: ignore[no-any-return]


def _standing_for(name: str, made: type[Any], settle: Callable[[str], None]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **keywords: Any) -> Any:
        settle(name)
        return getattr(made, name)(self, *args, **keywords)

    method.__name__, method.__qualname__ = name, f"{made.__qualname__}.{name}"
    return method


class _Signature:
    """What `inspect.signature` finds at a class; gone as soon as it was looked for."""

    def __init__(self, made: Any, settle: Callable[[str], None] | None) -> None:
        self._made, self._settle = made, settle

    def __get__(self, instance: object, owner: type[Any]) -> inspect.Signature:
        if self._settle is not None:
            self._settle("__init__")
        with contextlib.suppress(AttributeError):  # another thread was here
            del self._made.__signature__
        return inspect.signature(owner)


def _again(given: dataclasses.Field[Any]) -> Any:
    about = ("default", "default_factory", "init", "repr", "hash", "compare", "kw_only")
    return dataclasses.field(**{name: getattr(given, name) for name in about})


def _set_frozen(self: Any, name: str, value: object) -> None:
    if _is_frozen(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _delete_frozen(self: Any, name: str) -> None:
    if _is_frozen(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)


def _is_frozen(given: Any, name: str) -> bool:
    """A class that is no dataclass but has one as its base may have more attributes."""
    return "__dataclass_fields__" in vars(type(given)) or name in given.__dataclass_fields__


def _state(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for each, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, each.name, value)

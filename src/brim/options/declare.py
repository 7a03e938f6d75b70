"""Declare an option once: a field of an `Options` dataclass with a type, a default and an `Option`.

The fields become the keyword arguments of a Python function (`takes`), the options of a command (`cli/parser.py`),
their validation, and the tables of the reference docs. A domain class that needs a group of options derives from it or
takes it as it is.

Modules that declare options do not use `from __future__ import annotations`: the types are read at run time. A field
holds what the user gave, checked; where the domain needs another form (bytes of a size), the class has a property.
"""

import difflib
import functools
import inspect
import math
import operator
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args, get_origin

from brim.errors import ArgumentError, InputError
from brim.sizes import parse_count, parse_size
from brim.wording import worded

P = ParamSpec("P")
O = TypeVar("O")  # noqa: E741
R = TypeVar("R")
_AnyOptions = TypeVar("_AnyOptions", bound="Options")


class Option(NamedTuple):
    """What the type and the default of an option do not say."""

    help: str
    metavar: str | None = None
    default: str | None = None  # in words, where the value does not say it
    minimum: float | None = None
    maximum: float | None = None
    flags: tuple[str, ...] = ()  # on the command line, if not --NAME
    argument: bool = False  # by position on the command line
    common: bool = False  # shown by --help; the others by --help-all
    cli: bool = True
    old: tuple[str, ...] = ()  # deprecated names: accepted, not shown
    from_texts: Callable[[list[str]], Any] | None = None  # for an option that may be repeated in the terminal


class Kind(NamedTuple):
    """How a value is checked: `check` returns the value to keep, or raises TypeError, ValueError or InputError."""

    expected: str
    check: Callable[[Any], Any]
    metavar: str | None = None
    from_text: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    is_list: bool = False


def _size(value: Any) -> Any:
    parse_size(value)
    return value


def _names(value: Any) -> tuple[str, ...]:
    names = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(value)
    return names


def _path(value: Any) -> Any:
    path = os.fspath(value)
    if not isinstance(path, str):
        raise TypeError(value)
    return path


def _instance(value: Any, *types: type) -> Any:
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise TypeError(value)
    return value


def _switch(value: Any) -> bool:
    if value not in (True, False):  # 1, 0 and the booleans of NumPy are accepted; a text such as "no" is not
        raise TypeError(value)
    return bool(value)


def _whole_number(value: Any) -> Any:
    if isinstance(value, bool):
        raise TypeError(value)
    return operator.index(value)


def _parse_whole_number(text: str) -> int:
    """Parse 25, -1, 3M, 1e6 or 2,857,545."""
    return -parse_count(text[1:]) if text.startswith("-") else parse_count(text)


def _number(value: Any) -> Any:
    if not math.isfinite(_instance(value, int, float)):
        raise ValueError(value)
    return value


def _unchecked(value: Any) -> Any:
    return value


def split_commas(texts: Iterable[str]) -> tuple[str, ...]:
    """Split names that the terminal gave separated by commas, by several options, or both."""
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


def parse_pairs(texts: Iterable[str]) -> dict[str, str]:
    """Parse NAME=VALUE texts of an option that may be repeated."""
    pairs = [text.partition("=") for text in texts]
    for name, sign, value in pairs:
        if not (name and sign and value):
            raise ValueError(f"NAME=VALUE, not {name + sign + value!r}")
    return {name: value for name, _, value in pairs}


Size = Annotated[str | int | float | None, Kind("a size such as 500MB or 2GB", _size, "SIZE")]
Names = Annotated[Sequence[str], Kind("one or more texts", _names, is_list=True)]
Path = Annotated[str | os.PathLike[str], Kind("a path or an address", _path, "PATH")]
_PLAIN = {
    bool: Kind("True or False", _switch),
    str: Kind("a text", lambda value: _instance(value, str), "TEXT"),
    int: Kind("a whole number", _whole_number, "N", _parse_whole_number),
    float: Kind("a number", _number, "N", float),
}


def _kind_of(annotation: Any) -> Kind:
    """Choose the check for a plain type, a Literal, a class, or one of them or None."""
    members = get_args(annotation) if NoneType in get_args(annotation) else (annotation,)
    types = [member for member in members if member is not NoneType]
    if len(types) != 1 or types[0] is Any:
        return Kind("", _unchecked)
    only = types[0]
    if get_origin(only) is Annotated:
        return next(item for item in get_args(only) if isinstance(item, Kind))
    if get_origin(only) is Literal:
        words = get_args(only)
        expected = " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
        return Kind(expected, lambda value: words[words.index(value)], "|".join(words), choices=words)
    if only in _PLAIN:
        return _PLAIN[only]
    if isinstance(only, type):
        return Kind(f"a brim.{only.__name__}", lambda value: _instance(value, only))
    return Kind("", _unchecked)


class Declared(NamedTuple):
    """One option of an `Options` class, with everything that can be derived from its field."""

    name: str
    kind: Kind
    option: Option
    default: Any  # MISSING if the option is required
    panel: str
    annotation: Any

    @property
    def flags(self) -> tuple[str, ...]:
        """How the terminal spells it; a switch that is on by default is switched off by --no-NAME."""
        if self.option.flags:
            return self.option.flags
        flag = self.name.replace("_", "-")
        if self.is_switch and self.default is None:
            return (f"--{flag}/--no-{flag}",)
        return (f"--no-{flag}",) if self.is_switch and self.default is True else (f"--{flag}",)

    @property
    def is_switch(self) -> bool:
        return self.kind is _PLAIN[bool]

    @property
    def metavar(self) -> str | None:
        return self.option.metavar or self.kind.metavar

    @property
    def spelling(self) -> str:
        """The name in messages, which `wording` shows as `--shard-size` or `shard_size=`."""
        return self.option.metavar or self.name if self.option.argument else self.flags[0].partition("/")[0]

    @property
    def help(self) -> str:
        """The help text with the default, for the terminal and for the docs."""
        default = self.option.default
        if default is None and not isinstance(self.default, bool) and self.default not in (MISSING, None, (), ""):
            default = str(self.default)
        return f"{self.option.help} (default: {default})" if default else self.option.help

    @property
    def short_help(self) -> str:
        """The first sentence of the help text, with the default."""
        _, has_default, default = self.help.partition(" (default: ")
        sentence = self.option.help.partition(". ")[0].rstrip(".")
        return f"{sentence}.{has_default}{default}"

    def check(self, value: Any) -> Any:
        """Return the value to keep, or raise ArgumentError."""
        if value is None and not self.kind.is_list and (self.default is None or NoneType in get_args(self.annotation)):
            return None
        try:
            kept = self.kind.check(value)
        except (TypeError, ValueError, OverflowError, InputError) as error:
            raise self.refused(value) from error
        low, high = self.option.minimum, self.option.maximum
        if (low is not None and kept < low) or (high is not None and kept > high):
            raise self.refused(value)
        return kept

    def refused(self, value: Any) -> ArgumentError:
        expected, low, high = self.kind.expected, self.option.minimum, self.option.maximum
        if low is not None and high is not None:
            expected = f"a number from {low} to {high}"
        elif low is not None:
            number = "a number" if isinstance(value, int) or self.kind is not _PLAIN[int] else "a whole number"
            expected = f"{number} above zero" if low == 1 else f"{number} of at least {low}"
        spelling = f"{self.name}=" if self.is_switch or not self.option.cli else self.spelling
        return ArgumentError(f"{spelling} takes {expected}, not {value!r}.", option=self.name.replace("_", "-"))

    def parse(self, given: Any) -> Any:
        """Turn what the terminal gave (a text, several texts, or True for a switch) into a value for Python."""
        if self.is_switch:
            return given if self.default is None else not self.default
        try:
            if self.option.from_texts is not None:
                return self.option.from_texts(list(given))
            if self.kind.is_list or not isinstance(given, str):
                return tuple(given)
            return self.kind.from_text(given)
        except (ValueError, InputError) as error:
            if isinstance(error, InputError) or self.kind.from_text is not str:
                raise self.refused(given if isinstance(given, str) else ",".join(given)) from error
            raise ArgumentError(f"{self.spelling} takes {error}.", option=self.name.replace("_", "-")) from error


class Options:
    """Base of every class of options: a frozen dataclass whose fields are checked when an object is made.

    A class may have `check_options`, for rules between options. The checks of all its bases run.
    """

    _panel = ""

    def __init_subclass__(cls, panel: str = "") -> None:
        super().__init_subclass__()
        cls._panel = panel

    def __post_init__(self) -> None:
        for name, declared in declared_options(type(self)).items():
            given = getattr(self, name)
            kept = declared.check(given)
            if kept is not given:
                object.__setattr__(self, name, kept)
        for base in reversed(type(self).__mro__):
            if "check_options" in vars(base):
                vars(base)["check_options"](self)

    def only(self, group: type[_AnyOptions]) -> _AnyOptions:
        """Return the options of one group: for a worker, a fingerprint, or a function that needs no more."""
        return group(**self.values(group))

    def values(self, group: type["Options"] | None = None) -> dict[str, Any]:
        """Return the values by name: all, or those of one group."""
        return {name: getattr(self, name) for name in declared_options(group or type(self))}

    def changed(self, group: type["Options"] | None = None) -> list[Declared]:
        """List the options whose value is not the default."""
        options = declared_options(group or type(self)).values()
        # A required value may be a table, which cannot be compared with a default.
        return [i for i in options if i.default is not MISSING and getattr(self, i.name) != _kept_default(i)]


def shared_values(kind: type[Options], options: Options) -> dict[str, Any]:
    """Return the values that an options object has for another class: for its constructor."""
    return {name: getattr(options, name) for name in declared_options(kind) if hasattr(options, name)}


def _kept_default(declared: Declared) -> Any:
    return () if declared.kind.is_list and declared.default is None else declared.default


_declared: dict[Any, dict[str, Declared]] = {}


def declared_options(kind: type[Options]) -> dict[str, Declared]:
    """List the options of a class by name, in the order of its fields."""
    if kind in _declared:
        return _declared[kind]
    annotations: dict[str, tuple[Any, str]] = {}
    for base in reversed(kind.__mro__):
        for name, annotation in vars(base).get("__annotations__", {}).items():
            annotations[name] = annotation, vars(base).get("_panel", "")
    declared = {}
    for field in fields(kind):  # type: ignore[arg-type]
        annotation, panel = annotations[field.name]
        details = annotation.__metadata__ if get_origin(annotation) is Annotated else ()
        option = next((item for item in details if isinstance(item, Option)), None)
        if option is None:
            continue  # a field of a domain class that no user sets
        given_kind = next((item for item in details if isinstance(item, Kind)), None)
        found = given_kind or _kind_of(annotation.__origin__)
        declared[field.name] = Declared(field.name, found, option, field.default, panel, annotation.__origin__)
    _declared[kind] = declared
    return declared


def old_names(kind: type[Options]) -> dict[str, str]:
    """Map deprecated names to the present ones."""
    return {old: item.name for item in declared_options(kind).values() for old in item.option.old}


def warn_deprecated(text: str) -> None:
    """Emit a DeprecationWarning that points to the caller's code, outside of brim."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("brim."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, DeprecationWarning, stacklevel=level)


def make_options(kind: type[_AnyOptions], function: str, args: Sequence[Any], keywords: dict[str, Any]) -> _AnyOptions:
    """Make the options of a call from Python. An unknown or missing keyword is a TypeError, as for any function."""
    known, renamed = declared_options(kind), old_names(kind)
    for name in [name for name in keywords if name not in known]:
        if name in renamed:
            if renamed[name] in keywords:
                raise TypeError(f"{function}() got both {name!r} and {renamed[name]!r}, which are the same")
            warn_deprecated(f"{name}= is now {renamed[name]}=.")
            keywords[renamed[name]] = keywords.pop(name)
            continue
        close = difflib.get_close_matches(name, known, 1)
        hint = f". Did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
    try:
        return kind(*args, **keywords)
    except TypeError as error:
        text = str(error).replace(f"{kind.__name__}.__init__()", f"{function}()")
        # Python counts `self` too.
        counts = r"takes (?:from )?(?:\d+ to )?\d+ positional arguments? but \d+ (?:were|was) given"
        text = re.sub(counts, lambda match: re.sub(r"\d+", lambda n: str(int(n[0]) - 1), match[0]), text)
        raise TypeError(text) from None


def takes(kind: Callable[P, O], name: str = "") -> Callable[[Callable[[O], R]], Callable[P, R]]:
    """Give a function of one options object the signature of that object's class, and a docstring with every option.

    Errors call the function by its name, or by `name`.
    """

    def decorate(function: Callable[[O], R]) -> Callable[P, R]:
        options: Any = kind

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(make_options(options, name or function.__name__, args, kwargs))

        call.__signature__ = signature_of(options, function)  # type: ignore[attr-defined]
        call.__doc__ = document(function.__doc__ or "", options)
        del call.__wrapped__
        call.options = options  # type: ignore[attr-defined]
        return call

    return decorate


def signature_of(kind: type[Options], function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature that editors, notebooks and `help` show."""
    positional: list[inspect.Parameter] = []
    keyword: list[inspect.Parameter] = []
    by_name = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for item in declared_options(kind).values():
        default = inspect.Parameter.empty if item.default is MISSING else item.default
        is_keyword = by_name[item.name].kw_only
        place = inspect.Parameter.KEYWORD_ONLY if is_keyword else inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameter = inspect.Parameter(item.name, place, default=default, annotation=_plain_type(item.annotation))
        (keyword if is_keyword else positional).append(parameter)
    result = function.__annotations__.get("return", inspect.Parameter.empty)
    return inspect.Signature([*positional, *keyword], return_annotation=result)


def _plain_type(annotation: Any) -> Any:
    """Return a type without what only the checks need."""
    types = [get_args(each)[0] if get_origin(each) is Annotated else each for each in get_args(annotation)]
    return functools.reduce(operator.or_, types) if NoneType in types else annotation


def document(text: str, kind: type[Options]) -> str:
    """Insert an Args section before the first section of a docstring, with options named as in Python."""
    helps = {
        item.name: worded(item.help).replace("DEST", "destination").replace("SOURCE", "source")
        for item in _positional_first(kind)
        if item.option.help
    }
    lines = [f"        {name}: {text}" for name, text in helps.items()]
    section = "\n".join(["    Args:", *lines, "", ""])
    for heading in ("    Returns:", "    Raises:", "    Examples:"):
        before, found, after = text.partition(heading)
        if found:
            return f"{before}{section}{found}{after}"
    return f"{text.rstrip()}\n\n{section}"


def _positional_first(kind: type[Options]) -> list[Declared]:
    keywords = {field.name for field in fields(kind) if field.kw_only}  # type: ignore[arg-type]
    return sorted(declared_options(kind).values(), key=lambda item: item.name in keywords and not item.option.argument)


def options_table(kind: type[Options], in_python: Collection[str] | None = None) -> Iterator[str]:
    """Yield the lines of a Markdown table of the options, for the reference docs; `in_python` are those of Python."""
    yield "| option | Python | meaning |"
    yield "|---|---|---|"
    for item in _positional_first(kind):
        terminal = item.spelling if item.option.argument else ", ".join(item.flags)
        metavar = "" if item.is_switch or item.option.argument else f" {item.metavar}"
        shown = f"`{terminal}{metavar}`".replace("|", "\\|") if item.option.cli else ""
        name = f"`{item.name}`" if in_python is None or item.name in in_python else ""
        yield f"| {shown} | {name} | {item.help.replace('|', chr(92) + '|')} |"


def choose_one(options: Options, *names: str) -> None:
    """Refuse two options that exclude each other."""
    declared = declared_options(type(options))
    given = [item for name in names if (item := declared[name]) and getattr(options, name) != _kept_default(item)]
    if len(given) > 1:
        raise InputError(f"{given[0].spelling} cannot be used with {given[1].spelling}.", hint="Leave out one of them.")

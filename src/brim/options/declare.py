"""Declare an option once: a field of an `Options` dataclass with a type, a default and an `Option`.

The fields become the keyword arguments of a Python function (`takes`), the options of a command (`cli/parser.py`),
their validation, and the tables of the reference docs. A domain class that needs a group of options derives from it or
takes it as it is.

Modules that declare options do not use `from __future__ import annotations`: the types are read at run time. A field
holds the checked value that the user passed; where the domain needs another form (the bytes of a size), the class has a
property.
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
from brim.wording import terminal_text, worded

P = ParamSpec("P")
O = TypeVar("O")  # noqa: E741
R = TypeVar("R")
_AnyOptions = TypeVar("_AnyOptions", bound="Options")

LEVELS, LOGS, LIVE, PARTS = "When to warn, stop and kill", "Logs", "Live page", "In parts, on many machines"
CHAT = "Chats"
BIDS, HUB, STORES = "BIDS datasets and recipes", "Hugging Face Hub", "Object stores (s3://, gs://, az://)"
# The groups of options in the order in which help pages, signatures and docs show them.
PANELS = (
    *("", "Function", "Tokens", CHAT, "Model", "Vectors", "Source", BIDS, "Output"),
    *("Run", LEVELS, LOGS, LIVE, PARTS, HUB, STORES),
)


class Option(NamedTuple):
    """The properties of an option that its type and default do not express."""

    help: str
    metavar: str | None = None
    default: str | None = None  # in words, where the value does not express it
    minimum: float | None = None
    maximum: float | None = None
    flags: tuple[str, ...] = ()  # on the command line, if not --NAME
    argument: bool = False  # by position on the command line
    common: bool = False  # shown by --help; the others by --help-all
    cli: bool = True
    old: str = ""  # a deprecated name, which is accepted and not shown
    from_texts: Callable[[list[str]], Any] | None = None  # for an option that may be repeated in the terminal
    python: str | None = ""  # what Python accepts in addition; None: Python's docstring leaves the option out


Argument = functools.partial(Option, argument=True)
Common = functools.partial(Option, common=True)
PythonOnly = functools.partial(Option, cli=False)


class Kind(NamedTuple):
    """How a value is checked: `check` returns the value to store, or raises TypeError, ValueError or InputError."""

    expected: str
    check: Callable[[Any], Any]
    metavar: str | None = None
    from_text: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    is_list: bool = False


def _check_size(value: Any) -> Any:
    parse_size(value)
    return value


def text_tuple(value: Any) -> tuple[str, ...]:
    """Return one text or several as a tuple; None becomes an empty tuple."""
    texts = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(value)
    return texts


def check_type(value: Any, *types: type) -> Any:
    """Return a value of one of the types; a boolean is not a number."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise TypeError(value)
    return value


def _check_switch(value: Any) -> bool:
    if value not in (True, False):  # 1, 0 and the booleans of NumPy are accepted; a text such as "no" is not
        raise TypeError(value)
    return bool(value)


def _check_whole_number(value: Any) -> Any:
    if isinstance(value, bool):
        raise TypeError(value)
    return operator.index(value)


def _parse_whole_number(text: str) -> int:
    """Parse 25, -1, 3M, 1e6 or 2,857,545."""
    return -parse_count(text[1:]) if text.startswith("-") else parse_count(text)


def _check_number(value: Any) -> Any:
    if not math.isfinite(check_type(value, int, float)):
        raise ValueError(value)
    return value


def split_commas(texts: Iterable[str]) -> tuple[str, ...]:
    """Split names that the terminal passed separated by commas, by several options, or both."""
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


def parse_pairs(texts: Iterable[str]) -> dict[str, str]:
    """Parse NAME=VALUE texts of an option that may be repeated."""
    pairs = [text.partition("=") for text in texts]
    for name, sign, value in pairs:
        if not (name and sign and value):
            raise ValueError(f"NAME=VALUE, not {name + sign + value!r}")
    return {name: value for name, _, value in pairs}


Size = Annotated[str | int | float | None, Kind("a size such as 500MB or 2GB", _check_size, "SIZE")]
Names = Annotated[Sequence[str], Kind("one or more texts", text_tuple, is_list=True)]
Path = Annotated[
    str | os.PathLike[str], Kind("a path or an address", lambda value: check_type(os.fspath(value), str), "PATH")
]
_PLAIN = {
    bool: Kind("True or False", _check_switch),
    str: Kind("a text", lambda value: check_type(value, str), "TEXT"),
    int: Kind("a whole number", _check_whole_number, "N", _parse_whole_number),
    float: Kind("a number", _check_number, "N", float),
}


def _kind_of(annotation: Any) -> Kind:
    """Choose the check for a plain type, a Literal, a class, or one of them or None."""
    members = get_args(annotation) if NoneType in get_args(annotation) else (annotation,)
    types = [member for member in members if member is not NoneType]
    only = types[0] if len(types) == 1 else Any
    if get_origin(only) is Annotated:
        return next(item for item in get_args(only) if isinstance(item, Kind))
    if get_origin(only) is Literal:
        choices = get_args(only)
        expected = " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)
        return Kind(expected, lambda value: choices[choices.index(value)], "|".join(choices), choices=choices)
    if only in _PLAIN:
        return _PLAIN[only]
    if isinstance(only, type) and only is not Any:
        return Kind(f"a brim.{only.__name__}", lambda value: check_type(value, only))
    return Kind("", lambda value: value)


class Declared(NamedTuple):
    """One option of an `Options` class, with everything that can be derived from its field."""

    name: str
    kind: Kind
    option: Option
    default: Any  # MISSING if the option is required
    panel: str
    annotation: Any
    is_keyword: bool  # in Python

    @property
    def flags(self) -> tuple[str, ...]:
        """How the terminal spells it; a switch that is on by default is switched off by --no-NAME."""
        flag = self.name.replace("_", "-")
        if self.is_switch and self.default is None:
            return self.option.flags or (f"--{flag}/--no-{flag}",)
        return self.option.flags or ((f"--no-{flag}",) if self.is_negated else (f"--{flag}",))

    @property
    def is_switch(self) -> bool:
        return self.kind is _PLAIN[bool]

    @property
    def is_negated(self) -> bool:
        return self.is_switch and self.default is True

    @property
    def is_multiple(self) -> bool:
        """Whether the terminal may repeat it."""
        return self.kind.is_list or self.option.from_texts is not None

    @property
    def metavar(self) -> str | None:
        return self.option.metavar or self.kind.metavar

    @property
    def spelling(self) -> str:
        """The name in messages, such as `--shard-size`; `wording` shows it to callers from Python as `shard_size=`."""
        return self.option.metavar or self.name if self.option.argument else self.flags[0].partition("/")[0]

    @property
    def empty_default(self) -> Any:
        """The default as `check` returns it."""
        return () if self.kind.is_list and self.default is None else self.default

    def _with_default(self, text: str) -> str:
        default = self.option.default
        if default is None and not isinstance(self.default, bool) and self.default not in (MISSING, None, (), ""):
            default = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        return f"{text} (default: {default})" if default else text

    @property
    def help(self) -> str:
        """The help text with the default, for the terminal and for the tables of the docs."""
        text = terminal_text(self.option.help)
        if self.is_negated and self.option.cli and not self.option.flags:
            text = f"Do not {text[0].lower()}{text[1:]}"
        repeated = " May be repeated." if self.is_multiple and not self.option.argument else ""
        return self._with_default(text + repeated)

    @property
    def short_help(self) -> str:
        """The first sentence of the help text, with the default."""
        return self._with_default(f"{terminal_text(self.option.help).partition('. ')[0].rstrip('.')}.")

    @property
    def python_help(self) -> str:
        """The help text for a docstring; empty if the function's docstring leaves the option out."""
        if self.option.python is None or not self.option.help:
            return ""
        return self._with_default(f"{self.option.help} {self.option.python}".rstrip())

    def check(self, value: Any) -> Any:
        """Return the value to store, or raise ArgumentError."""
        if value is None and not self.kind.is_list and (self.default is None or NoneType in get_args(self.annotation)):
            return None
        low, high = self.option.minimum, self.option.maximum
        try:
            checked = self.kind.check(value)
        except (TypeError, ValueError, OverflowError, InputError) as error:
            raise self.refused(value) from error
        if (low is not None and checked < low) or (high is not None and checked > high):
            raise self.refused(value)
        return checked

    def refused(self, value: Any) -> ArgumentError:
        expected, low, high = self.kind.expected, self.option.minimum, self.option.maximum
        if low is not None and high is not None:
            expected = f"a number from {low} to {high}"
        elif low is not None:
            number = "a number" if isinstance(value, int) or self.kind is not _PLAIN[int] else "a whole number"
            expected = f"{number} above zero" if low == 1 else f"{number} of at least {low}"
        return self._error(f"{expected}, not {value!r}")

    def _error(self, expected: str) -> ArgumentError:
        spelling = f"{self.name}=" if self.is_switch or not self.option.cli else self.spelling
        return ArgumentError(f"{spelling} takes {expected}.", option=self.name.replace("_", "-"))

    def parse(self, typed: Any) -> Any:
        """Turn what the user typed (a text, several texts, or True for a switch) into a value for Python."""
        if self.is_switch:
            return typed if self.default is None else not self.default
        try:
            if self.option.from_texts is not None:
                return self.option.from_texts(list(typed))
            if self.kind.is_list or not isinstance(typed, str):
                return tuple(typed)
            return self.kind.from_text(typed)
        except (ValueError, InputError) as error:
            if isinstance(error, InputError) or self.kind.from_text is not str:
                raise self.refused(typed if isinstance(typed, str) else ",".join(typed)) from error
            raise self._error(str(error)) from error


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
            value = getattr(self, name)
            checked = declared.check(value)
            if checked is not value:
                object.__setattr__(self, name, checked)
        for base in reversed(type(self).__mro__):
            if "check_options" in vars(base):
                vars(base)["check_options"](self)

    def only(self, group: type[_AnyOptions]) -> _AnyOptions:
        """Return the options of one group: for a worker, a fingerprint, or a function that needs no more."""
        return group(**self.values(group))

    def values(self, group: type["Options"] | None = None) -> dict[str, Any]:
        """Return the values by name: all, or those of one group."""
        return {name: getattr(self, name) for name in declared_options(group or type(self))}

    def changed(self, *groups: type["Options"]) -> list[Declared]:
        """List the options whose value is not the default: those of the given groups, or all."""
        options = [item for group in groups or (type(self),) for item in declared_options(group).values()]
        # Required options are left out: they have no default, and their value may be a table, which cannot be compared.
        return [i for i in options if i.default is not MISSING and getattr(self, i.name) != i.empty_default]


def shared_values(kind: type[Options], options: Options) -> dict[str, Any]:
    """Return the values that an options object has for another class: for its constructor."""
    return {name: getattr(options, name) for name in declared_options(kind) if hasattr(options, name)}


_declared: dict[Any, dict[str, Declared]] = {}


def _sort_key(item: Declared) -> tuple[bool | int, ...]:
    if not item.is_keyword:
        return (False,)
    return True, not item.option.argument, PANELS.index(item.panel), not item.option.common


def declared_options(kind: type[Options]) -> dict[str, Declared]:
    """List the options of a class by name: positional ones first, then by panel, in each the common ones first."""
    if kind in _declared:
        return _declared[kind]
    annotations: dict[str, tuple[Any, str]] = {}
    for base in reversed(kind.__mro__):
        for name, annotation in vars(base).get("__annotations__", {}).items():
            annotations[name] = annotation, vars(base).get("_panel", "")
    options = []
    for field in fields(kind):  # type: ignore[arg-type]
        annotation, panel = annotations[field.name]
        details = annotation.__metadata__ if get_origin(annotation) is Annotated else ()
        option = next((item for item in details if isinstance(item, Option)), None)
        if option is None:
            continue  # a field of a domain class that no user sets
        plain = annotation.__origin__
        own_kind = next((item for item in details if isinstance(item, Kind)), None)
        options.append(
            Declared(
                field.name, own_kind or _kind_of(plain), option, field.default, panel, plain, field.kw_only is True
            )
        )
    options.sort(key=_sort_key)
    _declared[kind] = {item.name: item for item in options}
    return _declared[kind]


def old_names(kind: type[Options]) -> dict[str, str]:
    """Map deprecated names to the present ones."""
    return {item.option.old: item.name for item in declared_options(kind).values() if item.option.old}


def warn_deprecated(text: str) -> None:
    """Emit a DeprecationWarning that points to the code that calls brim."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("brim."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, DeprecationWarning, stacklevel=level)


def make_options(kind: type[_AnyOptions], function: str, args: Sequence[Any], keywords: dict[str, Any]) -> _AnyOptions:
    """Make the options of a call from Python. An unknown or missing keyword is a TypeError, as for any function."""
    declared, renamed = declared_options(kind), old_names(kind)
    for name in [name for name in keywords if name not in declared]:
        if name in renamed:
            if renamed[name] in keywords:
                raise TypeError(f"{function}() got both {name!r} and {renamed[name]!r}, which are the same")
            warn_deprecated(f"{name}= is now {renamed[name]}=.")
            keywords[renamed[name]] = keywords.pop(name)
            continue
        close = difflib.get_close_matches(name, declared, 1)
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
    """Return the signature that editors, notebooks and `help` show, without the types that only the checks need."""
    parameters = []
    for item in declared_options(kind).values():
        types = [get_args(each)[0] if get_origin(each) is Annotated else each for each in get_args(item.annotation)]
        annotation = functools.reduce(operator.or_, types) if NoneType in types else item.annotation
        default = inspect.Parameter.empty if item.default is MISSING else item.default
        position = inspect.Parameter.KEYWORD_ONLY if item.is_keyword else inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(item.name, position, default=default, annotation=annotation))
    return inspect.Signature(
        parameters, return_annotation=function.__annotations__.get("return", inspect.Signature.empty)
    )


_ARGUMENTS = ("SOURCE", "DATASET", "DEST")  # names of arguments that help texts mention


def python_helps(kind: type[Options]) -> dict[str, str]:
    """Return the help texts for Python by name, with options and arguments named as in Python."""
    options = declared_options(kind).values()
    arguments = {item.option.metavar: f"`{item.name}`" for item in options if item.option.metavar in _ARGUMENTS}
    texts = {item.name: worded(item.python_help) for item in options if item.python_help}
    return {
        name: re.sub(r"\b[A-Z]+\b", lambda word: arguments.get(word[0], word[0]), text) for name, text in texts.items()
    }


def document(text: str, kind: type[Options]) -> str:
    """Insert an Args section before the first section of a docstring."""
    lines = [f"        {name}: {meaning}" for name, meaning in python_helps(kind).items()]
    section = "\n".join(["    Args:", *lines, "", ""])
    for heading in ("    Returns:", "    Raises:", "    Examples:"):
        before, separator, after = text.partition(heading)
        if separator:
            return f"{before}{section}{heading}{after}"
    return f"{text.rstrip()}\n\n{section}"


def options_table(kind: type[Options], in_python: Collection[str] | None = None) -> Iterator[str]:
    """Yield the lines of a Markdown table of the options, for the reference docs.

    Without `in_python`, the table is for a function of Python; with it, for a command, and lists which of the options
    the Python function has too.
    """
    yield "| option | Python | meaning |"
    yield "|---|---|---|"
    texts = python_helps(kind)
    for item in declared_options(kind).values():
        if in_python is not None and not item.option.cli:
            continue
        terminal = item.spelling if item.option.argument else ", ".join(item.flags)
        metavar = "" if item.is_switch or item.option.argument else f" {item.metavar}"
        shown = f"`{terminal}{metavar}`" if item.option.cli else ""
        name = f"`{item.name}`" if in_python is None or item.name in in_python else ""
        meaning = texts.get(item.name, "As in `datasets`.") if in_python is None else item.help
        yield " | ".join(["", *(text.replace("|", "\\|") for text in (shown, name, meaning)), ""]).strip()


def choose_one(options: Options, *names: str) -> None:
    """Refuse two options that exclude each other."""
    declared = [declared_options(type(options))[name] for name in names]
    changed = [item for item in declared if getattr(options, item.name) != item.empty_default]
    if len(changed) > 1:
        raise InputError(
            f"{changed[0].spelling} cannot be used with {changed[1].spelling}.", hint="Leave out one of them."
        )

"""Send a user's function to workers: by the name it is imported under, or by cloudpickle.

A function of a real module travels as `module:name`, with the caller's `sys.path`, so that the worker runs the
code that is on disk. Everything else (lambdas, closures, notebooks, scripts without a main guard) is pickled by
value. Not covered: whether a function changed since the last run, which is in function_digest.py.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import os
import pickle
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from brim.compute.steps.module_source import globals_by_text, is_singledispatch
from brim.errors import InputError
from brim.extras import missing
from brim.records import dataclass

_FROM_FILE = "_brim_file_"
_FUNCTION = re.compile(
    r"(?:.+\.py|.*/.*|[^\W\d]\w*(?:\.\w+)*):[^\W\d]\w*(?:\.\w+)*", re.DOTALL
)  # FILE or MODULE, function


def load_function(reference: str) -> Callable[..., Any]:
    """Load the function that `pkg.module:function` or `path/to/file.py:function` names."""
    module_name, _, name = reference.rpartition(":")
    if not _FUNCTION.fullmatch(reference):
        raise InputError(
            f"{reference!r} does not name a function.",
            hint="Write the function to a file and name both: steps.py:function, or package.module:function.",
        )
    add_working_folder()
    by_file = module_name.endswith(".py") or os.sep in module_name
    module = _file_module(Path(module_name)) if by_file else _module(module_name)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            names = ", ".join(sorted(n for n in vars(module) if callable(vars(module)[n]) and n[0] != "_")[:8])
            raise InputError(
                f"{module_name} has no {name!r}.",
                hint=f"It has: {names}." if names else "It defines no functions.",
            )
        target = getattr(target, part)
    if not callable(target):
        raise InputError(f"{reference} is a {type(target).__name__}, not a function.")
    return target  # type: ignore[no-any-return]


def add_working_folder() -> None:
    """Make modules in the current folder importable, regardless of how brim was started."""
    if (folder := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)


def _module(name: str) -> types.ModuleType:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise InputError(
                f"No module named {error.name!r}.",
                hint="Run brim from the folder that has the module, or name the file: path/to/file.py:function.",
            ) from error
        raise _broken(name, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(name, error) from error


def _file_module(path: Path) -> types.ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise InputError(f"The file {path} does not exist.", hint="Name the file and the function: steps.py:function.")
    name = _FROM_FILE + path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # modules next to it can be imported, but do not hide installed ones
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _broken(path.name, error) from error
    return module


def _broken(name: str, error: BaseException) -> InputError:
    last = traceback.format_exception_only(error)[-1].strip()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    frames = [f for f in frames if f.filename != __file__]
    location = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError):
        location = f"{error.filename}, line {error.lineno}"
    return InputError(f"{name} cannot be imported: {last}" + (f" ({location})." if location else "."))


_LRU_CACHE = type(functools.cache(len))  # the class has no public name


@dataclass(frozen=True, slots=True)
class Shipped:
    """A function for workers: a name to import, or a pickle, and the caller's import path."""

    name: str
    reference: str | None
    blob: bytes | None
    sys_path: tuple[str, ...]
    cwd: str

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> Shipped:
        """Pack a function; an InputError names the part that cannot be pickled."""
        reference = _reference(function)
        blob = None if reference else pack(function, "The function")
        cwd = os.getcwd()
        sys_path = tuple(dict.fromkeys(entry or cwd for entry in sys.path))
        return cls(name_of(function), reference, blob, sys_path, cwd)

    def load(self) -> Callable[..., Any]:
        """Load the function in this process, with the caller's import path."""
        sys.path[:] = dict.fromkeys([*self.sys_path, *sys.path])
        if os.path.isdir(self.cwd) and os.getcwd() != self.cwd:
            os.chdir(self.cwd)
        if self.reference is not None:
            return load_function(self.reference)
        return unpack(self.blob or b"", self.name)  # type: ignore[no-any-return]


class AtEnd(functools.partial):  # type: ignore[type-arg]
    """A partial function whose arguments follow those of the call: the split, after the row and its number."""

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        return self.func(*args, *self.args, **{**self.keywords, **keywords})


def name_of(function: Any) -> str:
    """Return the name of a function for messages."""
    if isinstance(function, AtEnd):
        return name_of(function.func)
    if isinstance(function, functools.partial):
        return f"partial({name_of(function.func)})"
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _reference(function: Any) -> str | None:
    """Return `module:name` if another process can import it, else None."""
    module_name, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(name, str) or module_name in ("__main__", "__mp_main__"):
        return None
    module = sys.modules.get(module_name)
    target: Any = module
    for part in name.split("."):
        target = getattr(target, part, None)
    if module is None or target is not function or getattr(module, "__spec__", None) is None:
        return None
    if module_name.startswith(_FROM_FILE):
        return f"{module.__file__}:{name}"
    return f"{module_name}:{name}"


def pack(value: Any, subject: str) -> bytes:
    """Pickle a value; functions and classes of scripts and notebooks are pickled by value."""
    cloudpickle = _cloudpickle()
    own = [m for n, m in list(sys.modules.items()) if n.startswith(_FROM_FILE)]
    for module in own:  # nothing can import these under their names
        cloudpickle.register_pickle_by_value(module)
    try:
        return _dumps(value, cloudpickle)
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        culprit = _culprit(value, cloudpickle)
        reason = f"{culprit} cannot be sent to another process" if culprit else str(error)
        raise InputError(
            f"{subject} cannot travel to the workers: {reason}.",
            hint="Make it inside the function (once, in a global or an attribute), or pass the values that it needs.",
        ) from error


def unpack(blob: bytes, name: str) -> Any:
    """Load a pickle made by `pack`."""
    _cloudpickle()
    try:
        return pickle.loads(blob)
    except ModuleNotFoundError as error:
        raise InputError(
            f"The workers cannot import {error.name!r}, which {name} needs.",
            hint="Put it where Python finds modules (PYTHONPATH, or an installed package).",
        ) from error
    except AttributeError as error:
        if "Can't get attribute" not in str(error):
            raise
        missing_name = str(error).partition("'")[2].partition("'")[0]
        raise InputError(
            f"{name} uses {missing_name!r} of the script, which cannot be sent to another process.",
            hint="Move it to a separate module, and import it.",
        ) from error


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError as error:
        raise missing("compute", "Sending a function to workers needs cloudpickle.", "cloudpickle") from error
    return cloudpickle


def _dumps(value: Any, cloudpickle: Any) -> bytes:
    """Pickle by value, including `functools` wrappers of functions of a script, which cloudpickle only names."""

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, functools.cached_property):
                state = {name: part for name, part in vars(obj).items() if name != "lock"}  # a lock in Python 3.11
                return functools.cached_property, (obj.func,), state
            if isinstance(obj, _LRU_CACHE) and not _is_importable(obj):
                options = obj.cache_parameters()
                return _Cached.empty, (options["maxsize"], options["typed"]), obj.__wrapped__, None, None, _Cached.fill
            if is_singledispatch(obj) and not _is_importable(obj):
                empty = functools.partial(functools.singledispatch, _no_result)
                return empty, (), dict(obj.registry), None, None, _fill_singledispatch
            reduced = super().reducer_override(obj)
            if isinstance(obj, types.FunctionType) and isinstance(reduced, tuple) and len(reduced) == 6:
                reduced[2][1]["__globals__"].update(globals_by_text(obj))
            return reduced

    file = io.BytesIO()
    Pickler(file, protocol=cloudpickle.DEFAULT_PROTOCOL).dump(value)
    return file.getvalue()


def _is_importable(function: Any) -> bool:
    reference = _reference(function)
    return reference is not None and not str(function.__module__).startswith(_FROM_FILE)


class _Cached:
    """A cached function that is made before its function is unpickled, since functions may be recursive."""

    def __init__(self) -> None:
        self.function: Callable[..., Any] | None = None

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        assert self.function is not None
        return self.function(*args, **keywords)

    @classmethod
    def empty(cls, maxsize: int | None, typed: bool) -> Any:
        return functools.lru_cache(maxsize, typed)(cls())

    @staticmethod
    def fill(cached: Any, function: Callable[..., Any]) -> None:
        cached.__wrapped__.function = function
        functools.update_wrapper(cached, function)


def _no_result(*args: Any) -> None:
    return None


def _fill_singledispatch(function: Any, registry: dict[type, Callable[..., Any]]) -> None:
    for kind, implementation in registry.items():
        function.register(kind, implementation)
    functools.update_wrapper(function, registry[object])


def _culprit(value: Any, cloudpickle: Any) -> str:
    """Describe the deepest part that cannot be pickled."""
    visited: set[int] = set()
    location, current = "", value
    for _ in range(8):
        visited.add(id(current))
        for description, part in _parts(current):
            if id(part) not in visited and not _travels(part, cloudpickle):
                location, current = (f"{description} of {location}" if location else description), part
                break
        else:
            break
    return f"{location} (a {type(current).__module__}.{type(current).__qualname__})" if location else ""


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield "the function", value.func
        yield from ((f"argument {number}", part) for number, part in enumerate(value.args))
        yield from ((f"the argument {name!r}", part) for name, part in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield "the object", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f"the variable {name!r}", cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        yield from ((f"the default {part!r}", part) for part in value.__defaults__ or ())
        names = [n for n in value.__code__.co_names if n in value.__globals__]
        yield from ((f"the global {name!r}", value.__globals__[name]) for name in names)
    elif isinstance(value, dict):
        yield from ((f"the item {key!r}", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"item {number}", part) for number, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType):
        yield from ((f"the attribute {name!r}", part) for name, part in vars(value).items())


def _travels(value: Any, cloudpickle: Any) -> bool:
    try:
        _dumps(value, cloudpickle)
    except Exception:  # noqa: BLE001  the user's own code decides what this raises
        return False
    return True

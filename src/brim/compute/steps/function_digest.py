"""Compute a fingerprint of a function: the same in every process and after lines moved, another if its code changes.

It covers the bytecode with its constants, defaults, closure values, and used globals: functions and classes of the
user's modules recursively, plain values and arrays by content, libraries by name and version. `a.b.f` is followed
through modules to `f`; a module that is used as a value counts as a whole. It does not cover file names, line numbers,
modules that are imported by a name made at run time (`importlib`), or data that a function reads when it runs (files,
environment variables). Another version of Python gives another fingerprint.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from brim.compute.steps.module_source import (
    UsedSource,
    globals_by_text,
    is_installed,
    is_singledispatch,
    own_file,
    resolve_import,
)
from brim.records import dataclass

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_BUILTIN_CALLS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)
_NOT_CONTENT = {
    "__module__", "__dict__", "__weakref__", "__doc__", "__qualname__", "__firstlineno__", "__static_attributes__",
    "__annotations__", "__slots__", "__abstractmethods__", "_abc_impl", "__dataclass_params__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__classcell__",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Digest:
    """A fingerprint. `stable` is False if a part could not be hashed by content, so that another run may differ."""

    value: str
    stable: bool
    unstable_parts: tuple[str, ...] = ()


def function_digest(function: Any) -> Digest:
    """Compute the fingerprint of a function, or of its arguments."""
    hasher = _Hasher()
    value = hasher.digest(function).hex()
    return Digest(value[:32], not hasher.unstable, tuple(hasher.unstable))


def iterator_digest(source: Any) -> str | None:
    """Compute the fingerprint of a function, generator or object that yields rows; None if unknown."""
    if isinstance(source, types.GeneratorType) and source.gi_frame is not None:
        code, around = source.gi_code, source.gi_frame.f_locals
        cells = tuple(types.CellType(around[name]) if name in around else types.CellType() for name in code.co_freevars)
        function = types.FunctionType(code, source.gi_frame.f_globals, closure=cells)
        return function_digest((function, {name: around[name] for name in sorted(around)})).value
    if isinstance(source, str | os.PathLike | list | tuple | Iterator):
        return None
    if type(source).__module__.partition(".")[0] in ("brim", "datasets", "pandas", "polars", "pyarrow"):
        return None
    return function_digest(source).value


class _Hasher:
    def __init__(self) -> None:
        self.unstable: list[str] = []
        self._digests: dict[int, tuple[Any, bytes]] = {}  # keeps the objects too, so that no id is reused
        self._open: list[int] = []

    def digest(self, value: Any) -> bytes:
        if type(value) in _PLAIN:
            return _hash(type(value).__name__.encode(), repr(value).encode("utf-8", "surrogatepass"))
        if (cached := self._digests.get(id(value))) is not None:
            return cached[1]
        if id(value) in self._open:
            return _hash(b"again", str(self._open.index(id(value))).encode())
        self._open.append(id(value))
        try:
            value_digest = _hash(*self._parts(value))
        finally:
            self._open.pop()
        self._digests[id(value)] = (value, value_digest)
        return value_digest

    def _parts(self, value: Any) -> Iterable[bytes]:
        if is_singledispatch(value):
            kinds = ((self.digest(kind) + self.digest(function)) for kind, function in value.registry.items())
            return [b"singledispatch", *sorted(kinds)]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if isinstance(value, type):
            return self._class(value)
        if type(value) in (list, tuple):
            if all(type(item) in _PLAIN for item in value):
                return [type(value).__name__.encode(), repr(value).encode("utf-8", "surrogatepass")]
            return [type(value).__name__.encode(), *map(self.digest, value)]
        if type(value) in (set, frozenset):
            return [type(value).__name__.encode(), *sorted(map(self.digest, value))]
        if type(value) is dict:  # in order, which may matter to the function
            return [b"dict", *(self.digest(key) + self.digest(item) for key, item in value.items())]
        return self._special_parts(value) or self._object(value)

    def _special_parts(self, value: Any) -> list[bytes] | None:
        """Return the parts of objects whose pickles are too specific, or too vague; None for others."""
        if isinstance(value, functools.partial):
            return [b"partial", *map(self.digest, (value.func, value.args, value.keywords))]
        if isinstance(value, types.MethodType):
            return [b"method", self.digest(value.__func__), self.digest(value.__self__)]
        if isinstance(value, staticmethod | classmethod):
            return [type(value).__name__.encode(), self.digest(value.__func__)]
        if isinstance(value, functools.cached_property):
            return [b"cached property", self.digest(value.func)]
        if isinstance(value, property):
            return [b"property", *map(self.digest, (value.fget, value.fset, value.fdel))]
        if isinstance(value, _BUILTIN_CALLS):
            owner = getattr(value, "__self__", None)
            bound = owner is not None and not isinstance(owner, types.ModuleType)
            name = f"{getattr(value, '__module__', '')}.{value.__qualname__}".encode()
            return [b"builtin", name, self.digest(owner) if bound else b""]
        if isinstance(value, re.Pattern):
            return [b"pattern", self.digest(value.pattern), str(value.flags).encode()]
        if isinstance(value, enum.Enum):
            return [b"enum", type(value).__qualname__.encode(), value.name.encode(), self.digest(value.value)]
        if isinstance(value, logging.Logger):
            return [b"logger", value.name.encode()]
        if isinstance(value, os.PathLike):
            return [b"path", os.fsencode(value)]
        if isinstance(value, types.MappingProxyType):
            return [b"dict", self.digest(dict(value))]
        if hasattr(value, "cache_info") and hasattr(value, "__wrapped__"):
            return [b"cached", self.digest(value.__wrapped__)]
        return self._array(value) or self._tokenizer(value)

    def _array(self, value: Any) -> list[bytes] | None:
        import numpy as np

        if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor of torch
            value = value.detach().cpu()
            value = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
        if isinstance(value, np.dtype):
            return [b"dtype", str(value).encode()]
        if not isinstance(value, np.ndarray | np.generic):
            return None
        kind = (
            []
            if type(value).__module__ == "numpy" and type(value) is not np.matrix
            else [type(value).__name__.encode()]
        )
        if isinstance(value, np.ma.MaskedArray):
            return [b"array", *kind, *map(self.digest, (value.data, np.ma.getmaskarray(value), value.fill_value))]
        if value.dtype.hasobject:
            return [b"array", *kind, str(value.shape).encode(), self.digest(value.tolist())]
        array = np.ascontiguousarray(value)
        return [b"array", *kind, str(array.dtype).encode(), str(value.shape).encode(), array.tobytes()]

    def _tokenizer(self, value: Any) -> list[bytes] | None:
        """Return the parts of a tokenizer without its state (truncation, padding, caches)."""
        inner = getattr(value, "backend_tokenizer", None)
        if type(value).__module__.partition(".")[0] == "tokenizers" and hasattr(value, "to_str"):
            return [b"tokenizer", value.to_str().encode()]
        if inner is None or not hasattr(inner, "to_str"):
            return None
        body = json.loads(inner.to_str())
        body.pop("truncation", None), body.pop("padding", None)
        return [b"tokenizer", type(value).__qualname__.encode(), json.dumps(body, sort_keys=True).encode(),
                self.digest(getattr(value, "init_kwargs", None))]  # fmt: skip

    def _function(self, function: types.FunctionType) -> Iterator[bytes]:
        yield b"function"
        if _is_library(function.__module__):
            yield _library(function.__module__)
            yield function.__qualname__.encode()
            if not function.__closure__:
                return
        yield self.digest(function.__code__)
        yield self.digest(function.__defaults__)
        yield self.digest(function.__kwdefaults__)
        if attributes := {name: value for name, value in vars(function).items() if name != "__wrapped__"}:
            yield self.digest(attributes)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield name.encode()
            try:
                content = cell.cell_contents
            except ValueError:
                yield b"empty"
                continue
            if not _is_own_module(content):  # the user's modules are followed below
                yield self.digest(content)
        if not _is_library(function.__module__):
            for name, value in _values_used(function):
                yield name.encode()
                yield self.digest(value)
            for name, code in _imports_used(function):
                yield name.encode()
                yield b"" if code is None else self.digest(code)

    def _module(self, module: types.ModuleType) -> Iterator[bytes]:
        """Yield the parts of a module that is used as a value: any of its functions may be called."""
        yield b"module"
        yield _library(module.__name__)
        if not _is_own_module(module):
            return
        try:
            source = inspect.getsource(module)
            yield self.digest(compile(source, "module", "exec", dont_inherit=True))
        except (OSError, TypeError, SyntaxError, ValueError):
            pass  # it has no file
        for name, value in sorted(vars(module).items()):
            if isinstance(value, types.FunctionType | type) and value.__module__ == module.__name__:
                yield name.encode()
                yield self.digest(value)

    def _code(self, code: types.CodeType) -> Iterator[bytes]:
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        yield repr((b"code", counts)).encode()
        yield code.co_code
        yield code.co_exceptiontable
        yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)).encode()
        yield from (self.digest(const) for const in code.co_consts)

    def _class(self, cls: type) -> Iterator[bytes]:
        yield b"class"
        yield cls.__qualname__.encode()
        if _is_library(cls.__module__):
            yield _library(cls.__module__)
            return
        yield from (self.digest(base) for base in cls.__bases__)
        if not _is_library(type(cls).__module__):
            yield self.digest(type(cls))
        for name in sorted(vars(cls)):
            if name not in _NOT_CONTENT and not isinstance(vars(cls)[name], types.MemberDescriptorType):
                yield name.encode()
                yield self.digest(vars(cls)[name])

    def _object(self, value: Any) -> list[bytes]:
        """Return the parts of an object's pickle, hashed separately, so that sets have no order."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001  the object's own code
            return self._pickled(value)
        if isinstance(reduced, str):
            return [b"object", self.digest(type(value)), reduced.encode()]
        parts = [b"object", self.digest(type(value)), self.digest(reduced[0]), self.digest(reduced[1])]
        if len(reduced) > 2:
            parts.append(self.digest(reduced[2]))
        for items in reduced[3:5]:
            parts.append(b"" if items is None else self.digest(list(items)))
        return parts

    def _pickled(self, value: Any) -> list[bytes]:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        try:
            import cloudpickle

            blob = cloudpickle.dumps(value)
            if cloudpickle.dumps(cloudpickle.loads(blob)) == blob:
                return [b"pickle", name.encode(), blob]
        except Exception:  # noqa: BLE001  the object's own code, or no cloudpickle
            pass
        self.unstable.append(name)
        return [b"unstable", name.encode()]


def _hash(*parts: Any) -> bytes:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _is_own_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and not _is_library(value.__name__)


_MISSING = "a name that is not there"


def _values_used(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Return the globals and enclosing variables that a function uses, by the names in its code.

    `a.b.f` is followed through the user's modules: its value is `f`, or `a.b` if the module itself is used.
    """
    around = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    values = globals_by_text(function)
    for code in _codes(function.__code__):
        steps = list(dis.get_instructions(code))
        for number, step in enumerate(steps):
            name = step.argval
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and name in function.__globals__:
                value = function.__globals__[name]
            elif step.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF") and name in around:
                try:
                    value = around[name].cell_contents
                except ValueError:
                    continue
                if not _is_own_module(value):
                    continue  # hashed with the closure
            else:
                continue
            for following in steps[number + 1 :]:
                if following.opname not in ("LOAD_ATTR", "LOAD_METHOD") or not _is_own_module(value):
                    break
                name = f"{name}.{following.argval}"
                value = vars(value).get(following.argval, _MISSING)
            values[name] = value
    return sorted(values.items(), key=lambda item: item[0])


def _imports_used(function: types.FunctionType) -> list[tuple[str, types.CodeType | None]]:
    """Return what a function imports when it runs: libraries with their version, the code of the user's modules.

    Modules are found but not loaded, because the result must not depend on what is already imported.
    """
    own, imports = UsedSource(), list[tuple[str, types.CodeType | None]]()
    package = str(function.__globals__.get("__package__") or "")
    names = {name for inner in _codes(function.__code__) for name in inner.co_names}
    for code in _codes(function.__code__):
        steps = list(dis.get_instructions(code))
        for number, step in enumerate(steps):
            if step.opname != "IMPORT_NAME":
                continue
            level, names_imported = steps[number - 2].argval, steps[number - 1].argval
            module = resolve_import(step.argval, level if isinstance(level, int) else 0, package)
            top, version = module.partition(".")[0], module
            with contextlib.suppress(Exception):  # broken metadata
                version = module if own_file(top) else f"{module}=={importlib.metadata.version(top)}"
            imports.append((version, None))
            own.add_import(module, names_imported if isinstance(names_imported, tuple) else None, names)
    return [*sorted(imports), *own.codes()]


@functools.cache
def _is_library(module_name: str | None) -> bool:
    """Return whether a module is installed or part of Python, so that its version identifies its code."""
    if module_name in (None, "__main__", "__mp_main__"):
        return False
    module = sys.modules.get(module_name.partition(".")[0]) if module_name else None
    if module is None:
        return False
    if module.__name__.startswith("_brim_file_"):
        return False
    path = getattr(module, "__file__", None)
    if path is None:
        return getattr(module, "__spec__", None) is not None
    return is_installed(path)


@functools.cache
def _library(module_name: str) -> bytes:
    """Return a library's name and version; only the name for the user's and Python's modules."""
    top = module_name.partition(".")[0]
    version = getattr(sys.modules.get(top), "__version__", None)
    if not isinstance(version, str):
        try:
            version = importlib.metadata.version(top)
        except Exception:  # noqa: BLE001  broken metadata is not our matter
            version = ""
    return f"{module_name}=={version}".encode()

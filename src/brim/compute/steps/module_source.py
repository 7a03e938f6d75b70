"""Find the statements of the user's modules that a function uses, without importing them.

Importing a module only to hash it would take time and memory, and the result must not depend on whether it is imported
already. So the statements that bind the used names are found in its source, with everything that they use, in other
modules of the user too. Statements that bind nothing, such as calls, count as used. Unused functions and comments do
not count.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import field
from typing import Any

from brim.records import dataclass


def is_installed(path: str) -> bool:
    """Return whether a file belongs to Python or to an installed package, whose version identifies its code."""
    real = os.path.realpath(path)
    if "site-packages" in real or "dist-packages" in real:
        return True
    paths = sysconfig.get_paths()
    return any(real.startswith(os.path.realpath(paths[kind]) + os.sep) for kind in ("stdlib", "platstdlib"))


def own_file(module: str) -> str | None:
    """Return the source file of a user's module; None for libraries and missing modules."""
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    if inner:
        bases = [os.path.join(folder, *inner) for folder in spec.submodule_search_locations or []]
        files = [base + end for base in bases for end in (".py", os.sep + "__init__.py")]
    else:
        files = [spec.origin] if spec.origin is not None and spec.has_location else []
    source_file = next((file for file in files if file.endswith(".py") and os.path.isfile(file)), None)
    return None if source_file is None or is_installed(source_file) else source_file


@dataclass(slots=True)
class _Module:
    """A module of the user: its statements, the names that are needed (None: all), and the used statements."""

    package: str
    statements: list[ast.stmt]
    needed: set[str] | None = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)  # attributes that used statements access


class UsedSource:
    """The used statements of the user's modules, starting from the imports of a function."""

    def __init__(self) -> None:
        self._modules: dict[str, _Module | None] = {}
        self._visited: set[tuple[str, frozenset[str]]] = set()  # modules may import each other

    def add_import(self, module: str, names: tuple[str, ...] | None, attributes: set[str]) -> None:
        """Follow `import module`, or `from module import names`. `attributes` are all names that the code uses."""
        parts = module.split(".")
        for length in range(1, len(parts) + 1):  # importing a module runs the packages that it is in
            parent, is_last = ".".join(parts[:length]), length == len(parts)
            if not is_last:
                self._want(parent, attributes)
            elif names is None:
                self._want(parent, attributes, is_value=True)
            elif "*" in names:
                self._want(parent, None)
            else:
                self._want(parent, set(names))
                for name in names:
                    if own_file(f"{parent}.{name}") is not None:
                        self._want(f"{parent}.{name}", attributes, is_value=True)

    def _want(self, name: str, names: set[str] | None, *, is_value: bool = False) -> None:
        """Mark names of a module as needed. `is_value`: all of them, if none of its names is used."""
        module = self._open(name)
        if module is None or (module.needed is None and module.used):
            return
        bound_names = {each for statement in module.statements for each in _bound(statement)}
        if names is None or module.needed is None or (is_value and not names & bound_names):
            module.needed = None
        else:
            module.needed |= names & bound_names
        self._take(module)

    def _open(self, name: str) -> _Module | None:
        if name not in self._modules:
            self._modules[name] = None
            if (file := own_file(name)) is not None:
                try:
                    with open(file, "rb") as source:
                        statements = ast.parse(source.read()).body
                except (SyntaxError, ValueError):
                    return None  # the worker reports the error
                package = name if os.path.basename(file) == "__init__.py" else name.rpartition(".")[0]
                self._modules[name] = _Module(package, statements)
        return self._modules[name]

    def _take(self, module: _Module) -> None:
        """Mark statements that bind a needed name, and those that they need, until nothing changes."""
        before = -1
        while before != len(module.used):
            before = len(module.used)
            for number, statement in enumerate(module.statements):
                if number in module.used or not _is_used(statement, module.needed):
                    continue
                module.used.add(number)
                used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
                attributes = {node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
                module.attributes |= attributes | used
                if module.needed is not None:
                    module.needed |= used
        for number in sorted(module.used):
            for node in ast.walk(module.statements[number]):
                if isinstance(node, ast.Import):
                    for alias in node.names:
                        self._follow(alias.name, None, module)
                elif isinstance(node, ast.ImportFrom):
                    target = resolve_import(node.module or "", node.level, module.package)
                    self._follow(target, tuple(alias.name for alias in node.names), module)

    def _follow(self, target: str, names: tuple[str, ...] | None, module: _Module) -> None:
        step = (f"{target} {names}", frozenset(module.attributes))
        if step not in self._visited:
            self._visited.add(step)
            self.add_import(target, names, module.attributes)

    def codes(self) -> Iterator[tuple[str, types.CodeType]]:
        """Yield the module and the code of each used statement, in an order that moving lines does not change."""
        for name in sorted(self._modules):
            module = self._modules[name]
            for number in sorted(() if module is None else module.used):
                assert module is not None
                tree = ast.Module([module.statements[number]], [])
                yield name, compile(tree, "module", "exec", dont_inherit=True)


def resolve_import(module: str, level: int, package: str) -> str:
    """Return the full name of a module that is imported relative to a package."""
    if not level:
        return module
    base = package.rsplit(".", level - 1)[0] if level > 1 else package
    return f"{base}.{module}" if module else base


def _is_used(statement: ast.stmt, needed: set[str] | None) -> bool:
    """Return whether a statement binds a needed name, or has another effect when the module is imported."""
    bound = _bound(statement)
    if bound or needed is None:
        return needed is None or "*" in bound or bool(bound & needed)
    if isinstance(statement, ast.If):  # `if __name__ == "__main__"` is for scripts
        return "__name__" not in {node.id for node in ast.walk(statement.test) if isinstance(node, ast.Name)}
    return not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a module binds or changes, outside of functions and classes."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    names: set[str] = set()
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.stmt):
            names |= _bound(node)
        elif isinstance(node, ast.ExceptHandler):
            names |= {name for inner in node.body for name in _bound(inner)}
        else:
            names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and _is_target(each, statement)}
    return names


def _is_target(name: ast.Name, statement: ast.stmt) -> bool:
    """Return whether a statement assigns a name, or changes its value (`NAMES["a"] = 1`)."""
    if isinstance(name.ctx, ast.Store | ast.Del):
        return True
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    return any(target is not None and name in ast.walk(target) for target in targets)


def is_singledispatch(value: object) -> bool:
    """Return whether a function was made by `functools.singledispatch`."""
    parts = ("registry", "dispatch", "register")
    return isinstance(value, types.FunctionType) and all(hasattr(value, part) for part in parts)


def globals_by_text(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals that a function may reach by a text: `globals()["K"]`, `eval("K + 1")`."""
    codes, values = [function.__code__], dict[str, Any]()
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    if not {"globals", "eval", "exec"} & {name for code in codes for name in code.co_names}:
        return values
    for text in (const for code in codes for const in code.co_consts if isinstance(const, str)):
        names = (name for name in re.findall(r"[^\W\d]\w*", text) if name in function.__globals__)
        values.update((name, function.__globals__[name]) for name in names)
    return values

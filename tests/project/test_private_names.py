"""Private names of other libraries are used in one module each, and exist in the installed version."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import brim

SOURCE = Path(brim.__file__).parent
ADAPTERS = {
    "huggingface_hub": "storage/hub_private.py",
    "datasets": "sources/datasets_private.py",
    "ray": "execution/ray_private.py",
    "pyarrow": "block_pandas.py",
    "torch": "loader/torch_private.py",
}
STANDARD = {"_exit", "_Hash", "_typeshed"}  # private names of Python's standard library
ASKING = {"getattr", "setattr", "hasattr", "delattr"}
Found = tuple[int, str, bool]  # line, name, and whether it is an attribute of `self`


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def parts(dotted: str | None) -> list[str]:
    return (dotted or "").split(".")


def touched(tree: ast.AST) -> Iterator[Found]:
    """Return private names that are imported from other modules or read from an object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names, own = [part for alias in node.names for part in parts(alias.name)], False
        elif isinstance(node, ast.ImportFrom):
            names, own = [*parts(node.module), *(alias.name for alias in node.names)], False
        elif isinstance(node, ast.Attribute):
            names, own = [node.attr], is_own(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKING:
            requested = node.args[1] if len(node.args) > 1 else None
            names = (
                [requested.value] if isinstance(requested, ast.Constant) and isinstance(requested.value, str) else []
            )
            own = is_own(node.args[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names, own = [p for a in node.args if isinstance(a, ast.Constant) for p in parts(str(a.value))], False
        else:
            continue
        yield from ((node.lineno, name, own) for name in names if is_private(name))


def defined(tree: ast.AST) -> Iterator[str]:
    """Return names that a module of brim defines: functions, classes, variables, attributes of `self`, slots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


@functools.cache
@functools.cache
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


@functools.cache
def own_names() -> frozenset[str]:
    """Return the private names that brim defines in modules other than the adapters."""
    outside = (tree for name, tree in trees().items() if name not in ADAPTERS.values())
    return frozenset(name for tree in outside for name in defined(tree)) | STANDARD


def strangers(tree: ast.AST) -> list[str]:
    """Return private names that a module uses and that brim does not define, or that belong to an adapter."""
    adapted = {name for listed in NAMES.values() for name in listed}
    return [
        f"line {line}: {name}"
        for line, name, of_self in touched(tree)
        if name not in own_names() or (name in adapted and not of_self)
    ]


def dataset() -> Any:
    return importlib.import_module("datasets").Dataset.from_dict({"n": [1]})


def stream() -> Any:
    return dataset().to_iterable_dataset()


def formatted() -> Any:
    """Return the step of a stream that decodes its rows for the next one, which renames a column."""
    return stream().rename_column("n", "m")._ex_iterable.ex_iterable


def operation() -> Any:
    hub = importlib.import_module("huggingface_hub")
    return hub.CommitOperationAdd(path_in_repo="a", path_or_fileobj=b"")


def module(name: str) -> Callable[[], Any]:
    return lambda: importlib.import_module(name)


# For each library, its private names and the objects that have them.
NAMES: dict[str, dict[str, Callable[[], Any]]] = {
    "huggingface_hub": {
        "_http": module("huggingface_hub.utils"),
        "_GLOBAL_CLIENT_FACTORY": module("huggingface_hub.utils._http"),
        "_upload_mode": operation,
        "_should_ignore": operation,
        "_is_uploaded": operation,
    },
    "datasets": {
        "_indices": dataset,
        "_fingerprint": dataset,
        "_token_per_repo_id": stream,
        "_resolve_features": stream,
        "_formatting": stream,
        "_ex_iterable": stream,
        "_info": stream,
        "_features": formatted,
    },
    "ray": {"_private": module("ray")},
    "pyarrow": {"_pandas_api": module("pyarrow.lib")},
    "torch": {"_utils": module("torch.utils.data")},
}
# Names without an underscore that are reached through a private name or compared with one.
BEHIND = {
    "huggingface_hub": [("huggingface_hub.utils._http", "default_client_factory")],
    "datasets": [
        ("datasets.iterable_dataset", name)
        for name in ("_rename_columns_fn", "identity_func", "add_column_fn", "FormattedExamplesIterable")
    ],
    "ray": [
        ("ray._private.services", "get_ray_address_from_environment"),
        ("ray._private.worker", "print_to_stdstream"),
    ],
    "pyarrow": [],
    "torch": [("torch.utils.data._utils.collate", "default_collate_fn_map")],
}


def test_private_names_have_one_place() -> None:
    """A private name of another library is used only in the adapter of that library."""
    actual = {module: strangers(tree) for module, tree in trees().items() if module not in ADAPTERS.values()}
    assert not {module: names for module, names in actual.items() if names}


@pytest.mark.parametrize(
    "code",
    [
        "from huggingface_hub.utils._http import get_session",
        "import ray._raylet",
        "def f(d): return d._fingerprint",
        "def f(d): return hasattr(d, '_indices')",
        "import pyarrow as pa\npa.lib._pandas_api",
        "def f(d): return d._never_heard_of",
        "import importlib\nimportlib.import_module('ray._private.services')",
    ],
)
def test_another_place_is_found(code: str) -> None:
    """Each way to use a private name is detected in a module other than an adapter."""
    assert strangers(ast.parse(code))


@pytest.mark.parametrize("library", ADAPTERS)
def test_list_is_whole(library: str) -> None:
    """The list below contains exactly the names that the adapter uses."""
    tree = trees()[ADAPTERS[library]]
    assert {name for _, name, _ in touched(tree)} - set(defined(tree)) == set(NAMES[library])


@pytest.mark.parametrize("library", ADAPTERS)
def test_private_names_are_there(library: str) -> None:
    """The installed version of a library has every private name that its adapter uses."""
    installed = pytest.importorskip(library, reason=f"{library} is not installed")
    removed = [name for name, owner in NAMES[library].items() if not hasattr(owner(), name)]
    removed += [
        f"{destination}.{name}"
        for destination, name in BEHIND[library]
        if not hasattr(importlib.import_module(destination), name)
    ]
    version = getattr(installed, "__version__", "?")
    assert not removed, f"{library} {version} has no longer {', '.join(removed)}: see src/brim/{ADAPTERS[library]}"

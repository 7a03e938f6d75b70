"""pyarrow without pandas: it imports pandas at its first array where it is installed, for 35 MB and 0.3 s.

The command line and workers that run nothing of the user's have no use for it. In a process of the user, pyarrow goes
without it until the user imports it. This is also the one place that touches a private name of pyarrow
(`tests/project/test_private_names.py`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _NoPandas:
    """Hides pandas, from one thread or from all."""

    def __init__(self, thread: int | None = None) -> None:
        self._thread = thread

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas" and self._thread in (None, threading.get_ident()):
            raise ModuleNotFoundError("this process of brim does without pandas", name=name)


def do_without_pandas() -> None:
    """Nothing in this process can import it."""
    sys.meta_path.insert(0, _NoPandas())


class _Noticed:
    """Finds pandas when somebody imports it after all, and tells pyarrow."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != "pandas":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
                _ask_pyarrow()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def postpone_pandas() -> None:
    """pyarrow looks for pandas once: let it find none, until it is imported by whoever wants it."""
    import pyarrow as pa

    if "pandas" in sys.modules or any(isinstance(finder, _Noticed) for finder in sys.meta_path):
        return
    blocked = _NoPandas(threading.get_ident())
    sys.meta_path.insert(0, blocked)
    try:
        pa.array([None])
    finally:
        sys.meta_path.remove(blocked)
    sys.meta_path.insert(0, _Noticed())


def _ask_pyarrow() -> None:
    """Asked for pandas itself, it looks again."""
    import pyarrow as pa

    shim = getattr(pa.lib, "_pandas_api", None)
    if shim is not None:
        shim.pd  # noqa: B018

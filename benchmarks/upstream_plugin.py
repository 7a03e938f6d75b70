"""A pytest plugin for upstream.py that puts brim's functions in place of methods of `datasets`.

It is loaded into the tests of a checkout of `datasets`. Only calls from outside of that library go to brim; its
internal calls are unchanged. With BRIM_UPSTREAM=original nothing is replaced, and calls are only counted.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

CALLS = re.compile(r"\.(map|filter|push_to_hub)\(")
# Internals that a test inspects but callers do not use: cache files, mocks, private names.
INSIDE = re.compile(r"cache_file|\bpatch\(|[Mm]ock|(?<!self)\._(?!_)[a-z]\w*|set_caching_enabled|CACHE_DIRECTORY")
_HUB = os.environ.get("BRIM_UPSTREAM_HUB", "")
_replace = os.environ["BRIM_UPSTREAM"] == "brim"
_seen: dict[str, dict[str, Any]] = {}
_called: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
    import datasets

    for kind in ("Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict"):
        for name in ("map", "filter", "push_to_hub"):
            _put(getattr(datasets, kind), name)
    if _replace:
        _hide_manifests()


def pytest_collection() -> None:
    """Point tests at the local Hub, before test modules are imported and copy the address."""
    hub = sys.modules.get("tests.fixtures.hub")
    if hub is None or not _HUB:
        return
    for name, value in vars(hub).items():
        if isinstance(value, str) and value.startswith(hub.CI_HUB_ENDPOINT) and name != "CI_HUB_ENDPOINT":
            setattr(hub, name, value.replace(hub.CI_HUB_ENDPOINT, _HUB))
    hub.CI_HUB_ENDPOINT = _HUB


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    remaining = []
    for item in items:
        source = inspect.getsource(item.function)  # type: ignore[attr-defined]
        if CALLS.search(source):
            _seen[item.nodeid] = {"inside": sorted(set(INSIDE.findall(source))), "outcome": "", "why": "it did not run"}
            remaining.append(item)
    items[:] = remaining


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    _called.clear()
    try:
        return (yield)
    finally:
        _seen[item.nodeid]["called"] = sorted(_called)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    observed = _seen[report.nodeid]
    if report.outcome != "passed":
        observed |= {"outcome": report.outcome, "why": _last_line(report)}
    elif report.when == "call":
        observed |= {"outcome": "passed", "why": ""}


def pytest_runtest_logfinish() -> None:
    """Write results after each test, so that a test that hangs loses none."""
    with open(os.environ["BRIM_UPSTREAM_OUT"], "w") as file:
        json.dump(_seen, file)


def _last_line(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr)[:600]


def _put(kind: type, name: str) -> None:
    original = getattr(kind, name)

    def called(self: Any, *arguments: Any, **options: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.split(".")[0] == "datasets":
            return original(self, *arguments, **options)
        _called.add(f"{kind.__name__}.{name}")
        if not _replace:
            return original(self, *arguments, **options)
        return _function(name)(self, *arguments, **options)

    called.__name__ = name
    called.__doc__ = original.__doc__
    setattr(kind, name, called)


def _function(name: str) -> Callable[..., Any]:
    import brim

    actual: Callable[..., Any] = getattr(brim, name)
    # brim creates private repositories, but most of these tests load them as another user.
    return functools.partial(_public, actual) if name == "push_to_hub" else actual


def _public(push: Callable[..., Any], *arguments: Any, private: bool | None = None, **options: Any) -> Any:
    return push(*arguments, private=bool(private), **options)


def _hide_manifests() -> None:
    """Remove the manifest that brim adds for each split from listings, because most tests of push_to_hub compare all
    files."""
    from huggingface_hub import HfApi

    original = HfApi.list_repo_files

    def listed(self: Any, *arguments: Any, **options: Any) -> list[str]:
        return [name for name in original(self, *arguments, **options) if not name.startswith(".brim/")]

    HfApi.list_repo_files = listed  # type: ignore[method-assign]

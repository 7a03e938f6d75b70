"""brim builds datasets that are bigger than memory, under a memory limit that you set.

    import brim

    table = brim.files("scans")         # or brim.bids("ds004884"), brim.table(df_or_path, files=["image"])
    plan = brim.plan(table, "out", memory="2GB")
    print(plan)
    plan.run()
    brim.verify("out", "scans")

The public names are listed in `__init__.pyi`. Each is loaded when it is first used, so that `import brim` is quick and
imports nothing optional.
"""

from __future__ import annotations

__version__ = "0.1.0"

# Names of an earlier version, which still work; those of errors are in `brim.errors`.
_RENAMED = {
    "Build": "BuildPlan",
    "Built": "BuildResult",
    "Cached": "CacheEntry",
    "Computed": "MapResult",
    "Outcome": "UnitStats",
    "PartDone": "PartResult",
    "ShardedRows": "ShardedTensor",
    "Unpacked": "UnpackResult",
    "Verified": "VerifyResult",
}
_modules: dict[str, str] = {}  # of each public name, once one was used


def _public_modules() -> dict[str, str]:
    """Read which module each public name comes from."""
    if not _modules:
        with open(f"{__path__[0]}/__init__.pyi", encoding="utf-8") as stub:
            for line in stub:
                if line.startswith("from "):
                    _, module, _, name, *_ = line.split()
                    _modules[name] = module
    return _modules


def __getattr__(name: str) -> object:
    if name == "__all__":
        return sorted([*_public_modules(), "__version__"])
    if name.startswith("__"):  # asked for by the import system and by `inspect`
        raise AttributeError(f"module 'brim' has no attribute {name!r}")
    from importlib import import_module

    current = name
    if name not in _public_modules():
        renamed = _RENAMED | import_module("brim.errors").RENAMED
        if name not in renamed:
            raise AttributeError(f"module 'brim' has no attribute {name!r}")
        import warnings

        current = renamed[name]
        warnings.warn(f"brim.{name} is now brim.{current}.", DeprecationWarning, stacklevel=2)
    value = getattr(import_module(_public_modules()[current]), current)
    if name == current:
        globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_public_modules(), "__version__"])

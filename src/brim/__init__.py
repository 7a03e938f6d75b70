"""brim builds datasets that are bigger than memory, under a memory limit that you set.

    import brim

    table = brim.files("scans")         # or brim.bids("ds004884"), brim.table(df_or_path, files=["image"])
    plan = brim.plan(table, "out", memory="2GB")
    print(plan)
    plan.run()
    brim.verify("out", "scans")

Names are loaded when they are first used, so that `import brim` is quick and pulls in nothing optional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from brim.api import bids as bids
    from brim.api import build as build
    from brim.api import files as files
    from brim.api import plan as plan
    from brim.api import table as table
    from brim.dropin.map import map as map
    from brim.dropin.push import push_to_hub as push_to_hub
    from brim.engine.check import check as check
    from brim.engine.forecast import forecast as forecast
    from brim.engine.unpack import unpack as unpack
    from brim.engine.verify import verify as verify
    from brim.errors import BrimError as BrimError
    from brim.memory.release import release as release
    from brim.memory.watch.watching import watch as watch
    from brim.memory.why import why as why
    from brim.tensors.reader import open_tensors as open_tensors
    from brim.tensors.save import save_file as save_file
    from brim.tensors.writer import TensorWriter as TensorWriter

_HOMES = {
    "BrimError": "brim.errors",
    "TensorWriter": "brim.tensors.writer",
    "bids": "brim.api",
    "build": "brim.api",
    "check": "brim.engine.check",
    "files": "brim.api",
    "forecast": "brim.engine.forecast",
    "map": "brim.dropin.map",
    "open_tensors": "brim.tensors.reader",
    "plan": "brim.api",
    "push_to_hub": "brim.dropin.push",
    "release": "brim.memory.release",
    "save_file": "brim.tensors.save",
    "table": "brim.api",
    "unpack": "brim.engine.unpack",
    "verify": "brim.engine.verify",
    "watch": "brim.memory.watch.watching",
    "why": "brim.memory.why",
}

__all__ = [
    "BrimError",
    "TensorWriter",
    "__version__",
    "bids",
    "build",
    "check",
    "files",
    "forecast",
    "map",
    "open_tensors",
    "plan",
    "push_to_hub",
    "release",
    "save_file",
    "table",
    "unpack",
    "verify",
    "watch",
    "why",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'brim' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

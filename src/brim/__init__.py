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
    from brim.api.build_api import bids as bids
    from brim.api.build_api import build as build
    from brim.api.build_api import dataset as dataset
    from brim.api.build_api import files as files
    from brim.api.build_api import plan as plan
    from brim.api.build_api import select as select
    from brim.api.build_api import table as table
    from brim.api.dataset_rows_api import concatenate_datasets as concatenate_datasets
    from brim.api.dataset_rows_api import flatten_indices as flatten_indices
    from brim.api.dataset_rows_api import shuffle as shuffle
    from brim.api.dataset_rows_api import sort as sort
    from brim.api.dataset_rows_api import train_test_split as train_test_split
    from brim.api.datasets_api import map as map
    from brim.api.datasets_api import push_to_hub as push_to_hub
    from brim.api.forecast_api import forecast as forecast
    from brim.errors import BrimError as BrimError
    from brim.jobs.check_dataset import check as check
    from brim.jobs.dataset_info import info as info
    from brim.jobs.unpack import unpack as unpack
    from brim.jobs.verify import verify as verify
    from brim.memory.release import release as release
    from brim.oom.why import why as why
    from brim.tensors.save_tensors import save_file as save_file
    from brim.tensors.tensor_reader import open_tensors as open_tensors
    from brim.tensors.tensor_writer import TensorWriter as TensorWriter
    from brim.watching.watching import watch as watch

_HOMES = {
    "BrimError": "brim.errors",
    "TensorWriter": "brim.tensors.tensor_writer",
    "bids": "brim.api.build_api",
    "build": "brim.api.build_api",
    "check": "brim.jobs.check_dataset",
    "concatenate_datasets": "brim.api.dataset_rows_api",
    "dataset": "brim.api.build_api",
    "files": "brim.api.build_api",
    "flatten_indices": "brim.api.dataset_rows_api",
    "forecast": "brim.api.forecast_api",
    "info": "brim.jobs.dataset_info",
    "map": "brim.api.datasets_api",
    "open_tensors": "brim.tensors.tensor_reader",
    "plan": "brim.api.build_api",
    "push_to_hub": "brim.api.datasets_api",
    "release": "brim.memory.release",
    "save_file": "brim.tensors.save_tensors",
    "select": "brim.api.build_api",
    "shuffle": "brim.api.dataset_rows_api",
    "sort": "brim.api.dataset_rows_api",
    "table": "brim.api.build_api",
    "train_test_split": "brim.api.dataset_rows_api",
    "unpack": "brim.jobs.unpack",
    "verify": "brim.jobs.verify",
    "watch": "brim.watching.watching",
    "why": "brim.oom.why",
}

__all__ = [
    "BrimError",
    "TensorWriter",
    "__version__",
    "bids",
    "build",
    "check",
    "concatenate_datasets",
    "dataset",
    "files",
    "flatten_indices",
    "forecast",
    "info",
    "map",
    "open_tensors",
    "plan",
    "push_to_hub",
    "release",
    "save_file",
    "select",
    "shuffle",
    "sort",
    "table",
    "train_test_split",
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

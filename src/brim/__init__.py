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
    from brim.api.build_api import build as build
    from brim.api.build_api import open_plan as open_plan
    from brim.api.build_api import plan as plan
    from brim.api.build_api import select as select
    from brim.api.compute_api import Vectors as Vectors
    from brim.api.compute_api import embed as embed
    from brim.api.compute_api import tokenize as tokenize
    from brim.api.datasets_api import caches as caches
    from brim.api.datasets_api import clean as clean
    from brim.api.datasets_api import concatenate_datasets as concatenate_datasets
    from brim.api.datasets_api import flatten_indices as flatten_indices
    from brim.api.datasets_api import push_to_hub as push_to_hub
    from brim.api.datasets_api import shuffle as shuffle
    from brim.api.datasets_api import sort as sort
    from brim.api.datasets_api import train_test_split as train_test_split
    from brim.api.forecast_api import forecast as forecast
    from brim.api.map_api import filter as filter
    from brim.api.map_api import map as map
    from brim.api.proof_api import check as check
    from brim.api.proof_api import unpack as unpack
    from brim.api.proof_api import verify as verify
    from brim.api.saved_jobs import open_job as open_job
    from brim.api.saved_jobs import save_job as save_job
    from brim.api.source_api import bids as bids
    from brim.api.source_api import dataset as dataset
    from brim.api.source_api import files as files
    from brim.api.source_api import recipes as recipes
    from brim.api.source_api import table as table
    from brim.errors import ArgumentError as ArgumentError
    from brim.errors import BrimError as BrimError
    from brim.errors import CommandNotStarted as CommandNotStarted
    from brim.errors import DamageFound as DamageFound
    from brim.errors import DestinationError as DestinationError
    from brim.errors import DoesNotFit as DoesNotFit
    from brim.errors import FilesRefused as FilesRefused
    from brim.errors import FunctionFailed as FunctionFailed
    from brim.errors import InputError as InputError
    from brim.errors import MissingExtra as MissingExtra
    from brim.errors import PlanChanged as PlanChanged
    from brim.errors import SinkFailed as SinkFailed
    from brim.errors import SourceChanged as SourceChanged
    from brim.errors import SourceError as SourceError
    from brim.errors import Stopped as Stopped
    from brim.forecasts.shapes import Forecast as Forecast
    from brim.jobs.build_job import Build as Build
    from brim.jobs.caches import Cached as Cached
    from brim.jobs.check_files import Check as Check
    from brim.jobs.check_files import CheckReport as CheckReport
    from brim.jobs.dataset_info import ColumnInfo as ColumnInfo
    from brim.jobs.dataset_info import DatasetInfo as DatasetInfo
    from brim.jobs.dataset_info import SplitInfo as SplitInfo
    from brim.jobs.dataset_info import info as info
    from brim.jobs.job import Built as Built
    from brim.jobs.job import Computed as Computed
    from brim.jobs.parts import PartDone as PartDone
    from brim.jobs.parts import PlanStatus as PlanStatus
    from brim.jobs.parts import SavedBuild as SavedBuild
    from brim.jobs.unit_parts import SavedComputation as SavedComputation
    from brim.jobs.unpack import Unpacked as Unpacked
    from brim.jobs.verify import Verified as Verified
    from brim.memory.release import release as release
    from brim.oom.why import WhyReport as WhyReport
    from brim.oom.why import why as why
    from brim.progress import Progress as Progress
    from brim.schedule.unit_work import Outcome as Outcome
    from brim.sources.file_table import FileTable as FileTable
    from brim.sources.recipe import Recipe as Recipe
    from brim.sources.selection import Selection as Selection
    from brim.state.stop import Stop as Stop
    from brim.tensors.tensor_reader import ShardedRows as ShardedRows
    from brim.tensors.tensor_reader import open_tensors as open_tensors
    from brim.tensors.tensor_writer import TensorWriter as TensorWriter
    from brim.tensors.tensor_writer import save_file as save_file
    from brim.watching.watching import watch as watch

_HOMES = {
    "ArgumentError": "brim.errors",
    "BrimError": "brim.errors",
    "Build": "brim.jobs.build_job",
    "Built": "brim.jobs.job",
    "Cached": "brim.jobs.caches",
    "Check": "brim.jobs.check_files",
    "CheckReport": "brim.jobs.check_files",
    "ColumnInfo": "brim.jobs.dataset_info",
    "CommandNotStarted": "brim.errors",
    "Computed": "brim.jobs.job",
    "DamageFound": "brim.errors",
    "DatasetInfo": "brim.jobs.dataset_info",
    "DestinationError": "brim.errors",
    "DoesNotFit": "brim.errors",
    "FileTable": "brim.sources.file_table",
    "FilesRefused": "brim.errors",
    "Forecast": "brim.forecasts.shapes",
    "FunctionFailed": "brim.errors",
    "InputError": "brim.errors",
    "MissingExtra": "brim.errors",
    "Outcome": "brim.schedule.unit_work",
    "PartDone": "brim.jobs.parts",
    "PlanChanged": "brim.errors",
    "PlanStatus": "brim.jobs.parts",
    "Progress": "brim.progress",
    "Recipe": "brim.sources.recipe",
    "SavedBuild": "brim.jobs.parts",
    "SavedComputation": "brim.jobs.unit_parts",
    "Selection": "brim.sources.selection",
    "ShardedRows": "brim.tensors.tensor_reader",
    "SinkFailed": "brim.errors",
    "SourceChanged": "brim.errors",
    "SourceError": "brim.errors",
    "SplitInfo": "brim.jobs.dataset_info",
    "Stop": "brim.state.stop",
    "Stopped": "brim.errors",
    "TensorWriter": "brim.tensors.tensor_writer",
    "Unpacked": "brim.jobs.unpack",
    "Vectors": "brim.api.compute_api",
    "Verified": "brim.jobs.verify",
    "WhyReport": "brim.oom.why",
    "bids": "brim.api.source_api",
    "build": "brim.api.build_api",
    "caches": "brim.api.datasets_api",
    "check": "brim.api.proof_api",
    "clean": "brim.api.datasets_api",
    "concatenate_datasets": "brim.api.datasets_api",
    "dataset": "brim.api.source_api",
    "embed": "brim.api.compute_api",
    "files": "brim.api.source_api",
    "filter": "brim.api.map_api",
    "flatten_indices": "brim.api.datasets_api",
    "forecast": "brim.api.forecast_api",
    "info": "brim.jobs.dataset_info",
    "map": "brim.api.map_api",
    "open_job": "brim.api.saved_jobs",
    "save_job": "brim.api.saved_jobs",
    "open_plan": "brim.api.build_api",
    "open_tensors": "brim.tensors.tensor_reader",
    "plan": "brim.api.build_api",
    "push_to_hub": "brim.api.datasets_api",
    "recipes": "brim.api.source_api",
    "release": "brim.memory.release",
    "save_file": "brim.tensors.tensor_writer",
    "select": "brim.api.build_api",
    "shuffle": "brim.api.datasets_api",
    "sort": "brim.api.datasets_api",
    "table": "brim.api.source_api",
    "tokenize": "brim.api.compute_api",
    "train_test_split": "brim.api.datasets_api",
    "unpack": "brim.api.proof_api",
    "verify": "brim.api.proof_api",
    "watch": "brim.watching.watching",
    "why": "brim.oom.why",
}

__all__ = [
    "ArgumentError",
    "BrimError",
    "Build",
    "Built",
    "Cached",
    "Check",
    "CheckReport",
    "ColumnInfo",
    "CommandNotStarted",
    "Computed",
    "DamageFound",
    "DatasetInfo",
    "DestinationError",
    "DoesNotFit",
    "FileTable",
    "FilesRefused",
    "Forecast",
    "FunctionFailed",
    "InputError",
    "MissingExtra",
    "Outcome",
    "PartDone",
    "PlanChanged",
    "PlanStatus",
    "Progress",
    "Recipe",
    "SavedBuild",
    "SavedComputation",
    "Selection",
    "ShardedRows",
    "SinkFailed",
    "SourceChanged",
    "SourceError",
    "SplitInfo",
    "Stop",
    "Stopped",
    "TensorWriter",
    "Unpacked",
    "Vectors",
    "Verified",
    "WhyReport",
    "__version__",
    "bids",
    "build",
    "caches",
    "check",
    "clean",
    "concatenate_datasets",
    "dataset",
    "embed",
    "files",
    "filter",
    "flatten_indices",
    "forecast",
    "info",
    "map",
    "open_job",
    "open_plan",
    "open_tensors",
    "plan",
    "push_to_hub",
    "recipes",
    "release",
    "save_file",
    "save_job",
    "select",
    "shuffle",
    "sort",
    "table",
    "tokenize",
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

"""The settings of a job, and all checks before it runs that need no look at the destination.

Checked are options that do not apply, a source that is its own destination, limits of the Hub, and a memory limit that
is too small. What needs the ledger of the destination is checked under its lock (reconcile.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from brim.errors import InputError
from brim.jobs.destination_paths import DestinationPaths, dataset_paths, file_paths
from brim.jobs.publish_options import PublishOptions, check_shards, hub_limits
from brim.jobs.shard_set import PlannedShards, ShardSet
from brim.memory.limit import Limit, effective_limit, usable_cores
from brim.options.declare import choose_one, shared_values
from brim.options.groups import (
    EngineOptions,
    ErrorOptions,
    FreshOptions,
    HubOptions,
    JobOptions,
    RunOptions,
    WriteOptions,
)
from brim.plans.describe_plan import HUB_BYTES, OBJECTS_BYTES, BuildForecast, forecast_build
from brim.plans.fingerprint import digest_json
from brim.plans.plan import Plan
from brim.plans.source_checks import refuse_source, refuse_source_folder, refuse_source_shard
from brim.records import dataclass
from brim.state.stop import is_stale_stop_file, stopping_at_once
from brim.storage.destination_address import parse_destination
from brim.storage.location import Access, Location
from brim.storage.xet import XET_BYTES

if TYPE_CHECKING:
    from brim.compute.outputs.output import Output
    from brim.compute.rows.unit import RowSource
    from brim.compute.steps.step import Step
    from brim.execution.worker_messages import OnError

_VERSION = 2  # of computed jobs: raise it when the same job would give other rows or bytes
_HUB_OPTIONS = ("config", "commit_message", "public", "commit_as_you_go", "create_pr", "upload_with")


@dataclass(frozen=True, kw_only=True)
class JobSettings(RunOptions, EngineOptions, FreshOptions, WriteOptions, ErrorOptions):
    """How to run a job. Only `on_error` affects the result."""

    hub: PublishOptions = field(default_factory=PublishOptions)
    access: Access = field(default_factory=Access)  # to the object store of the destination
    held_bytes: int = 0  # memory of the caller, which is not part of the limit

    def check_options(self) -> None:
        choose_one(self, "fresh", "update", "append")
        choose_one(self, "fresh", "keep_done")
        if self.append and self.hub.commit_as_you_go:
            raise InputError("--commit-as-you-go cannot be used with --append, which is published in one step.")
        if self.stop_file:
            is_stale_stop_file(Path(self.stop_file))


_Settings = TypeVar("_Settings", bound=JobSettings)


def job_settings(kind: type[_Settings], options: JobOptions, **internal: Any) -> _Settings:
    """Make the settings of a job from the options of its command. --anonymous is for the source alone."""
    hub = PublishOptions(**options.values(HubOptions))
    return kind(**shared_values(kind, options), hub=hub, access=Access(options.endpoint_url), **internal)


@dataclass(frozen=True)
class ComputePlan:
    """What a computed job does: rows of a source go through a step and become an output. `command`: map, embed, …"""

    command: str
    source: RowSource
    step: Step
    output: Output
    on_error: OnError

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The inputs of the fingerprint: they decide the rows and their bytes."""
        return {
            "kind": self.command,
            "version": _VERSION,
            "source": self.source.facts,
            "step": self.step.facts,
            "output": self.output.facts | {"on_error": self.on_error},
        }

    @cached_property
    def fingerprint(self) -> str:
        return digest_json(self.facts)


def stop_files(state_dir: Path, stop_file: str | os.PathLike[str] | None) -> list[Path]:
    """Return the stop files of a run: the one next to its ledger, and last that of the user."""
    return [state_dir / "stop", *([Path(stop_file)] if stop_file else [])]


@contextmanager
def stopping_while_reading(
    destination: str | os.PathLike[str] | None, settings: JobSettings, *, as_file: bool = False
) -> Iterator[None]:
    """Handle stop requests while a source is read, before the job has its ledger.

    A stop file that exists already is an InputError before anything is loaded. Without a destination, only the caller
    can stop.
    """
    files: list[Path] = []
    if destination is not None:
        if as_file:
            paths = file_paths(destination, settings.state_dir, settings.access)
        else:
            paths = dataset_paths(parse_destination(destination, settings.access), settings.state_dir, settings.hub)
        files = stop_files(paths.state_dir, settings.stop_file)
        for file in files:
            is_stale_stop_file(file)
    with stopping_at_once(*files, requested=settings.stop):
        yield


def computed_limit(settings: JobSettings) -> Limit:
    """Return the limit of a computed job. All memory of this process is measured, so the caller's is added.

    A build keeps a forecast instead, which has nothing of the caller's.
    """
    limit = effective_limit(settings.memory)
    return replace(limit, bytes=limit.bytes + settings.held_bytes)


def check_job(plan: Plan | ComputePlan, paths: DestinationPaths, settings: JobSettings, limit: Limit) -> None:
    """Raise every error that is known without looking at the destination."""
    location, outputs = paths.location, paths.output_paths
    source = None if isinstance(plan, Plan) else plan.source
    table = plan.table if isinstance(plan, Plan) else plan.source.table
    check_settings("build" if isinstance(plan, Plan) else plan.command, settings, location)
    if table is not None:
        refuse_source(location, table.files.root, None, table.files, outputs)
        for folder in table.within:
            refuse_source_folder(location, folder)
        # Values may have been copied from remote files to a spool already.
        files = table.files.on_disk
        for path in (*table.far, *map(files.full_path, files.remotes)):
            refuse_source_shard(location, path)
    elif source is not None and source.files is not None:
        # The name of rows in memory (an open dataset, a folder of images) is not a path.
        path = source.name if "root" in source.reading.options else source.files.root
        refuse_source(location, path, None, source.files, outputs)
    if isinstance(plan, Plan):
        check_hub_limits(PlannedShards(plan), location)
    else:
        plan.output.check_room(limit.bytes)


def check_settings(command: str, settings: JobSettings, location: Location | None) -> None:
    """Refuse options that do not apply to the command or the destination."""
    if settings.keep_done and command != "map":
        raise InputError(f"--keep-done can only be used with brim map, not with {command}.")
    if settings.update and command != "build":
        raise InputError(f"--update can only be used with brim build; {command} always keeps unchanged results.")
    if settings.append and command not in ("build", "select"):
        raise InputError(f"--append can only be used with brim build and brim select, not with {command}.")
    if location is None or location.is_repository:
        return
    defaults = PublishOptions()
    for name in _HUB_OPTIONS:
        if getattr(settings.hub, name) != getattr(defaults, name):
            kind = "on this machine" if location.is_local else "a bucket"
            option = name.replace("_", "-")
            raise InputError(f"--{option} can only be used with the Hub, and the destination is {kind}.")


def check_file_suffix(destination: str) -> None:
    """Refuse a destination that looks like a file in a format that embed does not write."""
    path = Path(destination)
    is_new_path = "://" not in destination and not destination.endswith("/") and not path.exists()
    if is_new_path and re.fullmatch(r"\.[A-Za-z]\w{0,11}", path.suffix):
        raise InputError(
            f"{path.name!r} has the suffix {path.suffix}, which is not a format that embed writes.",
            hint="Use .safetensors, .npy or .parquet for one file, or a name that ends in / for a folder of shards.",
        )


def check_hub_limits(shards: ShardSet, location: Location | None) -> None:
    """Refuse more or larger shards than the Hub allows, before the first upload."""
    if location is not None and location.is_repository:
        check_shards(len(shards.shards), _largest(shards), shards.size(shards.shards))


def hub_notes(shards: ShardSet, public: bool) -> list[str]:
    """Return notes about shards that the Hub may refuse or discourages."""
    return hub_limits(len(shards.shards), _largest(shards), shards.size(shards.shards), public)


def _largest(shards: ShardSet) -> int:
    return max((shard.file_bytes for shard in shards.shards), default=0)


def forecast_for(location: Location | None, plan: Plan, limit: Limit, workers: int | None) -> BuildForecast:
    """Return the memory and the number of workers of a build at a destination."""
    is_bucket = location is not None and location.is_bucket
    xet = is_bucket and location is not None and location.is_hub_bucket
    hub = xet or (location is not None and location.is_repository)
    # One more than cores: while one waits for the disk or the network, the others hash. Not to a bucket, where several
    # parts of each shard are uploaded at a time.
    cores = usable_cores()
    default = min(max(cores, 2) if is_bucket else cores + 1, 8)
    return forecast_build(plan, limit, workers or default, hub=hub, bucket=is_bucket and not xet, xet=xet)


def upload_bytes(location: Location, hub: PublishOptions) -> int:
    """Return the memory that uploading a shard needs in addition to making it."""
    if location.is_local:
        return 0
    if location.is_bucket:
        return HUB_BYTES + XET_BYTES if location.is_hub_bucket else OBJECTS_BYTES
    return HUB_BYTES + (XET_BYTES if hub.upload_with == "xet" else 0)

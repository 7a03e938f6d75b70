"""What is to be done and how, for every verb, and the checks that all of them go through before anything runs.

An unknown value, an option that does not apply, a source that is its own destination, more than the Hub takes, a limit
that is too small: each is said here, once. What needs the destination's ledger (another dataset, files that brim did
not write) is looked at by the job (job.py), under its lock.

A `Layout` is what the result is laid out as and where its books are (a lock, a stop file, a ledger, the units that are
done): names and places. How bytes travel is the store's (open_store.py). Here are the contract, and the dataset.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from brim.compute.outputs.output import Output
from brim.compute.rows.unit import RowSource
from brim.compute.steps.step import Step
from brim.errors import InputError
from brim.jobs.content import Content, PlanContent
from brim.jobs.upload_shards import refuse_strangers
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
from brim.plans.describe_plan import BuildForecast, forecast_build
from brim.plans.fingerprint import digest_json
from brim.plans.plan import Plan
from brim.records import dataclass
from brim.state.atomic_files import rename
from brim.state.ledger import Ledger
from brim.state.stop import is_stale_stop_file, stopping_at_once
from brim.storage.location import Access, Location, folder_location
from brim.storage.upload_content import UploadWatcher
from brim.stores.destination import (
    QUARANTINE,
    UNITS,
    Footprints,
    PublishOptions,
    check_shards,
    hub_limits,
    make_state,
    parse_destination,
    refuse_holder,
    refuse_source,
    refuse_within,
    state_folder,
    taken_by_dataset,
)
from brim.stores.folder_store import FolderStore, make_folder
from brim.stores.store import Store

_VERSION = 2  # raise it when the same computed job would give other rows or bytes
_HUB_ONLY = ("config", "commit_message", "public", "commit_as_you_go", "create_pr", "upload_with")


@dataclass(frozen=True, kw_only=True)
class JobSettings(RunOptions, EngineOptions, FreshOptions, WriteOptions, ErrorOptions):
    """How to run a job, apart from what it does. Only `on_error` affects the result."""

    hub: PublishOptions = field(default_factory=PublishOptions)
    access: Access = field(default_factory=Access)  # to the object store of the destination
    held_bytes: int = 0  # what this process uses for its caller: not part of the limit

    def check_options(self) -> None:
        choose_one(self, "fresh", "update", "append")
        choose_one(self, "fresh", "keep_done")
        if self.append and self.hub.commit_as_you_go:
            raise InputError("--commit-as-you-go cannot be used with --append, which is published in one step.")
        if self.stop_file:
            is_stale_stop_file(Path(self.stop_file))


_Settings = TypeVar("_Settings", bound=JobSettings)


def job_settings(kind: type[_Settings], options: JobOptions, **internal: Any) -> _Settings:
    """Take from the options of a command what its job needs. The destination is never reached without credentials."""
    hub = PublishOptions(**options.values(HubOptions))
    return kind(**shared_values(kind, options), hub=hub, access=Access(options.endpoint_url), **internal)


@dataclass(frozen=True)
class Spec:
    """One job. Without a `step`, the shards of a plan are packaged as they are and `forecast` says what that takes;
    with one, rows go through it and become the `output`."""

    verb: str
    source: PlanContent | RowSource
    layout: Layout
    how: JobSettings
    limit: Limit
    step: Step | None = None
    output: Output | None = None
    forecast: BuildForecast | None = None
    label: str = ""  # what whoever watches is told instead of the verb

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What decides the result: the same facts are the same job."""
        if self.step is None or self.output is None:
            return self.source.facts
        assert not isinstance(self.source, PlanContent)
        return computed_facts(self.verb, self.source, self.step, self.output, self.how.on_error)

    @cached_property
    def fingerprint(self) -> str:
        return self.source.fingerprint if isinstance(self.source, PlanContent) else digest_json(self.facts)


def stop_files(state: Path, how: JobSettings) -> list[Path]:
    """What a run obeys: a file beside its books, and the user's own, which comes last."""
    return [state / "stop", *([Path(how.stop_file)] if how.stop_file else [])]


@contextmanager
def heard_while_reading(
    destination: str | os.PathLike[str] | None, how: JobSettings, *, as_file: bool = False
) -> Iterator[None]:
    """While a source is read and a job is made, before it has its books: a stop is heard, and a wish to stop that lies
    there already is an InputError before anything is loaded. Without a destination, only the caller may ask."""
    layout: Layout
    if destination is None:
        with stopping_at_once(asked=how.stop):
            yield
        return
    if as_file:
        from brim.jobs.file_layout import file_layout  # as below

        layout = file_layout(destination, how.state_dir, how.access)
    else:
        layout = dataset_layout(destination, how.state_dir, how.hub, how.access)
    files = stop_files(layout.state, how)
    for file in files:
        is_stale_stop_file(file)
    with stopping_at_once(*files, asked=how.stop):
        yield


def computed_facts(verb: str, source: RowSource, step: Step, output: Output, on_error: str) -> dict[str, Any]:
    """What decides the rows that are computed, and their bytes."""
    return {
        "kind": verb,
        "version": _VERSION,
        "source": source.facts,
        "step": step.facts,
        "output": output.facts | {"on_error": on_error},
    }


def computed_spec(
    verb: str, source: RowSource, step: Step, output: Output, layout: Layout, how: JobSettings, label: str = ""
) -> Spec:
    """Rows through a step: map, tokenize, embed."""
    return Spec(verb, source, layout, how, _limit_of(how), step, output, label=label)


def _limit_of(how: JobSettings) -> Limit:
    """All that this process holds is measured against the limit of a computed job, so that what is the caller's is
    added to it. (A build goes by a forecast, which has nothing of the caller's.)"""
    limit = effective_limit(how.memory)
    return replace(limit, bytes=limit.bytes + how.held_bytes)


def called_with(spec: Spec, held_bytes: int) -> Spec:
    """A computed job that was made earlier, called now by a program which holds so much."""
    how = replace(spec.how, held_bytes=held_bytes)
    return replace(spec, how=how, limit=_limit_of(how))


def dataset_spec(
    verb: str, source: RowSource, step: Step, output: Output, destination: str | os.PathLike[str], how: JobSettings
) -> Spec:
    """Rows through a step to shards with a card: in a folder, on the Hub, or in a bucket."""
    if verb == "embed":
        _check_no_unknown_suffix(os.fspath(destination))
    layout = dataset_layout(destination, how.state_dir, how.hub, how.access)
    return computed_spec(verb, source, step, output, layout, how)


def _check_no_unknown_suffix(destination: str) -> None:
    """Raise an InputError if a destination looks like a file of a format that brim does not write."""
    path = Path(destination)
    is_new_path = "://" not in destination and not destination.endswith("/") and not path.exists()
    if is_new_path and re.fullmatch(r"\.[A-Za-z]\w{0,11}", path.suffix):
        raise InputError(
            f"{path.name!r} has the suffix {path.suffix}, which is not a format that embed writes.",
            hint="Use .safetensors, .npy or .parquet for one file, or a name that ends in / for a folder of shards.",
        )


def vector_file_spec(source: RowSource, step: Step, destination: str | os.PathLike[str], how: JobSettings) -> Spec:
    """Rows through a model to one file of vectors."""
    from brim.compute.outputs.vector_output import VectorOutput
    from brim.jobs.file_layout import file_layout  # other jobs have no use for them, and would hold them

    layout = file_layout(destination, how.state_dir, how.access)
    return computed_spec("embed", source, step, VectorOutput(layout.name, step.batch_rows or 1000), layout, how)


def preflight(spec: Spec) -> None:
    """Everything that can be refused before anything is made at the destination."""
    check_options(spec.verb, spec.how, spec.layout.destination)
    refuse_own_source(spec.source, spec.layout)
    if isinstance(spec.source, PlanContent):
        check_hub_limits(spec.source, spec.layout.destination)
    if spec.output is not None:
        spec.output.check_room(spec.limit.bytes)


def check_options(verb: str, how: JobSettings, destination: Location | None) -> None:
    """Options that have no meaning for this verb or destination are an error, not silence."""
    if how.keep_done and verb != "map":
        raise InputError(f"--keep-done can only be used with brim map, not with {verb}.")
    if how.update and verb != "build":
        raise InputError(f"--update can only be used with brim build; {verb} always keeps what is unchanged.")
    if how.append and verb not in ("build", "select"):
        raise InputError(f"--append can only be used with brim build and brim select, not with {verb}.")
    if destination is None or destination.is_repository:
        return
    plain = PublishOptions()
    for name in _HUB_ONLY:
        if getattr(how.hub, name) != getattr(plain, name):
            option = name.replace("_", "-")
            what = "on this machine" if destination.is_local else "a bucket"
            raise InputError(f"--{option} can only be used with the Hub, and the destination is {what}.")


def refuse_own_source(source: PlanContent | RowSource, layout: Layout) -> None:
    """A source is never in what the job writes, whatever the paths are called."""
    table = source.plan.table if isinstance(source, PlanContent) else source.table
    if table is not None:
        files = table.files
        refuse_source(layout.destination, files.root, None, files, layout.taken)
        for folder in table.within:
            refuse_within(layout.destination, folder)
        # Values may have been taken from far away already, to a spool.
        for path in (*table.far, *map(files.on_disk.full_path, files.on_disk.remotes)):
            refuse_holder(layout.destination, path)
    elif not isinstance(source, PlanContent) and source.files is not None:
        # The name of what is no path (a dataset that is open, a folder of images as rows) leads nowhere.
        place = source.name if "root" in source.reading.options else source.files.root
        refuse_source(layout.destination, place, None, source.files, layout.taken)


def check_hub_limits(content: Content, destination: Location | None) -> None:
    """More shards, or larger ones, than the Hub takes are an error before the first is sent."""
    if destination is not None and destination.is_repository:
        largest = max((shard.file_bytes for shard in content.shards), default=0)
        check_shards(len(content.shards), largest, content.size(content.shards))


def limits_of(content: Content, hub: PublishOptions) -> list[str]:
    """What the Hub may refuse of a dataset that has none of its own limits against it."""
    largest = max((shard.file_bytes for shard in content.shards), default=0)
    return hub_limits(len(content.shards), largest, content.size(content.shards), hub.public)


def usual_workers(destination: Location | None) -> int:
    """One more than cores: while one waits for the disk or the line, the others hash. Not to a bucket, where several
    parts of each shard are on their way anyway."""
    cores = usable_cores()
    return min(max(cores, 2) if destination is not None and destination.is_bucket else cores + 1, 8)


def forecast_at(destination: Location | None, plan: Plan, limit: Limit, workers: int | None) -> BuildForecast:
    """What building a plan takes there."""
    place = destination or folder_location(".")
    xet = place.is_hub_bucket
    hub, bucket = place.is_repository or xet, place.is_bucket and not xet
    return forecast_build(plan, limit, workers or usual_workers(destination), hub=hub, bucket=bucket, xet=xet)


WriteBadRows = Callable[[Path], bool]


class Layout(Protocol):
    """A dataset (below), a file (file_layout.py) or a cache (caches.py)."""

    @property
    def destination(self) -> Location:
        """What the user calls it; a source must be something else."""

    @property
    def place(self) -> Location:
        """What the names of receipts are relative to."""

    @property
    def state(self) -> Path:
        """The folder with the lock and the stop file."""

    @property
    def books(self) -> Path:
        """The folder of the ledger that says what is done."""

    @property
    def units(self) -> Path:
        """The folder of unit files and their receipts."""

    @property
    def failing(self) -> Path:
        """What an error of the system is about."""

    @property
    def apart(self) -> bool:
        """Whether files stand beside each other, each with all rows, and are brought one by one from this machine."""

    @property
    def waits(self) -> bool:
        """Whether a second run waits for the first, and takes what that has made. Elsewhere it is refused."""

    @property
    def taken(self) -> list[Location]:
        """All that the job writes or replaces."""

    def footprints(self) -> Footprints:
        """What is there before anything is made."""

    def make(self) -> None:
        """The folders that are needed before the first byte."""

    def work(self, fingerprint: str, fresh: bool) -> Path:
        """Where the result is made of units, on the disk that it gets its names on if that is here."""

    def store(self) -> Store | None:
        """Where results are put if that is no dataset; None: the store of the destination (open_store.py)."""

    def holds(self, ledger: Ledger) -> bool | None:
        """Whether all that the receipts name is there; None: that cannot be seen from here."""

    def refuse_strangers(self, ledger: Ledger, fresh: bool) -> None:
        """DestinationError if something is in the way that brim did not write: before hours of work, not after."""

    def keep_bad_rows(self, write: WriteBadRows, fresh: bool, watcher: UploadWatcher) -> Path | str | None:
        """Have the file of rows that were left out written where it belongs, if there are any.

        Before the result is there: then nothing is done again. `fresh`: what is there of an earlier job goes.
        """

    def clear(self) -> None:
        """Take away what a finished job needs no more."""


@dataclass(frozen=True, slots=True)
class DatasetLayout:
    """Shards in a folder (`data`, or as the Hub's config says) with a card beside it."""

    destination: Location
    state: Path
    folder: str = "data"
    waits: bool = False
    apart = False

    @property
    def place(self) -> Location:
        return self.destination

    @property
    def books(self) -> Path:
        return self.state

    @property
    def units(self) -> Path:
        return self.state / UNITS

    @property
    def failing(self) -> Path:
        return self.destination.path if self.destination.is_local else self.state

    @property
    def taken(self) -> list[Location]:
        return taken_by_dataset(self.destination, self.folder)

    def footprints(self) -> Footprints:
        return Footprints(self.destination, self.state)

    def make(self) -> None:
        if self.destination.is_local:
            make_folder(self.destination.path)
        make_state(self.destination, self.state)

    def work(self, fingerprint: str, fresh: bool) -> Path:
        return self.units / "made"

    def store(self) -> None:
        """That of its destination."""

    def holds(self, ledger: Ledger) -> bool | None:
        if not self.destination.is_local:
            return None
        return all(FolderStore(self.destination.path).holds(receipt.piece) for receipt in ledger.receipts.values())

    def refuse_strangers(self, ledger: Ledger, fresh: bool) -> None:
        if not self.destination.is_local:
            return
        there = list(FolderStore(self.destination.path).shards())
        # In between, names may be those of shards yet to be written; a damaged line may have been that of a shard.
        if ledger.job is None or (ledger.done and not ledger.broken):
            known = ledger.names
            refuse_strangers([name for name in there if name not in known], staged=False)

    def keep_bad_rows(self, write: WriteBadRows, fresh: bool, watcher: UploadWatcher) -> Path | None:
        target = self.failing / QUARANTINE
        return target if write_aside(write, target, target, fresh) else None

    def clear(self) -> None:
        shutil.rmtree(self.units, ignore_errors=True)


def dataset_layout(
    destination: str | os.PathLike[str], state: str | os.PathLike[str] | None, hub: PublishOptions, access: Access
) -> DatasetLayout:
    """A dataset to be made. The ledger of each config and split of a repository is one of its own."""
    return dataset_at(parse_destination(destination, access), state, hub)


def dataset_at(where: Location, state: str | os.PathLike[str] | None, hub: PublishOptions) -> DatasetLayout:
    return DatasetLayout(where, state_folder(where, state, f"{hub.config}/{hub.split or '*'}"), hub.folder)


def write_aside(write: WriteBadRows, made: Path, target: Path, fresh: bool) -> bool:
    """Whether there is something to keep; it is made on the target's disk, and then gets its name."""
    made.with_name(f".{made.name}.tmp").unlink(missing_ok=True)  # of a run that was killed
    some = write(made)
    if some and made != target:
        rename(made, target)
    elif not some and fresh:
        target.unlink(missing_ok=True)  # of the rows that were there before
    return some

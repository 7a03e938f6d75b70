"""Bring content to a destination, whichever it is: one run at a time, resumable, stoppable."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from brim.buckets.bucket_address import BucketAddress
from brim.buckets.requests import interrupted_by
from brim.errors import DestinationError, InputError, Stopped
from brim.formats.card import CardFacts
from brim.jobs.bring import Others, Run, RunOptions, refuse_another
from brim.jobs.content import Content
from brim.memory.limit import Limit, usable_cores
from brim.progress import Progress, told_if_slow
from brim.schedule.scheduler import Executor
from brim.state.durable import failures
from brim.state.ledger import STATE, Ledger, Receipt
from brim.state.lock import locked, owner_of
from brim.state.stop import Stop, stoppable
from brim.stores.bucket_store import BucketCarrier, BucketStore
from brim.stores.destination import Destination, Footprints, make_state, state_folder
from brim.stores.folder_store import FolderStore, make_folder
from brim.stores.hub_client import HubClient
from brim.stores.hub_options import HubAddress, HubOptions, check_shards
from brim.stores.hub_session import explained, hub_session
from brim.stores.hub_store import HubCarrier, HubStore
from brim.stores.store import Carrier, SendingRoom

_HUB_ONLY = ("config", "message", "public", "direct", "create_pull", "via")


@dataclass(frozen=True, slots=True)
class Built:
    """What a build did. On the Hub: what was sent, in how many commits, and what the Hub says it holds."""

    destination: str
    rows: int
    files: int
    bytes: int
    shards: int
    written: int
    kept: int
    left_out: tuple[str, ...]
    sent_bytes: int = 0
    commits: int = 0
    visibility: str = ""
    pull_request: int = 0
    proved: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    """How content is brought. `free_bytes` is what the limit leaves beside what the shards themselves take.

    Without an `executor`, threads of this process bring it.
    """

    limit: Limit
    workers: int
    free_bytes: int
    fresh: bool = False
    update: bool = False
    hub: HubOptions = field(default_factory=HubOptions)
    others: Others = field(default_factory=Others)
    executor: Executor | None = None


@contextmanager
def at_destination(
    destination: Destination, state: Path, stop_file: str | None, progress: Progress, *, fresh: bool = False
) -> Iterator[tuple[Ledger, Stop]]:
    """The destination's ledger, for this run alone; and whether somebody asked to stop."""
    extra = Path(stop_file) if stop_file else None
    if extra is not None and extra.is_dir():
        raise InputError(f"--stop-file={str(extra)!r} is a folder.", hint="Give the name of a file.")
    with (
        _opened(destination, state),
        stoppable(state / "stop", *([extra] if extra else [])) as stop,
    ):
        ledger = Ledger(state)
        try:
            with failures(destination if isinstance(destination, Path) else state):
                yield ledger, stop
        except Stopped as stopped:
            if fresh:
                raise Stopped(stopped.words[0], hint="Run it again without --fresh to continue.") from stopped
            raise
        finally:
            ledger.close()
            progress.finish()


@contextmanager
def _opened(destination: Destination, state: Path) -> Iterator[None]:
    """The folders are there, and are this run's alone."""
    footprints = Footprints(destination, state)
    try:
        if isinstance(destination, Path):
            make_folder(destination)
        make_state(destination, state)
    except DestinationError:
        footprints.sweep()
        raise
    with locked(state), footprints.removed_if_refused():
        yield


def deliver(
    content: Content, destination: Destination, delivery: Delivery, ledger: Ledger, progress: Progress, stop: Stop
) -> Built:
    """Bring what is missing."""
    others, shared = delivery.others, delivery.others.only is not None
    options = RunOptions(
        delivery.workers,
        delivery.limit.bytes,
        fresh=delivery.fresh,
        update=delivery.update,
        others=others,
        executor=delivery.executor,
    )
    room = SendingRoom(delivery.free_bytes, delivery.workers, delivery.limit.asked_for)
    if isinstance(destination, Path):
        folder = FolderStore(destination, others.only)
        folder.open(content.fingerprint)
        if shared:
            _respect(Ledger(destination / STATE), content, ledger, "Choose another destination.")
        run = Run(content, folder, ledger, options, progress, stop)
        return _built(content, destination, run, run.run())
    if isinstance(destination, BucketAddress):
        return _to_bucket(content, destination, options, room, ledger, progress, stop)
    check_hub_limits(content, destination)
    # Nothing is committed by a run that shares its destination.
    hub = dataclasses.replace(delivery.hub, direct=False, create_pull=False) if shared else delivery.hub
    sink = HubStore(destination, hub, ledger, room, progress, stop.check)
    try:
        sink.open(content.fingerprint)
        published = b"".join(sink.manifests())
        if shared:
            hint = (
                "" if delivery.update else "Save the plan with --update to replace it, or choose another destination."
            )
            _respect(Ledger.of(published), content, ledger, hint)
        else:
            ledger.agree_with(published)
        options = dataclasses.replace(
            options,
            replace=hub.replace or delivery.fresh,
            split=hub.split,
            config=hub.config,
            card=lambda facts: _hub_card(facts, destination, hub),
            manifest_name=sink.manifest_name,
        )
        run = Run(content, sink, ledger, options, progress, stop)
        built = _built(content, destination, run, run.run())
    finally:
        sink.close()
    return dataclasses.replace(
        built, commits=sink.commits, visibility=sink.visibility, pull_request=sink.pull, sent_bytes=run.sent_bytes
    )


def _to_bucket(
    content: Content,
    destination: BucketAddress,
    options: RunOptions,
    room: SendingRoom,
    ledger: Ledger,
    progress: Progress,
    stop: Stop,
) -> Built:
    mine = options.others.only
    sink = BucketStore(destination, owner_of(ledger.path.parent), room, progress, stop.check, mine=mine)
    try:
        sink.open(content.fingerprint)
        published = b"".join(sink.manifests())
        if mine is None:
            ledger.agree_with(published)
        else:
            _respect(Ledger.of(published), content, ledger, "Choose another destination.")
        options = dataclasses.replace(options, manifest_name=sink.manifest_name)
        run = Run(content, sink, ledger, options, progress, stop)
        built = _built(content, destination, run, run.run())
    finally:
        sink.close()
    return dataclasses.replace(built, sent_bytes=run.sent_bytes)


def _respect(published: Ledger, content: Content, ledger: Ledger, hint: str) -> None:
    """Another dataset at a shared destination is found before the first byte; with no `hint`, it may be replaced."""
    ledger.know(published.names)
    if published.job is not None and hint:
        refuse_another(content, published.job, hint)


def check_hub_options(hub: HubOptions, destination: Destination | None) -> None:
    """Options that only the Hub has are an error elsewhere, not silence."""
    if destination is None or isinstance(destination, HubAddress):
        return
    plain = HubOptions()
    for name in _HUB_ONLY:
        if getattr(hub, name) != getattr(plain, name):
            option = {"message": "commit-message", "create_pull": "create-pr"}.get(name, name)
            what = "folder" if isinstance(destination, Path) else "bucket"
            raise InputError(f"--{option} is for the Hub, and the destination is a {what}.")


def check_hub_limits(content: Content, destination: Destination | None) -> None:
    """More shards, or larger ones, than the Hub takes are an error before the first is sent."""
    if isinstance(destination, HubAddress):
        largest = max((shard.file_bytes for shard in content.shards), default=0)
        check_shards(len(content.shards), largest, content.size(content.shards))


def usual_workers(destination: Destination | None) -> int:
    """One more than cores: while one waits for the disk or the line, the others hash. Not to a bucket, where several
    parts of each shard are on their way anyway."""
    cores = usable_cores()
    return min(max(cores, 2) if isinstance(destination, BucketAddress) else cores + 1, 8)


def state_of(destination: Destination, state: str | None, hub: HubOptions) -> Path:
    """Where the ledger of what is brought is."""
    return state_folder(destination, state, f"{hub.config}/{hub.split or '*'}")


def _hub_card(facts: CardFacts, destination: HubAddress, hub: HubOptions) -> CardFacts:
    return dataclasses.replace(
        facts,
        where=destination.repo,
        config=hub.config,
        folder=hub.folder,
        keep_splits=hub.split is not None,
        set_default=hub.set_default,
    )


def _built(content: Content, destination: Destination, run: Run, receipts: Sequence[Receipt]) -> Built:
    return Built(
        destination=str(destination),
        rows=content.rows,
        files=content.files,
        bytes=sum(receipt.size for receipt in receipts),
        shards=len(receipts),
        written=run.written,
        kept=len(receipts) - run.written,
        left_out=content.left_out,
        proved=run.proved,
    )


@contextmanager
def waited_for(bucket: BucketAddress, progress: Progress, stop: Stop) -> Iterator[None]:
    """A bucket that takes long to answer: it is said, and a stop is heard."""
    with told_if_slow(progress.note, f"still waiting for {bucket}"), interrupted_by(stop.check):
        yield


def reachable(destination: Destination, hub: HubOptions, progress: Progress, stop: Stop) -> Carrier | None:
    """What brings shards there, for other machines to try too. None for a folder, and a repository yet to be made."""
    if isinstance(destination, BucketAddress):
        bucket = BucketCarrier(destination)
        with waited_for(destination, progress, stop):
            bucket.check()
        return bucket
    if not isinstance(destination, HubAddress):
        return None
    with hub_session(progress.note, stop.check), explained(destination.repo, begun=False):
        client = HubClient(destination, hub.token)
        token = client.need_token()
        if client.visibility() is None:
            return None
        client.need_write()
        return HubCarrier(destination, client.api.endpoint, token)

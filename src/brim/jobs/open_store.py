"""A destination, opened: its books for one run alone, and the store that shards are put to, whichever it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from brim.errors import DestinationError, InputError, StoppedError
from brim.formats.card import CardFacts
from brim.jobs.append import AppendedContent
from brim.jobs.content import Content
from brim.jobs.spec import JobSettings, Layout, stop_files
from brim.jobs.upload_shards import Share, refuse_another
from brim.plans.describe_plan import HUB_BYTES, OBJECTS_BYTES
from brim.progress import Progress, told_if_slow
from brim.records import dataclass
from brim.state.atomic_files import failures, write_whole
from brim.state.ledger import STATE, Ledger
from brim.state.lock import lock_in_turn, locked, owner_of
from brim.state.retry import interrupted_by
from brim.state.stop import Stop, stoppable
from brim.storage.hub_client import HubClient
from brim.storage.hub_session import explained, hub_session
from brim.storage.location import Location
from brim.storage.storage import open_storage
from brim.storage.xet import XET_BYTES
from brim.stores.bucket_store import BucketStore, need_place, published_in
from brim.stores.destination import CLAIM, PublishOptions, identity, make_state
from brim.stores.folder_store import FolderStore, make_folder
from brim.stores.hub_store import HubCarrier, HubStore, published_at
from brim.stores.store import Carrier, Moved, PublishedThere, SendingRoom, Store
from brim.verification.published import Published
from brim.verification.published import opened as dataset_at


@dataclass(frozen=True, slots=True)
class Books:
    """What a run holds while it goes on."""

    ledger: Ledger
    stop: Stop
    progress: Progress


@contextmanager
def open_books(layout: Layout, how: JobSettings, progress: Progress, share: Share) -> Iterator[Books]:
    """The ledger, for this run alone; and whether somebody asked to stop."""
    state = share.books or layout.state
    with (
        _locked(layout, how, progress) if share.books is None else _shared(layout.destination),
        stoppable(*stop_files(state, how), asked=how.stop) as stop,
        interrupted_by(stop.check),
    ):
        ledger = Ledger(share.books or layout.books)
        try:
            with failures(layout.failing if share.books is None or layout.destination.is_local else state):
                yield Books(ledger, stop, progress)
        except StoppedError as stopped:
            if how.fresh:
                raise StoppedError(stopped.words[0], hint="Run it again without --fresh to continue.") from stopped
            raise
        finally:
            ledger.close()
            progress.finish()


@contextmanager
def _locked(layout: Layout, how: JobSettings, progress: Progress) -> Iterator[None]:
    """The folders are there, and are this run's alone. Nothing stays of a job that is refused."""
    claim = _claim(layout, how.fresh) if how.state_dir else ""
    footprints = layout.footprints()
    told = False

    def waiting() -> None:
        nonlocal told
        if not told:
            progress.note("another process computes the same: waiting for it")
        told = True
        if how.stop is not None:
            how.stop.check()

    try:
        layout.make()
    except DestinationError:
        footprints.sweep()
        raise
    held = lock_in_turn(layout.state, layout.make, waiting) if layout.waits else locked(layout.state)
    with held, footprints.removed_if_refused():
        if claim:
            with failures(layout.state):
                write_whole(layout.state / CLAIM, claim.encode())
        yield


def _claim(layout: Layout, fresh: bool) -> str:
    """What is to be written into a folder that the user gave for the books; nothing if it says so already.

    InputError if it has those of an unfinished job for another place.
    """
    here = f"{identity(layout.destination)}\n{layout.destination}"
    try:
        before = (layout.state / CLAIM).read_text()
    except OSError:
        before = ""
    if not before or before == here or fresh:
        return here if before != here else ""
    books = Ledger(layout.books)
    if Ledger(layout.units).job is not None or (books.job is not None and not books.done):
        raise InputError(
            f"The state folder {str(layout.state)!r} belongs to an unfinished job for {before.splitlines()[-1]!r}, and "
            f"this one is for {str(layout.destination)!r}.",
            hint="Finish that job first, or give another --state-dir; --fresh forgets what it has done.",
        )
    return here


@contextmanager
def _shared(destination: Location) -> Iterator[None]:
    """A folder that several runs bring shards to at a time, and nobody else."""
    if not destination.is_local:
        yield
        return
    make_folder(destination.path)
    make_state(destination, destination.path / STATE)
    with locked(destination.path / STATE, shared=True):
        yield


@dataclass(frozen=True, slots=True)
class OpenStore:
    """A store that is ready, and has agreed with the ledger on what is there."""

    store: Store
    card: Callable[[CardFacts], CardFacts] = lambda facts: facts  # into the card of this destination
    manifest_name: Callable[[str], str] | None = None  # of a split, where a ledger is published with the shards
    manifests: Sequence[bytes] = ()  # that are there


@contextmanager
def open_store(
    layout: Layout, how: JobSettings, content: Content, room: SendingRoom, books: Books, share: Share
) -> Iterator[OpenStore]:
    """Be ready for the shards of `content`."""
    opened = _store(layout, how, room, books, share.only)
    try:
        opened.store.open(content.fingerprint)
        if isinstance(opened.store, HubStore | BucketStore):
            opened = dataclasses.replace(opened, manifests=opened.store.manifests())
            manifests = b"".join(opened.manifests)
            if isinstance(content, AppendedContent):
                _refuse_moved(content, opened.manifests)
            if share.only is None:
                books.ledger.agree_with(manifests)
            else:
                _respect(Ledger.of(manifests), content, books.ledger, _hint(layout.destination, how.update))
        elif share.only is not None and layout.destination.is_local:
            own = Ledger(layout.destination.path / STATE)
            _respect(own, content, books.ledger, _hint(layout.destination, how.update))
        if isinstance(content, AppendedContent):
            books.ledger.know(content.base.names)
        yield opened
    finally:
        opened.store.close()


def _refuse_moved(content: AppendedContent, manifests: Iterable[bytes]) -> None:
    """Moved if what is there is no longer what was looked at, nor what shall be."""
    known = {*content.base.jobs, content.fingerprint}
    for data in manifests:
        job = Ledger.of(data).job
        if job is not None and job.fingerprint not in known:
            raise Moved


def _store(layout: Layout, how: JobSettings, room: SendingRoom, books: Books, mine: frozenset[str] | None) -> OpenStore:
    """The one place where a destination becomes a store. With `mine`, others put their shards there too."""
    own = layout.store()
    if own is not None:
        return OpenStore(own)
    to, check = layout.destination, books.stop.check
    if to.is_local:
        return OpenStore(FolderStore(to.path, mine))
    if to.is_bucket:
        owner = owner_of(books.ledger.path.parent)
        bucket = BucketStore(to, owner, room, books.progress, check, mine=mine)
        return OpenStore(bucket, manifest_name=bucket.manifest_name)
    # Nothing is committed by a run that shares its destination.
    hub = how.hub if mine is None else dataclasses.replace(how.hub, commit_as_you_go=False, create_pr=False)
    repository = HubStore(to, hub, books.ledger, room, books.progress, check, updates=how.update)
    return OpenStore(repository, lambda facts: _hub_card(facts, to, hub), repository.manifest_name)


def _hint(destination: Location, update: bool) -> str:
    """What to do about another dataset at a shared destination; nothing if it may be replaced."""
    if not destination.is_repository:
        return "Choose another destination."
    return "" if update else "Save the plan with --update to replace it, or choose another destination."


def _respect(published: Ledger, content: Content, ledger: Ledger, hint: str) -> None:
    """Another dataset at a shared destination is found before the first byte; with no `hint`, it may be replaced."""
    ledger.know(published.names)
    if published.job is not None and hint:
        refuse_another(content, published.job, hint)


def _hub_card(facts: CardFacts, destination: Location, hub: PublishOptions) -> CardFacts:
    return dataclasses.replace(
        facts,
        where=destination.repo,
        config=hub.config,
        folder=hub.folder,
        keep_splits=hub.split is not None,
        set_default=hub.set_default,
        bare=hub.bare,
    )


@contextmanager
def dataset_there(layout: Layout, how: JobSettings, books: Books) -> Iterator[tuple[Published | None, str]]:
    """What is at a destination already, to be read, and its address; None if that is nothing yet."""
    to = layout.destination
    there: PublishedThere | None
    if to.is_local:
        there = PublishedThere((), list(FolderStore(to.path).shards()), unfinished=False)
    else:
        there = published(to, how.hub, books)
    if there is None or not (there.shards or there.manifests or there.unfinished):
        yield None, ""
        return
    if to.is_repository:
        with hub_session(books.progress.note, books.stop.check), explained(to.repo, begun=False):
            to = HubClient(to, how.hub.token).beginning()
    with dataset_at(str(to), how.state_dir, books.progress.note, how.access, token=how.hub.token) as found:
        yield found, found.address


@contextmanager
def waited_for(bucket: Location, books: Books) -> Iterator[None]:
    """A bucket that takes long to answer: it is said."""
    with told_if_slow(books.progress.note, f"still waiting for {bucket}"):
        yield


def published(place: Location, hub: PublishOptions, books: Books) -> PublishedThere | None:
    """What lies there already. None where the ledger that this run holds is all there is to know."""
    if place.is_bucket:
        with waited_for(place, books):
            return published_in(place)
    if place.is_repository:
        with hub_session(books.progress.note, books.stop.check), explained(place.repo, begun=False):
            return published_at(place, hub)
    return None


def reachable(place: Location, hub: PublishOptions, books: Books) -> Carrier | None:
    """What brings shards there, for other machines to try too. None for a folder, and a repository yet to be made."""
    if place.is_bucket:
        bucket = open_storage(place)
        with waited_for(place, books):
            need_place(place, books.progress.note)
            bucket.check_access()
        return bucket
    if not place.is_repository:
        return None
    with hub_session(books.progress.note, books.stop.check), explained(place.repo, begun=False):
        client = HubClient(place, hub.token)
        token = client.need_token()
        if client.visibility() is None:
            return None
        client.need_write()
        return HubCarrier(place, client.api.endpoint, token)


def carrying_bytes(destination: Location | None, hub: PublishOptions) -> int:
    """What sending a shard takes beside making it."""
    if destination is None or destination.is_local:
        return 0
    if destination.is_bucket:
        return HUB_BYTES + XET_BYTES if destination.is_hub_bucket else OBJECTS_BYTES
    return HUB_BYTES + (XET_BYTES if hub.upload_with == "xet" else 0)

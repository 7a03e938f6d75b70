"""What is below a location: names, sizes, ETags, and small objects. Transient failures are retried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from brim.storage.explain_error import explain, explained
from brim.storage.location import Location
from brim.storage.requests import tries, wait
from brim.storage.storage import ObjectStat, open_storage
from brim.storage.storage_error import StorageError


def list_objects(address: Location, *, reading: bool = True) -> Iterator[tuple[str, ObjectStat]]:
    """Yield (name below the address, stat) of every object, in the order of the store. Folder marks are left out.

    If the line breaks, it begins again: then some come twice. Stores sort in several ways, so none can be passed over.
    """
    retry = tries()
    skip = len(address.prefix) + 1 if address.prefix else 0
    while True:
        try:
            yield from ((key[skip:], stat) for key, stat in open_storage(address).list(retry.begin) if key[skip:])
            return
        except StorageError as error:
            if not retry.again(error):
                raise explain(error, address, reading=reading) from None


def stat_object(address: Location, *, reading: bool = True) -> ObjectStat | None:
    """Return what is at the address itself; None if it is no object."""
    if not address.prefix:
        return None
    with explained(address, reading=reading):
        return next(iter(open_storage(address).stat([address.prefix])))


def stat_objects(address: Location, names: Iterable[str]) -> Iterator[ObjectStat | None]:
    """Yield what is known of each of these objects below the address, in order; None for one that is missing."""
    with explained(address, reading=True):
        yield from open_storage(address).stat(address.key(name) for name in names)


def read_small(address: Location, name: str = "", *, reading: bool = True) -> bytes | None:
    """Return all of a small object; None if it is missing."""
    retry, key = tries(), address.key(name) if name else address.prefix
    while True:
        try:
            return bytes(wait(open_storage(address).fetch(key, 0, None, None)))
        except StorageError as error:
            if error.is_missing:
                return None
            if not retry.again(error):
                raise explain(error, address, reading=reading) from None

"""What a store can do of what brim asks for: found out by asking it, once, when a job begins there.

Stores that speak the language of S3 differ in what they leave out, and most of them leave it out without a word.
"""

from __future__ import annotations

import time

from brim.records import dataclass
from brim.sizes import format_size
from brim.storage.explain_error import explained
from brim.storage.listing import list_objects, stat_object
from brim.storage.location import Location
from brim.storage.storage import PART_BYTES, PROBE, open_storage
from brim.storage.storage_error import StorageError

CHECKS = "check-"  # what the names of objects begin with that only try something


@dataclass(frozen=True, slots=True)
class Abilities:
    """Each is what brim does without, where a store cannot do it."""

    ranges: bool = True
    same_etags: bool = True  # what it lists is what it answers
    parts: bool = True  # one object may come in several

    def missing(self) -> list[str]:
        """What is done instead, in words."""
        told = []
        if not self.ranges:
            told.append("gives no ranges of objects, so they are read from their start each time")
        if not self.same_etags:
            told.append("lists other ETags than it answers, so content is proved by size, and by `verify --deep`")
        if not self.parts:
            told.append(f"takes no uploads in parts, so no shard may be larger than {format_size(PART_BYTES)}")
        return told


def ask_abilities(address: Location) -> Abilities:
    """Try with small objects, which are gone afterwards."""
    name = f".brim/{CHECKS}{time.time_ns():x}"
    key, storage = address.key(name), open_storage(address)
    with explained(address):
        try:
            etag = storage.put_bytes(key, PROBE)
            same = _same_etags(address, name, etag)
            return Abilities(ranges=storage.gives_ranges(key), same_etags=same, parts=storage.takes_parts(key))
        finally:
            storage.delete([key])


def heeds_conditions(address: Location, key: str) -> bool:
    """Return whether a write is refused because something is there, as it is at this key."""
    try:
        open_storage(address).put_instead(key, PROBE, None)
    except StorageError as error:
        return error.is_changed
    return False


def _same_etags(address: Location, name: str, etag: str) -> bool:
    listed = {f".brim/{found}": stat.etag for found, stat in list_objects(address.below(".brim"), reading=False)}
    asked = stat_object(address.below(name), reading=False)
    return asked is not None and {etag or asked.etag, asked.etag, listed.get(name)} == {asked.etag}

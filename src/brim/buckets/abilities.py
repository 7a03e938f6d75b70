"""What a store can do of what brim asks for: found out by asking it, once, when a job begins there.

Stores that speak the language of S3 differ in what they leave out, and most of them leave it out without a word.
"""

from __future__ import annotations

import time

from brim.buckets.bucket_address import BucketAddress
from brim.buckets.bucket_client import (
    explained,
    is_changed,
    is_object_error,
    is_without_range,
    status_of,
    store_of,
    wait,
)
from brim.buckets.listing import list_objects, stat_object
from brim.buckets.send_object import PART_BYTES, delete_objects, send_instead, send_parts, send_small
from brim.records import dataclass
from brim.sizes import format_size
from brim.state.retry import look

CHECKS = "check-"  # what the names of objects begin with that only try something
_TEXT = b"brim"
_REFUSED = (400, 404, 405, 501)  # by which stores say that they do not know a kind of request


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


def ask_abilities(address: BucketAddress) -> Abilities:
    """Try with small objects, which are gone afterwards."""
    name = f".brim/{CHECKS}{time.time_ns():x}"
    key = address.key(name)
    with explained(address):
        try:
            etag = send_small(address, key, _TEXT)
            same = _same_etags(address, name, etag)
            return Abilities(ranges=_gives_ranges(address, key), same_etags=same, parts=_takes_parts(address, key))
        finally:
            delete_objects(address, [key])


def heeds_conditions(address: BucketAddress, key: str) -> bool:
    """Whether a write is refused because something is there, as it is at this key."""
    try:
        send_instead(address, key, _TEXT, None)
    except Exception as error:
        if not is_object_error(error):
            raise
        return is_changed(error)
    return False


def _gives_ranges(address: BucketAddress, key: str) -> bool:
    if address.on_hub:
        return True
    store = store_of(address)
    import obstore

    async def ask() -> bytes:
        return bytes(await obstore.get_range_async(store, key, start=1, end=3))

    try:
        return wait(ask()) == _TEXT[1:3]
    except Exception as error:
        if not is_object_error(error) or not is_without_range(error):
            raise
        return False


def _takes_parts(address: BucketAddress, key: str) -> bool:
    if address.on_hub:  # which has a way of its own
        return True
    try:
        send_parts(address, key, [memoryview(_TEXT)], PART_BYTES, 1, look)
    except Exception as error:
        if not is_object_error(error) or status_of(error) not in _REFUSED:
            raise
        return False
    return True


def _same_etags(address: BucketAddress, name: str, etag: str) -> bool:
    listed = {f".brim/{found}": stat.etag for found, stat in list_objects(address.below(".brim"), reading=False)}
    asked = stat_object(address.below(name), reading=False)
    return asked is not None and {etag or asked.etag, asked.etag, listed.get(name)} == {asked.etag}

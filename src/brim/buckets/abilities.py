"""What a store can do of what brim asks for: found out by asking it, once, when a job begins there.

Stores that speak the language of S3 differ in what they leave out, and most of them leave it out without a word.
"""

from __future__ import annotations

import time

from brim.buckets.bucket_address import BucketAddress
from brim.buckets.bucket_errors import explained, is_changed, is_object_error
from brim.buckets.listing import list_objects, stat_object
from brim.buckets.read_object import ObjectPiece, fetch
from brim.buckets.send_object import delete_objects, send_instead, send_small
from brim.records import dataclass

CHECKS = "check-"  # what the names of objects begin with that only try something
_TEXT = b"brim"


@dataclass(frozen=True, slots=True)
class Abilities:
    """Each is what brim does without, where a store cannot do it."""

    ranges: bool = True
    same_etags: bool = True  # what it lists is what it answers

    def missing(self) -> list[str]:
        """What is done instead, in words."""
        told = []
        if not self.ranges:
            told.append("gives no ranges of objects, so nothing can be selected or verified from here")
        if not self.same_etags:
            told.append("lists other ETags than it answers, so content is proved by size, and by `verify --deep`")
        return told


def ask_abilities(address: BucketAddress) -> Abilities:
    """Try with a small object, which is gone afterwards."""
    name = f".brim/{CHECKS}{time.time_ns():x}"
    key = address.key(name)
    with explained(address):
        try:
            etag = send_small(address, key, _TEXT)
            return Abilities(ranges=_gives_ranges(address, key), same_etags=_same_etags(address, name, etag))
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
    try:
        return fetch(address, ObjectPiece(key, 1, 3)) == _TEXT[1:3]
    except Exception as error:
        if not is_object_error(error):
            raise
        return False


def _same_etags(address: BucketAddress, name: str, etag: str) -> bool:
    listed = {f".brim/{found}": stat.etag for found, stat in list_objects(address.below(".brim"), reading=False)}
    asked = stat_object(address.below(name), reading=False)
    return asked is not None and {etag or asked.etag, asked.etag, listed.get(name)} == {asked.etag}

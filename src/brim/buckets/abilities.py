"""What a store can do of what brim asks for: found out by asking it, once, when a job begins there.

Stores that speak the language of S3 differ in what they leave out, and most of them leave it out without a word.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from brim.buckets.bucket_address import BucketAddress
from brim.buckets.bucket_errors import explained, is_changed, is_object_error
from brim.buckets.listing import list_objects, stat_object
from brim.buckets.read_object import ObjectPiece, fetch
from brim.buckets.send_object import delete_objects, send_instead, send_parts, send_small

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
    """Try with two small objects, which are gone afterwards."""
    names = [f".brim/{CHECKS}{time.time_ns():x}-{kind}" for kind in ("whole", "parts")]
    keys = [address.key(name) for name in names]
    with explained(address):
        try:
            sent = {
                names[0]: send_small(address, keys[0], _TEXT),
                names[1]: send_parts(address, keys[1], [memoryview(_TEXT)], len(_TEXT), 1, lambda: None),
            }
            return Abilities(
                ranges=_gives_ranges(address, keys[0]),
                same_etags=_same_etags(address, sent),
            )
        finally:
            delete_objects(address, keys)


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


def _same_etags(address: BucketAddress, sent: dict[str, str]) -> bool:
    below = address.below(".brim")
    listed = {
        f".brim/{name}": stat.etag for name, stat in list_objects(below, reading=False) if name.startswith(CHECKS)
    }
    for name, etag in sent.items():
        asked = stat_object(address.below(name), reading=False)
        if asked is None or len({etag or asked.etag, asked.etag, listed.get(name)}) > 1:
            return False
    return True

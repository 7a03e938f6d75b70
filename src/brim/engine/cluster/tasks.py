"""What a Ray worker does with a shard."""

from __future__ import annotations

from brim.engine.cluster.gauges import Telling
from brim.engine.shard import Slice
from brim.errors import BrimError
from brim.sinks.sink import Carrier, Put


def carry(run: str, name: str, slice: Slice, carrier: Carrier, sha256: str | None) -> tuple[int, Put] | BrimError:
    """Make the shard's bytes and bring them there. An error of brim's is an answer: it arrives as what it is."""
    telling = Telling(run, name)
    try:
        with slice.splice() as splice:
            return splice.size, carrier.put(name, splice, sha256, telling)
    except BrimError as error:
        return error

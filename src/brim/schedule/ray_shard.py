"""A shard in a Ray worker: its bytes are made and brought there. Who writes that down is the driver."""

from __future__ import annotations

from brim.errors import BrimError
from brim.no_pandas import postpone_pandas
from brim.plans.shard_bytes import Slice
from brim.schedule.ray_gauges import Telling
from brim.stores.store import Carrier, Put


def carry(run: str, name: str, slice: Slice, carrier: Carrier, sha256: str | None) -> tuple[int, Put] | BrimError:
    """Make the shard's bytes and bring them there. An error of brim's is an answer: it arrives as what it is."""
    postpone_pandas()
    telling = Telling(run, name)
    try:
        with slice.splice() as splice:
            return splice.size, carrier.put(name, splice, sha256, telling)
    except BrimError as error:
        return error

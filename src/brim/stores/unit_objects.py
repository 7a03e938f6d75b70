"""Unit files in a bucket: machines that share no disk put them there, and whoever finishes fetches them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from brim.buckets.bucket_address import BucketAddress
from brim.buckets.bucket_errors import explained
from brim.buckets.listing import list_objects, stat_object
from brim.buckets.read_object import ObjectStream
from brim.buckets.send_object import delete_objects
from brim.errors import DestinationError
from brim.formats.splice import FileSplice
from brim.state.durable import write_whole
from brim.state.ledger import Receipt
from brim.stores.bucket_store import BucketCarrier

_CHUNK = 1 << 20


class _Nobody:
    def hashed(self, size: int) -> None: ...
    def sent(self, size: int) -> None: ...


def bad_rows_of(unit: str) -> str:
    """The file of the rows that were left out of a unit."""
    return f"{Path(unit).stem}.bad.arrow"


def send_unit(address: BucketAddress, folder: Path, name: str) -> None:
    """A unit's file, and that of the rows that were left out of it, if there is one."""
    for file in (folder / bad_rows_of(name), folder / name):
        if file.exists():
            send_file(address, file, file.name)


def send_file(address: BucketAddress, file: Path, name: str) -> None:
    with FileSplice(file) as splice:
        BucketCarrier(address).put(name, splice, None, _Nobody())


def fetch_unit(address: BucketAddress, name: str, folder: Path) -> None:
    """A file of a unit, whole or not at all."""
    stat = stat_object(address.below(name))
    if stat is None:
        raise DestinationError(f"{address.below(name)} is not there any more.", hint="Run the same command again.")
    (folder / name).parent.mkdir(exist_ok=True)
    with closing(ObjectStream(address, name, stat.st_size, stat.etag)) as stream:
        write_whole(folder / name, (stream.read_at(at, _CHUNK) for at in range(0, stat.st_size, _CHUNK)))


def units_there(address: BucketAddress) -> Callable[[Receipt], bool]:
    """Whether the unit of a receipt is in the bucket, as it lists them now."""
    there = {name: stat.st_size for name, stat in list_objects(address, reading=False)}
    return lambda receipt: there.get(receipt.name) == receipt.size


def clear_units(address: BucketAddress) -> None:
    """Take all of them away."""
    with explained(address):
        delete_objects(address, [address.key(name) for name, _ in list_objects(address, reading=False)])

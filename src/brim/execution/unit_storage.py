"""Unit files in a bucket: stored there by nodes or machines without a shared disk, and downloaded to be finished."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from brim.errors import DestinationError, VerificationError
from brim.execution.unit_receipts import UnitFiles
from brim.formats.splice import FileSplice
from brim.state.atomic_files import write_whole
from brim.state.ledger import Receipt
from brim.state.stop import Stop
from brim.storage.explain_error import explain_errors
from brim.storage.listing import list_files, stat_file
from brim.storage.location import Location
from brim.storage.reading import RangeStream, RemoteFile
from brim.storage.storage import open_storage
from brim.storage.upload_content import SilentWatcher


class BucketUnits(UnitFiles):
    """Unit files of a job in a bucket, as listed when the job starts. `stores`: this machine uploads new ones."""

    def __init__(self, folder: Path, location: Location, *, stores: bool = False) -> None:
        super().__init__(folder)
        self._location, self._stores = location, stores
        self._sizes = {name: info.st_size for name, info in list_files(location, action="write")}

    def has_receipt(self, receipt: Receipt) -> bool:
        return self._sizes.get(receipt.name) == receipt.size

    def store(self, name: str) -> None:
        if self._stores:
            upload_unit(self._location, self.folder, name)


def bad_rows_name(unit: str) -> str:
    """Return the name of the file with the skipped rows of a unit."""
    return f"{Path(unit).stem}.bad.arrow"


def upload_unit(location: Location, folder: Path, name: str) -> None:
    """Upload the file with the skipped rows of a unit, if there is one, and then the file of the unit."""
    for file in (folder / bad_rows_name(name), folder / name):
        if file.exists():
            upload_file(location, file, file.name)


def upload_file(location: Location, file: Path, name: str) -> None:
    with FileSplice(file) as content:
        open_storage(location).put(name, content, None, SilentWatcher())


def download_unit(location: Location, name: str, folder: Path, sha256: str = "") -> None:
    """Download a file atomically; raise VerificationError if it does not have this SHA-256."""
    info = stat_file(location, name)
    if info is None:
        raise DestinationError(f"{location.child(name)} is missing.", hint="Run the same command again.")
    (folder / name).parent.mkdir(exist_ok=True)
    with RangeStream(location, RemoteFile(location, name, info.st_size, info.etag).ranges(0, info.st_size)) as stream:

        def content() -> Iterator[memoryview]:
            digest = hashlib.sha256()
            for _, view in stream:
                digest.update(view)
                yield view
            if sha256 not in ("", digest.hexdigest()):
                raise VerificationError(f"{location.child(name)} differs from what was computed.")

        write_whole(folder / name, content())


def download_units(location: Location, names: Iterable[str], folder: Path, stop: Stop) -> None:
    """Download files that the folder does not have."""
    for name in names:
        stop.check()
        if not (folder / name).exists():
            download_unit(location, name, folder)


def clear_units(location: Location) -> None:
    with explain_errors(location):
        storage = open_storage(location)
        storage.delete([name for name, _ in storage.list()])

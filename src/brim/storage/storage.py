"""What every location with bytes can do: list, stat, fetch; some also put, copy and delete.

`open_storage` is the one door, and imports the backend. Methods fail with StorageError, make a request once (what a
library retries by itself apart) and take keys: names from the top of the container, not below the location.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from brim.records import dataclass
from brim.storage.location import Location
from brim.storage.storage_error import StorageError

if TYPE_CHECKING:
    from brim.storage.upload_content import UploadContent

PART_BYTES = 8 << 20
_MOST_PARTS = 10_000
PROBE = b"brim"  # what objects hold that only try something
DATED = "modified "  # what stands before a date that takes the place of an ETag: some stores give none


def part_bytes(size: int) -> int:
    """Return how large the parts of an object are. It depends on the size alone, so that its ETag does too."""
    least = -(-size // _MOST_PARTS)
    return max(PART_BYTES, -(-least // (1 << 20)) << 20)


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """What is known of an object, with the names that `os.stat_result` has, so that both can be used alike.

    The ETag takes the place of the date: it changes when the content does, and a copy has the same.
    """

    st_size: int
    etag: str
    st_ino: int = 0
    sha256: str = ""  # where the store tells it

    @property
    def st_mtime_ns(self) -> int:
        return int.from_bytes(hashlib.sha256(self.etag.encode()).digest()[:7])


@dataclass(frozen=True, slots=True)
class Version:
    """What tells an object from all that had or will have its key. Some stores go by one, some by the other."""

    e_tag: str | None
    version: str | None


class Storage:
    """A location. What a backend cannot do is a StorageError of the kind "unsupported"."""

    def __init__(self, location: Location) -> None:
        self.location = location

    def list(self, page_done: Callable[[], None]) -> Iterator[tuple[str, ObjectStat]]:
        """Yield (key, stat) of every object below the location, in any order. `page_done` is called between pages."""
        raise StorageError("unsupported")

    def stat(self, keys: Iterable[str]) -> Iterator[ObjectStat | None]:
        """Yield what is known of each of these objects, in order; None for one that is missing."""
        raise StorageError("unsupported")

    async def fetch(self, key: str, start: int, stop: int | None, etag: str | None) -> Any:
        """Return the bytes of a range, or everything without `stop`, of the version that the ETag names.

        A StorageError of the kind "changed" says that there is another version.
        """
        raise StorageError("unsupported")

    def exists(self) -> bool:
        """Return whether the container is there, as far as it matters before anything is read from it."""
        return True

    def create(self) -> bool:
        """Create the container if brim may do that here; return whether it was created."""
        return False

    def put(
        self, key: str, content: UploadContent, in_flight: int, takes_parts: bool, advance: Callable[[int], None]
    ) -> tuple[str, str]:
        """Send an object, and return its ETag and its SHA-256. It appears complete, or not at all."""
        raise StorageError("unsupported")

    def put_bytes(self, key: str, data: bytes | memoryview) -> str:
        """Send a small object in one request, and return its ETag."""
        raise StorageError("unsupported")

    def put_instead(self, key: str, data: bytes, expected: Version | None) -> Version:
        """Send a small object only over this version, or only if nothing is there (None)."""
        raise StorageError("unsupported", 501)

    def version(self, key: str) -> Version | None:
        found = next(iter(self.stat([key])))
        return None if found is None else Version(found.etag, None)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; missing ones are fine."""
        raise StorageError("unsupported")

    def copy(self, source: str, target: str) -> None:
        raise StorageError("unsupported")

    def gives_ranges(self, key: str) -> bool:
        """Return whether a range of the object at `key`, which holds PROBE, can be asked for."""
        return True

    def takes_parts(self, key: str) -> bool:
        """Return whether an object may come in several parts. An object at `key` is overwritten."""
        return True


def open_storage(location: Location) -> Storage:
    """Return the storage of a location that is not on this machine."""
    if location.scheme in ("http", "https"):
        from brim.storage.http_files import HttpStorage

        return HttpStorage(location)
    if location.on_hub:
        from brim.storage.hub_bucket import HubBucket

        return HubBucket(location)
    if location.scheme == "hf":
        from brim.storage.http_files import HubRepository

        return HubRepository(location)
    from brim.storage.objects import ObjectStorage

    return ObjectStorage(location)

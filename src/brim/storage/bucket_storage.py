"""What object stores and buckets of the Hub have in common: uploads that are retried, checked and cleaned up."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from brim.errors import DestinationUnavailableError
from brim.state.retry import Retry, check_stop, stop_delayed
from brim.storage.explain_error import explain_errors
from brim.storage.storage import FileInfo, PutResult, Storage, is_transient, part_bytes, patience_s
from brim.storage.storage_error import StorageError
from brim.storage.upload_content import UploadContent, UploadWatcher

TRIALS = ".brim/check-"  # precedes the names of objects that test access
_TRIES, _WAIT_S = 3, 2.0


class BucketStorage(Storage):
    """A prefix in a bucket."""

    def put(self, name: str, content: UploadContent, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        """Upload an object, and compare its size and ETag with those that the store lists.

        The library retries some failures. After others, such as the lost answer to a part, the object is sent again
        from the start, without counting its bytes again.
        """
        retry = Retry((_WAIT_S,) * (_TRIES - 1), is_transient, patience_s=patience_s())
        is_retry = False

        def advance(size: int) -> None:
            check_stop()
            watcher.sent(0 if is_retry else size)

        with explain_errors(self.location):
            try:
                while True:
                    retry.begin()
                    try:
                        etag, digest = self._upload(name, content, advance)
                        break
                    except StorageError as error:
                        if not retry.wait_to_retry(error):
                            raise
                    is_retry = True
            except BaseException:
                if content.size > part_bytes(content.size):  # a smaller one is sent in one request
                    self.drop_upload(name)
                raise
            info = next(iter(self.stat([name])))
        if info is None or info.st_size != content.size:
            listed = "is not there" if info is None else f"has {info.st_size:,} there"
            raise DestinationUnavailableError(
                f"{self.location.child(name)} was sent with {content.size:,} bytes and {listed}.",
                hint="Another process may be writing to the same destination. Run the same command again.",
            )
        # If a store answers with one ETag and then has another, they do not identify content.
        return PutResult(digest, etag=info.etag if etag in ("", info.etag) else "")

    def _upload(self, name: str, content: UploadContent, advance: Callable[[int], None]) -> tuple[str, str]:
        """Send an object, and return its ETag and its SHA-256."""
        raise NotImplementedError

    def drop_upload(self, name: str) -> None:
        """Abort unfinished uploads under a name. If that fails, the next run tries again."""
        with suppress(StorageError), stop_delayed():
            self.abort_uploads(name, lambda found: found == name)

    def move(self, source: str, target: str) -> FileInfo:
        self._copy(source, target)
        self.delete([source])
        info = next(iter(self.stat([target])))
        if info is None:
            raise DestinationUnavailableError(
                f"{target} was copied in the bucket and is not there.", hint="Run the same command again."
            )
        return info

    def _copy(self, source: str, target: str) -> None:
        raise NotImplementedError

    def check_access(self) -> None:
        name = f"{TRIALS}{time.time_ns():x}"
        with explain_errors(self.location):
            self.put_bytes(name, b"brim")
            self.delete([name])

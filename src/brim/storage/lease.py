"""One run at a time in a prefix of a bucket: an object with the name of its holder, written under conditions.

A bucket has no lock that ends with its holder. So the holder rewrites its object every few seconds, and another run
watches for a while: an object that stays the same belongs to a run that ended. No clocks are compared. A run that
continues an earlier one on the same machine (it holds the lock of the same ledger) need not wait.

Where a store ignores conditions, the holder reads before it writes, and reads its object back. Two that begin within
one such interval both continue, until the next renewal stops one of them; any other two are kept apart.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from brim.errors import DestinationError, DestinationUnavailableError, StoppedError
from brim.state.retry import check_stop, interrupted_by, stop_delayed
from brim.storage.explain_error import explain, explain_errors
from brim.storage.listing import read_file
from brim.storage.location import Location
from brim.storage.storage import FileInfo, open_storage
from brim.storage.storage_error import StorageError

NAME = ".brim/lock"
RENEW_S = 5.0
DEAD_S = 4 * RENEW_S
_CHECK_S = 0.5


class Lease:
    """`owner` is the same for all runs with one ledger, and random. A `file` without a dataset has its own object."""

    def __init__(self, location: Location, owner: str, note: Callable[[str], None], file: str = "") -> None:
        self._location, self._owner, self._note = location, owner, note
        self._name = f"{NAME}-{file}" if file else NAME
        self._storage = open_storage(location)
        self._version: FileInfo | None = None  # of our object, while we hold it
        self._is_guarded = True
        self._count = 0
        self._is_lost = threading.Event()
        self._is_over = threading.Event()
        self._renewing = threading.Lock()
        self._thread: threading.Thread | None = None

    def take(self, check: Callable[[], None]) -> None:
        """Hold the location, or raise the error that another run does."""
        with explain_errors(self._location):
            while self._version is None:
                if not self._create():
                    self._take_over(check)
            if self._is_guarded and not self._heeds_conditions():
                self._is_guarded = False
                self._version = self._overwrite()
        if not self._is_guarded:
            self._note("this store heeds no conditions: two runs that begin at the same moment are not kept apart here")
        self._thread = threading.Thread(target=self._renew_regularly, name="lease", daemon=True)
        self._thread.start()

    def _find(self) -> FileInfo | None:
        return next(iter(self._storage.stat([self._name])))

    def _heeds_conditions(self) -> bool:
        """Return whether a write is refused because the object exists."""
        try:
            self._storage.put_bytes(self._name, b"brim", None)
        except StorageError as error:
            return error.kind == "changed"
        return False

    def _body(self) -> bytes:
        self._count += 1
        return json.dumps({"owner": self._owner, "count": self._count, "at": time.time_ns()}).encode()

    def _replace(self, expected: FileInfo | None) -> FileInfo:
        """Write our object in place of the expected version; None: no object is expected.

        StorageError "changed" if something else is there.
        """
        if self._is_guarded:
            try:
                return self._storage.put_bytes(self._name, self._body(), expected)
            except StorageError as error:
                if not error.is_unsupported:
                    raise
                self._is_guarded = False
        if self._find() != expected:
            raise StorageError("changed", 412)
        return self._overwrite()

    def _overwrite(self) -> FileInfo:
        """Write our object without a condition, and check that it is still ours."""
        self._storage.put_bytes(self._name, self._body())
        info = self._find()
        if info is None or self._holder() != self._owner:
            raise StorageError("changed", 412)
        return info

    def _create(self) -> bool:
        """Hold a location that no run holds; return False if one does."""
        if self._find() is not None:  # a store that ignores conditions would lose it
            return False
        try:
            self._version = self._replace(None)
        except StorageError as error:
            if error.kind != "changed":
                raise
            return False
        return True

    def _take_over(self, check: Callable[[], None]) -> None:
        """Take the location from an earlier run with our ledger, or from one that ended; refuse if it is renewed."""
        before = self._find()
        if before is None:
            return
        if self._holder() != self._owner:
            self._note("another brim has been at this destination: looking whether it still is")
            until = time.monotonic() + DEAD_S
            while time.monotonic() < until:
                check()
                time.sleep(_CHECK_S)
                now = self._find()
                if now is None:
                    return
                if now != before:
                    raise DestinationError(
                        "Another brim is building at this destination.", hint="Wait for it to end, or stop it."
                    )
        try:
            self._version = self._replace(before)
        except StorageError as error:
            if error.kind != "changed":
                raise

    def _holder(self) -> str:
        try:
            return str(json.loads(read_file(self._location, self._name, "write") or b"{}").get("owner", ""))
        except (ValueError, AttributeError):
            return ""

    def _renew_regularly(self) -> None:
        def check() -> None:
            if self._is_over.is_set():  # then a silent store is not waited for
                raise StoppedError("The place is left.")

        with interrupted_by(check):
            while not self._is_over.wait(RENEW_S):
                try:
                    self.renew()
                except Exception:  # noqa: BLE001  the network may be down: the next time decides
                    continue

    def renew(self) -> None:
        """Rewrite our object; DestinationUnavailableError if another run took the location."""
        while not self._renewing.acquire(timeout=_CHECK_S):  # the thread's own renewal may wait for a silent store
            check_stop()
        try:
            self.check()
            if self._version is None:
                return
            try:
                self._version = self._replace(self._version)
            except StorageError as error:
                if error.kind == "changed" or error.is_missing:
                    if self._holder() == self._owner:  # the answer to an earlier try was lost
                        self._version = self._find() or self._version
                        return
                    self._is_lost.set()
                    self.check()
                raise explain(error, self._location) from None
        finally:
            self._renewing.release()

    def check(self) -> None:
        if self._is_lost.is_set():
            raise DestinationUnavailableError(
                "Another brim took over this destination while this one could not be seen.",
                hint="Let it end; then run the same command to continue.",
            )

    def release(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(RENEW_S)
        if self._version is not None and not self._is_lost.is_set():
            with suppress(StorageError, StoppedError), stop_delayed():  # the next run sees that it is not renewed
                self._storage.delete([self._name])

"""One run at a time at one place in a bucket: an object that says who is there, written under conditions.

A bucket has no lock that dies with its holder. So the holder writes its object anew every few seconds, and whoever
comes next watches for a while: an object that stays the same belongs to nobody any more. No clocks are compared. A run
that continues an earlier one on the same machine (it holds the lock of the same ledger) need not wait.

Where a store heeds no conditions, the holder looks before it writes and reads back what it wrote. Two that begin within
one such moment both go on, until the next renewal tells one of them; any other two are kept apart.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from brim.errors import DestinationError, DestinationUnavailableError, StoppedError
from brim.state.retry import interrupted_by, leaving, look
from brim.storage.abilities import heeds_conditions
from brim.storage.explain_error import explain, explained
from brim.storage.listing import read_small
from brim.storage.location import Location
from brim.storage.storage import Version, open_storage
from brim.storage.storage_error import StorageError

NAME = ".brim/lock"
RENEW_S = 5.0
DEAD_S = 4 * RENEW_S
_LOOK_S = 0.5


class Lease:
    """`owner` is the same for all runs with one ledger, and random."""

    def __init__(self, address: Location, owner: str, note: Callable[[str], None]) -> None:
        self._address, self._owner, self._note = address, owner, note
        self._storage, self._key = open_storage(address), address.key(NAME)
        self._held: Version | None = None
        self._guarded = True
        self._count = 0
        self._lost = threading.Event()
        self._over = threading.Event()
        self._renewing = threading.Lock()
        self._thread: threading.Thread | None = None

    def take(self, check: Callable[[], None]) -> None:
        """Hold the place, or say who does."""
        with explained(self._address):
            while self._held is None:
                if not self._create():
                    self._take_over(check)
            if self._guarded and not heeds_conditions(self._address, self._key):
                self._guarded = False
                self._held = self._written()
        if not self._guarded:
            self._note("this store heeds no conditions: two runs that begin at the same moment are not kept apart here")
        self._thread = threading.Thread(target=self._renew_again, name="lease", daemon=True)
        self._thread.start()

    def _body(self) -> bytes:
        self._count += 1
        return json.dumps({"owner": self._owner, "count": self._count, "at": time.time_ns()}).encode()

    def _instead(self, of: Version | None) -> Version:
        """Write our object if what is there is `of`, or if nothing is (None): else an error that says so."""
        if self._guarded:
            try:
                return self._storage.put_instead(self._key, self._body(), of)
            except StorageError as error:
                if not error.is_unsupported:
                    raise
                self._guarded = False
        if self._storage.version(self._key) != of:
            raise StorageError("changed", 412)
        return self._written()

    def _written(self) -> Version:
        """Our object, whatever was there; and it is still ours."""
        self._storage.put_bytes(self._key, self._body())
        there = self._storage.version(self._key)
        if there is None or self._holder() != self._owner:
            raise StorageError("changed", 412)
        return there

    def _create(self) -> bool:
        """Hold a place where nobody is; False if somebody is there."""
        if self._storage.version(self._key) is not None:  # a store that heeds no conditions would lose it
            return False
        try:
            self._held = self._instead(None)
        except StorageError as error:
            if not error.is_changed:
                raise
            return False
        return True

    def _take_over(self, check: Callable[[], None]) -> None:
        """Whatever is there: ours from an earlier run, alive, or left by a run that died."""
        there = self._storage.version(self._key)
        if there is None:
            return
        if self._holder() != self._owner:
            self._note("another brim has been at this destination: looking whether it still is")
            until = time.monotonic() + DEAD_S
            while time.monotonic() < until:
                check()
                time.sleep(_LOOK_S)
                now = self._storage.version(self._key)
                if now is None:
                    return
                if now != there:
                    raise DestinationError(
                        "Another brim is building at this destination.", hint="Wait for it to end, or stop it."
                    )
        try:
            self._held = self._instead(there)
        except StorageError as error:
            if not error.is_changed:
                raise

    def _holder(self) -> str:
        try:
            return str(json.loads(read_small(self._address, NAME, reading=False) or b"{}").get("owner", ""))
        except (ValueError, AttributeError):
            return ""

    def _renew_again(self) -> None:
        with interrupted_by(self._need_more):
            while not self._over.wait(RENEW_S):
                try:
                    self.renew()
                except Exception:  # noqa: BLE001  the line may be down: the next time decides
                    continue

    def _need_more(self) -> None:
        """Nobody waits for the answer of a store that is silent when all is over."""
        if self._over.is_set():
            raise StoppedError("The place is left.")

    def renew(self) -> None:
        """Say that we are still here; DestinationUnavailableError if somebody else took the place."""
        while not self._renewing.acquire(timeout=_LOOK_S):  # the thread's own renewal may wait for a silent store
            look()
        try:
            self.check()
            if self._held is None:
                return
            try:
                self._held = self._instead(self._held)
            except StorageError as error:
                if error.is_changed or error.is_missing:
                    if self._holder() == self._owner:  # the answer to an earlier try was lost
                        self._held = self._storage.version(self._key) or self._held
                        return
                    self._lost.set()
                    self.check()
                raise explain(error, self._address) from None
        finally:
            self._renewing.release()

    def check(self) -> None:
        if self._lost.is_set():
            raise DestinationUnavailableError(
                "Another brim took over this destination while this one could not be seen.",
                hint="Let it end; then run the same command to continue.",
            )

    def release(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(RENEW_S)
        if self._held is not None and not self._lost.is_set():
            with suppress(StorageError, StoppedError), leaving():  # whoever comes next sees that nobody renews it
                self._storage.delete([self._key])

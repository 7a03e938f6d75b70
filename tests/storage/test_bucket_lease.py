"""The lease of a destination in a bucket, which allows one run at a time. The object store is in memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore

from brim.errors import DestinationError, DestinationUnavailableError, StoppedError
from brim.state.retry import interrupted_by
from brim.state.stop import Stop
from brim.storage import lease as bucket_lease
from brim.storage import objects
from brim.storage.lease import Lease
from brim.storage.location import Location
from brim.storage.objects import ObjectStorage, translate
from brim.storage.storage import ANY_VERSION, FileInfo

PLACE = Location("s3", "bucket", "some/where")
KEY = "some/where/.brim/lock"


class Bucket:
    """An object store with conditional writes, and a clock that advances during sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.now, self.slept = MemoryStore(), 1000.0, []  # type: ignore[var-annotated]
        self.while_asleep: list[Callable[[], None]] = []
        monkeypatch.setattr(objects, "store_of", {PLACE: self.store}.__getitem__)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep, time_ns=lambda: int(self.now * 1e9))
        monkeypatch.setattr(bucket_lease, "time", clock)
        self.notes: list[str] = []
        self.checks = 0

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        if self.while_asleep:
            self.while_asleep.pop(0)()

    def check(self) -> None:
        self.checks += 1

    def lease(self, owner: str = "me") -> Lease:
        return Lease(PLACE, owner, self.notes.append)

    def body(self) -> dict[str, Any]:
        actual: dict[str, Any] = json.loads(obstore.get(self.store, KEY).bytes().to_bytes())
        return actual

    def put(self, data: bytes) -> None:
        obstore.put(self.store, KEY, data)

    def empty(self) -> bool:
        return not [match for page in obstore.list(self.store) for match in page]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return Bucket(monkeypatch)


def test_an_empty_place_is_taken_and_given_back(bucket: Bucket) -> None:
    """An unused destination is leased by an object with owner, count and time.

    A thread renews the object, and the release deletes it.
    """
    lease = bucket.lease()
    lease.take(bucket.check)
    assert bucket.body() == {"owner": "me", "count": 1, "at": 1000_000_000_000}
    assert lease._thread is not None
    assert (lease._thread.is_alive(), lease._thread.daemon, lease._thread.name) == (True, True, "lease")
    lease.renew()
    assert bucket.body()["count"] == 2
    lease.check()
    lease.release()
    assert not lease._thread.is_alive()
    assert bucket.empty()
    assert (bucket.notes, bucket.slept) == ([], [])


def test_the_object_of_an_earlier_run_is_ones_own(bucket: Bucket) -> None:
    """A resumed run with the same ledger takes over its own lease without waiting."""
    bucket.lease().take(bucket.check)
    second_lease = bucket.lease()
    second_lease.take(bucket.check)
    assert (bucket.slept, bucket.notes, bucket.checks) == ([], [], 0)
    second_lease.renew()
    second_lease.release()


def test_a_place_that_nobody_renews_is_taken_over(bucket: Bucket) -> None:
    """A lease that is not renewed for twenty seconds is taken over. The wait polls twice per second for a stop."""
    bucket.lease("other").take(bucket.check)
    mine = bucket.lease()
    mine.take(bucket.check)
    assert bucket.slept == [0.5] * 40
    assert bucket.checks == 40
    assert "looking whether it still is" in bucket.notes[0]
    assert bucket.body()["owner"] == "me"
    mine.release()


def test_a_place_that_is_renewed_is_refused(bucket: Bucket) -> None:
    other_lease = bucket.lease("other")
    other_lease.take(bucket.check)
    bucket.while_asleep += [lambda: None] * 5 + [other_lease.renew]
    refused = bucket.lease()
    with pytest.raises(DestinationError, match="Another brim is building at this destination") as caught:
        refused.take(bucket.check)
    assert caught.value.hint == "Wait for it to end, or stop it."
    assert len(bucket.slept) == 6
    refused.release()
    assert bucket.body()["owner"] == "other"
    other_lease.release()


def test_a_place_that_is_left_meanwhile_is_taken_at_once(bucket: Bucket) -> None:
    other_lease = bucket.lease("other")
    other_lease.take(bucket.check)
    bucket.while_asleep += [lambda: None, other_lease.release]
    mine = bucket.lease()
    mine.take(bucket.check)
    assert len(bucket.slept) == 2
    assert bucket.body() == {"owner": "me", "count": 1, "at": 1001_000_000_000}
    mine.release()


def test_two_that_wait_for_the_same_place(bucket: Bucket) -> None:
    """Of two runs that wait for the same lease, one takes it over, and the other sees the change and is refused."""
    bucket.lease("dead").take(bucket.check)
    first = bucket.lease("first")
    # The other run takes over at the last poll.
    bucket.while_asleep += [lambda: None] * 39
    bucket.while_asleep.append(lambda: bucket.put(b'{"owner": "first"}'))
    with pytest.raises(DestinationError):
        bucket.lease().take(bucket.check)
    assert first._version is None


@pytest.mark.parametrize("data", [b"", b"no json", b"[1]", b'{"who": 1}'])
def test_an_object_of_somebody_else_is_waited_for(bucket: Bucket, data: bytes) -> None:
    """An object with any other content counts as a foreign lease and is taken over if nothing renews it."""
    bucket.put(data)
    lease = bucket.lease()
    lease.take(bucket.check)
    assert len(bucket.slept) == 40
    lease.release()


def test_an_object_that_changes_before_it_is_taken_over(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the object changes before the takeover, it is read again."""
    bucket.put(b'{"owner": "me"}')
    plain, reads = bucket_lease.read_file, [0]

    def read(*arguments: Any, **options: Any) -> Any:
        actual = plain(*arguments, **options)
        reads[0] += 1
        if reads[0] == 1:
            bucket.put(b'{"owner": "me", "again": 1}')
        return actual

    monkeypatch.setattr(bucket_lease, "read_file", read)
    lease = bucket.lease()
    lease.take(bucket.check)
    assert reads == [2]
    assert bucket.body()["count"] == 2
    lease.release()


def test_a_store_that_says_it_is_not_there(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that answers "not found" instead of a failed condition also means that the lease is lost."""
    lease = bucket.lease()
    lease.take(bucket.check)
    obstore.delete(bucket.store, KEY)
    break_conditions(monkeypatch, object_error("NotFoundError", "not there"))
    with pytest.raises(DestinationUnavailableError, match="took over"):
        lease.renew()
    lease.release()


def test_a_stop_ends_the_waiting(bucket: Bucket) -> None:
    bucket.put(b"{}")

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bucket.lease().take(stop)
    assert bucket.slept == []


def test_whoever_lost_the_place_is_told(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the lease is lost, renewals fail without a request, and the release keeps the other run's lease."""
    lease = bucket.lease()
    lease.take(bucket.check)
    bucket.put(b'{"owner": "other"}')
    for call in (lease.renew, lease.check, lease.renew):
        with pytest.raises(DestinationUnavailableError, match="Another brim took over") as caught:
            call()
        assert caught.value.hint == "Let it end; then run the same command to continue."
        break_conditions(monkeypatch, AssertionError("asked again"))
    lease.release()
    assert bucket.body() == {"owner": "other"}


def test_an_object_that_is_gone_is_a_place_that_is_lost(bucket: Bucket) -> None:
    lease = bucket.lease()
    lease.take(bucket.check)
    obstore.delete(bucket.store, KEY)
    with pytest.raises(DestinationUnavailableError, match="took over"):
        lease.renew()
    lease.release()


def test_a_lost_answer_to_a_renewal_is_no_loss(bucket: Bucket) -> None:
    """If the answer to a renewal was lost, the newer object is recognized by its owner."""
    lease = bucket.lease()
    lease.take(bucket.check)
    bucket.put(b'{"owner": "me"}')
    lease.renew()
    lease.check()
    lease.renew()
    assert bucket.body()["count"] == 3
    lease.release()
    assert bucket.empty()


class Broken:
    """A method of the store that raises an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_: object, **__: object) -> Any:
        raise self.error


def break_conditions(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Make conditional writes fail, and no others."""
    put_bytes = ObjectStorage.put_bytes

    def put(self: ObjectStorage, name: str, data: bytes, expected: FileInfo | None = ANY_VERSION) -> FileInfo:
        if expected is not ANY_VERSION:
            raise error
        return put_bytes(self, name, data)

    monkeypatch.setattr(ObjectStorage, "put_bytes", put)


def object_error(kind: str, text: str) -> Exception:
    """Return an error as the storage raises it."""
    error = translate(type(kind, (Exception,), {"__module__": "obstore.exceptions"})(text))
    assert error is not None
    return error


@pytest.fixture(
    params=[object_error("NotSupportedError", "no"), object_error("GenericError", "status code: 501 Not Implemented")]
)
def unguarded(request: pytest.FixtureRequest, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A store without conditional writes."""
    break_conditions(monkeypatch, request.param)
    return bucket


def test_a_store_without_conditions_is_looked_at(unguarded: Bucket) -> None:
    """Without conditional writes, the lease works with a warning: renewals and the release are the same."""
    lease = unguarded.lease()
    lease.take(unguarded.check)
    assert unguarded.body()["owner"] == "me"
    assert "two runs that begin at the same moment are not kept apart here" in unguarded.notes[0]
    lease.renew()
    assert unguarded.body()["count"] > 1
    lease.release()
    assert unguarded.empty()


def test_without_conditions_somebody_who_is_there_is_seen(unguarded: Bucket) -> None:
    """Without conditional writes, an active lease is respected, and an abandoned one is taken over after 20 s."""
    other_lease = unguarded.lease("other")
    other_lease.take(unguarded.check)
    unguarded.while_asleep += [lambda: None] * 5 + [other_lease.renew]
    with pytest.raises(DestinationError, match="Another brim is building at this destination"):
        unguarded.lease().take(unguarded.check)
    assert unguarded.body()["owner"] == "other"
    unguarded.slept.clear()
    mine = unguarded.lease()
    mine.take(unguarded.check)
    assert unguarded.slept == [0.5] * 40
    assert unguarded.body()["owner"] == "me"
    with pytest.raises(DestinationUnavailableError, match="Another brim took over"):
        other_lease.renew()
    other_lease.release()
    assert unguarded.body()["owner"] == "me"
    mine.release()


def test_without_conditions_the_last_who_began_stays(unguarded: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without conditional writes, the second of two concurrent runs keeps the lease.

    The first one notices when it reads the object back or at its next renewal.
    """
    first, second = unguarded.lease("first"), unguarded.lease("second")
    sent = ObjectStorage.put_bytes

    def slow(self: ObjectStorage, name: str, data: bytes, expected: FileInfo | None = ANY_VERSION) -> FileInfo:
        result = sent(self, name, data, expected)  # raises an error for a conditional write
        monkeypatch.setattr(ObjectStorage, "put_bytes", sent)
        unguarded.put(json.dumps({"owner": "second", "count": 1}).encode())
        return result

    monkeypatch.setattr(ObjectStorage, "put_bytes", slow)
    unguarded.while_asleep.append(lambda: unguarded.put(b'{"owner": "second", "count": 2}'))
    with pytest.raises(DestinationError, match="Another brim"):
        first.take(unguarded.check)
    assert unguarded.body()["owner"] == "second"
    second.take(unguarded.check)
    second.release()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (object_error("GenericError", "status code: 500 Internal"), Exception),
        (object_error("PermissionDeniedError", "status code: 403 Forbidden"), DestinationError),
        (ZeroDivisionError("status code: 501"), ZeroDivisionError),
    ],
)
def test_other_failures_are_said(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    """Other errors are raised when the lease is taken, taken over or renewed."""
    with monkeypatch.context() as broken:
        break_conditions(broken, error)
        with pytest.raises(raised) as caught:
            bucket.lease("other").take(bucket.check)
    assert not bucket.notes
    retained = bucket.lease()
    retained.take(bucket.check)
    break_conditions(monkeypatch, error)
    with pytest.raises(type(error)):
        bucket.lease()._take_over(bucket.check)
    with pytest.raises(type(caught.value)):
        retained.renew()
    retained.check()
    monkeypatch.undo()


def test_a_failure_to_remove_is_no_matter(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed deletion at release is ignored, because the lease expires. Programming errors are raised."""
    errors = ((object_error("GenericError", "cut"), False), (StoppedError("now"), False), (ZeroDivisionError(), True))
    for error, raises in errors:
        lease = bucket.lease()
        lease.take(bucket.check)
        monkeypatch.setattr(ObjectStorage, "delete", Broken(error))
        if raises:
            with pytest.raises(ZeroDivisionError):
                lease.release()
        else:
            lease.release()


def test_it_is_renewed_every_five_seconds_whatever_happens(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed renewal is retried after five seconds, because the network may be down temporarily."""
    lease = bucket.lease()
    delays: list[float] = []
    renewals = [0]

    def wait(seconds: float) -> bool:
        delays.append(seconds)
        return len(delays) > 3

    def renew() -> None:
        renewals[0] += 1
        raise OSError("down")

    monkeypatch.setattr(lease, "_is_over", SimpleNamespace(wait=wait))
    monkeypatch.setattr(lease, "renew", renew)
    lease._renew_regularly()
    assert (delays, renewals) == ([5.0] * 4, [3])


def test_a_renewal_waits_for_the_one_before(bucket: Bucket) -> None:
    lease = bucket.lease()
    lease.take(bucket.check)
    with lease._renewing:
        thread = threading.Thread(target=lease.renew, daemon=True)
        thread.start()
        thread.join(0.05)
        assert bucket.body()["count"] == 1
    thread.join(10)
    assert bucket.body()["count"] == 2
    lease.release()


def test_renewal_hears_a_stop_while_another_renewal_hangs(bucket: Bucket) -> None:
    """A renewal can be stopped while it waits for a renewal of the thread that hangs."""
    lease, stop = bucket.lease(), Stop()
    lease.take(bucket.check)
    stop.request()
    with lease._renewing, interrupted_by(stop.check), pytest.raises(StoppedError):
        lease.renew()
    lease.release()


def test_a_store_that_heeds_no_conditions_is_found_out(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that ignores the conditions of writes is detected. Then the object is read before each write."""
    put_bytes = ObjectStorage.put_bytes

    def put(self: ObjectStorage, name: str, data: bytes, expected: FileInfo | None = ANY_VERSION) -> FileInfo:
        return put_bytes(self, name, data)

    monkeypatch.setattr(ObjectStorage, "put_bytes", put)
    lease = bucket.lease()
    lease.take(bucket.check)
    assert bucket.body()["owner"] == "me", "what the question has overwritten is written again"
    assert "two runs that begin at the same moment are not kept apart here" in bucket.notes[0]
    bucket.put(b'{"owner": "other"}')
    with pytest.raises(DestinationUnavailableError, match="Another brim took over"):
        lease.renew()
    lease.release()
    assert bucket.body()["owner"] == "other"


def test_a_renewal_that_hangs_is_not_waited_for(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The release waits for at most one renewal interval, and the thread exits after its renewal."""
    lease = bucket.lease()
    waited: list[float | None] = []
    lease._thread = SimpleNamespace(join=waited.append)  # type: ignore[assignment]
    monkeypatch.setattr(bucket_lease, "RENEW_S", 0.01)
    with lease._renewing:
        thread = threading.Thread(target=lease._renew_regularly, daemon=True)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        lease.release()
        thread.join(10)
    assert not thread.is_alive()
    assert waited == [0.01]


def test_a_lock_that_cannot_be_read_is_a_fault_of_the_destination(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unreadable lease is reported as an error of the destination and not of the source."""
    bucket.put(b"{}")
    monkeypatch.setattr(
        obstore, "get_async", Broken(object_error("PermissionDeniedError", "status code: 403 Forbidden"))
    )
    with pytest.raises(DestinationError):
        bucket.lease().take(bucket.check)

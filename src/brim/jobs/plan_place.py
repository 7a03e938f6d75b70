"""Where a saved plan and the receipts of its parts are: beside each other in a folder, or in a bucket.

From a bucket, the plan is fetched once and kept with the user's state. The ledger of a part is written there too, and
copied to the bucket every few seconds and at the end: what a killed part did in between is done again.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from brim.buckets.bucket_address import Access, BucketAddress, is_bucket_address, parse_bucket_address
from brim.buckets.bucket_errors import explained
from brim.buckets.listing import list_objects, read_small, stat_object
from brim.buckets.read_object import ObjectStream
from brim.buckets.send_object import send_small
from brim.errors import DestinationError, InputError
from brim.formats.splice import FileSplice
from brim.jobs.part_receipts import Part, PartReceipts
from brim.records import dataclass
from brim.state.durable import private_folder, reason, write_whole
from brim.state.ledger import LEDGER, Ledger, Receipt
from brim.state.lock import locked, owner_of
from brim.stores.bucket_lease import Lease
from brim.stores.bucket_store import BucketCarrier
from brim.stores.destination import state_home
from brim.stores.unit_objects import fetch_unit, send_unit, units_there

_COPY_S = 5.0
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class PlanPlace:
    """A plan as a file of this machine, and the receipts of its parts wherever they are. `shown` is what users say."""

    path: Path
    shown: str
    receipts: PartReceipts


def open_place(plan: str | os.PathLike[str], access: Access | None = None) -> PlanPlace:
    text = os.fspath(plan)
    if not is_bucket_address(text):
        return PlanPlace(_local(text), str(_local(text)), receipts_at(text))
    address = parse_bucket_address(text, access)
    stat = stat_object(address)
    if stat is None:
        raise InputError(f"There is no plan at {address}.", hint="Save one with brim plan SOURCE DEST --save PLAN.")
    # Another plan under the same name has other receipts: its ETag tells.
    path = _home(address) / f"{hashlib.sha256(stat.etag.encode()).hexdigest()[:16]}.plan"
    if not path.exists() or path.stat().st_size != stat.st_size:  # a crash of the machine may have cut it off
        # Parts that start together on one machine each fetch it for themselves; the last one to end wins.
        temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        bucket = replace(address, prefix="")
        stream = ObjectStream(bucket, address.prefix, stat.st_size, stat.etag)
        try:
            with _usable(path.parent), open(temporary, "wb") as file, closing(stream):
                for at in range(0, stat.st_size, _CHUNK):
                    file.write(stream.read_at(at, _CHUNK))
            os.chmod(temporary, 0o600)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
    return PlanPlace(path, str(address), receipts_at(text, access))


def receipts_at(plan: str | os.PathLike[str], access: Access | None = None) -> PartReceipts:
    """The receipts of the parts of a plan, be there any or not."""
    text = os.fspath(plan)
    if not is_bucket_address(text):
        return PartReceipts(_local(text))
    address = parse_bucket_address(text, access)
    return BucketReceipts(address, _home(address))


def save_to(plan: str | os.PathLike[str], write: Callable[[Path], None], access: Access | None = None) -> None:
    """Have a plan written to a file, and bring it where it shall be."""
    text = os.fspath(plan)
    if not is_bucket_address(text):
        write(_local(text))
        return
    address = parse_bucket_address(text, access)
    if not address.prefix:
        raise InputError(f"{text!r} names a bucket and no plan in it.", hint="Write s3://BUCKET/NAME.plan.")
    made = _home(address) / f"new-{secrets.token_hex(8)}.plan"
    folder, _, name = address.prefix.rpartition("/")
    carrier = BucketCarrier(replace(address, prefix=folder))
    try:
        write(made)
        with FileSplice(made) as splice:
            carrier.put(name, splice, None, _Nobody())
    finally:
        made.unlink(missing_ok=True)


def _local(text: str) -> Path:
    if "://" in text:
        raise InputError(f"A plan is kept in a file or a bucket, not at {text!r}.", hint="Name a file, or s3://…")
    return Path(os.path.abspath(text))


def _home(address: BucketAddress) -> Path:
    """Where this machine keeps what it knows of a plan in a bucket."""
    home = state_home("plans", f"{address} {address.access.endpoint or ''}", address.prefix)
    with _usable(home):
        private_folder(home)
    return home


@contextmanager
def _usable(home: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DestinationError(
            f"The folder that this machine keeps plans of buckets in, {str(home)!r}, cannot be used: {reason(error)}.",
            hint="Name another one for all that brim keeps: set XDG_STATE_HOME.",
        ) from error


class _Nobody:
    def hashed(self, size: int) -> None: ...
    def sent(self, size: int) -> None: ...


class BucketReceipts(PartReceipts):
    """`PLAN.parts/` in a bucket."""

    def __init__(self, plan: BucketAddress, home: Path) -> None:
        super().__init__(home / "x")
        self.root = home / "parts"
        self._address = replace(plan, prefix=f"{plan.prefix}.parts")
        self.shown = str(self._address)

    def _names(self) -> list[str]:
        return sorted({name.split("/", 1)[0] for name, _ in list_objects(self._address) if name.endswith(LEDGER)})

    def ledger(self, part: Part) -> Ledger:
        return Ledger.of(read_small(self._address, f"{part.folder}/{LEDGER}") or b"")

    @contextmanager
    def part(self, part: Part) -> Iterator[Path]:
        self._need_count(part)
        folder = self.root / part.folder
        self._make(folder)
        with locked(folder, busy=f"Part {part} is being done by another brim."):
            lease = Lease(self._address.below(part.folder), owner_of(folder), lambda text: None)
            lease.take(lambda: None)
            try:
                there = read_small(self._address, f"{part.folder}/{LEDGER}")
                if there is not None:
                    write_whole(folder / LEDGER, _longer(there, (folder / LEDGER).read_bytes()))
                with self._copied(part, folder):
                    self._need_count(part)
                    yield folder
            finally:
                lease.release()

    @contextmanager
    def _copied(self, part: Part, folder: Path) -> Iterator[None]:
        """While this goes on, the bucket gets the ledger every few seconds."""
        over = threading.Event()
        sent: list[bytes] = []

        def copy() -> None:
            data = (folder / LEDGER).read_bytes()
            if [data] != sent:
                with explained(self._address):
                    send_small(self._address, self._address.key(f"{part.folder}/{LEDGER}"), data)
                sent[:] = [data]

        def again() -> None:
            while not over.wait(_COPY_S):
                try:
                    copy()
                except Exception:  # noqa: BLE001  the line may be down: the last copy decides
                    continue

        copy()  # whoever looks sees that the part has begun
        thread = threading.Thread(target=again, name="receipts", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            copy()

    def keep(self, part: Part, folder: Path, name: str) -> None:
        send_unit(self._address.below(part.folder), folder, name)

    def holder(self, part: Part, folder: Path) -> Callable[[Receipt], bool]:
        return units_there(self._address.below(part.folder))

    def bring(self, part: Part, name: str, folder: Path) -> None:
        fetch_unit(self._address.below(part.folder), name, folder)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Parts that still go on have nothing to lose: only what all of them brought is published."""
        self._make(self.root)
        with locked(self.root, busy="This plan is being finished by another brim."):
            lease = Lease(self._address, owner_of(self.root), lambda text: None)
            lease.take(lambda: None)
            try:
                yield
            finally:
                lease.release()

    def forget(self, names: Iterable[str]) -> None:
        gone = set(names)
        for part, found in list(self.ledgers()) if gone else []:
            here = gone & found.receipts.keys()
            if here:
                folder = self.root / part.folder
                self._make(folder)
                write_whole(folder / LEDGER, read_small(self._address, f"{part.folder}/{LEDGER}") or b"")
                ledger = Ledger(folder)
                for name in sorted(here):
                    ledger.forget(name)
                ledger.close()
                with explained(self._address):
                    key = self._address.key(f"{part.folder}/{LEDGER}")
                    send_small(self._address, key, (folder / LEDGER).read_bytes())


def _longer(there: bytes, here: bytes) -> bytes:
    """The ledger that knows more: this machine's own, if it goes on from what the bucket has."""
    return here if here.startswith(there) else there

"""The rules between ledger, destination and requested shards, tested on a destination that records every call.

The files of the destination are in memory, and the ledger is a real one. All calls of the destination and writes of the
ledger are recorded in one list, so that tests can check their order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from brim.errors import DestinationError, DestinationUnavailableError, PlanMismatchError
from brim.formats.card import CardFacts, SplitFacts
from brim.jobs.destination import Destination, Existing, Publication, Run, UploadBudget, UploadsExpired
from brim.jobs.destination_paths import dataset_paths
from brim.jobs.job import Delivery, Job
from brim.jobs.manifest import DatasetCard
from brim.jobs.preflight import JobSettings
from brim.jobs.publish_options import PublishOptions
from brim.jobs.reconcile import STAGED_S, WHOLE_JOB, Reconciliation, Scope
from brim.jobs.shard_set import ShardSet
from brim.memory.limit import Limit
from brim.plans.cut_shards import Shard
from brim.plans.fingerprint import digest_json
from brim.progress import Progress
from brim.state.ledger import JobRecord, Ledger, Receipt, finished_ledger
from brim.state.stop import Stop
from brim.storage.location import folder_location
from brim.storage.storage import PutResult


def sha(content: str) -> str:
    return digest_json(content)


class Content:
    """The bytes of a shard with their hash."""

    def __init__(self, text: str, size: int) -> None:
        self.text, self.size, self.path = text, size, None

    def __enter__(self) -> Content:
        return self

    def __exit__(self, *_: object) -> None: ...

    def sha256(self, advance: Callable[[int], None]) -> str:
        advance(self.size)
        return sha(self.text)

    def splice(self) -> Content:
        return self


class Shards(ShardSet):
    """Shards by name, each with a text as its content. `dates` are those of the source files."""

    def __init__(self, contents: dict[str, str], dates: str = "d", known: dict[str, str] | None = None) -> None:
        self.contents, self.dates, self.known = contents, dates, known or {}

    @property
    def facts(self) -> dict[str, Any]:
        return {"rows": len(self.contents), "shards": sorted(self.contents.items())}

    @property
    def fingerprint(self) -> str:
        return digest_json(self.facts)

    @property
    def rows(self) -> int:
        return len(self.contents)

    @property
    def shards(self) -> Sequence[Shard]:
        return [Shard(name, "train", index, index + 1, 10) for index, name in enumerate(self.contents)]

    def changes_from(self, facts: dict[str, Any]) -> list[str]:
        return ["the rows changed"]

    def key(self, shard: Shard) -> str:
        return sha(f"key of {self.contents[shard.name]}")

    def with_mtimes(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, str]]:
        return ((shard, self.dates) for shard in shards)

    def size(self, shards: Sequence[Shard]) -> int:
        return 10 * len(shards)

    def content(self, shard: Shard) -> Any:
        return Content(self.contents[shard.name], 10)

    def known_sha256(self, shard: Shard) -> str | None:
        return self.known.get(shard.name)

    def card(self, receipts: Iterable[Receipt]) -> CardFacts:
        return CardFacts([SplitFacts("train", self.rows, 0, self.rows)], None, ".parquet", [])


class Crashed(Exception):
    """A simulated crash of the machine."""


class Recorded(Destination):
    """A destination with files in memory. `crash_at` is the number of the call that is not executed."""

    def __init__(self, calls: list[str], ledger: Ledger, *, staged: bool = False, manifests: bool = False) -> None:
        self.calls, self.ledger, self.is_staged, self._has_manifests = calls, ledger, staged, manifests
        self.files: dict[str, str] = {}
        self.retained: set[str] = set()
        self.published: list[bytes] = []
        self.card = ""
        self.free: int | None = None
        self.paths = dataset_paths(folder_location("/nowhere"), None, PublishOptions())

    def call(self, text: str) -> None:
        self.calls.append(text)

    def read_existing(self) -> Existing:
        manifests = list(self.published) if self._has_manifests else None
        return Existing(sorted(self.files), manifests, self.card == "unfinished")

    @contextmanager
    def open(self, fingerprint: str, budget: UploadBudget) -> Iterator[Existing]:
        yield self.read_existing()

    def has_receipt(self, receipt: Receipt) -> bool:
        return not self.ledger.is_damaged(receipt) and self.files.get(receipt.name) == receipt.sha256

    def has_content(self, receipt: Receipt) -> bool:
        return receipt.sha256 in self.retained

    def retain(self, receipt: Receipt) -> None:
        self.call(f"retain {receipt.name}")
        self.retained.add(self.files.pop(receipt.name))

    def restore(self, receipt: Receipt, name: str) -> str:
        self.call(f"restore {name}")
        self.retained.remove(receipt.sha256)
        self.files[name] = receipt.sha256
        return ""

    def discard(self, names: Iterable[str]) -> None:
        self.call("discard")
        for name in names:
            self.files.pop(name, None)
        self.retained.clear()

    def free_bytes(self) -> int | None:
        return self.free

    def start(self, title: str, missing: int, card: DatasetCard) -> None:
        self.call(f"begin {missing}")
        self.card = "unfinished"

    def upload(self, name: str, content: Any, sha256: str | None, watcher: Any) -> PutResult:
        self.call(f"upload {name}")
        assert sha256 in (None, sha(content.text))
        self.files[name] = sha(content.text)
        return PutResult(sha(content.text))

    def checkpoint(self, receipts: Sequence[Receipt]) -> None:
        self.call(f"checkpoint {len(receipts)}")

    def manifest_name(self, split: str) -> str | None:
        return f".brim/{split}.jsonl" if self._has_manifests else None

    def publish(self, publication: Publication) -> str:
        self.call(f"publish gone={sorted(publication.removed)}")
        for name in publication.removed:
            self.files.pop(name, None)
        assert {r.name: r.sha256 for r in publication.receipts}.items() <= self.files.items()
        self.published = list(publication.manifests.values())
        self.card = "final"
        return "listed"


class RecordedLedger(Ledger):
    """A ledger that records its writes among the calls."""

    def __init__(self, folder: Path, calls: list[str]) -> None:
        self.calls: list[str] = []
        super().__init__(folder)
        self.calls = calls

    def _write(self, *records: dict[str, Any]) -> None:
        for record in records:
            if record["type"] in ("job", "shard", "gone"):
                self.calls.append(f"{record['type']} {record.get('name', '')}".strip())
        super()._write(*records)

    def finish(self, *values: Any) -> None:
        self.calls.append("finish")
        super().finish(*values)


class World:
    """A state folder and a destination that are used by several runs."""

    def __init__(self, folder: Path, *, staged: bool = False, manifests: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.calls = folder, list[str]()
        self.ledger = RecordedLedger(folder, self.calls)
        self.destination = Recorded(self.calls, self.ledger, staged=staged, manifests=manifests)
        self.notes: list[str] = []
        self.progress = Progress(forward_to=SimpleNamespace(note=self.notes.append))

    def reopen(self) -> None:
        """Read the ledger again, as the next run does."""
        self.ledger.close()
        self.ledger = self.destination.ledger = RecordedLedger(self.folder, self.calls)

    def rules(self, shards: ShardSet, scope: Scope = WHOLE_JOB, **options: Any) -> Reconciliation:
        values = {"fresh": False, "updates": False, "replaces_foreign": False} | options
        return Reconciliation(Run(self.ledger, Stop(), self.progress), self.destination, shards, scope, **values)

    def begin(self, shards: ShardSet, scope: Scope = WHOLE_JOB, **options: Any) -> Reconciliation:
        rules, existing = self.rules(shards, scope, **options), self.destination.read_existing()
        rules.agree(existing)
        rules.start(existing, None)
        return rules

    def missing(self, rules: Reconciliation) -> list[str]:
        return [shard.name for shard in rules.missing_shards(1, 10**9)]

    def deliver(self, shards: ShardSet, **options: Any) -> Any:
        job = Job.__new__(Job)
        job.plan, job.settings, job.forecast = None, JobSettings(**options), None  # type: ignore[assignment]
        job.paths, job.limit = self.destination.paths, Limit(10**9, "--memory")
        run = Run(self.ledger, Stop(), self.progress)
        return Delivery(job, run, self.destination, shards, WHOLE_JOB, None).deliver()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "state")


OLD = {"data/a-00000-of-00003.parquet": "one", "data/a-00001-of-00003.parquet": "two",
       "data/a-00002-of-00003.parquet": "three"}  # fmt: skip
A, B, C = OLD
NEW = {A: "new", B: "one", C: "two"}  # a new row at the start moves the content of two shards to the next name


def test_a_new_job_uploads_all_shards_between_the_two_cards(world: World) -> None:
    """A new job writes the unfinished card, each shard before its receipt, the final card, and then the ledger."""
    result = world.deliver(Shards(OLD))
    uploads = [call for name in OLD for call in (f"upload {name}", f"shard {name}")]
    assert sorted(world.calls[2:-2]) == sorted(uploads)
    for name in OLD:
        assert world.calls.index(f"upload {name}") < world.calls.index(f"shard {name}")
    assert world.calls[:2] == ["job", "begin 3"]
    assert world.calls[-2:] == ["publish gone=[]", "finish"]
    assert (result.written, result.kept, result.proved) == (3, 0, "listed")


def test_the_same_job_again_changes_nothing(world: World) -> None:
    world.deliver(Shards(OLD))
    world.reopen()
    world.calls.clear()
    result = world.deliver(Shards(OLD))
    assert world.calls == ["publish gone=[]", "finish"]
    assert (result.written, result.kept) == (0, 3)


def test_another_dataset_is_refused_and_nothing_changes(world: World) -> None:
    world.deliver(Shards(OLD))
    world.reopen()
    world.calls.clear()
    with pytest.raises(PlanMismatchError, match="another dataset") as refused:
        world.deliver(Shards(NEW))
    assert "update=True" in refused.value.hint
    assert world.calls == []


def test_another_dataset_may_use_a_destination_whose_files_were_removed(world: World) -> None:
    world.deliver(Shards(OLD))
    world.destination.files.clear()
    world.reopen()
    world.deliver(Shards(NEW))
    assert world.destination.files == {name: sha(text) for name, text in NEW.items()}


def test_update_moves_content_that_gets_another_name(world: World) -> None:
    """The receipt of a moved file is removed before the move, and the new receipt is written after it."""
    world.deliver(Shards(OLD))
    world.reopen()
    world.calls.clear()
    world.deliver(Shards(NEW), update=True)
    calls = world.calls
    assert [call for call in calls if call.startswith("upload")] == [f"upload {A}"]
    for old, new in ((A, B), (B, C)):
        assert calls.index(f"gone {old}") < calls.index(f"retain {old}") < calls.index(f"restore {new}")
        assert calls.index(f"restore {new}") < calls.index(f"shard {new}")
    assert calls.index(f"gone {C}") < calls.index(f"restore {C}")
    assert world.destination.files == {name: sha(text) for name, text in NEW.items()}
    assert not world.destination.retained


def test_of_two_shards_with_the_same_content_each_file_is_used_once(world: World) -> None:
    """Of two shards with the same content and key, one file is reused and the other shard is uploaded."""
    world.deliver(Shards({A: "one", B: "one"}))
    world.reopen()
    world.calls.clear()
    world.deliver(Shards({A: "new", B: "one", C: "one"}), update=True)
    assert {call for call in world.calls if call.startswith("upload")} == {f"upload {A}", f"upload {C}"}


def test_a_damaged_shard_is_not_reused_and_is_written_again(world: World) -> None:
    world.deliver(Shards(OLD))
    world.reopen()
    world.ledger.record_damage({A: sha("one")})
    assert not world.destination.has_receipt(world.ledger.receipts[A])
    world.calls.clear()
    world.deliver(Shards(OLD))
    assert [call for call in world.calls if call.startswith("upload")] == [f"upload {A}"]
    assert any("brim verify found that it is damaged" in note for note in world.notes)
    world.ledger.record_damage({B: sha("two")})
    world.calls.clear()
    world.deliver(Shards({**OLD, A: "two", B: "new"}), update=True)
    assert {f"upload {A}", f"upload {B}"} <= set(world.calls)


def test_fresh_discards_the_earlier_shards_after_all_checks(world: World) -> None:
    world.deliver(Shards(OLD))
    world.reopen()
    world.calls.clear()
    world.destination.free = 0
    with pytest.raises(DestinationUnavailableError, match="free disk space"):
        world.begin(Shards({**NEW, "data/more.parquet": "more"}), fresh=True)
    assert world.calls == []
    world.destination.free = 10
    world.begin(Shards({**NEW, "data/more.parquet": "more"}), fresh=True)
    assert world.calls == [f"gone {A}", f"gone {B}", f"gone {C}", "discard", "job"]
    assert not world.destination.files
    assert not world.ledger.receipts_by_key()


def test_space_counts_only_shards_that_are_not_reused(world: World) -> None:
    world.deliver(Shards(OLD))
    world.reopen()
    world.destination.free = 9
    with pytest.raises(DestinationUnavailableError, match="need 10 B"):
        world.begin(Shards(NEW), updates=True)
    world.destination.free = 10
    world.begin(Shards(NEW), updates=True)


# Foreign files


def test_a_foreign_file_is_refused_unless_it_is_replaced(world: World) -> None:
    world.destination.files["data/other.parquet"] = sha("other")
    with pytest.raises(DestinationError, match=r"foreign file.*data/other\.parquet"):
        world.begin(Shards(OLD))
    assert world.calls == []
    rules = world.begin(Shards(OLD), replaces_foreign=True)
    assert rules.foreign == {"data/other.parquet"}


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_file_with_the_name_of_a_shard_is_ours_only_if_a_build_was_announced(world: World, unfinished: bool) -> None:
    """Without a ledger, an existing file counts as a shard only if the card announces an unfinished build.

    The ledger may be on another machine that was lost.
    """
    world.destination.files[A] = sha("one")
    world.destination.card = "unfinished" if unfinished else ""
    if unfinished:
        assert world.missing(world.begin(Shards(OLD))) == [A, B, C]
    else:
        with pytest.raises(DestinationError, match="foreign"):
            world.begin(Shards(OLD))


def test_a_file_without_a_receipt_is_ours_while_the_job_that_planned_it_is_unfinished(world: World) -> None:
    """A file without a receipt belongs to the unfinished job that planned it, also for the next job with other names.

    A kill between writing the file and its receipt leaves such a file.
    """
    world.begin(Shards(OLD))
    world.destination.files[B] = sha("two")
    world.reopen()
    assert world.missing(world.begin(Shards(OLD))) == [A, B, C]
    second = Shards({f"data/a-0000{n}-of-00002.parquet": str(n) for n in range(2)})
    world.begin(second, updates=True)
    assert B in world.ledger.names


# The published ledger


def manifest_of(shards: Shards) -> bytes:
    receipts = [Receipt(name, "train", 1, 10, sha(text), sha(f"key of {text}"), "d", shards.fingerprint[:16])
                for name, text in shards.contents.items()]  # fmt: skip
    return finished_ledger(JobRecord(shards.fingerprint, shards.facts, {}), receipts)


def published(tmp_path: Path, shards: Shards, **options: bool) -> World:
    world = World(tmp_path / "state", manifests=True, **options)
    world.destination.published = [manifest_of(shards)]
    world.destination.files = {name: sha(text) for name, text in shards.contents.items()}
    return world


def test_receipts_are_taken_over_from_the_destination(tmp_path: Path) -> None:
    """A machine without a ledger takes over the receipts of a published dataset and uploads nothing again."""
    world = published(tmp_path, Shards(OLD))
    assert world.missing(world.begin(Shards(OLD))) == []
    assert set(world.ledger.receipts) == set(OLD)


def test_a_finished_ledger_that_is_out_of_date_is_replaced(tmp_path: Path) -> None:
    world = World(tmp_path / "state", manifests=True)
    world.deliver(Shards(OLD))
    world.destination.published = [manifest_of(Shards(NEW))]
    world.destination.files = {name: sha(text) for name, text in NEW.items()}
    world.reopen()
    with pytest.raises(PlanMismatchError):
        world.begin(Shards(OLD))
    assert world.missing(world.begin(Shards(NEW))) == []


def test_an_unfinished_ledger_is_kept(tmp_path: Path) -> None:
    """An unfinished local ledger is kept, because its receipts are newer than the published ledger."""
    world = published(tmp_path, Shards(OLD))
    world.ledger.start_job(JobRecord(Shards(NEW).fingerprint, Shards(NEW).facts, {}))
    rules = world.begin(Shards(NEW), updates=True)
    assert world.ledger.names >= set(OLD)
    assert world.missing(rules) == [A, B, C]


def test_an_emptied_destination_starts_over(tmp_path: Path) -> None:
    world = World(tmp_path / "state", manifests=True)
    world.deliver(Shards(OLD))
    world.destination.published, world.destination.files = [], {}
    world.reopen()
    assert world.missing(world.begin(Shards(NEW))) == [A, B, C]


class Part(Scope):
    """A part with two of the three shards."""

    names = frozenset([A, B])
    ledger_dir = Path("/nowhere")


@pytest.mark.parametrize(("staged", "updates", "refused"), [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_part_refuses_another_dataset_unless_it_may_be_replaced(
    tmp_path: Path, staged: int, updates: int, refused: int
) -> None:
    """A part refuses a destination with another dataset unless it may replace it, and takes over no receipts."""
    world = published(tmp_path, Shards(NEW), staged=bool(staged))
    if refused:
        with pytest.raises(PlanMismatchError, match="another dataset"):
            world.begin(Shards(OLD), Part(), updates=bool(updates))
    else:
        assert world.missing(world.begin(Shards(OLD), Part(), updates=True)) == [A, B]
    assert set(world.ledger.receipts) == set()


def test_receipts_of_parts_are_added_before_anything_is_missing(world: World) -> None:
    """The finish of a plan adds the receipts of its parts first, so that only other shards are missing."""
    shards = Shards(OLD)
    receipt = Receipt(A, "train", 1, 10, sha("one"), sha("key of one"), "d", shards.fingerprint[:16])

    class Finish(Scope):
        def receipts_of_parts(self, ledger: Ledger) -> list[Receipt]:
            return [receipt]

    world.destination.files[A] = sha("one")
    assert world.missing(world.begin(shards, Finish())) == [B, C]


# Missing shards


def test_shards_are_missing_without_a_receipt_of_this_job_or_without_their_file(world: World) -> None:
    world.deliver(Shards(OLD))
    world.reopen()
    del world.destination.files[B]
    assert world.missing(world.begin(Shards(OLD))) == [B]
    world.ledger.add(replace(world.ledger.receipts[C], job="another"))
    assert world.missing(world.rules(Shards(OLD))) == [B]  # found by its key
    assert world.ledger.receipts[C].job == Shards(OLD).fingerprint[:16]


def test_rows_that_were_computed_again_with_other_values_are_missing(world: World) -> None:
    """A recomputed shard with other values is missing, because the existing file has the old content.

    Functions may be random.
    """
    first = Shards(OLD, known={name: sha(text) for name, text in OLD.items()})
    world.deliver(first)
    world.reopen()
    reopened = Shards(OLD, known={**first.known, B: sha("other")})
    assert world.missing(world.begin(reopened)) == [B]


def test_doubtful_shards_are_hashed(world: World) -> None:
    """Shards with changed dates are hashed. If the content is the same, the receipt is renewed."""
    world.deliver(Shards(OLD))
    world.reopen()
    changed = Shards(OLD, dates="e")
    changed.content = lambda shard: Content({**OLD, C: "edited"}[shard.name], 10)  # type: ignore[method-assign]
    rules = world.begin(changed)
    assert world.missing(rules) == [C]
    assert rules.known_sha256 == {C: sha("edited")}
    assert world.ledger.receipts[A].mtimes == "e"
    assert world.ledger.receipts[C].mtimes == "d"


@pytest.mark.parametrize(("age_s", "counts"), [(60, True), (STAGED_S - 60, True), (STAGED_S + 60, False)])
def test_an_upload_that_is_not_committed_counts_for_twelve_hours(tmp_path: Path, age_s: int, counts: bool) -> None:
    """An upload without a commit is valid for twelve hours. Then it is repeated with the known hash."""
    world = World(tmp_path / "state", staged=True)
    rules = world.begin(Shards(OLD))
    for shard in rules.missing_shards(1, 10**9):
        receipt = rules.receipt(shard, 10, sha(OLD[shard.name]))
        world.ledger.add(replace(receipt, staged_at=int(time.time()) - age_s))
    rules = world.rules(Shards(OLD))
    assert world.missing(rules) == ([] if counts else [A, B, C])
    assert rules.known_sha256 == ({} if counts else {name: sha(text) for name, text in OLD.items()})


def test_content_that_the_hub_has_under_another_name_is_not_uploaded(tmp_path: Path) -> None:
    world = World(tmp_path / "state", staged=True)
    rules = world.begin(Shards(OLD))
    for shard in rules.missing_shards(1, 10**9):
        receipt = rules.receipt(shard, 10, sha(OLD[shard.name]))
        world.ledger.add(replace(receipt, staged_at=int(time.time()) - 2 * STAGED_S))
    world.destination.retained = {sha("one")}
    assert world.missing(world.rules(Shards(OLD))) == [B, C]


def test_uploads_that_have_disappeared_are_sent_again(tmp_path: Path) -> None:
    """Uploads that disappeared are repeated in the same run, up to three times."""
    world = World(tmp_path / "state", staged=True)
    publish, lost = world.destination.publish, [A, B]

    def lose(publication: Publication) -> str:
        if lost:
            name = lost.pop()
            del world.destination.files[name]
            raise UploadsExpired([name])
        return publish(publication)

    world.destination.publish = lose  # type: ignore[method-assign]
    world.deliver(Shards(OLD))
    assert [call for call in world.calls if call == f"upload {A}"] == [f"upload {A}"] * 2
    assert world.destination.files == {name: sha(text) for name, text in OLD.items()}


# Crashes


class Crashing(World):
    """A world that crashes at a call, before or after its effect."""

    def __init__(self, folder: Path, after: int, **options: bool) -> None:
        super().__init__(folder, **options)
        self.left: float = after
        call, write = self.destination.call, RecordedLedger._write
        world = self

        def counted() -> None:
            world.left -= 1
            if world.left < 0:
                raise Crashed

        def crashing_call(text: str) -> None:
            call(text)
            counted()

        def crashing_write(self: RecordedLedger, *records: dict[str, Any]) -> None:
            counted()
            write(self, *records)
            counted()

        self.destination.call = crashing_call  # type: ignore[method-assign]
        self._write = crashing_write

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RecordedLedger, "_write", self._write)


@pytest.mark.parametrize("seed", range(200))
def test_a_job_that_crashes_anywhere_reaches_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A build and two updates with random crashes reach the same result as undisturbed ones.

    At every crash, each receipt has its content.
    """
    moments = random.Random(seed)
    options = {"staged": False, "manifests": seed % 2 == 0}
    whole = World(tmp_path / "whole", **options)
    world = Crashing(tmp_path / "state", moments.randrange(4), **options)
    world.patch(monkeypatch)
    for contents, settings in ((OLD, {}), (NEW, {"update": True}), ({A: "two", B: "new"}, {"update": True})):
        monkeypatch.setattr(RecordedLedger, "_write", lambda self, *records: Ledger._write(self, *records))
        whole.reopen()
        whole.deliver(Shards(contents), **settings)
        world.patch(monkeypatch)
        for _ in range(40):
            try:
                world.deliver(Shards(contents), **settings)
                break
            except Crashed:
                # Each receipt has stored content, or content that is being moved to another name.
                for receipt in Ledger(world.folder).receipts.values():
                    assert world.destination.has_receipt(receipt) or world.destination.has_content(receipt), (
                        receipt.name
                    )
                world.left = moments.randrange(1, 12)
                world.reopen()
        else:
            raise AssertionError("it did not get further")
        assert world.destination.files == whole.destination.files
        assert world.destination.card == "final"
        world.left = float("inf")
        world.reopen()
        world.left = moments.randrange(4)
    remaining, right = ((w.folder / "ledger.jsonl").read_bytes() for w in (world, whole))
    assert remaining == right, "the ledger depends on the shards, not on interruptions"

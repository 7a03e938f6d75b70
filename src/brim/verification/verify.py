"""Verify a dataset: read it from its destination and compare it with its checksums, its card and its source."""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from brim.errors import BrimError, DestinationError, InputError, SourceChangedError, VerificationError
from brim.file_set import Ints
from brim.formats.card import (
    CARD,
    card_info,
    card_rows,
    card_splits,
    feature_changes,
    info_faults,
    read_card,
    repeated_field,
)
from brim.formats.card_configs import card_entries, config_faults, fits, names_nothing, patterns_of, resolved_files
from brim.formats.parquet_levels import is_list_type
from brim.formats.parquet_reader import ParquetColumns, features_of_arrow
from brim.formats.range_readers import Readable
from brim.memory.limit import effective_limit
from brim.options.check_options import VerifyOptions
from brim.plans.cut_shards import shard_name
from brim.plans.known_rows import has_equal_bytes, with_known_classes
from brim.plans.shard_bytes import columns_without_content, count_rows, locate, splice_of
from brim.progress import Advance, Progress
from brim.records import dataclass
from brim.sizes import format_size, plural
from brim.sources.features import as_yaml
from brim.sources.file_table import FileTable, flat_numbers
from brim.sources.open_source import aligned_columns, read_source
from brim.sources.selection import Selection
from brim.sources.source_options import SourceOptions
from brim.state.ledger import JobRecord, job_versions
from brim.storage.destination_address import parse_destination
from brim.storage.location import Access, is_object_address, split_address
from brim.verification.published import (
    SHARD_NAME,
    Published,
    PublishedPart,
    Subset,
    is_computed,
    is_foreign,
    missing_numbers,
    open_published,
    parts_of,
)
from brim.verification.repair import plan_like, record_damage, repair_shards
from brim.verification.walk import walk_shards
from brim.wording import Result

_LISTED = (".parquet", ".arrow", ".tar")  # what a card lists under `configs`
_FOREIGN_FILE = ": is not part of the dataset"
_SHOWN_DIFFERENCES = 10


@dataclass(repr=False)
class VerifyResult(Result):
    """The verified and unverified parts of a dataset."""

    shards: int = 0
    rows: int = 0
    bytes: int = 0
    files_compared: int = 0
    unproved: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    subsets: dict[str, str] = field(default_factory=dict)  # each config and split: whole, unfinished, not brim's
    repaired: int = 0  # shards that were written again

    def summary(self) -> list[tuple[str, str]]:
        """Return the verified shards, each config and split if there are several, and the parts not verified."""
        contents = f"{plural(self.shards, 'shard')}, {plural(self.rows, 'row')}, {format_size(self.bytes)}"
        lines = [("complete", contents)]
        if len(self.subsets) > 1 or set(self.subsets.values()) - {"whole"}:
            lines += [(name, "complete" if state == "whole" else state) for name, state in self.subsets.items()]
        if self.files_compared:
            lines.append(("source", f"{self.files_compared:,} files are inside, byte for byte"))
        if self.repaired:
            lines.append(("repaired", plural(self.repaired, "shard")))
        lines += [("not verified", text) for text in self.unproved]
        return lines + [("damage", text) for text in self.findings]


def verify(options: VerifyOptions, progress: Progress) -> VerifyResult:
    """Verify a dataset; raise VerificationError with everything that is wrong.

    Damaged shards are recorded in the ledger (of a remote dataset, in the state folder), so that the command that built
    them writes exactly those again.
    """
    destination, source, address = options.destination, options.source, os.fspath(options.destination)
    other_store = options.source_endpoint_url not in (None, options.endpoint_url)
    # --anonymous is for the source if that is in another bucket, else for the dataset too.
    is_anonymous = options.anonymous and not _in_another_bucket(source, destination, other_store)
    access = Access(options.endpoint_url, is_anonymous)
    location = parse_destination(destination, access)
    if options.repair and source is None:
        raise InputError("--repair needs the source.", hint=f"brim verify {address} SOURCE --repair")
    if options.repair and not location.is_local:
        raise InputError(
            "--repair can only be used with a folder.",
            hint="Run `brim verify` without it: then the command that built the dataset writes the damaged shards.",
        )
    covers_all = options.from_config is None and options.from_split is None

    def read_once() -> _Verification:
        with open_published(
            destination, options.state_dir, progress.note, access, options.from_config, options.from_split
        ) as published:
            check = _Verification(published, options.deep, progress, covers_all=covers_all)
            if source is not None and published.record.computed:
                raise InputError(
                    f"{os.fspath(destination)!r} was computed by map, tokenize or embed, so no source can be compared.",
                    hint="Leave out SOURCE. Run the command that computed it again to see whether anything changed.",
                )
            try:
                check.shards()
                check.card()
                if source is not None:
                    root = None if options.root is None else os.fspath(options.root)
                    source_access = Access(options.source_endpoint_url or options.endpoint_url, options.anonymous)
                    check.source(source, root, source_access)
            finally:
                check.progress.finish()
        return check

    check = read_once()
    if check.damaged - {CARD} and options.repair and not check.another_source and location.is_local:
        written = repair_shards(
            location.path, options.state_dir, check.record, check.tables, check.damaged, check.rows_of, progress
        )
        progress.note(f"repaired {plural(len(written), 'shard')} from the source")
        check = read_once()
        check.result.repaired = len(written)
    if check.result.findings:
        count = len(check.result.findings)
        recorded = not check.another_source and record_damage(location, options.state_dir, check.record, check.damaged)
        notes = [check.another_source] if check.another_source else []
        intact = [f"{name}: complete" for name, state in check.result.subsets.items() if state == "whole"]
        intact = intact if len(check.result.subsets) > 1 else []
        raise VerificationError(
            "\n  ".join([*notes, f"{count} problem{'s' if count != 1 else ''} found:", *check.lines(), *intact]),
            hint=check.hint(address, source, recorded),
            findings=check.result.findings,
            subsets=check.result.subsets,
        )
    return check.result


def _in_another_bucket(source: object, destination: str | os.PathLike[str], other_store: bool) -> bool:
    """Return whether the source is in another bucket than the dataset, such as a public archive."""
    text, to = os.fspath(source) if isinstance(source, str | os.PathLike) else "", os.fspath(destination)
    if not is_object_address(text):
        return False
    return other_store or not is_object_address(to) or split_address(text).root != split_address(to).root


class _Verification:
    def __init__(self, published: Published, deep: bool, progress: Progress, covers_all: bool = True) -> None:
        self.published, self.record, self.deep, self.progress = published, published.record, deep, progress
        self.result = VerifyResult()
        self.rows_of: dict[str, int] = {}
        self.types_of: dict[str, dict[str, Any]] = {}  # the features in the footer of each shard
        self._covers_all = covers_all
        self.another_source = ""
        self.damaged: set[str] = set()  # files that must be written again
        self.tables: dict[str, FileTable] = {}  # the source as read for a job, by its fingerprint
        self._own = 0  # the number of findings that do not depend on the source
        self._lock = threading.Lock()

    def report(self, problem: str, damaged: str = "") -> None:
        """Record a problem; `damaged` is the file that must be written again."""
        with self._lock:
            self.result.findings.append(problem)
            self.damaged |= {damaged} if damaged else set()

    def lines(self) -> list[str]:
        """Return the findings, with only the first differences from the source."""
        own, differences = self.result.findings[: self._own], self.result.findings[self._own :]
        count = len(differences) - _SHOWN_DIFFERENCES
        return [
            *own,
            *differences[:_SHOWN_DIFFERENCES],
            *([f"and {count:,} more differences"] if count > 0 else []),
        ]

    def hint(self, destination: str, source: object, recorded: bool) -> str:
        """Return what to do: a command that repairs the dataset."""
        source_text = os.fspath(source) if isinstance(source, str | os.PathLike) else "SOURCE"
        repair = shlex.join(["brim", "verify", destination, source_text, "--repair"])
        findings, local = self.result.findings, not self.published.remote
        if self.another_source:
            return (
                "Give the source that it was built from; or update the dataset with the command that built "
                "it and --update."
            )
        if all("; run the same build to finish" in finding for finding in findings):
            return "Run the command that built it again."
        if all(finding.endswith(_FOREIGN_FILE) for finding in findings):
            return "Move these files away."
        if not self.record.jobs and self.record.damaged:
            compare = shlex.join(["brim", "verify", destination, source_text])
            return f"Restore the ledger from a copy; or remove it, and compare with the source: {compare}"
        if not self.record.jobs and not self.record.unfinished:
            if local and self.damaged and any(map(SHARD_NAME.fullmatch, self.published.sizes)):
                return f"Write the damaged shards again from their source: {repair}"
            if source is not None and not self._own and not self.damaged:
                return "Give the source that it was built from."
            if self.published.renames:  # a repository, whose history keeps replaced files
                advice = "`brim build SOURCE DEST --fresh` replaces it by what the source holds"
                return f"It was not built by brim. {advice}."
            return "It was not built by brim: write it again with the program that made it."
        if any("parts" in job.facts for job in self.record.jobs) and self.damaged and local:
            return f"Write the damaged shards again from the source of their rows: {repair}"
        if self.damaged and not recorded:
            advice = "--fresh builds it again" if self.record.computed or not local else repair
            return f"The damage could not be recorded in the ledger, so that a build would not repair it: {advice}"
        if self.damaged:
            files = plural(len(self.damaged), "damaged file")
            also = "" if self.record.computed or not local else f"; or: {repair}"
            return f"Run the command that built it again: it writes the {files}{also}"
        return (
            "Run the command that built it again: it writes missing shards. With --update it adopts changes of the "
            "source; --fresh starts over."
        )

    def shards(self) -> None:
        sizes, receipts = self.published.sizes, self.record.receipts
        open_ones = [subset for subset in self.published.subsets if subset.state == "unfinished"]
        unfinished_names = {name for subset in open_ones for name in subset.names}
        self.result.subsets = {subset.name: subset.state_text for subset in self.published.subsets}
        for subset in open_ones:
            self.report(f"{subset.name}: {subset.state_text}")
        if self.record.unfinished and not open_ones:
            self.report("unfinished: 0 shards; run the same build to finish")
        for fault in self.record.damaged:
            self.report(fault)
        not_from_brim = [subset for subset in self.published.subsets if subset.state == "not brim's"]
        if not_from_brim and self.record.jobs:
            names_of_foreign = ", ".join(subset.name for subset in not_from_brim)
            self.result.unproved.append(f"{names_of_foreign}: not brim's, so no checksums can be compared")
        elif not self.record.jobs and not open_ones:
            self.result.unproved.append("content: without a ledger, no checksums can be compared")
        foreign = {name for subset in not_from_brim for name in subset.names}
        for subset in self.published.subsets:
            if subset.state == "incomplete" and not any(name in receipts for name in subset.names):
                for folder, split, number, count, extension in missing_numbers(subset.names):
                    missing = shard_name(folder, split, number, count, extension)
                    self.report(f"{missing}: is missing", missing)
        if self.record.jobs:
            for name in sorted(set(sizes) - set(receipts) - unfinished_names - foreign):
                self.report(f"{name}{_FOREIGN_FILE}")
        else:
            self._odd_names(sorted(set(sizes) - unfinished_names))
        names = sorted(((set(receipts) if self.record.jobs else set(sizes)) | foreign) - unfinished_names)
        reads = self.deep or not self.published.remote
        self.result.unproved += [] if self.deep else self.published.unproved
        total = sum(sizes[name] for name in names if name in sizes) if reads else 0
        self.progress.start("verify", total, len(names), effective_limit().bytes)
        is_remote, advance = self.published.remote, self.progress.advance
        for name, result in walk_shards(names, self._shard, is_remote=is_remote, reads_content=reads, advance=advance):
            if result is not None:
                self.rows_of[name], size = result
                self.result.rows += self.rows_of[name]
                self.result.bytes += size
            else:
                self.progress.shard(name, 0, "", "damaged")
        self.result.shards = len(names)

    def _odd_names(self, names: Sequence[str]) -> None:
        """Without a ledger, report files without a shard's name that `load_dataset` would not read."""
        if self.published.remote or all(map(SHARD_NAME.fullmatch, names)):
            return
        try:
            entries = card_entries(read_card(self.published.card() or ""))
        except (BrimError, UnicodeDecodeError):
            entries = []  # `card` reports the fault
        listed = [pattern for entry in entries for _, pattern in patterns_of(entry)]
        for name in names:
            loaded = any(fits(name, pattern) for pattern in listed) if listed else name.endswith(_LISTED)
            if SHARD_NAME.fullmatch(name) is None and not loaded:
                self.report(f"{name}{_FOREIGN_FILE}")

    def _shard(self, name: str, advance: Advance) -> tuple[int, int] | None:
        """Return (rows, size) of a shard that matches its receipt; None after reporting a problem."""
        receipt = self.record.receipts.get(name)
        size = self.published.sizes.get(name)
        if size is None:
            self.report(f"{name}: is missing", name)
            return None
        if receipt is not None and size != receipt.size:
            self.report(f"{name}: has {size:,} bytes instead of {receipt.size:,}", name)
            return None
        if size == 0:
            self.report(f"{name}: is empty", name)
            return None
        self.progress.begin(name, size)
        try:
            digest = self.published.sha256(name, self.deep, advance)
            if receipt is not None and receipt.sha256 and digest != receipt.sha256:
                expected, actual = receipt.sha256[:12], "is not listed" if digest is None else f"{digest[:12]}…"
                self.report(f"{name}: its content changed (SHA-256 {actual} instead of {expected}…)", name)
                return None
            with closing(self.published.open(name)) as shard:
                rows, without_content, misaligned = self._read(name, shard)
        except pa.ArrowException as error:
            self.report(f"{name}: cannot be read as {Path(name).suffix[1:]} ({str(error).splitlines()[0]})", name)
            return None
        except VerificationError as error:
            self._damaged(name, error)
            return None
        if rows is None:
            rows = 0 if receipt is None else receipt.rows
        if receipt is not None and rows != receipt.rows:
            self.report(f"{name}: holds {rows:,} rows instead of {receipt.rows:,}", name)
            return None
        for text in misaligned:
            self.report(f"{name}: lists that go together are not of one length: {text}")
        if receipt is None:
            for column in without_content:
                self.report(f"{name}: the files of its column {column!r} are empty: {rows:,} rows hold paths alone")
        self.progress.rows(rows)
        self.progress.shard(name, size, digest or "", "verified")
        return rows, size

    def _damaged(self, name: str, error: VerificationError) -> None:
        problem = error.message.removeprefix(f"{name} ").removeprefix(f"{Path(name).name} ")
        self.report(f"{name}: {problem.splitlines()[0].rstrip('.')}", name)

    def _read(self, name: str, shard: Readable) -> tuple[int | None, list[str], list[str]]:
        """Return rows, columns whose files are empty, and misaligned rows; read the footer once."""
        if shard.name.endswith(".arrow"):
            self.types_of[name] = features_of_arrow(shard)
        if not shard.name.endswith(".parquet"):
            return count_rows(shard), [], []
        with ParquetColumns(shard) as columns:
            self.types_of[name] = columns.features()
            pairs: dict[str, str] = {}
            for job in self.record.jobs:
                if not is_computed(job) and not is_foreign(job):
                    pairs |= aligned_columns(job.facts["recipe"].get("recipe_text"), columns.schema.names)
            listed = {column.name for column in columns.schema if is_list_type(column.type)}
            lists = {name: base for name, base in pairs.items() if base in listed}
            return columns.rows, columns_without_content(columns.file), list(columns.unequal_lists(lists))

    def card(self) -> None:
        """Check that the card describes the shards."""
        try:
            text = self.published.card()
            if text is None:
                self._wrong_card("is missing")
                return
            fields = read_card(text)
            twice = repeated_field(text)
        except UnicodeDecodeError:
            self._wrong_card("is not UTF-8")
            return
        except VerificationError as error:
            self._damaged(CARD, error)
            return
        except DestinationError as error:
            self._wrong_card(str(error))
            return
        if twice is not None:
            self._wrong_card(f"has the field `{twice}` twice")
        damaged = bool(self.result.findings)
        if damaged and self.record.jobs:
            return  # with shards missing, the card cannot agree
        names = self.published.names if self._covers_all else None
        for entry in card_entries(fields) if names is not None else ():
            for pattern in names_nothing(entry, names or ()):
                self._wrong_card(f"its config {entry['config_name']!r} names {pattern}, and there is no such file")
        if damaged:
            return
        configs = [subset.config for subset in self.published.subsets]
        if not self.published.sizes and self._covers_all:  # all shards are gone, and the card still names them
            configs += [str(entry["config_name"]) for entry in card_entries(fields)]
        for config in dict.fromkeys(configs):
            subsets = [subset for subset in self.published.subsets if subset.config == config]
            self._card_of(fields, config, subsets)

    def _wrong_card(self, problem: str, config: str = "default") -> None:
        self.report(f"{CARD}{'' if config == 'default' else f': config {config}'}: {problem}", CARD)

    def _card_of(self, fields: dict[str, Any], config: str, subsets: Sequence[Subset]) -> None:
        """Compare the card's files, splits, rows, bytes and features of a config with its shards."""
        rows = {subset.split: sum(self.rows_of.get(name, 0) for name in subset.names) for subset in subsets}
        names = [name for subset in subsets for name in subset.names]
        own = bool(names) and all(name in self.record.receipts for name in names)
        if own and names[0].endswith(_LISTED):
            self._files_of(fields, config, subsets)
        listed = card_splits(fields, config)
        if listed is not None and (listed != set(rows) if self._covers_all else not set(rows) <= listed):
            self._wrong_card(f"names the splits {_list(listed)}, the shards are of {_list(set(rows))}", config)
        card_facts = card_info(fields, config)
        for name, stated in card_rows(fields, config).items():
            if name in rows and stated != rows[name]:
                self._wrong_card(f"says {stated:,} rows of {name}, the shards hold {rows[name]:,}", config)
        if own:
            for fault in info_faults(card_facts, rows) if self._covers_all else ():
                self._wrong_card(fault, config)
            if not self.result.findings:
                self._bytes_of(card_facts, config, subsets)
        features = card_facts.get("features")
        first = next((n for subset in subsets for n in subset.names if self.types_of.get(n)), None)
        if features is not None and first is not None:
            expected = as_yaml(self.types_of[first])
            for change in feature_changes(features, expected):
                self._wrong_card(change, config)

    def _files_of(self, fields: dict[str, Any], config: str, subsets: Sequence[Subset]) -> None:
        """Check that the card lists all shards of a config that brim built, by split."""
        entry = next((entry for entry in card_entries(fields) if entry["config_name"] == config), None)
        faults = list(config_faults(fields, config))
        if entry is None and not faults:
            faults = ["does not list the shards under `configs`"]
        for fault in faults:
            self._wrong_card(fault, config)
        files = None if entry is None or faults else resolved_files(entry, self.published.sizes)
        for subset in subsets if files is not None else ():
            listed = (files or {}).get(subset.split, set())
            if listed != set(subset.names):
                count = f"{len(listed):,} of its {plural(len(subset.names), 'shard')}"
                self._wrong_card(f"its `data_files` of the split {subset.split} name {count}", config)

    def _bytes_of(self, card_facts: dict[str, Any], config: str, subsets: Sequence[Subset]) -> None:
        actual = {subset.split: sum(self.published.sizes[name] for name in subset.names) for subset in subsets}
        stated = {
            str(entry["name"]): entry.get("num_bytes") for entry in card_facts.get("splits") or () if "name" in entry
        }
        size, total = card_facts.get("download_size"), sum(actual.values())
        if isinstance(size, int) and size != total and self._covers_all:
            self._wrong_card(f"says {size:,} bytes to download of {config}, the shards have {total:,}")
        elif size == card_facts.get("dataset_size"):  # else `datasets` wrote it, as the size in memory
            for split, count in stated.items():
                if split in actual and count != actual[split]:
                    self._wrong_card(f"says {count} bytes of {split}, the shards have {actual[split]:,}")

    def source(self, source: str | os.PathLike[str] | FileTable | Selection, root: str | None, access: Access) -> None:
        """Check that the shards have every source file as often as the source, byte for byte."""
        self._own = len(self.result.findings)
        parts = parts_of(self.record)
        if len(parts) <= 1:
            part = parts[0] if parts else None
            job = None if part is None else part.job
            self._with_source(self._table(source, root, job, access), job, part)
            return
        # Several configs, splits or appended rows, each from its own source: compare the parts of this one.
        is_compared, whole = False, None
        every = sum(count for part in parts if isinstance(count := part.job.facts.get("files"), int))
        for part in parts:
            if is_computed(part.job) or is_foreign(part.job):
                continue
            try:
                table = self._table(source, root, part.job, access)
                whole = table if table.file_count() == every and not table.refused else whole
                same = not table.refused and plan_like(table, part.job).facts["content"] == part.job.facts["content"]
            except BrimError:
                continue  # with the options of another part, the source may be unreadable
            if same:
                self._with_source(table, part.job, part)
            is_compared |= same
        if not is_compared and whole is not None:
            # A source that grew has the files of all parts; --append added only the new ones each time.
            self._with_source(whole, None, None)
        elif not is_compared and any(part.job.left_out for part in parts):
            self.result.unproved.append("source: it was not compared, because a part was published with files left out")
        elif not is_compared:
            self.report(f"the source is not what any of the {len(parts)} parts here was published from")

    def _with_source(self, table: FileTable, job: JobRecord | None, part: PublishedPart | None) -> None:
        for refused in table.refused:
            self.report(f"source {refused.path}: is {refused.reason}")
        if (self.published.remote and not self.deep) or table.files.ranges is not None:
            self._by_hash(table, job, part)
            return
        number_of: dict[str, int] = {path.as_py(): number for number, path in enumerate(table.files.paths)}
        expected = np.zeros(len(table.files), np.int64)
        for name in table.columns:
            np.add.at(expected, flat_numbers(table.rows.column(name)), 1)
        counts = np.zeros(len(table.files), np.int64)
        left_out = set(job.left_out) if job else set()
        names = self._names(part)
        self.progress.start("compare", int((expected * table.files.sizes).sum()), len(names), effective_limit().bytes)
        compared = 0
        for name in names:
            self.progress.begin(name, self.published.sizes[name])
            try:
                self._compare(name, table, number_of, counts)
                compared += 1
            except VerificationError as error:
                self._damaged(name, error)
            except SourceChangedError as error:
                self.report(f"source {error.facts['path']}: {error.facts['what']}")
            self.progress.shard(name, 0, "", "compared")
        self.result.files_compared += int(counts.sum())
        inside, total = int((counts > 0).sum()), int((expected > 0).sum())
        intact = len(self.rows_of) == self.result.shards and compared == len(names)
        if inside * 2 < total if intact else compared and not inside:
            self.another_source = f"This is another source: {inside:,} of its {total:,} files are in the shards."
        if not intact:
            return  # files of a damaged shard would be reported again
        for number in np.flatnonzero(counts != expected).tolist():
            path = table.files.path(number)
            if path not in left_out:
                self.report(
                    f"{path}: is {counts[number]} time(s) in the shards and {expected[number]} time(s) in the source"
                )
        self._metadata(table, job)

    def _names(self, part: PublishedPart | None) -> list[str]:
        """Return the intact shards of a part; for the only part, all intact shards."""
        if part is None or len(parts_of(self.record)) == 1:
            return sorted(self.rows_of)
        return [name for names in part.names.values() for name in names if name in self.rows_of]

    def _by_hash(self, table: FileTable, job: JobRecord | None, part: PublishedPart | None) -> None:
        """Compare without a download: shards made from the source must have the SHA-256 that the Hub lists."""
        if job is None or part is None or job.left_out or table.refused:
            self.result.unproved.append("source: it was not compared; --deep reads the shards back and compares files")
            return
        plan = plan_like(table, job)
        if plan.facts["content"] != job.facts["content"]:
            self.another_source = "This is another source, or it has changed since."
            self.report("the source's files or the values of its table are not those that were published")
            return
        self.progress.start(
            "compare", sum(s.file_bytes for s in plan.shards), len(plan.shards), effective_limit().bytes
        )
        names_left = {split: iter(names) for split, names in part.names.items()}
        for shard in plan.shards:
            name = next(names_left.get(shard.split, iter(())), shard.name)
            receipt = self.record.receipts.get(name)
            self.progress.begin(name, shard.file_bytes)
            with splice_of(plan, shard) as splice:
                sha256 = splice.sha256(self.progress.advance)
            if receipt is None or receipt.sha256 != sha256:
                same = not job.versions or job.versions == job_versions()
                versions = ", ".join(f"{package} {version}" for package, version in job.versions.items())
                why = "" if same else f" (published with {versions}: try --deep)"
                self.report(f"{name}: the source gives other bytes{why}", name)
            self.progress.shard(name, 0, sha256, "compared")
        self.result.files_compared += table.file_count()

    def _metadata(self, table: FileTable, job: JobRecord | None) -> None:
        """Check that the plan of the source has the same digest of content as the dataset."""
        if job is None or job.left_out or self.result.findings or table.refused:
            self.result.unproved.append("metadata: the values of other columns were not compared with the source")
            return
        if plan_like(table, job).facts["content"] != job.facts["content"]:
            self.report("the values of the source's table are not those that were built (its files are)")

    def _table(
        self,
        source: str | os.PathLike[str] | FileTable | Selection,
        root: str | None,
        job: JobRecord | None,
        access: Access,
    ) -> FileTable:
        """Read the source with the options of a build."""
        if isinstance(source, FileTable):
            table = source
        elif isinstance(source, Selection):
            table = source.table()
        else:
            recipe: dict[str, Any] = job.facts["recipe"] if job else {}
            try:
                options = SourceOptions.from_recipe(recipe, root, access)
            except (TypeError, ValueError, AttributeError) as error:
                raise VerificationError("The ledger has no valid source options.") from error
            table = read_source(source, options)
            # Appended rows share the classes of all parts.
            if self.record.job is not None and "parts" in self.record.job.facts:
                features = next((types for types in self.types_of.values() if types), {})
                table = with_known_classes(table, features)
        self.tables["" if job is None else job.fingerprint] = table
        return table

    def _compare(self, name: str, table: FileTable, number_of: dict[str, int], counts: Ints) -> None:
        with closing(self.published.stream(name)) as shard, closing(self.published.open(name)) as footer_of:
            for file in locate(shard, footer_of):
                number = number_of.get(file.path or "")
                if number is None:
                    self.report(f"{name}: holds {file.path}, which the source does not have")
                elif file.size != table.files.sizes[number]:
                    size = table.files.sizes[number]
                    self.report(f"{file.path}: has {size:,} bytes in the source and {file.size:,} in {name}")
                    counts[number] += 1
                else:
                    if not has_equal_bytes(shard, file, table, number, self.progress.advance):
                        self.report(f"{file.path}: differs between the source and {name}", name)
                    counts[number] += 1


def _list(names: set[Any]) -> str:
    return ", ".join(sorted(map(str, names))) or "(none)"

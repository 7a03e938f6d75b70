"""Check a published dataset in a folder, on the Hub or in a bucket, written by brim or another program.

Rows, counts, schema and aligned lists are read from footers and the small leaves of columns. Headers of files are read
from a sample, or with `deep` from all, with every gzip stream. Only numbers are kept per shard, so that memory does not
grow with the dataset. Not covered: checksums, which `verify` compares.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from brim.errors import BrimError, InputError, MissingDependencyError, VerificationError
from brim.formats.card import CARD, card_rows, read_card
from brim.formats.file_headers import header_kind, probe_gzip, probe_header
from brim.formats.parquet_levels import is_list_type
from brim.formats.parquet_reader import ParquetColumns, is_file_type
from brim.formats.range_readers import Readable
from brim.memory.limit import effective_limit
from brim.options.build_options import ReadFilesOptions
from brim.options.check_options import CheckOptions
from brim.options.groups import CheckFileOptions
from brim.plans.shard_bytes import columns_without_content
from brim.progress import Advance, Progress
from brim.records import dataclass
from brim.sizes import format_size
from brim.sources.features import kind_of_feature
from brim.sources.open_source import aligned_columns, find_recipe, is_dataset, recipe_text
from brim.sources.recipe import VALUE_TYPES, BidsColumn, Counted, EntityColumn, Recipe, expectation_findings
from brim.storage.listing import list_files, read_file
from brim.storage.location import Access, is_remote, parse_location
from brim.verification.check_files import Check, CheckReport, finding_check
from brim.verification.dataset_info import describe_type, missing_parts, values_of
from brim.verification.published import SHARD_NAME, Published, open_published, shards_below
from brim.verification.walk import walk_shards

# Limits of the Hub's dataset viewer: "Scan size limit exceeded: ..., limit is 300000000 bytes" (TooBigContentError).
_VIEWER_BYTES, _VIEWER_ROWS, _VIEWER_COLUMNS = 300_000_000, 100, 1_000
_SHOWN = 100  # listed findings per check


@dataclass
class _ShardFacts:
    """The facts of one shard."""

    rows: int = 0
    types: dict[str, str] = field(default_factory=dict)
    rows_with_values: dict[str, int] = field(default_factory=dict)  # rows with values in a column
    values: Counter[str] = field(default_factory=Counter)
    keys: set[tuple[Any, ...]] = field(default_factory=set)
    empty_columns: list[str] = field(default_factory=list)
    misaligned: list[str] = field(default_factory=list)
    scan_bytes: int = 0  # read by the Hub's viewer for one page of rows
    leaf_count: int = 0
    fault: str = ""


@dataclass
class _HeaderFindings:
    """The findings about the headers of files of one type."""

    counted: int = 0
    files: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def is_published(source: str | os.PathLike[str], access: Access, recipe: str | os.PathLike[str] | None) -> bool:
    """Return whether a location is a dataset, not source files: on the Hub, or with shards and a card or a ledger.

    With the recipe `files`, every location has source files.
    """
    text = os.fspath(source)
    if recipe == "files":
        return False
    if is_remote(text):
        location = parse_location(text, access)
        if location.is_repository:
            return True
        return read_file(location, CARD) is not None and any(
            name.endswith(".parquet") or name.startswith("data/") for name, _ in list_files(location)
        )
    folder = Path(text)
    if not folder.is_dir() or (folder / "dataset_description.json").exists():
        return False
    if is_dataset(text):
        return True
    marked = (folder / ".brim").is_dir() or (folder / CARD).is_file()
    return marked and (((folder / "data").is_dir() and any((folder / "data").iterdir())) or bool(shards_below(folder)))


def check_dataset(options: CheckOptions, progress: Progress) -> CheckReport:
    """Check a published dataset, also against a recipe (a name, or a path that ends in .toml)."""
    changed = [*options.changed(ReadFilesOptions), *options.changed(CheckFileOptions)]
    changed = [item for item in changed if item.name not in ("recipe", "strict", "from_config", "from_split")]
    changed += [item for item in options.changed() if item.name in ("bids_validator", "extra")]
    if changed:
        raise InputError(
            f"{changed[0].spelling} can only be used with a source, and this is a published dataset.",
            hint="Leave it out; --recipe=files checks the shards as plain files.",
        )
    recipe = find_recipe(recipe_text(None if options.recipe is None else str(options.recipe)))
    access = Access(options.source_endpoint_url or options.endpoint_url, options.anonymous)
    with open_published(
        options.source, options.state_dir, progress.note, access, options.from_config, options.from_split
    ) as published:
        work = _DatasetCheck(published, recipe, progress)
        checks = work.checks(options.tolerance)
        checks += work.headers(None if options.everything or options.deep else options.sample_size)
        return CheckReport(checks)


class _DatasetCheck:
    def __init__(self, published: Published, recipe: Recipe | None, progress: Progress) -> None:
        self.published, self.recipe, self.progress = published, recipe, progress
        self.names = sorted(published.sizes)
        self.parquet = [name for name in self.names if name.endswith(".parquet")]
        self.facts_of: dict[str, _ShardFacts] = {}

    def checks(self, tolerance: float | None) -> list[Check]:
        self.progress.start("check", 0, len(self.parquet), effective_limit().bytes)
        try:
            for name, facts in walk_shards(self.parquet, self._inspect, is_remote=self.published.remote):
                self.facts_of[name] = facts
                self.progress.shard(name, 0, "", "inspected")
        finally:
            self.progress.finish()
        faults = {name: facts.fault for name, facts in self.facts_of.items() if facts.fault}
        readable = Check(
            "footers can be read", not faults, len(self.parquet), list(faults), faults=list(faults.values())
        )
        checks = [self._shards(), readable]
        if not self.parquet:
            detail = "not looked at: only Parquet shards have columns"
            return [*checks, Check("columns", True, 0, detail=detail, skipped=True)]
        # Every shard has the columns and types of the first.
        first = next(iter(self._good.values()), _ShardFacts())
        odd = [name for name, facts in self._good.items() if facts.types != first.types]
        details = [_difference(first.types, self.facts_of[name].types) for name in odd]
        checks.append(Check("one schema", not odd, len(self._good), odd, f"{len(first.types)} columns", details))
        checks += [*self._as_recipe(), self._card(), self._content(), self._aligned()]
        checks += self._viewer()
        if self.recipe is not None:
            checks += [finding_check(f) for f in expectation_findings(self.recipe, self._counted(), tolerance)]
            required = self.recipe.expect.required
            if required:
                detail = f"not looked at: {', '.join(required)} are files of the source"
                checks.append(Check("required files", True, 0, detail=detail, skipped=True))
        return checks

    def _inspect(self, name: str, advance: Advance) -> _ShardFacts:
        facts = _ShardFacts()
        try:
            with closing(self.published.open(name)) as shard, ParquetColumns(shard) as columns:
                facts.rows, facts.leaf_count = columns.rows, columns.footer.num_columns
                facts.scan_bytes = viewer_scan_bytes(columns.footer)
                features = columns.features()
                facts.types = {c.name: describe_type(c.type, features.get(c.name)) for c in columns.schema}
                facts.empty_columns = columns_without_content(columns.file)
                for group in range(columns.footer.num_row_groups):
                    self._count(columns, group, facts)
                # A column of nulls is not empty.
                facts.empty_columns = [column for column in facts.empty_columns if facts.values[column]]
                facts.misaligned = list(columns.unequal_lists(self._pairs(columns)))
        except (pa.ArrowException, BrimError, ValueError) as error:
            facts.fault = str(error).splitlines()[0]
        return facts

    def _count(self, columns: ParquetColumns, group: int, facts: _ShardFacts) -> None:
        rows_of: dict[str, Any] = {}
        for name in columns.schema.names:
            counts, values, rows = columns.counts(group, name)
            facts.rows_with_values[name] = facts.rows_with_values.get(name, 0) + rows
            facts.values[name] += values
            rows_of[name] = counts > 0
        if self.recipe is None:
            return
        for column in self.recipe.file_columns:
            if column.split:
                some = [rows_of[n] for n in rows_of if n.startswith(f"{column.name}_")]
                any_of = int(np.logical_or.reduce(some).sum()) if some else 0
                facts.rows_with_values[column.name] = facts.rows_with_values.get(column.name, 0) + any_of
        if set(self.recipe.key) <= set(columns.schema.names):
            keys = [columns.cells(group, name).to_pylist() for name in self.recipe.key]
            facts.keys |= set(zip(*keys, strict=True))

    def _pairs(self, columns: ParquetColumns) -> dict[str, str]:
        """Return list columns and the columns they must match in length, by the given recipe or that of the build."""
        if self.recipe is not None:
            return self.recipe.aligned_columns()
        pairs: dict[str, str] = {}
        for job in self.published.record.jobs:
            if "recipe" in job.facts:
                pairs |= aligned_columns(job.facts["recipe"].get("recipe_text"), columns.schema.names)
        names = columns.schema.names
        return {n: base for n, base in pairs.items() if base in names and is_list_type(columns.schema.field(base).type)}

    def _shards(self) -> Check:
        problems = list(missing_parts(self.published))
        is_known = self.published.record.jobs or any(SHARD_NAME.fullmatch(name) for name in self.names)
        detail = "" if is_known else "not looked at: the expected number is not recorded"
        return Check(
            "shards are all there", not problems, len(self.names), detail="; ".join(problems[:3]) or detail,
            failed=[problem.partition(":")[0] for problem in problems], skipped=not is_known and not problems,
        )  # fmt: skip

    @property
    def _good(self) -> dict[str, _ShardFacts]:
        return {name: facts for name, facts in self.facts_of.items() if not facts.fault}

    def _as_recipe(self) -> list[Check]:
        if self.recipe is None:
            return []
        expected = recipe_types(self.recipe)
        actual = next(iter(self._good.values()), _ShardFacts()).types
        open_columns = {c.name for c in self.recipe.file_columns if c.split and not c.values}
        extra = {n: t for n, t in actual.items() if any(n.startswith(f"{name}_") for name in open_columns)}
        difference = _difference(expected | extra, actual)
        if not difference and [n for n in actual if n in expected] != list(expected):
            difference = "the columns are in another order"
        name = f"columns and types of the recipe {self.recipe.name!r}"
        return [Check(name, not difference, len(expected), detail=difference or ", ".join(expected))]

    def _card(self) -> Check:
        """Check that the card exists and has the right number of rows."""
        rows = {
            (subset.config, subset.split): sum(self._good[name].rows for name in subset.names if name in self._good)
            for subset in self.published.subsets
        }
        try:
            text = self.published.card()
            if text is None:
                return Check("card", False, 0, [CARD], "is missing")
            fields = read_card(text)
        except (BrimError, UnicodeDecodeError, OSError) as error:
            return Check("card", False, 0, [CARD], str(error))
        wrong = [
            f"says {stated:,} rows of {split}, the shards hold {rows[config, split]:,}"
            for config in {config for config, _ in rows}
            for split, stated in card_rows(fields, config).items()
            if (config, split) in rows and stated != rows[config, split]
        ]
        stated = sum(rows.values())
        return Check("card", not wrong, len(rows), [CARD] if wrong else [], "; ".join(wrong) or f"{stated:,} rows")

    def _viewer(self) -> list[Check]:
        """Return a note if the Hub's dataset viewer would not show the dataset."""
        large = {name: facts.scan_bytes for name, facts in self._good.items() if facts.scan_bytes > _VIEWER_BYTES}
        wide = [name for name, facts in self._good.items() if facts.leaf_count > _VIEWER_COLUMNS]
        detail = []
        if large:
            largest, limit = format_size(max(large.values())), format_size(_VIEWER_BYTES)
            detail.append(
                f"a page of rows takes {largest} to read, of {limit} allowed: write smaller row groups, or a page index"
            )
        if wide:
            columns = max(facts.leaf_count for facts in self._good.values())
            detail.append(f"{columns:,} columns, and {_VIEWER_COLUMNS:,} are shown")
        name, failed = "the Hub's viewer would refuse it", sorted({*large, *wide})
        return [Check(name, True, len(failed), failed[:_SHOWN], "; ".join(detail), note=True)] if failed else []

    def _content(self) -> Check:
        """Check that every file column has content, not only paths."""
        empty = {f"{name}: {column}": "" for name, facts in self._good.items() for column in facts.empty_columns}
        detail = "no file of these columns has any content: paths alone were uploaded" if empty else ""
        return Check("columns of files have content", not empty, len(self._good), list(empty), detail)

    def _aligned(self) -> Check:
        misaligned = [f"{name}, {text}" for name, facts in self._good.items() for text in facts.misaligned]
        types = next(iter(self._good.values()), _ShardFacts()).types
        pairs = self.recipe.aligned_columns() if self.recipe is not None else {}
        has_pairs = bool(self.published.record.jobs) or self.recipe is not None
        detail = "; ".join(misaligned[:3]) or ", ".join(
            f"{n} aligned with {base}" for n, base in pairs.items() if n in types
        )
        if not has_pairs:
            detail = "not looked at: no recipe names the aligned lists; --recipe NAME does"
        rows = sum(facts.rows for facts in self._good.values())
        name = "lists go together"
        return Check(name, not misaligned, rows, misaligned[:_SHOWN], detail, skipped=not has_pairs)

    def _counted(self) -> Counted:
        assert self.recipe is not None
        counts: Counter[str] = Counter()
        files: Counter[str] = Counter()
        keys: set[tuple[Any, ...]] = set()
        for facts in self._good.values():
            counts.update(facts.rows_with_values)
            files.update(facts.values)
            keys |= facts.keys
        rows = sum(facts.rows for facts in self._good.values())
        return Counted(rows, len({key[0] for key in keys}), len({key[:2] for key in keys}), counts, files)

    def headers(self, sample_size: int | None) -> list[Check]:
        """Check the headers of files, of a sample or all, with one check per type; for all, also gzip streams."""
        if not self._good:
            return []
        names = list(self._good)
        if sample_size is not None:
            step = max(1, len(names) // max(sample_size, 1))
            names = names[::step][:sample_size] if sample_size else []
        each = None if sample_size is None else -(-sample_size // max(len(names), 1))
        findings: dict[str, _HeaderFindings] = {}
        missing: list[str] = []
        self.progress.start("headers", 0, len(names), effective_limit().bytes)
        try:
            for name in names:
                try:
                    with closing(self.published.open(name)) as shard, ParquetColumns(shard) as columns:
                        for kind, path, fault in _faults(shard, columns, each, missing, self.progress):
                            finding = findings.setdefault(kind, _HeaderFindings())
                            finding.counted += 1
                            if fault:
                                finding.files.append(f"{name}: {path}")
                                finding.faults.append(fault)
                except VerificationError as error:
                    finding = findings.setdefault("files can be read", _HeaderFindings())
                    finding.counted += 1
                    finding.files.append(name)
                    finding.faults.append(error.words[0])
                self.progress.shard(name, 0, "", "looked at")
        finally:
            self.progress.finish()
        checks = []
        for kind, finding in findings.items():
            if missing and kind == "NIfTI headers":
                checks.append(Check(kind, True, 0, detail=f"not looked at. {missing[0]}", skipped=True))
                continue
            sampled = sample_size is not None
            detail = f"a sample of {finding.counted:,}; --deep looks at every file" if sampled else ""
            check = Check(kind, not finding.faults, finding.counted, finding.files, detail, finding.faults)
            checks.append(replace(check, sampled=sampled))
        if not findings:
            checks.append(Check("headers of files", True, 0, detail="no file was looked at", skipped=True))
        return checks


def viewer_scan_bytes(footer: Any) -> int:
    """Return the bytes that the Hub's viewer reads at most for a page of rows: complete row groups, or with a page
    index about the bytes of the rows."""
    largest = 0
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        chunks = [group.column(leaf) for leaf in range(group.num_columns)]
        size = sum(chunk.total_uncompressed_size for chunk in chunks)
        if chunks and all(chunk.has_offset_index for chunk in chunks):
            size = size * min(_VIEWER_ROWS, group.num_rows) // max(group.num_rows, 1)
        largest = max(largest, size)
    return largest


def _faults(
    shard: Readable, columns: ParquetColumns, each: int | None, missing: list[str], progress: Progress
) -> Iterator[tuple[str, str, str]]:
    """Yield (check, path, fault) of files, of the first rows or of all."""
    features = columns.features()
    for column in columns.schema:
        if not is_file_type(column.type):
            continue
        media = kind_of_feature(features[column.name]) if column.name in features else None
        kind = media[0] if media else "file"
        for row, path, value, size in values_of(shard, columns, column.name, each):
            shown = path or f"row {row} of {column.name}"
            yield "files are not empty", shown, "" if size else "is empty (0 bytes)"
            if not size or value is None:
                continue
            name = path or ""
            if not name and kind == "nifti":  # by its first bytes
                name = "x.nii.gz" if value.read(2) == b"\x1f\x8b" else "x.nii"
                value.seek(0)
            header = header_kind(name, kind)
            if header is None:
                continue
            try:
                fault = probe_header(name, kind, functools.partial(nullcontext, value))
            except MissingDependencyError as error:
                missing.append(str(error))
                fault, kind = None, "file"  # the stream can still be read
            yield f"{header} headers", shown, fault or ""
            if each is None and not fault and name.lower().endswith(".gz"):
                value.seek(0)
                whole = probe_gzip(name, progress.advance, kind, functools.partial(nullcontext, value))
                yield "gzip, to the last byte", shown, whole or ""


def recipe_types(recipe: Recipe) -> dict[str, str]:
    """Return the columns of a recipe with their types as text, without those split by unknown values."""
    types: dict[str, str] = dict.fromkeys(recipe.key, "string")
    for column in recipe.columns:
        assert not isinstance(column, BidsColumn)  # find_recipe does not return these
        kind = "string" if isinstance(column, EntityColumn) or column.type == "text" else column.type
        text = f"list of {kind}" if column.is_list else kind
        if isinstance(column, EntityColumn) or not column.split:
            types[column.name] = text
        else:
            types |= {column.split_name(value): text for value in column.values}
    return types | {value.name: str(VALUE_TYPES[value.type]) for value in recipe.value_columns()}


def _difference(expected: dict[str, str], actual: dict[str, str]) -> str:
    """Describe how two sets of columns differ; empty if they do not."""
    differences = [f"{name!r} is missing" for name in expected if name not in actual]
    differences += [f"{name!r} is too much" for name in actual if name not in expected]
    both = [name for name in expected if name in actual and expected[name] != actual[name]]
    differences += [f"{name!r} is {actual[name]} instead of {expected[name]}" for name in both]
    return ", ".join(differences)

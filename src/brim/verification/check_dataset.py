"""Check a dataset that is published, in a folder, on the Hub or in a bucket, whoever wrote it.

Footers and the small leaves of columns tell what there is: rows, counts, schema, lists that go together. Headers of
files are looked at in a sample, or all of them and every gzip stream with `deep`. Shards are looked at one by one and
only numbers are kept, so that memory does not grow with the dataset. Bytes are proved by `verify`, not here.
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
from brim.formats.parquet_columns import ParquetColumns, is_file_type
from brim.formats.parquet_levels import is_list_type
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
from brim.sources.open_dataset import is_dataset
from brim.sources.open_source import aligned_columns, find_recipe, recipe_text
from brim.sources.recipe import VALUE_TYPES, BidsColumn, Counted, EntityColumn, Recipe, expectation_findings
from brim.storage.listing import list_files, read_file
from brim.storage.location import Access, is_remote, parse_location
from brim.verification.check_files import Check, CheckReport, finding_check
from brim.verification.dataset_info import incomplete, type_words, values_of
from brim.verification.published import SHARD_NAME, Published, opened, shards_below
from brim.verification.walk import walk_shards

# Limits of the Hub's dataset viewer: "Scan size limit exceeded: ..., limit is 300000000 bytes" (TooBigContentError).
_VIEWER_BYTES, _VIEWER_ROWS, _VIEWER_COLUMNS = 300_000_000, 100, 1_000
_SHOWN = 100  # findings of one kind that are kept


@dataclass
class _Look:
    """What one shard holds, in numbers."""

    rows: int = 0
    types: dict[str, str] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)  # rows that have something in a column
    values: Counter[str] = field(default_factory=Counter)
    keys: set[tuple[Any, ...]] = field(default_factory=set)
    hollow: list[str] = field(default_factory=list)
    crooked: list[str] = field(default_factory=list)
    scan_bytes: int = 0  # what the Hub's viewer has to read for one page of rows
    leaves: int = 0
    fault: str = ""


@dataclass
class _Looked:
    """What files of a kind turned out to be."""

    counted: int = 0
    files: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def is_published(source: str | os.PathLike[str], access: Access, recipe: str | os.PathLike[str] | None) -> bool:
    """Whether a location is a dataset and not files to make one of: on the Hub, or with shards and a card or a ledger.

    The recipe `files` means files, whatever they contain.
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
    """Check a published dataset by itself, and by what a recipe (a name, or a path that ends in .toml) expects."""
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
    with opened(
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
        self.looks: dict[str, _Look] = {}

    def checks(self, tolerance: float | None) -> list[Check]:
        self.progress.start("check", 0, len(self.parquet), effective_limit().bytes)
        try:
            for name, look in walk_shards(self.parquet, self._look, is_remote=self.published.remote):
                self.looks[name] = look
                self.progress.shard(name, 0, "", "inspected")
        finally:
            self.progress.finish()
        checks = [self._shards(), self._readable()]
        if not self.parquet:
            detail = "not looked at: only Parquet shards tell their rows and columns"
            return [*checks, Check("columns", True, 0, detail=detail, skipped=True)]
        checks += [self._one_schema(), *self._as_recipe(), self._card(), self._content(), self._aligned()]
        checks += self._viewer()
        if self.recipe is not None:
            checks += [finding_check(f) for f in expectation_findings(self.recipe, self._counted(), tolerance)]
            required = self.recipe.expect.required
            if required:
                detail = f"not looked at: {', '.join(required)} are files of the source"
                checks.append(Check("required files", True, 0, detail=detail, skipped=True))
        return checks

    def _look(self, name: str, advance: Advance) -> _Look:
        look = _Look()
        try:
            with closing(self.published.open(name)) as shard, ParquetColumns(shard) as columns:
                look.rows, look.leaves = columns.rows, columns.footer.num_columns
                look.scan_bytes = viewer_scan_bytes(columns.footer)
                features = columns.features()
                look.types = {c.name: type_words(c.type, features.get(c.name)) for c in columns.schema}
                look.hollow = columns_without_content(columns.file)
                for group in range(columns.footer.num_row_groups):
                    self._count(columns, group, look)
                look.hollow = [column for column in look.hollow if look.values[column]]  # and not all null
                look.crooked = list(columns.unequal_lists(self._pairs(columns)))
        except (pa.ArrowException, BrimError, ValueError) as error:
            look.fault = str(error).splitlines()[0]
        return look

    def _count(self, columns: ParquetColumns, group: int, look: _Look) -> None:
        rows_of: dict[str, Any] = {}
        for name in columns.schema.names:
            places, values, rows = columns.counts(group, name)
            look.places[name] = look.places.get(name, 0) + rows
            look.values[name] += values
            rows_of[name] = places > 0
        if self.recipe is None:
            return
        for column in self.recipe.file_columns:
            if column.split:
                some = [rows_of[n] for n in rows_of if n.startswith(f"{column.name}_")]
                any_of = int(np.logical_or.reduce(some).sum()) if some else 0
                look.places[column.name] = look.places.get(column.name, 0) + any_of
        if set(self.recipe.key) <= set(columns.schema.names):
            keys = [columns.cells(group, name).to_pylist() for name in self.recipe.key]
            look.keys |= set(zip(*keys, strict=True))

    def _pairs(self, columns: ParquetColumns) -> dict[str, str]:
        """Lists that go together: as the recipe says, or the one that it was built with."""
        if self.recipe is not None:
            return self.recipe.aligned_columns()
        pairs: dict[str, str] = {}
        for job in self.published.record.jobs:
            if "recipe" in job.facts:
                pairs |= aligned_columns(job.facts["recipe"].get("recipe_text"), columns.schema.names)
        names = columns.schema.names
        return {n: of for n, of in pairs.items() if of in names and is_list_type(columns.schema.field(of).type)}

    def _shards(self) -> Check:
        problems = list(incomplete(self.published))
        known = self.published.record.jobs or any(SHARD_NAME.fullmatch(name) for name in self.names)
        detail = "" if known else "not looked at: nobody wrote down how many there should be"
        return Check(
            "shards are all there", not problems, len(self.names), detail="; ".join(problems[:3]) or detail,
            failed=[problem.partition(":")[0] for problem in problems], skipped=not known and not problems,
        )  # fmt: skip

    def _readable(self) -> Check:
        failed = [name for name, look in self.looks.items() if look.fault]
        faults = [self.looks[name].fault for name in failed]
        return Check("footers can be read", not failed, len(self.parquet), failed, faults=faults)

    @property
    def _good(self) -> dict[str, _Look]:
        return {name: look for name, look in self.looks.items() if not look.fault}

    def _one_schema(self) -> Check:
        """Every shard has the columns and types of the first."""
        first = next(iter(self._good.values()), _Look())
        odd = [name for name, look in self._good.items() if look.types != first.types]
        faults = [_difference(first.types, self.looks[name].types) for name in odd]
        return Check("one schema", not odd, len(self._good), odd, f"{len(first.types)} columns", faults)

    def _as_recipe(self) -> list[Check]:
        if self.recipe is None:
            return []
        wanted = recipe_types(self.recipe)
        found = next(iter(self._good.values()), _Look()).types
        known = {c.name for c in self.recipe.file_columns if c.split and not c.values}
        extra = {n: t for n, t in found.items() if any(n.startswith(f"{name}_") for name in known)}
        difference = _difference(wanted | extra, found)
        if not difference and [n for n in found if n in wanted] != list(wanted):
            difference = "the columns are in another order"
        name = f"columns and types of the recipe {self.recipe.name!r}"
        return [Check(name, not difference, len(wanted), detail=difference or ", ".join(wanted))]

    def _card(self) -> Check:
        """The card is there, and says as many rows as there are."""
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
            f"says {said:,} rows of {split}, the shards hold {rows[config, split]:,}"
            for config in {config for config, _ in rows}
            for split, said in card_rows(fields, config).items()
            if (config, split) in rows and said != rows[config, split]
        ]
        said = sum(rows.values())
        return Check("card", not wrong, len(rows), [CARD] if wrong else [], "; ".join(wrong) or f"{said:,} rows")

    def _viewer(self) -> list[Check]:
        """A note if the Hub's dataset viewer would refuse to show the dataset."""
        large = {name: look.scan_bytes for name, look in self._good.items() if look.scan_bytes > _VIEWER_BYTES}
        wide = [name for name, look in self._good.items() if look.leaves > _VIEWER_COLUMNS]
        detail = []
        if large:
            most, limit = format_size(max(large.values())), format_size(_VIEWER_BYTES)
            detail.append(
                f"a page of rows takes {most} to read, of {limit} allowed: write smaller row groups, or a page index"
            )
        if wide:
            columns = max(look.leaves for look in self._good.values())
            detail.append(f"{columns:,} columns, and {_VIEWER_COLUMNS:,} are shown")
        name, failed = "the Hub's viewer would refuse it", sorted({*large, *wide})
        return [Check(name, True, len(failed), failed[:_SHOWN], "; ".join(detail), note=True)] if failed else []

    def _content(self) -> Check:
        """No column of files that holds paths alone."""
        hollow = {f"{name}: {column}": "" for name, look in self._good.items() for column in look.hollow}
        detail = "no file of these columns has any content: paths alone were uploaded" if hollow else ""
        return Check("columns of files have content", not hollow, len(self._good), list(hollow), detail)

    def _aligned(self) -> Check:
        crooked = [f"{name}, {line}" for name, look in self._good.items() for line in look.crooked]
        types = next(iter(self._good.values()), _Look()).types
        pairs = self.recipe.aligned_columns() if self.recipe is not None else {}
        known = bool(self.published.record.jobs) or self.recipe is not None
        detail = "; ".join(crooked[:3]) or ", ".join(f"{n} aligned with {of}" for n, of in pairs.items() if n in types)
        if not known:
            detail = "not looked at: no recipe says which lists belong together; --recipe NAME does"
        rows = sum(look.rows for look in self._good.values())
        name = "lists go together"
        return Check(name, not crooked, rows, crooked[:_SHOWN], detail, skipped=not known)

    def _counted(self) -> Counted:
        assert self.recipe is not None
        counts: Counter[str] = Counter()
        files: Counter[str] = Counter()
        keys: set[tuple[Any, ...]] = set()
        for look in self._good.values():
            counts.update(look.places)
            files.update(look.values)
            keys |= look.keys
        rows = sum(look.rows for look in self._good.values())
        return Counted(rows, len({key[0] for key in keys}), len({key[:2] for key in keys}), counts, files)

    def headers(self, sample_size: int | None) -> list[Check]:
        """The beginnings of files, a line for each type; of a sample, or of all, and then gzip streams whole."""
        if not self._good:
            return []
        names = list(self._good)
        if sample_size is not None:
            step = max(1, len(names) // max(sample_size, 1))
            names = names[::step][:sample_size] if sample_size else []
        each = None if sample_size is None else -(-sample_size // max(len(names), 1))
        found: dict[str, _Looked] = {}
        lacking: list[str] = []
        self.progress.start("headers", 0, len(names), effective_limit().bytes)
        try:
            for name in names:
                try:
                    with closing(self.published.open(name)) as shard, ParquetColumns(shard) as columns:
                        for look, path, fault in _faults(shard, columns, each, lacking, self.progress):
                            line = found.setdefault(look, _Looked())
                            line.counted += 1
                            if fault:
                                line.files.append(f"{name}: {path}")
                                line.faults.append(fault)
                except VerificationError as error:
                    line = found.setdefault("files can be read", _Looked())
                    line.counted += 1
                    line.files.append(name)
                    line.faults.append(error.words[0])
                self.progress.shard(name, 0, "", "looked at")
        finally:
            self.progress.finish()
        checks = []
        for look, line in found.items():
            if lacking and look == "NIfTI headers":
                checks.append(Check(look, True, 0, detail=f"not looked at. {lacking[0]}", skipped=True))
                continue
            sampled = sample_size is not None
            detail = f"a sample of {line.counted:,}; --deep looks at every file" if sampled else ""
            made = Check(look, not line.faults, line.counted, line.files, detail, line.faults)
            checks.append(replace(made, sampled=sampled))
        if not found:
            checks.append(Check("headers of files", True, 0, detail="no file was looked at", skipped=True))
        return checks


def viewer_scan_bytes(footer: Any) -> int:
    """The most that the Hub's viewer reads to show a page of rows: whole row groups, or with a page index about the
    bytes of the rows themselves."""
    most = 0
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        chunks = [group.column(leaf) for leaf in range(group.num_columns)]
        size = sum(chunk.total_uncompressed_size for chunk in chunks)
        if chunks and all(chunk.has_offset_index for chunk in chunks):
            size = size * min(_VIEWER_ROWS, group.num_rows) // max(group.num_rows, 1)
        most = max(most, size)
    return most


def _faults(
    shard: Readable, columns: ParquetColumns, each: int | None, lacking: list[str], progress: Progress
) -> Iterator[tuple[str, str, str]]:
    """(what was looked at, path, what is wrong) of files, of the first rows or of all."""
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
            name = path or _guessed_name(value, kind)
            look = header_kind(name, kind)
            if look is None:
                continue
            try:
                fault = probe_header(name, kind, functools.partial(nullcontext, value))
            except MissingDependencyError as error:
                lacking.append(str(error))
                fault, kind = None, "file"  # the stream can be read all the same
            yield f"{look} headers", shown, fault or ""
            if each is None and not fault and name.lower().endswith(".gz"):
                value.seek(0)
                whole = probe_gzip(name, progress.advance, kind, functools.partial(nullcontext, value))
                yield "gzip, to the last byte", shown, whole or ""


def _guessed_name(value: Any, kind: str) -> str:
    """A name for a file without one, by its first bytes."""
    start = value.read(2)
    value.seek(0)
    if kind == "nifti":
        return "x.nii.gz" if start == b"\x1f\x8b" else "x.nii"
    return ""


def recipe_types(recipe: Recipe) -> dict[str, str]:
    """The columns that a recipe makes, with their types in words. Those of a split without values are not known."""
    types: dict[str, str] = dict.fromkeys(recipe.key, "string")
    for column in recipe.columns:
        assert not isinstance(column, BidsColumn)  # find_recipe returns none of these
        kind = "string" if isinstance(column, EntityColumn) or column.type == "text" else column.type
        words = f"list of {kind}" if column.is_list else kind
        if isinstance(column, EntityColumn) or not column.split:
            types[column.name] = words
        else:
            types |= {column.split_name(value): words for value in column.values}
    return types | {value.name: str(VALUE_TYPES[value.type]) for value in recipe.value_columns()}


def _difference(wanted: dict[str, str], found: dict[str, str]) -> str:
    """How two sets of columns differ, in words; nothing if they do not."""
    said = [f"{name!r} is missing" for name in wanted if name not in found]
    said += [f"{name!r} is too much" for name in found if name not in wanted]
    both = [name for name in wanted if name in found and wanted[name] != found[name]]
    said += [f"{name!r} is {found[name]} instead of {wanted[name]}" for name in both]
    return ", ".join(said)

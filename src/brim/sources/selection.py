"""Choose rows of a dataset, their order and their columns by its small columns; no other bytes are read.

A `Selection` is lazy: each step returns a new one, and printing it shows the steps. `table()` locates the values of the
chosen rows and returns the file table that every command takes. The meaning of a condition: where.py.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import ArgumentError, InputError
from brim.file_set import Bools, Ints, join_sets
from brim.formats.parquet_levels import is_list_type, map_leaves
from brim.formats.splice import SpliceBuilder
from brim.records import dataclass
from brim.sizes import parse_count
from brim.sources.file_table import FileTable, Split, comparable, one_array, stacked, type_conflict_error, with_content
from brim.sources.source_options import check_split
from brim.sources.where import labels_of, names_in, need_duckdb, sql_mask, where_mask

CONTENT = "content"  # the name for the bytes of the only file column
_U64 = np.uint64
_STEPS = frozenset("where sql columns drop sort shuffle sample limit unique split take".split())  # noqa: SIM905


class Origin(Protocol):
    """Where rows come from: their small columns, and the file table of some of them."""

    name: str
    columns: list[str]
    file_columns: list[str]
    partial: list[str]  # columns of which `small` has only a part, or nothing
    splits: tuple[Split, ...]
    about: Mapping[str, Any]
    notes: list[str]

    @property
    def features(self) -> Mapping[str, Any] | None: ...

    @property
    def told_features(self) -> Mapping[str, Any] | None:
        """The part of `features` that is declared, not guessed from values."""

    def __len__(self) -> int: ...

    def small(self, names: Sequence[str], rows: Ints | None = None) -> pa.Table:
        """Return columns with an entry for every row. If `rows` are given, entries of other rows may be null."""

    def possible(self, expression: str) -> Bools | None:
        """Return which rows a condition can choose, as far as known before they are read; None for all."""

    def locate(self, rows: Ints | None, names: Sequence[str]) -> FileTable: ...


class TableOrigin:
    """The rows of a file table."""

    def __init__(self, table: FileTable, name: str = "the table") -> None:
        self.table, self.name = table, name
        self.columns, self.file_columns = list(table.rows.column_names), list(table.columns)
        self.partial = [*self.file_columns, *table.nested]
        self.features = self.told_features = table.features
        self.splits, self.about, self.notes = table.splits, table.about, list[str]()

    def __len__(self) -> int:
        return len(self.table)

    def possible(self, expression: str) -> Bools | None:
        return None

    def small(self, names: Sequence[str], rows: Ints | None = None) -> pa.Table:
        return self.table.rows.select([name for name in names if name not in self.partial])

    def locate(self, rows: Ints | None, names: Sequence[str]) -> FileTable:
        table = self.table
        some = table.rows.select(list(names))
        some = some if rows is None else some.take(pa.array(rows))
        columns = {name: table.columns[name] for name in names if name in table.columns}
        features = None if table.features is None else {name: table.features[name] for name in names}
        splits = table.splits if rows is None else (Split(table.splits[0].name, 0, len(rows)),)
        nested = {name: table.nested[name] for name in names if name in table.nested}
        table = table.replace(rows=some, columns=columns, features=features, splits=splits, nested=nested)
        if rows is None and len(names) == len(self.columns):
            return table
        # Without the files that no row refers to.
        numbers = [table.numbers_of(name) for name in (*table.columns, *table.nested)]
        used = np.unique(np.concatenate([np.zeros(0, np.int64), *numbers]))
        return table.replace(rows=_renumbered_rows(table, used), files=table.files.take(used))


def _renumbered_rows(table: FileTable, used: Ints | int) -> pa.Table:
    """Return rows with other numbers of files: their positions in `used`, or larger by `used` if that is a number."""

    def renumber(cells: pa.Array) -> pa.Array:
        if is_list_type(cells.type):
            mask = cells.is_null() if cells.null_count else None
            return type(cells).from_arrays(cells.offsets, renumber(cells.values), mask=mask)
        numbers = cells.fill_null(0).to_numpy(zero_copy_only=False)
        shifted = numbers + used if isinstance(used, int) else np.searchsorted(used, numbers)
        return pa.array(shifted, pa.int64(), mask=cells.is_null().to_numpy(zero_copy_only=False))

    rows = table.rows
    for name in (*table.columns, *table.nested):
        index, cells = rows.column_names.index(name), one_array(rows.column(name))
        if name in table.nested:
            cells = map_leaves(cells, table.nested[name], cells.type, lambda leaf, _: renumber(leaf))
        else:
            cells = renumber(cells)
        rows = rows.set_column(index, rows.schema.field(name), cells)
    return rows


class JoinedOrigin:
    """The rows of several selections, one after the other."""

    def __init__(self, parts: Sequence[Selection]) -> None:
        first = parts[0]
        names = first.column_names
        other_origins = [
            part.columns(names) if part.column_names != names and sorted(part.column_names) == sorted(names) else part
            for part in parts[1:]
        ]
        self.parts = parts = [first, *other_origins]
        for part in other_origins:
            if part.column_names != names:
                raise InputError(
                    f"{part.name} has different columns than {first.name}: "
                    f"{sorted({*names} ^ {*part.column_names})[0]}.",
                    hint="Leave it out with --drop, or choose columns that both have with --columns.",
                )
            mine, theirs = first.features, part.features
            for name in names:
                if mine is not None and theirs is not None and mine[name] != theirs[name]:
                    raise type_conflict_error(name, first.name, part.name)
        self._names = [part.name for part in parts]
        self.name = " + ".join(self._names)
        self.columns, self.file_columns = names, first.file_columns
        self.partial = list(dict.fromkeys(name for part in parts for name in part.origin.partial))
        self.features = self.told_features = first.features
        self.about: Mapping[str, Any] = _joined_about(parts)
        self.notes = [note for part in parts for note in part.notes]
        self.edges = np.cumsum([0, *(len(part) for part in parts)]).astype(np.int64)
        # Rows of one split follow each other, in the order of the parts.
        part_of, row_of, splits, total = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], list[Split](), 0
        for name in dict.fromkeys(name for part in parts for name, _ in part.rows_of):
            start = total
            for number, part in enumerate(parts):
                first_row = 0
                for own, rows in part.rows_of:
                    if own == name:
                        part_of.append(np.full(len(rows), number))
                        row_of.append(np.arange(first_row, first_row + len(rows)))
                        total += len(rows)
                    first_row += len(rows)
            splits.append(Split(name, start, total))
        self.splits = tuple(splits)
        self.part_of, self.row_of = np.concatenate(part_of), np.concatenate(row_of)

    def __len__(self) -> int:
        return int(self.edges[-1])

    def possible(self, expression: str) -> Bools | None:
        return None

    def small(self, names: Sequence[str], rows: Ints | None = None) -> pa.Table:
        tables = [part.small(names) for part in self.parts]
        table = stacked([table.select(tables[0].column_names) for table in tables], self._names)
        return table.take(pa.array(self.edges[self.part_of] + self.row_of))

    def locate(self, rows: Ints | None, names: Sequence[str]) -> FileTable:
        rows = np.arange(len(self), dtype=np.int64) if rows is None else rows
        tables, order = [], np.empty(len(rows), np.int64)
        before = files = 0
        for number, part in enumerate(self.parts):
            own = np.flatnonzero(self.part_of[rows] == number)
            tables.append(part.columns(names).take(self.row_of[rows[own]]).table())
            order[own] = before + np.arange(len(own))
            before += len(own)
        for number, table in enumerate(tables):
            mixed = [name for name in table.nested if any(name not in second_table.nested for second_table in tables)]
            table = with_content(table, mixed) if mixed else table
            tables[number] = table.replace(rows=_renumbered_rows(table, files))
            files += len(table.files)
        return tables[0].replace(
            rows=stacked([table.rows for table in tables], self._names).take(pa.array(order)),
            files=join_sets([table.files for table in tables]),
            splits=(Split(self.splits[0].name, 0, len(rows)),),
            held=tuple(spool for table in tables for spool in table.held),
            far=tuple(dict.fromkeys(address for table in tables for address in table.far)),
            about=self.about,
            verbatim=any(table.verbatim for table in tables),
            warnings=tuple(warning for table in tables for warning in table.warnings),
            within=tuple(folder for table in tables for folder in table.within),
            shards_read=sum(table.shards_read for table in tables),
        )


def _joined_about(parts: Sequence[Selection]) -> dict[str, Any]:
    about: dict[str, Any] = dict(parts[0].about)
    licenses = list(dict.fromkeys(str(p.about.get("License") or "not named") for p in parts))
    if len(licenses) > 1:
        about["License"] = "; ".join(licenses)
        about["LicensesDiffer"] = True
    citations = [str(p.about["Citation"]) for p in parts if p.about.get("Citation")]
    if citations:
        about["Citation"] = "\n\n".join(dict.fromkeys(citations))
    return about


def _seed(value: Any) -> int:
    """Return a seed as a whole number. A number of NumPy and a text of digits are accepted."""
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool) and (isinstance(value, str) or int(value) == value):
            return int(value)
    raise ArgumentError(f"--seed takes a whole number, not {value!r}.", option="seed")


@dataclass(frozen=True)
class Selection:
    """Chosen rows of a dataset, without their values. Each method returns a new one."""

    origin: Origin
    steps: tuple[tuple[str, Mapping[str, Any]], ...] = ()  # names of methods, and their arguments
    name: str = ""
    reading: Mapping[str, Any] = field(default_factory=dict)  # how the source was read, for the ledger
    within: tuple[str, ...] = ()  # the local folder that was read, if it is one

    def _with(self, name: str, **arguments: Any) -> Selection:
        return replace(self, steps=(*self.steps, (name, arguments)))

    def where(self, expression: str) -> Selection:
        """Choose rows for which a condition is true: `age > 40 and sex == "F"`."""
        return self._with("where", expression=expression)

    def sql(self, expression: str) -> Selection:
        """Choose rows for which one boolean expression of DuckDB is true."""
        need_duckdb()
        return self._with("sql", expression=expression)

    def columns(self, names: str | Sequence[str]) -> Selection:
        """Choose columns, in this order."""
        return self._with("columns", names=_as_list(names))

    def drop(self, names: str | Sequence[str]) -> Selection:
        """Leave out columns."""
        return self._with("drop", names=_as_list(names))

    def sort(self, by: str | Sequence[str], *, descending: bool = False) -> Selection:
        """Sort by one or several columns; nulls come last. A name that begins with - is sorted in descending order."""
        return self._with("sort", by=_as_list(by), **({"descending": True} if descending else {}))

    def shuffle(self, seed: int = 0) -> Selection:
        """Shuffle rows: by a keyed hash of each row's number in the source, which never changes."""
        return self._with("shuffle", seed=_seed(seed))

    def sample(self, amount: int | str, seed: int = 0) -> Selection:
        """Choose a number of rows, or a percentage like "10%", in order; always the same rows."""
        return self._with("sample", amount=str(amount), seed=_seed(seed))

    def limit(self, rows: int) -> Selection:
        """Choose the first rows."""
        if operator.index(rows) < 0:
            raise ArgumentError(f"limit takes a number of at least 0, not {rows!r}.", option="limit")
        return self._with("limit", rows=int(rows))

    def unique(self, column: str) -> Selection:
        """Choose the first row of each value; of a file column, or `content`, of each content."""
        return self._with("unique", column=column)

    def split(
        self, parts: Mapping[str, float] | None = None, *, group_by: str | None = None, seed: int = 0, **more: float
    ) -> Selection:
        """Split rows into these shares. With `group_by`, rows with the same value are in the same split."""
        shares, groups = {**(parts or {}), **more}, {"group_by": group_by} if group_by else {}
        return self._with("split", parts=shares, seed=_seed(seed), **groups)

    def take(self, rows: Any) -> Selection:
        """Choose rows by their numbers in the present order."""
        row_numbers = np.asarray(rows)
        if row_numbers.ndim != 1 or (len(row_numbers) and not np.issubdtype(row_numbers.dtype, np.integer)):
            raise InputError("rows= must be row numbers, counted from 0.")
        return self._with("take", rows=row_numbers.astype(np.int64))

    def concat(self, *others: Selection | FileTable) -> Selection:
        """Put the rows of others with the same columns after these."""
        parts = [self, *(o if isinstance(o, Selection) else Selection(TableOrigin(o)) for o in others)]
        return Selection(JoinedOrigin(parts), name=" + ".join(part.name for part in parts))

    def apply(self, steps: Sequence[Any]) -> Selection:
        """Add steps, as `steps` has them or as they come back from JSON."""
        if wrong := [name for name, _ in steps if name not in _STEPS]:
            raise InputError(f"The rows were selected by {wrong[0]!r}, which cannot be repeated from one source.")
        return replace(self, steps=(*self.steps, *((name, dict(arguments)) for name, arguments in steps)))

    @cached_property
    def _selected_rows(self) -> _SelectedRows:
        selected_rows = _SelectedRows(self.origin)
        for name, arguments in self.steps:
            getattr(selected_rows, name)(**arguments)
        return selected_rows

    @property
    def column_names(self) -> list[str]:
        """The names of the selected columns."""
        return list(self._selected_rows.names)

    @property
    def file_columns(self) -> list[str]:
        """The names of the selected columns that contain files."""
        return [name for name in self._selected_rows.names if name in self.origin.file_columns]

    @property
    def features(self) -> Mapping[str, Any] | None:
        """The `datasets` features of the selected columns, if the source has them."""
        features = self.origin.features
        return None if features is None else {name: features[name] for name in self._selected_rows.names}

    @property
    def about(self) -> Mapping[str, Any]:
        """Facts about the source, for the dataset card."""
        return self.origin.about

    @property
    def notes(self) -> Sequence[str]:
        """Notes about the source, for people."""
        return self.origin.notes

    @property
    def rows_of(self) -> list[tuple[str, Ints]]:
        """The rows of each split, by their numbers in the source."""
        return self._selected_rows.parts

    def small(self, names: Sequence[str] | None = None) -> pa.Table:
        """Read small columns of the chosen rows."""
        return self._selected_rows.small([name for name in self._selected_rows.names if names is None or name in names])

    def __len__(self) -> int:
        return sum(len(rows) for _, rows in self._selected_rows.parts)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The query, as labels and texts."""
        return [
            ("from", self.name or self.origin.name),
            *((name, _describe(name, arguments)) for name, arguments in self.steps),
            ("chosen", f"{len(self):,} of {len(self.origin):,} rows"),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{label:>14}  {text}" for label, text in self.lines)

    __repr__ = __str__

    def table(self) -> FileTable:
        """Return the file table of the chosen rows. Values are located, not read."""
        selected = self._selected_rows
        names = selected.names
        if selected.is_unchanged:
            table = self.origin.locate(None, names)
        else:
            table = self.origin.locate(selected.rows, names)
            edges = np.cumsum([0, *(len(rows) for _, rows in selected.parts)]).tolist()
            splits = [Split(n, a, b) for (n, _), (a, b) in zip(selected.parts, itertools.pairwise(edges), strict=True)]
            empty = [s.name for s in splits if s.stop == s.start] if len(table) else []
            table = table.replace(
                splits=tuple(s for s in splits if s.stop > s.start) or tuple(splits[:1]),
                warnings=(*table.warnings, *(f"no row is left for the split {name!r}" for name in empty)),
            )
        features = None if table.features is None else {name: table.features[name] for name in names}
        steps = [[name, dict(arguments)] for name, arguments in self.steps]
        steps = json.loads(json.dumps(steps, default=lambda v: v.tolist() if isinstance(v, np.ndarray) else str(v)))
        warnings = tuple(dict.fromkeys((*table.warnings, *self.notes)))
        if self.about.get("LicensesDiffer"):
            warnings = (*warnings, f"the sources have different licenses: {self.about['License']}")
        return table.replace(
            rows=table.rows.select(names),
            features=features,
            recipe={**self.reading, **({"steps": steps} if steps else {})},
            about={**self.about, "Selected": "; ".join(f"{label} {text}" for label, text in self.lines)},
            query=tuple(self.lines),
            warnings=warnings,
            within=(*table.within, *self.within),
        )


def _describe(step: str, arguments: Mapping[str, Any]) -> str:
    if step == "split":
        shares = ", ".join(f"{name} {fraction:g}" for name, fraction in arguments["parts"].items())
        group = arguments.get("group_by")
        return f"{shares}{f', by {group}' if group else ''}, seed {arguments['seed']}"
    if step == "take":
        return f"{len(arguments['rows']):,} rows"
    values = (value if isinstance(value, list | tuple) else [value] for value in arguments.values())
    return ", ".join(", ".join(map(str, value)) for value in values)


def _as_list(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


class _SelectedRows:
    """The rows and columns that remain after some steps, which are methods of these names."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self.names = list(origin.columns)
        self.parts = [(s.name, np.arange(s.start, s.stop, dtype=np.int64)) for s in origin.splits]
        self.is_unchanged = True

    @property
    def rows(self) -> Ints:
        return np.concatenate([np.zeros(0, np.int64), *(rows for _, rows in self.parts)])

    def _set(self, parts: list[tuple[str, Ints]]) -> None:
        self.parts, self.is_unchanged = parts, False

    def _keep(self, mask: Bools) -> None:
        edges = np.cumsum([len(rows) for _, rows in self.parts])[:-1]
        masks = np.split(mask, edges)
        self._set([(name, rows[own]) for (name, rows), own in zip(self.parts, masks, strict=True)])

    def _check(self, name: str) -> None:
        if name not in self.names:
            raise InputError(
                f"The dataset has no column {name!r}.", hint=f"Its columns are: {', '.join(self.names[:30])}."
            )

    def small(self, names: Sequence[str]) -> pa.Table:
        names = [name for name in self.names if name in names]
        if self.is_unchanged:
            return self._origin.small(names)
        rows = self.rows
        return self._origin.small(names, rows).take(pa.array(rows))

    def where(self, expression: str) -> None:
        possible = self._origin.possible(expression)
        if possible is not None:
            self._keep(possible[self.rows])
        table = self.small(names_in(expression, self.names))
        if not table.num_columns:  # no column is named, or only those that do not exist
            table = self.small(self.names)
        self._keep(where_mask(expression, table, labels_of(self._origin.told_features), self.names))

    def sql(self, expression: str) -> None:
        self._keep(sql_mask(expression, self.small(self.names)))

    def columns(self, names: Sequence[str]) -> None:
        for name in names:
            self._check(name)
        if len(set(names)) < len(names) or not names:
            raise InputError("--columns must name each column once.")
        self.names = list(names)

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            self._check(name)
        self.names = [name for name in self.names if name not in names]
        if not self.names:
            raise InputError("--drop would leave out all columns.")

    def sort(self, by: Sequence[str], descending: bool = False) -> None:
        keys = []
        for name in by:
            is_descending = descending
            if name.startswith("-") and name not in self.names:
                name, is_descending = name[1:], not descending
            self._check(name)
            if name in self._origin.partial:
                raise InputError(f"Rows cannot be sorted by the files of {name!r}.")
            keys.append((name, "descending" if is_descending else "ascending"))
        table = comparable(self.small([name for name, _ in keys]))
        start, parts = 0, []
        for split, rows in self.parts:
            part = table.slice(start, len(rows))
            start += len(rows)
            # pyarrow's sort is not stable: the present order decides between equal rows.
            part = part.append_column("", pa.array(np.arange(len(rows))))
            try:
                order = pc.sort_indices(part, sort_keys=[*keys, ("", "ascending")])
            except (pa.ArrowException, TypeError) as error:
                raise InputError(f"Rows cannot be sorted by {', '.join(by)}: {str(error).splitlines()[0]}.") from error
            parts.append((split, rows[order.to_numpy()]))
        self._set(parts)

    def shuffle(self, seed: int) -> None:
        self._set([(name, rows[np.argsort(keyed(rows, seed, "shuffle"), kind="stable")]) for name, rows in self.parts])

    def sample(self, amount: str, seed: int = 0) -> None:
        rows, text = self.rows, amount.strip()
        is_share = text.endswith("%")
        try:
            count = round(len(rows) * float(text[:-1]) / 100) if is_share else parse_count(text)
        except (ValueError, OverflowError, InputError):
            raise InputError(f"--sample takes a number of rows or a percentage like 10%, not {amount!r}.") from None
        if count < 0 or (is_share and count > len(rows)):
            raise InputError(f"--sample takes a number of rows or a percentage up to 100%, not {amount!r}.")
        mask = np.zeros(len(rows), bool)
        mask[np.argsort(keyed(rows, seed, "sample"), kind="stable")[:count]] = True
        self._keep(mask)

    def limit(self, rows: int) -> None:
        if rows < 1:
            raise InputError("--limit takes a number of rows above zero.")
        self._keep(np.arange(len(self.rows)) < rows)

    def take(self, rows: Any) -> None:
        row_numbers, own = np.asarray(rows, np.int64), self.rows
        if len(row_numbers) and (row_numbers.min() < 0 or row_numbers.max() >= len(own)):
            raise InputError(f"A row number is too large: there are {len(own):,} rows.")
        self._set([(self.parts[0][0] if self.parts else "train", own[row_numbers])])

    def unique(self, column: str) -> None:
        files = [name for name in self.names if name in self._origin.file_columns]
        if column == CONTENT and column not in self.names:
            if len(files) != 1:
                raise InputError(
                    "--distinct content needs a single file column.", hint=f"Name one: {', '.join(files)}."
                )
            column = files[0]
        self._check(column)
        if column in self._origin.partial and column not in files:
            raise InputError(f"--distinct cannot compare {column!r}, which has bytes inside.")
        keys = self._content_codes(column) if column in files else _value_codes(self.small([column]).column(0))
        _, first = np.unique(keys, return_index=True)
        mask = np.zeros(len(keys), bool)
        mask[first] = True
        self._keep(mask)

    def _content_codes(self, column: str) -> Ints:
        """Return a number for each row, the same for equal content. Files whose size is unique are not read."""
        table = self._origin.locate(self.rows, [column])
        cells = one_array(table.rows.column(column))
        if is_list_type(cells.type):
            raise InputError(f"--distinct needs a column with one file per row, but {column!r} has lists.")
        numbers = cells.fill_null(-1).to_numpy(zero_copy_only=False)
        sizes = np.where(numbers < 0, -1, np.append(table.files.sizes, 0)[numbers])
        _, same, counts = np.unique(sizes, return_inverse=True, return_counts=True)
        code_of: dict[Any, int] = {}
        codes = np.empty(len(numbers), np.int64)
        for row, (number, size) in enumerate(zip(numbers.tolist(), sizes.tolist(), strict=True)):
            key: Any = size
            if counts[same[row]] > 1 and number >= 0:
                value = SpliceBuilder(table.files)
                value.value(number)
                with value.finish() as splice:
                    key = splice.sha256()
            codes[row] = code_of.setdefault((size, key), len(code_of))
        return codes

    def split(self, parts: Mapping[str, float], seed: int = 0, group_by: str | None = None) -> None:
        shares = {str(name): float(fraction) for name, fraction in parts.items()}
        for name in shares:
            check_split(name)
        if not shares or not min(shares.values()) > 0 or not abs(sum(shares.values()) - 1) <= 1e-6:
            raise InputError(
                "The shares of --split-into must be above zero and add up to 1.", hint="Write train=0.9,test=0.1."
            )
        rows = self.rows
        edges = np.rint(np.cumsum(list(shares.values())) * len(rows)).astype(np.int64)
        edges[-1] = len(rows)
        split_of = np.empty(len(rows), np.int64)
        if group_by is None:
            order = np.argsort(keyed(rows, seed, "split"), kind="stable")
            split_of[order] = np.repeat(np.arange(len(edges)), np.diff(edges, prepend=0))
        else:
            self._check(group_by)
            if group_by in self._origin.partial:
                raise InputError(f"Rows cannot be grouped by the files of {group_by!r}.")
            split_of = _split_groups(self.small([group_by]).column(0), edges, seed)
        self._set([(name, rows[split_of == number]) for number, name in enumerate(shares)])


def _split_groups(column: pa.ChunkedArray, edges: Ints, seed: int) -> Ints:
    """Return the split of each row: groups in the order of their hashes, each in the split that has most of it."""
    _, first, group, counts = np.unique(
        _value_codes(column), return_index=True, return_inverse=True, return_counts=True
    )
    texts = [repr(column[row].as_py()) for row in first.tolist()]
    hashes = [hashlib.sha256(f"{seed} {text}".encode()).digest() for text in texts]
    order = np.array(sorted(range(len(hashes)), key=hashes.__getitem__), np.int64)
    middle = np.cumsum(counts[order]) - counts[order] / 2
    split = np.empty(len(order), np.int64)
    split[order] = np.searchsorted(edges, middle, side="right").clip(0, len(edges) - 1)
    return np.asarray(split[group], np.int64)


def _value_codes(column: pa.ChunkedArray) -> Ints:
    """Return a number for each value: equal values have the same, and null is a value."""
    column = comparable(pa.table({"": column})).column(0)
    if pa.types.is_floating(column.type):
        column = pc.add(column, pa.scalar(0.0, column.type))  # makes 0.0 of -0.0
    try:
        encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    except (pa.ArrowException, AttributeError):
        codes: dict[str, int] = {}
        return np.array([codes.setdefault(repr(value), len(codes)) for value in column.to_pylist()], np.int64)
    chunks = encoded.chunks if isinstance(encoded, pa.ChunkedArray) else [encoded]
    return np.concatenate([np.zeros(0, np.int64), *(c.indices.to_numpy(zero_copy_only=False) for c in chunks)])


def keyed(rows: Ints, seed: int, purpose: str) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return a pseudo-random number for each row number: always the same, and different for every row.

    It is splitmix64 of the number and a key, twice, which maps 64 bits to 64 bits and no two numbers to the same one.
    """
    digest = hashlib.sha256(f"brim {purpose} {seed}".encode()).digest()
    value = rows.astype(_U64)
    for start in (0, 8):
        value = value ^ _U64(int.from_bytes(digest[start : start + 8], "little"))
        value = value + _U64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> _U64(27))) * _U64(0x94D049BB133111EB)
        value = value ^ (value >> _U64(31))
    return value

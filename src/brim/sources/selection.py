"""Which rows of a dataset, in which order, with which columns: chosen by its small columns, nothing else read.

A `Selection` is lazy: each step gives a new one, and prints what it is. `table()` finds the values of the rows that are
left and gives the file table that every verb takes. What a condition means: where.py.
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
from brim.formats.nested_values import map_leaves
from brim.formats.splice import SpliceBuilder
from brim.records import dataclass
from brim.sources.file_table import FileTable, Split, comparable, is_list, one_array, other_type, stacked
from brim.sources.source_options import check_split
from brim.sources.value_locator import with_content
from brim.sources.where import labels_of, names_in, need_duckdb, sql_mask, where_mask

CONTENT = "content"  # the word for the bytes of the only file column
_U64 = np.uint64


class Origin(Protocol):
    """Where rows come from: their small columns, and the file table of some of them."""

    name: str

    @property
    def columns(self) -> list[str]: ...

    @property
    def file_columns(self) -> list[str]: ...

    @property
    def features(self) -> Mapping[str, Any] | None: ...

    @property
    def told_features(self) -> Mapping[str, Any] | None:
        """Those of `features` that nobody had to look at values for."""

    @property
    def splits(self) -> tuple[Split, ...]: ...

    @property
    def about(self) -> Mapping[str, Any]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def partial(self) -> Sequence[str]:
        """Columns of which `small` gives only a part, or nothing."""

    def __len__(self) -> int: ...

    def small(self, names: Sequence[str], rows: Ints | None = None) -> pa.Table:
        """Columns of all rows; if only some rows are asked for, others may be null."""

    def possible(self, expression: str) -> Bools | None:
        """Which rows `--where` may choose, as far as that is known before they are read; None for all."""

    def locate(self, rows: Ints | None, names: Sequence[str]) -> FileTable: ...


class TableOrigin:
    """A file table that is there already."""

    def __init__(self, table: FileTable, name: str = "the table") -> None:
        self.table, self.name = table, name
        self.columns, self.file_columns = table.rows.column_names, list(table.columns)
        self.partial = [*self.file_columns, *table.nested]
        self.features, self.splits, self.about, self.notes = table.features, table.splits, table.about, ()
        self.told_features = table.features

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
        return table if rows is None and len(names) == len(self.columns) else _only_named(table)


def _only_named(table: FileTable) -> FileTable:
    """The table without the files that no row names."""
    named = [table.numbers_of(name) for name in (*table.columns, *table.nested)]
    used = np.unique(np.concatenate([np.zeros(0, np.int64), *named]))
    return table.replace(rows=_with_numbers(table, used), files=table.files.take(used))


def _with_numbers(table: FileTable, used: Ints | int) -> pa.Table:
    """The rows with the numbers of files as places among those used; or all of them moved by a number."""
    rows = table.rows
    for name in (*table.columns, *table.nested):
        at, cells = rows.column_names.index(name), one_array(rows.column(name))
        if name in table.nested:
            anew = map_leaves(cells, table.nested[name], cells.type, lambda one, _: _renumbered(one, used))
        else:
            anew = _renumbered(cells, used)
        rows = rows.set_column(at, rows.schema.field(name), anew)
    return rows


def _renumbered(cells: pa.Array, used: Ints | int) -> pa.Array:
    if is_list(cells.type):
        inner = _renumbered(cells.values, used)
        mask = cells.is_null() if cells.null_count else None
        return type(cells).from_arrays(cells.offsets, inner, mask=mask)
    numbers = cells.fill_null(0).to_numpy(zero_copy_only=False)
    moved = numbers + used if isinstance(used, int) else np.searchsorted(used, numbers)
    return pa.array(moved, pa.int64(), mask=cells.is_null().to_numpy(zero_copy_only=False))


class JoinedOrigin:
    """Several selections, one below the other."""

    def __init__(self, parts: Sequence[Selection]) -> None:
        first = parts[0]
        self.parts = parts = [first, *(_in_order(part, first.column_names) for part in parts[1:])]
        self._names = [part.name for part in parts]
        self.name = " + ".join(self._names)
        self.columns, self.file_columns = first.column_names, first.file_columns
        self.partial = list(dict.fromkeys(name for part in parts for name in part.origin.partial))
        self.features = self.told_features = first.features
        for part in parts[1:]:
            _must_agree(first, part)
        self.edges = np.cumsum([0, *(len(part) for part in parts)]).astype(np.int64)
        self.about, self.notes = _joined_about(parts), [note for part in parts for note in part.notes]
        names = dict.fromkeys(name for part in parts for name, _ in part.rows_of)
        self.order: list[tuple[int, Ints]] = []
        splits, at = [], 0
        for name in names:
            start = at
            for number, part in enumerate(parts):
                begin = 0
                for own, rows in part.rows_of:
                    if own == name and len(rows):
                        self.order.append((number, np.arange(begin, begin + len(rows))))
                        at += len(rows)
                    begin += len(rows)
            splits.append(Split(name, start, at))
        self.splits = tuple(splits)
        self._part_of = np.concatenate([np.zeros(0, np.int64), *(np.full(len(r), n) for n, r in self.order)])
        self._row_of = np.concatenate([np.zeros(0, np.int64), *(r for _, r in self.order)])

    def __len__(self) -> int:
        return int(self.edges[-1])

    def possible(self, expression: str) -> Bools | None:
        return None

    def small(self, names: Sequence[str], rows: Ints | None = None) -> pa.Table:
        tables = [part.small(names) for part in self.parts]
        whole = stacked([table.select(tables[0].column_names) for table in tables], self._names)
        return whole.take(pa.array(self.edges[self._part_of] + self._row_of))

    def locate(self, rows: Ints | None, names: Sequence[str]) -> FileTable:
        rows = np.arange(len(self), dtype=np.int64) if rows is None else rows
        tables, order = [], np.empty(len(rows), np.int64)
        before = files = 0
        for number, part in enumerate(self.parts):
            own = np.flatnonzero(self._part_of[rows] == number)
            table = part.columns(names).take(self._row_of[rows[own]]).table()
            order[own] = before + np.arange(len(own))
            before += len(own)
            tables.append(table)
        for number, table in enumerate(tables):
            mixed = [name for name in table.nested if any(name not in other.nested for other in tables)]
            table = with_content(table, mixed) if mixed else table
            tables[number] = table.replace(rows=_with_numbers(table, files))
            files += len(table.files)
        whole = stacked([table.rows for table in tables], self._names).take(pa.array(order))
        far = tuple(dict.fromkeys(address for table in tables for address in table.far))
        held = tuple(one for table in tables for one in table.held)
        splits = (Split(self.splits[0].name, 0, len(rows)),)
        verbatim = any(table.verbatim for table in tables)
        return tables[0].replace(
            rows=whole, files=join_sets([table.files for table in tables]), splits=splits, held=held, far=far,
            about=self.about, verbatim=verbatim, warnings=tuple(w for table in tables for w in table.warnings),
            within=tuple(folder for table in tables for folder in table.within),
            shards_read=sum(table.shards_read for table in tables),
        )  # fmt: skip


def _in_order(part: Selection, names: Sequence[str]) -> Selection:
    """The same columns in the order of another selection."""
    same = part.column_names != list(names) and sorted(part.column_names) == sorted(names)
    return part.columns(names) if same else part


def _must_agree(first: Selection, other: Selection) -> None:
    if first.column_names != other.column_names:
        differs = sorted({*first.column_names} ^ {*other.column_names})
        raise InputError(
            f"{other.name} has different columns than {first.name}: {differs[0]}.",
            hint="Leave it out with --drop, or choose columns that both have with --columns.",
        )
    mine, others = first.features, other.features
    for name in first.column_names:
        if mine is not None and others is not None and mine[name] != others[name]:
            raise other_type(name, first.name, other.name)


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


Step = tuple[str, Mapping[str, Any]]


def _whole_number(name: str, value: Any) -> int:
    """Return a seed as a whole number; a number of NumPy and a text of digits are accepted."""
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool) and (isinstance(value, str) or int(value) == value):
            return int(value)
    raise ArgumentError(f"--{name} takes a whole number, not {value!r}.", option=name)


@dataclass(frozen=True)
class Selection:
    """Rows of a dataset that were chosen, without their values. Each method gives a new one."""

    origin: Origin
    steps: tuple[Step, ...] = ()
    name: str = ""
    reading: Mapping[str, Any] = field(default_factory=dict)  # how the source was read, for the ledger
    within: tuple[str, ...] = ()  # the folder here that was read, if it is one

    def _with(self, name: str, **arguments: Any) -> Selection:
        return replace(self, steps=(*self.steps, (name, arguments)))

    def where(self, expression: str) -> Selection:
        """Rows for which this is true: `age > 40 and sex == "F"`."""
        return self._with("where", expression=expression)

    def sql(self, expression: str) -> Selection:
        """Rows for which one boolean expression of DuckDB is true."""
        need_duckdb()
        return self._with("sql", expression=expression)

    def columns(self, names: str | Sequence[str]) -> Selection:
        """Only these columns, in this order."""
        return self._with("columns", names=_many(names))

    def drop(self, names: str | Sequence[str]) -> Selection:
        return self._with("drop", names=_many(names))

    def sort(self, by: str | Sequence[str], *, descending: bool = False) -> Selection:
        """In the order of one or several columns; nulls come last. A name with - before it goes down."""
        return self._with("sort", by=_many(by), **({"descending": True} if descending else {}))

    def shuffle(self, seed: int = 0) -> Selection:
        """In an order that looks random, the same for ever: by a keyed hash of each row's number in the source."""
        return self._with("shuffle", seed=_whole_number("seed", seed))

    def sample(self, amount: int | str, seed: int = 0) -> Selection:
        """So many rows, or a percentage like "10%", in their order; the same for ever."""
        return self._with("sample", amount=str(amount), seed=_whole_number("seed", seed))

    def limit(self, rows: int) -> Selection:
        if operator.index(rows) < 0:
            raise ArgumentError(f"limit takes a number of at least 0, not {rows!r}.", option="limit")
        return self._with("limit", rows=int(rows))

    def unique(self, column: str) -> Selection:
        """The first row of each value; of a file column, or `content`, of each content."""
        return self._with("unique", column=column)

    def split(
        self, parts: Mapping[str, float] | None = None, *, group_by: str | None = None, seed: int = 0, **more: float
    ) -> Selection:
        """Splits of these shares. With `group_by`, rows that share a value are in one split."""
        shares, groups = {**(parts or {}), **more}, {"group_by": group_by} if group_by else {}
        return self._with("split", parts=shares, seed=_whole_number("seed", seed), **groups)

    def take(self, rows: Any) -> Selection:
        """Rows by their places in the present order."""
        wanted = np.asarray(rows)
        if wanted.ndim != 1 or (len(wanted) and not np.issubdtype(wanted.dtype, np.integer)):
            raise InputError("rows= must be row numbers, counted from 0.")
        return self._with("take", rows=wanted.astype(np.int64))

    def concat(self, *others: Selection | FileTable) -> Selection:
        """These rows, and below them those of others with the same columns."""
        parts = [self, *(one if isinstance(one, Selection) else Selection(TableOrigin(one)) for one in others)]
        return Selection(JoinedOrigin(parts), name=" + ".join(part.name for part in parts))

    def apply(self, steps: Sequence[Any]) -> Selection:
        """Further steps, as `steps` has them or as they come back from JSON."""
        known = {"where", "sql", "columns", "drop", "sort", "shuffle", "sample", "limit", "unique", "split", "take"}
        if wrong := [name for name, _ in steps if name not in known]:
            raise InputError(f"The rows were selected by {wrong[0]!r}, which cannot be repeated from one source.")
        return replace(self, steps=(*self.steps, *((name, dict(arguments)) for name, arguments in steps)))

    @cached_property
    def _chosen(self) -> _Chosen:
        chosen = _Chosen(self.origin)
        for name, arguments in self.steps:
            getattr(chosen, name)(**arguments)
        return chosen

    @property
    def column_names(self) -> list[str]:
        return list(self._chosen.names)

    @property
    def file_columns(self) -> list[str]:
        return [name for name in self._chosen.names if name in self.origin.file_columns]

    @property
    def features(self) -> Mapping[str, Any] | None:
        features = self.origin.features
        return None if features is None else {name: features[name] for name in self._chosen.names}

    @property
    def about(self) -> Mapping[str, Any]:
        return self.origin.about

    @property
    def notes(self) -> Sequence[str]:
        return self.origin.notes

    @property
    def rows_of(self) -> list[tuple[str, Ints]]:
        """The rows of each split, by their numbers in the source."""
        return self._chosen.parts

    def small(self, names: Sequence[str] | None = None) -> pa.Table:
        """Small columns of the chosen rows."""
        wanted = [name for name in self._chosen.names if names is None or name in names]
        return self._chosen.small(wanted)

    def __len__(self) -> int:
        return sum(len(rows) for _, rows in self._chosen.parts)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """What was chosen from what, for people."""
        steps = [(name, describe(name, arguments)) for name, arguments in self.steps]
        return [
            ("from", self.name or self.origin.name),
            *steps,
            ("chosen", f"{len(self):,} of {len(self.origin):,} rows"),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{label:>14}  {text}" for label, text in self.lines)

    __repr__ = __str__

    def table(self) -> FileTable:
        """The file table of the chosen rows, their values found and none of them read."""
        chosen = self._chosen
        names = chosen.names
        if chosen.untouched:
            table = self.origin.locate(None, names)
        else:
            table = self.origin.locate(chosen.rows, names)
            edges = np.cumsum([0, *(len(rows) for _, rows in chosen.parts)]).tolist()
            splits = [Split(n, a, b) for (n, _), (a, b) in zip(chosen.parts, itertools.pairwise(edges), strict=True)]
            empty = [s.name for s in splits if s.stop == s.start] if len(table) else []
            table = table.replace(
                splits=tuple(s for s in splits if s.stop > s.start) or tuple(splits[:1]),
                warnings=(*table.warnings, *(f"no row is left for the split {name!r}" for name in empty)),
            )
        table = table.replace(rows=table.rows.select(names))
        if table.features is not None:
            table = table.replace(features={name: table.features[name] for name in names})
        steps = json.loads(json.dumps([[name, dict(a)] for name, a in self.steps], default=_as_json))
        recipe = {**self.reading, **({"steps": steps} if steps else {})}
        about = {**self.about, "Selected": "; ".join(f"{label} {text}" for label, text in self.lines)}
        warnings = tuple(dict.fromkeys((*table.warnings, *self.notes)))
        if self.about.get("LicensesDiffer"):
            warnings = (*warnings, f"the sources have different licenses: {self.about['License']}")
        within = (*table.within, *self.within)
        return table.replace(recipe=recipe, about=about, query=tuple(self.lines), warnings=warnings, within=within)


def _as_json(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else str(value)


def describe(step: str, arguments: Mapping[str, Any]) -> str:
    """A step in words."""
    if step == "split":
        shares = ", ".join(f"{name} {share:g}" for name, share in arguments["parts"].items())
        group = arguments.get("group_by")
        return f"{shares}{f', by {group}' if group else ''}, seed {arguments['seed']}"
    if step == "take":
        return f"{len(arguments['rows']):,} rows"
    return ", ".join(
        ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value) for value in arguments.values()
    )


def _many(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


class _Chosen:
    """The rows that are left while one step after the other is done."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self.names = list(origin.columns)
        self.parts = [(s.name, np.arange(s.start, s.stop, dtype=np.int64)) for s in origin.splits]
        self.untouched = True

    @property
    def rows(self) -> Ints:
        return np.concatenate([np.zeros(0, np.int64), *(rows for _, rows in self.parts)])

    def _check(self, name: str) -> None:
        if name not in self.names:
            raise InputError(
                f"The dataset has no column {name!r}.", hint=f"Its columns are: {', '.join(self.names[:30])}."
            )

    def small(self, names: Sequence[str]) -> pa.Table:
        names = [name for name in self.names if name in names]
        if self.untouched:
            return self._origin.small(names)
        rows = self.rows
        return self._origin.small(names, rows).take(pa.array(rows))

    def _keep(self, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        at, parts = 0, []
        for name, rows in self.parts:
            parts.append((name, rows[mask[at : at + len(rows)]]))
            at += len(rows)
        self.parts, self.untouched = parts, False

    def where(self, expression: str) -> None:
        possible = self._origin.possible(expression)
        if possible is not None:
            self._keep(possible[self.rows])
        table = self.small(names_in(expression, self.names))
        if not table.num_columns:  # a condition on nothing, or on a column that is not there
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
            down = descending
            if name.startswith("-") and name not in self.names:
                name, down = name[1:], not descending
            self._check(name)
            if name in self._origin.partial:
                raise InputError(f"Rows cannot be sorted by the files of {name!r}.")
            keys.append((name, "descending" if down else "ascending"))
        table = comparable(self.small([name for name, _ in keys]))
        at, parts = 0, []
        for split, rows in self.parts:
            part = table.slice(at, len(rows))
            at += len(rows)
            # pyarrow's sort is not stable: the present order decides between equals.
            part = part.append_column("", pa.array(np.arange(len(rows))))
            try:
                order = pc.sort_indices(part, sort_keys=[*keys, ("", "ascending")])
            except (pa.ArrowException, TypeError) as error:
                raise InputError(f"Rows cannot be sorted by {', '.join(by)}: {str(error).splitlines()[0]}.") from error
            parts.append((split, rows[order.to_numpy()]))
        self.parts, self.untouched = parts, False

    def shuffle(self, seed: int) -> None:
        parts = [(name, rows[np.argsort(keyed(rows, seed, "shuffle"), kind="stable")]) for name, rows in self.parts]
        self.parts, self.untouched = parts, False

    def sample(self, amount: str, seed: int = 0) -> None:
        rows = self.rows
        try:
            share = amount.strip()
            count = round(len(rows) * float(share[:-1]) / 100) if share.endswith("%") else int(share)
        except (ValueError, OverflowError):
            raise InputError(f"--sample takes a number of rows or a percentage like 10%, not {amount!r}.") from None
        if count < 0 or (amount.strip().endswith("%") and count > len(rows)):
            raise InputError(f"--sample takes a number of rows or a percentage up to 100%, not {amount!r}.")
        mask = np.zeros(len(rows), bool)
        mask[np.argsort(keyed(rows, seed, "sample"), kind="stable")[:count]] = True
        self._keep(mask)

    def limit(self, rows: int) -> None:
        if rows < 1:
            raise InputError("--limit takes a number of rows above zero.")
        self._keep(np.arange(len(self.rows)) < rows)

    def take(self, rows: Any) -> None:
        wanted, own = np.asarray(rows, np.int64), self.rows
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= len(own)):
            raise InputError(f"A row number is too large: there are {len(own):,} rows.")
        self.parts, self.untouched = [(self.parts[0][0] if self.parts else "train", own[wanted])], False

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
        keys = self._contents(column) if column in files else _values(self.small([column]).column(0))
        _, first = np.unique(keys, return_index=True)
        mask = np.zeros(len(keys), bool)
        mask[first] = True
        self._keep(mask)

    def _contents(self, column: str) -> Ints:
        """A number for each content of a file column. Only files of the same size are read."""
        table = self._origin.locate(self.rows, [column])
        cells = one_array(table.rows.column(column))
        if is_list(cells.type):
            raise InputError(f"--distinct needs a column with one file per row, but {column!r} has lists.")
        numbers = cells.fill_null(-1).to_numpy(zero_copy_only=False)
        sizes = np.where(numbers < 0, -1, np.append(table.files.sizes, 0)[numbers])
        _, same, counts = np.unique(sizes, return_inverse=True, return_counts=True)
        found: dict[Any, int] = {}
        keys = np.empty(len(numbers), np.int64)
        for row, (number, size) in enumerate(zip(numbers.tolist(), sizes.tolist(), strict=True)):
            key: Any = size if counts[same[row]] == 1 or number < 0 else _content(table, number)
            keys[row] = found.setdefault((size, key), len(found))
        return keys

    def split(self, parts: Mapping[str, float], seed: int = 0, group_by: str | None = None) -> None:
        shares = {str(name): float(share) for name, share in parts.items()}
        for name in shares:
            check_split(name)
        if not shares or not min(shares.values()) > 0 or not abs(sum(shares.values()) - 1) <= 1e-6:
            raise InputError(
                "The shares of --split-into must be above zero and add up to 1.", hint="Write train=0.9,test=0.1."
            )
        rows = self.rows
        edges = np.rint(np.cumsum(list(shares.values())) * len(rows)).astype(np.int64)
        edges[-1] = len(rows)
        which = np.empty(len(rows), np.int64)
        if group_by is None:
            which[np.argsort(keyed(rows, seed, "split"), kind="stable")] = np.repeat(
                np.arange(len(edges)), np.diff(edges, prepend=0)
            )
        else:
            self._check(group_by)
            if group_by in self._origin.partial:
                raise InputError(f"Rows cannot be grouped by the files of {group_by!r}.")
            which = _by_group(self.small([group_by]).column(0), edges, seed)
        self.parts = [(name, rows[which == number]) for number, name in enumerate(shares)]
        self.untouched = False


def _by_group(column: pa.ChunkedArray, edges: Ints, seed: int) -> Ints:
    """The split of each row: groups in the order of their hashes, each whole where most of it lies."""
    codes = _values(column)
    _, first, group, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    texts = [repr(column[place].as_py()) for place in first.tolist()]
    hashes = [hashlib.sha256(f"{seed} {text}".encode()).digest() for text in texts]
    order = np.array(sorted(range(len(hashes)), key=hashes.__getitem__), np.int64)
    middle = np.cumsum(counts[order]) - counts[order] / 2
    split = np.empty(len(order), np.int64)
    split[order] = np.searchsorted(edges, middle, side="right").clip(0, len(edges) - 1)
    return np.asarray(split[group], np.int64)


def _values(column: pa.ChunkedArray) -> Ints:
    """A number for each value: equal ones have the same, null is a value."""
    column = comparable(pa.table({"": column})).column(0)
    if pa.types.is_floating(column.type):
        column = pc.add(column, pa.scalar(0.0, column.type))  # of which minus zero is one
    try:
        encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    except (pa.ArrowException, AttributeError):
        known: dict[str, int] = {}
        return np.array([known.setdefault(repr(value), len(known)) for value in column.to_pylist()], np.int64)
    chunks = encoded.chunks if isinstance(encoded, pa.ChunkedArray) else [encoded]
    return np.concatenate([np.zeros(0, np.int64), *(c.indices.to_numpy(zero_copy_only=False) for c in chunks)])


def _content(table: FileTable, number: int) -> str:
    value = SpliceBuilder(table.files)
    value.value(number)
    with value.finish() as splice:
        return splice.sha256()


def keyed(rows: Ints, seed: int, purpose: str) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A number for each row number that looks random: the same for ever, and different for every row.

    splitmix64 of the number and a key, twice: it maps 64 bits to 64 bits and no two to the same.
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

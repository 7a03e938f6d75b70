"""`--where`: which rows, in Python's own syntax, with SQL's meaning of null.

    age > 40 and sex == "F"          subject in ["M2230", "M2231"]       "x" in tags
    seen >= "2024-01-31"             site.startswith("Os")               image.path.endswith(".png")

The text is parsed, never run: names are columns, and only what is listed here is understood. A comparison with null is
null, and a row is taken where the whole is true. `--sql` hands one boolean expression to DuckDB, shut off from the rest
of the machine. Which rows are then done what with: selection.py.
"""

from __future__ import annotations

import ast
import datetime
import difflib
import itertools
import keyword
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import InputError
from brim.extras import missing
from brim.file_set import Bools

MOST_CHARACTERS, MOST_NODES, MOST_DEPTH = 128_000, 40_000, 60  # as long as an argument of a command can be
_SQL_MEMORY = "256MB"
_NOT_OPERATORS = frozenset(keyword.kwlist) - {"and", "or", "not", "in", "is", "None", "True", "False"}
_NO_KERNEL = re.compile(r"has no kernel matching input types \((.+)\)")
_BETWEEN = re.compile(r", (?![^(<]*[)>])")  # types, and not what is in the brackets of one

_COMPARE = {
    ast.Gt: pc.greater, ast.GtE: pc.greater_equal, ast.Lt: pc.less, ast.LtE: pc.less_equal,
    ast.Eq: pc.equal, ast.NotEq: pc.not_equal,
}  # fmt: skip


def _widely(compute: Callable[..., Any], *values: Any) -> Any:
    """Compute whole numbers as if their types had no end: with 64 bits, and with decimals where those overflow."""
    if not all(pa.types.is_integer(value.type) for value in values):
        return compute(*values)
    try:
        return compute(*(value if value.type == pa.uint64() else value.cast(pa.int64()) for value in values))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # uint64 has no negative numbers, nor goes with int64
        return compute(*(value.cast(pa.decimal256(20, 0)) for value in values))


def _divide(one: Any, other: Any) -> Any:
    """As Python does: two whole numbers give a fraction. By zero it is null, as in SQL."""
    low = other.cast(pa.float64())
    return pc.divide(one.cast(pa.float64()), pc.if_else(pc.equal(low, 0.0), pa.scalar(None, pa.float64()), low))


_COUNT: dict[type[ast.operator], Callable[..., Any]] = {
    ast.Add: pc.add_checked, ast.Sub: pc.subtract_checked, ast.Mult: pc.multiply_checked, ast.Div: _divide,
}  # fmt: skip
_TEXT: dict[str, Callable[..., Any]] = {
    "lower": pc.utf8_lower,
    "upper": pc.utf8_upper,
    "strip": pc.utf8_trim_whitespace,
    "startswith": lambda values, text: pc.starts_with(values, pattern=text),
    "endswith": lambda values, text: pc.ends_with(values, pattern=text),
    "contains": lambda values, text: pc.match_substring(values, pattern=text),
    "matches": lambda values, text: pc.match_substring_regex(values, pattern=text),
}
_OF_DATE = {"year": pc.year, "month": pc.month, "day": pc.day, "hour": pc.hour}


def where_mask(
    text: str, table: pa.Table, labels: Mapping[str, list[str]] | None = None, known: Sequence[str] = ()
) -> Bools:
    """Which rows of a table a text chooses. `labels` has the names of the columns that are class labels, `known` the
    columns there are, if the table holds only some of them."""
    found = _Evaluation(text, table, labels or {}, known).run()
    mask = found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
    return np.asarray(pc.fill_null(mask, False).to_numpy(zero_copy_only=False), bool)


def labels_of(features: Any) -> dict[str, list[str]]:
    """The names of the columns that are class labels."""
    found = {}
    for name, feature in features.items() if isinstance(features, Mapping) else ():
        if isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel":
            found[name] = list(feature.get("names") or ())
    return found


def names_in(text: str, known: list[str]) -> list[str]:
    """The columns that a text names, as far as it can be parsed."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return known
    named = {found for node in ast.walk(tree) if (found := _named(node)) is not None}
    return [name for name in known if name in named]


def _named(node: ast.AST) -> str | None:
    """The column that a node is: a name, or `column("any name")`."""
    if isinstance(node, ast.Name):
        return node.id
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "column":
        return None
    text = node.args[0].value if len(node.args) == 1 and isinstance(node.args[0], ast.Constant) else None
    return text if isinstance(text, str) and not node.keywords else None


Bounds = Mapping[str, tuple[Any, Any]]


def may_choose(text: str, bounds: Bounds) -> bool:
    """Whether a text can choose one of some rows, of which the smallest and the largest values of columns are known.

    What is not understood may: only rows that cannot be chosen are left out.
    """
    if len(text) > MOST_CHARACTERS:
        return True
    try:
        return _may(ast.parse(text.strip(), mode="eval").body, bounds)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True


def _may(node: ast.expr, bounds: Bounds) -> bool:
    if isinstance(node, ast.BoolOp):
        found = (_may(value, bounds) for value in node.values)
        return all(found) if isinstance(node.op, ast.And) else any(found)
    if not isinstance(node, ast.Compare):
        return True
    sides = [node.left, *node.comparators]
    return all(_may_compare(*parts, bounds) for parts in zip(sides, node.ops, sides[1:], strict=False))


_MIRRORED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Gt: ast.Lt, ast.Lt: ast.Gt, ast.GtE: ast.LtE, ast.LtE: ast.GtE, ast.Eq: ast.Eq,
}  # fmt: skip


def _may_compare(left: ast.expr, operator: ast.cmpop, right: ast.expr, bounds: Bounds) -> bool:
    kind = type(operator)
    if _named(right) is not None and kind in _MIRRORED:
        left, right, kind = right, left, _MIRRORED[kind]
    name = _named(left)
    if name is None or name not in bounds:
        return True
    low, high = bounds[name]
    if kind is ast.In and isinstance(right, ast.List | ast.Tuple):
        return any(_may_be(ast.Eq, part, low, high) for part in right.elts)
    return _may_be(kind, right, low, high)


def _may_be(kind: type[ast.cmpop], node: ast.expr, low: Any, high: Any) -> bool:
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node, sign = node.operand, -1
    if not isinstance(node, ast.Constant):
        return True
    value = node.value
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = sign * value
        # pyarrow compares fractions with whole numbers as fractions
        if any(type(one) not in (int, float) or not -(2**53) < one < 2**53 for one in (value, low, high)):
            return True
    elif not all(isinstance(one, str) for one in (value, low, high)):
        return True
    if kind is ast.Gt:
        return bool(high > value)
    if kind is ast.GtE:
        return bool(high >= value)
    if kind is ast.Lt:
        return bool(low < value)
    if kind is ast.LtE:
        return bool(low <= value)
    return bool(low <= value <= high) if kind is ast.Eq else True


class _Evaluation:
    def __init__(self, text: str, table: pa.Table, labels: Mapping[str, list[str]], known: Sequence[str]) -> None:
        self.text, self.table, self.labels = text.strip(), table, labels
        if "#" not in text:  # behind which a line is a comment, and the next one is not
            self.text = " ".join(self.text.splitlines())
        self.known = known or table.column_names

    def run(self) -> Any:
        if not self.text:
            raise InputError("The expression of --where is empty.", hint="Leave --where out to take all rows.")
        if len(self.text) > MOST_CHARACTERS:
            raise InputError(
                f"The expression of --where is longer than {MOST_CHARACTERS:,} characters.",
                hint="In Python, .take(rows) chooses any number of rows.",
            )
        try:
            tree = ast.parse(self.text, mode="eval").body
        except SyntaxError as error:
            place = min(error.offset - 1 if error.offset else len(self.text), len(self.text))
            raise self._wrong(f"is not an expression: {error.msg}", place, _syntax_hint(self.text)) from None
        except (ValueError, RecursionError, MemoryError):
            raise InputError("The expression of --where is nested too deeply or has a null character.") from None
        if sum(1 for _ in ast.walk(tree)) > MOST_NODES or _depth(tree) > MOST_DEPTH:
            raise InputError(f"The expression of --where has more than {MOST_NODES:,} parts or {MOST_DEPTH} levels.")
        found = self._value(tree)
        if isinstance(found, pa.Scalar) and pa.types.is_boolean(found.type):
            found = pa.repeat(found, self.table.num_rows)
        if not isinstance(found, pa.Array | pa.ChunkedArray) or not pa.types.is_boolean(found.type):
            raise self._wrong("is not true or false for each row", 0, "Write a comparison, like age > 40.")
        return found

    def _wrong(self, what: str, place: int | ast.AST, hint: str = "") -> InputError:
        """An error that points at its place."""
        at = place if isinstance(place, int) else getattr(place, "col_offset", 0)
        if not isinstance(place, int):
            at = len(self.text.encode()[:at].decode(errors="replace"))
        start = max(at - 60, 0)
        line = self.text[start : at + 60].replace("\n", " ")
        return InputError(f"--where {what}:\n  {line}\n  {' ' * (at - start)}^", hint=hint, position=at)

    def _value(self, node: ast.AST) -> Any:
        try:
            return self._known(node)
        except OverflowError:
            raise self._wrong("has a number that is too large to compare with", node) from None
        except (pa.ArrowException, TypeError) as error:
            reason = _in_words(str(error).split("\n")[0][:200])
            hint = "" if "regular expression" in reason else "Are the types those of the columns?"
            raise self._wrong(f"cannot be computed ({reason})", node, hint) from None

    def _known(self, node: ast.AST) -> Any:
        if isinstance(node, ast.BoolOp):
            return self._logic(node)
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.Compare):
            return self._comparisons(node)
        if isinstance(node, ast.BinOp) and type(node.op) in _COUNT:
            return _widely(_COUNT[type(node.op)], self._value(node.left), self._value(node.right))
        if (name := _named(node)) is not None:
            return self._column(node, name)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Constant) and not isinstance(node.value, complex | type(...)):
            return _scalar(node.value)
        raise self._wrong("has a part that is not supported", node, "docs/reference/where.md lists the syntax.")

    def _logic(self, node: ast.BoolOp) -> Any:
        join = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
        found = self._yes_no(node.values[0])
        for value in node.values[1:]:
            found = join(found, self._yes_no(value))
        return found

    def _yes_no(self, node: ast.AST) -> Any:
        value = self._value(node)
        if not pa.types.is_boolean(value.type):
            raise self._wrong(
                "has `and`, `or` or `not` with a value that is not true or false", node, "Write a comparison there."
            )
        return value

    def _unary(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            return pc.invert(self._yes_no(node.operand))
        if isinstance(node.op, ast.USub):
            if isinstance(node.operand, ast.Constant) and isinstance(node.operand.value, int):
                return _scalar(-node.operand.value)
            return _widely(pc.negate_checked, self._value(node.operand))
        raise self._wrong("has a part that is not supported", node)

    def _column(self, node: ast.AST, name: str) -> Any:
        names = self.table.column_names
        if names.count(name) == 1:
            return _comparable(self.table.column(name))
        if name in self.known:
            raise self._wrong(f"names the column {name!r}, which has bytes and cannot be used to select rows", node)
        same = [one for one in self.known if one.casefold() == name.casefold()]
        near = same or difflib.get_close_matches(name, self.known, 1)
        meant = f"Did you mean {near[0]}? " if near else f'A text is in quotes, "{name}". '
        hint = f"{meant}Columns: {', '.join(self.known[:30])}."
        raise self._wrong(f"names the column {name!r}, which does not exist", node, hint)

    def _attribute(self, node: ast.Attribute) -> Any:
        value = self._value(node.value)
        if pa.types.is_temporal(value.type) and node.attr in _OF_DATE:
            return _OF_DATE[node.attr](value)
        if not pa.types.is_struct(value.type) or value.type.get_field_index(node.attr) < 0:
            hint = "Bytes inside a column cannot be used to select rows."
            raise self._wrong(f"asks for {node.attr!r}, which {value.type} does not have", node, hint)
        return _comparable(pc.struct_field(value, node.attr))

    def _call(self, node: ast.Call) -> Any:
        if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            raise self._wrong("has a call with unsupported arguments", node)
        if isinstance(node.func, ast.Name) and node.func.id == "len" and len(node.args) == 1:
            value = self._value(node.args[0])
            return pc.list_value_length(value) if _is_list(value.type) else pc.utf8_length(value)
        if isinstance(node.func, ast.Name) and node.func.id == "abs" and len(node.args) == 1:
            return _widely(pc.abs_checked, self._value(node.args[0]))
        if isinstance(node.func, ast.Attribute) and node.func.attr in _TEXT:
            value = self._value(node.func.value)
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if len(texts) != len(node.args) or len(texts) != (node.func.attr not in ("lower", "upper", "strip")):
                raise self._wrong(f"calls {node.func.attr} with unsupported arguments", node)
            return _TEXT[node.func.attr](value, *texts)
        known = ", ".join([*_TEXT, "len", "abs", "column"])
        raise self._wrong("calls an unknown function", node, f"Known functions: {known}.")

    def _comparisons(self, node: ast.Compare) -> Any:
        found, left = None, node.left
        for sign, right in zip(node.ops, node.comparators, strict=True):
            one = self._comparison(left, sign, right)
            found = one if found is None else pc.and_kleene(found, one)
            left = right
        return found

    def _comparison(self, left: ast.expr, sign: ast.cmpop, right: ast.expr) -> Any:
        none = isinstance(right, ast.Constant) and right.value is None
        if isinstance(sign, ast.Is | ast.IsNot) or (none and isinstance(sign, ast.Eq | ast.NotEq)):
            if not none:
                raise self._wrong("has `is` with a value that is not None", right)
            null = pc.is_null(self._value(left))
            return null if isinstance(sign, ast.Is | ast.Eq) else pc.invert(null)
        if isinstance(sign, ast.In | ast.NotIn):
            found = self._inside(left, right)
            return found if isinstance(sign, ast.In) else pc.invert(found)
        one, other = self._alike(left, right)
        kind = type(sign)
        if isinstance(one, pa.Scalar):
            one, other, kind = other, one, _MIRRORED.get(kind, kind)
        return _compared(one, kind, other)

    def _alike(self, left: ast.expr, right: ast.expr) -> tuple[Any, Any]:
        """Two sides of a comparison, a text as what it is compared with: a date, or the number of a label."""
        one, other = self._value(left), self._value(right)
        if isinstance(other, pa.Scalar):
            other = self._fitted(other, one, left, right)
        elif isinstance(one, pa.Scalar):
            one = self._fitted(one, other, right, left)
        return one, other

    def _fitted(self, value: Any, column: Any, column_node: ast.AST, node: ast.AST) -> Any:
        if pa.types.is_integer(value.type) and pa.types.is_floating(column.type):
            number = value.as_py()  # pyarrow would make it a fraction as coarse as the column's
            return pa.scalar(float(number)) if number == int(float(number)) else value
        if not pa.types.is_string(value.type):
            return value
        name = _named(column_node)
        if name is not None and name in self.labels and pa.types.is_integer(column.type):
            names = self.labels[name]
            if value.as_py() not in names:
                raise self._wrong(f"compares with a class that {name} does not have", node)
            return pa.scalar(names.index(value.as_py()), column.type)
        if pa.types.is_temporal(column.type):
            try:
                return _moment(value, column.type)
            except (pa.ArrowException, ValueError):
                what, example = ("time", "10:30:00") if pa.types.is_time(column.type) else ("date", "2024-01-31")
                zone = "" if getattr(column.type, "tz", None) else ", without a zone"
                hint = f'Write it as "{example}"{zone}.'
                raise self._wrong(f"compares a {what} with a text that is not one", node, hint) from None
        return value

    def _inside(self, left: ast.expr, right: ast.expr) -> Any:
        if isinstance(right, ast.List | ast.Tuple | ast.Set):
            column = self._value(left)
            constants = [self._constant(element) for element in right.elts]
            values = [self._fitted(_scalar(c), column, left, right) for c in constants if c is not None]
            # Each is compared as == compares it: a text is no number, and 2.0 is the number 2.
            found = pc.if_else(pc.is_null(column), pa.scalar(None, pa.bool_()), pa.scalar(False))
            for value in self._several(values, column, node=right):
                found = pc.or_kleene(found, value)
            return pc.or_kleene(found, pa.scalar(None, pa.bool_())) if None in constants else found
        column = self._value(right)
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            text = self._constant(left)
            if not isinstance(text, str):
                raise self._wrong("has `in` with a value that is not a text", left)
            return pc.match_substring(column, pattern=text)
        if not _is_list(column.type):
            raise self._wrong("has `in` with a value that is neither a list nor a text", right)
        array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        array = pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array
        values = _comparable(array.flatten())
        hit = pc.fill_null(
            _compared(values, ast.Eq, self._fitted(_scalar(self._constant(left)), values, right, left)), False
        )
        rows = np.repeat(np.arange(len(array)), pc.fill_null(pc.list_value_length(array), 0))
        mask = np.zeros(len(array), bool)
        mask[rows[np.asarray(hit.to_numpy(zero_copy_only=False), bool)]] = True
        return pa.array(mask, mask=np.asarray(array.is_null().to_numpy(zero_copy_only=False), bool))

    def _several(self, values: list[Any], column: Any, node: ast.AST) -> Iterator[Any]:
        """Where a column is one of some values: those of its own type are looked up at once."""
        own, others = [], []
        for value in values:
            try:
                _compared(pa.array([], column.type), ast.Eq, value)
            except pa.ArrowException:
                raise self._wrong(f"looks for {value.as_py()!r} in a column of {column.type}", node) from None
            try:
                fitted = value.cast(column.type)
            except pa.ArrowException:
                others.append(value)
            else:
                zero = pa.types.is_floating(column.type) and fitted.as_py() == 0  # which minus zero is too
                same = not zero and fitted.cast(value.type).equals(value)
                own += [fitted] if same else []
                others += [] if same else [value]
        if own:
            yield pc.is_in(column, value_set=pa.array(own, column.type))
        for value in others:
            yield _compared(column, ast.Eq, value)

    def _constant(self, node: ast.expr) -> Any:
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, RecursionError):
            raise self._wrong("needs a plain value here", node) from None
        if value is not None and not isinstance(value, str | int | float | bool | bytes):
            raise self._wrong("needs a plain value here", node)
        return value


def _syntax_hint(text: str) -> str:
    """Return what to write instead of SQL's words, or of a column whose name is a word of Python."""
    words = re.findall(r"[^\W\d]\w*|[<>!=]=?", re.sub(r"""(['"]).*?\1""", "", text))
    for word in words:
        if word in ("AND", "OR", "NOT", "IN", "IS"):
            return f"Write {word.lower()} in lower case."
        if word.lower() in ("like", "ilike", "between"):
            return f"--where has no {word}. Use --sql instead, or .contains() and .startswith()."
        if word in _NOT_OPERATORS:
            return f'{word} is a word of Python. Write column("{word}") for the column.'
    return "Equality is written ==." if "=" in words else ""


def _scalar(value: Any) -> Any:
    """A constant as pyarrow has it: whole numbers that only unsigned ones reach are of these."""
    large = isinstance(value, int) and not isinstance(value, bool) and 2**63 <= value < 2**64
    return pa.scalar(value, pa.uint64()) if large else pa.scalar(value)


def _comparable(column: Any) -> Any:
    """A column as what its values are, where pyarrow does not compare them as they are stored."""
    if pa.types.is_float16(column.type):
        return column.cast(pa.float32())
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


_IN_A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def _moment(value: Any, kind: pa.DataType) -> Any:
    """A text as a date, a time of the day or a point in time, of a finer type where the column's does not hold it; one
    without a zone is of UTC."""
    if pa.types.is_time(kind):
        time = datetime.time.fromisoformat(value.as_py())
        if time.tzinfo is not None:
            raise ValueError("a time of the day has no zone")
        return pa.scalar(time, pa.time64("us"))
    zones = [None] if not pa.types.is_timestamp(kind) or kind.tz is None else [None, "UTC"]
    kinds = [pa.timestamp(unit, zone) for zone in zones for unit in ("us", "ns")]
    for one in [kind, *kinds] if pa.types.is_date(kind) else kinds:
        try:
            moment = value.cast(one)
        except pa.ArrowException:
            continue
        return moment if pa.types.is_date(kind) else moment.cast(pa.timestamp(one.unit, kind.tz))
    raise ValueError("neither a date nor a point in time")


def _compared(column: Any, kind: type[ast.cmpop], value: Any) -> Any:
    """A column compared with a value, or with another column."""
    if isinstance(value, pa.Scalar) and value.is_valid and not isinstance(column, pa.Scalar):
        if pa.types.is_integer(column.type) and (pa.types.is_integer(value.type) or pa.types.is_floating(value.type)):
            return _exact(column, kind, value.as_py())
        if pa.types.is_timestamp(column.type) and pa.types.is_timestamp(value.type):
            number = Fraction(value.value * _IN_A_SECOND[column.type.unit], _IN_A_SECOND[value.type.unit])
            return _exact(column.cast(pa.int64()), kind, number)
    return _COMPARE[kind](column, value)


def _exact(column: Any, kind: type[ast.cmpop], value: float | Fraction) -> Any:
    """Whole numbers compared with a number as Python does: whatever their type holds, and where fractions are too
    coarse to tell them apart."""
    bits, signed = column.type.bit_width, pa.types.is_signed_integer(column.type)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    equality, whole = kind in (ast.Eq, ast.NotEq), value % 1 == 0
    if not low <= value <= high or (equality and not whole):  # which NaN is not either
        below = kind in (ast.Lt, ast.LtE)
        answer = kind is ast.NotEq if equality or math.isnan(value) else (value > high) == below
        return pc.if_else(pc.is_null(column), pa.scalar(None, pa.bool_()), pa.scalar(answer))
    if whole:
        return _COMPARE[kind](column, pa.scalar(int(value), column.type))
    near = math.floor(value) if kind in (ast.Gt, ast.LtE) else math.ceil(value)
    return _COMPARE[kind](column, pa.scalar(near, column.type))


def _depth(tree: ast.AST) -> int:
    deepest, waiting = 0, [(tree, 1)]
    while waiting:
        node, depth = waiting.pop()
        deepest = max(deepest, depth)
        waiting += [(child, depth + 1) for child in ast.iter_child_nodes(node)]
    return deepest


def _in_words(reason: str) -> str:
    """What pyarrow says of types that do not go together, without the names of its functions."""
    found = _NO_KERNEL.search(reason)
    return f"it does not work on {' and '.join(_BETWEEN.split(found[1]))}" if found else reason


def need_duckdb() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise missing("sql", "--sql needs DuckDB.", instead=". Or use --where.") from error
    return duckdb


def sql_mask(text: str, table: pa.Table) -> Bools:
    """Which rows one boolean SQL expression chooses."""
    duckdb = need_duckdb()
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"The expression of --sql is longer than {MOST_CHARACTERS:,} characters.")
    if not text.strip():
        raise InputError("The expression of --sql is empty.", hint="Leave --sql out to take all rows.")
    folded = [name.lower() for name in table.column_names]
    twins = [name for name in table.column_names if folded.count(name.lower()) > 1]
    if twins:
        raise InputError(
            f"--sql cannot tell the columns {twins[0]!r} and {twins[1]!r} apart.", hint="Use --where instead."
        )
    try:
        # What closes the bracket that it stands in does not parse in a bracket of the other kind.
        parsed = [duckdb.extract_statements(f"SELECT {a}{text}\n{b} FROM rows") for a, b in ("()", "[]")]
    except duckdb.Error as error:
        raise _sql_wrong(error) from None
    if [len(statements) for statements in parsed] != [1, 1]:
        raise InputError("--sql takes one expression, not several statements.")
    settings: dict[str, Any] = {"threads": 1, "memory_limit": _SQL_MEMORY}
    with duckdb.connect(config=settings) as connection:
        number_name = next(name for n in itertools.count() if (name := f"__brim_row{n or ''}") not in folded)
        numbered = table.append_column(number_name, pa.array(np.arange(table.num_rows, dtype=np.int64)))
        for number, field in enumerate(table.schema):
            if pa.types.is_float16(field.type):
                numbered = numbered.set_column(number, field.name, numbered.column(number).cast(pa.float32()))
        try:
            connection.register("rows", numbered)
        except duckdb.Error as error:
            raise InputError(
                f"--sql cannot read the columns: {str(error).splitlines()[0]}.",
                hint="Use --where instead.",
            ) from None
        for setting in (
            "enable_external_access=false", "autoinstall_known_extensions=false", "autoload_known_extensions=false",
            "allow_community_extensions=false", "python_enable_replacements=false", "lock_configuration=true",
        ):  # fmt: skip
            connection.execute(f"SET {setting}")
        try:
            kind = str(connection.sql(f"SELECT ({text}\n) FROM rows LIMIT 0").types[0])
            if kind != "BOOLEAN":
                raise InputError(f"--sql must be a condition that is true or false, not a {kind}.")
            connection.execute(
                "SELECT setseed(0)"
            ).fetchall()  # random() chooses the same rows when the command is run again
            chosen = connection.sql(f'SELECT "{number_name}" FROM rows WHERE ({text}\n)').to_arrow_table().column(0)
        except duckdb.Error as error:
            raise _sql_wrong(error) from None
    mask = np.zeros(table.num_rows, bool)
    mask[np.asarray(chosen.to_numpy())] = True
    return mask


def _sql_wrong(error: BaseException) -> InputError:
    return InputError(f"DuckDB cannot run --sql: {str(error).strip()[:600]}", hint="Write one boolean expression.")

"""Choose rows with `--where`: Python's syntax, SQL's meaning of null, computed by Arrow.

    age > 40 and sex == "F"          subject in ["M2230", "M2231"]       "x" in tags
    seen >= "2024-01-31"             site.startswith("Os")               image.path.endswith(".png")

The text is parsed and never run. It is compiled to one Arrow expression, with which pyarrow also skips row groups that
cannot have a chosen row. Names are columns, and any syntax that is not listed here is an error that points at it. A
comparison with null is null, and a row is chosen if the condition is true.

`--sql` passes one boolean expression to DuckDB, which has no access to files or to the network. The use of the chosen
rows: selection.py.
"""

from __future__ import annotations

import ast
import datetime
import difflib
import itertools
import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import partial, reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.fs import LocalFileSystem

from brim.errors import InputError
from brim.extras import missing
from brim.file_set import Bools
from brim.sources.file_table import one_array

MOST_CHARACTERS, MOST_NODES, MOST_DEPTH = 128_000, 40_000, 60  # as long as an argument of a command can be
_SQL_MEMORY = "256MB"
_OTHER_OPERATORS = {"&&": "and", "||": "or", "<>": "!="}  # of SQL and other languages
_NOT_OPERATORS = frozenset(keyword.kwlist) - {"and", "or", "not", "in", "is", "None", "True", "False"}
_NO_KERNEL = re.compile(r"has no kernel matching input types \((.+)\)")
_COMMA_BETWEEN_TYPES = re.compile(r", (?![^(<]*[)>])")
_UNITS_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

_COMPARE = {
    ast.Gt: pc.greater, ast.GtE: pc.greater_equal, ast.Lt: pc.less, ast.LtE: pc.less_equal,
    ast.Eq: pc.equal, ast.NotEq: pc.not_equal,
}  # fmt: skip
_MIRRORED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Gt: ast.Lt, ast.Lt: ast.Gt, ast.GtE: ast.LtE, ast.LtE: ast.GtE, ast.Eq: ast.Eq, ast.NotEq: ast.NotEq,
}  # fmt: skip
_ARITHMETIC = {ast.Add: pc.add_checked, ast.Sub: pc.subtract_checked, ast.Mult: pc.multiply_checked}
_TEXT_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "lower": pc.utf8_lower,
    "upper": pc.utf8_upper,
    "strip": pc.utf8_trim_whitespace,
    "startswith": lambda values, text: pc.starts_with(values, pattern=text),
    "endswith": lambda values, text: pc.ends_with(values, pattern=text),
    "contains": lambda values, text: pc.match_substring(values, pattern=text),
    "matches": lambda values, text: pc.match_substring_regex(values, pattern=text),
}
_DATE_PARTS = {"year": pc.year, "month": pc.month, "day": pc.day, "hour": pc.hour}


def where_mask(
    text: str, table: pa.Table, labels: Mapping[str, list[str]] | None = None, known: Sequence[str] = ()
) -> Bools:
    """Return which rows of a table a condition chooses.

    Args:
        text: The condition.
        table: The columns that it may use.
        labels: The class names of columns that are class labels.
        known: All columns of the dataset, if the table has only some of them.

    Raises:
        InputError: The condition is wrong. The message has a line with a caret.
    """
    try:
        return _Condition(text, table.schema, labels, known).mask(table)
    except InputError as error:  # perhaps of whole numbers that 64 bits do not hold
        try:
            return _Condition(text, table.schema, labels, known, wide=True).mask(table)
        except InputError:
            raise error from None


def may_choose(text: str, schema: pa.Schema, bounds: Sequence[Mapping[str, tuple[Any, Any]]]) -> list[bool]:
    """Return for each group of rows whether a condition can choose one of them; True if the condition is wrong.

    `bounds` has for each group the smallest and the largest value of some columns, which do not count nulls and NaN.
    """
    import pyarrow.dataset as ds  # only for shards that are remote

    try:
        condition = _Condition(text, schema)
    except InputError:
        return [True] * len(bounds)
    # A comparison with null is null in any context, and one with NaN is false. So only a test for null or a
    # negation can choose a row by a value outside of the bounds.
    not_bounded = {field.name for field in schema if condition.has_negation and pa.types.is_floating(field.type)}
    files, filesystem = ds.ParquetFileFormat(), LocalFileSystem()
    fragments = []
    for number, group in enumerate(bounds):
        guarantee = pc.scalar(True)
        for name in group.keys() - not_bounded:
            column = pc.field(name)
            try:
                low, high = (pc.scalar(pa.scalar(value, schema.field(name).type)) for value in group[name])
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                continue  # the statistics are of another type than the column
            within = (column >= low) & (column <= high)
            guarantee &= within | column.is_null() if name in condition.tested_for_null else within
        # A fragment stands for a group of rows. No file of this name is opened.
        fragments.append(files.make_fragment(str(number), filesystem, partition_expression=guarantee))
    dataset = ds.FileSystemDataset(fragments, condition.schema, files, filesystem)
    result = condition.result if isinstance(condition.result, pc.Expression) else pc.scalar(condition.result)
    paths = {fragment.path for fragment in dataset.get_fragments(result)}
    return [str(number) in paths for number in range(len(bounds))]


def labels_of(features: Any) -> dict[str, list[str]]:
    """Return the class names of the columns that are class labels."""
    labels = {}
    for name, feature in features.items() if isinstance(features, Mapping) else ():
        if isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel":
            labels[name] = list(feature.get("names") or ())
    return labels


def names_in(text: str, known: list[str]) -> list[str]:
    """Return the columns that a condition names; all if it cannot be parsed."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return known
    used = {name for node in ast.walk(tree) if (name := _column_name(node)) is not None}
    return [name for name in known if name in used]


def _column_name(node: ast.AST) -> str | None:
    """Return the column that a node is: a name, or `column("any name")`."""
    if isinstance(node, ast.Name):
        return node.id
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "column":
        return None
    text = node.args[0].value if len(node.args) == 1 and isinstance(node.args[0], ast.Constant) else None
    return text if isinstance(text, str) and not node.keywords else None


Value = Any  # of a part of a condition: a pc.Expression, or a pa.Scalar if it is a constant


def _call(function: Callable[..., Any], *values: Value) -> Value:
    """Apply a function of pyarrow. Constants are computed at once."""
    if not any(isinstance(value, pc.Expression) for value in values):
        return function(*values)
    return function(*(value if isinstance(value, pc.Expression) else pc.scalar(value) for value in values))


class _Condition:
    """A condition, compiled to an Arrow expression for tables of one schema.

    `wide` computes whole numbers as decimals, which hold more than 64 bits. Arrow has no function that looks for a
    value in a list: each such test becomes another column, which is computed first and which `schema` includes.
    """

    def __init__(
        self, text: str, schema: pa.Schema, labels: Mapping[str, list[str]] | None = None, known: Sequence[str] = (),
        wide: bool = False,
    ) -> None:  # fmt: skip
        # A comment ends with its line, so only lines without one can be joined.
        self._text = text.strip() if "#" in text else " ".join(text.strip().splitlines())
        self.schema, self._labels, self._known, self._wide = schema, labels or {}, known or schema.names, wide
        self.tested_for_null: set[str] = set()
        self.has_negation = False
        self._lists: list[tuple[str, Value, Value]] = []  # name of the column, the lists, the test of their values
        self._compiled: dict[ast.AST, Value] = {}
        self._root = self._parse()
        self.result = self._compile(self._root)
        if not pa.types.is_boolean(self._type(self.result)):
            raise self._error("is not true or false for each row", 0, "Write a comparison, like age > 40.")

    def _parse(self) -> ast.expr:
        if not self._text:
            raise InputError("The expression of --where is empty.", hint="Leave --where out to take all rows.")
        if len(self._text) > MOST_CHARACTERS:
            raise InputError(
                f"The expression of --where is longer than {MOST_CHARACTERS:,} characters.",
                hint="In Python, .take(rows) chooses any number of rows.",
            )
        try:
            root = ast.parse(self._text, mode="eval").body
        except SyntaxError as error:
            position = min(error.offset - 1 if error.offset else len(self._text), len(self._text))
            raise self._error(f"is not an expression: {error.msg}", position, _syntax_hint(self._text)) from None
        except (ValueError, RecursionError, MemoryError):
            raise InputError("The expression of --where is nested too deeply or has a null character.") from None
        nodes, level = 0, list[ast.AST]([root])
        for _ in range(MOST_DEPTH):
            nodes += len(level)
            level = [child for node in level for child in ast.iter_child_nodes(node)]
        if level or nodes > MOST_NODES:
            raise InputError(f"The expression of --where has more than {MOST_NODES:,} parts or {MOST_DEPTH} levels.")
        return root

    def mask(self, table: pa.Table) -> Bools:
        """Return which rows of a table are chosen."""
        if isinstance(self.result, pa.Scalar):
            return np.full(table.num_rows, bool(self.result.as_py()))
        try:
            for name, lists, test in self._lists:
                array = one_array(_evaluate(table, lists))
                hits = _evaluate(pa.table({"": array.flatten()}), test).fill_null(False)
                rows = np.repeat(np.arange(len(array)), pc.fill_null(pc.list_value_length(array), 0))
                is_in = np.zeros(len(array), bool)
                is_in[rows[np.asarray(hits, bool)]] = True
                table = table.append_column(name, pa.array(is_in, mask=np.asarray(array.is_null(), bool)))
            return np.asarray(_evaluate(table, self.result).fill_null(False), bool)
        except pa.ArrowException as error:
            raise self._failure(table, self._root) or self._cannot_compute(error, self._root) from None

    def _failure(self, table: pa.Table, node: ast.AST) -> InputError | None:
        """Return the error of the innermost part that cannot be computed."""
        for child in ast.iter_child_nodes(node):
            if (error := self._failure(table, child)) is not None:
                return error
        try:
            if isinstance(self._compiled.get(node), pc.Expression):
                _evaluate(table, self._compiled[node])
        except pa.ArrowException as error:
            return self._cannot_compute(error, node)
        return None

    def _type(self, value: Value) -> pa.DataType:
        if isinstance(value, pa.Scalar):
            return value.type
        return _scanner(self.schema.empty_table(), value).projected_schema.field(0).type

    def _error(self, fault: str, position: int | ast.AST, hint: str = "") -> InputError:
        """Return an error with the text and a caret below the position."""
        if not isinstance(position, int):  # ast counts bytes
            position = len(self._text.encode()[: getattr(position, "col_offset", 0)].decode(errors="replace"))
        start = max(position - 60, 0)
        excerpt = self._text[start : position + 60].replace("\n", " ")
        return InputError(f"--where {fault}:\n  {excerpt}\n  {' ' * (position - start)}^", hint=hint, position=position)

    def _cannot_compute(self, error: BaseException, node: ast.AST) -> InputError:
        if isinstance(error, OverflowError):
            return self._error("has a number that is too large to compare with", node)
        reason = str(error).split("\n")[0][:200]
        if (types := _NO_KERNEL.search(reason)) is not None:
            reason = f"it does not work on {' and '.join(_COMMA_BETWEEN_TYPES.split(types[1]))}"
        hint = "" if "regular expression" in reason else "Are the types those of the columns?"
        return self._error(f"cannot be computed ({reason})", node, hint)

    def _compile(self, node: ast.expr) -> Value:
        try:
            value = self._compiled[node] = self._compile_node(node)
            self._type(value)  # refuses types that do not fit
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise self._cannot_compute(error, node) from None
        return value

    def _compile_node(self, node: ast.expr) -> Value:
        if isinstance(node, ast.BoolOp):
            join = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
            return reduce(partial(_call, join), map(self._compile_condition, node.values))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.has_negation = True
            return _call(pc.invert, self._compile_condition(node.operand))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            if isinstance(node.operand, ast.Constant) and isinstance(node.operand.value, int):
                return _constant(-node.operand.value)
            return _call(pc.negate_checked, *self._numbers(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _call(_ARITHMETIC[type(node.op)], *self._numbers(node.left, node.right))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):  # by zero it is null, as in SQL
            first, second = (number.cast(pa.float64()) for number in self._numbers(node.left, node.right))
            is_zero = _call(pc.equal, second, pa.scalar(0.0))
            return _call(pc.divide, first, _call(pc.if_else, is_zero, pa.scalar(None, pa.float64()), second))
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            return reduce(partial(_call, pc.and_kleene), map(self._comparison, sides, node.ops, sides[1:]))
        if (name := _column_name(node)) is not None:
            return self._column(node, name)
        if isinstance(node, ast.Attribute):
            value = self._compile(node.value)
            kind = self._type(value)
            if pa.types.is_temporal(kind) and node.attr in _DATE_PARTS:
                return _call(_DATE_PARTS[node.attr], value)
            if not pa.types.is_struct(kind) or kind.get_field_index(node.attr) < 0:
                hint = "Bytes inside a column cannot be used to select rows."
                raise self._error(f"asks for {node.attr!r}, which {kind} does not have", node, hint)
            return _comparable(pc.struct_field(value, node.attr), kind.field(node.attr).type)[0]
        if isinstance(node, ast.Call):
            return self._function(node)
        if isinstance(node, ast.Constant) and not isinstance(node.value, complex | type(...)):
            return _constant(node.value)
        raise self._error("has a part that is not supported", node, "docs/reference/where.md lists the syntax.")

    def _compile_condition(self, node: ast.expr) -> Value:
        value = self._compile(node)
        if not pa.types.is_boolean(self._type(value)):
            problem = "has `and`, `or` or `not` with a value that is not true or false"
            raise self._error(problem, node, "Write a comparison there.")
        return value

    def _numbers(self, *nodes: ast.expr) -> list[Value]:
        """Compile the numbers of a calculation. Arrow would compute with the smallest types that they fit in."""
        values = [self._compile(node) for node in nodes]
        types = [self._type(value) for value in values]
        if any(pa.types.is_floating(kind) for kind in types):
            return [value.cast(pa.float64()) for value in values]
        if self._wide or any(pa.types.is_decimal(kind) for kind in types):
            wide = pa.decimal256(20, 0)
            return [v.cast(wide) if pa.types.is_integer(kind) else v for v, kind in zip(values, types, strict=True)]
        is_long = [kind == pa.uint64() or not pa.types.is_integer(kind) for kind in types]
        return [value if long else value.cast(pa.int64()) for value, long in zip(values, is_long, strict=True)]

    def _column(self, node: ast.expr, name: str) -> Value:
        if self.schema.names.count(name) == 1:
            return _comparable(pc.field(name), self.schema.field(name).type)[0]
        if name in self._known:
            raise self._error(f"names the column {name!r}, which has bytes and cannot be used to select rows", node)
        same = [candidate for candidate in self._known if candidate.casefold() == name.casefold()]
        similar = same or difflib.get_close_matches(name, self._known, 1)
        suggestion = f"Did you mean {similar[0]}? " if similar else f'A text is in quotes, "{name}". '
        hint = f"{suggestion}Columns: {', '.join(self._known[:30])}."
        raise self._error(f"names the column {name!r}, which does not exist", node, hint)

    def _function(self, node: ast.Call) -> Value:
        if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            raise self._error("has a call with unsupported arguments", node)
        if isinstance(node.func, ast.Name) and node.func.id == "len" and len(node.args) == 1:
            value = self._compile(node.args[0])
            return _call(pc.list_value_length if _has_lists(self._type(value)) else pc.utf8_length, value)
        if isinstance(node.func, ast.Name) and node.func.id == "abs" and len(node.args) == 1:
            return _call(pc.abs_checked, *self._numbers(node.args[0]))
        if isinstance(node.func, ast.Attribute) and node.func.attr in _TEXT_FUNCTIONS:
            value = self._compile(node.func.value)
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if len(texts) != len(node.args) or len(texts) != (node.func.attr not in ("lower", "upper", "strip")):
                raise self._error(f"calls {node.func.attr} with unsupported arguments", node)
            return _TEXT_FUNCTIONS[node.func.attr](value, *texts)
        functions = ", ".join([*_TEXT_FUNCTIONS, "len", "abs", "column"])
        raise self._error("calls an unknown function", node, f"Known functions: {functions}.")

    def _comparison(self, left: ast.expr, sign: ast.cmpop, right: ast.expr) -> Value:
        is_none = isinstance(right, ast.Constant) and right.value is None
        self.has_negation |= isinstance(sign, ast.NotEq | ast.IsNot | ast.NotIn)
        if isinstance(sign, ast.Is | ast.IsNot) or (is_none and isinstance(sign, ast.Eq | ast.NotEq)):
            if not is_none:
                is_null = isinstance(right, ast.Name) and right.id.lower() == "null"
                hint = "Write None for a missing value." if is_null else "Equality is written ==."
                raise self._error("has `is` with a value that is not None", right, hint)
            self.tested_for_null |= {name for node in ast.walk(left) if (name := _column_name(node)) is not None}
            null = _call(pc.is_null, self._compile(left))
            return null if isinstance(sign, ast.Is | ast.Eq) else _call(pc.invert, null)
        if isinstance(sign, ast.In | ast.NotIn):
            if isinstance(right, ast.List | ast.Tuple | ast.Set):
                membership = self._is_one_of(left, right)
            else:
                membership = self._has_value(right, left)
            return membership if isinstance(sign, ast.In) else _call(pc.invert, membership)
        first, second, kind = self._compile(left), self._compile(right), type(sign)
        if not isinstance(second, pa.Scalar) and isinstance(first, pa.Scalar):
            left, right, first, second, kind = right, left, second, first, _MIRRORED[kind]
        if isinstance(second, pa.Scalar):
            column_type = self._type(first)
            return _compare(first, column_type, kind, self._fitted(second, column_type, left, right))
        return _call(_COMPARE[kind], first, second)

    def _fitted(self, value: pa.Scalar, column_type: pa.DataType, column: ast.AST, node: ast.AST) -> pa.Scalar:
        """Return a constant in a type to compare with a column: a text as a date, or as the number of its class."""
        if pa.types.is_integer(value.type) and pa.types.is_floating(column_type):
            number = value.as_py()  # pyarrow would round it to a float as coarse as the column's
            return pa.scalar(float(number)) if number == int(float(number)) else value
        if pa.types.is_integer(value.type) and pa.types.is_decimal(column_type):
            return pa.scalar(Decimal(value.as_py()))
        if not pa.types.is_string(value.type):
            return value
        text, name = value.as_py(), _column_name(column)
        if name is not None and name in self._labels and pa.types.is_integer(column_type):
            if text not in self._labels[name]:
                raise self._error(f"compares with a class that {name} does not have", node)
            return pa.scalar(self._labels[name].index(text), column_type)
        if pa.types.is_temporal(column_type):
            try:
                return _parse_time(text, column_type)
            except (pa.ArrowException, ValueError):
                unit, example = ("time", "10:30:00") if pa.types.is_time(column_type) else ("date", "2024-01-31")
                zone = "" if getattr(column_type, "tz", None) else ", without a zone"
                hint = f'Write it as "{example}"{zone}.'
                raise self._error(f"compares a {unit} with a text that is not one", node, hint) from None
        return value

    def _is_one_of(self, left: ast.expr, node: ast.List | ast.Tuple | ast.Set) -> Value:
        """Compile `column in [...]`. Each value is compared as == does: 2.0 is 2, and "2" is not."""
        column = self._compile(left)
        kind = self._type(column)
        constants = [self._literal(element) for element in node.elts]
        same_type: list[pa.Scalar] = []
        tests: list[Value] = []
        for value in [self._fitted(_constant(c), kind, left, node) for c in constants if c is not None]:
            try:
                test = _compare(column, kind, ast.Eq, value)
            except pa.ArrowException:
                raise self._error(f"looks for {value.as_py()!r} in a column of {kind}", node) from None
            try:
                fitted = value.cast(kind)
                is_zero = pa.types.is_floating(kind) and fitted.as_py() == 0  # for is_in, -0.0 is another value
                is_same = not is_zero and fitted.cast(value.type).equals(value)
            except pa.ArrowException:
                is_same = False
            if not (is_same and same_type):  # is_in is false for null, so one of its values is also compared
                tests.append(test)
            same_type += [fitted] if is_same else []
        if len(same_type) > 1:
            tests.append(pc.is_in(column, value_set=pa.array(same_type, kind)))
        tests += [pa.scalar(None, pa.bool_())] if None in constants else []
        return reduce(partial(_call, pc.or_kleene), tests) if tests else _same_for_all(column, False)

    def _has_value(self, right: ast.expr, left: ast.expr) -> Value:
        """Compile `value in column` of texts or lists."""
        column, value = self._compile(right), self._literal(left)
        kind = self._type(column)
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            if not isinstance(value, str):
                raise self._error("has `in` with a value that is not a text", left)
            return pc.match_substring(column, pattern=value)
        if not _has_lists(kind):
            raise self._error("has `in` with a value that is neither a list nor a text", right)
        values, kind = _comparable(pc.field(""), kind.value_type)
        name = f"\0list {len(self._lists)}"
        test = _compare(values, kind, ast.Eq, self._fitted(_constant(value), kind, right, left))
        self._lists.append((name, column, test))
        self.schema = self.schema.append(pa.field(name, pa.bool_()))
        return pc.field(name)

    def _literal(self, node: ast.expr) -> Any:
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, RecursionError):
            value = ...
        if value is not None and not isinstance(value, str | int | float | bool | bytes):
            raise self._error("needs a plain value here", node)
        return value


def _scanner(table: pa.Table, expression: Value) -> Any:
    import pyarrow.dataset as ds  # 12 ms, which a command without --where does not need

    return ds.dataset(table).scanner(columns={"": expression}, use_threads=False)


def _evaluate(table: pa.Table, expression: Value) -> pa.ChunkedArray:
    return _scanner(table, expression).to_table().column(0)


def _constant(value: Any) -> pa.Scalar:
    is_large = isinstance(value, int) and not isinstance(value, bool) and 2**63 <= value < 2**64
    return pa.scalar(value, pa.uint64()) if is_large else pa.scalar(value)


def _compare(column: Value, column_type: pa.DataType, kind: type[ast.cmpop], value: pa.Scalar) -> Value:
    """Compare a column with a constant. Whole numbers and points in time are compared exactly, as Python does.

    Arrow would compare them as 64-bit floats, or refuse a constant that the type of the column cannot hold.
    """
    is_constant, kinds = isinstance(column, pa.Scalar) or not value.is_valid, (column_type, value.type)
    is_number = pa.types.is_integer(value.type) or pa.types.is_floating(value.type)
    if pa.types.is_integer(column_type) and is_number and not is_constant:
        number: Any = value.as_py()
    elif all(map(pa.types.is_timestamp, kinds)) and not is_constant:
        number = Fraction(value.value * _UNITS_PER_SECOND[column_type.unit], _UNITS_PER_SECOND[value.type.unit])
    else:
        _COMPARE[kind](pa.array([], column_type), value)  # its error names the types
        return _call(_COMPARE[kind], column, value)
    bits, is_unsigned = column_type.bit_width, pa.types.is_unsigned_integer(column_type)
    low, high = (0, 2**bits - 1) if is_unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    tests_equality, is_whole = kind in (ast.Eq, ast.NotEq), number % 1 == 0
    if not low <= number <= high or (tests_equality and not is_whole):  # also NaN
        is_above = number > high
        is_true = kind is ast.NotEq if tests_equality or math.isnan(number) else is_above == (kind in (ast.Lt, ast.LtE))
        return _same_for_all(column, is_true)
    rounded = math.floor(number) if kind in (ast.Gt, ast.LtE) else math.ceil(number)
    whole = pa.scalar(rounded, pa.uint64() if is_unsigned else pa.int64())
    return _call(_COMPARE[kind], column, whole.cast(column_type))


def _comparable(column: pc.Expression, kind: pa.DataType) -> tuple[pc.Expression, pa.DataType]:
    """Return a column in a type that Arrow compares, and the type."""
    target = pa.float32() if pa.types.is_float16(kind) else kind.value_type if pa.types.is_dictionary(kind) else kind
    return (column, kind) if target == kind else (column.cast(target), target)


def _same_for_all(column: Value, value: bool) -> Value:
    """Return a part that is `value` where a column is not null, and null elsewhere."""
    return _call(pc.if_else, _call(pc.is_null, column), pa.scalar(None, pa.bool_()), pa.scalar(value))


def _has_lists(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _parse_time(text: str, kind: pa.DataType) -> pa.Scalar:
    """Parse a date, a time of the day, or a point in time, to compare with a column of type `kind`.

    The result has a finer type where that of the column cannot hold it. A time without a zone is in UTC.
    """
    if pa.types.is_time(kind):
        time = datetime.time.fromisoformat(text)
        if time.tzinfo is not None:
            raise ValueError("a time of the day has no zone")
        return pa.scalar(time, pa.time64("us"))
    value, zone = pa.scalar(text), getattr(kind, "tz", None)
    if pa.types.is_date(kind):
        with suppress(pa.ArrowException):
            return value.cast(kind)
    for parsed_zone, unit in itertools.product([None, "UTC"] if zone else [None], ("us", "ns")):
        with suppress(pa.ArrowException):
            return value.cast(pa.timestamp(unit, parsed_zone)).cast(pa.timestamp(unit, zone))
    raise ValueError("neither a date nor a point in time")


def _syntax_hint(text: str) -> str:
    """Return what to write instead of SQL's keywords, or of a column whose name is a keyword of Python."""
    tokens = re.findall(r"[^\W\d]\w*|<>|&&|\|\||[<>!=]=?", re.sub(r"""(['"]).*?\1""", "", text))
    for token in tokens:
        if token in ("AND", "OR", "NOT", "IN", "IS"):
            return f"Write {token.lower()} in lower case."
        if token in _OTHER_OPERATORS:
            return f"Write {_OTHER_OPERATORS[token]} instead of {token}."
        if token.lower() in ("like", "ilike", "between"):
            return f"--where has no {token}. Use --sql instead, or .contains() and .startswith()."
        if token in _NOT_OPERATORS:
            return f'{token} is a word of Python. Write column("{token}") for the column.'
    return "Equality is written ==." if "=" in tokens else ""


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
            result = connection.sql(f'SELECT "{number_name}" FROM rows WHERE ({text}\n)').to_arrow_table().column(0)
        except duckdb.Error as error:
            raise _sql_wrong(error) from None
    mask = np.zeros(table.num_rows, bool)
    mask[np.asarray(result.to_numpy())] = True
    return mask


def _sql_wrong(error: BaseException) -> InputError:
    return InputError(f"DuckDB cannot run --sql: {str(error).strip()[:600]}", hint="Write one boolean expression.")

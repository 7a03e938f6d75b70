"""Small changes to a module, each of which some test should detect.

mutmut 3 skips properties, decorated functions and module constants, and never removes a statement. Mutants of
exactly these kinds have survived in this project (a removed fsync, the margin of a property, min instead of max).
cosmic-ray starts an interpreter for every mutant, which takes hours for a thousand of them.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd},
}
# Arguments that numpy and pyarrow infer, or only check: without them the values are the same.
_MANNERS = ("dtype", "zero_copy_only", "strict")
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "left": "right", "right": "left"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change; `number` is its index in the module, `was` and `now` are the source text before and after."""

    number: int
    line: int
    where: str  # the function or class that contains the change
    was: str
    now: str

    @property
    def key(self) -> str:
        """Return an identifier that stays the same if lines move."""
        return f"{self.where}: `{self.was}` → `{self.now}`"


@dataclass(frozen=True, slots=True)
class _Change:
    was: ast.AST
    now: ast.AST


def all_mutants(source: str) -> list[Mutant]:
    """Return all mutants of a module in source order."""
    actual = []
    for number, (change, position) in enumerate(_changes(ast.parse(source))):
        line = getattr(change.was, "lineno", 0)
        actual.append(Mutant(number, line, position, _short(change.was), _short(change.now)))
    return actual


def mutated(source: str, number: int) -> ast.Module:
    """Return the source of a module with one mutant applied."""
    tree = ast.parse(source)
    for index, (change, _) in enumerate(_changes(tree)):
        if index == number:
            _Replace(change).visit(tree)
            return ast.fix_missing_locations(tree)
    raise IndexError(number)


class _Replace(ast.NodeTransformer):
    def __init__(self, change: _Change) -> None:
        self._change = change

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self._change.was:
            return ast.copy_location(self._change.now, node)
        return self.generic_visit(node)


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 160 else f"{text[:157]}…"


def _changes(tree: ast.Module) -> Iterator[tuple[_Change, str]]:
    yield from _below(tree, "the module")


def _below(node: ast.AST, where: str) -> Iterator[tuple[_Change, str]]:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.ClassDef):
        if any("Protocol" in ast.unparse(base) for base in node.bases):
            return
        where = node.name if where == "the module" else f"{where}.{node.name}"
    elif isinstance(node, ast.FunctionDef):
        if any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list):
            return
        where = node.name if where == "the module" else f"{where}.{node.name}"
    for change in _of(node):
        yield change, where
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "keywords") and not isinstance(node, ast.Call):
            continue  # never evaluated, or only by the compiler
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_docstring(child):
                yield from _below(child, where)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _of(node: ast.AST) -> Iterator[_Change]:
    """Yield the changes of one node, without those of its children."""
    for kind, make in _TRIED:
        if isinstance(node, kind):
            for now in make(node):
                yield _Change(node, now)


def _compared(node: ast.Compare) -> Iterator[ast.AST]:
    for index, operator in enumerate(node.ops):
        now = copy.copy(node)
        now.ops = [*node.ops[:index], _COMPARED[type(operator)](), *node.ops[index + 1 :]]
        yield now


def _computed(node: ast.BinOp | ast.AugAssign) -> Iterator[ast.AST]:
    remaining = node.left if isinstance(node, ast.BinOp) else None
    if isinstance(remaining, ast.JoinedStr) or (
        isinstance(remaining, ast.Constant) and isinstance(remaining.value, str)
    ):
        return  # concatenated texts
    if type(node.op) in _COMPUTED:
        now = copy.copy(node)
        now.op = _COMPUTED[type(node.op)]()
        yield now


def _combined(node: ast.BoolOp) -> Iterator[ast.AST]:
    now = copy.copy(node)
    now.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield now


def _unary(node: ast.UnaryOp) -> Iterator[ast.AST]:
    if not isinstance(node.operand, ast.Constant):
        yield node.operand


def _constant(node: ast.Constant) -> Iterator[ast.AST]:
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int | float):
        yield ast.Constant(value + 1)
    elif isinstance(value, bytes):
        yield ast.Constant(value + b"X")
    elif isinstance(value, str) and " " not in value:  # texts with spaces are written for people
        yield ast.Constant(value + "X")


def _condition(node: ast.If | ast.IfExp) -> Iterator[ast.AST]:
    if isinstance(node.test, ast.Compare | ast.UnaryOp):
        return  # the comparison or negation itself is mutated
    now = copy.copy(node)
    now.test = ast.UnaryOp(ast.Not(), node.test)
    yield now


def _statement(node: ast.Expr | ast.AugAssign | ast.Raise | ast.Break | ast.Continue | ast.Delete) -> Iterator[ast.AST]:
    if not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call):
        yield ast.Pass()


def _assigned(node: ast.Assign) -> Iterator[ast.AST]:
    """Yield the removal of an assignment to an attribute or item; any test notices a missing variable."""
    if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
        yield ast.Pass()


def _returned(node: ast.Return) -> Iterator[ast.AST]:
    if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
        yield ast.Return(ast.Constant(None))


def _called(node: ast.Call) -> Iterator[ast.AST]:
    if isinstance(node.func, ast.Name) and node.func.id in _CALLED:
        now = copy.copy(node)
        now.func = ast.Name(_CALLED[node.func.id], ast.Load())
        yield now
    if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "len", "TypeVar"):
        return
    for index, argument in enumerate(node.args):
        if isinstance(argument, ast.Name | ast.Attribute | ast.Subscript) and not ast.unparse(argument).startswith(
            "np."
        ):
            now = copy.copy(node)
            now.args = [*node.args[:index], ast.Constant(None), *node.args[index + 1 :]]
            yield now
    for index, keyword in enumerate(node.keywords):
        if keyword.arg not in (None, *_MANNERS):
            now = copy.copy(node)
            now.keywords = [*node.keywords[:index], *node.keywords[index + 1 :]]
            yield now


def _sliced(node: ast.Slice) -> Iterator[ast.AST]:
    if node.lower is not None:
        yield ast.Slice(None, node.upper, node.step)
    if node.upper is not None:
        yield ast.Slice(node.lower, None, node.step)


def _handled(node: ast.ExceptHandler) -> Iterator[ast.AST]:
    if not (len(node.body) == 1 and isinstance(node.body[0], ast.Raise)):
        now = copy.copy(node)
        now.body = [ast.Raise()]
        yield now


_TRIED: list[tuple[type[ast.AST] | tuple[type[ast.AST], ...], Callable[..., Iterator[ast.AST]]]] = [
    (ast.Compare, _compared),
    ((ast.BinOp, ast.AugAssign), _computed),
    (ast.BoolOp, _combined),
    (ast.UnaryOp, _unary),
    (ast.Constant, _constant),
    ((ast.If, ast.IfExp), _condition),
    ((ast.Expr, ast.AugAssign, ast.Raise, ast.Break, ast.Continue, ast.Delete), _statement),
    (ast.Assign, _assigned),
    (ast.Return, _returned),
    (ast.Call, _called),
    (ast.Slice, _sliced),
    (ast.ExceptHandler, _handled),
]

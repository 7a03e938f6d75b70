"""brim's record classes equal standard dataclasses, except for the time at which their methods are created."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import threading
from typing import Any, ClassVar

import pytest

from brim.records import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """A place."""

    x: int
    y: int = 2
    names: list[str] = dataclasses.field(default_factory=list, compare=False)
    hidden: int = dataclasses.field(default=7, repr=False)
    count: ClassVar[int] = 3


@dataclass(frozen=True)
class Base:
    a: int
    b: str = "b"

    def __post_init__(self) -> None:
        if self.a < 0:
            raise ValueError("below zero")


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    c: float = 0.5

    def __repr__(self) -> str:
        return "own"


@dataclass
class Plain:
    a: int = 1


@dataclass(slots=True, repr=False, eq=False)
class Bare:
    a: int = 1


@dataclass(frozen=True, slots=True)
class Compared:
    a: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compared) and self.a % 2 == other.a % 2


class Grown(Base):
    def grow(self) -> None:
        self.more = 1


TWINS: list[tuple[Any, dict[str, Any]]] = [
    (Point, {"frozen": True, "slots": True}),
    (Base, {"frozen": True}),
    (Plain, {}),
    (Bare, {"slots": True, "repr": False, "eq": False}),
]


@pytest.mark.parametrize(("created", "options"), TWINS)
def test_it_is_the_standard_one(created: Any, options: dict[str, Any]) -> None:
    """Fields, signature, text, order, equality and hash equal those of the standard dataclass with the same fields."""
    space = {name: value for name, value in vars(created).items() if name in ("__post_init__", "__doc__")}
    about = [
        (each.name, each.type, dataclasses.field(default=each.default, default_factory=each.default_factory,
         repr=each.repr, compare=each.compare)) for each in dataclasses.fields(created)
    ]  # fmt: skip
    duplicate: Any = dataclasses.make_dataclass(created.__name__, about, namespace=space, **options)
    duplicate.__qualname__ = created.__qualname__
    required = [each for each in dataclasses.fields(created) if each.default is each.default_factory]
    inputs = dict.fromkeys([each.name for each in required], 5)
    assert dataclasses.asdict(created(**inputs)) == dataclasses.asdict(duplicate(**inputs))
    assert str(inspect.signature(created)) == str(inspect.signature(duplicate))
    assert created.__match_args__ == duplicate.__match_args__
    if options.get("repr", True):
        assert repr(created(**inputs)) == repr(duplicate(**inputs))
    assert (created(**inputs) == created(**inputs)) == (duplicate(**inputs) == duplicate(**inputs))
    assert (created.__hash__ is None) == (duplicate.__hash__ is None)
    assert hasattr(created(**inputs), "__dict__") == hasattr(duplicate(**inputs), "__dict__")
    with pytest.raises(TypeError) as ours:
        created(nothing=1)
    with pytest.raises(TypeError) as theirs:
        duplicate(nothing=1)
    assert str(ours.value) == str(theirs.value)


def test_frozen_is_frozen() -> None:
    point = Point(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(point, "x", 2)  # noqa: B010
    with pytest.raises(dataclasses.FrozenInstanceError):
        delattr(point, "x")
    grown = Grown(1)
    grown.grow()
    assert grown.more == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        grown.a = 2  # type: ignore[misc]


def test_equal_ones_are_one_key() -> None:
    assert Point(1, names=["a"]) == Point(1, names=["b"]) != Point(2)
    assert len({Point(1), Point(1), Point(3)}) == 2
    assert Compared(1) == Compared(3)
    assert hash(Compared(1)) != hash(Compared(2))
    second: Any = Derived(1)
    assert Point(1) != second


def test_bases() -> None:
    """Fields of the base class come first, its checks run in subclasses, and methods of a subclass are kept."""
    created = Derived(1, c=2.5)
    assert (created.a, created.b, created.c, repr(created)) == (1, "b", 2.5, "own")
    assert repr(Grown(1)) == "Grown(a=1, b='b')"
    with pytest.raises(ValueError, match="below zero"):
        Derived(-1)
    assert dataclasses.replace(created, a=4) == Derived(4, c=2.5)


def test_it_travels() -> None:
    for item in (Point(1, names=["a"]), Derived(1, c=2.5), Plain(3)):
        assert pickle.loads(pickle.dumps(item)) == item == copy.deepcopy(item)


def test_the_first_ones_are_made_by_many_threads_at_once() -> None:
    @dataclass(frozen=True, slots=True)
    class New:
        a: int

    pause_flag, created = threading.Barrier(8), []

    def make(number: int) -> None:
        pause_flag.wait()
        created.append((New(number), hash(New(number)), repr(New(number)), inspect.signature(New)))

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(item.a for item, *_ in created) == list(range(8))

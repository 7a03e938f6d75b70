"""Functions are sent to other processes, and their digests identify them again."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brim.compute.steps.function_digest import Digest, function_digest
from brim.compute.steps.functions import Shipped, load_function
from brim.errors import InputError

FACTOR = 3

# the script pickles functions; the worker prints their results for 5
SENDER = """
import pickle, subprocess, sys
from brim.compute.steps.functions import Shipped
WORKER = "import pickle, sys; print([f.load()(5) for f in pickle.load(sys.stdin.buffer)])"
def send(*functions):
    sent = pickle.dumps([Shipped.from_function(f) for f in functions])
    done = subprocess.run([sys.executable, "-c", WORKER], input=sent, capture_output=True, cwd="/")
    print(done.stdout.decode().strip(), done.stderr.decode()[-300:])
"""


def times(value: int) -> int:
    return value * FACTOR


class Adder:
    """A callable object with a method."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, value: int) -> int:
        return value + self.n

    def method(self, value: int) -> int:
        return value - self.n


def run(script: Path, *args: str, code: str = "") -> str:
    env = os.environ | {"PYTHONPATH": f"{Path(sys.modules['brim'].__path__[0]).parent}"}
    command = [sys.executable, *(["-c", code] if code else [str(script)]), *args]
    result = subprocess.run(command, capture_output=True, text=True, cwd=script.parent, env=env, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_functions_of_a_script_travel(tmp_path: Path) -> None:
    """Lambdas, closures, globals of __main__, objects and called functions work without a main guard."""
    (tmp_path / "neighbour.py").write_text("K = 100\ndef far(x): return x + K\n")
    script = tmp_path / "script.py"
    script.write_text(
        SENDER
        + """
import functools, neighbour
G = 7
def uses_global(x): return x + G
def calls_other(x): return uses_global(x) + 1
def closure(n): return lambda x: x * n
class Thing:
    def __init__(self): self.n = 2
    def __call__(self, x): return x ** self.n
    def method(self, x): return x - self.n
def imports(x):
    import neighbour
    return neighbour.K
send(uses_global, calls_other, closure(4), lambda x: neighbour.far(x), functools.partial(pow, 2),
     Thing(), Thing().method, neighbour.far, imports, len.__class__ and abs)
"""
    )
    assert run(script) == "[12, 13, 20, 105, 32, 25, 3, 105, 100, 5]"


def test_functions_without_a_file_travel(tmp_path: Path) -> None:
    """Functions typed interactively, as in a notebook, can be sent too."""
    code = SENDER + "\nk = 2\ndef typed(x): return x * k\nsend(typed, lambda x: typed(x) + 1)\n"
    assert run(tmp_path / "x", code=code) == "[10, 11]"


def test_functions_of_files_travel(tmp_path: Path) -> None:
    """A function from file.py:function is loaded from this file in the worker, also inside a partial."""
    (tmp_path / "side.py").write_text("N = 9\n")
    (tmp_path / "json.py").write_text("import side\ndef f(x, more=0): return x + side.N + more\n")
    code = "from brim.compute.steps.functions import load_function\nimport functools\n"
    code += "f = load_function('sub/json.py:f')\nimport json; json.dumps\nsend(f, functools.partial(f, more=1))\n"
    (tmp_path / "sub").mkdir()
    for name in ("side.py", "json.py"):
        (tmp_path / name).rename(tmp_path / "sub" / name)
    assert run(tmp_path / "x", code=SENDER + code) == "[14, 15]"


def test_importable_functions_travel_by_name() -> None:
    """A function of a module is not pickled, and keeps its identity."""
    shipped = Shipped.from_function(times)
    assert shipped.reference == f"{__name__}:times"
    assert shipped.load() is times


@pytest.mark.parametrize(
    ("where", "report"),
    [
        ("nowhere.at.all:f", "No module named 'nowhere'"),
        ("os.path:nothing", "has no 'nothing'"),
        ("os.path:sep", "is a str, not a function"),
        ("justaname", "does not name a function"),
        ("missing.py:f", "missing.py does not exist"),
        ("broken.py:f", r"broken.py cannot be imported: ValueError: at once \(.*broken.py, line 2\)"),
        ("wrong.py:f", r"SyntaxError.*line 1"),
        ("needs.py:f", "No module named 'not_installed_anywhere'"),
        ("leaves.py:f", "SystemExit"),
    ],
)
def test_bad_names(where: str, report: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error shows the missing name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("\nraise ValueError('at once')\n")
    (tmp_path / "wrong.py").write_text("def f(:\n")
    (tmp_path / "needs.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(3)\n")
    with pytest.raises(InputError) as caught:
        load_function(where)
    assert re.search(report, str(caught.value))


@pytest.mark.parametrize("where", ["lambda r: r", "lambda r:r", "steps.py", "str.upper", "a b:c", ":f", "m:"])
def test_text_that_names_no_function_is_refused_with_what_to_write(where: str) -> None:
    with pytest.raises(InputError, match="does not name a function") as caught:
        load_function(where)
    assert "steps.py:function" in caught.value.hint


def test_what_cannot_travel_is_named(tmp_path: Path) -> None:
    """The error names the variable that holds a lock, at any depth."""
    lock = threading.Lock()
    retained = {"inner": [lock]}
    with pytest.raises(InputError, match=r"the variable 'lock' \(a _thread.lock\)"):
        Shipped.from_function(lambda row: lock)
    with pytest.raises(InputError, match=r"item 0 of the item 'inner' of the variable 'retained'"):
        Shipped.from_function(lambda row: retained)
    with open(tmp_path / "x", "w") as file, pytest.raises(InputError, match=r"the argument 'f'"):
        Shipped.from_function(functools.partial(times, f=file))


DIGEST = "import sys\nfrom brim.compute.steps.function_digest import function_digest\n"


def digest_of(tmp_path: Path, body: str, name: str = "script.py") -> str:
    """Return the digest of `f` in a new process."""
    script = tmp_path / name
    script.write_text(DIGEST + body + "\nd = function_digest(f)\nprint(d.value, d.stable)\n")
    return run(script)


BASE = """
import re, json, functools, numpy as np, pathlib
from collections import OrderedDict
TABLE = {"b": {"x", "y", "z"}, "a": [1, 2.5, None]}
ARRAY = np.arange(6).reshape(2, 3)
WORD = re.compile("[a-z]+")
class Clean:
    sep = " "
    def __init__(self, marks): self.marks = marks
    def run(self, text): return self.sep.join(c for c in text if c not in self.marks)
CLEAN = Clean({"!", "?", "."})
def helper(text, n=2):
    return WORD.findall(text)[:n]
def make(k):
    def f(row):
        words = helper(CLEAN.run(row["text"]))
        kept = json.dumps([w for w in words if w in {"q", "r"}])
        return {"n": len(words) * k, "t": TABLE["a"], "s": ARRAY.sum(), "j": kept}
    return f
f = make(3)
"""


def test_digests_are_the_same_in_other_processes(tmp_path: Path) -> None:
    """Moved lines, another file, comments or another order of a dict do not change a digest."""
    first = digest_of(tmp_path, BASE)
    assert first.endswith("True")
    moved_path = BASE.replace("def helper", "\n# a comment\n\n\ndef helper")
    moved_path = moved_path.replace(
        '{"b": {"x", "y", "z"}, "a": [1, 2.5, None]}', '{"b": {"z", "x", "y"}, "a": [1, 2.5, None]}'
    )
    assert digest_of(tmp_path, moved_path, "other.py") == first
    (tmp_path / "module.py").write_text(BASE)
    assert digest_of(tmp_path, "from module import f") == first


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("k, \"t\"", "k + 1, \"t\""),
        ("make(3)", "make(4)"),
        ("n=2", "n=3"),
        ("2.5", "2.25"),
        ("arange(6)", "arange(1, 7)"),
        ("[a-z]+", "[a-y]+"),
        ('sep = " "', 'sep = ""'),
        ('"!", ', ""),
        ("not in self", "in self"),
        ('{"q", "r"}', '{"q"}'),
    ],
)  # fmt: skip
def test_digests_follow_what_is_used(old: str, new: str, tmp_path: Path) -> None:
    """Code, closures, defaults, globals, classes and their attributes all change the digest."""
    assert old in BASE
    scope: dict[str, Any] = {"__name__": "__main__"}
    second: dict[str, Any] = {"__name__": "__main__"}
    exec(BASE, scope)
    exec(BASE.replace(old, new), second)
    assert function_digest(scope["f"]) != function_digest(second["f"])


DECORATED = """
import functools
K = 7
@functools.lru_cache
def fib(n): return n if n < 2 else fib(n - 1) + 1
@functools.singledispatch
def shape(value): return "other"
@shape.register
def _(value: int): return "int"
class Words:
    @functools.cached_property
    def count(self): return 3
def f(row): return fib(3), shape(1), Words().count, globals()["K"]
"""


@pytest.mark.parametrize(
    ("old", "new"), [("+ 1", "+ 2"), ('"int"', '"float"'), ("return 3", "return 4"), ("= 7", "= 8")]
)
def test_digests_follow_decorators_of_functools(old: str, new: str, tmp_path: Path) -> None:
    assert old in DECORATED
    digests = []
    for text in (DECORATED, DECORATED, DECORATED.replace(old, new)):
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec(text, scope)
        scope["f"](0)  # caches are ignored
        digests.append(function_digest(scope["f"]))
    assert digests[0] == digests[1] != digests[2]
    assert digests[0].stable


def test_digests_reach_into_own_modules(tmp_path: Path) -> None:
    """The digest covers the parts of the user's modules that a function uses, and ignores the others."""
    body = "import own\ndef f(row): return own.clean(row)"
    module = "def clean(row): return {'r': 1}\ndef unused(): return 1\n"
    actual = []
    # The sizes differ because Python identifies cached bytecode by the second and the size of its source.
    for text in (module, module.replace("return 1\n", "return 20\n"), module.replace(": 1}", ": 300}")):
        (tmp_path / "own.py").write_text(text)
        actual.append(digest_of(tmp_path, body))
    assert actual[0] == actual[1] != actual[2]
    inside = "def f(row):\n    import own, colorsys\n    return own.clean(row)"
    late = digest_of(tmp_path, inside)
    assert digest_of(tmp_path, "__import__('own'), __import__('colorsys')\n" + inside) == late
    (tmp_path / "own.py").write_text(module)
    assert digest_of(tmp_path, inside) != late


def test_recursion_ends() -> None:
    """Mutually recursive functions and lists that contain themselves have digests."""
    loop: list[Any] = [1]
    loop.append(loop)

    def even(n: int) -> bool:
        return bool(loop) and (n == 0 or odd(n - 1))

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    assert function_digest(even).stable
    assert function_digest(even) != function_digest(odd)


def test_tokenizers_have_stable_digests(tmp_path: Path) -> None:
    """The digest of a tokenizer in a closure depends on its content, and using it does not change the digest."""
    pytest.importorskip("tokenizers")
    body = """
from tokenizers import Tokenizer, models, pre_tokenizers
t = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
t.pre_tokenizer = pre_tokenizers.Whitespace()
def f(row): return t.encode(row["x"]).ids
f({"x": "a b"}) if len(sys.argv) > 1 else None
"""
    first = digest_of(tmp_path, body)
    assert first.endswith("True")
    assert run(tmp_path / "script.py", "used") == first
    assert digest_of(tmp_path, body.replace('"b": 1', '"c": 1')) != first


def test_what_has_no_content_is_said_to_be_unstable() -> None:
    """A digest over a lock exists, but is marked as unstable."""
    lock = threading.Lock()
    actual = function_digest(lambda: lock)
    assert isinstance(actual, Digest)
    assert not actual.stable
    assert actual.unstable_parts == ("_thread.lock",)


def test_arrays_count_by_content() -> None:
    """Equal arrays have the same digest in any memory; dtype and shape change it."""
    array = np.arange(12.0)
    assert function_digest(array) == function_digest(array.copy())
    assert function_digest(array) == function_digest(np.repeat(array, 2)[::2])
    assert function_digest(array) != function_digest(array.astype("float32"))
    assert function_digest(array) != function_digest(array.reshape(3, 4))
    assert function_digest(Adder(1)) != function_digest(Adder(2))
    assert function_digest(Adder(1).method) == function_digest(Adder(1).method)


def test_digest_covers_order_masks_attributes_and_metaclasses() -> None:
    import numpy as np

    def digest(value: object) -> str:
        return function_digest(value).value

    assert digest({"a": 1, "b": 2}) != digest({"b": 2, "a": 1})
    assert digest({1, 2}) == digest({2, 1}) != digest(frozenset({1, 2}))
    assert digest(np.ma.array([1, 2], mask=[0, 1])) != digest(np.ma.array([1, 2], mask=[1, 0]))

    def marked() -> None: ...

    before = digest(marked)
    marked.limit = 5  # type: ignore[attr-defined]
    assert digest(marked) != before

    def kind(step: int) -> type:
        return type(type)("Meta", (type,), {"add": lambda cls, x: x + step})("Made", (), {})

    assert digest(kind(1)) != digest(kind(2))

"""The digest of a function that uses the user's own package, in every style of importing it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.conftest import brim, write_files

CLEAN = """
from .deep import factor

UNUSED = 3

def g(x):
    return factor(x) + 1

def unused(x):
    return x - 1

class Other:
    def g(self):
        return 4
"""
PACKAGE = {
    "mylib/__init__.py": b"",
    "mylib/text/__init__.py": b"",
    "mylib/text/clean.py": CLEAN.encode(),
    "mylib/text/deep.py": b"def factor(x):\n    return x * 2\n\ndef unused(x):\n    return 9\n",
    "mylib/local.py": b"""
def relative(x):
    from .text.clean import g
    return g(x)

def relative_module(x):
    from .text import clean
    return clean.g(x)
""",
}
# The script, and whether an edit of unused code leaves the digest unchanged.
STYLES = {
    "import a.b.c": ("import mylib.text.clean\ndef f(x): return mylib.text.clean.g(x)", True),
    "import a.b.c as d": ("import mylib.text.clean as c\ndef f(x): return c.g(x)", True),
    "from a import b": ("from mylib import text\nimport mylib.text.clean\ndef f(x): return text.clean.g(x)", True),
    "from a.b import c": ("from mylib.text import clean\ndef f(x): return clean.g(x)", True),
    "from a.b.c import g": ("from mylib.text.clean import g\ndef f(x): return g(x)", True),
    "function as a global": ("from mylib.text import clean\nF = clean.g\ndef f(x): return F(x)", True),
    "inside: from a.b import c": ("def f(x):\n    from mylib.text import clean as q\n    return q.g(x)", True),
    "inside: import a.b.c": ("def f(x):\n    import mylib.text.clean as q\n    return q.g(x)", True),
    "inside: import a.b.c, whole name": (
        "def f(x):\n    import mylib.text.clean\n    return mylib.text.clean.g(x)",
        True,
    ),
    "inside: from a.b.c import g": ("def f(x):\n    from mylib.text.clean import g\n    return g(x)", True),
    "inside a package: from .b.c import g": ("from mylib.local import relative as f", True),
    "inside a package: from .b import c": ("from mylib.local import relative_module as f", True),
    "closure": (
        "from mylib.text import clean\ndef make(m):\n    return lambda x: m.g(x)\nf = make(clean)",
        True,
    ),
    "attribute": (
        "from mylib.text import clean\nclass F:\n    def __init__(self): self.m = clean\n"
        "    def __call__(self, x): return self.m.g(x)\nf = F()",
        False,
    ),
    "dict": ("from mylib.text import clean\nD = {'m': clean}\ndef f(x): return D['m'].g(x)", False),
    "local variable": ("from mylib.text import clean\ndef f(x):\n    mod = clean\n    return mod.g(x)", False),
    "getattr": ("from mylib.text import clean\ndef f(x): return getattr(clean, 'g')(x)", False),
}
PRINT = """
import importlib, json, sys
from brim.compute.steps.function_digest import function_digest
found = {name: function_digest(importlib.import_module(name).f) for name in sys.argv[1:]}
assert all(digest.stable for digest in found.values()), found
print(json.dumps([digest.value for digest in found.values()]))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    write_files(tmp_path, PACKAGE)
    return tmp_path


def digests(folder: Path, styles: Iterable[str] = STYLES) -> dict[str, str]:
    """Return the digest of each `f`, in a new process without bytecode, because files change within a second."""
    names = [f"script{number}" for number, _ in enumerate(styles)]
    write_files(folder, {f"{name}.py": STYLES[style][0].encode() for name, style in zip(names, styles, strict=True)})
    arguments = [sys.executable, "-B", "-P", "-c", PRINT, *names]
    result = subprocess.run(arguments, cwd=folder, env={"PYTHONPATH": "."}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return dict(zip(styles, json.loads(result.stdout), strict=True))


def edit(folder: Path, name: str, old: str, new: str) -> None:
    path = folder / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def of_used(folder: Path) -> None:
    edit(folder, "mylib/text/clean.py", "factor(x) + 1", "factor(x) + 2")


def of_used_in_depth(folder: Path) -> None:
    edit(folder, "mylib/text/deep.py", "x * 2", "x * 3")


@pytest.mark.parametrize("change", [of_used, of_used_in_depth])
def test_digest_follows_imports_to_what_is_used(change: Callable[[Path], None], package: Path) -> None:
    before = digests(package)
    change(package)
    after = digests(package)
    assert [style for style in STYLES if before[style] == after[style]] == []


def test_digest_ignores_comments_and_what_is_not_used(package: Path) -> None:
    before = digests(package)
    edit(package, "mylib/text/clean.py", "UNUSED = 3", "# A comment\n\n\nUNUSED = 3")
    assert digests(package) == before
    edit(package, "mylib/text/clean.py", "x - 1", "x - 7")
    edit(package, "mylib/text/deep.py", "return 9", "return 10")
    after = digests(package)
    assert {style: before[style] == after[style] for style in STYLES} == {
        style: is_exact for style, (_, is_exact) in STYLES.items()
    }


def test_digest_is_the_same_whether_a_module_was_imported_before(package: Path) -> None:
    inside = [style for style in STYLES if style.startswith("inside: ")]
    imported = digests(package)
    assert digests(package, inside) == {style: imported[style] for style in inside}


def test_digest_of_modules_that_import_each_other(package: Path) -> None:
    edit(
        package, "mylib/text/deep.py", "def factor", "from . import clean\nfrom .clean import unused as u\n\ndef factor"
    )
    edit(package, "mylib/text/clean.py", "factor(x) + 1", "deep.factor(x)")
    edit(package, "mylib/text/clean.py", "from .deep import factor", "from . import deep")
    styles = ["inside: from a.b.c import g"]
    before = digests(package, styles)
    edit(package, "mylib/text/deep.py", "x * 2", "x * 3")
    assert digests(package, styles) != before


def test_map_computes_again_after_an_edit_of_a_module_that_its_function_imports(package: Path) -> None:
    (package / "rows.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    edit(package, "mylib/local.py", "return g(x)", 'return {"y": g(x["x"])}')
    arguments = ["map", "rows.jsonl", "out", "--fn", "mylib.local:relative"]
    brim(*arguments, cwd=package)
    assert "nothing to do" in brim(*arguments, cwd=package).stdout
    of_used(package)
    assert "the function changed" in brim(*arguments, cwd=package, check=2).stderr

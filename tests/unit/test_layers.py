"""The house stands as docs/internals.md draws it."""

import ast
import subprocess
import sys
from pathlib import Path

import brim

SOURCE = Path(brim.__file__).parent
LEAVES = {
    "errors",
    "progress",
    "sizes",
    "fileset",
    "cuts",
    "tarball",
    "durable",
    "memory",
    "objects",
    "remote",
    "wording",
    "choices",
}
MAY_IMPORT = {
    "sources": {"sources"},
    "plans": {"plans", "sources"},
    "formats": {"formats"},
    "sinks": {"sinks", "formats"},
    "tensors": {"tensors", "formats"},
    "engine": {"engine", "plans", "sinks", "formats", "sources"},
    "compute": {"compute", "engine", "plans", "sinks", "formats", "sources", "tensors"},
    "report": {"report"},
    "api": {"engine", "plans", "sinks", "sources"},
    "cli": {"cli", "api", "compute", "sinks", "engine", "plans", "sources", "report", "lab", ""},
    "memory": set(),
    "objects": {"objects"},
    "lab": {"lab", ""},
    "dropin": {"dropin", "compute", "engine", "plans", "sinks", "sources", "report"},
    "": {"api", "dropin", "engine", "errors", "memory", "tensors"},
    "__main__": {"cli"},
}


def room_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "brim" else [f"brim.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == "brim":
                room = ([*name.split("."), ""])[1]
                rooms.add("" if room.startswith("__") else room)
    return rooms


def test_imports_go_one_way() -> None:
    """Every import leads down: a room imports only the rooms it may, and the leaves."""
    wrong = []
    for path in SOURCE.rglob("*.py"):
        room = room_of(path)
        allowed = MAY_IMPORT.get(room, set()) | LEAVES | ({""} if room in ("engine", "memory") else set())
        wrong += [f"{path.relative_to(SOURCE)} imports {name or 'brim'}" for name in imports_of(path) - allowed]
    assert not wrong


def test_modules_stay_small() -> None:
    """No module outgrows a reader."""
    assert not [f"{p.name}: {n}" for p in SOURCE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400]


def test_importing_brim_is_light() -> None:
    """`import brim`, its functions and even a plan pull in no optional library, and no pandas."""
    code = (
        "import sys, brim; brim.plan, brim.table, brim.verify, brim.TensorWriter; "
        "optional = ('datasets', 'pandas', 'torch', 'safetensors', 'polars', 'huggingface_hub'); "
        "print([m for m in optional if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names() -> None:
    """The public interface is this and nothing else."""
    assert brim.__all__ == [
        "BrimError",
        "TensorWriter",
        "__version__",
        "bids",
        "build",
        "check",
        "files",
        "forecast",
        "map",
        "open_tensors",
        "plan",
        "push_to_hub",
        "release",
        "save_file",
        "table",
        "unpack",
        "verify",
        "watch",
        "why",
    ]
    assert all(getattr(brim, name) is not None for name in brim.__all__)
    assert dir(brim) == brim.__all__

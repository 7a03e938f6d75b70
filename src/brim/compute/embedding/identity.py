"""Which model it is, for the fingerprint of a job: what it holds, not where it lies."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

from brim.compute.embedding.load import is_factory

_WHOLE_BYTES = 4_000_000
_BLOCKS, _BLOCK_BYTES = 32, 65_536
_IGNORED = (".md", ".lock", ".png")


def model_facts(spec: str) -> dict[str, str]:
    """A folder by its files, a function by the source of its module, a model of the Hub by its name."""
    if is_factory(spec):
        module = spec.partition(":")[0]
        try:
            found = find_spec(module)
        except ModuleNotFoundError:
            found = None
        source = Path(found.origin) if found is not None and found.origin is not None else None
        digest = _digest([source]) if source is not None and source.is_file() else ""
        return {"model": spec, "model files": digest}
    folder = Path(spec).expanduser()
    if not folder.is_dir():
        return {"model": spec, "model files": ""}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _counts(path.relative_to(folder)))
    return {"model": folder.resolve().name, "model files": _digest(files, folder)}


def _counts(path: Path) -> bool:
    return path.suffix not in _IGNORED and not any(part.startswith(".") for part in path.parts)


def _digest(files: list[Path], root: Path | None = None) -> str:
    """Small files whole; of large ones their size and blocks spread over them, since training changes all of one."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        name = path.name if root is None else path.relative_to(root).as_posix()
        digest.update(f"{name}\0{size}\0".encode())
        with open(path, "rb") as file:
            if size <= _WHOLE_BYTES:
                digest.update(file.read())
                continue
            for number in range(_BLOCKS):
                file.seek((size - _BLOCK_BYTES) * number // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:32]

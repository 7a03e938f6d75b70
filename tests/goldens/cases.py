"""The jobs of the goldens: their commands, ledgers, kills, and the report of the files that they leave.

`make.py` runs them with the version whose state is kept; tests/guarantees/test_goldens.py with the current version.
They use only public interfaces: the command, `import brim`, and files on disk. The names of these files are defined
in one place below, so that a deliberate format change is made in this module.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HOME = Path(__file__).parent
INPUTS = HOME / "inputs"
VERSION = 2  # of computed jobs; builds and tensors are as in version 1

# File names that exist in folders of users.
LEDGER = "ledger.jsonl"
LOCK = "lock"
SHARDS = f"out/.brim/{LEDGER}"
UNITS = f"out/.brim/units/{LEDGER}"

CORE = ("--workers", "1", "--memory", "600MB", "--json")
ROWS = ("rows.jsonl", "out")
UNIT = ("--unit-size", "700")
TOKENS = ("--tokenizer", "tokenizer.json")
MODEL = ("--model", "steps:model", "--column", "text", "--keep", "id", "--batch-size", "4")


@dataclass(frozen=True)
class Case:
    """A job of the goldens.

    `words` are the arguments of `python` (a script) or `brim`. `kills` states when the job is killed, by the number of
    receipts in a ledger; a script that kills itself reads the number from $GOLDEN_KILL.
    """

    name: str
    words: tuple[str, ...]
    kills: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    script: bool = False
    version: int = 1

    @property
    def verb(self) -> str:
        return self.words[0]

    @property
    def archive(self) -> Path:
        return home(self.version) / f"{self.name}.tar.xz"


def home(version: int) -> Path:
    """Return the folder with the goldens of this format version."""
    return HOME if version == 1 else HOME / f"v{version}"


def facts_path(version: int) -> Path:
    return home(version) / "goldens.json"


def _build(name: str, *arguments: str, kill_at: int = 4) -> Case:
    return Case(f"build-{name}", ("build", *arguments, *CORE), {"shards": (SHARDS, kill_at)})


def _computed(name: str, *arguments: str, bring: int = 0) -> Case:
    kills = {"units": (UNITS, 4)} | ({"shards": (SHARDS, bring)} if bring else {})
    return Case(name, (arguments[0], *ROWS, *arguments[1:], *UNIT, *CORE), kills)


def _vectors(suffix: str) -> Case:
    arguments = ("embed", "rows.jsonl", f"out/vectors{suffix}", *MODEL, *UNIT, *CORE)
    return Case(f"embed-{suffix[1:]}", arguments, {"units": (f"out/*/units/{LEDGER}", 4)})


CASES = (
    _build("parquet", "files", "out", "--rows-per-shard", "1", "--label-from", "parent"),
    _build("webdataset", "files", "out", "--rows-per-shard", "1", "--format", "webdataset"),
    _build("table", "table.csv", "out", "--files", "scan:file", "--split-by", "part", "--rows-per-shard", "1"),
    _build("bids", "bids", "out", "--recipe", "columns.toml", "--rows-per-shard", "1", kill_at=1),
    _computed("map", "map", "--fn", "steps.py:twice", bring=4),
    _computed("map-arrow", "map", "--fn", "steps.py:twice", "--format", "arrow", "--rows-per-shard", "50"),
    _computed("map-quarantine", "map", "--fn", "steps.py:often", "--on-error", "quarantine"),
    _computed("tokenize-rows", "tokenize", *TOKENS, "--keep", "id", "--rows-per-shard", "20", bring=3),
    _computed("tokenize-packed", "tokenize", *TOKENS, "--pack", "32", "--eos", "[end]"),
    _computed("tokenize-bin", "tokenize", *TOKENS, "--format", "bin", "--eos", "[end]"),
    _computed("tokenize-arrow", "tokenize", *TOKENS, "--format", "arrow"),
    _computed("tokenize-shuffle", "tokenize", *TOKENS, "--shuffle", "7", "--split", "0.9/0.1"),
    _computed("embed-dataset", "embed", *MODEL, bring=4),
    _vectors(".safetensors"),
    _vectors(".npy"),
    _vectors(".parquet"),
    Case("cache-file", ("cached.py", "large.jsonl"), {"units": (f"out/*/units/{LEDGER}", 1)}, script=True),
    Case("cache-dataset", ("cached.py", "saved"), script=True),  # a single unit, so no kill between units
    *(
        Case(f"tensors-{name.replace('.', '-')}", ("tensors.py", name), {"rows": ("", 150)}, script=True)
        for name in ("plain.safetensors", "sharded.safetensors", "vectors.parquet")
    ),
)


COMPUTED = tuple(case for case in CASES if case.verb in ("map", "tokenize", "embed", "cached.py"))
UNCHANGED = tuple(case for case in CASES if case not in COMPUTED)
# Changes of version 2, in addition to the bytes of Parquet and the identity of every computed job.
NEW = (
    _computed("map-hive", "map", "--fn", "steps.py:keep"),
    _computed("map-unreadable", "map", "--fn", "steps.py:keep", "--on-error", "quarantine"),
    _computed("map-exact-numbers", "map", "--fn", "steps.py:keep"),
    _computed("map-random", "map", "--fn", "steps.py:draw"),
    _computed("tokenize-default-eos", "tokenize", "--tokenizer", "tokenizer", "--pack", "32"),
    _computed("embed-bad-row", "embed", "--model", "steps:picky", *MODEL[2:], "--on-error", "skip"),
)
SOURCES = {"map-hive": "hive", "map-unreadable": "unreadable.jsonl", "map-exact-numbers": "numbers.csv"}


def _of_version_2(case: Case) -> Case:
    arguments = tuple(
        SOURCES.get(case.name, argument) if argument == "rows.jsonl" else argument for argument in case.words
    )
    return replace(case, words=arguments, version=VERSION, kills={} if case in NEW else case.kills)


CURRENT = (*UNCHANGED, *map(_of_version_2, (*COMPUTED, *NEW)))


def records(ledger: Path | bytes) -> Iterator[dict[str, Any]]:
    """Return the records of a ledger, without their checksums and the versions that wrote them."""
    data = ledger.read_bytes() if isinstance(ledger, Path) else ledger
    for line in data.splitlines():
        try:
            record = json.loads(line.partition(b" ")[2])
        except ValueError:
            continue  # incomplete because of a kill
        record.pop("versions", None)
        yield record


def receipts(folder: Path, pattern: str) -> list[str]:
    """Return the names of the receipts in the ledgers that match the pattern."""
    actual = [record for path in folder.glob(pattern) if path.exists() for record in records(path)]
    return sorted({record["name"] for record in actual if record["type"] == "shard"})


def told(folder: Path) -> dict[str, Any]:
    """Return the content of a destination: the records of its ledgers, and the SHA-256 and rows of every other file."""
    files, rows, ledgers = {}, {}, {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LOCK):
        name = path.relative_to(folder).as_posix()
        if path.name == LEDGER:
            ledgers[name] = list(records(path))
            continue
        files[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        if (content := _rows(path)) is not None:
            rows[name] = content
    return {"files": files, "rows": rows, "ledgers": ledgers}


def _rows(path: Path) -> str | None:
    """Return a digest of rows and column names that does not depend on the release of pyarrow."""
    if path.suffix == ".parquet":
        table = pq.read_table(path)
    elif path.suffix == ".arrow":
        data = path.read_bytes()
        table = (pa.ipc.open_file if data.startswith(b"ARROW1") else pa.ipc.open_stream)(data).read_all()
    else:
        return None
    return hashlib.sha256(repr((table.column_names, table.to_pylist())).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Return the versions that goldens depend on besides brim: Python for bytecode, pyarrow for the bytes of files."""
    return {"python": "{}.{}".format(*sys.version_info), "pyarrow": pa.__version__}


def pack(folder: Path, archive: Path) -> None:
    """Write a tar that depends only on the files; their dates are kept, to the nanosecond."""
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            info = tar.gettarinfo(path, path.relative_to(folder).as_posix())
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mode = 0o755 if info.isdir() else 0o644
            info.pax_headers = {"brim.mtime_ns": str(path.stat().st_mtime_ns)}
            info.mtime = 0
            if info.isreg():
                with open(path, "rb") as file:
                    tar.addfile(info, file)
            else:
                tar.addfile(info)
    archive.write_bytes(lzma.compress(body.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def unpack(archive: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(archive.read_bytes()))) as tar:
        tar.extractall(folder, filter="data")
        for info in tar.getmembers():
            os.utime(folder / info.name, ns=(0, int(info.pax_headers["brim.mtime_ns"])))
    return folder


def inputs(folder: Path) -> Path:
    """Extract the sources from which the goldens were made."""
    unpack(HOME / "inputs.tar.xz", folder)
    if (home(VERSION) / "inputs.tar.xz").exists():
        unpack(home(VERSION) / "inputs.tar.xz", folder)
    for path in INPUTS.glob("*.py"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder

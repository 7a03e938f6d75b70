"""Commands that were killed in an earlier version, for tests that resume them with the current version.

    PYTHONPATH=OLD/src python -m tests.goldens.interrupted NAME...

makes cases with the version in OLD: those of packaged files with 0.1 (97e1d66), those of computed rows with the last
version before the runner was rewritten (846e4a7), because 0.1 wrote computed jobs of format 1. Each case is a list of
commands; the last one that ran was killed right after it had written a number of receipts. The case stores the folder
after the kill, the objects of its bucket, and the result of an uninterrupted run of all commands. Do not make the
cases again with later versions, because then they would not test compatibility.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.goldens import cases
from tests.s3.server import PRIVATE, S3Server

HOME = Path(__file__).parent / "interrupted"
FACTS = HOME / "interrupted.json"
CORE = ("--workers", "1", "--memory", "600MB", "--quiet")
ONE_ROW = ("--rows-per-shard", "1", "--label-from", "parent")
UNITS = ("--unit-size", "700")
ENDPOINT = "http://endpoint.example:1234"  # in the stored files; tests have another endpoint
SOURCE_ROOT = "/the/folder/of/the/test"
_HEADER = struct.Struct("<QQ")
# Kills the process when its ledger has this many receipts, counting those of shards and of units.
KILLER = """
import os, sys
from brim.cli import main
from brim.state.ledger import Ledger

left = [int(os.environ["KILL_AFTER"])]
add, add_all = Ledger.add, Ledger.add_all


def count(number):
    left[0] -= number
    if left[0] <= 0:
        os.killpg(0, 9)


def counted_add(self, receipt):
    add(self, receipt)
    count(1)


def counted_add_all(self, receipts, *more, **options):
    receipts = list(receipts)
    for receipt in receipts:
        add_all(self, [receipt], *more, **options)
        count(1)


Ledger.add, Ledger.add_all = counted_add, counted_add_all
main()
"""


@dataclass(frozen=True)
class Interrupted:
    """Commands of brim. `kill` is the index of the one that is killed, after how many receipts; `rest` follow it.

    `change` modifies the source before the command that is killed. `$BUCKET` in a word is the prefix in the bucket.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    kill: int
    receipts: int
    rest: tuple[tuple[str, ...], ...] = ()
    change: Callable[[Path], None] | None = None
    again: tuple[str, ...] | None = None  # how the killed command is resumed, if its arguments differ

    @property
    def archive(self) -> Path:
        return HOME / f"{self.name}.tar.xz"

    @property
    def killed(self) -> tuple[str, ...]:
        return self.commands[self.kill]

    @property
    def uses_bucket(self) -> bool:
        return any("$BUCKET" in argument for command in self.commands for argument in command)


def _change_files(folder: Path) -> None:
    """Add a file before all others, change one, and remove one, so that shards get other names."""
    (folder / "files/a/aa.bin").write_bytes(b"new" * 100)
    (folder / "files/b/f05.bin").write_bytes(b"other" * 100)
    (folder / "files/b/f11.bin").unlink()
    for number, name in enumerate(("aa.bin", "../b/f05.bin")):
        os.utime(folder / "files/a" / name, ns=(0, 1_700_000_900_000_000_000 + number))


_BUILD = ("build", "files", "out", *ONE_ROW, *CORE)
_MAP = ("map", "rows.jsonl", "out", "--fn", "steps.py:twice", *UNITS, *CORE)
_PLAN = ("--plan", "saved.plan", "--quiet")
_STATE = ("--state", "state")
_BUCKET_BUILD = ("build", "files", "$BUCKET", *ONE_ROW, *_STATE, *CORE)
_BUCKET_MAP = ("map", "rows.jsonl", "$BUCKET", "--fn", "steps.py:twice", *UNITS, *_STATE, *CORE)
_BUCKET_FILE = (
    "embed", "rows.jsonl", "$BUCKET/vectors.npy", "--model", "steps:model", "--column", "text", "--keep", "id",
    "--batch-size", "4", *UNITS, *_STATE, *CORE,
)  # fmt: skip

CASES = (
    Interrupted("build", (_BUILD,), 0, 5),
    Interrupted("select", (_BUILD, ("select", "out", "chosen", "--where", 'label == "a"', *ONE_ROW[:2], *CORE)), 1, 3),
    Interrupted(
        "append",
        (
            ("build", "files/a", "out", *ONE_ROW[:2], *CORE),
            ("build", "files/b", "out", *ONE_ROW[:2], "--append", *CORE),
        ),
        1,
        9,  # the six existing shards get receipts of the new job first
    ),
    Interrupted("update", (_BUILD, (*_BUILD, "--update")), 1, 4, change=_change_files),
    Interrupted(
        "fresh",
        (_BUILD, ("build", "files/a", "out", *ONE_ROW[:2], "--fresh", *CORE)),
        1,
        3,
        again=("build", "files/a", "out", *ONE_ROW[:2], *CORE),
    ),
    Interrupted(
        "plan-build",
        (
            ("plan", "files", "out", *ONE_ROW, "--save", "saved.plan"),
            ("build", *_PLAN, "--root", "files", "--part", "1/3"),
            ("build", *_PLAN, "--root", "files", "--part", "2/3"),
        ),
        2,
        2,
        rest=(("build", *_PLAN, "--root", "files", "--part", "3/3"), ("build", *_PLAN, "--root", "files", "--finish")),
    ),
    Interrupted(
        "plan-map",
        (
            ("map", "rows.jsonl", "out", "--fn", "steps.py:twice", *UNITS, "--save", "saved.plan"),
            ("map", *_PLAN, "--part", "1/2"),
            ("map", *_PLAN, "--part", "2/2"),
        ),
        2,
        3,
        rest=(("map", *_PLAN, "--finish"),),
    ),
    Interrupted("map-units", (_MAP,), 0, 4),
    Interrupted("bucket-build", (_BUCKET_BUILD,), 0, 5),
    Interrupted("bucket-update", (_BUCKET_BUILD, (*_BUCKET_BUILD, "--update")), 1, 4, change=_change_files),
    Interrupted("bucket-map-units", (_BUCKET_MAP,), 0, 4),
    Interrupted("bucket-map-shards", (_BUCKET_MAP,), 0, 25),
    Interrupted("bucket-file", (_BUCKET_FILE,), 0, 4),
)


def run(arguments: tuple[str, ...], folder: Path, bucket: str, environment: dict[str, str], kill_after: int = 0) -> int:
    """Run a command in a folder; return its exit code, negative for a signal."""
    arguments = tuple(argument.replace("$BUCKET", bucket) for argument in arguments)
    start = ["-c", KILLER, *arguments] if kill_after else ["-m", "brim", *arguments]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "GOLDEN_CALLS": os.devnull, **environment}
    environment |= {"KILL_AFTER": str(kill_after)} if kill_after else {}
    result = subprocess.run(
        [sys.executable, *start], cwd=folder, env=environment, start_new_session=True, stdout=subprocess.DEVNULL
    )
    return result.returncode


def results(folder: Path, s3: S3Server, prefix: str) -> dict[str, Any]:
    """Return the records of all ledgers, and the SHA-256 and rows of all other files, of the folder and the bucket."""
    downloaded = folder / "bucket"
    for name, body in objects(s3, prefix).items():
        (downloaded / name).parent.mkdir(parents=True, exist_ok=True)
        (downloaded / name).write_bytes(body)
    names = ("out", "chosen", "bucket")
    actual = {name: cases.told(folder / name) for name in names if (folder / name).exists()}
    shutil.rmtree(downloaded, ignore_errors=True)
    return actual


def objects(s3: S3Server, prefix: str) -> dict[str, bytes]:
    """Return the objects below a prefix, without the lease of a run that was killed."""
    actual = {name.removeprefix(prefix): s3.read(PRIVATE, name) for name in s3.objects(PRIVATE, prefix)}
    return {name: body for name, body in actual.items() if name != ".brim/lock"}


def replace_text(folder: Path, texts: dict[str, str]) -> None:
    """Replace the folder and the endpoint in the files that contain them."""
    for path in (*folder.glob("state*/destination"), *folder.glob("saved.plan")):
        data = path.read_bytes()
        if path.name == "saved.plan" and not data.startswith(b"{"):  # Arrow, a header, its offset, and a checksum
            start, length = _HEADER.unpack_from(data, len(data) - 40 - _HEADER.size)
            header = data[start : start + length]
            for text, new in texts.items():
                header = header.replace(text.encode(), new.encode())
            body = data[:start] + header + _HEADER.pack(start, len(header))
            path.write_bytes(body + hashlib.sha256(body).digest() + b"BRIMPLAN")
            continue
        for text, new in texts.items():
            data = data.replace(text.encode(), new.encode())
        path.write_bytes(data)


def make(case: Interrupted, s3: S3Server) -> dict[str, Any]:
    """Make the folder of a killed command, and the result of an uninterrupted one."""
    finished: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as destination:
        for kind in ("whole", "killed"):
            folder = cases.inputs(Path(destination).resolve() / kind)
            prefix = f"{case.name}-{kind}/"
            bucket = f"s3://{PRIVATE}/{prefix.rstrip('/')}"
            for number, command in enumerate(case.commands):
                is_killed = kind == "killed" and number == case.kill
                if number == case.kill and case.change is not None:
                    case.change(folder)
                code = run(command, folder, bucket, s3.environment, case.receipts if is_killed else 0)
                assert code == (-9 if is_killed else 0), (case.name, command, code)
            if kind == "whole":
                for command in case.rest:
                    assert run(command, folder, bucket, s3.environment) == 0, (case.name, command)
                finished = results(folder, s3, prefix)
                continue
            remaining = Path(destination) / "left"
            remaining.mkdir()
            for name in ("out", "chosen", "state", "saved.plan", "saved.plan.parts"):
                if (folder / name).exists():
                    (folder / name).rename(remaining / name)
            for name, body in objects(s3, prefix).items():
                (remaining / "bucket" / name).parent.mkdir(parents=True, exist_ok=True)
                (remaining / "bucket" / name).write_bytes(body)
            texts = {s3.endpoint: ENDPOINT, bucket: "$BUCKET", str(folder): SOURCE_ROOT}
            replace_text(remaining, texts)
            cases.pack(remaining, case.archive)
    return finished


def main() -> None:
    HOME.mkdir(exist_ok=True)
    facts = json.loads(FACTS.read_text())["cases"] if FACTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder, S3Server(Path(folder)) as s3:
        facts |= {case.name: make(case, s3) for case in CASES if case.name in sys.argv[1:]}
    text = json.dumps({"made_with": cases.versions(), "cases": facts}, indent=1, sort_keys=True)
    FACTS.write_text(re.sub(r"\n +", "\n", text) + "\n")


if __name__ == "__main__":
    main()

"""Publish to the test Hub with the real command and the real clients, each in a separate process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.conftest import random_bytes, write_files
from tests.forked import Process, brim, start
from tests.hub import TestHub
from tests.hub.store import Entry

REPO = "ada/data"
DEST = f"hf://datasets/{REPO}"
MARK = "brim "  # the prefix that brim adds to the title of its pull requests
Listing = dict[str, tuple[int, str]]


@dataclass
class Machine:
    """A user's machine with separate folders for state, caches and temporary files."""

    hub: TestHub
    folder: Path
    token: str | None = "hf_write"
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "BRIM_"))}
        own = {
            "HF_ENDPOINT": self.hub.endpoint,
            "HF_HOME": str(self.folder / "home"),
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",  # for the clients that read; brim uses --via instead
            "XDG_STATE_HOME": str(self.folder / "state"),
            "TMPDIR": str(self.folder / "tmp"),
        }
        return inherited | own | ({"HF_TOKEN": self.token} if self.token else {}) | dict(self.more)

    def publish(
        self, source: Path, *options: str, to: str = DEST, check: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        return brim("build", source, to, *options, check=check, env=self.environment, cwd=self.folder)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run any brim command with --debug, so that a failure prints a traceback."""
        return brim(*arguments, env=self.environment, check=None)

    def start(self, source: Path, *options: str, to: str = DEST) -> Process:
        """Start the same command without waiting for it."""
        return start("build", source, to, "--quiet", *options, env=self.environment)

    def python(self, code: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a script that uses the real clients."""
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0 or not check, result.stderr
        return result

    @property
    def ledgers(self) -> list[Path]:
        """Return the ledger folders that brim keeps on this machine."""
        return sorted((self.folder / "state" / "brim" / "hub").glob("*"))


def shards(hub: TestHub, revision: str = "main", folder: str = "data") -> Listing:
    """Return the size and SHA-256 of each shard of a revision."""
    return {name: message for name, message in hub.files(REPO, revision).items() if name.startswith(f"{folder}/")}


def built(source: Path, out: Path, *options: str) -> Listing:
    """Return the expected content of the Hub: the size and SHA-256 of each shard that the same build writes to a
    folder."""
    brim("build", source, out, "--quiet", *options)
    contents = {f"data/{path.name}": path.read_bytes() for path in sorted((out / "data").iterdir())}
    return {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()}


def add_files(source: Path, start: int, stop: int) -> None:
    write_files(source, {f"f{i:03d}.bin": random_bytes(3000 + i, i) for i in range(start, stop)})


def put_by_hand(hub: TestHub, files: dict[str, bytes]) -> None:
    entries = {name: Entry.regular(data) for name, data in files.items()}
    hub.repos.get("datasets", REPO).commit("main", lambda tree: tree.update(entries), title="by hand")


def card(hub: TestHub, revision: str = "main") -> dict[str, object]:
    actual = yaml.safe_load(hub.read(REPO, "README.md", revision).decode().split("---\n")[1])
    assert isinstance(actual, dict)
    return actual

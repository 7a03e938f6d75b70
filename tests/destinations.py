"""Destinations of four kinds with one interface for the operations that tests need."""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests import forked
from tests.forked import brim
from tests.hub import TestHub
from tests.hub.store import Entry
from tests.publishing import DEST, Machine
from tests.s3 import FaultProxy, S3Server

Listing = dict[str, tuple[int, str]]


class Destination(Protocol):
    """A destination to build at. `environment` contains the variables that the building process needs."""

    address: str

    @property
    def environment(self) -> dict[str, str]: ...

    def content(self) -> dict[str, bytes]:
        """Return the files that readers can see, by name, without the ledger."""

    def plant(self, name: str, data: bytes) -> None:
        """Write a file at the destination as another process would."""


def listing(destination: Destination) -> Listing:
    """Return the size and SHA-256 of each shard."""
    actual = {name: data for name, data in destination.content().items() if name.startswith("data/")}
    return {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in actual.items()}


def run(
    destination: Destination, *arguments: str | os.PathLike[str], check: int | None = 0
) -> subprocess.CompletedProcess[str]:
    return brim(*arguments, check=check, env=destination.environment)


def start(destination: Destination, *arguments: str | os.PathLike[str]) -> forked.Process:
    return forked.start(*arguments, env=destination.environment)


@dataclass
class FolderDestination:
    folder: Path

    @property
    def address(self) -> str:
        return str(self.folder)

    @property
    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def content(self) -> dict[str, bytes]:
        card = self.folder / "README.md"
        actual = {"README.md": card.read_bytes()} if card.exists() else {}  # read first, as readers do
        for path in sorted(self.folder.rglob("*")):
            name = str(path.relative_to(self.folder))
            if name in actual or ".brim" in path.parts or not path.is_file():
                continue
            try:
                actual[name] = path.read_bytes()
            except FileNotFoundError:
                if not path.name.startswith("."):  # a file under construction gets its final name by a rename
                    raise
        return actual

    def plant(self, name: str, data: bytes) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(data)


@dataclass
class HubDestination:
    hub: TestHub
    folder: Path
    address: str = DEST

    @property
    def environment(self) -> dict[str, str]:
        return Machine(self.hub, self.folder).environment

    @property
    def repo(self) -> str:
        return self.address.removeprefix("hf://datasets/")

    def content(self) -> dict[str, bytes]:
        position = self.hub.head(self.repo)  # only the files of one commit, as readers see them
        names = [
            name for name in self.hub.files(self.repo, position) if not name.startswith((".brim/", ".gitattributes"))
        ]
        return {name: self.hub.read(self.repo, name, position) for name in names}

    def plant(self, name: str, data: bytes) -> None:
        if self.repo not in {repo.name for repo in self.hub.repos}:
            self.hub.create(self.repo)
        entry, repo = Entry.regular(data), self.hub.repos.get("datasets", self.repo)
        repo.commit("main", lambda tree: tree.update({name: entry}), title="a file")


@dataclass
class BucketDestination:
    server: S3Server
    folder: Path
    prefix: str
    proxy: FaultProxy | None = None

    @property
    def address(self) -> str:
        return f"s3://private/{self.prefix}"

    @property
    def environment(self) -> dict[str, str]:
        endpoint = self.proxy.endpoint if self.proxy else self.server.endpoint
        own = {"XDG_STATE_HOME": str(self.folder / "state")}
        return {**os.environ, **self.server.environment_at(endpoint), **own}

    def content(self) -> dict[str, bytes]:
        names = [name[len(self.prefix) + 1 :] for name in self.server.objects("private", f"{self.prefix}/")]
        return {n: self.server.read("private", f"{self.prefix}/{n}") for n in names if not n.startswith(".brim/")}

    def plant(self, name: str, data: bytes) -> None:
        self.server.write("private", f"{self.prefix}/{name}", data)


@dataclass
class HubBucketDestination:
    hub: TestHub
    folder: Path
    prefix: str = "some/where"
    bucket: str = "ada/things"

    @property
    def address(self) -> str:
        return f"hf://buckets/{self.bucket}/{self.prefix}"

    @property
    def environment(self) -> dict[str, str]:
        return Machine(self.hub, self.folder).environment

    def content(self) -> dict[str, bytes]:
        names = [name for name in [*self.hub.buckets[self.bucket].files] if name.startswith(f"{self.prefix}/")]
        short = [name[len(self.prefix) + 1 :] for name in names]
        return {n: self.hub.read_bucket(self.bucket, f"{self.prefix}/{n}") for n in short if not n.startswith(".brim/")}

    def plant(self, name: str, data: bytes) -> None:
        self.plant_all({name: data})

    def plant_all(self, files: dict[str, bytes]) -> None:
        add = []
        for number, (name, data) in enumerate(files.items()):
            local = self.folder / f"planted-{number}"
            local.parent.mkdir(parents=True, exist_ok=True)
            local.write_bytes(data)
            add.append((str(local), f"{self.prefix}/{name}"))
        Machine(self.hub, self.folder, more={"HF_HUB_DISABLE_XET": "0"}).python(f"""
            from huggingface_hub import HfApi
            HfApi().create_bucket({self.bucket!r}, exist_ok=True)
            HfApi().batch_bucket_files({self.bucket!r}, add={add!r})
        """)

"""Save and restore the state of a test Hub and a machine, including objects that no commit refers to yet."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from tests.hub import TestHub
from tests.hub.store import Entry
from tests.publishing import DEST, REPO, Machine

SCOPE = "default/*"  # the config and the splits of a publication
ARGUMENTS = ("--rows-per-shard", "1", "--workers", "1", "--json")


def state_name(hub: TestHub) -> str:
    """Return the name of a publication's ledger folder in the user's state, unique per Hub, repository and splits."""
    return f"ada--data-{hashlib.sha256(f'{hub.endpoint} {DEST} {SCOPE}'.encode()).hexdigest()[:12]}"


def keep(hub: TestHub, machine: Machine, folder: Path) -> None:
    (folder / "objects").mkdir(parents=True)
    for oid in hub.repos.get("datasets", REPO).objects:
        shutil.copy(hub.objects.path(oid), folder / "objects" / oid)
    for name in hub.files(REPO):
        (folder / "main" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "main" / name).write_bytes(hub.read(REPO, name))
    for ledger in machine.ledgers:
        assert ledger.name == state_name(hub)
        shutil.copytree(ledger, folder / "state")


def put_back(hub: TestHub, machine: Machine, folder: Path) -> None:
    repo = hub.create(REPO, private=True)
    for path in (folder / "objects").iterdir():
        shutil.copy(path, hub.objects.path(path.name))
        hub.objects.sizes[path.name] = path.stat().st_size
        repo.objects.add(path.name)
    tree = {}
    for path in (path for path in (folder / "main").rglob("*") if path.is_file()):
        content = path.read_bytes()
        oid = hashlib.sha256(content).hexdigest()
        large = oid in repo.objects
        tree[path.relative_to(folder / "main").as_posix()] = (
            Entry.lfs(oid, len(content)) if large else Entry.regular(content)
        )
    repo.commit("main", lambda existing: existing.update(tree), title="what was there")
    if (folder / "state").exists():
        shutil.copytree(folder / "state", machine.folder / "state" / "brim" / "hub" / state_name(hub))

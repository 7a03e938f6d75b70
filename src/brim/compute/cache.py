"""Where `brim.map` keeps what it computed: a folder for each job, found again by its fingerprint."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.compute.books import clear_scratch, has_scratch
from brim.durable import reason, write_whole
from brim.engine.ledger import LEDGER, Ledger
from brim.engine.lock import locked
from brim.errors import DestinationError, InputError

_ABOUT = "about.json"


@dataclass(frozen=True, slots=True)
class Cached:
    """A cache folder, for people."""

    folder: Path
    bytes: int
    used_at: float
    done: bool
    what: str
    source: str
    rows: int

    @property
    def age_days(self) -> float:
        return max(time.time() - self.used_at, 0.0) / 86400


def cache_home(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder of all caches: as given, or $BRIM_CACHE, or the user's cache folder."""
    if cache_dir is not None:
        return Path(os.path.abspath(cache_dir))
    if os.environ.get("BRIM_CACHE"):
        return Path(os.path.abspath(os.environ["BRIM_CACHE"]))
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "brim" / "map"


def open_cache(home: Path, name: str, about: dict[str, Any], *, adopt: bool = False) -> Path:
    """The folder of one job, made if it is new. What it is about is told for `brim clean`.

    `adopt`: an unfinished job whose name begins alike (the function alone differs) becomes this one.
    """
    folder = home / name
    try:
        if adopt and not folder.exists():
            _adopt(home, name)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / _ABOUT, json.dumps(about).encode())
    except OSError as error:
        raise DestinationError(
            f"The cache folder {str(folder)!r} cannot be used: {reason(error)}.",
            hint="Choose another one with cache_dir=, or set BRIM_CACHE.",
        ) from error
    return folder


def _adopt(home: Path, name: str) -> None:
    alike = [path for path in home.glob(f"{name.partition('-')[0]}-*") if not Ledger(path / "units").done]
    latest = max(alike, key=lambda path: path.stat().st_mtime, default=None)
    if latest is not None:
        with locked(latest):
            latest.rename(home / name)


def sweep_caches(home: Path) -> None:
    """Take away what killed processes left in any cache, apart from the units that they finished."""
    for folder in home.iterdir() if home.is_dir() else ():
        if (folder / _ABOUT).is_file() and has_scratch(folder / "units"):
            with suppress(DestinationError, FileNotFoundError), locked(folder):  # somebody is using it, or removed it
                clear_scratch(folder / "units")


def list_caches(home: Path) -> list[Cached]:
    """Every cache, the one used longest ago first."""
    found = []
    for folder in sorted(home.iterdir()) if home.is_dir() else []:
        if not (folder / _ABOUT).is_file():
            continue  # not ours
        about = _about(folder)
        ledger = Ledger(folder / "units")
        files = [path for path in folder.rglob("*") if path.is_file()]
        found.append(
            Cached(
                folder,
                sum(path.stat().st_size for path in files),
                (folder / _ABOUT).stat().st_mtime,
                ledger.done,
                str(about.get("what", "?")),
                str(about.get("source", "?")),
                sum(receipt.rows for receipt in ledger.receipts.values()),
            )
        )
    return sorted(found, key=lambda cached: cached.used_at)


def remove_cache(cached: Cached) -> bool:
    """Take a cache away; False if a job is using it. Datasets that are open stay readable until they are closed."""
    try:
        with locked(cached.folder):
            (cached.folder / "units" / LEDGER).unlink(missing_ok=True)  # first: a half removed cache is no cache
            shutil.rmtree(cached.folder)
    except DestinationError:
        return False
    except OSError as error:
        raise InputError(f"The cache {str(cached.folder)!r} cannot be removed: {reason(error)}.") from error
    return True


def _about(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / _ABOUT).read_text())
        return about if isinstance(about, dict) else {}
    except (OSError, ValueError):
        return {}

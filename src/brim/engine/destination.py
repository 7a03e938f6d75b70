"""Where a dataset is: a folder, a repository on the Hub, or a place in a bucket; and where its ledger is."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from brim.durable import reason, sync_folder
from brim.engine.ledger import LEDGER, STATE
from brim.errors import DestinationError, InputError
from brim.objects.address import Access, ObjectAddress, is_object_address, parse_object_address
from brim.objects.store import endpoint_of
from brim.sinks.hub.address import SCHEME, Address, looks_like_repo, parse_address

Destination = Path | Address | ObjectAddress


def parse_destination(destination: str | os.PathLike[str], access: Access | None = None) -> Destination:
    """`access` is how a bucket is reached."""
    text = os.fspath(destination)
    if text.startswith(SCHEME):
        return parse_address(text)
    if is_object_address(text):
        return parse_object_address(text, access)
    if "://" in text:
        raise InputError(
            f"brim cannot use {text.partition('://')[0]}:// as a destination.",
            hint="Give a folder, hf://datasets/ORG/NAME, or s3://BUCKET/PREFIX.",
        )
    return Path(os.path.abspath(text))


def new_destination(destination: str | os.PathLike[str], access: Access | None = None) -> Destination:
    """A destination to build at. A bare ORG/NAME may be a slip: a folder of that name would be a surprise."""
    if isinstance(destination, str) and looks_like_repo(destination):
        raise InputError(
            f"{destination!r} may be a folder or a repository on the Hub.",
            hint=f"Write hf://datasets/{destination} for the Hub, or ./{destination} for a folder.",
        )
    return parse_destination(destination, access)


def refuse_source(destination: Destination, place: str, access: Access) -> None:
    """A dataset is not built where its source lies (`place`, which is reached with `access`)."""
    if isinstance(destination, ObjectAddress):
        same = str(destination) == place.rstrip("/") and endpoint_of(destination.access) == endpoint_of(access)
    else:
        same = isinstance(destination, Path) and os.path.realpath(destination) == os.path.realpath(place)
    if same:
        raise DestinationError("The destination is the source itself.", hint="Give another place.")


def state_folder(destination: Destination, state: str | os.PathLike[str] | None, scope: str = "") -> Path:
    """Where the ledger of a destination is: inside a folder, else with the user's state; or where the user says.

    `scope` tells apart what is published to one repository independently (a config, a split).
    """
    if state:
        return Path(state)
    if isinstance(destination, Path):
        return destination / STATE
    if isinstance(destination, Address):
        kind, endpoint, shown = "hub", os.environ.get("HF_ENDPOINT", "").rstrip("/"), destination.repo
    else:
        kind, endpoint = "objects", endpoint_of(destination.access) or ""
        shown = f"{destination.bucket}/{destination.prefix}".rstrip("/")
    return state_home(kind, f"{endpoint} {destination} {scope}", shown)


def state_home(kind: str, what: str, shown: str) -> Path:
    """The folder that the user's state keeps about something; `shown` is what people will know it by."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    name = f"{shown[:80].replace('/', '--')}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"
    return Path(home) / "brim" / kind / name


def make_state(destination: Destination, folder: Path) -> None:
    """Make the folder of the ledger. In a built folder, .brim is made in any case: it marks what brim built."""
    try:
        if isinstance(destination, Path):
            (destination / STATE).mkdir(exist_ok=True)
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("lock", LEDGER):
            with open(folder / name, "ab"):
                pass
        sync_folder(folder)
    except OSError as error:
        raise DestinationError(
            f"The folder of the ledger, {str(folder)!r}, cannot be used: {reason(error)}.",
            hint="Choose another one with --state DIR.",
        ) from error

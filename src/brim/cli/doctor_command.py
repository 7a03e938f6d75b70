"""brim doctor: show versions, optional libraries, credentials and limits, and how to install missing libraries."""

import json
import os
import platform
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from brim import __version__
from brim.cli.command import Command
from brim.cli.print_output import emit, print_lines
from brim.extras import EXTRAS, install_command, installed_version, is_missing, own_requirements
from brim.memory.cgroup import hard_limit_here
from brim.memory.limit import effective_limit, headrooms
from brim.memory.meter import blind_spots
from brim.options.groups import JsonOptions
from brim.records import dataclass
from brim.sizes import format_size

_HUB_S = 1.0


@dataclass(frozen=True, kw_only=True)
class DoctorCommand(JsonOptions):
    """`brim doctor`.

    Examples:
        brim doctor
        brim doctor --json

    Changes nothing, and takes less than two seconds: the request to the Hub for the owner of the token times out after
    one.
    """


def run(options: DoctorCommand) -> None:
    from huggingface_hub import constants, get_token

    token = get_token()
    hub: dict[str, Any] = {"endpoint": constants.ENDPOINT, "token": token is not None}
    # On a thread, so that a lost connection does not delay the other checks.
    asking = threading.Thread(target=_ask_hub, args=[hub, token], daemon=True)
    if token is not None and not constants.HF_HUB_OFFLINE:
        asking.start()
    libraries = {item.name: installed_version(item.name) or "is missing" for item in own_requirements()}
    extras = [_extra(name) for name in EXTRAS]
    memory = _memory()
    if asking.ident is not None:
        asking.join(_HUB_S)
    if asking.is_alive():
        hub = {**hub, "error": f"the Hub does not answer within {_HUB_S:g} s"}
    elif constants.HF_HUB_OFFLINE:
        hub["error"] = "not asked: HF_HUB_OFFLINE is set"
    advice = list(_advice(libraries, extras, hub, memory))
    about = {"brim": __version__, "python": platform.python_version(), "system": platform.platform()}
    if options.json:
        emit("doctor", **about, libraries=libraries, extras=extras, hub=hub, memory=memory, advice=advice)
        return
    print_lines([
        ("brim", f"{about['brim']}, Python {about['python']} ({sys.executable}), {about['system']}"),
        ("libraries", ", ".join(f"{name} {version}" for name, version in libraries.items())),
        *((f"[{extra['name']}]", _extra_text(extra)) for extra in extras),
        ("Hub", _hub_text(hub)),
        ("memory", f"limit {memory['limit']}"),
        *(("", reason) for reason in memory["above"] if reason not in memory["limit"]),
        ("cgroup", memory["cgroup"]),
        ("state", memory["state"]),
        *(("next step", step) for step in advice or ["nothing is missing"]),
    ])  # fmt: skip


def _extra(name: str) -> dict[str, Any]:
    extra = EXTRAS[name]
    missing = is_missing(name)
    installed = {package: installed_version(package) for package in extra.packages.values() if package not in missing}
    install = install_command(missing) if missing else None
    return {"name": name, "enables": extra.enables, "installed": installed, "missing": missing, "install": install}


def _extra_text(extra: dict[str, Any]) -> str:
    installed = ", ".join(f"{name} {version}" for name, version in extra["installed"].items())
    if not extra["missing"]:
        return f"{installed}: {extra['enables']}"
    return f"{f'{installed}; ' if installed else ''}missing: {', '.join(extra['missing'])}, for {extra['enables']}"


def _ask_hub(facts: dict[str, Any], token: str) -> None:
    """Add the owner and the role of the token to the facts, or the error."""
    request = Request(f"{facts['endpoint']}/api/whoami-v2", headers={"Authorization": f"Bearer {token}"})
    try:
        with urlopen(request, timeout=_HUB_S) as answer:
            account = json.load(answer)
        access = account.get("auth", {}).get("accessToken", {})
        organisations = [item.get("name") for item in account.get("orgs", [])]
        facts |= {"user": account.get("name"), "role": access.get("role"), "organisations": organisations}
    except HTTPError as error:
        facts["error"] = f"the Hub refuses it ({error.code})" if error.code in (401, 403) else f"{error}"
    except (URLError, OSError, ValueError) as error:
        facts["error"] = f"the Hub does not answer ({getattr(error, 'reason', error)})"


def _hub_text(hub: dict[str, Any]) -> str:
    if not hub["token"]:
        return f"no token for {hub['endpoint']}"
    if "error" in hub:
        return f"a token for {hub['endpoint']}; {hub['error']}"
    organisations = f", in {', '.join(hub['organisations'])}" if hub["organisations"] else ""
    roles = {"write": "write", "read": "only read", "fineGrained": "do what its settings on the Hub allow"}
    rights = roles.get(hub["role"] or "", "have any role: the Hub did not report it")
    return f"{hub['user']} at {hub['endpoint']}{organisations}; the token may {rights}"


def _memory() -> dict[str, Any]:
    from brim.storage.destination_address import state_root

    limit, state, home = effective_limit(), state_root(), Path.home()
    free = shutil.disk_usage(next(path for path in (state, *state.parents) if path.exists())).free
    shown = f"~/{state.relative_to(home)}" if state.is_relative_to(home) else str(state)
    return {
        "limit_bytes": limit.bytes,
        "limit": str(limit),
        "above": [f"{headroom.reason}" for headroom in headrooms(os.environ)],
        "cgroup": hard_limit_here(),
        "not_seen": blind_spots(),
        "state": f"{shown} ({format_size(free)} free on its disk)",
    }


def _advice(
    libraries: dict[str, str], extras: list[dict[str, Any]], hub: dict[str, Any], memory: dict[str, Any]
) -> Iterator[str]:
    """Yield commands: for libraries that are missing or have an unsupported version, and for the token."""
    for requirement in own_requirements():
        version = libraries[requirement.name]
        if version == "is missing" or not requirement.specifier.contains(version, prereleases=True):
            yield f"pip install '{requirement.name}{requirement.specifier}'  ({requirement.name} {version})"
    if not hub["token"]:
        yield "hf auth login  (to publish, or to read private datasets)"
    elif "refuses" in hub.get("error", "") or hub.get("role") == "read":
        yield "hf auth login  (with a token that may write, to publish)"
    for extra in extras:
        if extra["missing"]:
            yield f"{extra['install']}  (for {extra['enables']})"
    yield from memory["not_seen"]


COMMAND = Command(DoctorCommand, run)

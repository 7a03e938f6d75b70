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

from brim.cli.command import Command
from brim.cli.print_output import emit, print_lines
from brim.extras import EXTRAS, install_command, installed_version, is_missing, own_requirements
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
    hub_request = _HubRequest()  # runs while the other values are collected
    libraries = dict(_libraries())
    extras = [_extra(name) for name in EXTRAS]
    memory = _memory()
    hub = hub_request.answer()
    advice = [*_old(libraries), *_advice(extras, hub, memory)]
    about = {"brim": libraries.pop("brim"), "python": platform.python_version(), "system": platform.platform()}
    if options.json:
        emit("doctor", **about, libraries=libraries, extras=extras, hub=hub, memory=memory, advice=advice)
        return
    lines = [
        ("brim", f"{about['brim']}, Python {about['python']} ({sys.executable}), {about['system']}"),
        ("libraries", ", ".join(f"{name} {version}" for name, version in libraries.items())),
        *((f"[{extra['name']}]", _extra_text(extra)) for extra in extras),
        ("Hub", _hub_text(hub)),
        ("memory", f"limit {memory['limit']}"),
        *(("", reason) for reason in memory["above"] if reason not in memory["limit"]),
        ("cgroup", memory["cgroup"]),
        ("state", memory["state"]),
        *(("next", step) for step in advice or ["nothing is missing"]),
    ]
    print_lines(lines)


def _libraries() -> Iterator[tuple[str, str]]:
    from brim import __version__

    yield "brim", __version__
    for requirement in own_requirements():
        yield requirement.name, installed_version(requirement.name) or "is missing"


def _old(libraries: dict[str, str]) -> Iterator[str]:
    """Yield an install command for each required library that is missing or has an unsupported version."""
    for requirement in own_requirements():
        version = libraries[requirement.name]
        if version == "is missing" or not requirement.specifier.contains(version, prereleases=True):
            yield f"pip install '{requirement.name}{requirement.specifier}'  ({requirement.name} {version})"


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


class _HubRequest:
    """A request for the owner and the permissions of the token.

    It runs on a thread, so that a lost connection does not delay the other checks.
    """

    def __init__(self) -> None:
        from huggingface_hub import constants, get_token

        self._facts: dict[str, Any] = {"endpoint": constants.ENDPOINT, "token": get_token() is not None}
        self._offline = bool(constants.HF_HUB_OFFLINE)
        self._thread = threading.Thread(target=self._ask, args=[get_token()], daemon=True)
        if self._facts["token"] and not self._offline:
            self._thread.start()

    def _ask(self, token: str) -> None:
        request = Request(f"{self._facts['endpoint']}/api/whoami-v2", headers={"Authorization": f"Bearer {token}"})
        try:
            with urlopen(request, timeout=_HUB_S) as answer:
                account = json.load(answer)
            access = account.get("auth", {}).get("accessToken", {})
            organisations = [item.get("name") for item in account.get("orgs", [])]
            self._facts |= {"user": account.get("name"), "role": access.get("role"), "organisations": organisations}
        except HTTPError as error:
            self._facts["error"] = f"the Hub refuses it ({error.code})" if error.code in (401, 403) else f"{error}"
        except (URLError, OSError, ValueError) as error:
            self._facts["error"] = f"the Hub does not answer ({getattr(error, 'reason', error)})"

    def answer(self) -> dict[str, Any]:
        if self._thread.ident is not None:
            self._thread.join(_HUB_S)
        if self._thread.is_alive():
            return {**self._facts, "error": f"the Hub does not answer within {_HUB_S:g} s"}
        return {**self._facts, "error": "not asked: HF_HUB_OFFLINE is set"} if self._offline else dict(self._facts)


def _hub_text(hub: dict[str, Any]) -> str:
    if not hub["token"]:
        return f"no token for {hub['endpoint']}"
    if "error" in hub:
        return f"a token for {hub['endpoint']}; {hub['error']}"
    organisations = f", in {', '.join(hub['organisations'])}" if hub["organisations"] else ""
    return f"{hub['user']} at {hub['endpoint']}{organisations}; the token may {_rights(hub['role'])}"


def _rights(role: str | None) -> str:
    return {"write": "write", "read": "only read", "fineGrained": "do what its settings on the Hub allow"}.get(
        role or "", "have any role: the Hub did not report it"
    )


def _memory() -> dict[str, Any]:
    from brim.memory.cgroup import hard_limit_here
    from brim.memory.limit import effective_limit, headrooms
    from brim.memory.meter import blind_spots
    from brim.stores.destination import state_root

    limit = effective_limit()
    state = state_root()
    free = shutil.disk_usage(next(path for path in (state, *state.parents) if path.exists())).free
    return {
        "limit_bytes": limit.bytes,
        "limit": str(limit),
        "above": [f"{headroom.reason}" for headroom in headrooms(os.environ)],
        "cgroup": hard_limit_here(),
        "not_seen": blind_spots(),
        "state": f"{_short(state)} ({format_size(free)} free on its disk)",
    }


def _short(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _advice(extras: list[dict[str, Any]], hub: dict[str, Any], memory: dict[str, Any]) -> Iterator[str]:
    if not hub["token"]:
        yield "hf auth login  (to publish, or to read private datasets)"
    elif "refuses" in hub.get("error", "") or hub.get("role") == "read":
        yield "hf auth login  (with a token that may write, to publish)"
    for extra in extras:
        if extra["missing"]:
            yield f"{extra['install']}  (for {extra['enables']})"
    yield from memory["not_seen"]


COMMAND = Command(DoctorCommand, run)

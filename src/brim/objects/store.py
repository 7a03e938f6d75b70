"""The one place that makes obstore's stores: endpoint, credentials, patience."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from brim.errors import InputError, MissingExtra
from brim.objects.address import Access, ObjectAddress
from brim.objects.credentials import Keys, chosen_profile, environment_keys, provider

_ANSWER_S = 60.0  # without a byte of an answer
_REQUEST_S = 3600.0  # for all of it: on a slow line, pieces that come together take minutes
_CONNECT_S = 10.0
_RETRIES = 100  # patience ends first
_PAUSE_S = 5.0  # at most, between tries
_PATIENCE_S = 180.0  # for one request, all its tries together; obstore signs it once

_STORES: dict[tuple[str, str, Access, str], Any] = {}
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class S3Account:
    """What signs requests to S3. `keys` is None where obstore alone knows them (the role of a machine)."""

    endpoint: str | None
    region: str
    keys: Keys | None


def store_of(address: ObjectAddress) -> Any:
    """obstore's store of the whole bucket; the same one for the same bucket and access."""
    # Credentials are read when a store is made: another environment is another store.
    mark = "\0".join(f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("AWS_"))
    key = (address.scheme, address.bucket, address.access, mark)
    with _LOCK:
        if key not in _STORES:
            _STORES[key] = _open(address)
        return _STORES[key]


def patience_s() -> float:
    """How long a request that fails is tried again."""
    said = os.environ.get("BRIM_STALL_SECONDS")
    try:
        return min(float(said), _PATIENCE_S) if said else _PATIENCE_S
    except ValueError as error:
        raise InputError(f"BRIM_STALL_SECONDS is a number of seconds, not {said!r}.") from error


def _open(address: ObjectAddress) -> Any:
    try:
        import obstore.store as stores
    except ImportError as error:
        raise MissingExtra(
            f"{address.scheme}:// needs obstore.", hint="Install it with: pip install 'brim[s3]'", extra="s3"
        ) from error
    waits = patience_s()
    shared: dict[str, Any] = {
        "client_options": {
            "timeout": timedelta(seconds=_REQUEST_S),
            "read_timeout": timedelta(seconds=min(_ANSWER_S, waits)),
            "connect_timeout": timedelta(seconds=min(_CONNECT_S, waits)),
        },
        "retry_config": {
            "max_retries": _RETRIES,
            "retry_timeout": timedelta(seconds=waits),
            "backoff": {
                "init_backoff": timedelta(seconds=0.1),
                "max_backoff": timedelta(seconds=_PAUSE_S),
                "base": 2,
            },
        },
    }
    if address.scheme != "s3":
        store: Any = {"gs": stores.GCSStore, "az": stores.AzureStore}[address.scheme]
        return store(address.bucket, **({"skip_signature": True} if address.access.anonymous else {}), **shared)
    return stores.S3Store(address.bucket, **_s3_options(address.access, shared["client_options"]), **shared)


def _s3_options(access: Access, client: dict[str, Any]) -> dict[str, Any]:
    profile = None if access.anonymous else chosen_profile()
    endpoint = endpoint_of(access)
    # Parts carry a checksum, and the store compares it: a signature alone is not checked by all of them.
    options: dict[str, Any] = {"region": region_of(), "checksum_algorithm": "CRC64NVME"}
    if endpoint is not None:
        options |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
        client["allow_http"] = endpoint.startswith("http://")
    if endpoint is None or endpoint.startswith("https://"):
        # The line itself keeps bytes as they are: no need for a SHA-256 of each part in its signature as well.
        options["unsigned_payload"] = True
    if access.anonymous:
        return options | {"skip_signature": True}
    if profile is None:
        return options
    if profile.keys is None:
        if os.environ.get("AWS_PROFILE") is None and "sso_session" not in profile.values:
            return options  # a default profile that sets a region only: obstore looks for the role of the machine
        return options | {"credential_provider": provider(profile)}
    options |= {"access_key_id": profile.keys.access, "secret_access_key": profile.keys.secret}
    return options | ({"session_token": profile.keys.token} if profile.keys.token else {})


def endpoint_of(access: Access) -> str | None:
    """Where requests go: the option, the environment, the profile; None is Amazon."""
    if access.endpoint:
        return access.endpoint.rstrip("/")
    said = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
    if not said:
        profile = chosen_profile()
        said = profile.endpoint if profile else None
    return said.rstrip("/") if said else None


def region_of() -> str:
    profile = chosen_profile()
    said = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return said or (profile.region if profile else None) or "us-east-1"


def account_of(access: Access) -> S3Account:
    """For the few requests that obstore does not make."""
    keys = environment_keys() if os.environ.get("AWS_PROFILE") is None else None
    profile = chosen_profile()
    if keys is None and profile is not None:
        keys = profile.keys
        if keys is None and (os.environ.get("AWS_PROFILE") or "sso_session" in profile.values):
            told = provider(profile)()
            keys = Keys(told["access_key_id"], told["secret_access_key"], told["token"])
    return S3Account(endpoint_of(access), region_of(), keys)

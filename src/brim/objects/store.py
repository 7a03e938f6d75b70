"""The one place that makes obstore's stores: endpoint, credentials, patience."""

from __future__ import annotations

import os
import re
import ssl
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from brim.errors import InputError, MissingExtra
from brim.objects.address import Access, ObjectAddress, checked_endpoint
from brim.objects.credentials import Keys, chosen_profile, known_keys, provider

_ANSWER_S = 60.0  # without a byte of an answer
_REQUEST_S = 3600.0  # for all of it: on a slow line, pieces that come together take minutes
_CONNECT_S = 10.0
_RETRIES = 100  # patience ends first
_PAUSE_S = 5.0  # at most, between tries
_REGION = re.compile(r"[A-Za-z0-9._-]+")
_PATIENCE_S = 180.0  # for one request, all its tries together; obstore signs it once

_STORES: dict[tuple[str, str, Access, str], Any] = {}
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class S3Account:
    """What signs requests to S3. `keys` is None where obstore alone knows them (the role of a machine)."""

    endpoint: str | None
    region: str
    keys: Keys | None
    authorities: str | None  # certificates, beside those that the system knows


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
        seconds = float(said) if said else _PATIENCE_S
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise InputError(f"BRIM_STALL_SECONDS is a number of seconds above zero, not {said!r}.")
    return min(seconds, _PATIENCE_S)


def _open(address: ObjectAddress) -> Any:
    try:
        import obstore.exceptions
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
    store: Any = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[address.scheme]
    if address.scheme == "s3":
        shared |= _s3_options(address.access, shared["client_options"])
    elif address.access.anonymous:
        shared["skip_signature"] = True
    try:
        return store(address.bucket, **shared)
    except obstore.exceptions.BaseError as error:
        raise InputError(
            f"obstore refuses the settings for {address.scheme}://: {str(error).splitlines()[0]}",
            hint="They come from the environment.",
        ) from None


def _s3_options(access: Access, client: dict[str, Any]) -> dict[str, Any]:
    profile = None if access.anonymous else chosen_profile()
    endpoint = endpoint_of(access)
    # Parts carry a checksum, and the store compares it: a signature alone is not checked by all of them.
    options: dict[str, Any] = {"region": region_of(), "checksum_algorithm": "CRC64NVME"}
    if endpoint is not None:
        options |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
        client["allow_http"] = endpoint.startswith("http://")
    if endpoint is None or endpoint.startswith("https://"):
        if (trusted := authorities()) is not None:
            client["root_certificate"] = trusted
        # The line itself keeps bytes as they are: no need for a SHA-256 of each part in its signature as well.
        options["unsigned_payload"] = True
    if access.anonymous:
        return options | {"skip_signature": True}
    if (keys := known_keys(profile)) is not None:
        options |= {"access_key_id": keys.access, "secret_access_key": keys.secret}
        return options | ({"session_token": keys.token} if keys.token else {})
    if profile is not None and profile.elsewhere:
        return options | {"credential_provider": provider(profile)}
    return options  # obstore looks for the role of the machine


def endpoint_of(access: Access) -> str | None:
    """Where requests go: the option, the environment, the profile; None is Amazon."""
    if access.endpoint:
        return access.endpoint.rstrip("/")
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        if said := os.environ.get(name):
            return checked_endpoint(said, name)
    profile = chosen_profile()
    if profile is None or not profile.endpoint:
        return None
    return checked_endpoint(profile.endpoint, f"endpoint_url of the profile {profile.name!r}")


def region_of() -> str:
    profile = chosen_profile()
    said = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    region = said or (profile.region if profile else None) or "us-east-1"
    if not _REGION.fullmatch(region):
        raise InputError(f"{region!r} is no region.", hint="Set AWS_REGION to a name like us-east-1.")
    return region


def authorities() -> str | None:
    """Certificates of authorities that are trusted beside those of the system, as a private store needs them."""
    profile = chosen_profile()
    path = os.environ.get("AWS_CA_BUNDLE") or (profile.values.get("ca_bundle") if profile else None)
    if not path:
        return None
    try:
        found = Path(path).expanduser().read_text()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=found)
    except (OSError, ValueError) as error:
        raise InputError(
            f"AWS_CA_BUNDLE (or ca_bundle of a profile) is {path!r}, which holds no certificates that can be read.",
            hint="Name a file of certificates in PEM format.",
        ) from error
    return found


def account_of(access: Access) -> S3Account:
    """For the few requests that obstore does not make."""
    profile = chosen_profile()
    keys = known_keys(profile)
    if keys is None and profile is not None and profile.elsewhere:
        told = provider(profile)()
        keys = Keys(told["access_key_id"], told["secret_access_key"], told["token"])
    endpoint = endpoint_of(access)
    plain = endpoint is not None and endpoint.startswith("http://")
    return S3Account(endpoint, region_of(), keys, None if plain else authorities())

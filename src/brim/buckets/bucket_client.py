"""The one place that makes obstore's stores: endpoint, credentials, patience."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from brim.buckets.aws_account import aws_endpoint, aws_options
from brim.buckets.azure_account import azure_endpoint, azure_options
from brim.buckets.bucket_address import Access, BucketAddress
from brim.buckets.google_account import google_endpoint, google_options
from brim.errors import InputError
from brim.extras import missing

_ANSWER_S = 60.0  # without a byte of an answer
_REQUEST_S = 3600.0  # for all of it: on a slow line, pieces that come together take minutes
_CONNECT_S = 10.0
_RETRIES = 100  # patience ends first
_PAUSE_S = 5.0  # at most, between tries
_PATIENCE_S = 180.0  # for one request, all its tries together; obstore signs it once

_STORES: dict[tuple[str, str, Access, str], Any] = {}
_LOCK = threading.Lock()
_ENDPOINTS: dict[str, Callable[[Access], str | None]] = {
    "s3": aws_endpoint,
    "gs": google_endpoint,
    "az": azure_endpoint,
}
# What decides who we are and where requests go: another environment is another store.
_ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_", "CLOUDSDK_", "STORAGE_EMULATOR_HOST", "IDENTITY_")


def store_of(address: BucketAddress) -> Any:
    """obstore's store of the whole bucket; the same one for the same bucket and access."""
    mark = "\0".join(f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(_ENVIRONMENT))
    key = (address.scheme, address.bucket, address.access, mark)
    with _LOCK:
        if key not in _STORES:
            _STORES[key] = _open(address)
        return _STORES[key]


def endpoint_of(address: BucketAddress) -> str | None:
    """Where requests go: the option, the environment, a profile; None is the scheme's own cloud."""
    if address.on_hub:
        return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    ask = _ENDPOINTS.get(address.scheme)
    return ask(address.access) if ask is not None else None


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


def _open(address: BucketAddress) -> Any:
    try:
        import obstore.exceptions
        import obstore.store as stores
    except ImportError as error:
        raise missing("s3", f"{address.scheme}:// needs obstore.") from error
    waits = patience_s()
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=_REQUEST_S),
        "read_timeout": timedelta(seconds=min(_ANSWER_S, waits)),
        "connect_timeout": timedelta(seconds=min(_CONNECT_S, waits)),
    }
    retry: dict[str, Any] = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=waits),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=_PAUSE_S), "base": 2},
    }
    store, options = {
        "s3": (stores.S3Store, aws_options),
        "gs": (stores.GCSStore, google_options),
        "az": (stores.AzureStore, azure_options),
    }[address.scheme]
    settings = options(address.access, client)
    try:
        return store(address.bucket, client_options=client, retry_config=retry, **settings)
    except obstore.exceptions.BaseError as error:
        raise InputError(
            f"obstore refuses the settings for {address.scheme}://: {str(error).splitlines()[0]}",
            hint="They come from the environment.",
        ) from None

"""Who we are to Google's storage: endpoint and credentials, in the order of Google's tools.

A key file that GOOGLE_APPLICATION_CREDENTIALS names, else what `gcloud auth application-default login` left, else the
role of the machine. obstore reads keys of service accounts and logins of users; for other kinds (workload identity
federation) google-auth is asked.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from brim.buckets.bucket_address import Access, checked_endpoint
from brim.buckets.certificates import trusted_beside
from brim.errors import InputError, MissingExtra

_ENDPOINTS = ("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE", "STORAGE_EMULATOR_HOST")
_READ_BY_OBSTORE = ("service_account", "authorized_user")
_OBSTORE_KEYS = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY")


def google_endpoint(access: Access) -> str | None:
    """Where requests go; None is Google."""
    if access.endpoint:
        return access.endpoint.rstrip("/")
    for name in _ENDPOINTS:
        if said := os.environ.get(name):
            return checked_endpoint(said if "://" in said else f"http://{said}", name)
    return None


def google_options(access: Access, client: dict[str, Any]) -> dict[str, Any]:
    """What obstore's Google store is made with; what its client is made with goes into `client`."""
    endpoint = google_endpoint(access)
    options: dict[str, Any] = {}
    if endpoint is not None:
        options["base_url"] = endpoint
        client["allow_http"] = endpoint.startswith("http://")
    if endpoint is None or endpoint.startswith("https://"):
        client |= trusted_beside()
    credentials = _credentials_file()
    known = credentials is not None or any(os.environ.get(name) for name in _OBSTORE_KEYS)
    if access.anonymous:
        return options | {"skip_signature": True}
    if not known and os.environ.get("STORAGE_EMULATOR_HOST") and not access.endpoint:
        # Google's own clients talk to an emulator without credentials; obstore writes with some or not at all.
        return options | {"bearer_token": "emulator"}
    if credentials is None or any(os.environ.get(name) for name in _OBSTORE_KEYS):
        return options
    if _kind(credentials) in _READ_BY_OBSTORE:
        return options | {"application_credentials": str(credentials)}
    return options | {"credential_provider": _google_auth(credentials)}


def _credentials_file() -> Path | None:
    if said := os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return Path(said).expanduser()
    home = os.environ.get("CLOUDSDK_CONFIG") or os.path.join(os.path.expanduser("~"), ".config", "gcloud")
    login = Path(home) / "application_default_credentials.json"
    return login if login.exists() else None


def _kind(path: Path) -> str:
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"The credentials of Google at {str(path)!r} cannot be read.",
            hint="Set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run `gcloud auth application-default login`.",
        ) from error
    return str(said.get("type", "")) if isinstance(said, dict) else ""


def _google_auth(path: Path) -> Any:
    try:
        from obstore.auth.google import GoogleCredentialProvider

        return GoogleCredentialProvider()
    except ImportError as error:
        raise MissingExtra(
            f"The credentials at {str(path)!r} are of a kind that google-auth reads: install it.",
            hint="pip install google-auth requests; or use the key of a service account.",
            extra="s3",
        ) from error

"""Who we are to Azure's storage: account, endpoint and credentials, in the order of Azure's tools.

A connection string; the account with its key or a shared access signature; a service principal, workload or managed
identity; `az login`. az://CONTAINER/PREFIX names the container, the environment names the account.
"""

from __future__ import annotations

import os
import shutil
from typing import Any
from urllib.parse import urlsplit

from brim.buckets.bucket_address import Access, checked_endpoint
from brim.buckets.certificates import trusted_beside
from brim.errors import InputError

# What everybody who runs the emulator has; its documentation says so.
_EMULATOR = {
    "AccountName": "devstoreaccount1",
    "AccountKey": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    "BlobEndpoint": "http://127.0.0.1:10000/devstoreaccount1",
}
_ACCOUNT = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME")
_KEY = ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY")
_SIGNATURE = ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY")
_IDENTITIES = ("AZURE_CLIENT_ID", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_STORAGE_TOKEN", "IDENTITY_ENDPOINT")


def azure_endpoint(access: Access) -> str | None:
    """Where requests go: Azure itself has an address for each account. None if no account is known."""
    if access.endpoint:
        return access.endpoint.rstrip("/")
    if said := _connection().get("BlobEndpoint"):
        return checked_endpoint(said, "BlobEndpoint of AZURE_STORAGE_CONNECTION_STRING")
    for name in ("AZURE_STORAGE_BLOB_ENDPOINT", "AZURE_STORAGE_ENDPOINT"):
        if said := os.environ.get(name):
            return checked_endpoint(said, name)
    account = _connection().get("AccountName") or _said(_ACCOUNT)
    return f"https://{account}.blob.core.windows.net" if account else None


def azure_options(access: Access, client: dict[str, Any]) -> dict[str, Any]:
    """What obstore's Azure store is made with; what its client is made with goes into `client`."""
    connection, endpoint = _connection(), azure_endpoint(access)
    options: dict[str, Any] = {"account_name": _account(connection, endpoint)}
    if endpoint is not None:
        options["endpoint"] = endpoint
        client["allow_http"] = endpoint.startswith("http://")
    if endpoint is None or endpoint.startswith("https://"):
        client |= trusted_beside()
    if access.anonymous:
        return options | {"skip_signature": True}
    if key := connection.get("AccountKey") or _said(_KEY):
        return options | {"account_key": key}
    if signature := connection.get("SharedAccessSignature") or _said(_SIGNATURE):
        return options | {"sas_key": signature.removeprefix("?")}
    if not _said(_IDENTITIES) and shutil.which("az") is not None:
        return options | {"use_azure_cli": True}
    return options  # obstore reads what names an identity, else asks for that of the machine


def _connection() -> dict[str, str]:
    said = os.environ.get("AZURE_STORAGE_CONNECTION_STRING") or ""
    pairs = [part.partition("=") for part in said.split(";") if part.strip()]
    if any(not equals for _, equals, _ in pairs):
        raise InputError(
            "AZURE_STORAGE_CONNECTION_STRING is not what Azure gives out: it has a part without '='.",
            hint="`az storage account show-connection-string` prints it.",
        )
    found = {name.strip(): value.strip() for name, _, value in pairs}
    if found.get("UseDevelopmentStorage", "").lower() == "true":
        return _EMULATOR
    if "AccountName" in found and "BlobEndpoint" not in found and "EndpointSuffix" in found:
        scheme = found.get("DefaultEndpointsProtocol", "https")
        found["BlobEndpoint"] = f"{scheme}://{found['AccountName']}.blob.{found['EndpointSuffix']}"
    return found


def _account(connection: dict[str, str], endpoint: str | None) -> str:
    account = connection.get("AccountName") or _said(_ACCOUNT) or _account_of(endpoint)
    if not account:
        raise InputError(
            "az:// needs the name of the storage account.",
            hint="Set AZURE_STORAGE_ACCOUNT, or AZURE_STORAGE_CONNECTION_STRING.",
        )
    return account


def _account_of(endpoint: str | None) -> str:
    """https://ACCOUNT.blob.core.windows.net, or http://HOST/ACCOUNT as emulators have it."""
    if endpoint is None:
        return ""
    parts = urlsplit(endpoint)
    host, path = parts.hostname or "", parts.path.strip("/")
    return path.partition("/")[0] or (host.partition(".")[0] if ".blob." in host else "")


def _said(names: tuple[str, ...]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")

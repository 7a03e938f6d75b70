"""Errors of storages for people: what is wrong, where, and what to do; without keys and without pages of XML."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from brim.errors import BrimError, DestinationError, DestinationUnavailableError, InputError, SourceError
from brim.storage.credentials import endpoint_of
from brim.storage.location import Location
from brim.storage.storage_error import StorageError

_ON_HUB = "Check its name. One that is private needs `hf auth login`, or HF_TOKEN, and the right to use it."
_CERTIFICATES = {"s3": "AWS_CA_BUNDLE"}
_CREDENTIALS = {
    "s3": "Credentials come from the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), AWS_PROFILE, or the "
    "role of the machine.",
    "gs": "Credentials come from GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or the role "
    "of the machine.",
    "hf": "Is the name right? A private or gated dataset needs `hf auth login`, or HF_TOKEN, and the right to read it.",
    "https": "Is the address right?",
    "http": "Is the address right?",
    "az": "Credentials come from AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY or "
    "AZURE_STORAGE_SAS_TOKEN, a service principal, the role of the machine, or `az login`.",
}


@contextmanager
def explained(address: Location, *, reading: bool = False) -> Iterator[None]:
    """Raise a StorageError of the block as brim's error."""
    try:
        yield
    except StorageError as error:
        raise explain(error, address, reading=reading) from None


def explain(error: StorageError, address: Location, *, reading: bool = False) -> BrimError:
    """Return the error that a user sees for a failed request to `address`."""
    wrong = SourceError if reading else DestinationError
    kind, status, code = error.kind, error.status, error.code
    bucket = f"{address.scheme}://{address.bucket}"
    credentials = _ON_HUB if address.on_hub else _CREDENTIALS[address.scheme]
    public = " A public bucket can be read with --anonymous." if reading else ""
    if kind == "no_container" and address.scheme == "hf":
        what = f"bucket {bucket}" if address.on_hub else f"dataset {address.repository} on the Hub"
        return wrong(f"There is no {what}, or the token may not see it (404).", hint=credentials)
    if kind == "no_revision":
        return wrong(f"{address.repository} has no branch or commit {address.revision!r} (404).", hint=credentials)
    if kind == "no_container":
        make = "" if reading else " Or make it; brim makes no buckets."
        return wrong(f"There is no bucket {bucket}.", hint=f"Check its name and the store (--endpoint-url).{make}")
    if kind == "no_credentials":
        return wrong(f"There are no credentials for {bucket}.", hint=credentials + public)
    if kind == "bad_credentials":
        return wrong(f"{bucket} does not accept the credentials ({code}).", hint=credentials)
    if kind == "denied":
        what = "read" if reading else "write to"
        hint = credentials if address.access.anonymous or address.on_hub else credentials + public
        return wrong(f"You may not {what} {address} ({code or status or 'refused'}).", hint=hint)
    if kind == "other_region":
        return wrong(f"{bucket} is in another region.", hint="Set AWS_REGION to the one it is in.")
    if kind == "bad_name":
        return wrong(
            f"{bucket} holds a key that obstore cannot name: {error.detail!r}.",
            hint="Rename it: keys with control characters, empty names (//), '.' or '..' cannot be read. Or give a "
            "prefix that does not hold it.",
            key=error.detail,
        )
    if kind == "upload_gone":
        return DestinationUnavailableError(
            f"An upload to {address} was aborted by somebody else, or by a rule of the bucket.",
            hint="Run the same command to continue.",
        )
    if kind == "missing":
        return wrong(f"There is nothing at {address}.", hint=credentials if address.scheme == "hf" else "")
    if kind == "changed":
        return DestinationUnavailableError(
            f"{address} was changed by somebody else meanwhile.", hint="Run the same command again."
        )
    endpoint = endpoint_of(address)
    if kind == "certificate":
        return wrong(
            f"The certificate of {endpoint or bucket} is not one that this machine trusts.",
            hint=f"Set {_CERTIFICATES.get(address.scheme, 'SSL_CERT_FILE')} to a file with the certificate of the "
            "authority that signed it.",
        )
    if kind in ("offline", "no_connection"):
        return _explain_connection(error, address)
    if error.is_transient:
        silent = "does not answer as such a store does" if error.detail == "no store" else "does not answer"
        what = f"answered {status}{f' ({code})' if code else ''}" if status else silent
        where = f" at {endpoint}" if endpoint else ""
        where += ", which may speak http only," if error.detail == "http only" else ""
        return DestinationUnavailableError(
            f"{bucket}{where} {what}, even after several retries.",
            hint="Run the same command to continue; finished work is kept.",
        )
    hint = f"Is {endpoint} the address of such a store?" if endpoint and not code else ""
    return wrong(f"{bucket} refuses the request ({code or status or error.detail}).", hint=hint)


def _explain_connection(error: StorageError, address: Location) -> BrimError:
    if error.kind == "offline":
        return InputError(
            "huggingface_hub is in offline mode, so the Hub cannot be reached.", hint="Unset HF_HUB_OFFLINE."
        )
    host, _, cause = error.detail.partition(" ")
    return DestinationUnavailableError(
        f"The connection to {host} failed while brim read {address}: {cause}.",
        hint="Check the network, then run the same command again; finished work is kept.",
    )

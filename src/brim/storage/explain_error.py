"""Errors of storages for users: the fault, the location and a hint; without keys and without pages of XML."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from brim.errors import BrimError, DestinationError, DestinationUnavailableError, InputError, SourceError
from brim.storage.credentials import endpoint_of
from brim.storage.location import Location
from brim.storage.storage_error import StorageError

Action = Literal["read", "write"]
_HUB_BUCKET = "Check its name. One that is private needs `hf auth login`, or HF_TOKEN, and the right to use it."
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


_STORE_HINT = "Run the same command to continue; finished work is kept."
# Per kind: the error, and what to do.
_TEXTS = {
    "no_container": ("The bucket {bucket} does not exist.", "Check its name and the store (--endpoint-url).{create}"),
    "no_container hf": ("{no_container}, or the token may not see it (404).", "{credentials}"),
    "no_revision": ("{location.repo} has no branch or commit {location.revision!r} (404).", "{credentials}"),
    "no_credentials": ("Credentials for {bucket} are missing.", "{credentials}{public}"),
    "bad_credentials": ("{bucket} does not accept the credentials ({error.code}).", "{credentials}"),
    "denied": ("You may not {action} {location} ({reason}).", "{credentials}{public}"),
    "other_region": ("{bucket} is in another region.", "Set AWS_REGION to the one it is in."),
    "bad_name": (
        "{bucket} holds a key that obstore cannot name: {error.detail!r}.",
        "Rename it: keys with control characters, empty names (//), '.' or '..' cannot be read. Or give a prefix that "
        "does not hold it.",
    ),
    "missing": ("There is nothing at {location}.", ""),
    "missing hf": ("There is nothing at {location}.", "{credentials}"),
    "certificate": (
        "The certificate of {server} is not one that this machine trusts.",
        "Set {authorities} to a file with the certificate of the authority that signed it.",
    ),
    "refused": ("{bucket} refuses the request ({reason}).", "{is_store}"),
    "offline": ("huggingface_hub is in offline mode, so the Hub cannot be reached.", "Unset HF_HUB_OFFLINE."),
    "upload_gone": (
        "An upload to {location} was aborted by another process, or by a rule of the bucket.",
        "Run the same command to continue.",
    ),
    "changed": ("{location} was changed by another process.", "Run the same command again."),
    "no_connection": (
        "The connection to {host} failed while brim read {location}: {cause}.",
        "Check the network, then run the same command again; finished work is kept.",
    ),
    "transient": ("{bucket}{address} {answer}, even after several retries.", _STORE_HINT),
}
_RESUMABLE = ("upload_gone", "changed", "no_connection", "transient")


@contextmanager
def explain_errors(location: Location, action: Action = "write") -> Iterator[None]:
    """Raise a StorageError of the block as brim's error."""
    try:
        yield
    except StorageError as error:
        raise explain(error, location, action) from None


def explain(error: StorageError, location: Location, action: Action = "write") -> BrimError:
    """Return the error that a user sees for a failed request to a location."""
    is_read, bucket, status = action == "read", location.root, error.status
    kind = error.kind if error.kind in _TEXTS else "transient" if error.is_transient else "refused"
    kind = "transient" if kind == "refused" and error.is_transient else kind
    names_server = kind in ("certificate", "refused", "transient") and not location.is_repository
    server = endpoint_of(location) if names_server else None
    host, _, cause = error.detail.partition(" ")
    silent = "does not answer" + (" as such a store does" if error.detail == "no store" else "")
    values = {
        "location": location,
        "error": error,
        "bucket": bucket,
        "no_container": f"The bucket {bucket} does not exist"
        if location.is_hub_bucket
        else f"There is no dataset {location.repo} on the Hub",
        "credentials": _HUB_BUCKET if location.is_hub_bucket else _CREDENTIALS.get(location.scheme, ""),
        "public": " A public bucket can be read with --anonymous."
        if is_read and not (location.access.anonymous or location.is_hub_bucket)
        else "",
        "create": "" if is_read else " Or make it; brim makes no buckets.",
        "action": "read" if is_read else "write to",
        "reason": error.code or status or ("refused" if kind == "denied" else error.detail),
        "server": server or bucket,
        "authorities": "AWS_CA_BUNDLE" if location.scheme == "s3" else "SSL_CERT_FILE",
        "is_store": f"Is {server} the address of such a store?" if server and not error.code else "",
        "host": host,
        "cause": cause,
        "address": (f" at {server}" if server else "")
        + (", which may speak http only," if error.detail == "http only" else ""),
        "answer": f"answered {status}{f' ({error.code})' if error.code else ''}" if status else silent,
    }
    text, hint = (part.format(**values) for part in _TEXTS.get(f"{kind} {location.scheme}", _TEXTS[kind]))
    facts = {"key": error.detail} if kind == "bad_name" else {}
    if kind == "offline":
        return InputError(text, hint=hint)
    if kind in _RESUMABLE:
        return DestinationUnavailableError(text, hint=hint)
    return (SourceError if is_read else DestinationError)(text, hint=hint, **facts)

"""obstore's errors as brim's: what is wrong, where, what to do; without keys and without pages of XML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from brim.buckets.bucket_address import BucketAddress
from brim.buckets.bucket_client import endpoint_of
from brim.errors import BrimError, DestinationError, SinkFailed, SourceError
from brim.state.retry import may_pass


class WebFailed(Exception):
    """A request to the Hub or another server failed: "status code: N", or that there was no answer."""


_STATUS = re.compile(r"status code: (\d{3}) ?([A-Za-z ]*)")
_CODE = re.compile(r"<Code>([^<]{1,60})</Code>")
_BAD_KEY = re.compile(r'object with invalid path: Error parsing Path "(.*?)": ', re.DOTALL)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted")
_NO_REPO = "RepoNotFound"  # also said of a bucket of the Hub
_ON_HUB = "Check its name. One that is private needs `hf auth login`, or HF_TOKEN, and the right to use it."
_ROLES = ("169.254.169.254", "metadata.google.internal")  # where the role of a machine is asked for
_BAD_CREDENTIALS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "AuthenticationFailed",
    "InvalidAuthenticationInfo",
}
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


def is_object_error(error: BaseException) -> bool:
    """Whether an error came from obstore, or is that of a web server."""
    return isinstance(error, WebFailed) or type(error).__module__.startswith("obstore") or _is_not_found(error)


def _is_not_found(error: BaseException) -> bool:
    return isinstance(error, FileNotFoundError) and "Object at location" in str(error)


def status_of(error: BaseException) -> int | None:
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def code_of(error: BaseException) -> str:
    """What S3 calls the error, like NoSuchBucket."""
    match = _CODE.search(str(error))
    return match[1] if match else ""


def is_missing(error: BaseException) -> bool:
    missing = isinstance(error, WebFailed) and status_of(error) in (404, 410)
    return missing or _is_not_found(error) or type(error).__name__ == "NotFoundError"


def is_changed(error: BaseException) -> bool:
    """Whether a condition of a request did not hold."""
    return type(error).__name__ in ("PreconditionError", "AlreadyExistsError", "NotModifiedError")


def is_without_range(error: BaseException) -> bool:
    """Whether all of an object was answered to a request for a range of it."""
    return "NotPartial" in str(error)


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if not is_object_error(error) or is_missing(error) or is_changed(error):
        return False
    status = status_of(error)
    if status is not None:
        return may_pass(status, code_of(error))
    return type(error).__name__ in ("GenericError", "WebFailed")  # no answer at all: cut, refused, too slow


@contextmanager
def explained(address: BucketAddress, *, reading: bool = False) -> Iterator[None]:
    """Errors of obstore inside become brim's."""
    try:
        yield
    except Exception as error:
        if isinstance(error, BrimError) or not is_object_error(error):
            raise
        raise explain(error, address, reading=reading) from None  # the original holds addresses and answers


def _missing_on_hub(code: str, address: BucketAddress) -> str | None:
    """What the Hub says that it does not have."""
    repo, _, revision = address.bucket.removeprefix("datasets/").partition("@")
    if code == _NO_REPO:
        what = f"bucket hf://{address.bucket}" if address.on_hub else f"dataset {repo} on the Hub"
        return f"There is no {what}, or the token may not see it (404)."
    if code == "RevisionNotFound":
        return f"{repo} has no branch or commit {revision or 'main'!r} (404)."
    return None


def explain(error: BaseException, address: BucketAddress, *, reading: bool = False) -> BrimError:
    wrong = SourceError if reading else DestinationError
    status, code, kind = status_of(error), code_of(error), type(error).__name__
    bucket = f"{address.scheme}://{address.bucket}"
    credentials = _ON_HUB if address.on_hub else _CREDENTIALS[address.scheme]
    if address.scheme == "hf" and (found := _missing_on_hub(code, address)) is not None:
        return wrong(found, hint=credentials)
    if code in _NO_BUCKET or (is_missing(error) and any(name in str(error) for name in _NO_BUCKET)):
        make = "" if reading else " Or make it; brim makes no buckets."
        return wrong(f"There is no bucket {bucket}.", hint=f"Check its name and the store (--endpoint-url).{make}")
    if any(host in str(error) for host in _ROLES):
        anonymous = " A public bucket can be read with --anonymous." if reading else ""
        return wrong(f"There are no credentials for {bucket}.", hint=credentials + anonymous)
    if code in _BAD_CREDENTIALS:
        return wrong(f"{bucket} does not accept the credentials ({code}).", hint=credentials)
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403):
        what = "read" if reading else "write to"
        closed = reading and not address.access.anonymous and not address.on_hub
        anonymous = " A public bucket can be read with --anonymous." if closed else ""
        return wrong(f"You may not {what} {address} ({code or status or 'refused'}).", hint=credentials + anonymous)
    if status in (301, 307) or code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        return wrong(f"{bucket} is in another region.", hint="Set AWS_REGION to the one it is in.")
    if (bad := _BAD_KEY.search(str(error))) is not None:
        return wrong(
            f"{bucket} holds a key that obstore cannot name: {bad[1]!r}.",
            hint="Rename it: keys with control characters, empty names (//), '.' or '..' cannot be read. Or give a "
            "prefix that does not hold it.",
            key=bad[1],
        )
    if code == "NoSuchUpload":
        return SinkFailed(
            f"An upload to {address} was aborted by somebody else, or by a rule of the bucket.",
            hint="Run the same command to continue.",
        )
    if is_missing(error):
        return wrong(f"There is nothing at {address}.", hint=credentials if address.scheme == "hf" else "")
    if is_changed(error):
        return SinkFailed(f"{address} was changed by somebody else meanwhile.", hint="Run the same command again.")
    endpoint = endpoint_of(address)
    if "InvalidCertificate" in str(error):
        return wrong(
            f"The certificate of {endpoint or bucket} is not one that this machine trusts.",
            hint=f"Set {_CERTIFICATES.get(address.scheme, 'SSL_CERT_FILE')} to a file with the certificate of the "
            "authority that signed it.",
        )
    if is_passing(error):
        what = f"answered {status}{f' ({code})' if code else ''}" if status else "does not answer"
        where = f" at {endpoint}" if endpoint else ""
        if "InvalidContentType" in str(error):
            where += ", which may speak http only,"
        return SinkFailed(
            f"{bucket}{where} {what}, although it was asked again and again.",
            hint="Run the same command to continue; what is finished stays finished.",
        )
    hint = f"Is {endpoint} the address of such a store?" if endpoint and not code else ""
    return wrong(f"{bucket} refuses the request ({code or status or kind}).", hint=hint)

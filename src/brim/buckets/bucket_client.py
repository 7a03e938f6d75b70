"""The one place that knows obstore: its stores (endpoint, credentials, patience), its errors, its requests.

Errors become brim's: what is wrong, where, what to do; without keys and without pages of XML. All requests wait in one
thread, where they can be dropped at any time.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from brim.buckets.accounts import (
    aws_endpoint,
    aws_options,
    azure_endpoint,
    azure_options,
    google_endpoint,
    google_options,
)
from brim.buckets.bucket_address import Access, BucketAddress
from brim.errors import BrimError, DestinationError, InputError, SinkFailed, SourceError
from brim.extras import missing
from brim.memory.release import keep_heap_small
from brim.state.retry import Retry, abandoned_when, look, may_pass

if TYPE_CHECKING:
    import asyncio

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
    keep_heap_small(large_bytes=None)  # before obstore's threads have heaps of their own, which would each grow
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


class WebFailed(Exception):
    """A request to the Hub or another server failed: "status code: N", or that there was no answer."""


class AnotherObject(WebFailed):
    """What a store that heeds conditions would have refused: something else is at the key."""


_STATUS = re.compile(r"status code: (\d{3}) ?([A-Za-z ]*)")
_CODE = re.compile(r"<Code>([^<]{1,60})</Code>")
_BAD_KEY = re.compile(r'object with invalid path: (?:Error parsing )?Path "(.*?)"(?:: | contained )', re.DOTALL)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted")
_OTHER_REGION = "redirect without LOCATION"  # what obstore says of Amazon's answer to that
_NO_STORE = ("Got invalid ", "Unable to extract metadata")  # what it says of answers that no store gives
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
    names = ("PreconditionError", "AlreadyExistsError", "NotModifiedError")
    return isinstance(error, AnotherObject) or type(error).__name__ in names


def is_without_range(error: BaseException) -> bool:
    """Whether all of an object was answered to a request for a range of it."""
    return "NotPartial" in str(error)


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if not is_object_error(error) or is_missing(error) or is_changed(error) or _OTHER_REGION in str(error):
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
    moved = code in ("PermanentRedirect", "AuthorizationHeaderMalformed") or _OTHER_REGION in str(error)
    if moved or status in (301, 307):
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
        told = " as such a store does" if any(text in str(error) for text in _NO_STORE) else ""
        what = f"answered {status}{f' ({code})' if code else ''}" if status else f"does not answer{told}"
        where = f" at {endpoint}" if endpoint else ""
        if "InvalidContentType" in str(error):
            where += ", which may speak http only,"
        return SinkFailed(
            f"{bucket}{where} {what}, although it was asked again and again.",
            hint="Run the same command to continue; what is finished stays finished.",
        )
    hint = f"Is {endpoint} the address of such a store?" if endpoint and not code else ""
    return wrong(f"{bucket} refuses the request ({code or status or kind}).", hint=hint)


_WAITS_S = (0.2, 1.0, 3.0)


def tries() -> Retry:
    """Of one request. What obstore has asked for in vain until its patience ended is not asked for again."""
    return Retry(_WAITS_S, is_passing, patience_s=patience_s() / 2)


T = TypeVar("T")

_CHECK_S = 0.2
_DROP_S, _REST_S = 5.0, 2.0
_LOOKS, _LOOK_S = 4, 0.01
_LOOP_LOCK = threading.Lock()
_LOOP: tuple[int, asyncio.AbstractEventLoop] | None = None
_BESIDE = min(32, (os.cpu_count() or 1) + 4)  # threads that wait for servers, at a time
_ROOM: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}


def submit(request: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a request; cancel the future to drop it."""
    import asyncio

    return asyncio.run_coroutine_threadsafe(request, _loop())


def call_soon(function: Callable[[T], object], given: T) -> None:
    """Have a function called on the thread of the requests."""
    _loop().call_soon_threadsafe(function, given)


def wait(request: Coroutine[Any, Any, T]) -> T:
    """What a request brings. obstore's own waiting does not hear Ctrl-C until it is over; this does."""
    return result_of(submit(request))


def result_of(future: Future[T]) -> T:
    """What a request that was started brings; it is dropped if the waiting ends."""
    try:
        while True:
            try:
                return future.result(_CHECK_S)
            except NotYet:
                if future.done():
                    raise
                look()
    finally:
        future.cancel()


async def beside(function: Callable[..., T], *given: Any) -> T:
    """What a function brings that waits for a server in its own way, in a thread, a few at a time.

    Python waits for the threads of asyncio.to_thread before it ends; for these it does not: the server may be silent.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    brought: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: Exception | None) -> None:
        if brought.cancelled():
            return
        if error is not None:
            brought.set_exception(error)
        else:
            brought.set_result(cast(T, result))

    def check() -> None:
        if brought.cancelled():
            raise CancelledError

    def run() -> None:
        try:
            with abandoned_when(check):
                told: tuple[T | None, Exception | None] = (function(*given), None)
        except Exception as error:  # noqa: BLE001  whoever waits for it gets it
            told = (None, error)
        loop.call_soon_threadsafe(tell, *told)

    async with _ROOM[loop]:
        threading.Thread(target=run, name="beside", daemon=True).start()
        return await brought


def _loop() -> asyncio.AbstractEventLoop:
    import asyncio

    global _LOOP
    with _LOOP_LOCK:
        if _LOOP is None or _LOOP[0] != os.getpid():  # a fork has the loop and not its thread
            loop = asyncio.new_event_loop()
            _ROOM[loop] = asyncio.Semaphore(_BESIDE)
            threading.Thread(target=loop.run_forever, name="objects", daemon=True).start()
            _LOOP = (os.getpid(), loop)
            atexit.register(_end, *_LOOP)
        return _LOOP[1]


def _end(process: int, loop: asyncio.AbstractEventLoop) -> None:
    """Drop what is under way before Python ends: obstore's threads would come back to it, and abort the process."""
    import asyncio

    async def drop() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    if process != os.getpid():
        return
    try:
        asyncio.run_coroutine_threadsafe(drop(), loop).result(_DROP_S)
    except NotYet:
        return
    _let_threads_rest()


def _let_threads_rest() -> None:
    """The threads are done with their last answers a moment after those were given: wait until all of them sleep."""
    quiet, until = 0, time.monotonic() + _REST_S
    while quiet < _LOOKS and time.monotonic() < until:
        time.sleep(_LOOK_S)  # without Python's lock, which is what they want
        quiet = quiet + 1 if _others_sleep() else 0


def _others_sleep() -> bool:
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/stat", encoding="latin-1") as file:
                if int(thread) != threading.get_native_id() and file.read().rpartition(")")[2].split()[0] == "R":
                    return False
    except OSError:  # a thread that has just ended; another system than Linux
        pass
    return True

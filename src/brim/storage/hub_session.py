"""How brim uses huggingface_hub: with time limits, without its log lines, and its errors as brim's.

The library's own session waits forever for a stalled connection, and its warnings show pre-signed URLs.
Everything that it raises becomes one of brim's errors here and nowhere else.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from brim.errors import BrimError, DestinationError, DestinationUnavailableError, InputError
from brim.records import dataclass
from brim.redact import hide_values
from brim.state.retry import CONFLICTS, Retry, asked_s, capped_wait, interruptible, may_pass, pause
from brim.storage.hub_private import client_factory
from brim.storage.storage import patience_s
from brim.storage.storage_error import StorageError

T = TypeVar("T")
Note = Callable[[str], None]

_LOGGER = "huggingface_hub"
_CONNECT_S, _STALL_S, _ANSWER_S = 30.0, 60.0, 300.0  # an answer may take long: merging thousands of files does
_MOST_STALL_S = 7 * 86400.0
_WAITS_S = (1.0, 2.0, 4.0, 8.0, 8.0)
_URL = re.compile(r"(https?://[^\s/'\"]+)[^\s'\"]*")
_CODE = re.compile(r"<Code>([^<]{1,60})</Code>")
_QUOTA = re.compile(r"storage|quota|billing|upgrade|payment|subscri", re.IGNORECASE)
_TOKEN = re.compile(r"\bhf_\w+|Bearer \S+")
_UNREADABLE = (KeyError, IndexError, TypeError, AttributeError, ValueError)
_READERS = ("huggingface_hub", "json", "httpx", "httpx2")
_LOGIN = "Log in with `hf auth login`, or set HF_TOKEN to a"
_CONTINUE = "Run the same command to continue; nothing that was sent is lost."


def scrubbed(text: str) -> str:
    """Return a foreign message without the paths of URLs, which may be signed, and without tokens."""
    return _TOKEN.sub("(token)", _URL.sub(r"\1", " ".join(hide_values(text, os.environ).split())))


@dataclass(frozen=True, slots=True, eq=False)
class _User:
    """A job that uses the library: where notes go, and what raises if it was asked to stop."""

    note: Note
    check: Callable[[], None]


# The library has one client and one logger for the whole process. The first user changes them, the last one
# changes them back; closing the client in between would cut the uploads of other threads.
_LOCK = threading.Lock()
_USERS: list[_User] = []
_UNDO = ExitStack()


class _Notes(logging.Handler):
    """Hand the library's warnings on as notes: a request is retried, the rate limit is reached."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._last = ""

    def emit(self, record: logging.LogRecord) -> None:
        text = scrubbed(record.getMessage())
        if text != self._last and "binary IO buffer" not in text:
            self._last = text
            for user in _USERS[-1:]:
                user.note(f"the Hub: {text}")


@contextmanager
def hub_session(note: Note, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Give the library's requests time limits, and its warnings to `note`, in this block.

    `check` is called during a wait that the Hub asked for, and may raise to stop it.
    """
    user = _User(note, check)
    with _LOCK:
        if not _USERS:
            _change_library(patience_s(_MOST_STALL_S, _STALL_S))
        _USERS.append(user)
    try:
        yield
    finally:
        with _LOCK:
            _USERS.remove(user)
            if not _USERS:
                _UNDO.close()


def _change_library(stall_s: float) -> None:
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    factory = client_factory()
    answer_s = stall_s if stall_s < _STALL_S else max(_ANSWER_S, stall_s)
    limits = {"connect": min(_CONNECT_S, stall_s), "read": answer_s, "write": stall_s, "pool": None}

    def limit_time(request: Any) -> None:
        # In each request, because the library makes many of them without any limit, whatever its client has.
        timeout = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {name: timeout.get(name) or limit_s for name, limit_s in limits.items()}

    def make_client() -> Any:
        client = factory()
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], limit_time],
            "response": [*hooks["response"], _wait_as_asked],
        }
        return client

    logger = logging.getLogger(_LOGGER)
    before, is_quiet = (logger.handlers[:], logger.propagate), are_progress_bars_disabled()

    def undo() -> None:
        logger.handlers, logger.propagate = before
        if not is_quiet:
            enable_progress_bars()
        set_client_factory(factory)

    _UNDO.callback(undo)
    set_client_factory(make_client)
    logger.handlers, logger.propagate = [_Notes()], False
    disable_progress_bars()


def _wait_as_asked(response: Any) -> None:
    """Wait as long as an answer asks for: the library would sleep where no request to stop reaches it."""
    is_transient = response.status_code >= 400 and may_pass(response.status_code)
    wait_s = asked_s(response.status_code, response.headers) if is_transient else 0.0
    if wait_s > max(_WAITS_S):
        response.read()
        wait_s, shown = capped_wait(wait_s)
        logging.getLogger(_LOGGER).warning("%s; waiting %s", response.status_code, shown)
        _wait(wait_s)
        for name in ("Retry-After", "RateLimit"):
            response.headers.pop(name, None)


def _wait(seconds: float) -> None:
    def check() -> None:
        for user in _USERS[-1:]:
            user.check()

    pause(seconds, check)


def status_of(error: BaseException) -> int | None:
    """Return the status that the Hub answered, if an error is about an answer."""
    if isinstance(error, StorageError):
        return error.status
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """A refusal: by the Hub, with its own codes, or by the storage that it redirects to (not `by_hub`)."""

    status: int
    code: str
    message: str
    by_hub: bool


def answer_of(error: BaseException) -> HubAnswer | None:
    """Return the answer that an error is about, if there was one."""
    status = status_of(error)
    if status is None:
        return None
    if isinstance(error, StorageError):
        return HubAnswer(status, error.code, error.code, by_hub=True)
    response: Any = error.response  # type: ignore[attr-defined]
    code = str(response.headers.get("X-Error-Code") or "")
    try:
        text = str(response.text)
    except Exception:  # noqa: BLE001  a stream that was never read: its status is all that is known
        text = ""
    if not code and (match := _CODE.search(text)):
        code = match[1]
    message = scrubbed(getattr(error, "server_message", None) or response.headers.get("X-Error-Message") or "")
    message = code if "<Code>" in message else message  # and not a page of XML
    from huggingface_hub import constants

    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    by_hub = urlsplit(str(getattr(response, "url", ""))).netloc == urlsplit(endpoint).netloc
    return HubAnswer(status, code, message, by_hub)


def is_connection_error(error: BaseException) -> bool:
    """Return whether a connection was cut, stalled or refused."""
    if isinstance(error, StorageError):
        return error.kind == "no_connection"
    from huggingface_hub.errors import HfHubHTTPError

    http = sys.modules[HfHubHTTPError.__bases__[0].__module__.partition(".")[0]]  # httpx, whatever its name is now
    return isinstance(error, http.TransportError) and not isinstance(error, http.UnsupportedProtocol)


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed later. After a conflict it is another request."""
    answer = answer_of(error)
    if answer is None:
        return is_connection_error(error)
    return answer.status not in CONFLICTS and may_pass(answer.status, answer.code)


def hub_tries() -> Retry:
    """Return the tries of a request that the library makes once."""
    return Retry(_WAITS_S, is_transient, wait=wait_after)


def ask_again(call: Callable[[], T]) -> T:
    """Make a request with the library, and repeat it while it fails for a transient reason: the library tries once."""
    return hub_tries().call(lambda: ask_hub(call))


class UnexpectedAnswerError(DestinationUnavailableError):
    """The library could not read an answer, although its status means success."""


def unexpected(error: Exception) -> UnexpectedAnswerError:
    return UnexpectedAnswerError(
        f"The Hub answered with something else than it should ({type(error).__name__}: {scrubbed(str(error))}).",
        hint="Does HF_ENDPOINT, or a proxy, lead to another server? If not, run the same command to continue.",
    )


def ask_hub(call: Callable[[], T]) -> T:
    """Make a request with the library, which a stop interrupts. UnexpectedAnswerError if it cannot read the answer.

    Another server may answer in the Hub's place, such as the login page of a network.
    """
    from huggingface_hub.errors import HFValidationError

    try:
        return interruptible(call)
    except _UNREADABLE as error:
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        module = str(frame.tb_frame.f_globals.get("__name__")) if frame is not None else ""
        is_meant = isinstance(error, HFValidationError) or "README" in str(error) or status_of(error) is not None
        if is_meant or module.partition(".")[0] not in _READERS:
            raise
        raise unexpected(error) from error


def wait_after(error: BaseException, wait_s: float) -> None:
    """Wait before the next try, as long as the answer asks for, and note it."""
    response = getattr(error, "response", None)
    asked_for_s = 0.0 if response is None else asked_s(response.status_code, response.headers)
    wait_s, shown = capped_wait(max(wait_s, asked_for_s))
    failure = status_of(error) or type(error).__name__
    logging.getLogger(_LOGGER).warning("%s; trying again in %s", failure, shown)
    _wait(wait_s)


@contextmanager
def explain_hub_errors(repo: str, *, started: bool, reading: bool = False) -> Iterator[None]:
    """Raise the library's errors as brim's. `started`: something may have been sent already."""
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except BrimError:
        raise
    except LocalTokenNotFoundError as error:
        raise DestinationError("The token for the Hub is missing.", hint=f"{_LOGIN} token that may write.") from error
    except HFValidationError as error:
        raise InputError(f"The Hub does not take this name: {scrubbed(str(error))}") from error
    except Exception as error:
        if isinstance(error, OfflineModeIsEnabled) or getattr(error, "kind", "") == "offline":
            raise InputError(
                "huggingface_hub is in offline mode, so the Hub cannot be reached.", hint="Unset HF_HUB_OFFLINE."
            ) from error
        explanation = _explain(error, repo, started, reading)
        if explanation is None:
            raise
        raise explanation from (None if isinstance(error, StorageError) else error)


def _host_of(error: Exception) -> str:
    """Return the host of the request that failed, in parentheses; empty if the error does not name it."""
    if isinstance(error, StorageError):  # its detail is the host and the cause
        return f" ({error.detail.partition(' ')[0]})" if error.detail else ""
    try:
        url = str(getattr(getattr(error, "request", None), "url", ""))
    except RuntimeError:  # httpx has no request for this error
        return ""
    host = urlsplit(url).netloc.rpartition("@")[2]
    return f" ({host})" if host else ""


def _explain(error: Exception, repo: str, started: bool, reading: bool) -> BrimError | None:
    from huggingface_hub import get_token

    text = scrubbed(str(error))
    answer = answer_of(error)
    if answer is not None:
        # Without a token, the Hub answers 401 for everything that it hides.
        if reading and (answer.status == 403 or (answer.status == 401 and get_token() is None)):
            reader = "this token" if answer.status == 403 else "anyone without a token"
            return DestinationError(
                f"The Hub does not let {reader} read {repo} ({answer.status}).",
                hint="Check its name, log in with `hf auth login`, and if it is gated, ask for access on its page.",
            )
        return explained_answer(answer, repo, started)
    if is_connection_error(error):
        cause = scrubbed(error.detail.partition(" ")[2]) if isinstance(error, StorageError) else text
        return DestinationUnavailableError(
            f"The connection to the Hub{_host_of(error)} failed: {cause or type(error).__name__}.",
            hint="Run it again." if reading else _CONTINUE,
        )
    if type(error).__name__ == "UnsupportedProtocol":
        return InputError(f"HF_ENDPOINT is not the address of a Hub: {text}")
    if isinstance(error, ValueError) and "README" in str(error):
        return DestinationError(f"The Hub refuses the card: {text}", hint="Fix its YAML at the top.")
    if isinstance(error, StorageError):
        return unexpected(error.__cause__ if isinstance(error.__cause__, Exception) else error)
    return None


def explained_answer(answer: HubAnswer, repo: str, started: bool = True) -> BrimError:
    """Return what an answer means: exit code 5 if it is transient, 2 with a hint for all others."""
    status, message = answer.status, answer.message.rstrip(".") or answer.code or "no reason given"
    suffix, hint = "; nothing that was sent is lost" if started else "", ""
    if may_pass(status, answer.code):
        return DestinationUnavailableError(f"The Hub answered {status}: {message}.", hint=_CONTINUE)
    if status == 404:
        return _missing(answer, repo)
    if not answer.by_hub:
        text = f"The Hub's storage refuses uploads to {repo} ({status}: {message}), with new addresses too{suffix}."
        hint = (
            "If a shard takes longer to send than its address lasts, cut smaller ones with --shard-size, or use "
            "--upload-with=xet."
        )
        hint = "Set this machine's clock." if answer.code == "RequestTimeTooSkewed" else hint
    elif status == 401:
        text = f"The Hub does not accept the token (401){suffix}."
        hint = f"{_LOGIN} valid token."
    elif status == 402 or (status == 403 and _QUOTA.search(message)):
        text = f"The Hub has no room for more in {repo} ({status}: {message}){suffix}."
        hint = "Make room there, have its owner get more, or publish to another owner."
    elif status == 403:
        reason = "" if answer.message in ("", "no reason given") else f": {message}"
        text = f"The token has no right to write to {repo} (403{reason}){suffix}."
        hint = f"Use a token with write access to {repo}."
    else:
        text = f"The Hub refuses the request for {repo} ({status}: {message}){suffix}."
    return DestinationError(text, hint=hint)


def _missing(answer: HubAnswer, repo: str) -> BrimError:
    """Return the error for a missing repository, revision, file or route, as far as the Hub states it."""
    message = answer.message or answer.code or "no reason given"
    text, hint = {
        "RepoNotFound": (
            f"There is no dataset {repo} on the Hub, or the token may not see it (404).",
            "Check its name and the token's rights.",
        ),
        "RevisionNotFound": (
            f"{repo} has no such branch or commit (404: {message}).",
            "Check what follows the @ of the address.",
        ),
        "EntryNotFound": (f"{repo} no longer has a file that it listed (404: {message}).", ""),
    }.get(
        answer.code,
        (
            f"The server does not know what it was asked for {repo} (404: {answer.message or 'no reason given'}).",
            "Is HF_ENDPOINT the address of a Hub, and of one that has this?",
        ),
    )
    return DestinationError(text, hint=hint)

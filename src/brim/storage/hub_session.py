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
_ROOM = re.compile(r"storage|quota|billing|upgrade|payment|subscri", re.IGNORECASE)
_TOKEN = re.compile(r"\bhf_\w+|Bearer \S+")


def scrubbed(text: str) -> str:
    """A foreign message without URLs' paths (they may be signed) and tokens."""
    return _TOKEN.sub("(token)", _URL.sub(r"\1", " ".join(hide_values(text, os.environ).split())))


@dataclass(frozen=True, slots=True, eq=False)
class _User:
    """Someone who uses the library: whom to tell, and what raises if someone asked to stop."""

    note: Note
    check: Callable[[], None]


# The library has one client and one logger for the whole process. The first user changes them, the last one
# changes them back; closing the client in between would cut what other threads are sending.
_LOCK = threading.Lock()
_USERS: list[_User] = []
_UNDO = ExitStack()


class _Notes(logging.Handler):
    """The library's warnings (a request is tried again, the rate limit is reached) as notes."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said = ""

    def emit(self, record: logging.LogRecord) -> None:
        text = scrubbed(record.getMessage())
        if text != self._said and "binary IO buffer" not in text:
            self._said = text
            for user in _USERS[-1:]:
                user.note(f"the Hub: {text}")


@contextmanager
def hub_session(note: Note, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """While this is open, the library's requests have time limits and its warnings go to `note`.

    `check` is called while a wait goes on that the Hub asked for, and may raise to end it.
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

    def limit(request: Any) -> None:
        # In each request, because the library asks for many of them without any limit, whatever its client has.
        asked = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {name: asked.get(name) or limit_s for name, limit_s in limits.items()}

    def timed() -> Any:
        client = factory()
        hooks = client.event_hooks
        client.event_hooks = {"request": [*hooks["request"], limit], "response": [*hooks["response"], _wait_as_asked]}
        return client

    logger = logging.getLogger(_LOGGER)
    before, quiet = (logger.handlers[:], logger.propagate), are_progress_bars_disabled()

    def undo() -> None:
        logger.handlers, logger.propagate = before
        if not quiet:
            enable_progress_bars()
        set_client_factory(factory)

    _UNDO.callback(undo)
    set_client_factory(timed)
    logger.handlers, logger.propagate = [_Notes()], False
    disable_progress_bars()


def _wait_as_asked(response: Any) -> None:
    """Wait here as long as an answer asks for: the library would sleep where no request to stop reaches it."""
    passing = response.status_code >= 400 and may_pass(response.status_code)
    wait_s = asked_s(response.status_code, response.headers) if passing else 0.0
    if wait_s > max(_WAITS_S):
        response.read()
        wait_s, said = capped_wait(wait_s)
        logging.getLogger(_LOGGER).warning("%s; waiting %s", response.status_code, said)
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
    """A refusal: by the Hub, whose codes are words of its own, or by the storage that it sends us to (`by_hub`)."""

    status: int
    code: str
    said: str
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
    except Exception:  # noqa: BLE001  a stream that was never read: its status says what there is to say
        text = ""
    if not code and (found := _CODE.search(text)):
        code = found[1]
    said = scrubbed(getattr(error, "server_message", None) or response.headers.get("X-Error-Message") or "")
    said = code if "<Code>" in said else said  # and not a page of XML
    return HubAnswer(status, code, said, _is_hub(str(getattr(response, "url", ""))))


def _is_hub(url: str) -> bool:
    from huggingface_hub import constants

    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    return urlsplit(url).netloc == urlsplit(endpoint).netloc


def is_transport(error: BaseException) -> bool:
    """Return whether an error is about the connection: cut, stalled, refused."""
    if isinstance(error, StorageError):
        return error.kind == "no_connection"
    from huggingface_hub.errors import HfHubHTTPError

    http = sys.modules[HfHubHTTPError.__bases__[0].__module__.partition(".")[0]]  # httpx, whatever its name is now
    return isinstance(error, http.TransportError) and not isinstance(error, http.UnsupportedProtocol)


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed later. After a conflict it is another one: whoever made it looks again."""
    answer = answer_of(error)
    if answer is None:
        return is_transport(error)
    return answer.status not in CONFLICTS and may_pass(answer.status, answer.code)


def hub_tries() -> Retry:
    """Of a request that the library makes once."""
    return Retry(_WAITS_S, is_passing, wait=wait_after)


def persistently(call: Callable[[], T]) -> T:
    """For requests that the library makes once: try again what may pass."""
    return hub_tries().call(lambda: ask_hub(call))


class UnexpectedAnswer(DestinationUnavailableError):
    """The library could not read an answer, although its status says that the request succeeded."""


def unexpected(error: Exception) -> UnexpectedAnswer:
    return UnexpectedAnswer(
        f"The Hub answered with something else than it should ({type(error).__name__}: {scrubbed(str(error))}).",
        hint="Does HF_ENDPOINT, or a proxy, lead to another server? If not, run the same command to continue.",
    )


_UNREADABLE = (KeyError, IndexError, TypeError, AttributeError, ValueError)
_READERS = ("huggingface_hub", "json", "httpx", "httpx2")


def ask_hub(call: Callable[[], T]) -> T:
    """Make a request with the library; a stop ends it. UnexpectedAnswer if it cannot read what was answered.

    Something between here and the Hub may answer in its stead, such as the login page of a network.
    """
    from huggingface_hub.errors import HFValidationError

    try:
        return interruptible(call)
    except _UNREADABLE as error:
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        module = str(at.tb_frame.f_globals.get("__name__")) if at is not None else ""
        meant = isinstance(error, HFValidationError) or "README" in str(error) or status_of(error) is not None
        if meant or module.partition(".")[0] not in _READERS:
            raise
        raise unexpected(error) from error


def wait_after(error: BaseException, wait_s: float) -> None:
    """Wait before the next try, as long as the answer asks for, and say so."""
    response = getattr(error, "response", None)
    asked_for_s = 0.0 if response is None else asked_s(response.status_code, response.headers)
    wait_s, said = capped_wait(max(wait_s, asked_for_s))
    what = status_of(error) or type(error).__name__
    logging.getLogger(_LOGGER).warning("%s; trying again in %s", what, said)
    _wait(wait_s)


@contextmanager
def explained(repo: str, *, begun: bool, reading: bool = False) -> Iterator[None]:
    """Here the library's errors become brim's. `begun`: something may have been sent already."""
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except BrimError:
        raise
    except LocalTokenNotFoundError as error:
        raise _no_token() from error
    except HFValidationError as error:
        raise InputError(f"The Hub does not take this name: {scrubbed(str(error))}") from error
    except Exception as error:
        if isinstance(error, OfflineModeIsEnabled) or getattr(error, "kind", "") == "offline":
            raise InputError(
                "huggingface_hub is in offline mode, so the Hub cannot be reached.", hint="Unset HF_HUB_OFFLINE."
            ) from error
        found = (_explained_reading(error, repo) if reading else None) or _explained(error, repo, begun)
        if found is None:
            raise
        raise found from (None if isinstance(error, StorageError) else error)


def _no_token() -> DestinationError:
    return DestinationError(
        "There is no token for the Hub.", hint="Log in with `hf auth login`, or set HF_TOKEN to a token that may write."
    )


def _explained_reading(error: Exception, repo: str) -> BrimError | None:
    """What only whoever reads is told. Without a token, the Hub answers 401 to what it does not show."""
    from huggingface_hub import get_token

    answer = answer_of(error)
    if answer is not None and (answer.status == 403 or (answer.status == 401 and get_token() is None)):
        who = "this token" if answer.status == 403 else "anyone without a token"
        return DestinationError(
            f"The Hub does not let {who} read {repo} ({answer.status}).",
            hint="Check its name, log in with `hf auth login`, and if it is gated, ask for access on its page.",
        )
    if is_transport(error):
        return DestinationUnavailableError(f"The connection to the Hub failed: {_cause(error)}.", hint="Run it again.")
    return None


def _explained(error: Exception, repo: str, begun: bool) -> BrimError | None:
    answer = answer_of(error)
    if answer is not None:
        return explained_answer(answer, repo, begun)
    if is_transport(error):
        return DestinationUnavailableError(
            f"The connection to the Hub failed: {_cause(error)}.",
            hint="Run the same command to continue; nothing that was sent is lost.",
        )
    if type(error).__name__ == "UnsupportedProtocol":
        return InputError(f"HF_ENDPOINT is not the address of a Hub: {scrubbed(str(error))}")
    if isinstance(error, ValueError) and "README" in str(error):
        return DestinationError(f"The Hub refuses the card: {scrubbed(str(error))}", hint="Mend its YAML at the top.")
    if isinstance(error, StorageError):
        return unexpected(error.__cause__ if isinstance(error.__cause__, Exception) else error)
    return None


def _cause(error: Exception) -> str:
    text = error.detail.partition(" ")[2] if isinstance(error, StorageError) else str(error)
    return scrubbed(text) or type(error).__name__


def explained_answer(answer: HubAnswer, repo: str, begun: bool = True) -> BrimError:
    """What an answer means: exit 5 for what may pass, exit 2 with what to change for all others."""
    status, said = answer.status, answer.said.rstrip(".") or answer.code or "no reason given"
    kept = "; nothing that was sent is lost" if begun else ""
    if may_pass(status, answer.code):
        return DestinationUnavailableError(
            f"The Hub answered {status}: {said}.",
            hint="Run the same command to continue; nothing that was sent is lost.",
        )
    if status == 404:
        return _not_found(answer, repo)
    if not answer.by_hub:
        why = "Set this machine's clock." if answer.code == "RequestTimeTooSkewed" else _SLOW
        return DestinationError(
            f"The Hub's storage refuses what is sent to {repo} ({status}: {said}), with new addresses too{kept}.",
            hint=why,
        )
    if status == 401:
        return DestinationError(
            f"The Hub does not accept the token (401){kept}.",
            hint="Log in with `hf auth login`, or set HF_TOKEN to a valid token.",
        )
    if status == 402 or (status == 403 and _ROOM.search(said)):
        return DestinationError(
            f"The Hub has no room for more in {repo} ({status}: {said}){kept}.",
            hint="Make room there, have its owner get more, or publish to another owner.",
        )
    if status == 403:
        told = "" if answer.said in ("", "no reason given") else f": {said}"
        return DestinationError(
            f"The token has no right to write to {repo} (403{told}){kept}.",
            hint=f"Use a token with write access to {repo}.",
        )
    return DestinationError(f"The Hub refuses the request for {repo} ({status}: {said}){kept}.")


_SLOW = (
    "If a shard takes longer to send than its address lasts, cut smaller ones with --shard-size, or use "
    "--upload-with=xet."
)


def _not_found(answer: HubAnswer, repo: str) -> BrimError:
    """What was not found, as far as the Hub tells: there are other things than datasets that may be missing."""
    if answer.code == "RepoNotFound":
        return DestinationError(
            f"There is no dataset {repo} on the Hub, or the token may not see it (404).",
            hint="Check its name and the token's rights.",
        )
    if answer.code == "RevisionNotFound":
        return DestinationError(
            f"{repo} has no such branch or commit (404: {answer.said or 'RevisionNotFound'}).",
            hint="Check what follows the @ of the address.",
        )
    if answer.code == "EntryNotFound":
        return DestinationError(f"{repo} no longer has a file that it listed (404: {answer.said or 'EntryNotFound'}).")
    return DestinationError(
        f"The server does not know what it was asked for {repo} (404: {answer.said or 'no reason given'}).",
        hint="Is HF_ENDPOINT the address of a Hub, and of one that has this?",
    )

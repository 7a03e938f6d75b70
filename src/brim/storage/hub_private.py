"""The only module that uses private names of huggingface_hub; `tests/project/test_private_names.py` lists them.

The library makes a pointer only for a file that it has read. brim has hashed and sent a shard long before
the commit, often in an earlier run, so it gives the library the size and the hash.
tests/jobs/test_publish.py pins that the Hub gets the right pointer.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from brim.errors import DestinationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from brim.state.ledger import StoredFile


def upload_info(shard: StoredFile) -> Any:
    """Return an object as LFS requests describe it."""
    from huggingface_hub.lfs import UploadInfo

    return UploadInfo(size=shard.size, sample=b"", sha256=bytes.fromhex(shard.sha256))


def addition(shard: StoredFile, content: io.BufferedIOBase | None = None) -> Any:
    """Return a shard by its hash, to be sent from `content` or sent before."""
    from huggingface_hub import CommitOperationAdd

    operation = CommitOperationAdd(path_in_repo=shard.name, path_or_fileobj=b"")
    operation.upload_info = upload_info(shard)
    operation._upload_mode = "lfs"
    operation._should_ignore = False
    if content is None:
        operation._is_uploaded = True
    else:
        operation.path_or_fileobj = content  # type: ignore[assignment]
    return operation


def text(name: str, data: bytes) -> Any:
    """Return a small file. It is a stream: the library sends large bytes by Xet, also where the server has none."""
    from huggingface_hub import CommitOperationAdd

    return CommitOperationAdd(path_in_repo=name, path_or_fileobj=io.BytesIO(data))


def deletion(name: str) -> Any:
    from huggingface_hub import CommitOperationDelete

    return CommitOperationDelete(path_in_repo=name, is_folder=False)


def is_sent(operation: Any) -> bool:
    """Return whether an operation of a commit points to an object that was sent before."""
    return bool(getattr(operation, "_is_uploaded", False))


def hub_token(token: str | None) -> str | None:
    """Return a token, else that of the environment or of the login; DestinationError if it cannot be one."""
    from huggingface_hub import get_token

    token = token or get_token()
    if token and not token.isascii():
        raise DestinationError(
            "What is set as the token for the Hub is none: it holds characters that no token has.",
            hint="Log in with `hf auth login`, or set HF_TOKEN to a valid token.",
        )
    return token


def client_factory() -> Callable[[], Any]:
    """Return the function that makes the library's clients: it can be set, and not read."""
    from huggingface_hub.utils import _http

    factory: Callable[[], Any] = getattr(_http, "_GLOBAL_CLIENT_FACTORY", _http.default_client_factory)
    return factory

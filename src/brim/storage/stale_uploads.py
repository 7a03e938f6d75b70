"""Multipart uploads that a killed run began and no run will finish: stores keep their parts and charge for them.

obstore neither lists nor aborts them, so the two requests are made here, signed as S3 wants it (Signature Version 4).
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from brim.state.retry import interruptible
from brim.storage.credentials import Keys, S3Account, account_of
from brim.storage.location import Location
from brim.storage.storage_error import StorageError

_TIMEOUT_S = 20.0
_PAGES = 1000


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuse redirects: the signature would go to another host."""

    def redirect_request(self, *_: object) -> None:
        return None


def _unknown(reason: str) -> StorageError:
    return StorageError("unsupported", detail=reason)


def abort_uploads(location: Location, prefix: str, is_own: Callable[[str], bool]) -> int:
    """Abort unfinished uploads of keys with a prefix if `is_own` of the key; return how many there were."""
    if location.scheme == "gs":
        raise _unknown("what a killed run began to send is not looked for in gs://: set a lifecycle rule")
    if location.scheme != "s3":
        return 0  # Azure and the Hub forget uploads without a name
    account = account_of(location.access)
    if account.keys is None:
        raise _unknown("unfinished uploads cannot be listed with the role of a machine: use a lifecycle rule")
    own = [(key, upload) for key, upload in list_uploads(account, location, prefix) if is_own(key)]
    for key, upload in own:
        _request(account, location, "DELETE", key, {"uploadId": upload})
    return len(own)


def list_uploads(account: S3Account, location: Location, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (key, id) of every unfinished upload."""
    marks: dict[str, str] = {}
    for _ in range(_PAGES):
        answer = _request(account, location, "GET", "", {"uploads": "", "prefix": prefix, **marks})
        try:
            root = ElementTree.fromstring(answer)
        except ElementTree.ParseError as error:
            raise _unknown("the store does not list unfinished uploads as S3 does") from error
        for element in root.iter():
            if element.tag.rpartition("}")[2] == "Upload":
                fields = _fields(element)
                yield fields["Key"], fields["UploadId"]
        fields = _fields(root)
        if fields.get("IsTruncated") != "true":
            return
        names = {"NextKeyMarker": "key-marker", "NextUploadIdMarker": "upload-id-marker"}
        marks = {mark: fields[name] for name, mark in names.items() if fields.get(name)}


def _fields(element: ElementTree.Element) -> dict[str, str]:
    return {child.tag.rpartition("}")[2]: child.text or "" for child in element}


def _request(account: S3Account, location: Location, method: str, key: str, query: dict[str, str]) -> bytes:
    assert account.keys is not None
    base = urlsplit(account.endpoint or f"https://s3.{account.region}.amazonaws.com")
    path = f"{base.path.rstrip('/')}/{quote(location.container)}" + (f"/{quote(key)}" if key else "")
    parameters = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in sorted(query.items()))
    headers = sign(method, base.netloc, path, parameters, account.region, account.keys, datetime.now(UTC))
    request = urllib.request.Request(
        f"{base.scheme}://{base.netloc}{path}?{parameters}", headers=headers, method=method
    )
    trusted = ssl.create_default_context()
    if account.authorities is not None:
        trusted.load_verify_locations(cadata=account.authorities)
    opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=trusted))

    def ask() -> bytes:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            return bytes(answer.read())

    try:
        return interruptible(ask)
    except urllib.error.HTTPError as error:
        if method == "DELETE" and error.code == 404:
            return b""  # another client was faster
        raise _unknown(f"the store does not list unfinished uploads ({error.code})") from None
    except (OSError, http.client.HTTPException) as error:
        raise _unknown("the store does not answer") from error


def sign(method: str, host: str, path: str, query: str, region: str, keys: Keys, now: datetime) -> dict[str, str]:
    """Return the headers of a request without a body."""
    stamp, empty = now.strftime("%Y%m%dT%H%M%SZ"), hashlib.sha256(b"").hexdigest()
    headers = {"host": host, "x-amz-content-sha256": empty, "x-amz-date": stamp}
    if keys.token:
        headers["x-amz-security-token"] = keys.token
    names = ";".join(sorted(headers))
    listed = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    canonical = hashlib.sha256("\n".join([method, path, query, listed, names, empty]).encode()).hexdigest()
    secret = f"AWS4{keys.secret}".encode()
    for part in (stamp[:8], region, "s3", "aws4_request"):
        secret = hmac.digest(secret, part.encode(), "sha256")
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, canonical])
    signature = hmac.digest(secret, text.encode(), "sha256").hex()
    authorization = f"AWS4-HMAC-SHA256 Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**{name: value for name, value in headers.items() if name != "host"}, "Authorization": authorization}

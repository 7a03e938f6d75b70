"""Multipart uploads that nobody will finish: a killed run leaves them, unseen and paid for.

obstore neither lists nor aborts them, so the two requests are made here, signed as S3 wants it (Signature Version 4).
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from brim.records import dataclass
from brim.storage.credentials import Keys, S3Account, account_of
from brim.storage.location import Location
from brim.storage.requests import beside, wait

_TIMEOUT_S = 20.0
_PAGES = 1000


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload in parts that was begun and not finished, as the store lists it."""

    key: str
    id: str


class CannotTell(Exception):
    """Unfinished uploads cannot be looked for here; the text says why."""


def abort_uploads(address: Location, prefix: str, ours: Callable[[str], bool]) -> int:
    """Abort unfinished uploads of keys that begin with `prefix` and that `ours` says are ours; how many there were."""
    if address.scheme not in ("s3", "gs"):
        return 0  # what nobody gives a name is forgotten by Azure, and by the Hub, by themselves
    account = _account(address)
    found = [upload for upload in list_uploads(address, prefix) if ours(upload.key)]
    for upload in found:
        _request(account, address, "DELETE", upload.key, {"uploadId": upload.id})
    return len(found)


def list_uploads(address: Location, prefix: str) -> list[Upload]:
    account = _account(address)
    uploads: list[Upload] = []
    marks: dict[str, str] = {}
    for _ in range(_PAGES):
        answer = _request(account, address, "GET", "", {"uploads": "", "prefix": prefix, **marks})
        try:
            root = ElementTree.fromstring(answer)
        except ElementTree.ParseError as error:
            raise CannotTell("the store does not list unfinished uploads as S3 does") from error
        for element in root.iter():
            if element.tag.rpartition("}")[2] == "Upload":
                facts = {child.tag.rpartition("}")[2]: child.text or "" for child in element}
                uploads.append(Upload(facts["Key"], facts["UploadId"]))
        said = {child.tag.rpartition("}")[2]: child.text or "" for child in root}
        if said.get("IsTruncated") != "true":
            return uploads
        names = {"NextKeyMarker": "key-marker", "NextUploadIdMarker": "upload-id-marker"}
        marks = {mark: said[name] for name, mark in names.items() if said.get(name)}
    return uploads


def _account(address: Location) -> S3Account:
    if address.scheme == "gs":
        raise CannotTell("what a killed run began to send is not looked for in gs://: set a lifecycle rule")
    account = account_of(address.access)
    if account.keys is None:
        raise CannotTell("unfinished uploads cannot be listed with the role of a machine: use a lifecycle rule")
    return account


def _request(account: S3Account, address: Location, method: str, key: str, query: dict[str, str]) -> bytes:
    assert account.keys is not None
    base = account.endpoint or f"https://s3.{account.region}.amazonaws.com"
    path = f"{urlsplit(base).path.rstrip('/')}/{quote(address.bucket)}" + (f"/{quote(key)}" if key else "")
    asked = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in sorted(query.items()))
    parts = urlsplit(base)
    headers = sign(method, parts.netloc, path, asked, account.region, account.keys, datetime.now(UTC))
    request = urllib.request.Request(f"{parts.scheme}://{parts.netloc}{path}?{asked}", headers=headers, method=method)
    trusted = ssl.create_default_context() if parts.scheme == "https" else None
    if trusted is not None and account.authorities is not None:
        trusted.load_verify_locations(cadata=account.authorities)

    def ask() -> bytes:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=trusted) as answer:
            return bytes(answer.read())

    try:
        return wait(beside(ask))
    except urllib.error.HTTPError as error:
        if method == "DELETE" and error.code == 404:
            return b""  # somebody was faster
        raise CannotTell(f"the store does not list unfinished uploads ({error.code})") from None
    except (OSError, http.client.HTTPException) as error:
        raise CannotTell("the store does not answer") from error


def sign(method: str, host: str, path: str, query: str, region: str, keys: Keys, now: datetime) -> dict[str, str]:
    """The headers of a request without a body."""
    stamp, empty = now.strftime("%Y%m%dT%H%M%SZ"), hashlib.sha256(b"").hexdigest()
    headers = {"host": host, "x-amz-content-sha256": empty, "x-amz-date": stamp}
    if keys.token:
        headers["x-amz-security-token"] = keys.token
    names = ";".join(sorted(headers))
    listed = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    canonical = hashlib.sha256("\n".join([method, path, query, listed, names, empty]).encode()).hexdigest()
    secret = f"AWS4{keys.secret}".encode()
    for word in (stamp[:8], region, "s3", "aws4_request"):
        secret = hmac.digest(secret, word.encode(), "sha256")
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, canonical])
    signature = hmac.digest(secret, text.encode(), "sha256").hex()
    said = f"AWS4-HMAC-SHA256 Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**{name: value for name, value in headers.items() if name != "host"}, "Authorization": said}

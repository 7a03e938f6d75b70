"""AWS Signature Version 4 for S3 with the standard library, for requests of the tests without obstore."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class Credentials:
    access_key: str
    secret_key: str
    region: str = "us-east-1"


def query_string(query: Mapping[str, str]) -> str:
    """Return the query as it is signed and sent: sorted, with every reserved character escaped."""
    return "&".join(f"{quote(name, safe='~')}={quote(query[name], safe='~')}" for name in sorted(query))


def signed_headers(
    credentials: Credentials,
    method: str,
    host: str,
    path: str,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    body: bytes,
    now: datetime | None = None,
) -> dict[str, str]:
    """Return all headers to send; `path` is already escaped."""
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(body).hexdigest()
    sent = {name.lower(): value for name, value in headers.items()}
    sent |= {"host": host, "x-amz-date": stamp, "x-amz-content-sha256": sent.get("x-amz-content-sha256", digest)}
    names = ";".join(sorted(sent))
    lines = "".join(f"{name}:{sent[name].strip()}\n" for name in sorted(sent))
    request = "\n".join([method, path, query_string(query), lines, names, sent["x-amz-content-sha256"]])
    scope = f"{stamp[:8]}/{credentials.region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{credentials.secret_key}".encode()
    for part in (stamp[:8], credentials.region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.new(key, text.encode(), "sha256").hexdigest()
    sent["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return sent

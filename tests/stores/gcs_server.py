"""A small server for the parts of Google Cloud Storage's APIs that the clients use.

obstore uses the XML API; gcsfs, with which `datasets` reads `gs://`, lists and reads with the JSON API.
No emulator that can be installed in this environment implements the XML API. This server follows the documentation of
the APIs and the requests of the clients; it was not compared with Google's servers. Objects live in memory. With
`issuer`, requests need a bearer token: a JWT of that service account, whose issuer is checked and whose signature is
not. A client that asks for a token with such a JWT, as gcsfs does, gets the JWT back.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import threading
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000
TOKEN = "/token"
_JSON = re.compile(r"/(?:download/)?storage/v1/b/(?P<bucket>[^/]+)(?P<objects>/o)?(?:/(?P<key>.+))?")


@dataclass(slots=True)
class StoredObject:
    data: bytes
    generation: int
    etag: str


@dataclass
class Bucket:
    objects: dict[str, StoredObject] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[int, bytes]]] = field(default_factory=dict)


class GcsServer:
    """The objects and uploads of the only bucket, which tests inspect as `objects` and `uploads`."""

    def __init__(self, bucket: str = "private", issuer: str | None = None) -> None:
        self.buckets = {bucket: Bucket()}
        self.issuer = issuer
        self.lock = threading.Lock()
        self.requests: list[str] = []
        self._generation = 1_000
        server = self

        class Handler(_Handler):
            store = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def keep(self, bucket: Bucket, key: str, data: bytes) -> StoredObject:
        """Store an object; each write creates a new generation."""
        self._generation += 1
        mark = hashlib.md5(data + str(self._generation).encode()).hexdigest()
        bucket.objects[key] = StoredObject(data, self._generation, f'"{mark}"')
        return bucket.objects[key]


class _Handler(BaseHTTPRequestHandler):
    store: GcsServer
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body together, otherwise the client waits for the second packet

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the request log."""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        with self.store.lock:
            self.store.requests.append(f"{self.command} {self.path}")
            if parts.path == TOKEN:
                inputs = dict(parse_qsl(body.decode()))["assertion"]
                self._json({"access_token": inputs, "expires_in": 3600, "token_type": "Bearer"})
                return
            name, _, key = parts.path.lstrip("/").partition("/")
            bucket = self.store.buckets.get(name)
            if not self._allowed():
                self._error(401, "AuthenticationRequired")
            elif (requested := _JSON.fullmatch(parts.path)) is not None:
                self._answer_json(requested, query)
            elif bucket is None:
                self._error(404, "NoSuchBucket")
            elif key:
                self._on_object(bucket, unquote(key), query, body)
            else:
                self._list(bucket, query)

    def _answer_json(self, request: re.Match[str], query: dict[str, str]) -> None:
        """Answer for a bucket, its objects below a prefix, an object's metadata, or its bytes."""
        name, key = request["bucket"], unquote(request["key"] or "")
        bucket = self.store.buckets.get(name)
        if bucket is None or self.command != "GET" or (key and key not in bucket.objects):
            self._json({"error": {"code": 404, "message": "Not Found"}}, 404)
        elif query.get("alt") == "media":
            self._read(bucket, key)
        elif key:
            self._json(self._about(name, key, bucket.objects[key]))
        elif request["objects"] is None:
            self._json({"kind": "storage#bucket", "id": name, "name": name, "location": "US"})
        else:
            below, cut = query.get("prefix", ""), query.get("delimiter", "")
            actual = sorted(item for item in bucket.objects if item.startswith(below))
            deeper = [entry for entry in actual if cut and cut in entry[len(below) :]]
            folders = sorted({below + element[len(below) :].partition(cut)[0] + cut for element in deeper})
            items = [self._about(name, one, bucket.objects[one]) for one in actual if one not in deeper]
            self._json({"kind": "storage#objects", "items": items, "prefixes": folders})

    def _about(self, bucket: str, key: str, existing: StoredObject) -> dict[str, str]:
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": key,
            "size": str(len(existing.data)),
            "generation": str(existing.generation),
            "etag": existing.etag.strip('"'),
            "md5Hash": base64.b64encode(hashlib.md5(existing.data).digest()).decode(),
            "timeCreated": "1970-01-01T00:00:00.000Z",
            "updated": "1970-01-01T00:00:00.000Z",
            "mediaLink": f"{self.store.endpoint}/download/storage/v1/b/{bucket}/o/{quote(key, safe='')}?alt=media",
        }

    def _json(self, report: object, status: int = 200) -> None:
        self._send(status, json.dumps(report).encode(), {"Content-Type": "application/json; charset=UTF-8"})

    def _allowed(self) -> bool:
        if self.store.issuer is None:
            return True
        header = self.headers.get("authorization", "").removeprefix("Bearer ").split(".")
        if len(header) != 3:
            return False
        claims = json.loads(base64.urlsafe_b64decode(header[1] + "=="))
        return claims.get("iss") == self.store.issuer

    def _on_object(self, bucket: Bucket, key: str, query: dict[str, str], body: bytes) -> None:
        match self.command:
            case "GET" | "HEAD":
                self._read(bucket, key)
            case "DELETE" if "uploadId" in query:
                bucket.uploads.pop(query["uploadId"], None)
                self._send(204)
            case "DELETE":
                if bucket.objects.pop(key, None) is None:
                    self._error(404, "NoSuchKey")
                else:
                    self._send(204)
            case "POST" if "uploads" in query:
                upload, name = secrets.token_hex(8), "InitiateMultipartUploadResult"
                bucket.uploads[upload] = (key, {})
                self._xml(f"<{name}><UploadId>{upload}</UploadId></{name}>")
            case "POST" if "uploadId" in query:
                self._complete(bucket, query["uploadId"], body)
            case "PUT" if "uploadId" in query:
                self._part(bucket, query, body)
            case "PUT":
                self._write(bucket, key, body)
            case _:
                self._error(405, "MethodNotAllowed")

    def _part(self, bucket: Bucket, query: dict[str, str], body: bytes) -> None:
        if query["uploadId"] not in bucket.uploads:
            self._error(404, "NoSuchUpload")
            return
        bucket.uploads[query["uploadId"]][1][int(query["partNumber"])] = body
        self._send(200, headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def _write(self, bucket: Bucket, key: str, body: bytes) -> None:
        expected, destination = self.headers.get("x-goog-if-generation-match"), bucket.objects.get(key)
        if expected is not None and int(expected) != (destination.generation if destination else 0):
            self._error(412, "PreconditionFailed")
            return
        if (source := self.headers.get("x-goog-copy-source")) is not None:
            name, _, owner = unquote(source).lstrip("/").partition("/")
            body = self.store.buckets[name].objects[owner].data
        self._stored(self.store.keep(bucket, key, body))

    def _complete(self, bucket: Bucket, upload: str, body: bytes) -> None:
        if upload not in bucket.uploads:
            self._error(404, "NoSuchUpload")
            return
        key, parts = bucket.uploads.pop(upload)
        numbers = [int(n) for n in re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())]
        result = self.store.keep(bucket, key, b"".join(parts[number] for number in numbers))
        self._xml(
            f"<CompleteMultipartUploadResult><ETag>{escape(result.etag)}</ETag></CompleteMultipartUploadResult>",
            {"ETag": result.etag, "x-goog-generation": str(result.generation)},
        )

    def _read(self, bucket: Bucket, key: str) -> None:
        present = bucket.objects.get(key)
        if present is None:
            self._error(404, "NoSuchKey")
            return
        required = self.headers.get("if-match")
        if required is not None and required not in (present.etag, "*"):
            self._error(412, "PreconditionFailed")
            return
        headers = {
            "ETag": present.etag,
            "x-goog-generation": str(present.generation),
            "Last-Modified": formatdate(0, usegmt=True),
        }
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("range", ""))
        if asked is None:
            self._send(200, present.data, headers)
            return
        size = len(present.data)
        start = int(asked[1]) if asked[1] else max(size - int(asked[2]), 0)
        stop = min(int(asked[2]) + 1, size) if asked[1] and asked[2] else size
        if start >= size:
            self._error(416, "InvalidRange")
            return
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self._send(206, present.data[start:stop], headers)

    def _list(self, bucket: Bucket, query: dict[str, str]) -> None:
        after = query.get("continuation-token") or query.get("start-after") or ""
        names = sorted(name for name in bucket.objects if name.startswith(query.get("prefix", "")) and name > after)
        page = names[: int(query.get("max-keys") or PAGE)]
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><Generation>{bucket.objects[name].generation}</Generation>"
            f"<LastModified>1970-01-01T00:00:00.000Z</LastModified><ETag>{escape(bucket.objects[name].etag)}</ETag>"
            f"<Size>{len(bucket.objects[name].data)}</Size></Contents>"
            for name in page
        )
        extra = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(page) < len(names) else ""
        cut = str(bool(extra)).lower()
        self._xml(f"<ListBucketResult><IsTruncated>{cut}</IsTruncated>{rows}{extra}</ListBucketResult>")

    def _stored(self, completed: StoredObject) -> None:
        self._send(200, headers={"ETag": completed.etag, "x-goog-generation": str(completed.generation)})

    def _error(self, status: int, code: str) -> None:
        self._xml(f"<Error><Code>{code}</Code></Error>", status=status)

    def _xml(self, text: str, headers: dict[str, str] | None = None, status: int = 200) -> None:
        records = {"Content-Type": "application/xml; charset=UTF-8", **(headers or {})}
        self._send(status, f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode(), records)

    def _send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

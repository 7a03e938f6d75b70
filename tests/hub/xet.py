"""Xet storage over HTTP: tokens, xorbs, shards and reconstructions, as far as hf_xet uses them.

Not implemented: deduplication against stored chunks (every chunk query is answered with 404), upload grants, and
the hash of a xorb (BLAKE3), which the standard library cannot compute. The server does check that the files of a
shard consist of stored chunks, and their sizes.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .store import HubError
from .wire import REPO, REVISION, Answer, Request, route

END = b"\xff" * 32
SMALL_BYTES = 1 << 20  # cards and manifests, which are read back even if other content is not stored
WITH_VERIFICATION, WITH_SHA256 = 1 << 31, 1 << 30


@dataclass(frozen=True, slots=True)
class Segment:
    xorb: str
    size: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class XetFile:
    hash: str
    sha256: str
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)


def _hex(raw: bytes) -> str:
    return "".join(f"{text:016x}" for text in struct.unpack("<4Q", raw))


def files_of_shard(data: bytes) -> list[XetFile]:
    """Parse the file section of a shard: for each file its hash, its segments and its SHA-256, if it has one."""
    files, position = [], 48
    while (raw := data[position : position + 32]) != END:
        flags, count = struct.unpack_from("<II", data, position + 32)
        position += 48
        segments = []
        for _ in range(count):
            _, size, first, end = struct.unpack_from("<IIII", data, position + 32)
            segments.append(Segment(_hex(data[position : position + 32]), size, first, end))
            position += 48
        position += 48 * count if flags & WITH_VERIFICATION else 0
        is_known = bool(flags & WITH_SHA256)  # files that are uploaded to a bucket have no SHA-256
        files.append(XetFile(_hex(raw), _hex(data[position : position + 32]) if is_known else "", tuple(segments)))
        position += 48 if is_known else 0
    return files


def chunks_of_xorb(path: Path) -> list[tuple[int, int]]:
    """Return, for each chunk, its end in the file and its number of bytes."""
    chunks, position, size = [], 0, path.stat().st_size
    with open(path, "rb") as file:
        while position < size and len(head := file.read(8)) == 8 and head[0] == 0:
            packed, unpacked = int.from_bytes(head[1:4], "little"), int.from_bytes(head[5:8], "little")
            position += 8 + packed
            file.seek(position)
            chunks.append((position, unpacked))
    return chunks


class XetStore:
    def __init__(self, folder: Path, *, keep: bool) -> None:
        self.folder, self.keep = folder / "xorbs", keep
        self.folder.mkdir(parents=True, exist_ok=True)
        self.chunks: dict[str, list[tuple[int, int]]] = {}
        self.files: dict[str, XetFile] = {}
        self.by_sha256: dict[str, XetFile] = {}

    def add_xorb(self, name: str, part: Path) -> bool:
        new = name not in self.chunks
        self.chunks[name] = chunks_of_xorb(part)
        if self.keep or part.stat().st_size <= SMALL_BYTES:
            part.replace(self.folder / name)
        else:
            part.unlink()
        return new

    def add_shard(self, data: bytes) -> None:
        files = files_of_shard(data)
        for file in files:
            for segment in file.segments:
                sizes = [size for _, size in self.chunks.get(segment.xorb, [])[segment.first : segment.end]]
                if len(sizes) != segment.end - segment.first or sum(sizes) != segment.size:
                    raise HubError(400, f"File {file.sha256} refers to chunks that were not uploaded")
        for file in files:
            self.files[file.hash] = file
            if file.sha256:
                self.by_sha256[file.sha256] = file

    def reconstruction(self, file: XetFile, start: int, end: int, url: str) -> dict[str, Any]:
        """Return the terms and the byte ranges of xorbs that hold bytes `start` to `end` of a file."""
        terms: list[dict[str, Any]] = []
        fetch: dict[str, list[dict[str, Any]]] = {}
        position = skipped = 0
        for segment in file.segments:
            chunks, first, last = self.chunks[segment.xorb], segment.first, segment.end
            if position + segment.size > start and position < end:
                while not terms and position + chunks[first][1] <= start:
                    position += chunks[first][1]
                    first += 1
                if not terms:
                    skipped = start - position
                size = sum(n for _, n in chunks[first:last])
                position += size
                while last - first > 1 and position - chunks[last - 1][1] >= end:
                    last -= 1
                    position, size = position - chunks[last][1], size - chunks[last][1]
                selection = {"start": first, "end": last}
                terms.append({"hash": segment.xorb, "unpacked_length": size, "range": selection})
                begin = chunks[first - 1][0] if first else 0
                location = {"start": begin, "end": chunks[last - 1][0] - 1}
                item = {"range": selection, "url": f"{url}/{segment.xorb}", "url_range": location}
                ranges = fetch.setdefault(segment.xorb, [])
                if item not in ranges:
                    ranges.append(item)
            else:
                position += segment.size
        return {"offset_into_first_range": skipped, "terms": terms, "fetch_info": fetch}


def _store(request: Request) -> XetStore:
    if request.hub.xet is None:
        raise HubError(404, "Xet is not enabled on this server")
    return request.hub.xet


def token(request: Request) -> Answer:
    request.hub.repo(request, write=request.groups["access"] == "write", content=True)
    return token_answer(request)


def token_answer(request: Request) -> Answer:
    _store(request)
    expires, url = int(time.time()) + 3600, f"{request.hub.storage}/cas"
    headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": "xet", "X-Xet-Token-Expiration": str(expires)}
    return Answer({"accessToken": "xet", "exp": expires, "casUrl": url}, headers=headers)


def _check(request: Request) -> XetStore:
    if request.headers.get("Authorization") != "Bearer xet":
        raise HubError(401, "Not a Xet token")
    return _store(request)


def xorb(request: Request) -> Answer:
    store = _check(request)
    writer = request.hub.objects.begin_spool()
    try:
        for block in request.body.blocks():
            writer.write(block)
    except ConnectionError:
        writer.abandon()
        raise
    writer.close()
    assert writer.file is not None
    return Answer({"was_inserted": store.add_xorb(request.groups["oid"], writer.file)})


def shard(request: Request) -> Answer:
    store = _check(request)
    store.add_shard(request.body.read())
    return Answer({"result": 1})


def reconstruction(request: Request) -> Answer:
    store = _check(request)
    file = store.files.get(request.groups["oid"])
    if file is None:
        raise HubError(404, "No such file")
    start, length = request.range(file.size) or (0, file.size)
    return Answer(store.reconstruction(file, start, start + length, f"{request.hub.storage}/xorb"))


def xorb_bytes(request: Request) -> Answer:
    store = _store(request)
    path = store.folder / request.groups["oid"]
    if not path.exists():
        raise HubError(410, "This server did not keep the xorb's content")
    size = path.stat().st_size
    start, length = request.range(size) or (0, size)
    headers = {"Content-Range": f"bytes {start}-{start + length - 1}/{size}"}
    return Answer(status=206, headers=headers, file=(path, start, length))


HUB_ROUTES = [route("xet-token", "GET", REPO + r"/xet-(?P<access>read|write)-token" + REVISION, token)]
STORAGE_ROUTES = [
    route("xorb", "POST", r"/cas/v1/xorbs/default/(?P<oid>\w+)", xorb),
    route("shard", "POST", r"/cas(?:/v1)?/shards", shard),
    route("reconstruction", "GET", r"/cas/v1/reconstructions/(?P<oid>\w+)", reconstruction),
    route("xorb-get", "GET", r"/xorb/(?P<oid>\w+)", xorb_bytes),
]

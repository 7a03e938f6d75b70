"""Large objects: the batch call, pre-signed URLs, PUTs of objects and parts, completion, verification, downloads."""

from __future__ import annotations

from .store import HubError
from .wire import FILES, Answer, Request, route


def batch(request: Request) -> Answer:
    hub, payload = request.hub, request.json()
    repo = hub.repo(request, write=True)
    verify = {"href": f"{hub.url(repo)}.git/info/lfs/objects/verify"}
    objects, transfer = [], "basic"
    for item in payload["objects"]:
        oid, size = item["oid"], item["size"]
        records = {"oid": oid, "size": size}
        objects.append(records)
        known_values = hub.object_size(repo, oid)
        if known_values is not None and known_values != size:
            records["error"] = {"code": 422, "message": f"Object {oid} has {known_values} bytes, not {size}"}
        elif known_values is None:
            upload: dict[str, object] = {"href": hub.sign(f"/upload/{repo.kind}/{repo.name}/{oid}/{size}")}
            if size > hub.multipart_bytes and "multipart" in payload.get("transfers", []):
                upload, transfer = _multipart(request, f"{repo.kind}/{repo.name}", oid, size), "multipart"
            records["authenticated"] = True
            records["actions"] = {"upload": upload, "verify": verify}
    headers = {"Content-Type": "application/vnd.git-lfs+json"}
    return Answer({"transfer": transfer, "objects": objects}, headers=headers)


def _multipart(request: Request, where: str, oid: str, size: int) -> dict[str, object]:
    hub = request.hub
    upload = hub.objects.begin_multipart(oid, size, hub.part_bytes)
    count = hub.objects.multipart(upload).count
    header = {f"{n:05d}": hub.sign(f"/part/{oid}/{upload}/{n}") for n in range(1, count + 1)}
    href = f"{hub.endpoint}/api/complete_multipart/{where}/{upload}"
    return {"href": href, "header": {"chunk_size": str(hub.part_bytes), **header}}


def put(request: Request) -> Answer:
    hub, oid, size = request.hub, request.groups["oid"], int(request.groups["size"])
    hub.check_signature(request)
    if request.body.length != size:
        raise HubError(400, f"{request.body.length} bytes instead of {size}")
    writer = hub.objects.begin_put()
    try:
        for block in request.body.blocks():
            writer.write(block)
    except ConnectionError:
        writer.abandon()
        raise
    hub.objects.finish_put(writer, oid, size)
    hub.repos.get(request.groups["kind"], request.groups["name"]).objects.add(oid)
    return Answer(headers={"ETag": f'"{writer.etag}"'})


def part(request: Request) -> Answer:
    hub, number = request.hub, int(request.groups["part"])
    hub.check_signature(request)
    upload = hub.objects.multipart(request.groups["upload"])
    writer = hub.objects.begin_part(upload, number)
    try:
        for block in request.body.blocks():
            writer.write(block)
    except ConnectionError:
        writer.abandon()
        raise
    hub.objects.finish_part(upload, number, writer)
    return Answer(headers={"ETag": f'"{writer.etag}"'})


def complete(request: Request) -> Answer:
    payload = request.json()
    etags = {part["partNumber"]: part["etag"].strip('"') for part in payload["parts"]}
    request.hub.objects.complete(request.groups["upload"], payload["oid"], etags)
    request.hub.repos.get(request.groups["kind"], request.groups["name"]).objects.add(payload["oid"])
    return Answer({"success": True})


def verify(request: Request) -> Answer:
    payload = request.json()
    repo = request.hub.repo(request)
    if request.hub.object_size(repo, payload["oid"]) != payload["size"]:
        raise HubError(422, f"Object {payload['oid']} was not uploaded with {payload['size']} bytes")
    return Answer({})


def download(request: Request) -> Answer:
    request.hub.check_signature(request)
    return request.hub.slice(request, request.groups["oid"], {"ETag": f'"{request.groups["oid"]}"'})


HUB_ROUTES = [
    route("batch", "POST", FILES + r"\.git/info/lfs/objects/batch", batch),
    route("verify", "POST", FILES + r"\.git/info/lfs/objects/verify", verify),
    route("complete", "POST", r"/api/complete_multipart/(?P<kind>\w+)/(?P<name>[^/]+/[^/]+)/(?P<upload>\w+)", complete),
]
STORAGE_ROUTES = [
    route("put", "PUT", r"/upload/(?P<kind>\w+)/(?P<name>[^/]+/[^/]+)/(?P<oid>\w+)/(?P<size>\d+)", put),
    route("part", "PUT", r"/part/(?P<oid>\w+)/(?P<upload>\w+)/(?P<part>\d+)", part),
    route("object", "GET HEAD", r"/object/(?P<oid>\w+)", download),
]

"""Discussions and pull requests: list, create (pull requests as drafts), comment, change the status and merge."""

from __future__ import annotations

from typing import Any

from .store import Discussion, Repo
from .wire import REPO, Answer, Request, route


def _discussion_json(repo: Repo, actual: Discussion, details: bool = False) -> dict[str, Any]:
    records: dict[str, Any] = {
        "num": actual.num,
        "title": actual.title,
        "author": {"name": actual.author},
        "createdAt": actual.created_at,
        "status": actual.status,
        "isPullRequest": actual.is_pull_request,
        "repo": {"name": repo.name, "type": repo.kind[:-1]},
    }
    if details:
        records["events"] = actual.events
        if actual.is_pull_request:
            records["changes"] = {"base": actual.base, "mergeCommitId": actual.merge_commit}
            records["filesWithConflicts"] = repo.conflicts(actual)
            records["diff"] = ""
    return records


def discussions(request: Request) -> Answer:
    repo = request.hub.repo(request)
    kind, status, author = request.first("type", "all"), request.first("status", "all"), request.first("author")
    actual = [
        d
        for d in sorted(repo.discussions.values(), key=lambda d: -d.num)
        if kind in ("all", "pull_request" if d.is_pull_request else "discussion")
        and status in ("all", "open" if d.status in ("open", "draft") else "closed")
        and author in ("", d.author)
    ]
    start = int(request.first("p", "0")) * 10
    page = [_discussion_json(repo, d) for d in actual[start : start + 10]]
    return Answer({"discussions": page, "count": len(actual), "start": start})


def discussion_create(request: Request) -> Answer:
    payload = request.json()
    repo = request.hub.repo(request, write=True)
    author = request.hub.user(request, required=True)["user"]
    pull = bool(payload.get("pullRequest"))
    created = repo.create_discussion(payload["title"], payload.get("description", ""), author, pull, "main")
    return Answer(
        {"url": f"{request.hub.url(repo)}/discussions/{created.num}", **_discussion_json(repo, created, True)}
    )


def discussion(request: Request) -> Answer:
    repo = request.hub.repo(request)
    return Answer(_discussion_json(repo, repo.discussion(int(request.groups["num"])), details=True))


def discussion_change(request: Request) -> Answer:
    payload, num = request.json(), int(request.groups["num"])
    repo = request.hub.repo(request, write=True)
    author = request.hub.user(request, required=True)["user"]
    actual = repo.discussion(num)
    label = request.groups["what"]
    if label == "comment":
        return Answer({"newMessage": actual.comment(author, payload["comment"])})
    if label == "title":
        actual.title, old = payload["title"], actual.title
        return Answer({"newTitle": actual.add_event("title-change", author, {"from": old, "to": actual.title})})
    if label == "status":
        changed = Answer({"newStatus": repo.set_status(num, payload["status"], author)})
    else:
        changed = Answer({"mergeCommitId": repo.merge(num, author).id, "status": "merged"})
    if payload.get("comment"):
        actual.comment(author, payload["comment"])
    return changed


ROUTES = [
    route("discussions", "GET", REPO + r"/discussions", discussions),
    route("discussion-create", "POST", REPO + r"/discussions", discussion_create),
    route("discussion", "GET", REPO + r"/discussions/(?P<num>\d+)", discussion),
    *(
        route(item, "POST", REPO + rf"/discussions/(?P<num>\d+)/(?P<what>{item})", discussion_change)
        for item in ("comment", "title", "status", "merge")
    ),
]

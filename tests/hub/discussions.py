"""Discussions and pull requests: list, create (pull requests as drafts), comment, change status, merge."""

from __future__ import annotations

from typing import Any

from .store import Discussion, Repo
from .wire import REPO, Answer, Request, route


def _discussion_json(repo: Repo, found: Discussion, details: bool = False) -> dict[str, Any]:
    told: dict[str, Any] = {
        "num": found.num,
        "title": found.title,
        "author": {"name": found.author},
        "createdAt": found.created_at,
        "status": found.status,
        "isPullRequest": found.is_pull_request,
        "repo": {"name": repo.name, "type": repo.kind[:-1]},
    }
    if details:
        told["events"] = found.events
        if found.is_pull_request:
            told["changes"] = {"base": found.base, "mergeCommitId": found.merge_commit}
            told["filesWithConflicts"] = repo.conflicts(found)
            told["diff"] = ""
    return told


def discussions(request: Request) -> Answer:
    repo = request.hub.repo(request)
    kind, status, author = request.first("type", "all"), request.first("status", "all"), request.first("author")
    found = [
        d
        for d in sorted(repo.discussions.values(), key=lambda d: -d.num)
        if kind in ("all", "pull_request" if d.is_pull_request else "discussion")
        and status in ("all", "open" if d.status in ("open", "draft") else "closed")
        and author in ("", d.author)
    ]
    start = int(request.first("p", "0")) * 10
    page = [_discussion_json(repo, d) for d in found[start : start + 10]]
    return Answer({"discussions": page, "count": len(found), "start": start})


def discussion_create(request: Request) -> Answer:
    asked = request.json()
    repo = request.hub.repo(request, write=True)
    author = request.hub.user(request, required=True)["user"]
    pull = bool(asked.get("pullRequest"))
    made = repo.create_discussion(asked["title"], asked.get("description", ""), author, pull, "main")
    return Answer({"url": f"{request.hub.url(repo)}/discussions/{made.num}", **_discussion_json(repo, made, True)})


def discussion(request: Request) -> Answer:
    repo = request.hub.repo(request)
    return Answer(_discussion_json(repo, repo.discussion(int(request.groups["num"])), details=True))


def discussion_change(request: Request) -> Answer:
    asked, num = request.json(), int(request.groups["num"])
    repo = request.hub.repo(request, write=True)
    author = request.hub.user(request, required=True)["user"]
    found = repo.discussion(num)
    what = request.groups["what"]
    if what == "comment":
        return Answer({"newMessage": found.comment(author, asked["comment"])})
    if what == "title":
        found.title, old = asked["title"], found.title
        return Answer({"newTitle": found.add_event("title-change", author, {"from": old, "to": found.title})})
    if what == "status":
        changed = Answer({"newStatus": repo.set_status(num, asked["status"], author)})
    else:
        changed = Answer({"mergeCommitId": repo.merge(num, author).id, "status": "merged"})
    if asked.get("comment"):
        found.comment(author, asked["comment"])
    return changed


ROUTES = [
    route("discussions", "GET", REPO + r"/discussions", discussions),
    route("discussion-create", "POST", REPO + r"/discussions", discussion_create),
    route("discussion", "GET", REPO + r"/discussions/(?P<num>\d+)", discussion),
    *(
        route(what, "POST", REPO + rf"/discussions/(?P<num>\d+)/(?P<what>{what})", discussion_change)
        for what in ("comment", "title", "status", "merge")
    ),
]

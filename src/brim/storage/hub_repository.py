"""A dataset repository on the Hub at one commit, to read. It cannot change: the version of its files is the commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any
from urllib.parse import quote

from brim.storage.http_files import HttpStorage
from brim.storage.hub_api import ask, checked, hub_endpoint, read_pages, readable_answer
from brim.storage.storage import FileInfo
from brim.storage.storage_error import StorageError


class HubRepository(HttpStorage):
    """The commit that the revision has when it is first asked for."""

    can_list = True
    waits_s = (1.0, 2.0, 4.0, 8.0, 8.0)

    def _url(self, name: str, version: str | None) -> str:
        commit, key = quote(version or self.commit, safe=""), quote(self.location.key(name))
        return f"{hub_endpoint()}/datasets/{self.location.repo}/resolve/{commit}/{key}"

    def _version(self, answer: Any, requested: str | None, xet_hash: str) -> str | None:
        return requested

    @cached_property
    def commit(self) -> str:
        return self.tries().call(self._find_commit)

    def pinned_revision(self) -> str:
        return self.commit

    def _find_commit(self) -> str:
        revision = quote(self.location.revision, safe="")
        url = f"{hub_endpoint()}/api/datasets/{self.location.repo}/revision/{revision}"
        answer, _, _ = ask("GET", url, token=self._token)
        with readable_answer():
            return str(checked(answer).json()["sha"])

    def stat(self, names: Iterable[str]) -> Iterator[FileInfo | None]:
        """Take all from one listing."""
        try:
            infos = dict(self.tries().call(lambda: list(self._tree(self.location.prefix))))
        except StorageError as error:
            if not error.is_missing:
                raise
            infos = {}
        yield from (infos.get(self.location.key(name)) for name in names)

    def _list(self, prefix: str, page_done: Callable[[], None]) -> Iterator[tuple[str, FileInfo]]:
        yield from list(self._tree(prefix))

    def _tree(self, prefix: str) -> Iterator[tuple[str, FileInfo]]:
        below = f"/{quote(prefix)}" if prefix else ""
        url = f"{hub_endpoint()}/api/datasets/{self.location.repo}/tree/{self.commit}{below}?recursive=true"
        try:
            for entry in read_pages(url, self._token):
                with readable_answer():
                    if entry.get("type") == "file":
                        lfs = entry.get("lfs") or {}
                        size, sha256 = int(lfs.get("size", entry["size"])), str(lfs.get("oid", ""))
                        info = FileInfo(size, self.commit, sha256=sha256, blob=str(entry.get("oid", "")))
                        yield str(entry["path"]), info
        except StorageError as error:
            if error.status != 404 or not prefix:
                raise
            folder = prefix.rpartition("/")[0]  # a file has no tree
            yield from (entry for entry in self._tree(folder) if entry[0] == prefix)

"""mkdocs hooks: links to files outside docs/ become plain text, and old addresses lead to the new pages.

Comments for the tests (tests/documents.py) are left out of the site. `extra.redirects` in mkdocs.yml maps an old page
to its new one. The page written for an old address keeps the anchor.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

REDIRECT = """<!doctype html>
<meta charset="utf-8">
<title>Redirecting</title>
<link rel="canonical" href="{target}">
<meta name="robots" content="noindex">
<script>location.replace("{target}" + location.hash)</script>
<meta http-equiv="refresh" content="0; url={target}">
<p>This page has moved to <a href="{target}">{target}</a>.</p>
"""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def text_if_outside(link: re.Match[str]) -> str:
        outside = posixpath.normpath(posixpath.join(folder, link[2])).startswith("../")
        return link[1] if outside else link[0]

    markdown = re.sub(r"<!--\s*(?:setup:|not run:|exit:).*?-->\n?", "", markdown, flags=re.S)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#]*)[^)]*\)", text_if_outside, markdown)


def on_post_build(config: Any, **_: Any) -> None:
    for old, new in config["extra"]["redirects"].items():
        page = Path(config["site_dir"], old.removesuffix(".md"), "index.html")
        if page.exists():
            raise SystemExit(f"{old} is both a page and an old address: remove it from extra.redirects in mkdocs.yml.")
        target = posixpath.relpath(new.removesuffix(".md"), old.removesuffix(".md")) + "/"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(REDIRECT.format(target=target))

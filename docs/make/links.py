"""links.py SITE: every link inside the site leads to a page and an anchor that are there. Nothing is fetched."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.anchors |= {value for name in ("id", "name") if (value := found.get(name))}
        target = found.get("href") if tag in ("a", "link") else found.get("src")
        if target:
            self.links.append(target)


def main() -> int:
    site = Path(sys.argv[1]).resolve()
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    wrong, counted = [], 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            counted += 1
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            to = to / "index.html" if to.is_dir() else to
            there = to.exists() and (not parts.fragment or to not in pages or parts.fragment in pages[to].anchors)
            if not there and parts.fragment != "__toc":
                wrong.append(f"{path.relative_to(site)}: {link}")
    print(f"{len(pages)} pages, {counted} links, {len(wrong)} of them lead nowhere", *wrong, sep="\n")
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(main())

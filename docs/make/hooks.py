"""Links to files beside docs/ are for the repository; on the site they are plain text."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)

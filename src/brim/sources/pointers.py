"""Files that only stand for data: git-annex links and pointers, Git LFS pointers.

They are recognised by content, because they carry the name of what they stand for: a text file of 130
bytes called `bold.nii.gz` would otherwise be published as a brain.
"""

from __future__ import annotations

import os
from typing import Literal

MAX_POINTER_BYTES = 1024
HEAD_BYTES = 64  # enough to tell
_LFS = b"version https://git-lfs.github.com/spec/"
_OLD_LFS = b"version https://hawser.github.com/spec/"
_ANNEX = b"/annex/objects/"

COMMANDS = {
    "annex": "datalad get -r .   (or: git annex get .)",
    "lfs": "git lfs pull",
}


def pointer_kind(head: bytes) -> Literal["annex", "lfs"] | None:
    """What a small file that begins with these bytes stands for, or None if it is data."""
    if head.startswith((_LFS, _OLD_LFS)):
        return "lfs"
    return "annex" if head.startswith(_ANNEX) else None


def is_annex_link(path: str) -> bool:
    """Whether a link that leads nowhere is one of git-annex: its content is not here."""
    try:
        return "annex/objects/" in os.readlink(path)
    except OSError:
        return False

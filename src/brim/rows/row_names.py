"""What the names of files tell: format, compression, and which of them are rows at all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from brim.errors import InputError

_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".txt": "text",
    ".md": "text",
}
_CODECS = {".gz": "gzip", ".zst": "zstd"}
# A README beside the data is not data.
COMPANIONS = re.compile(r"(readme|licen[cs]e|changelog|citation)(\.\w+)?|dataset_(infos?|dict)\.json|state\.json", re.I)
WILD = re.compile(r"[*?[]")


def split_name(name: str) -> tuple[str | None, str | None]:
    """The format and the compression that a name tells."""
    lower = name.lower()
    codec = next((codec for end, codec in _CODECS.items() if lower.endswith(end)), None)
    stem = lower.rsplit(".", 1)[0] if codec else lower
    return _FORMATS.get(os.path.splitext(stem)[1]), codec


def endings() -> str:
    return ", ".join(_FORMATS) + " (text also with .gz or .zst)"


def pick(splits: list[str], wanted: str | None, folder: str) -> str:
    """The split of a saved dataset that is meant."""
    listed = f"It has: {', '.join(splits)}."
    if wanted is None:
        if len(splits) == 1:
            return splits[0]
        raise InputError(
            f"{os.path.basename(folder)!r} has several splits.", hint=f"{listed} Name one with --from-split."
        )
    if wanted not in splits:
        raise InputError(f"{os.path.basename(folder)!r} has no split {wanted!r}.", hint=listed)
    return wanted


def arrow_files_of_cache(names: Iterable[str], splits: list[str], wanted: str | None, folder: str) -> list[str]:
    """The files that `load_dataset` prepared, without those that later calls of map left beside them."""
    found = [name for name in sorted(names) if name.endswith(".arrow") and not name.startswith("cache-")]
    if splits:
        split = pick(splits, wanted, folder)
        found = [name for name in found if re.search(rf"-{re.escape(split)}(-\d+-of-\d+)?\.arrow$", name)]
    return found

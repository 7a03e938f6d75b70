"""The dataset card: the README.md that tells `load_dataset` and people what is in a dataset.

brim owns the YAML fields `configs` and `dataset_info` and the text between its two markers. Whatever
else a card says was written by a person and stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from brim.errors import DestinationError
from brim.sizes import format_size

CARD = "README.md"
_BEGIN, _END = "<!-- brim:begin -->", "<!-- brim:end -->"
_FRONT = re.compile(r"\A---\s*\n(.*?)^---\s*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
# Names a file that never exists, so that loading a dataset that is still being built is an error and not
# a smaller dataset.
UNFINISHED = "data/unfinished-run-brim-build-again-to-continue"


_LICENSES = {
    "cc0": "cc0-1.0",
    "cc01.0": "cc0-1.0",
    "pddl": "pddl",
    "ccby": "cc-by-4.0",
    "ccby4.0": "cc-by-4.0",
    "ccbysa4.0": "cc-by-sa-4.0",
    "ccbync4.0": "cc-by-nc-4.0",
    "mit": "mit",
}
_CREDITS = {
    "Authors": "Authors",
    "License": "License",
    "DatasetDOI": "DOI",
    "HowToAcknowledge": "How to acknowledge",
    "Funding": "Funding",
}


@dataclass(frozen=True, slots=True)
class SplitFacts:
    """What a card says about a split."""

    name: str
    rows: int
    bytes: int
    shards: int


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card says about a dataset. `features` is the YAML list, or None where there is none."""

    splits: Sequence[SplitFacts]
    features: list[dict[str, Any]] | None
    extension: str
    columns: Sequence[tuple[str, str]]  # name, type
    left_out: Sequence[str] = ()
    about: Mapping[str, Any] = field(default_factory=dict)  # what the source says of itself, in BIDS's words


def write_card(facts: CardFacts, existing: str | None) -> str:
    """The card of a finished dataset, around whatever a person wrote in the existing one."""
    total = sum(split.bytes for split in facts.splits)
    files = [{"split": s.name, "path": f"data/{s.name}-*{facts.extension}"} for s in facts.splits]
    fields: dict[str, Any] = {"configs": [{"config_name": "default", "data_files": files}], **_license(facts.about)}
    if facts.about.get("Name"):
        fields["pretty_name"] = str(facts.about["Name"])
    info: dict[str, Any] = {} if facts.features is None else {"features": facts.features}
    info["splits"] = [{"name": s.name, "num_bytes": s.bytes, "num_examples": s.rows} for s in facts.splits]
    info |= {"download_size": total, "dataset_size": total}
    if facts.extension == ".parquet":  # the reader of tars finds its own features
        fields["dataset_info"] = info
    return _merge(fields, _text(facts), existing)


def write_unfinished_card(existing: str | None) -> str:
    """The card of a dataset that is being built: whoever loads it is told so."""
    fields = {"configs": [{"config_name": "default", "data_files": [{"split": "train", "path": UNFINISHED}]}]}
    text = "# Unfinished dataset\n\nThis dataset is being built. Run the same `brim build` again to continue.\n"
    return _merge(fields, text, existing)


def read_card(text: str) -> dict[str, Any]:
    """The YAML fields of a card."""
    match = _FRONT.match(text.removeprefix("\ufeff"))
    try:
        fields = yaml.safe_load(match[1]) if match else {}
    except yaml.YAMLError as error:
        raise DestinationError(
            f"The YAML at the top of {CARD} is broken: {' '.join(str(error).split())}.", hint="Mend it and run again."
        ) from error
    return fields if isinstance(fields, dict) else {}


def card_rows(fields: dict[str, Any]) -> dict[str, int]:
    """The rows of each split that a card tells, in any of the forms that cards have."""
    infos = fields.get("dataset_info")
    rows: dict[str, int] = {}
    for info in infos if isinstance(infos, list) else [infos]:
        splits = info.get("splits") if isinstance(info, dict) else None
        for split in splits if isinstance(splits, list) else []:
            if isinstance(split, dict) and isinstance(split.get("num_examples"), int):
                rows[str(split.get("name"))] = split["num_examples"]
    return rows


def card_splits(fields: dict[str, Any]) -> set[str] | None:
    """The splits that a card's first configuration lists, or None if it lists files in another way."""
    configs = fields.get("configs")
    first = configs[0] if isinstance(configs, list) and configs and isinstance(configs[0], dict) else {}
    entries = first.get("data_files")
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "split" in e for e in entries):
        return None
    return {str(entry["split"]) for entry in entries}


def _merge(fields: dict[str, Any], text: str, existing: str | None) -> str:
    ours = f"{_BEGIN}\n{text}{_END}\n"
    if existing is None:
        return f"---\n{_dump(fields)}---\n{ours}"
    existing = existing.removeprefix("\ufeff")
    old = read_card(existing)
    old.pop("dataset_info", None)
    listed = old.get("configs") if isinstance(old.get("configs"), list) else []
    configs = [c for c in listed or [] if isinstance(c, dict) and c.get("config_name") != "default"]
    merged = {**old, **fields, "configs": [*fields["configs"], *configs]}
    body = _FRONT.sub("", existing, count=1)
    if _BEGIN in body and _END in body:
        before, _, rest = body.partition(_BEGIN)
        body = before + ours + rest.partition(_END)[2].removeprefix("\n")
    elif not body.strip():
        body = ours
    return f"---\n{_dump(merged)}---\n{body}"


def _dump(fields: dict[str, Any]) -> str:
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=1000)


def _license(about: Mapping[str, Any]) -> dict[str, str]:
    """The license in the Hub's words, or as it was named."""
    said = str(about.get("License") or "").strip()
    if not said:
        return {}
    known = _LICENSES.get(re.sub(r"[^a-z0-9.]", "", said.lower()))
    return {"license": known} if known else {"license": "other", "license_name": said}


def _credits(about: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, label in _CREDITS.items():
        said = about.get(key)
        if said:
            text = "; ".join(map(str, said)) if isinstance(said, list) else str(said)
            lines.append(f"- **{label}**: {_cell(text)}")
    return ["", *lines] if lines else []


def _text(facts: CardFacts) -> str:
    lines = [
        f"# {_cell(str(facts.about.get('Name') or 'Dataset'))}",
        *_credits(facts.about),
        "",
        "| split | rows | shards | size |",
        "|---|---:|---:|---:|",
    ]
    lines += [f"| {s.name} | {s.rows:,} | {s.shards:,} | {format_size(s.bytes)} |" for s in facts.splits]
    told = facts.about.get("columns") or {}
    lines += ["", "| column | type | |", "|---|---|---|"]
    lines += [f"| `{_cell(name)}` | {_cell(kind)} | {_cell(told.get(name, ''))} |" for name, kind in facts.columns]
    if facts.left_out:
        lines += ["", f"Left out, because the format cannot hold files of that size: {len(facts.left_out)}", ""]
        lines += [f"- `{_cell(path)}`" for path in facts.left_out]
    if facts.extension == ".parquet":
        load = 'from datasets import load_dataset\n\ndataset = load_dataset("PATH_OF_THIS_FOLDER")'
    else:
        load = f'import webdataset\n\ndataset = webdataset.WebDataset("data/{facts.splits[0].name}-....tar")'
    lines += ["", "```python", *load.splitlines(), "```", "", "Built with brim.", ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<!--", "<! --")

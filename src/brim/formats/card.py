"""Write and read the dataset card: the README.md that describes a dataset for `load_dataset` and for people.

brim owns its config in the YAML fields `configs` and `dataset_info`, and the text between its two markers. All other
lines of a card were written by a person and stay unchanged. The field `configs`: card_configs.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import yaml

from brim.errors import DestinationError
from brim.formats.card_configs import (
    UNFINISHED,
    by_split,
    card_entries,
    changed_configs,
    fits,
    patterns_of,
    refuse_lost,
)
from brim.records import dataclass
from brim.sizes import format_size

CARD = "README.md"
_NO_FILES: Mapping[str, int] = {}
_TABLE = re.compile(r"\| split \| rows \|.*?\n\n", re.DOTALL)
BEGIN, _END = "<!-- brim:begin -->", "<!-- brim:end -->"  # around brim's text
# The rule before the fields, the fields, the rule after them. Blanks and line ends are those of the author.
_FRONT = re.compile(r"\A(?P<open>\ufeff?---[ \t]*\r?\n)(?P<yaml>.*?)(?P<close>^---[ \t]*(?:\r?\n|\Z))", re.S | re.M)
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
_HUB_LICENSE = re.compile(
    r"apache-2\.0|mit|cc0-1\.0|cc-by(-nc)?(-sa|-nd)?-[234]\.[05]|odc-by|odbl|pddl|(l|a)?gpl-[23]\.[01]|gfdl|unknown"
    r"|cdla-(permissive|sharing)-[12]\.0|openrail|bsd(-[23]-clause)?|unlicense|c-uda|isc|afl-3\.0"
)
_CREDITS = {
    "Authors": "Authors",
    "License": "License",
    "DatasetDOI": "DOI",
    "HowToAcknowledge": "How to acknowledge",
    "Funding": "Funding",
    "Selected": "Selected",
    "Citation": "Citation",
}


@dataclass(frozen=True, slots=True)
class SplitFacts:
    """The entry of a split in a card."""

    name: str
    rows: int
    bytes: int
    shards: int
    memory_bytes: int | None = None  # as `datasets` computes it, if known


@dataclass(frozen=True, slots=True)
class CardFacts:
    """The contents of a card. `features` is the YAML list, or None."""

    splits: Sequence[SplitFacts]
    features: list[dict[str, Any]] | None
    extension: str
    columns: Sequence[tuple[str, str]]  # name, type
    left_out: Sequence[str] = ()
    about: Mapping[str, Any] = field(default_factory=dict)  # the source's description of itself, with the keys of BIDS
    where: str = "PATH_OF_THIS_FOLDER"  # the first argument of load_dataset
    config: str = "default"
    folder: str = "data"
    keep_splits: bool = False  # other splits of the config stay unchanged
    set_default: bool = False
    replace: bool = False  # also replace a config that a person wrote
    bare: bool = False  # list files without their extension, like `push_to_hub`
    appended: bool = False  # rows were appended, so the description of the source stays
    notes: Sequence[str] = ()  # listed in the text
    code: str = ""  # how to read the dataset if `load_dataset` cannot
    shards: Collection[str] = ()  # their names, if configs of other authors could list them

    @property
    def loadable(self) -> bool:
        """Return whether `load_dataset` reads the dataset and uses `dataset_info`."""
        return self.extension in (".parquet", ".arrow")


def write_card(facts: CardFacts, existing: str | None, names: Mapping[str, int] = _NO_FILES) -> str:
    """Write the card of a finished dataset into an existing card. `names` are the existing files and their sizes."""
    old = {} if existing is None else read_card(existing)
    ending = "" if facts.bare else facts.extension
    files = [{"split": s.name, "path": f"{facts.folder}/{s.name}-*{ending}"} for s in facts.splits]
    configs = changed_configs(
        old, facts.config, files, keep_splits=facts.keep_splits, set_default=facts.set_default, names=names,
        replace=facts.replace, extension=facts.extension,
    )  # fmt: skip
    if facts.shards:
        prefixes = tuple(f"{facts.folder}/{s.name}-" for s in facts.splits) if facts.keep_splits else f"{facts.folder}/"
        other_configs = [entry for entry in configs if entry["config_name"] != facts.config]
        refuse_lost(other_configs, names, prefixes, facts.shards)
    if facts.code:
        configs = [entry for entry in configs if entry.get("config_name") != facts.config]
    fields: dict[str, Any] = {"configs": configs}
    if "license" not in old:
        fields |= _license(facts.about)
    if facts.about.get("Name") and "pretty_name" not in old:
        fields["pretty_name"] = str(facts.about["Name"])
    # The reader of tars infers its own features; those of an earlier Parquet version would be wrong.
    fields["dataset_info"] = _info(facts, old, names, configs) if facts.loadable else _other_infos(old, facts.config)
    text = _text(facts, _other_splits(facts, old))
    return _merge(fields, _appended_text(text, existing) if facts.appended else text, existing)


def _appended_text(text: str, existing: str | None) -> str:
    """Return the existing text with the table of splits of the new text."""
    own = re.search(rf"{BEGIN}\n(.*?){_END}", existing or "", re.DOTALL)
    if own is None or "Left out, because" in text or not (old_table := _TABLE.search(own[1])):
        return text
    table = _TABLE.search(text)
    assert table is not None
    return own[1][: old_table.start()] + table[0] + own[1][old_table.end() :]


def write_waiting_card(existing: str | None, config: str, folder: str, shards: Mapping[str, Sequence[str]]) -> str:
    """Write the card while shards are being appended: it lists the existing shards of each split by their names."""
    old = {} if existing is None else read_card(existing)
    files = [{"split": split, "path": list(names)} for split, names in shards.items()]
    entries = [entry for entry in card_entries(old) if entry["config_name"] != config]
    mine = next((entry for entry in card_entries(old) if entry["config_name"] == config), {"config_name": config})
    listed = [each for each in by_split(mine.get("data_files"), files, "split") if isinstance(each, dict)]
    waiting = {**mine, "data_files": listed or files}
    configs = [waiting, *entries] if config == "default" else [*entries, waiting]
    return _merge({"configs": configs}, "", existing, keep_text=True)


def _info(facts: CardFacts, old: dict[str, Any], names: Mapping[str, int], configs: Sequence[dict[str, Any]]) -> Any:
    """Return `dataset_info` as `datasets` writes it: one mapping for one config, a list for several."""
    mine: dict[str, Any] = {} if facts.config == "default" else {"config_name": facts.config}
    mine |= {} if facts.features is None else {"features": facts.features}
    splits: list[dict[str, Any]] = [
        {"name": s.name, "num_bytes": s.bytes if s.memory_bytes is None else s.memory_bytes, "num_examples": s.rows}
        for s in facts.splits
    ]
    for info in _infos(old):
        if info["config_name"] == facts.config and facts.keep_splits:
            splits = by_split(info.get("splits"), splits, "name")
            if info.get("features") is not None and info["features"] != mine.get("features"):
                raise DestinationError(
                    "The existing splits have different columns or types.",
                    hint="Publish all splits together, or publish this one with another --config.",
                )
    download_bytes = sum(split.bytes for split in facts.splits)
    ours = {split.name for split in facts.splits}
    old_patterns = [
        each for entry in card_entries(old) if entry["config_name"] == facts.config for each in patterns_of(entry)
    ]
    for split in splits:
        if split.get("name") not in ours:  # the sizes of its files, or else the size in the card
            patterns = [pattern for name, pattern in old_patterns if name == split.get("name")]
            sizes = [size for name, size in names.items() if any(fits(name, pattern) for pattern in patterns)]
            download_bytes += sum(sizes) if sizes else _number(split.get("num_bytes"))
    listed = [each for entry in configs if entry["config_name"] == facts.config for each in patterns_of(entry)]
    # `load_dataset` refuses a split that is not among these: if nothing is known about one, none are listed.
    if {split for split, path in listed if path != UNFINISHED} <= {str(split.get("name")) for split in splits}:
        total = sum(_number(split.get("num_bytes")) for split in splits)
        mine |= {"splits": splits, "download_size": download_bytes, "dataset_size": total}
    other_infos = _other_infos(old, facts.config)
    return [*other_infos, {"config_name": facts.config, **mine}] if other_infos else mine


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _infos(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the `dataset_info` of each config."""
    stored = fields.get("dataset_info")
    infos = [info for info in (stored if isinstance(stored, list) else [stored]) if isinstance(info, dict)]
    return [{"config_name": info.get("config_name", "default"), **info} for info in infos]


def _other_infos(fields: dict[str, Any], config: str) -> list[dict[str, Any]]:
    return [info for info in _infos(fields) if info["config_name"] != config]


def _other_splits(facts: CardFacts, old: dict[str, Any]) -> list[SplitFacts]:
    """Return the splits of a card that stay. Their numbers of shards are not known."""
    ours = {split.name for split in facts.splits}
    infos = [info for info in _infos(old) if facts.keep_splits and info["config_name"] == facts.config]
    lists = [info["splits"] for info in infos if isinstance(info.get("splits"), list)]
    listed = [split for splits in lists for split in splits if isinstance(split, dict)]
    return [
        SplitFacts(str(split["name"]), _number(split["num_examples"]), _number(split["num_bytes"]), 0)
        for split in listed
        if split.keys() >= {"name", "num_examples", "num_bytes"} and split["name"] not in ours
    ]


def write_unfinished_card(
    existing: str | None, config: str = "default", split: str | None = None, names: Mapping[str, int] = _NO_FILES
) -> str:
    """Write the card of a dataset that is being built, so that loading it fails with an explanation.

    If only one split is being built, the entries of the others stay, because the finished card keeps them.
    """
    old = {} if existing is None else read_card(existing)
    files = [{"split": split or "train", "path": UNFINISHED}]
    configs = changed_configs(old, config, files, keep_splits=split is not None, names=names, replace=True)
    fields: dict[str, Any] = {"configs": configs}
    if split is None:
        fields["dataset_info"] = _other_infos(old, config)
    text = "# Unfinished dataset\n\nThis dataset is being built. Run the same brim command again to continue.\n"
    return _merge(fields, text, existing)


def read_card(text: str) -> dict[str, Any]:
    """Parse the YAML fields of a card."""
    match = _FRONT.match(text)
    try:
        fields = yaml.safe_load(match["yaml"]) if match else {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that no calendar has
        raise DestinationError(
            f"The YAML at the top of {CARD} is not valid: {' '.join(str(error).split())}.",
            hint=f"Fix the YAML, or move {CARD} away and run the same command to write a new one.",
        ) from error
    return fields if isinstance(fields, dict) else {}


def card_info(fields: dict[str, Any], config: str = "default") -> dict[str, Any]:
    """Return the `dataset_info` of a config."""
    return next((info for info in _infos(fields) if info["config_name"] == config), {})


_SPLIT_KEYS = {"name", "num_bytes", "num_examples", "shard_lengths", "original_shard_lengths", "dataset_name"}


def info_faults(info: dict[str, Any], splits: Collection[str]) -> Iterator[str]:
    """Describe the parts of a `dataset_info` that `load_dataset` refuses; the config has these `splits`."""
    features, entries = info.get("features", []), info.get("splits", [])
    if not isinstance(features, list) or not all(isinstance(each, dict) and "name" in each for each in features):
        yield "its `features` are not a list of columns with names"
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        yield "its `splits` are not a list of splits"
        return
    for entry in entries:
        sizes = [entry.get("num_bytes", 0), entry.get("num_examples")]
        if entry.keys() - _SPLIT_KEYS or not all(isinstance(size, int) and size >= 0 for size in sizes):
            yield f"what it says of the split {entry.get('name')!r} is not its name, rows and bytes"
    if "splits" in info and sorted(str(entry.get("name")) for entry in entries) != sorted(splits):
        names = ", ".join(str(entry.get("name")) for entry in entries)
        yield f"tells of the splits {names or '(none)'}, the shards are of {', '.join(sorted(splits)) or '(none)'}"
    for size in ("download_size", "dataset_size"):
        if not isinstance(info.get(size, 0), int):
            yield f"its `{size}` is not a number"


def repeated_field(text: str) -> str | None:
    """Return a field that occurs twice in one mapping of a card, which the clients of the Hub refuse to read."""
    match = _FRONT.match(text)
    nodes = [yaml.compose(match["yaml"])] if match else []
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.MappingNode):
            keys = [str(key.value) for key, _ in node.value]
            twice = next((key for key in keys if keys.count(key) > 1), None)
            if twice is not None:
                return twice
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
    return None


def feature_changes(features: Any, expected: list[dict[str, Any]]) -> list[str]:
    """Describe how the features of a card differ from those of the shards."""
    is_list = isinstance(features, list)
    ours = {str(each.get("name")): each for each in features if isinstance(each, dict)} if is_list else {}
    if is_list and len(ours) < len(features):
        return ["names a column twice, or something that is no column"]
    theirs = {str(each["name"]): each for each in expected}
    lines = [f"does not name the column {name!r} of the shards" for name in theirs if name not in ours]
    lines += [f"names the column {name!r}, which the shards do not have" for name in ours if name not in theirs]
    for name in theirs:
        if name in ours and _with_text_keys(ours[name]) != _with_text_keys(theirs[name]):
            card_type, shard_type = (_type_text(each[name]) for each in (ours, theirs))
            lines.append(f"says {card_type} of the column {name!r}, the shards {shard_type}")
    if not lines and list(ours) != list(theirs):
        lines.append("names the columns in another order than the shards")
    return lines


def _with_text_keys(value: Any) -> Any:
    """Make features comparable: keys that are numbers in YAML are texts in JSON."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(each) for key, each in value.items()}
    return [_with_text_keys(each) for each in value] if isinstance(value, list | tuple) else value


def _type_text(feature: dict[str, Any]) -> str:
    details = {key: value for key, value in feature.items() if key != "name"}
    return str(details["dtype"]) if list(details) == ["dtype"] else str(details)


def card_rows(fields: dict[str, Any], config: str = "default") -> dict[str, int]:
    """Return the rows of each split of a config, as far as the card has them."""
    rows: dict[str, int] = {}
    for info in _infos(fields):
        splits = info.get("splits") if info["config_name"] == config else None
        for split in splits if isinstance(splits, list) else []:
            if isinstance(split, dict) and isinstance(split.get("num_examples"), int):
                rows[str(split.get("name"))] = split["num_examples"]
    return rows


def card_splits(fields: dict[str, Any], config: str = "default") -> set[str] | None:
    """Return the splits that a card lists for a config, or None if it lists files in another way."""
    mine = next((entry for entry in card_entries(fields) if entry["config_name"] == config), {})
    entries = mine.get("data_files")
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "split" in e for e in entries):
        return None
    return {str(entry["split"]) for entry in entries}


def card_folders(fields: dict[str, Any]) -> set[str]:
    """Return the folders of the files of all configs."""
    return {path.rpartition("/")[0] for entry in card_entries(fields) for _, path in patterns_of(entry)}


def _merge(fields: dict[str, Any], text: str, existing: str | None, *, keep_text: bool = False) -> str:
    """Put brim's fields and text into an existing card, and keep all other lines unchanged."""
    ours = f"{BEGIN}\n{text}{_END}\n"
    if existing is None:
        return f"---\n{_dump({k: v for k, v in fields.items() if v not in ([], {})})}---\n{ours}"
    match = _FRONT.match(existing)
    if match and not isinstance(yaml.safe_load(match["yaml"]), dict | None):
        match = None  # a text between two rules instead of fields
    if match is None:
        opening, closing, body = "---\n", "---\n", existing.removeprefix("\ufeff")
        front = _set_fields("", fields)
    else:
        # A byte order mark before the rule, or blanks after it, would hide the fields from the clients of the Hub.
        opening, closing = (re.sub(r"\ufeff|[ \t]", "", match[name]) for name in ("open", "close"))
        body = existing[match.end() :]
        front = _set_fields(match["yaml"], fields)
        if not closing.endswith("\n"):
            closing += "\n"
    if keep_text:
        pass
    elif BEGIN in body and _END in body:
        before, _, after = body.partition(BEGIN)
        body = before + ours + after.partition(_END)[2].removeprefix("\r").removeprefix("\n")
    elif not body.strip():
        body += ours
    return f"{opening}{front}{closing}{body}"


def _set_fields(front: str, fields: dict[str, Any]) -> str:
    """Replace, add or (empty ones) remove some top-level fields of a YAML text; all others keep their lines.

    If that is impossible (an anchor in a replaced field, {a: 1}, an end marker), all fields are written again: their
    values are more important than their layout.
    """
    all_fields = {**(yaml.safe_load(front) or {}), **fields}
    all_fields = {name: value for name, value in all_fields.items() if name not in fields or value not in ([], {})}
    try:
        text = _set_lines(front, fields)
        result = yaml.safe_load(text) or {}
    except yaml.YAMLError:
        return _dump(all_fields)
    is_same = {key: repr(value) for key, value in result.items()} == {key: repr(v) for key, v in all_fields.items()}
    return text if is_same else _dump(all_fields)


def _set_lines(front: str, fields: dict[str, Any]) -> str:
    node = yaml.compose(front)
    pairs = node.value if isinstance(node, yaml.MappingNode) and not node.flow_style else []
    starts = [key.start_mark.index for key, _ in pairs]
    remaining = {name: value for name, value in fields.items() if value not in ([], {})}
    parts = [front[: starts[0]] if starts else front]
    for (key, _), start, stop in zip(pairs, starts, [*starts[1:], len(front)], strict=False):
        if key.value not in fields:
            parts.append(front[start:stop])
            continue
        parts.append(_dump({key.value: remaining.pop(key.value)}) if key.value in remaining else "")
        # Comments and blank lines after a field belong to the next one.
        lines = front[start:stop].splitlines(keepends=True)
        end = len(lines)
        while end and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
            end -= 1
        parts += lines[end:]
    text = "".join(parts)
    end_of_line = "\n" if text and not text.endswith("\n") else ""
    return text + end_of_line + (_dump(remaining) if remaining else "")


def _dump(fields: dict[str, Any]) -> str:
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=1000)


SEVERAL_LICENSES = "several"
_DIFFERENT_LICENSES = " (the licenses of the sources differ: each holds for its own rows)"


def _license(about: Mapping[str, Any]) -> dict[str, str]:
    """Return the license by its name on the Hub, or by its original name."""
    name = str(about.get("License") or "").strip()
    if not name:
        return {}
    if about.get("LicensesDiffer"):
        return {"license": "other", "license_name": SEVERAL_LICENSES}
    if _HUB_LICENSE.fullmatch(name):  # from another card
        return {"license": name}
    hub_name = _LICENSES.get(re.sub(r"[^a-z0-9.]", "", name.lower()))
    return {"license": hub_name} if hub_name else {"license": "other", "license_name": name}


def _credits(about: Mapping[str, Any]) -> list[str]:
    citation = about.get("Citation")
    is_bibtex = isinstance(citation, str) and citation.lstrip().startswith("@")
    lines = []
    for key, label in _CREDITS.items():
        value = about.get(key)
        if value and not (key == "Citation" and is_bibtex):
            text = "; ".join(map(str, value)) if isinstance(value, list) else str(value)
            text += _DIFFERENT_LICENSES if key == "License" and about.get("LicensesDiffer") else ""
            lines.append(f"- **{label}**: {_cell(text)}")
    lines = ["", *lines] if lines else []
    if is_bibtex:  # in the form that readers of cards expect, among them the next selection
        cited = str(citation).replace("```", "").replace("<!--", "<! --")
        lines += ["", "```bibtex", *cited.strip().splitlines(), "```"]
    return lines


def _text(facts: CardFacts, other_splits: Sequence[SplitFacts]) -> str:
    """Write brim's text: credits, tables of splits and columns, and the code that loads the dataset."""
    lines = [
        f"# {_cell(str(facts.about.get('Name') or 'Dataset'))}",
        *_credits(facts.about),
        "",
        "| split | rows | shards | size |",
        "|---|---:|---:|---:|",
    ]
    for split in (*other_splits, *facts.splits):
        count = f"{split.shards:,}" if split.shards else ""
        lines.append(f"| {split.name} | {split.rows:,} | {count} | {format_size(split.bytes)} |")
    meanings = facts.about.get("columns") or {}
    lines += ["", "| column | type | |", "|---|---|---|"]
    lines += [f"| `{_cell(name)}` | {_cell(kind)} | {_cell(meanings.get(name, ''))} |" for name, kind in facts.columns]
    if facts.left_out:
        lines += ["", f"Left out, because the format cannot hold files of that size: {len(facts.left_out)}", ""]
        lines += [f"- `{_cell(path)}`" for path in facts.left_out]
    lines += ["", *(f"- {_single_line(note)}" for note in facts.notes)] if facts.notes else []
    if facts.code:
        load = facts.code
    elif facts.loadable:
        arguments = f'"{facts.where}"' if facts.config == "default" else f'"{facts.where}", "{facts.config}"'
        load = f"from datasets import load_dataset\n\ndataset = load_dataset({arguments})"
    else:
        load = f'import webdataset\n\ndataset = webdataset.WebDataset("{facts.folder}/{facts.splits[0].name}-....tar")'
    lines += ["", "```python", *load.splitlines(), "```", "", "Built with brim.", ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return _single_line(text).replace("|", "\\|")


def _single_line(text: str) -> str:
    return text.replace("\n", " ").replace("<!--", "<! --")

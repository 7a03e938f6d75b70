"""The dataset card: the README.md that tells `load_dataset` and people what is in a dataset.

brim owns its config in the YAML fields `configs` and `dataset_info`, and the text between its two markers.
Whatever else a card says was written by a person and stays, line by line.
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
_NOTHING: Mapping[str, int] = {}
_TABLE = re.compile(r"\| split \| rows \|.*?\n\n", re.DOTALL)
BEGIN, _END = "<!-- brim:begin -->", "<!-- brim:end -->"  # around what is brim's own
# What opens the fields, the fields, what closes them: blanks and line ends are those of whoever wrote it.
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
    """What a card says about a split."""

    name: str
    rows: int
    bytes: int
    shards: int
    memory_bytes: int | None = None  # what `datasets` says that it takes, where it was asked


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card says about a dataset. `features` is the YAML list, or None where there is none."""

    splits: Sequence[SplitFacts]
    features: list[dict[str, Any]] | None
    extension: str
    columns: Sequence[tuple[str, str]]  # name, type
    left_out: Sequence[str] = ()
    about: Mapping[str, Any] = field(default_factory=dict)  # what the source says of itself, in BIDS's words
    where: str = "PATH_OF_THIS_FOLDER"  # what load_dataset takes
    config: str = "default"
    folder: str = "data"
    keep_splits: bool = False  # other splits of the config stay as the card has them
    set_default: bool = False
    replace: bool = False  # also what a person wrote of this config
    bare: bool = False  # files are listed without their ending, as `push_to_hub` does
    appended: bool = False  # behind what was there: what a card says of its source stays
    notes: Sequence[str] = ()  # what else is worth knowing
    code: str = ""  # how it is read, where `load_dataset` cannot
    shards: Collection[str] = ()  # their names, where others could have named them too

    @property
    def loadable(self) -> bool:
        """Whether `load_dataset` reads it, and takes what the card says of it."""
        return self.extension in (".parquet", ".arrow")


def write_card(facts: CardFacts, existing: str | None, names: Mapping[str, int] = _NOTHING) -> str:
    """The card of a finished dataset, around what a person wrote in the existing one. `names` are the files there."""
    old = {} if existing is None else read_card(existing)
    ending = "" if facts.bare else facts.extension
    files = [{"split": s.name, "path": f"{facts.folder}/{s.name}-*{ending}"} for s in facts.splits]
    configs = changed_configs(
        old, facts.config, files, keep_splits=facts.keep_splits, set_default=facts.set_default, names=names,
        replace=facts.replace, extension=facts.extension,
    )  # fmt: skip
    if facts.shards:
        of = tuple(f"{facts.folder}/{s.name}-" for s in facts.splits) if facts.keep_splits else f"{facts.folder}/"
        others = [entry for entry in configs if entry["config_name"] != facts.config]
        refuse_lost(others, names, of, facts.shards)
    if facts.code:
        configs = [entry for entry in configs if entry.get("config_name") != facts.config]
    fields: dict[str, Any] = {"configs": configs}
    if "license" not in old:
        fields |= _license(facts.about)
    if facts.about.get("Name") and "pretty_name" not in old:
        fields["pretty_name"] = str(facts.about["Name"])
    # The reader of tars finds its own features; what an earlier Parquet version said would be wrong.
    fields["dataset_info"] = _info(facts, old, names, configs) if facts.loadable else _others(old, facts.config)
    text = _text(facts, _other_splits(facts, old))
    return _merge(fields, _appended_text(text, existing) if facts.appended else text, existing)


def _appended_text(text: str, existing: str | None) -> str:
    """The text that is there, with the numbers of the new one."""
    found = re.search(rf"{BEGIN}\n(.*?){_END}", existing or "", re.DOTALL)
    if found is None or "Left out, because" in text or not (there := _TABLE.search(found[1])):
        return text
    table = _TABLE.search(text)
    assert table is not None
    return found[1][: there.start()] + table[0] + found[1][there.end() :]


def write_waiting_card(existing: str | None, config: str, folder: str, there: Mapping[str, Sequence[str]]) -> str:
    """The card while shards come behind those that are `there` (by split): readers see these, each by its name."""
    old = {} if existing is None else read_card(existing)
    files = [{"split": split, "path": list(names)} for split, names in there.items()]
    entries = [entry for entry in card_entries(old) if entry["config_name"] != config]
    mine = next((entry for entry in card_entries(old) if entry["config_name"] == config), {"config_name": config})
    known = [one for one in by_split(mine.get("data_files"), files, "split") if isinstance(one, dict)]
    waiting = {**mine, "data_files": known or files}
    configs = [waiting, *entries] if config == "default" else [*entries, waiting]
    return _merge({"configs": configs}, "", existing, keep_text=True)


def _split_bytes(split: dict[str, Any], facts: CardFacts, old: dict[str, Any], names: Mapping[str, int]) -> int:
    """The bytes of the files of another split, as they are listed; else as the card has them."""
    entries = [entry for entry in card_entries(old) if entry["config_name"] == facts.config]
    patterns = [path for entry in entries for name, path in patterns_of(entry) if name == split.get("name")]
    found = [size for name, size in names.items() if any(fits(name, pattern) for pattern in patterns)]
    return sum(found) if found else _number(split.get("num_bytes"))


def _info(facts: CardFacts, old: dict[str, Any], names: Mapping[str, int], configs: Sequence[dict[str, Any]]) -> Any:
    """`dataset_info` as `datasets` writes it: one mapping for one config, a list for several."""
    mine: dict[str, Any] = {} if facts.config == "default" else {"config_name": facts.config}
    mine |= {} if facts.features is None else {"features": facts.features}
    splits: list[dict[str, Any]] = [
        {
            "name": s.name,
            "num_bytes": s.bytes if s.memory_bytes is None else s.memory_bytes,
            "num_examples": s.rows,
        }
        for s in facts.splits
    ]
    for info in _infos(old):
        if info["config_name"] == facts.config and facts.keep_splits:
            splits = by_split(info.get("splits"), splits, "name")
            if info.get("features") is not None and info["features"] != mine.get("features"):
                raise DestinationError(
                    "The other splits there have other columns or types.",
                    hint="Publish all splits together, or give this one another --config.",
                )
    total = sum(_number(split.get("num_bytes")) for split in splits)
    ours = {split.name for split in facts.splits}
    others_bytes = sum(_split_bytes(split, facts, old, names) for split in splits if split.get("name") not in ours)
    sent = others_bytes + sum(split.bytes for split in facts.splits)
    listed = [pattern for entry in configs if entry["config_name"] == facts.config for pattern in patterns_of(entry)]
    # `load_dataset` refuses a split that is not among those told: with one of which nothing is known, none are.
    if {split for split, path in listed if path != UNFINISHED} <= {str(split.get("name")) for split in splits}:
        mine |= {"splits": splits, "download_size": sent, "dataset_size": total}
    others = _others(old, facts.config)
    if not others:
        return mine
    return [*others, {"config_name": facts.config, **mine}]


def _number(said: Any) -> int:
    """What a card says of a size; nothing if that is no number."""
    return said if isinstance(said, int) else 0


def _infos(old: dict[str, Any]) -> list[dict[str, Any]]:
    """What a card says of each config."""
    known = old.get("dataset_info")
    infos = [info for info in (known if isinstance(known, list) else [known]) if isinstance(info, dict)]
    return [{"config_name": info.get("config_name", "default"), **info} for info in infos]


def _others(old: dict[str, Any], config: str) -> list[dict[str, Any]]:
    """What a card says of other configs."""
    return [info for info in _infos(old) if info["config_name"] != config]


def _other_splits(facts: CardFacts, old: dict[str, Any]) -> list[SplitFacts]:
    """What a card says of splits that stay. How many shards they have, it does not."""
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
    existing: str | None, config: str = "default", split: str | None = None, names: Mapping[str, int] = _NOTHING
) -> str:
    """The card of a dataset that is being built: whoever loads it is told so.

    If one split alone is being built, what is said of the others stays: the finished card begins with it.
    """
    old = {} if existing is None else read_card(existing)
    files = [{"split": split or "train", "path": UNFINISHED}]
    configs = changed_configs(old, config, files, keep_splits=split is not None, names=names, replace=True)
    fields: dict[str, Any] = {"configs": configs}
    if split is None:
        fields["dataset_info"] = _others(old, config)
    text = "# Unfinished dataset\n\nThis dataset is being built. Run the same brim command again to continue.\n"
    return _merge(fields, text, existing)


def read_card(text: str) -> dict[str, Any]:
    """The YAML fields of a card."""
    match = _FRONT.match(text)
    try:
        fields = yaml.safe_load(match["yaml"]) if match else {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that no calendar has
        raise DestinationError(
            f"The YAML at the top of {CARD} is broken: {' '.join(str(error).split())}.",
            hint=f"Correct the YAML; or move {CARD} away and run again, which writes a new one.",
        ) from error
    return fields if isinstance(fields, dict) else {}


def card_info(fields: dict[str, Any], config: str = "default") -> dict[str, Any]:
    """What a card tells of a config under `dataset_info`."""
    return next((info for info in _infos(fields) if info["config_name"] == config), {})


_SPLIT_KEYS = {"name", "num_bytes", "num_examples", "shard_lengths", "original_shard_lengths", "dataset_name"}
_SIZES = ("download_size", "dataset_size")


def info_faults(info: dict[str, Any], splits: Collection[str]) -> Iterator[str]:
    """What `load_dataset` refuses in what a card tells of a config under `dataset_info`, which has these splits."""
    features, told = info.get("features", []), info.get("splits", [])
    if not isinstance(features, list) or not all(isinstance(one, dict) and "name" in one for one in features):
        yield "its `features` are not a list of columns with names"
    if not isinstance(told, list) or not all(isinstance(one, dict) for one in told):
        yield "its `splits` are not a list of splits"
        return
    for one in told:
        sizes = [one.get("num_bytes", 0), one.get("num_examples")]
        if one.keys() - _SPLIT_KEYS or not all(isinstance(size, int) and size >= 0 for size in sizes):
            yield f"what it says of the split {one.get('name')!r} is not its name, rows and bytes"
    if "splits" in info and sorted(str(one.get("name")) for one in told) != sorted(splits):
        named = ", ".join(str(one.get("name")) for one in told)
        yield f"tells of the splits {named or '(none)'}, the shards are of {', '.join(sorted(splits)) or '(none)'}"
    for size in _SIZES:
        if not isinstance(info.get(size, 0), int):
            yield f"its `{size}` is not a number"


def repeated_field(text: str) -> str | None:
    """A field that stands twice in one mapping of a card: the clients of the Hub refuse to read it."""
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


def feature_changes(said: Any, wanted: list[dict[str, Any]]) -> list[str]:
    """How the features of a card differ from those of the shards, in words."""
    found = {str(one.get("name")): one for one in said if isinstance(one, dict)} if isinstance(said, list) else {}
    if isinstance(said, list) and len(found) < len(said):
        return ["names a column twice, or something that is no column"]
    right = {str(one["name"]): one for one in wanted}
    lines = [f"does not name the column {name!r} of the shards" for name in right if name not in found]
    lines += [f"names the column {name!r}, which the shards do not have" for name in found if name not in right]
    both = [name for name in right if name in found and _plain(found[name]) != _plain(right[name])]
    lines += [
        f"says {_kind_of(found[name])} of the column {name!r}, the shards {_kind_of(right[name])}" for name in both
    ]
    if not lines and list(found) != list(right):
        lines.append("names the columns in another order than the shards")
    return lines


def _plain(value: Any) -> Any:
    """A feature as it is compared: numbers that are keys are texts in YAML and numbers in JSON."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _kind_of(feature: dict[str, Any]) -> str:
    rest = {key: value for key, value in feature.items() if key != "name"}
    return str(next(iter(rest.values()))) if list(rest) == ["dtype"] else str(rest)


def card_rows(fields: dict[str, Any], config: str = "default") -> dict[str, int]:
    """The rows of each split of a config that a card tells, in any of the forms that cards have."""
    infos = fields.get("dataset_info")
    rows: dict[str, int] = {}
    for info in infos if isinstance(infos, list) else [infos]:
        if not isinstance(info, dict) or info.get("config_name", "default") != config:
            continue
        splits = info.get("splits")
        for split in splits if isinstance(splits, list) else []:
            if isinstance(split, dict) and isinstance(split.get("num_examples"), int):
                rows[str(split.get("name"))] = split["num_examples"]
    return rows


def card_splits(fields: dict[str, Any], config: str = "default") -> set[str] | None:
    """The splits that a card lists of a config, or None if it lists files in another way."""
    mine = next((entry for entry in card_entries(fields) if entry["config_name"] == config), {})
    entries = mine.get("data_files")
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "split" in e for e in entries):
        return None
    return {str(entry["split"]) for entry in entries}


def card_folders(fields: dict[str, Any]) -> set[str]:
    """The folders in which a card's configs look for their files."""
    return {path.rpartition("/")[0] for entry in card_entries(fields) for _, path in patterns_of(entry)}


def _merge(fields: dict[str, Any], text: str, existing: str | None, *, keep_text: bool = False) -> str:
    """An existing card with our fields and our text in it, and every other line as it was."""
    ours = f"{BEGIN}\n{text}{_END}\n"
    if existing is None:
        return f"---\n{_dump({k: v for k, v in fields.items() if v not in ([], {})})}---\n{ours}"
    match = _FRONT.match(existing)
    if match and not isinstance(yaml.safe_load(match["yaml"]), dict | None):
        match = None  # a text between two rules, and no fields
    if match is None:
        opening, closing, body = "---\n", "---\n", existing.removeprefix("\ufeff")
        front = _set_fields("", fields)
    else:
        # A mark in front of the rule, or blanks behind it, would keep the clients of the Hub from reading the fields.
        opening, closing = (re.sub(r"\ufeff|[ \t]", "", match[name]) for name in ("open", "close"))
        body = existing[match.end() :]
        front = _set_fields(match["yaml"], fields)
        if not closing.endswith("\n"):
            closing += "\n"
    if keep_text:
        pass
    elif BEGIN in body and _END in body:
        before, _, rest = body.partition(BEGIN)
        body = before + ours + rest.partition(_END)[2].removeprefix("\r").removeprefix("\n")
    elif not body.strip():
        body += ours
    return f"{opening}{front}{closing}{body}"


def _set_fields(front: str, fields: dict[str, Any]) -> str:
    """YAML text with some top-level fields replaced, added or (empty ones) removed; all others keep their lines.

    Where that cannot be (an anchor in a field that is replaced, {a: 1}, an end marker), the fields are written anew:
    what they say is worth more than how they look.
    """
    wanted = {**(yaml.safe_load(front) or {}), **fields}
    wanted = {name: value for name, value in wanted.items() if name not in fields or value not in ([], {})}
    try:
        text = _set_lines(front, fields)
        found = yaml.safe_load(text) or {}
    except yaml.YAMLError:
        return _dump(wanted)
    return text if _said(found) == _said(wanted) else _dump(wanted)


def _said(fields: dict[Any, Any] | None) -> dict[Any, str] | None:
    return None if fields is None else {name: repr(value) for name, value in fields.items()}


def _set_lines(front: str, fields: dict[str, Any]) -> str:
    node = yaml.compose(front)
    pairs = node.value if isinstance(node, yaml.MappingNode) and not node.flow_style else []
    starts = [key.start_mark.index for key, _ in pairs]
    left = {name: value for name, value in fields.items() if value not in ([], {})}
    parts = [front[: starts[0]] if starts else front]
    for (key, _), start, stop in zip(pairs, starts, [*starts[1:], len(front)], strict=False):
        if key.value in fields:
            parts.append(_dump({key.value: left.pop(key.value)}) if key.value in left else "")
            parts.append(_tail(front[start:stop]))
        else:
            parts.append(front[start:stop])
    text = "".join(parts)
    end = "\n" if text and not text.endswith("\n") else ""
    return text + end + (_dump(left) if left else "")


def _tail(block: str) -> str:
    """Comments and blank lines after a field belong to what follows."""
    lines = block.splitlines(keepends=True)
    end = len(lines)
    while end and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
        end -= 1
    return "".join(lines[end:])


def _dump(fields: dict[str, Any]) -> str:
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=1000)


SEVERAL_LICENSES = "several"
_CITATION, _DIFFER = "Citation", " (the licenses of the sources differ: each holds for its own rows)"


def _license(about: Mapping[str, Any]) -> dict[str, str]:
    """The license in the Hub's words, or as it was named."""
    said = str(about.get("License") or "").strip()
    if not said:
        return {}
    if about.get("LicensesDiffer"):
        return {"license": "other", "license_name": SEVERAL_LICENSES}
    if _HUB_LICENSE.fullmatch(said):  # as another card has it
        return {"license": said}
    known = _LICENSES.get(re.sub(r"[^a-z0-9.]", "", said.lower()))
    return {"license": known} if known else {"license": "other", "license_name": said}


def _credits(about: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, label in _CREDITS.items():
        said = about.get(key)
        if said and not (key == _CITATION and _is_bibtex(said)):
            text = "; ".join(map(str, said)) if isinstance(said, list) else str(said)
            text += _DIFFER if key == "License" and about.get("LicensesDiffer") else ""
            lines.append(f"- **{label}**: {_cell(text)}")
    lines = ["", *lines] if lines else []
    if _is_bibtex(about.get(_CITATION)):  # as readers of cards look for it, the next selection among them
        cited = str(about[_CITATION]).replace("```", "").replace("<!--", "<! --")
        lines += ["", "```bibtex", *cited.strip().splitlines(), "```"]
    return lines


def _is_bibtex(text: Any) -> bool:
    return isinstance(text, str) and text.lstrip().startswith("@")


def _text(facts: CardFacts, others: Sequence[SplitFacts]) -> str:
    lines = [
        f"# {_cell(str(facts.about.get('Name') or 'Dataset'))}",
        *_credits(facts.about),
        "",
        "| split | rows | shards | size |",
        "|---|---:|---:|---:|",
    ]
    for split in (*others, *facts.splits):
        count = f"{split.shards:,}" if split.shards else ""
        lines.append(f"| {split.name} | {split.rows:,} | {count} | {format_size(split.bytes)} |")
    told = facts.about.get("columns") or {}
    lines += ["", "| column | type | |", "|---|---|---|"]
    lines += [f"| `{_cell(name)}` | {_cell(kind)} | {_cell(told.get(name, ''))} |" for name, kind in facts.columns]
    if facts.left_out:
        lines += ["", f"Left out, because the format cannot hold files of that size: {len(facts.left_out)}", ""]
        lines += [f"- `{_cell(path)}`" for path in facts.left_out]
    lines += ["", *(f"- {_one_line(note)}" for note in facts.notes)] if facts.notes else []
    if facts.code:
        load = facts.code
    elif facts.loadable:
        load = f"from datasets import load_dataset\n\ndataset = load_dataset({_arguments(facts)})"
    else:
        load = f'import webdataset\n\ndataset = webdataset.WebDataset("{facts.folder}/{facts.splits[0].name}-....tar")'
    lines += ["", "```python", *load.splitlines(), "```", "", "Built with brim.", ""]
    return "\n".join(lines)


def _arguments(facts: CardFacts) -> str:
    """What load_dataset is called with."""
    return ", ".join(f'"{word}"' for word in (facts.where, *(() if facts.config == "default" else (facts.config,))))


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


def _one_line(text: str) -> str:
    return text.replace("\n", " ").replace("<!--", "<! --")

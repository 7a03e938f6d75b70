"""Read and change the configs of a card: the files that `load_dataset` reads for each.

Every dataset that loaded before loads the same after a change. Files that no config lists get the entry that
`load_dataset` would infer from their names. A change that would break a config written by a person is refused.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from brim.errors import DestinationError

# A file that never exists, so that loading a dataset that is still being built is an error and not a smaller dataset.
UNFINISHED = "data/unfinished-run-brim-build-again-to-continue"
_OWN_KEYS = {"config_name", "data_files", "default"}
# The fields of every config of `datasets`, and of its Parquet reader.
_CONFIG_KEYS = _OWN_KEYS | {"data_dir", "description", "version", "batch_size", "columns", "features", "filters"}
_SPLIT_NAME = re.compile(r"\w+(\.\w+)*")
SPLIT_NAMES = (  # the usual names of splits in names of files and folders
    ("train", ("train", "training")),
    ("validation", ("validation", "valid", "dev", "val")),
    ("test", ("test", "testing", "eval", "evaluation")),
)
_SHARD = re.compile(r"data/(?P<split>[^/]*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_NOT_DATA = (
    "README.md",
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dummy_data.zip",
    "dataset_dict.json",
)
_SEPARATOR = "[-._ 0-9]"
_WILD = re.compile(r"[*?\[]")


def card_entries(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the configs of a card, each with its name; one without a name is the default."""
    listed = fields.get("configs")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    # YAML reads a name like 2024 as a number, and `load_dataset` is called with a text.
    with_name = [entry if "config_name" in entry else {"config_name": "default", **entry} for entry in entries]
    return [{**entry, "config_name": str(entry["config_name"])} for entry in with_name]


def patterns_of(entry: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (split, pattern) of the files of a config, in any form that cards have."""
    files = entry.get("data_files")
    if isinstance(files, dict):
        files = [{"split": split, "path": path} for split, path in files.items()]
    patterns = []
    for item in files if isinstance(files, list) else [files]:
        split, paths = (
            (str(item.get("split", "train")), item.get("path")) if isinstance(item, dict) else ("train", item)
        )
        patterns += [(split, path) for path in (paths if isinstance(paths, list) else [paths]) if isinstance(path, str)]
    return patterns


def fits(name: str, pattern: str) -> bool:
    """Return whether a file matches a pattern of a card.

    Only `**` matches a `/`, and it must be alone between two of them.
    """

    def matches(parts: list[str], patterns: list[str]) -> bool:
        if not patterns:
            return not parts
        first, *following = patterns
        if first == "**":
            return not following or any(matches(parts[start:], following) for start in range(len(parts)))
        is_match = bool(parts) and "**" not in first and fnmatch.fnmatchcase(parts[0], first)
        return is_match and matches(parts[1:], following)

    return name == pattern or matches(name.split("/"), pattern.removeprefix("./").split("/"))


def resolved_files(entry: dict[str, Any], names: Collection[str]) -> dict[str, set[str]] | None:
    """Return the files that a config loads for each split; None if it may load others than `names`."""
    files: dict[str, set[str]] = {}
    for split, pattern in patterns_of(entry):
        if "://" in pattern or "data_dir" in entry:
            return None
        files.setdefault(split, set()).update(name for name in names if fits(name, pattern))
    return files


def config_faults(fields: dict[str, Any], config: str) -> Iterator[str]:
    """Describe the parts of a config written by brim that `load_dataset` refuses, independent of its files."""
    listed = fields.get("configs") or []
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        yield "its field `configs` is not a list of configs"
        return
    if any("config_name" not in entry for entry in listed):
        yield "a config has no field `config_name`"
    entry = next((entry for entry in card_entries(fields) if entry["config_name"] == config), {})
    for key in sorted(map(str, entry.keys() - _CONFIG_KEYS)):
        yield f"the config has an unknown field `{key}`"
    files = entry.get("data_files")
    items = files if isinstance(files, list) else [files]
    if any(isinstance(item, dict) for item in items):
        mappings = [item for item in items if isinstance(item, dict)]
        splits = [item.get("split") for item in mappings]
        lists = [item["path"] if isinstance(item.get("path"), list) else [item.get("path")] for item in mappings]
        is_valid = (
            all(isinstance(item, dict) and item.keys() == {"split", "path"} for item in items)
            and all(isinstance(split, str) and _SPLIT_NAME.fullmatch(split) for split in splits)
            and all(isinstance(path, str) for paths in lists for path in paths)
        )
        if not is_valid or len(set(map(str, splits))) < len(items):
            yield "each entry of `data_files` must have a `split`, once, and a `path`"
    elif entry and not all(isinstance(item, str) for item in items):
        yield "`data_files` must be a path, a list of paths, or a list of splits with their paths"


def is_unfinished(entry: dict[str, Any]) -> bool:
    return any(path == UNFINISHED for _, path in patterns_of(entry))


def changed_configs(
    fields: dict[str, Any],
    config: str,
    files: list[dict[str, Any]],
    *,
    keep_splits: bool,
    set_default: bool = False,
    names: Collection[str] = (),
    replace: bool = False,
    extension: str = "",
) -> list[dict[str, Any]]:
    """Return the configs of a card with these `files` in one of them; `names` are the existing files.

    Raises DestinationError if other files would no longer load as before, unless they may be replaced. `extension` is
    that of the new files, if it is known.
    """
    entries = card_entries(fields)
    if not entries and (config != "default" or keep_splits):
        entries = list(_unlisted(names, config, files))
    mine: dict[str, Any] = {"config_name": config, "data_files": files}
    for entry in entries:
        if entry.get("config_name") == config:
            if keep_splits:
                replaced = {str(item["split"]) for item in files} if replace else set()
                mine["data_files"] = by_split(_files_by_split(entry, extension, replaced), files, "split")
            elif not replace:
                _refuse_hidden(entry, files, names)
            mine = {**{key: value for key, value in entry.items() if key == "default"}, **mine}
        else:
            _refuse_mixed(entry, files, names)
    if set_default:
        if config != "default" and any(entry.get("config_name") == "default" for entry in entries):
            raise DestinationError(
                "The card has a config named 'default', which is always loaded by default.",
                hint="Rename it in the card first, or leave out set_default=.",
            )
        entries = [{key: value for key, value in entry.items() if key != "default"} for entry in entries]
        mine["default"] = True
    if not any(entry.get("config_name") == config for entry in entries):
        return [*entries, mine] if config != "default" else [mine, *entries]
    return [mine if entry.get("config_name") == config else entry for entry in entries]


def by_split(existing: Any, mine: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Replace the entries of the same splits in a list, and append the other ones of `mine`."""
    listed = [entry for entry in existing if isinstance(entry, dict)] if isinstance(existing, list) else []
    ours = {entry[key]: entry for entry in mine}
    result = [ours.pop(entry.get(key), entry) for entry in listed]
    return [*result, *ours.values()]


def _files_by_split(entry: dict[str, Any], extension: str, replaced: Collection[str]) -> list[dict[str, Any]]:
    """Return the files of a config by split, so that a split can be added to it; `replaced` splits have any format."""
    name = entry["config_name"]
    extra = sorted(set(entry) - _OWN_KEYS)
    by_name: dict[str, list[str]] = {}
    for split, pattern in patterns_of(entry):
        by_name.setdefault(split, []).append(pattern)
    staying = [pattern for split, patterns in by_name.items() if split not in replaced for pattern in patterns]
    endings = {pattern.rpartition(".")[2] for pattern in staying if "." in pattern} if extension else set()
    endings -= {extension.removeprefix(".")}
    odd = [ending for ending in sorted(endings) if not _WILD.search(ending) and "/" not in ending]
    if extra or not by_name or odd:
        why = f"it says {extra[0]}" if extra else f"its files are .{odd[0]}" if odd else "it names no files"
        raise DestinationError(
            f"The config {name!r} of the card was written by hand ({why}), and another split would break it.",
            hint="Publish with another --config.",
        )
    return [
        {"split": split, "path": patterns[0] if len(patterns) == 1 else patterns} for split, patterns in by_name.items()
    ]


def _refuse_hidden(entry: dict[str, Any], files: list[dict[str, Any]], names: Collection[str]) -> None:
    """Refuse to replace a config that loads files outside of our folder: they would no longer be found."""
    folders = {str(item["path"]).rpartition("/")[0] for item in files}
    patterns = [pattern for _, pattern in patterns_of(entry)]
    lost = [n for n in names if n.rpartition("/")[0] not in folders and any(fits(n, pattern) for pattern in patterns)]
    if lost:
        raise DestinationError(
            f"The config {entry['config_name']!r} of the card loads {len(lost):,} other file(s), such as {lost[0]}, "
            "which would no longer be found.",
            hint="Publish with another --config, or replace it with --fresh; the repository's history keeps it.",
        )


def _refuse_mixed(entry: dict[str, Any], files: list[dict[str, Any]], names: Collection[str]) -> None:
    """Refuse a pattern of another config that matches the new shards."""
    for item in files:
        shard = str(item["path"]).replace("*", "-00000-of-00001", 1).replace("--", "-")
        for _, pattern in patterns_of(entry):
            if _WILD.search(pattern) and fits(shard, pattern) and not any(fits(n, str(item["path"])) for n in names):
                raise DestinationError(
                    f"The config {entry['config_name']!r} of the card loads {pattern}, so it would also load the "
                    "new shards.",
                    hint="Publish with another --config, or change the pattern in the card.",
                )


def refuse_lost(
    configs: Iterable[dict[str, Any]], names: Collection[str], replaced: str | tuple[str, ...], shards: Collection[str]
) -> None:
    """Refuse configs of which `shards` replace all files; `replaced` are the prefixes of the names of such files."""
    for entry in configs:
        for _, pattern in patterns_of(entry):
            files = [name for name in names if fits(name, pattern)]
            if files and all(name.startswith(replaced) for name in files) and not any(fits(n, pattern) for n in shards):
                raise DestinationError(
                    f"The config {entry['config_name']!r} of the card loads {pattern}, which would no longer exist.",
                    hint="Change or remove it in the card first, or publish with another --config.",
                )


def names_nothing(entry: dict[str, Any], names: Collection[str]) -> Iterator[str]:
    """Yield the patterns of a config that match no file of the repository, as far as that can be known."""
    if "data_dir" not in entry:
        for _, pattern in patterns_of(entry):
            is_elsewhere = "://" in pattern or "{" in pattern
            if pattern != UNFINISHED and not is_elsewhere and not any(fits(name, pattern) for name in names):
                yield pattern


def _unlisted(names: Collection[str], config: str, files: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the config that `load_dataset` infers from files that no card lists, if there are such files."""
    folders = {str(item["path"]).rpartition("/")[0] for item in files}
    data = []
    for name in names:
        folder, _, file = name.rpartition("/")
        is_hidden = any(part.startswith((".", "__")) for part in name.split("/"))
        if (config == "default" or folder not in folders) and file not in _NOT_DATA and "." in file and not is_hidden:
            data.append(name)
    patterns = _default_patterns(data)
    if patterns:
        listed = [{"split": s, "path": paths[0] if len(paths) == 1 else paths} for s, paths in patterns.items()]
        yield {"config_name": "default", "data_files": listed}


def _default_patterns(names: Iterable[str]) -> dict[str, list[str]]:
    """Return patterns by split, as `load_dataset` infers them without a card.

    It looks for shards in data/, then for names of splits in names of folders, then in names of files; otherwise it
    reads everything.
    """
    names = sorted(names)
    shards = {match["split"] for name in names if (match := _SHARD.fullmatch(name))}
    if shards:
        usual = [split for split, _ in SPLIT_NAMES if split in shards]
        return {split: [f"data/{split}-*"] for split in [*usual, *sorted(shards.difference(usual))]}
    for in_folders in (True, False):
        matching = {}
        for split, synonyms in SPLIT_NAMES:
            pattern = rf"(?:^|{_SEPARATOR})(?:{'|'.join(synonyms)})(?:{_SEPARATOR}{'|$' if in_folders else ''})"
            searched = {name: name.split("/")[:-1] if in_folders else name.split("/")[-1:] for name in names}
            files = [name for name, parts in searched.items() if any(re.search(pattern, part) for part in parts)]
            if files:
                matching[split] = files
        if matching:
            return {split: _shorten(files, names) for split, files in matching.items()}
    return {"train": _shorten(names, names)} if names else {}


def _shorten(files: list[str], names: list[str]) -> list[str]:
    """Replace all files with one extension in one folder by a pattern, if no other name matches it."""

    def groups(paths: list[str]) -> dict[tuple[str, str], list[str]]:
        by_kind: dict[tuple[str, str], list[str]] = {}
        for path in paths:
            folder, _, file = path.rpartition("/")
            by_kind.setdefault((folder, file.rpartition(".")[2]), []).append(path)
        return by_kind

    existing, patterns = groups(names), list[str]()
    for (folder, ending), members in groups(files).items():
        is_all = len(members) == len(existing[folder, ending]) and len(members) > 1 and not _WILD.search(folder)
        patterns += [f"{folder}/*.{ending}" if folder else f"*.{ending}"] if is_all else members
    return patterns

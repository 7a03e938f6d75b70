"""The configs of a card: which files `load_dataset` reads for each, and how one of them is changed.

What loaded before loads the same afterwards. Data that no card names gets the entry that `load_dataset` would have made
of its names; a config that a person wrote is kept working, or in the way, and never broken.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from brim.errors import DestinationError

# Names a file that never exists, so that loading a dataset that is still being built is an error and not
# a smaller dataset.
UNFINISHED = "data/unfinished-run-brim-build-again-to-continue"
_OWN_KEYS = {"config_name", "data_files", "default"}
# Those of every config of `datasets`, and of its reader of Parquet.
_CONFIG_KEYS = _OWN_KEYS | {"data_dir", "description", "version", "batch_size", "columns", "features", "filters"}
_SPLIT_NAME = re.compile(r"\w+(\.\w+)*")
_SPLITS = (
    ("train", ("train", "training")),
    ("validation", ("validation", "valid", "dev", "val")),
    ("test", ("test", "testing", "eval", "evaluation")),
)
_SHARD = re.compile(r"data/(?P<split>[^/]*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_BESIDE = ("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dummy_data.zip", "dataset_dict.json")
_SEPARATOR = "[-._ 0-9]"
_WILD = re.compile(r"[*?\[]")


def card_entries(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The configs that a card lists, each with its name: one without is meant as the default."""
    listed = fields.get("configs")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    # YAML makes a number of a name like 2024, and who loads it asks for a text.
    named = [entry if "config_name" in entry else {"config_name": "default", **entry} for entry in entries]
    return [{**entry, "config_name": str(entry["config_name"])} for entry in named]


def patterns_of(entry: dict[str, Any]) -> list[tuple[str, str]]:
    """(split, pattern) of the files of a config, however its card lists them."""
    said = entry.get("data_files")
    if isinstance(said, dict):
        said = [{"split": split, "path": path} for split, path in said.items()]
    found = []
    for one in said if isinstance(said, list) else [said]:
        split, paths = (str(one.get("split", "train")), one.get("path")) if isinstance(one, dict) else ("train", one)
        found += [(split, path) for path in (paths if isinstance(paths, list) else [paths]) if isinstance(path, str)]
    return found


def fits(name: str, pattern: str) -> bool:
    """Whether a file is one of those that a pattern of a card names: no wildcard crosses a `/` but `**`, which must
    stand alone between two of them."""
    return name == pattern or _fit(name.split("/"), pattern.removeprefix("./").split("/"))


def _fit(names: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not names
    first, rest = patterns[0], patterns[1:]
    if first == "**":
        return not rest or any(_fit(names[at:], rest) for at in range(len(names)))
    return bool(names) and "**" not in first and fnmatch.fnmatchcase(names[0], first) and _fit(names[1:], rest)


def resolved_files(entry: dict[str, Any], names: Collection[str]) -> dict[str, set[str]] | None:
    """The files that a config loads of each split; None if it also loads what is not among `names`."""
    found: dict[str, set[str]] = {}
    for split, pattern in patterns_of(entry):
        if "://" in pattern or "data_dir" in entry:
            return None
        found.setdefault(split, set()).update(name for name in names if fits(name, pattern))
    return found


def config_faults(fields: dict[str, Any], config: str) -> Iterator[str]:
    """What `load_dataset` refuses in the entry of a config that brim wrote, whatever files there are."""
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
        splits = [item.get("split") for item in items if isinstance(item, dict)]
        whole = all(isinstance(item, dict) and item.keys() == {"split", "path"} for item in items)
        texts = all(isinstance(split, str) and _SPLIT_NAME.fullmatch(split) for split in splits)
        paths = [item.get("path") for item in items if isinstance(item, dict)]
        named = all(isinstance(path, str) for one in paths for path in (one if isinstance(one, list) else [one]))
        if not (whole and texts and named) or len(set(map(str, splits))) < len(items):
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
    """The configs of a card with these `files` in one of them, where `names` lie. DestinationError for what would no
    longer load as it did, unless it may be replaced. `extension` is that of the new files, where it is known."""
    entries = card_entries(fields)
    if not entries and (config != "default" or keep_splits):
        entries = list(_unlisted(names, config, files))
    mine: dict[str, Any] = {"config_name": config, "data_files": files}
    for entry in entries:
        if entry.get("config_name") == config:
            if keep_splits:
                gone = {str(one["split"]) for one in files} if replace else set()
                mine["data_files"] = by_split(_by_split_of(entry, extension, gone), files, "split")
            elif not replace:
                _refuse_hidden(entry, files, names)
            mine = {**{key: value for key, value in entry.items() if key == "default"}, **mine}
        else:
            _refuse_mixed(entry, files, names)
    if set_default:
        if config != "default" and any(entry.get("config_name") == "default" for entry in entries):
            raise DestinationError(
                "There is a config named 'default', and that is what loads by default.",
                hint="Rename it in the card first, or leave out set_default=.",
            )
        entries = [{key: value for key, value in entry.items() if key != "default"} for entry in entries]
        mine["default"] = True
    if not any(entry.get("config_name") == config for entry in entries):
        return [*entries, mine] if config != "default" else [mine, *entries]
    return [mine if entry.get("config_name") == config else entry for entry in entries]


def by_split(known: Any, mine: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """A list of entries by split, with ours in the place of those of the same name."""
    listed = [entry for entry in known if isinstance(entry, dict)] if isinstance(known, list) else []
    ours = {entry[key]: entry for entry in mine}
    kept = [ours.pop(entry.get(key), entry) for entry in listed]
    return [*kept, *ours.values()]


def _by_split_of(entry: dict[str, Any], extension: str, gone: Collection[str]) -> list[dict[str, Any]]:
    """The files of a config by split, so that a split can be added to it. Those that are `gone` may be of any kind."""
    name = entry["config_name"]
    extra = sorted(set(entry) - _OWN_KEYS)
    others: dict[str, list[str]] = {}
    for split, pattern in patterns_of(entry):
        others.setdefault(split, []).append(pattern)
    staying = [pattern for split, patterns in others.items() if split not in gone for pattern in patterns]
    kinds = {pattern.rpartition(".")[2] for pattern in staying if "." in pattern}
    strange = kinds - {extension.removeprefix(".")} if extension else set()
    odd = [kind for kind in sorted(strange) if not _WILD.search(kind) and "/" not in kind]
    if extra or not others or odd:
        why = f"it says {extra[0]}" if extra else f"its files are .{odd[0]}" if odd else "it names no files"
        raise DestinationError(
            f"The config {name!r} of the card was written by hand ({why}), and a split beside its own would break it.",
            hint="Publish with another --config.",
        )
    return [
        {"split": split, "path": patterns[0] if len(patterns) == 1 else patterns} for split, patterns in others.items()
    ]


def _refuse_hidden(entry: dict[str, Any], files: list[dict[str, Any]], names: Collection[str]) -> None:
    """A config that loads other files than shards in our folder is somebody's: they would no longer be found."""
    folders = {str(one["path"]).rpartition("/")[0] for one in files}
    patterns = [pattern for _, pattern in patterns_of(entry)]
    lost = [n for n in names if n.rpartition("/")[0] not in folders and any(fits(n, pattern) for pattern in patterns)]
    if lost:
        raise DestinationError(
            f"The config {entry['config_name']!r} of the card loads {len(lost):,} other file(s), such as {lost[0]}, "
            "which would no longer be found.",
            hint="Publish with another --config, or replace it with --fresh; the repository's history keeps it.",
        )


def _refuse_mixed(entry: dict[str, Any], files: list[dict[str, Any]], names: Collection[str]) -> None:
    """A pattern of another config that would take in the new shards."""
    for one in files:
        shard = str(one["path"]).replace("*", "-00000-of-00001", 1).replace("--", "-")
        for _, pattern in patterns_of(entry):
            if _WILD.search(pattern) and fits(shard, pattern) and not any(fits(n, str(one["path"])) for n in names):
                raise DestinationError(
                    f"The config {entry['config_name']!r} of the card loads {pattern}, so that it would take in the "
                    "new shards too.",
                    hint="Publish with another --config, or change the pattern in the card.",
                )


def refuse_lost(
    others: Iterable[dict[str, Any]], names: Collection[str], replaced: str | tuple[str, ...], shards: Collection[str]
) -> None:
    """Configs that load files among those that are `replaced` (what their names begin with) by `shards`, and would load
    nothing afterwards."""
    for entry in others:
        for _, pattern in patterns_of(entry):
            found = [name for name in names if fits(name, pattern)]
            if found and all(name.startswith(replaced) for name in found) and not any(fits(n, pattern) for n in shards):
                raise DestinationError(
                    f"The config {entry['config_name']!r} of the card loads {pattern}, which would no longer be there.",
                    hint="Change or remove it in the card first, or publish with another --config.",
                )


def names_nothing(entry: dict[str, Any], names: Collection[str]) -> Iterator[str]:
    """The patterns of a config that fit none of the files of a repository, as far as that can be told from here."""
    if "data_dir" not in entry:
        for _, pattern in patterns_of(entry):
            elsewhere = "://" in pattern or "{" in pattern
            if pattern != UNFINISHED and not elsewhere and not any(fits(name, pattern) for name in names):
                yield pattern


def _unlisted(names: Collection[str], config: str, files: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The config that `load_dataset` makes of files that no card lists, written down."""
    folders = {str(one["path"]).rpartition("/")[0] for one in files}
    others = [name for name in names if config == "default" or name.rpartition("/")[0] not in folders]
    found = _default_patterns([name for name in others if _is_data(name)])
    if found:
        listed = [{"split": s, "path": paths[0] if len(paths) == 1 else paths} for s, paths in found.items()]
        yield {"config_name": "default", "data_files": listed}


def _is_data(name: str) -> bool:
    parts = name.split("/")
    return parts[-1] not in _BESIDE and "." in parts[-1] and not any(part.startswith((".", "__")) for part in parts)


def _default_patterns(names: Iterable[str]) -> dict[str, list[str]]:
    """Patterns by split, as `load_dataset` finds files without a card: shards in data/, else names of folders, else
    names of files, else everything."""
    names = sorted(names)
    shards = sorted({match["split"] for name in names if (match := _SHARD.fullmatch(name))})
    if shards:
        usual = [split for split, _ in _SPLITS if split in shards]
        shards = [*usual, *(split for split in shards if split not in usual)]
        return {split: [f"data/{split}-*"] for split in shards}
    for of_folder in (True, False):
        found = {}
        for split, words in _SPLITS:
            word = rf"(?:^|{_SEPARATOR})(?:{'|'.join(words)})(?:{_SEPARATOR}{'|$' if of_folder else ''})"
            fitting = [n for n in names if any(re.search(word, part) for part in _words(n, of_folder))]
            if fitting:
                found[split] = fitting
        if found:
            return {split: list(_shortened(fitting, names)) for split, fitting in found.items()}
    return {"train": list(_shortened(names, names))} if names else {}


def _words(name: str, of_folder: bool) -> list[str]:
    *folders, file = name.split("/")
    return folders if of_folder else [file]


def _shortened(chosen: list[str], names: list[str]) -> Iterator[str]:
    """Files by one pattern for a folder and an ending where all of those are chosen, else by name."""
    all_of: dict[tuple[str, str], int] = {}
    for name in names:
        all_of[_kind(name)] = all_of.get(_kind(name), 0) + 1
    mine: dict[tuple[str, str], list[str]] = {}
    for name in chosen:
        mine.setdefault(_kind(name), []).append(name)
    for (folder, ending), of in mine.items():
        whole = len(of) == all_of[folder, ending] and len(of) > 1 and not _WILD.search(folder)
        yield from [f"{folder}/*.{ending}" if folder else f"*.{ending}"] if whole else of


def _kind(name: str) -> tuple[str, str]:
    folder, _, file = name.rpartition("/")
    return folder, file.rpartition(".")[2]

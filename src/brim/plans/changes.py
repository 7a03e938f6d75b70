"""What differs between two plans, in words."""

from __future__ import annotations

from typing import Any

from brim.sizes import format_size


def changes_between(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """From the facts of the plan that was built to those of another; never empty."""
    changes = []
    if old["format"] != new["format"]:
        changes.append(f"its format was {old['format']} and is now {new['format']}")
    for name in ("rows", "files"):
        if old[name] != new[name]:
            changes.append(f"it had {old[name]:,} {name} and would have {new[name]:,}")
    if old["bytes"] != new["bytes"]:
        changes.append(f"its files were {format_size(old['bytes'])} and are {format_size(new['bytes'])}")
    gone = sorted(set(old["columns"]) - set(new["columns"]))
    added = sorted(set(new["columns"]) - set(old["columns"]))
    retyped = sorted(n for n in set(old["columns"]) & set(new["columns"]) if old["columns"][n] != new["columns"][n])
    changes += [f"the column {name!r} is gone" for name in gone]
    changes += [f"the column {name!r} is new" for name in added]
    changes += [f"the column {name!r} has another type" for name in retyped]
    if old["cut"] != new["cut"] and old["shards"] != new["shards"]:
        changes.append(f"its shards were cut by {_cut(old['cut'])} and would be by {_cut(new['cut'])}")
    if not changes and old["features"] != new["features"]:
        changes.append("the types of its columns for `datasets` changed")
    return changes or ["names of files or values of its table changed"]


def _cut(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()) or "the default size"

"""What differs between two computed jobs, in words."""

from __future__ import annotations

from typing import Any

_WORDS = {
    "kind": "it was made by another command",
    "source": "the source changed",
    "function": "the function changed",
    "tokenizer": "the tokenizer changed",
    "model": "the model changed",
    "version": "it was made by another version of brim",
}


def changes_between(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """From the facts of the job that was done to those of another; never empty."""
    if "step" not in old:
        return ["it was made by another command"]
    changes = []
    for name in sorted({*old, *new} - {"step", "output"}):
        if old.get(name) != new.get(name):
            changes.append(_WORDS.get(name, f"{name} changed"))
    for part in ("step", "output"):
        before, after = old.get(part, {}), new.get(part, {})
        for name in sorted({*before, *after}):
            was, now = before.get(name), after.get(name)
            if was != now:
                plain = all(isinstance(value, str | int | float | bool | None) for value in (was, now))
                text = f"{name.replace('_', ' ')} was {was} and is now {now}" if plain else f"{name} changed"
                changes.append(_WORDS.get(name, text))
    return changes or ["its options changed"]

"""What the Tab key offers: verbs, the words that an option takes, recipes. Nothing here asks the network.

Files need no words of ours: where there are none, shells complete file names themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

Completion = Callable[[str], list[str]]
_WORDS = re.compile(r"[a-z0-9-]+(\|[a-z0-9-]+)+")


def complete_words(words: Iterable[str]) -> Completion:
    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def completion_of(metavar: str | None) -> Completion | None:
    """For an option that takes one of some words (`error|skip`), or a recipe. None: whatever the shell does."""
    if metavar is None:
        return None
    if metavar.startswith("NAME|FILE"):
        return complete_recipes
    return complete_words(metavar.split("|")) if _WORDS.fullmatch(metavar) else None


def complete_recipes(incomplete: str) -> list[str]:
    from brim.sources.recipe import builtin_recipes

    return [recipe.name for recipe in builtin_recipes() if recipe.name.startswith(incomplete)]

"""docs/contributing/architecture.md tells of the house as it is."""

from __future__ import annotations

import re
from pathlib import Path

import brim

SOURCE = Path(brim.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs/contributing/architecture.md").read_text()


def test_what_is_named_is_there() -> None:
    """Every file that the page names by its path exists."""
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", PAGE))
    here = {name for name in named if not name.startswith("tests/")}
    known = {path.name for path in SOURCE.rglob("*.py")}
    assert not {name for name in here if not (SOURCE / name).exists() and ("/" in name or name not in known)}


def test_questions_have_answers() -> None:
    """Forty questions of the kind "where is X?", each with one file, none twice."""
    table = PAGE.partition("### Where is…")[2].partition("\n## ")[0]
    answers = re.findall(r"^\| [^|]+ \| `([a-z_/]+\.py)`", table, re.MULTILINE)
    assert len(answers) >= 40
    assert len(answers) == len(set(answers))

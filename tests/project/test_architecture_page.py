"""docs/contributing/architecture.md describes the packages and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import brim

SOURCE = Path(brim.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs/contributing/architecture.md").read_text()


def test_files_that_the_page_names_exist() -> None:
    """Every file path on the page exists."""
    names = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", PAGE))
    local = {name for name in names if not name.startswith("tests/")}
    known_values = {path.name for path in SOURCE.rglob("*.py")}
    assert not {name for name in local if not (SOURCE / name).exists() and ("/" in name or name not in known_values)}


def test_where_is_table_has_forty_answers() -> None:
    """Each row names one file, and each file appears once."""
    table = PAGE.partition("## Where is…")[2].partition("\n## ")[0]
    answers = re.findall(r"^\| [^|]+ \| `([a-z_/]+\.py)`", table, re.MULTILINE)
    assert len(answers) >= 40
    assert len(answers) == len(set(answers))

"""Files of a source that no column takes: counted by kind, with an example of each, so that nothing is left out in
silence.

Sidecars (small texts beside data) and documentation are told apart from data: only data is worth an error. What the
user left out by an option is not counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from brim.records import dataclass
from brim.sources.features import extension_of, is_companion

Group = Literal["data", "sidecars", "documentation"]
GROUPS: tuple[Group, ...] = ("data", "sidecars", "documentation")
_SIDECARS = frozenset(".json .tsv .csv .xlsx .bval .bvec .txt .xml .yaml .yml .toml".split())  # noqa: SIM905
_DOCUMENTS = frozenset(".md .rst .pdf .html .docx .odt .bib .cff".split())  # noqa: SIM905
_DOCUMENT_NAMES = ("README", "CHANGES", "LICENSE", "LICENCE", "CITATION", "AUTHORS", "NOTICE", "COPYING")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class UnmatchedKind:
    """Files of one kind, such as `_asl.nii.gz`."""

    group: Group
    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Unmatched:
    """All of them. `hint` says how to take or to leave them; `is_error`, that the recipe wants none of data."""

    kinds: tuple[UnmatchedKind, ...] = ()
    is_error: bool = False
    hint: str = ""

    def count(self, group: Group | None = None) -> int:
        return sum(kind.count for kind in self.kinds if group in (None, kind.group))

    def examples(self, group: Group) -> str:
        """The kinds of a group, the most frequent first, each with one of its files."""
        found = sorted((kind for kind in self.kinds if kind.group == group), key=lambda kind: -kind.count)
        shown = [f"{kind.count:,} {kind.kind}, for example {kind.example}" for kind in found[:_SHOWN]]
        rest = sum(kind.count for kind in found[_SHOWN:])
        return "; ".join([*shown, *([f"and {rest:,} more"] if rest else [])])

    def lines(self) -> list[str]:
        """In words, a line for each group; none if every file is taken."""
        said = []
        for group in GROUPS:
            if count := self.count(group):
                of = "data file(s)" if group == "data" else f"file(s) of {group}" if group == "documentation" else group
                said.append(f"{count:,} {of} that no column takes: {self.examples(group)}")
        return said

    def facts(self) -> dict[str, Any]:
        """For programs."""
        counts: dict[str, Any] = {group: self.count(group) for group in GROUPS}
        kinds = [
            {"group": kind.group, "kind": kind.kind, "count": kind.count, "example": kind.example}
            for kind in self.kinds
        ]
        return {"files": self.count(), **counts, "kinds": kinds}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], is_error: bool, hint: str) -> Unmatched:
        return cls(tuple(UnmatchedKind(**kind) for kind in facts["kinds"]), is_error, hint)


def group_of_file(path: str) -> Group:
    """What a file is, by its name and place."""
    name = path.rsplit("/", 1)[-1]
    extension = extension_of(name).lower()
    if name.upper().startswith(_DOCUMENT_NAMES) or name == "dataset_description.json" or path.startswith("code/"):
        return "documentation"
    if extension in _DOCUMENTS:
        return "documentation"
    return "sidecars" if extension in _SIDECARS or is_companion(path) else "data"


def kind_of_name(path: str) -> str:
    """Files that are alike: by their suffix where names have entities, else by their extension."""
    name = path.rsplit("/", 1)[-1]
    stem, dot, rest = name.partition(".")
    if "-" in stem and "_" in stem:
        return f"_{stem.rpartition('_')[2]}{dot}{rest}"
    return extension_of(name) or name


def collect(paths: Iterable[str], is_error: bool = False, hint: str = "") -> Unmatched:
    """What these files are. Only the kinds are held."""
    counts: dict[tuple[Group, str], list[Any]] = {}
    for path in paths:
        found = counts.setdefault((group_of_file(path), kind_of_name(path)), [0, path])
        found[0] += 1
    kinds = [UnmatchedKind(group, kind, count, example) for (group, kind), (count, example) in counts.items()]
    return Unmatched(tuple(sorted(kinds, key=lambda k: (GROUPS.index(k.group), -k.count, k.kind))), is_error, hint)

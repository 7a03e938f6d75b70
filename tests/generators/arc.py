"""The Aphasia Recovery Cohort (OpenNeuro ds004884) as its maintainers document it: 902 sessions of 230 subjects.

With all sessions, every count is the documented one: six sessions have two runs of a structural image, every dwi has
its gradients, and every image its sidecar. Odd cases: subjects that are listed and have no folder, one that has a
folder and is not listed, one without values, the text "None" as a value, gradients with and without a final newline,
sessions without any file, sidecars and documentation that belong to no column.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.generators import Layout, spread, with_more

SESSIONS, SUBJECTS, APPARENT_BYTES = 902, 230, 273_000_000_000
# The number of sessions that have the column, and of files in it.
PUBLISHED = {
    "t1w": (444, 447),
    "t2w": (440, 441),
    "flair": (233, 235),
    "bold_naming40": (750, 894),
    "bold_rest": (498, 508),
    "dwi": (613, 2089),
    "sbref": (88, 322),
    "lesion": (228, 228),
}
BOLD_SESSIONS = 850  # of both kinds together
_SIZES = {"t1w": 12_000_000, "t2w": 13_000_000, "flair": 8_000_000, "dwi": 55_000_000, "sbref": 900_000}
_SIZES |= {"lesion": 60_000}
_TYPES = ("Broca", "Anomic", "Conduction", "None", "Wernicke")
_ACQUISITIONS = {"spc3p2": "space_2x", "spc3": "space_no_accel", "tse3": "turbo_spin_echo"}
_SUFFIXES = {"t1w": ("anat", "acq-tfl3_", "T1w"), "flair": ("anat", "acq-spcir2p2_", "FLAIR")}
_SUFFIXES |= {
    "bold_naming40": ("func", "task-naming40_acq-epfid2_", "bold"),
    "bold_rest": ("func", "task-rest_", "bold"),
}
_SUFFIXES |= {"dwi": ("dwi", "acq-epb0p2_dir-AP_", "dwi"), "sbref": ("dwi", "acq-epb0p2_dir-AP_", "sbref")}


def make_arc(root: Path, sessions: int = 24, sparse_sizes: bool = False, sidecars: bool = True) -> Layout:
    """Write the layout; `sparse_sizes` gives files realistic apparent sizes, 273 GB for all sessions."""
    root.mkdir(parents=True, exist_ok=True)
    layout = Layout(root)
    subjects = max(1, round(sessions * SUBJECTS / SESSIONS))
    owners = [i * subjects // sessions for i in range(sessions)]
    runs = _runs(sessions)
    bolds = _bold_sizes(runs, sessions)

    def images(column: str, i: int, stem: str, name: str) -> list[str]:
        paths = []
        for run in range(runs[column][i]):
            folder, entities, suffix = _SUFFIXES[column]
            # Runs 2 and 10: natural order differs from alphabetical order.
            number = "" if runs[column][i] == 1 else f"run-{(2, 10, 11, 12, 13)[run]}_"
            path = f"{stem}/{folder}/{name}_{entities}{number}{suffix}.nii.gz"
            size = next(bolds) if suffix == "bold" else _SIZES[column]
            paths.append(layout.write(path, size if sparse_sizes else None))
            if sidecars:
                layout.text(path.replace(".nii.gz", ".json"), '{"RepetitionTime": 2}')
        return paths

    for i, owner in enumerate(owners):
        first = i == 0 or owners[i - 1] != owner
        nth = i - owners.index(owner)
        subject, session = f"sub-M{2001 + owner}", f"ses-{2 + 9 * nth + owner % 3}"  # days: ses-2 before ses-11
        stem, name = f"{subject}/{session}", f"{subject}_{session}"
        (root / stem).mkdir(parents=True, exist_ok=True)  # a session may have no files
        code = list(_ACQUISITIONS)[0 if i % 2 else 2 if i % 80 == 0 else 1]
        _SUFFIXES["t2w"] = ("anat", f"acq-{code}_", "T2w")
        row: dict[str, Any] = {"subject_id": subject, "session_id": session}
        for column in ("t1w", "t2w", "flair", "bold_naming40", "bold_rest", "dwi", "sbref"):
            row[column] = images(column, i, stem, name)
            if column == "t2w":
                row["t2w_acquisition"] = _ACQUISITIONS[code] if row["t2w"] else None
            if column == "dwi":
                row["dwi_bvals"], row["dwi_bvecs"] = _gradients(layout, row["dwi"])
        mask = f"derivatives/lesion_masks/{stem}/anat/{name}_space-T2w_desc-lesion_mask.nii.gz"
        has_mask = first and owner < _scaled(PUBLISHED["lesion"][0], sessions)
        row["lesion"] = layout.write(mask, _SIZES["lesion"] if sparse_sizes else None) if has_mask else None
        layout.rows.append(row | _participant(owner))
    _write_tables(layout, subjects)
    return layout


def _scaled(count: int, sessions: int) -> int:
    return max(1, round(count * sessions / SESSIONS))


def _runs(sessions: int) -> dict[str, list[int]]:
    """Return how many files each session has in each column."""
    runs = {}
    for column, skip in (("t1w", 0), ("t2w", 5), ("flair", 1), ("dwi", 0), ("sbref", 0)):
        rows, files = PUBLISHED[column]
        extra = round((files - rows) * sessions / SESSIONS) or int(sessions > 3)
        runs[column] = with_more(spread(_scaled(rows, sessions), sessions), _scaled(rows, sessions) + extra, skip)
    # Every session with functional images has at least one of the two tasks, and many have both.
    bold = spread(_scaled(BOLD_SESSIONS, sessions), sessions)
    destinations = [i for i, existing in enumerate(bold) if existing]
    for column, selection in (("bold_naming40", destinations), ("bold_rest", destinations[::-1])):
        rows, files = PUBLISHED[column]
        present = set(selection[: _scaled(rows, sessions)])
        extra = round((files - rows) * sessions / SESSIONS) or int(sessions > 3)
        runs[column] = with_more([i in present for i in range(sessions)], len(present) + extra)
    return runs


def _gradients(layout: Layout, images: list[str]) -> tuple[list[str], list[str]]:
    """Return the expected texts next to each dwi, without the newline at the end of most files."""
    values, vectors = [], []
    for number, path in enumerate(images):
        end = "" if number == 1 else "\n"
        stem = path.removesuffix(".nii.gz")
        values.append(layout.text(f"{stem}.bval", f"0 1000 {number}{end}").removesuffix("\n"))
        vectors.append(layout.text(f"{stem}.bvec", f"0 1 0\n0 0 {number}\n0 0 1{end}").removesuffix("\n"))
    return values, vectors


def _bold_sizes(runs: dict[str, list[int]], sessions: int) -> Iterator[int]:
    """Return the size of each functional run within 273 GB; the last run takes the remainder."""
    second = sum(_SIZES[name] * sum(runs[name]) for name in ("t1w", "t2w", "flair", "dwi", "sbref"))
    second += _SIZES["lesion"] * _scaled(PUBLISHED["lesion"][0], sessions)
    bolds = sum(runs["bold_naming40"]) + sum(runs["bold_rest"])
    remainder = APPARENT_BYTES * sessions // SESSIONS - second
    for i in range(bolds):
        yield remainder // bolds + (remainder % bolds if i == bolds - 1 else 0)


def _participant(owner: int) -> dict[str, object]:
    """Return the values of a subject in participants.tsv: the third is not listed, the second has no values."""
    if owner in (1, 2):
        return dict.fromkeys(("age_at_stroke", "sex", "race", "wab_aq", "wab_days", "wab_type"))
    return {
        "age_at_stroke": float(30 + owner % 50),
        "sex": "FM"[owner % 2],
        "race": "wb"[owner % 4 == 0],
        "wab_aq": 20.5 + owner % 70,
        "wab_days": float(42 + 31 * owner),
        "wab_type": _TYPES[owner % len(_TYPES)],
    }


def _write_tables(layout: Layout, subjects: int) -> None:
    lines = ["participant_id\tsex\tage_at_stroke\trace\twab_days\twab_aq\twab_type"]
    for owner in range(subjects):
        if owner == 2:
            continue
        about = {name: "n/a" if value is None else value for name, value in _participant(owner).items()}
        values = [about[name] for name in ("sex", "age_at_stroke", "race", "wab_days", "wab_aq", "wab_type")]
        lines.append("\t".join(map(str, [f"sub-M{2001 + owner}", *values])))
    lines.append("sub-M9999\tF\t23\tb\t8798\t93.3\tNone")  # listed, but without a folder, like some in the original
    layout.text("participants.tsv", "\ufeff" + "\r\n".join(lines) + "\r\n")
    layout.text("participants.json", '{"wab_aq": {"Description": "aphasia quotient"}}')
    description = '{"Name": "Aphasia Recovery Cohort (ARC) Dataset", "BIDSVersion": "1.6.0", "License": "CC0"}'
    layout.text("dataset_description.json", description)
    layout.text("README", "a copy of the layout")
    layout.text("CHANGES", "1.0.0 made")
    layout.text("task-rest_bold.json", '{"TaskName": "rest"}')

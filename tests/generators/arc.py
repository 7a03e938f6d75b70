"""The Aphasia Recovery Cohort (OpenNeuro ds004884) as it is published: 902 sessions of 230 subjects, 273 GB."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.generators import Layout, spread

SESSIONS, SUBJECTS, APPARENT_BYTES = 902, 230, 273_000_000_000
PUBLISHED = {"t1w": 441, "t2w": 447, "flair": 235, "bold": 850, "dwi": 613, "sbref": 88, "lesion": 228}
_SIZES = {"t1w": 12_000_000, "t2w": 13_000_000, "flair": 8_000_000, "dwi": 55_000_000, "sbref": 900_000}
_SIZES |= {"lesion": 60_000}
_TYPES = ("Broca", "Anomic", "Conduction", "None", "Wernicke")


def make_arc(root: Path, sessions: int = 24, sparse_sizes: bool = False) -> Layout:
    """Write the layout; `sparse_sizes` gives files of realistic apparent sizes, 273 GB for all sessions."""
    root.mkdir(parents=True, exist_ok=True)
    layout = Layout(root)
    subjects = max(1, round(sessions * SUBJECTS / SESSIONS))
    owners = [i * subjects // sessions for i in range(sessions)]
    counts = {name: max(1, round(n * sessions / SESSIONS)) for name, n in PUBLISHED.items()}
    has = {name: spread(n, sessions) for name, n in counts.items() if name != "lesion"}
    bolds = _bold_sizes(counts, has["bold"])

    def one(column: str, path: str, there: bool) -> str | None:
        return layout.write(path, _SIZES[column] if sparse_sizes else None) if there else None

    for i, owner in enumerate(owners):
        first = i == 0 or owners[i - 1] != owner
        nth = i - owners.index(owner)
        subject, session = f"sub-M{2001 + owner}", f"ses-{2 + 9 * nth + owner % 3}"  # days: ses-2 before ses-11
        stem = f"{subject}/{session}"
        name = f"{subject}_{session}"

        row: dict[str, Any] = {
            "subject_id": subject,
            "session_id": session,
            "t1w": one("t1w", f"{stem}/anat/{name}_T1w.nii.gz", has["t1w"][i]),
            "t2w": one("t2w", f"{stem}/anat/{name}_acq-spc3_T2w.nii.gz", has["t2w"][i]),
            "flair": one("flair", f"{stem}/anat/{name}_FLAIR.nii.gz", has["flair"][i]),
            "bold": [],
            "dwi": [],
            "sbref": [],
            "lesion": None,
        }
        runs = (2, 10) if has["bold"][i] and i % 5 == 0 else (1,) if has["bold"][i] else ()
        for run in runs:
            path = f"{stem}/func/{name}_task-rest_run-{run}_bold.nii.gz"
            size = next(bolds) if sparse_sizes else None
            row["bold"].append(layout.write(path, size))
        for column in ("dwi", "sbref"):
            for direction in ("AP", "PA")[: (1 + (i % 7 == 0)) * has[column][i]]:
                path = f"{stem}/dwi/{name}_dir-{direction}_{column}.nii.gz"
                row[column].append(one(column, path, True))
        if first and owner < counts["lesion"]:
            mask = f"derivatives/lesion_masks/{stem}/anat/{name}_space-T2w_desc-lesion_mask.nii.gz"
            row["lesion"] = one("lesion", mask, True)
        (root / stem).mkdir(parents=True, exist_ok=True)  # a session may have nothing at all
        layout.rows.append(row | _participant(owner))
    _write_tables(root, subjects)
    return layout


def _bold_sizes(counts: dict[str, int], has: list[bool]) -> Iterator[int]:
    """What is left of 273 GB for each functional run, the last one taking the remainder."""
    sessions = len(has)
    doubles = [1 + (i % 7 == 0) for i in range(sessions)]
    other = sum(_SIZES[name] * counts[name] for name in ("t1w", "t2w", "flair", "lesion"))
    for name in ("dwi", "sbref"):
        there = spread(counts[name], sessions)
        other += _SIZES[name] * sum(n for n, is_there in zip(doubles, there, strict=True) if is_there)
    runs = sum(2 if i % 5 == 0 else 1 for i in range(sessions) if has[i])
    rest = APPARENT_BYTES * sessions // SESSIONS - other
    for i in range(runs):
        yield rest // runs + (rest % runs if i == runs - 1 else 0)


def _participant(owner: int) -> dict[str, object]:
    """What participants.tsv says of a subject: the third is not listed, the second has no values."""
    if owner in (1, 2):
        return {"age_at_stroke": None, "sex": None, "wab_aq": None, "wab_type": None}
    return {
        "age_at_stroke": float(30 + owner % 50),
        "sex": "FM"[owner % 2],
        "wab_aq": 20.5 + owner % 70,
        "wab_type": _TYPES[owner % len(_TYPES)],
    }


def _write_tables(root: Path, subjects: int) -> None:
    lines = ["participant_id\tsex\tage_at_stroke\trace\twab_days\twab_aq\twab_type"]
    for owner in range(subjects):
        if owner == 2:
            continue
        about = {name: "n/a" if value is None else value for name, value in _participant(owner).items()}
        values = [about["sex"], about["age_at_stroke"], "w", 700 + owner, about["wab_aq"], about["wab_type"]]
        lines.append("\t".join(map(str, [f"sub-M{2001 + owner}", *values])))
    lines.append("sub-M9999\tF\t23\tb\t8798\t93.3\tNone")  # listed, but has no folder, as some in the original
    text = "\ufeff" + "\r\n".join(lines) + "\r\n"
    (root / "participants.tsv").write_text(text, encoding="utf-8", newline="")
    (root / "participants.json").write_text('{"wab_aq": {"Description": "aphasia quotient"}}')
    (root / "dataset_description.json").write_text('{"Name": "ARC", "BIDSVersion": "1.6.0"}')
    (root / "README").write_text("a copy of the layout")

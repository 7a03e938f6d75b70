"""AOMIC-PIOP1 (OpenNeuro ds002785) as its maintainers document it: 216 subjects without sessions.

Odd cases: subjects without dwi, with two runs of it, or with only some of the tasks; physiological recordings,
gradients, events and sidecars that belong to no column.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.generators import Layout, spread

SUBJECTS, DWI_SUBJECTS = 216, 211
_TASKS = ("anticipation", "emomatching", "faces", "gstroop", "restingstate", "workingmemory")


def make_aomic(root: Path, subjects: int = 12) -> Layout:
    """Write the layout."""
    layout = Layout(root)
    has_dwi = spread(max(1, round(DWI_SUBJECTS * subjects / SUBJECTS)), subjects)
    lines = ["participant_id\tage\tsex\thandedness\traven_score"]
    for i in range(subjects):
        subject = f"sub-{i + 1:04d}"
        row: dict[str, Any] = {"subject_id": subject}
        row["t1w"] = layout.write(f"{subject}/anat/{subject}_T1w.nii.gz")
        row["dwi"], row["bold"] = [], []
        for number in range((1 + (i % 50 == 7)) * has_dwi[i]):
            run = f"_run-{number + 1}" if i % 50 == 7 else ""
            path = layout.write(f"{subject}/dwi/{subject}{run}_dwi.nii.gz")
            row["dwi"].append(path)
            layout.text(path.replace(".nii.gz", ".bval"), "0 1000\n")
            layout.text(path.replace(".nii.gz", ".bvec"), "0 1\n0 0\n0 0\n")
        for number, task in enumerate(_TASKS):
            if number == i % 7:  # six of seven do not have one
                continue
            path = layout.write(f"{subject}/func/{subject}_task-{task}_acq-seq_bold.nii.gz")
            row["bold"].append(path)
            layout.text(path.replace(".nii.gz", ".json"), '{"RepetitionTime": 2}')
            layout.text(path.replace("_bold.nii.gz", "_events.tsv"), "onset\tduration\n0\t1\n")
        (root / f"{subject}/func/{subject}_task-restingstate_physio.tsv.gz").write_bytes(b"\x1f\x8b recorded")
        values: list[object] = (
            [None, None, None] if i == 3 else [20.25 + i % 6, "FM"[i % 2], ("right", "left")[i % 9 == 0]]
        )
        row |= dict(zip(("age", "sex", "handedness"), values, strict=True))
        lines.append("\t".join(["n/a" if value is None else str(value) for value in [subject, *values, i % 36]]))
        layout.rows.append(row)
    layout.text("participants.tsv", "\n".join(lines) + "\n")
    layout.text("dataset_description.json", '{"Name": "AOMIC-PIOP1", "BIDSVersion": "1.2.0", "License": "CC0"}')
    layout.text("README", "a copy of the layout")
    return layout

"""ISLES'24 (Zenodo 17652035), the training part, as its maintainers document it: 149 subjects.

Odd cases: missing raw images, so that the derivative is used; derivatives next to a raw image and raw perfusion
maps, which belong to no column; missing outcomes; a spreadsheet header with other spaces and case.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openpyxl

from tests.generators import Layout, spread

SUBJECTS = 149
_PERFUSION = ("tmax", "mtt", "cbf", "cbv")
_OTHER_VALUES = {"Center": 1, "Hypertension": 1}


def make_isles24(root: Path, subjects: int = 12) -> Layout:
    """Write the layout below `root/train`, with real spreadsheet files."""
    layout = Layout(root)
    perfused = spread(max(1, round(140 * subjects / SUBJECTS)), subjects)
    masked = spread(max(1, round(100 * subjects / SUBJECTS)), subjects)
    for i in range(subjects):
        subject = f"sub-stroke{i + 1:04d}"
        raw = f"train/raw_data/{subject}/ses-01/{subject}_ses-01"
        acute = f"train/derivatives/{subject}/ses-01"
        later_value = f"train/derivatives/{subject}/ses-02/{subject}_ses-02_space-ncct"
        spaced = f"{acute}/{subject}_ses-01_space-ncct"
        row: dict[str, Any] = {"subject_id": subject, "ncct": layout.write(f"{raw}_ncct.nii.gz")}
        for name, existing in (("cta", True), ("ctp", perfused[i])):
            is_raw = i % 10 != (3 if name == "cta" else 4)
            derived = layout.write(f"{spaced}_{name}.nii.gz") if existing else None
            row[name] = layout.write(f"{raw}_{name}.nii.gz") if existing and is_raw else derived
        for name in _PERFUSION:
            path = f"{acute}/perfusion-maps/{subject}_ses-01_space-ncct_{name}.nii.gz"
            row[name] = layout.write(path) if perfused[i] else None
        if perfused[i]:
            layout.write(f"train/raw_data/{subject}/ses-01/perfusion-maps/{subject}_ses-01_tmax.nii.gz")
        for name, suffix in {"dwi": "dwi", "adc": "adc", "lesion_mask": "lesion-msk"}.items():
            row[name] = layout.write(f"{later_value}_{suffix}.nii.gz")
        for name, suffix in {"lvo_mask": "lvo-msk", "cow_segmentation": "cow-msk"}.items():
            row[name] = layout.write(f"{spaced}_{suffix}.nii.gz") if masked[i] else None
        row |= {"age": 40.0 + i, "sex": "MF"[i % 2], "nihss_admission": float(i % 42), "mrs_admission": None}
        row["mrs_3month"] = None if i % 6 == 5 else float(i % 7)
        phenotype = root / "train/phenotype" / subject
        baseline = {"Age": 40 + i, "Sex": row["sex"], "NIHSS at admission": i % 42, "mRS at admission": None}
        write_sheet(phenotype / "ses-01" / f"{subject}_ses-01_demographic_baseline.xlsx", _OTHER_VALUES | baseline)
        if i % 6 != 5:
            outcome = {"TICI": "3", " MRS 3  months": f"{i % 7}" if i % 2 else i % 7}
            write_sheet(phenotype / "ses-02" / f"{subject}_ses-02_outcome.xlsx", outcome)
        layout.rows.append(row)
    return layout


def write_sheet(path: Path, *rows: dict[str, object]) -> None:
    """Write a spreadsheet with a header and a line per row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.append(list(rows[0]))
    for row in rows:
        sheet.append(list(row.values()))
    book.save(path)

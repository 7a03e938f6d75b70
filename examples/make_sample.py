"""Make the sample data in examples/sample: small brain-like volumes, pictures of them, a table, and texts.

    python examples/make_sample.py examples/sample

The volumes are NIfTI files with a real header and affine, the pictures are PNG and JPEG slices of them.
Everything is drawn from a formula with a fixed seed, so running this again gives the same pictures. The texts have
a function and a tokenizer beside them, for the commands of README.md.
Needs nibabel and Pillow.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from pathlib import Path

import nibabel
import numpy as np
from PIL import Image

SHAPE = (32, 40, 32)
SUBJECTS = [("sub-01", 34, "F"), ("sub-02", 61, "M"), ("sub-03", 47, "F"), ("sub-04", 29, None)]


def phantom(rng: np.random.Generator) -> np.ndarray:
    """A head: skull, brain, ventricles and a little noise, from nested ellipsoids."""
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n) for n in SHAPE), indexing="ij")
    volume = np.zeros(SHAPE, np.float32)
    tilt = rng.uniform(-0.1, 0.1)
    for radius, value in ((0.92, 700), (0.82, 250), (0.76, 480), (0.45, 620), (0.2, 120)):
        shape = rng.uniform(0.95, 1.05, 3)
        inside = ((x / shape[0]) ** 2 + ((y + tilt * z) / shape[1]) ** 2 + (z / shape[2]) ** 2) < radius**2
        volume[inside] = value
    return (volume + rng.normal(0, 12, SHAPE)).clip(0, 1000).astype(np.int16)


def write_nifti(volume: np.ndarray, path: Path) -> None:
    image = nibabel.Nifti1Image(volume, np.diag([4.0, 4.0, 4.0, 1.0]))
    # nibabel would put the time into the gzip header; without it the bytes are always the same.
    path.write_bytes(gzip.compress(image.to_bytes(), 9, mtime=0))


WORDS = (
    "the",
    "scan",
    "shows",
    "a",
    "small",
    "bright",
    "round",
    "area",
    "near",
    "left",
    "right",
    "ventricle",
    "and",
    "no",
)
STEPS = """def upper(row):
    return {"text": row["text"].upper()}
"""


def write_texts(folder: Path, rng: np.random.Generator) -> None:
    rows = [{"n": n, "text": " ".join(rng.choice(WORDS, 12))} for n in range(200)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "steps.py").write_text(STEPS)
    words = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    parts = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    made = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(made | dict.fromkeys(parts), indent=1) + "\n")


def main(folder: Path) -> None:
    rng = np.random.default_rng(20)
    (folder / "scans").mkdir(parents=True, exist_ok=True)
    (folder / "pictures").mkdir(exist_ok=True)
    rows = []
    for number, (subject, age, sex) in enumerate(SUBJECTS):
        volume = phantom(rng)
        scan = f"scans/{subject}_T1w.nii.gz"
        write_nifti(volume, folder / scan)
        pictures = []
        for axis in range(3 if number % 2 == 0 else 2):
            middle = np.take(volume, volume.shape[axis] // 2, axis=axis)
            picture = Image.fromarray((middle / 4).clip(0, 255).astype(np.uint8)).resize((256, 256))
            extension = "png" if axis < 2 else "jpg"
            pictures.append(f"pictures/{subject}_axis-{axis}.{extension}")
            picture.save(folder / pictures[-1])
        rows.append([subject, age, sex, scan, pictures[0], pictures[1]])
    with open(folder / "scans.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["subject", "age", "sex", "t1w", "sagittal", "coronal"])
        writer.writerows(rows)
    write_texts(folder, rng)
    print(f"{len(rows)} subjects in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

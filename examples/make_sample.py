"""Make the sample data in examples/sample: photos in one folder per class, texts, and small brain scans.

    python examples/make_sample.py examples/sample

The photos are JPEG files of drawn shapes. The texts have a function and a tokenizer next to them, for README.md, and
conversations with a chat tokenizer.
The scans are NIfTI files with a real header and affine, with PNG and JPEG slices of them and a table that names both.
Everything is drawn from formulas with fixed seeds, so running this again gives the same data. Needs nibabel and Pillow.
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


CLASSES = ("circle", "square", "triangle")


def draw_photo(shape: str, rng: np.random.Generator) -> Image.Image:
    """Draw one filled shape of a random color, size and position on a noisy background."""
    y, x = np.mgrid[0:96, 0:96]
    center_x, center_y, radius = rng.uniform(35, 60), rng.uniform(35, 60), rng.uniform(15, 30)
    dx, dy = x - center_x, y - center_y
    inside = {
        "circle": dx**2 + dy**2 < radius**2,
        "square": np.maximum(abs(dx), abs(dy)) < radius,
        "triangle": (abs(dx) * 1.8 - radius < dy) & (dy < radius),
    }[shape]
    pixels = rng.normal(60, 8, (96, 96, 3))
    pixels[inside] = rng.uniform(110, 250, 3) + rng.normal(0, 8, (int(inside.sum()), 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write_photos(folder: Path) -> None:
    rng = np.random.default_rng(7)
    for shape in CLASSES:
        (folder / "photos" / shape).mkdir(parents=True, exist_ok=True)
        for number in range(4):
            draw_photo(shape, rng).save(folder / "photos" / shape / f"{number:02d}.jpg", quality=85)
    for shape in CLASSES:  # to append
        (folder / "new-photos" / shape).mkdir(parents=True, exist_ok=True)
        draw_photo(shape, rng).save(folder / "new-photos" / shape / "04.jpg", quality=85)


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

CHAT_TEMPLATE = """{% for message in messages %}{{ message.role + " " + message.content + " [EOS] " }}{% endfor %}
{%- if add_generation_prompt %}{{ "assistant " }}{% endif %}
"""


def write_texts(folder: Path, rng: np.random.Generator) -> None:
    rows = [{"n": n, "text": " ".join(rng.choice(WORDS, 12))} for n in range(200)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "steps.py").write_text(STEPS)
    words = {word: number for number, word in enumerate(["[UNK]", *WORDS, "[EOS]"])}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    parts = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    made = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(made | dict.fromkeys(parts), indent=1) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[EOS]"}) + "\n")
    made["model"] = model | {"vocab": words | {role: len(words) + n for n, role in enumerate(("user", "assistant"))}}
    end = {"id": words["[EOS]"], "content": "[EOS]", "special": True, "normalized": False}
    made["added_tokens"] = [end | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)]
    chats = folder / "chat-tokenizer"
    chats.mkdir(exist_ok=True)
    (chats / "tokenizer.json").write_text(json.dumps(made | dict.fromkeys(parts), indent=1) + "\n")
    (chats / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    asked = [{"role": "user", "content": "near the left area"}]
    lines = (json.dumps({"messages": [*asked, {"role": "assistant", "content": row["text"]}]}) for row in rows)
    (folder / "chats.jsonl").write_text("".join(line + "\n" for line in lines))


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
    write_photos(folder)
    print(f"{len(rows)} subjects in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

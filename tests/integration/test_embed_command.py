"""`brim embed` from end to end, with a model of NumPy that needs no torch: files, shards, images, kills, bad values."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import brim
from tests.conftest import brim as run_brim
from tests.hub import TestHub
from tests.killing import kill_at_random_moments, kills
from tests.publishing import DEST, Machine

ROWS = 700
MODEL = """
import time
import numpy as np

def factory(dim=6, pause=0.0, bad=-1):
    def encode(batch):
        time.sleep(pause)
        found = {}
        if "text" in batch:
            found["text"] = np.array([[len(t) * (k + 1) for k in range(dim)] for t in batch["text"]], "float32")
            for row, text in enumerate(batch["text"]):
                if text.startswith(f"{bad} "):
                    found["text"][row, 0] = np.nan
        if "image" in batch:
            found["vision"] = np.array([[np.asarray(i).mean(), i.width] for i in batch["image"]], "float32")
        return found
    return encode
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODEL)
    rows = [{"id": n, "text": f"{n} " + "word " * (n % 13)} for n in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def words(dest: str, *more: str) -> list[str]:
    common = ["--model", "mine:factory", "--column", "text", "--batch-size", "8", "--unit-size", "2KB"]
    return ["embed", "rows.jsonl", dest, *common, "--memory", "600MB", "--quiet", *more]


def expected(dim: int = 6) -> np.ndarray:  # type: ignore[type-arg]
    lengths = [len(f"{n} " + "word " * (n % 13)) for n in range(ROWS)]
    return np.outer(lengths, np.arange(1, dim + 1)).astype("float32")


@pytest.mark.parametrize("dest", ["emb.safetensors", "emb.npy", "emb.parquet", "emb"])
def test_every_destination(work: Path, dest: str) -> None:
    """The vectors in the order of the rows, the kept column beside them, and nothing done twice."""
    run_brim(*words(dest, "--keep", "id"), cwd=work)
    if dest.endswith((".safetensors", ".npy")):
        name = "text"
        tensors = brim.open_tensors(work / dest)
        (vectors,) = [np.asarray(tensors[key]) for key in tensors if key in (name, "emb")]
        kept = pq.read_table(work / f"{dest}.rows.parquet")
    else:
        files = [work / dest] if dest.endswith(".parquet") else sorted((work / dest / "data").iterdir())
        tables = [pq.read_table(path) for path in files]
        vectors = np.array([row for table in tables for row in table["text"].to_pylist()], "float32")
        kept = pa.concat_tables(tables)
    assert np.array_equal(vectors, expected())
    assert kept["id"].to_pylist() == list(range(ROWS))
    assert "nothing to do" in run_brim(*words(dest, "--keep", "id"), cwd=work).stdout


def test_killed_at_random_moments(work: Path) -> None:
    """kill -9 of parent or worker, 30 times over: the file is that of an undisturbed run, bit for bit."""
    slow = ["--argument", "pause=0.005"]
    run_brim(*words("whole.safetensors", *slow), cwd=work)
    whole = (work / "whole.safetensors").read_bytes()

    def look() -> None:
        assert (work / "emb.safetensors").read_bytes() == whole
        (work / "emb.safetensors").unlink()
        shutil.rmtree(work / ".emb.safetensors.brim")

    command = [sys.executable, "-m", "brim", *words("emb.safetensors", *slow)]
    kill_at_random_moments(command, work, kills(12), (0.05, 0.45), look)
    run_brim(*words("emb.safetensors", *slow), cwd=work)
    assert (work / "emb.safetensors").read_bytes() == whole
    assert [path.name for path in (work / ".emb.safetensors.brim").iterdir() if path.is_dir()] == []


def test_values_that_are_no_numbers(work: Path) -> None:
    failed = run_brim(*words("emb.npy", "--argument", "bad=333"), cwd=work, check=2)
    assert "rows.jsonl, row 334" in failed.stderr
    assert "--nan keep" in failed.stderr
    run_brim(*words("emb.npy", "--argument", "bad=333", "--nan", "keep", "--fresh"), cwd=work)
    assert np.isnan(np.load(work / "emb.npy")[333, 0])
    done = run_brim(*words("out.npy", "--argument", "bad=333", "--on-error", "skip"), cwd=work)
    assert "1 rows that failed" in done.stdout
    assert np.load(work / "out.npy").shape == (ROWS - 1, 6)


def test_a_folder_of_images(work: Path) -> None:
    for number in range(20):
        Image.new("RGB", (10 + number, 5), (number, number, number)).save(work / f"{number:02d}.png")
    shutil.rmtree(work / "photos", ignore_errors=True)
    (work / "photos").mkdir()
    for path in work.glob("*.png"):
        path.rename(work / "photos" / path.name)
    run_brim(
        "embed", "photos", "emb.npy", "--model", "mine:factory", "--image", "image", "--keep", "image",
        "--memory", "600MB", "--quiet", cwd=work,
    )  # fmt: skip
    vectors = np.load(work / "emb.npy")
    assert np.array_equal(vectors, np.array([[n, 10 + n] for n in range(20)], "float32"))
    names = pq.read_table(work / "emb.npy.rows.parquet")["image"].to_pylist()
    assert names == [f"{number:02d}.png" for number in range(20)]


def test_texts_and_images_to_the_hub(work: Path) -> None:
    """Both vectors in one pass, published with a card, and read back by the real client."""
    for number in range(6):
        Image.new("RGB", (10 + number, 5), (number, number, number)).save(work / f"{number}.png")
    rows = [{"caption": "word " * number + "!", "path": f"{number}.png"} for number in range(6)]
    (work / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with TestHub(work / "hub") as hub:
        machine = Machine(hub, work / "machine", more={"PYTHONPATH": str(work)})
        common = ["--model", "mine:factory", "--column", "caption", "--image", "path", "--keep", "caption"]
        done = machine.run("embed", str(work / "pairs.jsonl"), DEST, *common, "--memory", "600MB", "--quiet")
        assert (done.returncode, "proved" in done.stdout) == (0, True), done.stderr
        code = f"""
            import datasets
            rows = datasets.load_dataset('{DEST.split("datasets/")[1]}')['train']
            print(rows[3]['caption'], rows[3]['vision'], rows[3]['text'][0])
        """
        assert machine.python(code).stdout.strip() == "word word word ! [3.0, 13.0] 16.0"


def test_another_file_of_that_name_is_not_replaced(work: Path) -> None:
    (work / "emb.npy").write_bytes(b"mine")
    assert "brim did not write it" in run_brim(*words("emb.npy"), cwd=work, check=2).stderr
    assert (work / "emb.npy").read_bytes() == b"mine"


def test_bad_commands(work: Path) -> None:
    for more, says in [
        (["--model", "nowhere:factory"], "no module 'nowhere'"),
        (["--model", "mine:nothing"], "mine has no 'nothing'"),
        (["--column", "texts"], "no column 'texts'"),
        (["--argument", "dim"], "takes NAME=VALUE"),
        (["--name", "vision=v"], "gives no 'vision'"),
    ]:
        refused = run_brim(*words("emb.npy", *more, "--fresh"), cwd=work, check=2)
        assert says in refused.stderr, refused.stderr

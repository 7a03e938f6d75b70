"""`brim embed` end to end, with a NumPy model without torch: files, shards, images, kills, bad values."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import brim
from brim.memory.meter import tree
from tests.conftest import brim as run_brim
from tests.forked import brim as forked
from tests.forked import start
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


def words(dest: str, *extra: str) -> list[str]:
    common = ["--model", "mine:factory", "--column", "text", "--batch-size", "8", "--unit-size", "2KB"]
    return ["embed", "rows.jsonl", dest, *common, "--memory", "600MB", *extra]


def test_a_model_that_changed_is_noticed(work: Path) -> None:
    """A changed model is noticed for every way to start brim, as the working folder is not always on Python's path."""
    (work / "rows.jsonl").write_text("".join((work / "rows.jsonl").read_text().splitlines(keepends=True)[:20]))
    forked(*words("v.npy"), cwd=work)  # with the script `brim`
    run_brim(*words("v.npy"), cwd=work)  # with `python -m`
    (work / "mine.py").write_text(MODEL.replace("len(t) *", "2 * len(t) *"))
    refused = forked(*words("v.npy"), check=2, cwd=work)
    assert "the model changed" in refused.stderr
    by_file = [f"{work / 'mine.py'}:factory" if argument == "mine:factory" else argument for argument in words("w.npy")]
    forked(*by_file, cwd=work)
    (work / "mine.py").write_text(MODEL)
    assert "the model changed" in forked(*by_file, check=2, cwd=work).stderr


@pytest.mark.parametrize("model", ["mine:factory", "mine.py:factory"])
def test_a_module_that_the_model_imports_is_noticed_when_it_changes(work: Path, model: str) -> None:
    (work / "pack").mkdir()
    (work / "pack" / "__init__.py").write_text("")
    (work / "pack" / "deep.py").write_text("FACTOR = 1\n")
    (work / "helper.py").write_text("from pack import deep\n")
    (work / "mine.py").write_text(f"import helper\n{MODEL}")
    (work / "rows.jsonl").write_text("".join((work / "rows.jsonl").read_text().splitlines(keepends=True)[:20]))
    command = [model if argument == "mine:factory" else argument for argument in words("v.npy")]
    forked(*command, cwd=work)
    assert "nothing to do" in forked(*command, cwd=work).stdout
    (work / "pack" / "deep.py").write_text("FACTOR = 2\n")
    assert "the model changed" in forked(*command, check=2, cwd=work).stderr


def expected(dim: int = 6) -> np.ndarray:  # type: ignore[type-arg]
    lengths = [len(f"{n} " + "word " * (n % 13)) for n in range(ROWS)]
    return np.outer(lengths, np.arange(1, dim + 1)).astype("float32")


@pytest.mark.parametrize("dest", ["emb.safetensors", "emb.npy", "emb.parquet", "emb"])
def test_every_destination(work: Path, dest: str) -> None:
    """Vectors are in row order with the kept column next to them, and a second run computes nothing."""
    run_brim(*words(dest, "--keep", "id"), cwd=work)
    if dest.endswith((".safetensors", ".npy")):
        name = "text"
        tensors = brim.open_tensors(work / dest)
        (vectors,) = [np.asarray(tensors[key]) for key in tensors if key in (name, "emb")]
        remaining = pq.read_table(work / f"{dest}.rows.parquet")
    else:
        files = [work / dest] if dest.endswith(".parquet") else sorted((work / dest / "data").iterdir())
        tables = [pq.read_table(path) for path in files]
        vectors = np.array([row for table in tables for row in table["text"].to_pylist()], "float32")
        remaining = pa.concat_tables(tables)
    assert np.array_equal(vectors, expected())
    assert remaining["id"].to_pylist() == list(range(ROWS))
    assert "nothing to do" in run_brim(*words(dest, "--keep", "id"), cwd=work).stdout


@pytest.mark.long
def test_killed_at_random_moments(work: Path) -> None:
    """After 30 kills of parent or worker with SIGKILL, the file equals that of an uninterrupted run, bit for bit."""
    slow = ["--argument", "pause=0.005"]
    run_brim(*words("whole.safetensors", *slow), cwd=work)
    whole = (work / "whole.safetensors").read_bytes()

    def look() -> None:
        assert (work / "emb.safetensors").read_bytes() == whole
        (work / "emb.safetensors").unlink()
        shutil.rmtree(work / ".emb.safetensors.brim")

    kill_at_random_moments(words("emb.safetensors", *slow), work, kills(12), (0.05, 0.45), look)
    run_brim(*words("emb.safetensors", *slow), cwd=work)
    assert (work / "emb.safetensors").read_bytes() == whole
    assert [path.name for path in (work / ".emb.safetensors.brim").iterdir() if path.is_dir()] == []


RESUMED = """
import os, time
import numpy as np

def factory(pause=0.02):
    def encode(batch):
        with open("asked.log", "a") as log:
            log.write(f"{len(batch['text'])}\\n")
        time.sleep(pause)
        if any("FAIL" in text for text in batch["text"]):
            raise ValueError("cannot")
        longest = max(map(len, batch["text"]))
        return np.array([[len(text), longest] for text in batch["text"]], "float32")
    return encode
"""


def rows_asked(work: Path) -> int:
    log = work / "asked.log"
    return sum(map(int, log.read_text().split())) if log.exists() else 0


def resumed_words(dest: str, *extra: str) -> list[str]:
    return ["embed", "rows.jsonl", dest, "--model", "resumed.py:factory", "--column", "text", "--keep", "id",
            "--batch-size", "8", "--memory", "600MB", *extra]  # fmt: skip


def kill_after(work: Path, command: list[str], rows: int) -> None:
    """Kill brim and its workers with SIGKILL after the model has received this many rows."""
    process = start(*command, cwd=work, env={**os.environ, "BRIM_PARTIAL_UNIT_SECONDS": "0.2"})
    try:
        while rows_asked(work) < rows:
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "dest",
    ["emb.npy", *(pytest.param(dest, marks=pytest.mark.long) for dest in ("emb.safetensors", "emb.parquet", "emb"))],
)
def test_embed_resumes_inside_a_unit_after_kill_9(work: Path, dest: str) -> None:
    """A unit of 1,100 rows is killed twice: few rows reach the model again, and the bytes equal those of a complete
    run."""
    (work / "resumed.py").write_text(RESUMED)
    texts = [f"{n} " + "word " * (n % 13) for n in range(1_100)]
    texts[100], texts[101], texts[900] = "100 FAIL", "", "900 FAIL"
    lines = [json.dumps({"id": n, "text": t}) for n, t in enumerate(texts)]
    lines[50:50] = lines[1000:1000] = ['{"id": 50, "text": "cut']
    (work / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    options = ["--on-error", "quarantine"]
    forked(*resumed_words(f"whole-{dest}", *options, "--argument", "pause=0"), cwd=work)
    needed = rows_asked(work)
    whole = result_digest(work, f"whole-{dest}")
    (work / "asked.log").unlink()
    kill_after(work, resumed_words(dest, *options), 450)
    kill_after(work, resumed_words(dest, *options), 900)
    result = forked(*resumed_words(dest, *options), cwd=work)
    assert "5 rows that failed" in result.stdout  # two of them could not be read
    # A window has 256 rows with a receipt at the end, so each kill loses at most two windows.
    assert needed <= rows_asked(work) <= needed + 2 * 2 * 256
    assert result_digest(work, dest) == whole


def result_digest(work: Path, dest: str) -> dict[str, bytes]:
    """Return the files of a result by name, without ledgers, which contain its arguments."""
    files = [path for path in work.rglob("*") if path.is_file() and str(path.relative_to(work)).startswith(dest)]
    remaining = {str(path.relative_to(work)).removeprefix(dest): path.read_bytes() for path in files}
    return {name: data for name, data in remaining.items() if ".brim" not in name and "README" not in name}


def test_embed_resumes_inside_a_unit_when_its_worker_was_killed(work: Path) -> None:
    """The run continues with another worker, which resumes within the unit."""
    (work / "resumed.py").write_text(RESUMED)
    environment = {**os.environ, "BRIM_PARTIAL_UNIT_SECONDS": "0.1"}
    process = start(*resumed_words("emb.npy", "--argument", "pause=0.05"), cwd=work, env=environment)
    while rows_asked(work) < 600:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(tree([process.pid])[-1], signal.SIGKILL)
    assert process.wait(120) == 0
    assert ROWS <= rows_asked(work) <= ROWS + 2 * 256
    assert np.load(work / "emb.npy").shape == (ROWS, 2)


def test_embed_computes_a_unit_again_whose_source_changed_since_the_receipt(work: Path) -> None:
    """Results of changed rows are not reused, although their unit has the same size."""
    (work / "resumed.py").write_text(RESUMED)
    kill_after(work, resumed_words("emb.npy"), 600)
    texts = (work / "rows.jsonl").read_text()
    (work / "rows.jsonl").write_text(texts.replace("word", "wo d"))
    os.utime(work / "rows.jsonl", (1, 1))
    (work / "asked.log").unlink()
    forked(*resumed_words("emb.npy"), cwd=work)
    assert rows_asked(work) == ROWS


HEAVY = """
import numpy as np
def factory():
    weights = np.ones(25_000_000)
    return lambda batch: np.ones((len(batch["text"]), 2), "float32") * weights[:2]
"""


def test_a_limit_that_is_refused_names_one_with_which_a_factory_runs(work: Path) -> None:
    """The model takes 200 MB: every limit that an error suggests is sufficient."""
    (work / "heavy.py").write_text(HEAVY)
    command = [argument.replace("mine:factory", "heavy.py:factory") for argument in words("emb.npy")[:-2]]
    for limit in ("50MB", "150MB", "220MB", "260MB"):
        refused = run_brim(*command, "--memory", limit, cwd=work, check=4).stderr
        assert f"{limit[:-2]} MB of memory is too little" in refused.replace(".0 MB", " MB")
        (names,) = re.findall(r"--memory[= ](\d+[MG]B)", refused)
    run_brim(*command, "--memory", names, cwd=work)
    run_brim(*command, "--memory", "450MB", "--fresh", cwd=work)


class Advances:
    """A progress object that records its advances before the first unit is done."""

    def __init__(self) -> None:
        self.moves: list[int] = []
        self.finished = False

    def advance(self, size: int) -> None:
        if size and not self.finished:
            self.moves.append(size)

    def shard(self, *_: object) -> None:
        self.finished = True

    def start(self, *_: object) -> None: ...
    def hashed(self, size: int) -> None: ...
    def committed(self) -> None: ...
    def note(self, text: str) -> None: ...
    def nodes(self, retained: object) -> None: ...
    def finish(self) -> None: ...


def test_embed_progress_moves_with_every_batch(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one unit of a single window, progress before its end advances by batches."""
    monkeypatch.chdir(work)
    (work / "resumed.py").write_text(RESUMED)
    (work / "rows.jsonl").write_text("".join((work / "rows.jsonl").read_text().splitlines(keepends=True)[:250]))
    progress = Advances()
    brim.embed("rows.jsonl", "resumed.py:factory", destination="emb.npy", column="text", batch_size=8, memory="2GB",
               argument={"pause": 0.06}, progress=progress)  # fmt: skip
    assert len(progress.moves) > 5, progress.moves


def test_values_that_are_no_numbers(work: Path) -> None:
    failed = run_brim(*words("emb.npy", "--argument", "bad=333"), cwd=work, check=2)
    assert "rows.jsonl, row 333" in failed.stderr
    assert "--nan keep" in failed.stderr
    run_brim(*words("emb.npy", "--argument", "bad=333", "--nan", "keep", "--fresh"), cwd=work)
    assert np.isnan(np.load(work / "emb.npy")[333, 0])
    result = run_brim(*words("out.npy", "--argument", "bad=333", "--on-error", "skip"), cwd=work)
    assert "1 row that failed" in result.stdout
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
        "--memory", "600MB", cwd=work,
    )  # fmt: skip
    vectors = np.load(work / "emb.npy")
    assert np.array_equal(vectors, np.array([[n, 10 + n] for n in range(20)], "float32"))
    names = pq.read_table(work / "emb.npy.rows.parquet")["image"].to_pylist()
    assert names == [f"{number:02d}.png" for number in range(20)]


def test_texts_and_images_to_the_hub(work: Path) -> None:
    """Both vectors are computed in one pass, published with a card, and read back by the real client."""
    for number in range(6):
        Image.new("RGB", (10 + number, 5), (number, number, number)).save(work / f"{number}.png")
    rows = [{"caption": "word " * number + "!", "path": f"{number}.png"} for number in range(6)]
    (work / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with TestHub(work / "hub") as hub:
        machine = Machine(hub, work / "machine", more={"PYTHONPATH": str(work)})
        common = ["--model", "mine:factory", "--column", "caption", "--image", "path", "--keep", "caption"]
        result = machine.run("embed", str(work / "pairs.jsonl"), DEST, *common, "--memory", "600MB")
        assert (result.returncode, "verified" in result.stdout) == (0, True), result.stderr
        code = f"""
            import datasets
            rows = datasets.load_dataset('{DEST.split("datasets/")[1]}')['train']
            print(rows[3]['caption'], rows[3]['vision'], rows[3]['text'][0])
        """
        assert machine.python(code).stdout.strip() == "word word word ! [3.0, 13.0] 16.0"


def test_unknown_suffix_is_refused_with_the_known_ones(work: Path) -> None:
    before = sorted(work.iterdir())
    refused = run_brim(*words("vec3.foo"), cwd=work, check=2)
    assert ".safetensors, .npy or .parquet" in refused.stderr
    assert sorted(work.iterdir()) == before
    run_brim(*words("vec3.foo/"), cwd=work)
    assert (work / "vec3.foo" / "data").is_dir()
    run_brim(*words("vec3.foo"), cwd=work)  # an existing folder


def test_kept_columns_are_not_counted_as_a_shard(work: Path) -> None:
    assert "in 1 shard" in run_brim(*words("one.safetensors", "--keep", "id"), cwd=work).stdout
    assert "in 1 shard" in run_brim(*words("one.safetensors", "--keep", "id"), cwd=work).stdout


@pytest.mark.parametrize("name", ["emb.npy", "emb.npy.rows.parquet"])
def test_another_file_of_that_name_is_not_replaced(work: Path, name: str) -> None:
    """A foreign file of vectors or kept columns is only replaced with --fresh; a refused job leaves no files."""
    (work / name).write_bytes(b"mine")
    before = sorted(work.iterdir())
    assert f"{name} already exists, and brim did not write it" in run_brim(*words("emb.npy"), cwd=work, check=2).stderr
    assert (work / name).read_bytes() == b"mine"
    assert sorted(work.iterdir()) == before
    run_brim(*words("emb.npy", "--fresh"), cwd=work)
    assert np.array_equal(np.load(work / "emb.npy"), expected())
    assert not (work / "emb.npy.rows.parquet").exists()


def test_a_source_is_not_replaced(work: Path) -> None:
    """The source file is refused as DEST, also with --fresh, and stays unchanged."""
    pq.write_table(pa.table({"text": ["a", "b"]}), work / "src.parquet")
    before = (work / "src.parquet").read_bytes()
    for dest in ("src.parquet", "./src.parquet"):
        refused = run_brim("embed", "src.parquet", dest, *words("")[3:], "--fresh", cwd=work, check=2)
        assert "source itself" in refused.stderr
    assert (work / "src.parquet").read_bytes() == before
    assert not (work / ".src.parquet.brim").exists()


@pytest.mark.parametrize("dest", ["emb.npy", "emb.parquet", "emb.safetensors"])
def test_rows_that_are_left_out_are_kept(work: Path, dest: str) -> None:
    """Left-out rows are in a file next to the vectors; it is removed when the job runs again without such rows."""
    bad = words(dest, "--argument", "bad=333", "--on-error", "quarantine")
    remaining = work / f"{dest}.quarantine.parquet"
    assert f"kept in {remaining}" in " ".join(run_brim(*bad, cwd=work).stdout.split())
    table = pq.read_table(remaining)
    assert table["text"].to_pylist()[0].startswith("333 ")
    assert (table.num_rows, table.column_names[-4:][0]) == (1, "brim_row")
    run_brim(*words(dest, "--on-error", "quarantine", "--fresh"), cwd=work)
    assert not remaining.exists()


CUT = """
import os, signal, sys
from brim.state.ledger import Ledger
plain = Ledger.finish
def finish(self, receipts, *more):
    if self.path.parent.name.startswith(".emb"):  # the file has its name, and no receipt yet
        if "kill" in os.environ["CUT"]:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(28, os.strerror(28))
    return plain(self, receipts, *more)
Ledger.finish = finish
sys.argv = ["brim", *sys.argv[1:]]
from brim.cli import main
main()
"""


@pytest.mark.parametrize("method", ["kill", "full"])
@pytest.mark.parametrize("dest", ["emb.npy", "emb.parquet", "emb.safetensors"])
def test_cut_between_the_file_and_its_ledger(work: Path, dest: str, method: str) -> None:
    """The next run recognizes the file as its own, computes nothing again, and leaves no temporary files."""
    command = [sys.executable, "-c", CUT, *words(dest, "--keep", "id")]
    cut = subprocess.run(
        command, cwd=work, env=os.environ | {"CUT": method}, capture_output=True, text=True, check=False
    )
    assert cut.returncode == {"kill": -9, "full": 5}[method], cut.stderr
    assert (work / dest).exists()
    output = run_brim(*words(dest, "--keep", "id", "--json"), cwd=work).stdout.splitlines()
    result = next(json.loads(line) for line in output if '"done"' in line)
    assert result["computed"] == 0
    assert result["units"] > 3
    assert sorted(path.name for path in (work / f".{dest}.brim").iterdir()) == ["ledger.jsonl", "lock"]
    assert "nothing to do" in run_brim(*words(dest, "--keep", "id"), cwd=work).stdout


def test_half_a_file_of_another_job_is_not_gone_on_with(work: Path) -> None:
    """Partial work of another job is not resumed, and --fresh removes it."""
    run_brim(*words("emb.npy"), cwd=work)
    hidden = work / ".emb.npy.brim"
    (hidden / "units").mkdir()
    (hidden / "units" / "left.arrow").write_bytes(b"left")
    (hidden / "work" / "0123456789abcdef").mkdir(parents=True)
    assert "nothing to do" in run_brim(*words("emb.npy"), cwd=work).stdout
    assert sorted(path.name for path in hidden.iterdir()) == ["ledger.jsonl", "lock"]
    with brim.TensorWriter(work / "half.npy", 3, text=(6, "float32")) as writer:
        writer.append(text=np.zeros((3, 6), "float32"))
    (hidden / "work" / "0123456789abcdef").mkdir(parents=True)
    (work / "half.npy").rename(hidden / "work" / "0123456789abcdef" / "vectors.npy")
    run_brim(*words("emb.npy", "--argument", "dim=6", "--batch-size", "4", "--fresh"), cwd=work)
    assert np.array_equal(np.load(work / "emb.npy"), expected())
    assert sorted(path.name for path in hidden.iterdir()) == ["ledger.jsonl", "lock"]


def test_bad_commands(work: Path) -> None:
    for extra, says in [
        (["--model", "nowhere:factory"], "No module named 'nowhere'"),
        (["--model", "mine:nothing"], "mine has no 'nothing'"),
        (["--column", "texts"], "no column 'texts'"),
        (["--argument", "dim"], "takes NAME=VALUE"),
        (["--name", "vision=v"], "gives no 'vision'"),
    ]:
        refused = run_brim(*words("emb.npy", *extra, "--fresh"), cwd=work, check=2)
        assert says in refused.stderr, refused.stderr

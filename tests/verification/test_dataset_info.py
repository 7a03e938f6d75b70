"""brim info and brim check of datasets in a folder, on the Hub and in a bucket, written by brim or by other tools."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brim
from brim.errors import VerificationError
from brim.state.ledger import Ledger
from brim.state.record_log import record_line
from tests.destinations import BucketDestination
from tests.generators import Layout
from tests.generators.aomic import make_aomic
from tests.hub import TestHub
from tests.publishing import DEST, Machine

Run = Callable[..., subprocess.CompletedProcess[str]]


def brim_run(environment: dict[str, str] | None = None) -> Run:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "brim", *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert "Traceback" not in result.stderr, result.stderr
        assert result.returncode != 1, result.stderr
        return result

    return run


def checks(run: Run, address: str, *options: str, code: int) -> dict[str, dict[str, Any]]:
    result = run("check", address, "--json", *options)
    assert result.returncode == code, result.stdout[-2000:] + result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return {line["name"]: line for line in lines if line["event"] == "check"}


@pytest.fixture(scope="module")
def aomic(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    return make_aomic(tmp_path_factory.mktemp("aomic"), 216)


@pytest.fixture(params=["folder", "hub", "bucket"])
def published(request: pytest.FixtureRequest, aomic: Layout, tmp_path: Path) -> Iterator[tuple[str, Run]]:
    """A dataset in several shards, at each kind of location."""
    options = ("--recipe", "aomic-piop1", "--shard-size", "20KB", "-q")
    if request.param == "folder":
        run = brim_run()
        assert run("build", str(aomic.root), str(tmp_path / "out"), *options).returncode == 0
        yield str(tmp_path / "out"), run
    elif request.param == "hub":
        with TestHub(tmp_path / "hub") as hub:
            machine = Machine(hub, tmp_path / "machine")
            machine.publish(aomic.root, *options)
            yield DEST, brim_run(machine.environment)
    else:
        destination = BucketDestination(request.getfixturevalue("s3"), tmp_path, request.getfixturevalue("s3_prefix"))
        run = brim_run(destination.environment)
        assert run("build", str(aomic.root), destination.address, *options).returncode == 0
        yield destination.address, run


def test_info_and_check_anywhere(published: tuple[str, Run]) -> None:
    """info reports rows, columns and completeness; its own recipe's expectations hold, and those of another fail."""
    address, run = published
    actual = json.loads(run("info", address, "--head", "3", "--json").stdout)
    assert (actual["rows"], actual["whole"], actual["problems"]) == (216, True, [])
    assert {column["name"]: column["type"] for column in actual["columns"]} == {
        "subject_id": "string", "t1w": "nifti", "dwi": "list of nifti", "bold": "list of nifti",
        "age": "float", "sex": "string", "handedness": "string",
    }  # fmt: skip
    assert [(split["split"], split["rows"], split["shards"]) for split in actual["splits"]] == [
        ("train", 216, actual["shards"])
    ]
    assert actual["shards"] > 3
    assert actual["head"][1]["t1w"]["path"] == "sub-0002/anat/sub-0002_T1w.nii.gz"
    assert actual["head"][1]["t1w"]["shape"] == [len("sub-0002/anat/sub-0002_T1w.nii.gz"), 1, 1]
    assert len(actual["head"]) == 3
    good = checks(run, address, "--recipe", "aomic-piop1", "--deep", code=0)
    assert good["rows with dwi"]["detail"].startswith("211; expected 211 in ds002785")
    assert good["NIfTI headers"]["counted"] == good["gzip, to the last byte"]["counted"] == 1542
    assert good["required files"]["status"] == "skip"
    bad = checks(run, address, "--recipe", "arc", code=3)
    assert not bad["columns and types of the recipe 'arc'"]["ok"]
    assert "'lesion' is missing" in bad["columns and types of the recipe 'arc'"]["detail"]


def test_damage_in_what_is_published(aomic: Layout, tmp_path: Path) -> None:
    """info and check name missing shards, unreadable footers and a wrong card."""
    out = tmp_path / "out"
    brim.build(brim.bids(aomic.root, recipe="aomic-piop1"), out, shard_size="20KB")
    shards = sorted((out / "data").glob("*.parquet"))
    shards[1].unlink()
    data = shards[2].read_bytes()
    shards[2].write_bytes(data[:-4] + b"XXXX")
    actual = brim.info(out)
    assert actual.whole is False
    assert any(f"{shards[1].name}: is missing" in problem for problem in actual.problems)
    assert any(f"{shards[2].name}: cannot be read" in problem for problem in actual.problems)
    report = brim.check(out, recipe="aomic-piop1")
    failed = {check.name: check for check in report.failed}
    assert f"data/{shards[1].name}" in failed["shards are all there"].failed
    assert f"data/{shards[2].name}" in failed["footers can be read"].failed
    assert {"rows", "distinct subject_id", "rows with t1w"} <= set(failed)
    assert "says 216 rows of train" in failed["card"].detail


def crooked_table(rows: int) -> pa.Table:
    """Return the table of a script that forgot one gradient, with the types of `datasets` and without brim."""
    image = nib.Nifti1Image(np.zeros((4, 5, 6), np.uint8), np.eye(4)).to_bytes()
    files = [[{"bytes": image, "path": f"{row}-{n}.nii"} for n in range(2)] for row in range(rows)]
    texts = [["0 1000"] * (1 if row == rows - 2 else 2) for row in range(rows)]
    features = {"subject_id": {"dtype": "string", "_type": "Value"}}
    features["dwi"] = {"feature": {"_type": "Nifti"}, "_type": "List"}
    table = pa.table({"subject_id": [f"sub-{row}" for row in range(rows)], "dwi": files, "dwi_bvals": texts})
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


RECIPE = """
name = "pairs"
rows = "sub-*"
key = ["subject_id"]
[[columns]]
name = "dwi"
pattern = "{subject_id}/*_dwi.nii.gz"
type = "nifti"
list = true
[[columns]]
name = "dwi_bvals"
pattern = "{subject_id}/*_dwi.bval"
type = "text"
beside = "dwi"
[expect]
snapshot = "a test"
subjects = 10
[expect.files]
dwi = 20
"""


def test_datasets_that_brim_did_not_build(tmp_path: Path) -> None:
    """Any Parquet dataset is checked: lists of unequal length are found by row, and headers of encoded columns too."""
    folder = tmp_path / "other"
    (folder / "data").mkdir(parents=True)
    pq.write_table(crooked_table(10), folder / "data/train-00000-of-00001.parquet", compression="zstd")
    (folder / "README.md").write_text("---\nlicense: cc0-1.0\n---\n# Mine\n")
    recipe = tmp_path / "pairs.toml"
    recipe.write_text(RECIPE)
    actual = brim.info(folder, head=1)
    assert (actual.rows, actual.whole, actual.card) == (10, True, {"license": "cc0-1.0"})
    assert "parquet-cpp-arrow" in actual.writers[0]
    assert "      rows  10\n" in str(actual)
    assert repr(actual) == str(actual)
    assert "license cc0-1.0</td>" in actual._repr_html_()
    assert actual.head[0]["dwi"][0] == {"type": "nifti", "path": "0-0.nii", "shape": (4, 5, 6), "bytes": 472}
    code = checks(brim_run(), str(folder), "--recipe", str(recipe), "--deep", code=3)
    assert [name for name, check in code.items() if not check["ok"]] == ["lists go together"]
    assert "row 8: 'dwi_bvals' holds 1 and 'dwi', with which it is aligned, 2" in code["lists go together"]["detail"]
    assert code["NIfTI headers"]["counted"] == 20
    plain = checks(brim_run(), str(folder), code=0)
    assert plain["lists go together"]["status"] == "skip"
    assert plain["NIfTI headers"]["sampled"]


def test_verify_finds_lists_out_of_line(tmp_path: Path) -> None:
    """verify applies the recipe of the build: lists of unequal length are damage, even if the receipts match."""
    source = tmp_path / "source"
    for number in range(4):
        folder = source / f"sub-{number}"
        folder.mkdir(parents=True)
        for name in ("a_dwi.nii.gz", "b_dwi.nii.gz", "a_dwi.bval", "b_dwi.bval"):
            (folder / name).write_bytes(name.encode())
    recipe = tmp_path / "pairs.toml"
    recipe.write_text(RECIPE)
    out = tmp_path / "out"
    brim.build(brim.bids(source, recipe=recipe), out)
    brim.verify(out, source)
    shard = next((out / "data").glob("*.parquet"))
    table = pq.read_table(shard)
    texts = [cell[:1] for cell in table.column("dwi_bvals").to_pylist()]
    pq.write_table(table.set_column(2, "dwi_bvals", pa.array(texts)), shard)
    shutil.rmtree(out / ".brim")
    brim.build(brim.bids(source, recipe=recipe), tmp_path / "again")
    repeated = next((tmp_path / "again/data").glob("*.parquet"))
    shutil.copy(shard, repeated)
    ledger = next((tmp_path / "again/.brim").rglob("*.jsonl"))
    _rewrite_receipt(ledger, repeated)
    with pytest.raises(VerificationError, match="row 0: 'dwi_bvals' holds 1 and 'dwi', with which it is aligned, 2"):
        brim.verify(tmp_path / "again")


def _rewrite_receipt(ledger: Path, shard: Path) -> None:
    """Change the receipt to match the changed shard, like a build that does not check its rows."""
    (receipt,) = Ledger(ledger.parent).receipts.values()
    data, lines = shard.read_bytes(), []
    for line in ledger.read_text().splitlines():
        body = line.partition(" ")[2].replace(receipt.sha256, hashlib.sha256(data).hexdigest())
        record = json.loads(body)
        if record.get("size") == receipt.size:
            record["size"] = len(data)
        lines.append(record_line(record))
    ledger.write_bytes(b"".join(lines))


def test_memory_stays_flat(tmp_path: Path) -> None:
    """Checking 60 MB of files takes no more memory than checking 6 MB."""
    peaks = []
    for count in (3, 30):
        source, out = tmp_path / f"source{count}", tmp_path / f"out{count}"
        source.mkdir()
        for number in range(count):
            voxels = np.random.default_rng(number).integers(0, 255, (128, 128, 128), np.uint8)
            image = nib.Nifti1Image(voxels, np.eye(4))
            (source / f"{number:03}.nii").write_bytes(image.to_bytes())
        brim.build(source, out, rows_per_shard=1)
        code = (
            "import resource, sys, brim; brim.check(sys.argv[1], deep=True); "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        result = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=True)
        peaks.append(int(result.stdout) / 1000)
    assert peaks[1] < peaks[0] + 15, peaks


def test_full_arc_published(tmp_path: Path, whole_arc: Layout) -> None:
    """The full cohort matches every count of its recipe after publishing, from the shards alone."""
    brim.build(brim.bids(whole_arc.root, recipe="arc"), tmp_path / "out", shard_size="100KB")
    report = brim.check(tmp_path / "out", recipe="arc")
    assert report.ok, [(check.name, check.detail) for check in report.failed]
    names = {check.name for check in report.checks}
    assert {"sessions", "rows with bold", "files in dwi_bvals", "lists go together"} <= names

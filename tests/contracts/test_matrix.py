"""One contract for every job, destination and engine: undisturbed, killed, stopped, and on a disk that fills up.

tests/matrix.py lists the cells. tests/guarantees/shim.c holds a job while it writes a receipt, so each disturbance
happens in the middle of the job without depending on timing. After each disturbance, the same command ends with the
data files of an undisturbed build into a folder.

The suite runs some cells. `make test-matrix` runs all of them, those on Ray only if Ray is installed.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import TestCluster, cluster_of
from tests.conftest import random_bytes, write_files
from tests.destinations import BucketDestination, Destination, FolderDestination, HubBucketDestination, HubDestination
from tests.forked import Process, brim, start
from tests.generators.small_jobs import MODEL, STEPS, TOKENIZER
from tests.guarantees.injection import Fault, Shim
from tests.hub import TestHub
from tests.hub.server import TOKENS
from tests.matrix import CELLS, PAGE, PLACES, Cell, block, table
from tests.s3 import S3Server
from tests.small_disk import fill, small_disk

# The number of the receipt at which a run is held: receipts exist before it, and more follow.
RECEIPT = 3
NODES_TOKEN = "hf_nodes"  # may write to the buckets of the user eve, but not to the repositories of these tests
Made = dict[tuple[str, str], dict[str, bytes]]
_MARKS = {"suite": (), "matrix": (pytest.mark.matrix,), "ray": (pytest.mark.ray,)}


def _commands() -> dict[str, list[str]]:
    """Return the arguments of each command before and after its destination, as typed in the folder of the sources."""
    units = ["--unit-size", "2KB", "--memory", "600MB"]
    shards = ["--rows-per-shard", "40"]
    return {
        # Enough shards that their receipts fill more than one page of the disk, even where only receipts are written
        # locally.
        "build": ["build", "files", "--rows-per-shard", "1"],
        "map": ["map", "rows", "--fn", "steps.py:length", *units, *shards],
        "tokenize": ["tokenize", "rows", "--tokenizer", "tokenizer.json", *units, *shards],
        "embed": ["embed", "rows", "--model", "model:factory", "--column", "text", "--keep", "id", *units],
    }


@dataclass
class Trial:
    """One cell under test: its command, its destination, and the disk for its local files."""

    cell: Cell
    work: Path
    destination: Destination
    address: str
    disk: Path
    shim: Shim
    options: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        verb, source, *extra = _commands()[self.cell.verb]
        workers = [] if self.cell.engine == "ray" else ["--workers", "1"]
        return [verb, source, self.address, *extra, *workers, *self.options, "--json"]

    @property
    def environment(self) -> dict[str, str]:
        return {**self.destination.environment, "XDG_STATE_HOME": str(self.disk / "state")}

    def finish(self) -> dict[str, Any]:
        """Run the command undisturbed and return its final event."""
        result = brim(*self.words, env=self.environment, cwd=self.work)
        return dict(json.loads(result.stdout.splitlines()[-1]))

    def caught(self) -> Process:
        """Start the command and return its process once it is held at the receipt."""
        variables = self.shim.variables(Fault("fsync", RECEIPT, "hold", "*/ledger.jsonl"), [self.disk])
        with open(self.shim.library.with_name("said"), "wb") as message:
            process = start(
                *self.words, env=self.environment | variables, cwd=self.work, preload=str(self.shim.library),
                outputs=(message.fileno(), message.fileno()),
            )  # fmt: skip
        until = time.monotonic() + 120
        while not self.shim.fired:
            assert process.poll() is None, self.said
            assert time.monotonic() < until, "it came to no receipt"
            time.sleep(0.01)
        return process

    def goes_on(self, process: Process) -> int:
        """Release a held run and return its exit code."""
        self.shim.release()
        code = process.wait(120)
        assert "Traceback" not in self.said, self.said
        return code

    @property
    def said(self) -> str:
        """Return the output of the most recently held run."""
        return self.shim.library.with_name("said").read_text()

    def data(self) -> dict[str, bytes]:
        """Return the result by name: the shards, or a single file with the files next to it."""
        content = self.destination.content()
        if self.cell.place in PLACES:
            return {name: data for name, data in content.items() if name.startswith("data/")}
        return {name: data for name, data in content.items() if not Path(name).parts[0].endswith(".brim")}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which commands run: files to package, rows, a function, a tokenizer and a model."""
    folder = tmp_path_factory.mktemp("work")
    write_files(folder / "files", {f"f{n:02d}.bin": random_bytes(9000 + n, n) for n in range(24)})
    rows = [json.dumps({"id": n, "text": f"row {n} " + "word " * (n % 9)}) for n in range(240)]
    write_files(folder, {
        "rows/a.jsonl": "\n".join(rows[:120]).encode(), "rows/b.jsonl": "\n".join(rows[120:]).encode(),
        "steps.py": STEPS, "model.py": MODEL, "tokenizer.json": TOKENIZER,
    })  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    shim = Shim.build(tmp_path_factory.mktemp("shim"))
    if shim is None:
        pytest.skip("jobs that are caught in their middle are not proved here: that takes Linux and a C compiler")
    return shim


@pytest.fixture(scope="module")
def expected() -> Made:
    """Return a cache of undisturbed results by command and kind of result; tests fill it on demand."""
    return {}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHub]:
    tokens = {**TOKENS, NODES_TOKEN: {"user": "eve", "can_write": ["eve"]}}
    with TestHub(tmp_path_factory.mktemp("hub"), tokens, xet=True) as hub:
        yield hub


@pytest.fixture(scope="module")
def cluster(s3: S3Server, hub: TestHub) -> Iterator[TestCluster]:
    """Start a cluster whose nodes have separate credentials for buckets. Tasks carry the token for repositories."""
    pytest.importorskip("ray", reason="cells on Ray are not proved here: Ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        own = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": NODES_TOKEN, "HF_HUB_DISABLE_TELEMETRY": "1"}
        for name, value in {**s3.environment, **own}.items():
            patch.setenv(name, value)
        with cluster_of(2, cpus=2) as cluster:
            yield cluster


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> Cell:
    actual: Cell = request.param
    return actual


@pytest.fixture
def disk(cell: Cell, tmp_path: Path) -> Iterator[Path]:
    """Return the disk for all local files of the job. It is small for the cells that fill it."""
    disk = tmp_path / "disk"
    if cell.event == "full disk":
        with small_disk(disk):
            yield disk
        return
    disk.mkdir()
    yield disk


@pytest.fixture
def trial(request: pytest.FixtureRequest, cell: Cell, work: Path, shim: Shim, disk: Path, tmp_path: Path) -> Trial:
    options = request.getfixturevalue("cluster").options if cell.engine == "ray" else ()
    kind, _, suffix = cell.place.partition(".")
    destination: Destination
    if kind == "hub":
        destination = HubDestination(
            request.getfixturevalue("hub"), tmp_path / "machine", f"hf://datasets/ada/{tmp_path.name[:80]}"
        )
    elif kind == "hubbucket":
        destination = HubBucketDestination(
            request.getfixturevalue("hub"), tmp_path / "machine", tmp_path.name[:80], "eve/things"
        )
    elif kind == "bucket":
        s3: S3Server = request.getfixturevalue("s3")
        destination = BucketDestination(s3, tmp_path / "machine", request.getfixturevalue("s3_prefix").rstrip("/"))
    else:
        destination = FolderDestination(disk / "out")
        (disk / "out").mkdir()
    address = f"{destination.address}/v.{suffix}" if suffix else destination.address
    return Trial(cell, work, destination, address, disk, shim, options)


def _cells(event: str) -> list[object]:
    return [pytest.param(cell, id=str(cell), marks=_MARKS[cell.target]) for cell in CELLS if cell.event == event]


class TestEveryCell:
    """A job keeps its guarantees for every destination and engine."""

    @pytest.fixture(autouse=True)
    def _the_same_bytes(self, trial: Trial, expected: Made, tmp_path: Path, work: Path) -> Iterator[None]:
        """Check after each test that the data equals the result of an undisturbed local build into a folder."""
        yield
        suffix = trial.cell.place.partition(".")[2]
        key = (trial.cell.verb, suffix)
        if key not in expected:
            local = Cell(trial.cell.verb, f"file.{suffix}" if suffix else "folder", "local", "undisturbed")
            destination = FolderDestination(tmp_path / "expected")
            destination.folder.mkdir()
            address = f"{destination.address}/v.{suffix}" if suffix else destination.address
            plain = Trial(local, work, destination, address, tmp_path / "expected-state", trial.shim)
            plain.finish()
            expected[key] = plain.data()
        assert trial.data() == expected[key]
        remaining = [path for path in trial.disk.rglob("*") if path.suffix == ".tmp" or path.name in ("units", "made")]
        assert not remaining, "leftovers"

    @pytest.mark.parametrize("cell", _cells("undisturbed"), indirect=True)
    def test_undisturbed(self, trial: Trial) -> None:
        """The job succeeds, and running the same command again writes nothing."""
        trial.finish()
        before = trial.destination.content()
        repeated = trial.finish()
        assert repeated.get("written", 0) == 0
        assert repeated.get("computed", 0) == 0
        assert trial.destination.content() == before
        if trial.cell.place in PLACES:
            source = [trial.work / "files"] if trial.cell.verb == "build" else []
            brim("verify", trial.address, *source, "--deep", "--quiet", env=trial.environment, cwd=trial.work)

    @pytest.mark.parametrize("cell", _cells("killed"), indirect=True)
    def test_killed_and_continued(self, trial: Trial) -> None:
        """After two kills in its middle, the same command computes only the units and shards without a receipt."""
        for _ in range(2):
            process = trial.caught()
            process.kill()
            process.wait()
            trial.shim.release()  # lets the workers of the killed run exit
        result = trial.finish()
        assert result["kept"] > 0 if trial.cell.verb == "build" else result["computed"] < result["units"], result

    @pytest.mark.parametrize("cell", _cells("stopped"), indirect=True)
    def test_stopped(self, trial: Trial) -> None:
        """SIGTERM leads to exit code 6 and a hint to run the same command, which then completes the job."""
        process = trial.caught()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert trial.goes_on(process) == 6, trial.said
        assert "run the same command to continue" in trial.said.lower(), trial.said
        trial.finish()

    @pytest.mark.parametrize("cell", _cells("full disk"), indirect=True)
    def test_full_disk(self, trial: Trial) -> None:
        """A disk that other programs fill leads to exit code 5 and a clear error. With free space, the job resumes."""
        process = trial.caught()
        ballast = fill(trial.disk)
        assert trial.goes_on(process) == 5, trial.said
        assert "full" in trial.said or "No space" in trial.said, trial.said
        assert "bug" not in trial.said
        ballast.unlink()
        trial.finish()


def test_the_page_has_the_table() -> None:
    """docs/contributing/tests.md contains the table that `python -m tests.matrix --write` writes."""
    assert block(PAGE.read_text()) == table()

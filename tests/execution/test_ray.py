"""`--engine ray` on real clusters of two and three nodes: the same bytes as a local run, also after kills."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from brim.state.ledger import Ledger
from tests.clusters import Run, TestCluster, cluster_of, run, until
from tests.conftest import brim, tree_digest, write_files
from tests.destinations import BucketDestination, FolderDestination
from tests.destinations import listing as bucket_listing
from tests.hub import TestHub
from tests.publishing import DEST, Listing, Machine, built, shards
from tests.s3 import S3Server

pytest.importorskip("ray", reason="needs Ray: make test-ray")
pytestmark = pytest.mark.ray

TOKEN = "hf_write"
MODEL = "embed_models:hashing"
FUNCTIONS = """
import os, time

def slow(row):
    if row["id"] % 20 == 0 and os.environ.get("ON_A_NODE"):
        time.sleep(0.4)
    return {"n": len(row["text"])}

def hungry(batch):
    if 120 in batch["id"]:
        held = b"x" * 300_000_000
        time.sleep(0.3)
    return {"n": [len(text) for text in batch["text"]]}
"""

HEAVY = """
import os

held = b"x" * (300_000_000 if os.environ.get("ON_A_NODE") else 1)

def fn(row):
    if row["id"] == 30 and not os.path.exists("fixed"):
        raise ValueError
    return {"n": len(row["text"])}
"""

WHERE = """
import os, time

def fn(row):
    open(f"SEEN/{os.environ.get('WHERE', 'other')}-{os.getpid()}", "a").close()
    time.sleep(0.02)
    return row
"""

SLOW_MODEL = """
import os, time
import embed_models

def make(device):
    model = embed_models.hashing(device)

    def slow(batch):
        time.sleep(0.02 if os.environ.get("ON_A_NODE") else 0)
        return model(batch)

    return slow
"""

# brim with shorter time limits for a cluster that does not answer.
HASTY = """
from brim.cli import main
from brim.execution import ray_cluster, ray_monitors

ray_cluster._HEAD_S = ray_monitors._LATE_S = 1.0
main()
"""
HOG = """
import sys, time, ray

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=1)
def hog():
    time.sleep(100)

running = hog.remote()
while ray.available_resources().get("CPU"):
    time.sleep(0.1)
print("busy", flush=True)
ray.get(running)
"""


@pytest.fixture(scope="module")
def cluster(s3: S3Server) -> Iterator[TestCluster]:
    """Start a cluster whose nodes have the credentials for the bucket in their environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        with cluster_of(2, cpus=2) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the working folder of the driver: rows of text, functions, models and a tokenizer.

    Workers find its modules because the driver runs in this folder.
    """
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("work")
    texts = [f"row {n} " + "the quick brown fox " * (n % 7) for n in range(400)]
    rows = [json.dumps({"id": n, "text": text}) for n, text in enumerate(texts)]
    write_files(folder, {"rows.jsonl": "\n".join(rows).encode(), "functions.py": FUNCTIONS.encode()})
    shutil.copy(Path(__file__).parents[1] / "embed_models.py", folder)
    items = [json.dumps({"id": n, "text": f"row {n} " + texts[n % 400]}) for n in range(30_000)]
    write_files(folder, {"many.jsonl": "\n".join(items).encode(), "slow_model.py": SLOW_MODEL.encode()})
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, tokenizers.trainers.WordLevelTrainer(special_tokens=["?"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@dataclass(frozen=True)
class Destination:
    """A destination of any kind: its address, the options and environment of the driver, and a listing of its files."""

    dest: str
    options: tuple[str, ...]
    environment: dict[str, str]
    listing: Callable[[], Listing]


@pytest.fixture(params=["folder", "lfs", "xet", "bucket"])
def destination(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server, s3_prefix: str) -> Iterator[Destination]:
    if request.param == "folder":
        out = tmp_path / "out"
        yield Destination(str(out), (), dict(os.environ), lambda: listing_of(out))
        return
    if request.param == "bucket":
        bucket = BucketDestination(s3, tmp_path / "machine", s3_prefix.rstrip("/"))
        yield Destination(bucket.address, (), bucket.environment, lambda: bucket_listing(bucket))
        return
    with TestHub(tmp_path / "hub", xet=request.param == "xet") as hub:
        machine = Machine(hub, tmp_path / "machine")
        yield Destination(DEST, ("--via", request.param), machine.environment, lambda: shards(hub))


def listing_of(out: Path) -> Listing:
    return {f"data/{path.name}": (path.stat().st_size, tree_digest(out)[f"data/{path.name}"])
            for path in sorted((out / "data").iterdir())}  # fmt: skip


def test_build(cluster: TestCluster, destination: Destination, many_files: Callable[..., Path], tmp_path: Path) -> None:
    """A build on Ray writes the same shards as a local build, and no file of the cluster contains a token."""
    source = many_files(12)
    options = (*destination.options, "--rows-per-shard", "2", *cluster.options)
    result = run("build", "source", destination.dest, *options, cwd=tmp_path, environment=destination.environment)
    assert result.events[-1]["written"] == 6
    assert destination.listing() == built(source, tmp_path / "local", "--rows-per-shard", "2")
    if "://" not in destination.dest:
        assert tree_digest(tmp_path / "out") == tree_digest(tmp_path / "local")
    assert cluster.holds("raylet")  # proves that the search works
    assert not cluster.holds(TOKEN)


def test_tokenize_to_the_hub(cluster: TestCluster, machine: Machine, work: Path, tmp_path: Path) -> None:
    """Tokens that nodes compute and upload to the Hub equal those of a local run."""
    arguments = ("--tokenizer", "tokenizer.json", "--unit-size", "8KB", "--rows-per-shard", "150")
    run("tokenize", "rows.jsonl", DEST, *arguments, *cluster.options, cwd=work, environment=machine.environment)
    brim("tokenize", "rows.jsonl", tmp_path / "local", *arguments, "--quiet", cwd=work)
    assert shards(machine.hub) == listing_of(tmp_path / "local")


def test_from_bucket_to_bucket(cluster: TestCluster, s3: S3Server, s3_prefix: str, work: Path, tmp_path: Path) -> None:
    """Nodes read from a bucket and write to it, for packaged files and for tokens, and store no secret."""
    files = {f"{n}.bin": bytes([n]) * 100_000 for n in range(6)}
    local = write_files(tmp_path / "files", files)
    for name, data in files.items():
        s3.write("private", f"{s3_prefix}files/{name}", data)
    s3.write("private", f"{s3_prefix}rows.jsonl", (work / "rows.jsonl").read_bytes())
    packed = BucketDestination(s3, tmp_path / "machine", f"{s3_prefix}packed")
    run("build", f"s3://private/{s3_prefix}files", packed.address, "--rows-per-shard", "2", *cluster.options, cwd=work,
        environment=packed.environment)  # fmt: skip
    assert bucket_listing(packed) == built(local, tmp_path / "local", "--rows-per-shard", "2")
    tokens = BucketDestination(s3, tmp_path / "machine", f"{s3_prefix}tokens")
    arguments = ("--tokenizer", "tokenizer.json", "--unit-size", "8KB")
    run("tokenize", f"s3://private/{s3_prefix}rows.jsonl", tokens.address, *arguments, *cluster.options, cwd=work,
        environment=tokens.environment)  # fmt: skip
    brim("tokenize", "rows.jsonl", tmp_path / "tokens", *arguments, "--quiet", cwd=work)
    assert bucket_listing(tokens) == listing_of(tmp_path / "tokens")
    assert not cluster.holds(s3.credentials.secret_key)


def test_no_shared_disk(
    cluster: TestCluster, s3: S3Server, s3_prefix: str, work: Path, hub: TestHub, machine: Machine, tmp_path: Path
) -> None:
    """Without a shared disk, units are stored in the bucket of the destination or in `--workspace`.

    After losing a node and the driver, the bytes equal those of a local run, and no unit remains.
    """
    s3.write("private", f"{s3_prefix}rows.jsonl", (work / "rows.jsonl").read_bytes())
    rows, arguments = f"s3://private/{s3_prefix}rows.jsonl", ("--fn", "functions.py:slow", "--unit-size", "2KB")
    existing = BucketDestination(s3, tmp_path / "machine", f"{s3_prefix}mapped")

    def units() -> list[str]:
        return [name for name in s3.objects("private", s3_prefix) if "/.brim/units/" in name]

    command = ("map", rows, existing.address, *arguments, *cluster.options)
    with cluster.node() as third:
        running = Run(*command, cwd=work, environment=existing.environment)
        running.until_shards(2)
        assert units()
        assert not list((tmp_path / "machine").rglob("0000000*.parquet"))
        cluster.kill(third)
        running.until_shards(5)
        running.kill()
    result = run(*command, cwd=work, environment=existing.environment)
    assert result.events[-1]["computed"] < result.events[-1]["units"]
    brim("map", "rows.jsonl", tmp_path / "local", *arguments, "--quiet", cwd=work)
    assert bucket_listing(existing) == listing_of(tmp_path / "local")
    assert not units()
    workspace = ("--workspace", f"s3://private/{s3_prefix}work")
    run("map", rows, DEST, *arguments, *workspace, *cluster.options, cwd=work,
        environment={**machine.environment, **s3.environment})  # fmt: skip
    assert shards(hub) == listing_of(tmp_path / "local")
    assert not units()


def test_embed(cluster: TestCluster, work: Path, tmp_path: Path) -> None:
    """Vectors are identical to those of a local run, and the report page lists every node."""
    arguments = ("--model", MODEL, "--column", "text", "--unit-size", "8KB", "--batch-size", "16")
    page = tmp_path / "page.html"
    run("embed", "rows.jsonl", tmp_path / "ray.npy", *arguments, *cluster.options, "--report", page, cwd=work)
    brim("embed", "rows.jsonl", tmp_path / "local.npy", *arguments, "--quiet", cwd=work)
    assert (tmp_path / "ray.npy").read_bytes() == (tmp_path / "local.npy").read_bytes()
    assert page.read_text().count('<td class="name">') >= 2
    assert 'id="nodes"' in page.read_text()


def test_map_loses_a_worker_and_a_node(cluster: TestCluster, work: Path, tmp_path: Path) -> None:
    """After losing a worker and a node, other workers redo only the lost units, and the result is the same."""
    arguments = ("--fn", "functions.py:slow", "--unit-size", "2KB")
    with cluster.node() as third:
        running = Run("map", "rows.jsonl", tmp_path / "out", *arguments, *cluster.options, cwd=work)
        running.until_shards(1)
        until(lambda: cluster.kill_worker(third, "compute_unit"))
        running.until_shards(len(running.shards) + 3)
        cluster.kill(third)
        result = running.end()
    brim("map", "rows.jsonl", tmp_path / "local", *arguments, "--quiet", cwd=work)
    assert tree_digest(tmp_path / "out") == tree_digest(tmp_path / "local")
    units = [name for name in running.shards if name.startswith("unit")]
    assert len(units) == len(set(units)) == result["units"] == result["computed"]
    assert result["retries"] >= 1
    assert any("was lost: trying it again" in note for note in running.notes)
    assert len(running.nodes) == 3


UNIT = "20KB"
LOSING = {
    "tokenize": ("tokenize", ("--tokenizer", "tokenizer.json", "--pack", "32", "--no-eos", "--shuffle", "3"), "out"),
    "embed": ("embed", ("--model", "slow_model:make", "--column", "text", "--batch-size", "64"), "out.npy"),
}


@pytest.mark.parametrize("shared", [True, False], ids=["a shared disk", "a bucket"])
@pytest.mark.parametrize("verb", LOSING)
def test_a_node_a_worker_and_the_driver_are_lost(
    cluster: TestCluster, s3: S3Server, s3_prefix: str, verb: str, shared: bool, work: Path, tmp_path: Path
) -> None:
    """Losing a worker, a node, the driver and the worker that combines the units does not change the bytes."""
    name, arguments, target = LOSING[verb]
    existing = BucketDestination(s3, tmp_path / "machine", f"{s3_prefix}lost")
    dest = str(tmp_path / target) if shared else f"{existing.address}/{target}"
    command = (name, "many.jsonl", dest, *arguments, "--unit-size", UNIT, *cluster.options)
    environment = dict(os.environ) if shared else existing.environment
    with cluster.node() as third:
        running = Run(*command, cwd=work, environment=environment)
        running.until_shards(2)
        until(lambda: cluster.kill_worker(third, "compute_unit"))
        running.until_shards(8)
        cluster.kill(third)
        running.until_shards(len(running.shards) + 4)
        running.kill()
    reopened = Run(*command, cwd=work, environment=environment)
    until(
        lambda: any(cluster.kill_worker(node, "combine_units") for node in cluster.workers) or reopened.ended,
        seconds=90,
    )
    result = reopened.end()
    assert 0 < result["computed"] < result["units"]
    if verb == "tokenize":  # combining vectors is so fast that the kill may have missed it
        assert any("finished the units was lost" in note for note in reopened.notes)
    brim(name, "many.jsonl", tmp_path / "local" / target, *arguments, "--unit-size", UNIT, "--quiet", cwd=work)
    local = FolderDestination(tmp_path / "local").content()
    created = FolderDestination(tmp_path).content() if shared else existing.content()
    data = [path for path in local if target == path or "/data/" in path]
    assert data
    assert {path: created[path] for path in data} == {path: local[path] for path in data}


def test_nodes_of_unequal_size(cluster: TestCluster, work: Path, tmp_path: Path) -> None:
    """A small node gets work although it has fewer CPUs than the tasks request on a large node.

    The limit allows two tasks per node, and the large node runs two.
    """
    observed = tmp_path / "seen"
    observed.mkdir()
    write_files(work, {"where.py": WHERE.replace("SEEN", str(observed)).encode()})
    with cluster.node(4, {"WHERE": "large"}), cluster.node(1, {"WHERE": "small"}):
        run("map", "rows.jsonl", tmp_path / "out", "--fn", "where.py:fn", "--unit-size", "1KB", "--memory", "650MB",
            *cluster.options, cwd=work)  # fmt: skip
    finished = [path.name.split("-")[0] for path in observed.iterdir()]
    assert finished.count("small") >= 1
    assert finished.count("large") >= 2


def test_build_loses_a_node(
    cluster: TestCluster, machine: Machine, many_files: Callable[..., Path], tmp_path: Path
) -> None:
    """Other nodes upload the shards of a lost node, and each shard has one receipt."""
    source = many_files(20, 300_000)
    machine.hub.faults.add("put", times=None, action="stall", seconds=0.5)
    with cluster.node() as third:
        running = Run("build", source, DEST, "--rows-per-shard", "1", *cluster.options, cwd=tmp_path,
                      environment=machine.environment)  # fmt: skip
        running.until_shards(2)
        until(lambda: cluster.kill_worker(third, "upload_shard"))
        running.until_shards(6)
        cluster.kill(third)
        running.end()
    assert sorted(running.shards) == sorted(set(running.shards)) == sorted(shards(machine.hub))
    assert any("was lost: trying it again" in note for note in running.notes)
    assert shards(machine.hub) == built(source, tmp_path / "local", "--rows-per-shard", "1")


def test_the_driver_is_stopped_and_killed(
    cluster: TestCluster, machine: Machine, many_files: Callable[..., Path], tmp_path: Path
) -> None:
    """After a stop and a kill of the driver, the next run writes only the shards without a receipt.

    Workers do not import pandas, although it is installed.
    """
    source = many_files(16, 50_000)
    machine.hub.faults.add("put", times=None, action="stall", seconds=0.3)
    arguments = ("build", source, DEST, "--rows-per-shard", "1", *cluster.options)
    first = Run(*arguments, cwd=tmp_path, environment=machine.environment)
    first.until_shards(3)
    maps: list[str] = []
    until(lambda: maps.extend(cluster.maps("upload_shard")) or any("/pyarrow/" in item for item in maps))
    assert not any("/pandas/" in entry for entry in maps)
    first.stop()
    assert first.end(6)["error"] == "Stopped"
    stopped = set(Ledger(machine.ledgers[0]).receipts)
    second = Run(*arguments, cwd=tmp_path, environment=machine.environment)
    second.until_shards(2)
    second.kill()
    remaining = set(Ledger(machine.ledgers[0]).receipts)
    machine.hub.faults.clear()
    third = run(*arguments, cwd=tmp_path, environment=machine.environment)
    assert 5 <= len(remaining) < 16
    assert stopped.isdisjoint(second.shards)
    assert remaining.isdisjoint(third.shards)
    assert third.events[-1]["shards"] == 16
    assert shards(machine.hub) == built(source, tmp_path / "local", "--rows-per-shard", "1")


def test_memory(cluster: TestCluster, work: Path, tmp_path: Path) -> None:
    """A unit that exceeds its part of a node is retried alone on a node. If it exceeds that too, the job fails."""
    arguments = (
        "--fn",
        "functions.py:hungry",
        "--batched",
        "--batch-size",
        "50",
        "--unit-size",
        "8KB",
        "--workers",
        "2",
    )
    fits = run("map", "rows.jsonl", tmp_path / "out", *arguments, "--memory", "800MB", *cluster.options, cwd=work)
    assert fits.events[-1]["rows"] == 400
    assert fits.events[-1]["retries"] == 1
    assert any(note.endswith("ran out of memory: trying it alone") for note in fits.notes)
    too_much = run(
        "map", "rows.jsonl", tmp_path / "no", *arguments, "--memory", "400MB", *cluster.options, cwd=work, code=4
    )
    assert "does not fit" in too_much.events[-1]["message"]
    assert "The batch of 50 rows" in too_much.events[-1]["message"]
    none = run("build", work, tmp_path / "none", "--memory", "100MB", *cluster.options, cwd=work, code=4)
    assert "A Ray task needs about" in none.events[-1]["message"]
    assert not (tmp_path / "none").exists()
    sending = ("hf://datasets/ada/none", "--via", "xet", "--memory", "230MB", "--state", tmp_path / "state")
    late = run("map", "rows.jsonl", *sending, "--fn", "functions.py:slow", *cluster.options, cwd=work, code=4)
    assert "A Ray task needs about" in late.events[-1]["message"]
    assert not late.shards  # fails before units are computed


def test_imports_that_break_a_share(cluster: TestCluster, work: Path, tmp_path: Path) -> None:
    """Workers that exceed their memory during simultaneous imports are started again with more memory."""
    write_files(work, {"heavy.py": HEAVY.encode()})
    arguments = (
        "map",
        "rows.jsonl",
        tmp_path / "out",
        "--fn",
        "heavy.py:fn",
        "--unit-size",
        "2KB",
        "--memory",
        "700MB",
    )
    run(*arguments, *cluster.options, cwd=work, code=2)
    (work / "fixed").touch()  # the types are known now, so no worker waits for the first unit
    result = run(*arguments, *cluster.options, cwd=work)
    assert result.events[-1]["rows"] == 400
    assert max(result.nodes.values()) < 700_000_000


def test_memory_monitor(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """A task that Ray's memory monitor kills is retried alone on a node, and then the job fails."""
    with cluster_of(1, memory_usage_threshold=0.001, memory_monitor_refresh_ms=100) as full:
        result = run("build", many_files(2), tmp_path / "out", *full.options, cwd=tmp_path, code=4)
    assert any("trying it with a node to itself" in note for note in result.notes)
    assert "was stopped by Ray because its memory was full, with a node to itself" in result.events[-1]["message"]


def test_nodes_that_cannot_work(
    cluster: TestCluster, machine: Machine, many_files: Callable[..., Path], work: Path, tmp_path: Path
) -> None:
    """A node that cannot reach the destination, or has another version of brim, is named before any work starts."""
    arguments = ("build", many_files(2), DEST, *cluster.options)
    nowhere = "http://127.0.0.1:9"
    with cluster.node(
        environment={"HTTP_PROXY": nowhere, "http_proxy": nowhere, "NO_PROXY": "", "no_proxy": ""}
    ) as node:
        failed = run(*arguments, cwd=tmp_path, environment=machine.environment, code=5).events[-1]["message"]
        assert f"({node.node_id[:6]})" in failed
        assert "connection to the Hub" in failed
        mapping = ("map", "rows.jsonl", DEST, "--fn", "functions.py:slow", "--state", tmp_path / "map")
        computed = run(*mapping, *cluster.options, cwd=work, environment=machine.environment, code=5)
        assert f"({node.node_id[:6]})" in computed.events[-1]["message"]
        assert not computed.shards
    other_files = write_files(tmp_path / "other", {"brim/__init__.py": b'__version__ = "0.0.1"'})
    with cluster.node(environment={"PYTHONPATH": str(other_files)}) as node:
        failed = run(*arguments, cwd=tmp_path, environment=machine.environment, code=2).events[-1]["message"]
        assert f"({node.node_id[:6]})" in failed
        assert "has 0.0.1 as brim" in failed
    assert machine.hub.files("ada/data", "main").keys() <= {".gitattributes"}


def test_a_busy_cluster_that_loses_its_head(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """A run that waits for CPUs prints the reason. If the head is lost, the driver exits with a brim error."""
    with cluster_of(1) as busy:
        hog = subprocess.Popen([sys.executable, "-c", HOG, busy.options[-1]], stdout=subprocess.PIPE, text=True)
        try:
            assert hog.stdout is not None
            assert hog.stdout.readline() == "busy\n"
            waiting = Run("build", many_files(2), tmp_path / "out", *busy.options, cwd=tmp_path, program=("-c", HASTY))
            waiting.until(lambda: any("no task has begun yet: waiting for CPUs" in note for note in waiting.notes))
            busy.kill_head()
            assert "The head of the Ray cluster" in waiting.end(5)["message"]
        finally:
            hog.kill()
            hog.communicate()


def test_a_port_of_something_else(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """An address of another server, such as Ray's dashboard, is refused. Ray itself would retry for minutes."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        arguments = ("--engine", "ray", "--address", f"127.0.0.1:{server.server_port}")
        error_output = brim("build", many_files(1), tmp_path / "out", *arguments, check=2).stderr
        server.shutdown()
    assert "is not the head of a Ray cluster" in error_output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--engine", "ray", "--address", "127.0.0.1:9"), "No Ray cluster answers at 127.0.0.1:9"),
        (("--engine", "ray", "--address", "nowhere"), "--address takes auto or HOST:PORT"),
        (("--address", "auto"), "--address can only be used with --engine ray"),
        (("--engine", "dask"), "--engine takes local or ray"),
    ],
)
def test_wrong_addresses(
    arguments: tuple[str, ...], message: str, many_files: Callable[..., Path], tmp_path: Path
) -> None:
    """Wrong addresses are reported before Ray's own timeout, and nothing is written to the destination."""
    began = time.monotonic()
    assert message in brim("build", many_files(1), tmp_path / "out", *arguments, check=2).stderr
    assert time.monotonic() - began < 60
    assert not (tmp_path / "out").exists()

"""Buckets that fail, stall, corrupt data or disappear; killed runs; concurrent runs."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import brim as library
from brim.errors import StoppedError
from tests import forked
from tests.conftest import brim, random_bytes, write_files
from tests.destinations import BucketDestination, listing, run, start
from tests.s3 import FaultProxy, S3Server

LARGE = ("--shard-size", "30MB")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create files for two shards of four parts each."""
    return write_files(tmp_path_factory.mktemp("large"), {f"{n}.bin": random_bytes(27_000_000, n) for n in range(2)})


@pytest.fixture
def destination(s3: S3Server, s3_proxy: FaultProxy, s3_prefix: str, tmp_path: Path) -> BucketDestination:
    return BucketDestination(s3, tmp_path / "machine", s3_prefix.rstrip("/"), s3_proxy)


def built(destination: BucketDestination, source: Path) -> dict[str, object]:
    result = run(destination, "build", source, destination.address, "--json", *LARGE)
    return dict(json.loads(result.stdout.splitlines()[-1]))


def until_it_sends(destination: BucketDestination, label: str = "data/") -> None:
    """Wait until the run has started an upload of its output; earlier requests do not count."""
    until = time.monotonic() + 60
    while not destination.server.uploads("private", f"{destination.prefix}/{label}"):
        assert time.monotonic() < until, "nothing was sent"
        time.sleep(0.05)


def is_whole(destination: BucketDestination, source: Path) -> None:
    run(destination, "verify", destination.address, source, "--deep", "--quiet")
    assert destination.server.uploads("private", destination.prefix) == []
    remaining = destination.server.objects("private", f"{destination.prefix}/.brim/")
    assert list(remaining) == [f"{destination.prefix}/.brim/default/train.jsonl"]


def test_errors_that_pass(destination: BucketDestination, source: Path) -> None:
    """A build survives 503 for parts and small requests, cut connections and a lost response."""
    proxy = destination.proxy
    assert proxy is not None
    proxy.fail(503, times=2, method="PUT", contains="partNumber=2")
    proxy.fail(503, times=1, method="POST")
    proxy.cut(after_bytes=3_000_000, times=2, method="PUT", contains="partNumber=3")
    proxy.lose(times=1, method="PUT", contains="/.brim/lock")
    proxy.lose(times=1, method="POST", contains="uploadId")
    for started_at in ("list-type", "uploads=", "README.md"):  # responses that are cut off
        proxy.cut(after_bytes=20, times=1, method="GET", contains=started_at)
    assert built(destination, source)["shards"] == 2
    is_whole(destination, source)


def test_pieces_are_handed_on_as_they_came(destination: BucketDestination, source: Path, tmp_path: Path) -> None:
    """A copy from bucket to bucket gives the same shards as a build from a folder.

    The parts do not start at the boundaries of the pieces that are read, and one connection is cut.
    """
    assert destination.proxy is not None
    for path in source.iterdir():
        destination.server.write("private", f"{destination.prefix}/in/{path.name}", path.read_bytes())
    existing = [
        BucketDestination(destination.server, tmp_path / name, f"{destination.prefix}/{name}", destination.proxy)
        for name in ("a", "b")
    ]
    destination.proxy.cut(after_bytes=3_000_000, times=1, method="PUT", contains="partNumber=2")
    run(existing[0], "build", f"{destination.address}/in", existing[0].address, "--quiet", *LARGE)
    run(existing[1], "build", source, existing[1].address, "--quiet", *LARGE)
    assert listing(existing[0]) == listing(existing[1])
    run(existing[0], "verify", existing[0].address, source, "--deep", "--quiet")


def test_garbled_part_is_sent_again(destination: BucketDestination, source: Path) -> None:
    assert destination.proxy is not None
    destination.proxy.corrupt(after_bytes=100_000, times=1, method="PUT", contains="partNumber=2")
    built(destination, source)
    is_whole(destination, source)


def test_killed_run_leaves_nothing_to_pay_for(destination: BucketDestination, source: Path) -> None:
    assert destination.proxy is not None
    destination.proxy.slow(4_000_000, method="PUT", contains="partNumber")
    process = start(destination, "build", source, destination.address, "--quiet", *LARGE)
    until_it_sends(destination)
    process.kill()
    process.wait()
    assert destination.server.uploads("private", destination.prefix)
    assert listing(destination) == {}
    destination.proxy.clear()
    result = run(destination, "build", source, destination.address, *LARGE)
    assert "never finished" in result.stderr
    is_whole(destination, source)


def test_vectors_in_one_file(destination: BucketDestination, tmp_path: Path) -> None:
    """A rerun after a kill leaves no unfinished upload; a run with other options removes the earlier files."""
    model = "import numpy as np\ndef make():\n    return lambda batch: np.ones((len(batch['text']), 300_000), 'f4')\n"
    write_files(tmp_path, {"rows.jsonl": b'{"text": "a"}\n' * 20, "ones.py": model.encode()})
    plain = (
        "embed",
        tmp_path / "rows.jsonl",
        f"{destination.address}/v.npy",
        "--model",
        "ones:make",
        "--column",
        "text",
    )
    command = (*plain, "--keep", "text")
    environment = destination.environment | {
        "PYTHONPATH": f"{tmp_path}:{destination.environment.get('PYTHONPATH', '')}"
    }
    assert destination.proxy is not None
    destination.proxy.slow(2_000_000, method="PUT", contains="partNumber")
    process = forked.start(*command, "--quiet", env=environment)
    until_it_sends(destination, "v.npy")
    process.kill()
    process.wait()
    destination.proxy.clear()
    result = brim(*command, env=environment)
    assert "1 kept" in result.stdout
    assert destination.server.uploads("private", destination.prefix) == []
    assert sorted(destination.content()) == ["v.npy", "v.npy.rows.parquet"]
    brim(*plain, "--fresh", env=environment)
    assert {name: len(data) for name, data in destination.content().items()} == {"v.npy": 24_000_128}


def test_stopped_run_aborts_its_uploads(destination: BucketDestination, source: Path) -> None:
    assert destination.proxy is not None
    destination.proxy.slow(2_000_000, method="PUT", contains="partNumber")
    process = start(destination, "build", source, destination.address, "--quiet", *LARGE)
    until_it_sends(destination)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 6
    assert destination.server.uploads("private", destination.prefix) == []
    assert not any(
        name.endswith("lock") for name in destination.server.objects("private", f"{destination.prefix}/.brim/")
    )


def test_stopped_while_a_source_does_not_answer(destination: BucketDestination, tmp_path: Path) -> None:
    """A stop takes effect while a read waits for the source."""
    assert destination.proxy is not None
    destination.server.write("private", f"{destination.prefix}/a.bin", random_bytes(1_000_000))
    destination.proxy.stall(60.0, after_bytes=1000, times=None, method="GET", contains="a.bin")
    process = start(destination, "build", destination.address, tmp_path / "out", "--quiet")
    until = time.monotonic() + 20
    while not destination.proxy.count("GET", "a.bin"):
        assert time.monotonic() < until, "nothing was asked for"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 6


def test_stopped_while_the_destination_is_silent(destination: BucketDestination, tmp_path: Path) -> None:
    """A stop takes effect while a small shard is uploaded and while it is read back."""
    assert destination.proxy is not None
    files = write_files(tmp_path / "in", {"a.bin": random_bytes(100_000)})
    for method, command in (
        ("PUT", ("build", files, destination.address)),
        ("GET", ("verify", destination.address, "--deep")),
    ):
        destination.proxy.stall(60.0, after_bytes=1000, times=None, method=method, contains="/data/")
        process = start(destination, *command, "--quiet")
        until = time.monotonic() + 20
        while not destination.proxy.count(method, "/data/"):
            assert time.monotonic() < until, "nothing was asked for"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 6
        destination.proxy.clear()
        run(destination, "build", files, destination.address, "--quiet")


@pytest.mark.long
def test_server_killed_and_back(destination: BucketDestination, source: Path) -> None:
    """While the server is down for about a second, the run waits and loses nothing."""
    assert destination.proxy is not None
    destination.proxy.slow(8_000_000, method="PUT", contains="partNumber")
    process = start(destination, "build", source, destination.address, "--quiet", *LARGE)
    until_it_sends(destination)
    destination.server.kill()
    time.sleep(1.0)
    destination.server.restart()
    assert process.wait(60) == 0
    is_whole(destination, source)


@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        (("plan", "s3://private/raw"), "SIGINT"),
        (("build", "s3://private/raw", "out"), "file"),
        (("build", "rows", "s3://private/out"), "file"),
        (("map", "s3://private/raw/a.jsonl", "out", "--fn", "fn.py:same"), "SIGUSR1"),
        (("map", "rows", "s3://private/out", "--fn", "fn.py:same"), "SIGTERM"),
        (("select", "s3://private/raw", "out"), "SIGTERM"),
    ],
)
def test_stopped_while_a_store_is_silent(
    arguments: tuple[str, ...],
    method: str,
    destination: BucketDestination,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stop takes effect immediately although the server accepts connections and never responds.

    This also holds before a job has started.
    """
    write_files(tmp_path, {"rows/a.jsonl": b'{"n": 1}\n', "fn.py": b"def same(row): return row"})
    monkeypatch.chdir(tmp_path)
    extra = ("--stop-file", "halt") if method == "file" else ()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = start(destination, *arguments, *extra, "--endpoint-url", address)
        silent.settimeout(30)
        line, _ = silent.accept()
        with line:
            line.recv(1)
            began = time.monotonic()
            if method == "file":
                (tmp_path / "halt").touch()
            else:
                process.send_signal(getattr(signal, method))
            assert process.wait(20) == 6
            assert time.monotonic() - began < 6  # half a second on an idle machine
    assert not (tmp_path / "halt").exists()


def test_stopped_while_workers_wait_for_a_store(
    destination: BucketDestination, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop by a signal or from another thread ends units that wait for their objects."""
    assert destination.proxy is not None
    destination.server.write("private", f"{destination.prefix}/in/a.jsonl", b'{"text": "a row"}\n' * 60_000)
    write_files(tmp_path, {"fn.py": b"def same(row): return row"})
    rows, function = f"{destination.address}/in/a.jsonl", f"{tmp_path}/fn.py:same"

    def until_it_waits() -> float:
        until, before = time.monotonic() + 30, destination.proxy.count("GET", "a.jsonl")
        while destination.proxy.count("GET", "a.jsonl") < before + 1:
            assert time.monotonic() < until, "nothing was asked for"
            time.sleep(0.05)
        time.sleep(0.5)
        return time.monotonic()

    destination.proxy.stall(60.0, after_bytes=100_000, times=None, method="GET", contains="a.jsonl")
    process = start(destination, "map", rows, tmp_path / "out", "--fn", function, "--quiet")
    began = until_it_waits()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 6
    assert time.monotonic() - began < 6
    for name, value in destination.environment.items():
        monkeypatch.setenv(name, value)
    stop, was_received = library.Stop(), []

    def ask() -> None:
        was_received.append(until_it_waits())
        stop.request("a test")

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(StoppedError, match="a test"):
        library.map(rows, function, destination=tmp_path / "other", stop=stop)
    thread.join()
    assert time.monotonic() - was_received[0] < 6


@pytest.mark.long
def test_server_that_stays_away(destination: BucketDestination, source: Path) -> None:
    destination.server.kill()
    environment = {**destination.environment, "BRIM_STALL_SECONDS": "2"}
    result = brim("build", source, destination.address, *LARGE, check=5, env=environment)
    assert "does not answer" in result.stderr
    assert "continue" in result.stderr
    destination.server.restart()


def test_a_store_that_takes_no_parts(destination: BucketDestination, source: Path, tmp_path: Path) -> None:
    """Without multipart uploads, small shards are uploaded and a large one is refused with the reason."""
    assert destination.proxy is not None
    destination.proxy.fail(405, times=None, method="POST", contains="uploads")
    result = run(destination, "build", source, destination.address, *LARGE, check=2)
    assert "takes no uploads in parts" in result.stderr
    assert "--shard-size 8MB" in result.stderr
    small = write_files(tmp_path / "small", {"a.bin": random_bytes(100_000)})
    run(destination, "build", small, f"{destination.address}/small", "--quiet")


def test_a_computed_job_to_a_store_that_takes_no_parts(destination: BucketDestination, tmp_path: Path) -> None:
    """A computed job first uploads a trial object of two parts.

    Without the trial, results would fail at the first large shard, after hours.
    """
    assert destination.proxy is not None
    rows = write_files(tmp_path / "rows", {"rows.jsonl": b'{"n": 1}\n'})
    mark, steps = tmp_path / "computed", tmp_path / "steps.py"
    steps.write_text(f"def step(row):\n    open({str(mark)!r}, 'w').close()\n    return row\n")
    line = ("map", rows, destination.address, "--fn", f"{steps}:step", "--quiet")
    destination.proxy.fail(405, times=None, method="POST", contains="uploads")
    assert "takes no uploads in parts" in run(destination, *line, check=2).stderr
    assert not mark.exists()
    destination.proxy.clear()
    run(destination, *line)
    assert mark.exists()
    remaining = destination.server.objects("private", f"{destination.prefix}/.brim/")
    assert list(remaining) == [f"{destination.prefix}/.brim/default/train.jsonl"], "nothing of the trial is left"


def test_https(destination: BucketDestination, s3_https: tuple[FaultProxy, Path], source: Path) -> None:
    """Over https payloads are not signed; a private certificate authority is trusted only if it is configured."""
    proxy, authority = s3_https
    environment = {**destination.environment, "AWS_ENDPOINT_URL": proxy.endpoint, "BRIM_STALL_SECONDS": "1"}
    unknown = brim("build", source, destination.address, *LARGE, check=2, env=environment)
    assert "certificate" in unknown.stderr
    assert "AWS_CA_BUNDLE" in unknown.stderr
    environment["AWS_CA_BUNDLE"] = str(authority)
    proxy.slow(4_000_000, method="PUT", contains="partNumber")
    process = forked.start("build", source, destination.address, "--quiet", *LARGE, env=environment)
    until_it_sends(destination)
    process.kill()
    process.wait()
    proxy.clear()
    environment.pop("BRIM_STALL_SECONDS")
    result = brim("build", source, destination.address, *LARGE, env=environment)
    assert "never finished" in result.stderr
    is_whole(destination, source)
    none = brim("verify", destination.address, check=2, env={**environment, "AWS_CA_BUNDLE": str(source / "0.bin")})
    assert "AWS_CA_BUNDLE" in none.stderr


def test_two_runs_at_once(destination: BucketDestination, source: Path, tmp_path: Path) -> None:
    """A second machine detects an active run by the lease object and is refused."""
    assert destination.proxy is not None
    destination.proxy.slow(300_000, method="PUT", contains="partNumber")
    first = start(destination, "build", source, destination.address, "--quiet", *LARGE)
    until_it_sends(destination)
    environment = {**destination.environment, "XDG_STATE_HOME": str(tmp_path / "other")}
    second = brim("build", source, destination.address, *LARGE, check=2, env=environment)
    assert "Another brim is building" in second.stderr
    destination.proxy.clear()
    first.kill()
    first.wait()
    # The same machine continues immediately, although the lease was not released.
    began = time.monotonic()
    built(destination, source)
    assert time.monotonic() - began < 15
    is_whole(destination, source)


@pytest.mark.parametrize(
    ("command", "option", "name"), [("map", "--fn", ""), ("embed", "--model", "/vectors.npy")], ids=["dataset", "file"]
)
def test_a_second_machine_computes_nothing(
    destination: BucketDestination, tmp_path: Path, command: str, option: str, name: str
) -> None:
    """The destination is reserved before the first unit is computed, not only when results are uploaded."""
    rows = write_files(tmp_path / "rows", {"rows.jsonl": b"".join(b'{"n": "%d"}\n' % n for n in range(600))})
    code = """
import time
import numpy as np

def {name}_map(row):
    open({path!r}, "w").close()
    time.sleep(0.2)
    return row

def {name}_embed():
    open({path!r}, "w").close()
    return lambda given: time.sleep(60) or np.ones((len(given["n"]), 2), np.float32)
"""
    steps, marks = tmp_path / "steps.py", [tmp_path / "first", tmp_path / "second"]
    steps.write_text("".join(code.format(name=mark.name, path=str(mark)) for mark in marks))
    column = ["--column", "n"] if command == "embed" else []
    lines = [
        (command, rows, f"{destination.address}{name}", option, f"{steps}:{mark.name}_{command}", *column)
        for mark in marks
    ]
    first = start(destination, *lines[0])
    until = time.monotonic() + 60
    while not marks[0].exists():
        assert time.monotonic() < until, "nothing was computed"
        time.sleep(0.05)
    environment = {**destination.environment, "XDG_STATE_HOME": str(tmp_path / "other")}
    second = brim(*lines[1], check=2, env=environment)
    assert "Another brim is building" in second.stderr
    assert not marks[1].exists()
    assert first.poll() is None, "the first one still computes"
    first.kill()
    first.wait()


def test_source_object_changes(destination: BucketDestination, source: Path, tmp_path: Path) -> None:
    """If a source object changes after the plan, the run fails with an error that names it."""
    for path in sorted(source.iterdir()):
        destination.server.write("private", f"{destination.prefix}/in/{path.name}", path.read_bytes())
    code = (
        "import brim, sys\n"
        "plan = brim.plan(sys.argv[1], sys.argv[2], shard_size='30MB')\n"
        "print('planned', flush=True)\ninput()\n"
        "try:\n    plan.run()\nexcept brim.errors.SourceChangedError as error:\n    sys.exit(error.facts['path'])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, f"{destination.address}/in", str(tmp_path / "out")],
        env=destination.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "planned\n"
    destination.server.write("private", f"{destination.prefix}/in/1.bin", random_bytes(27_000_000, 9))
    _, output = process.communicate("\n", timeout=60)
    assert output.strip() == "1.bin"
    assert [path.name for path in (tmp_path / "out" / "data").glob("*")] in ([], ["train-00000-of-00002.parquet"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "does not accept the credentials"),
        ({"AWS_PROFILE": "nobody"}, "no such profile"),
    ],
)
def test_credentials(
    destination: BucketDestination, source: Path, change: dict[str, str], message: str, tmp_path: Path
) -> None:
    environment = {**destination.environment, "HOME": str(tmp_path), **change}
    result = brim("build", source, destination.address, check=2, env=environment)
    assert message in result.stderr
    for secret in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        assert environment[secret] not in result.stderr


def test_profile(destination: BucketDestination, source: Path, tmp_path: Path) -> None:
    """Key, region and endpoint are read from a profile in ~/.aws without environment variables."""
    report = destination.environment
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        f"[lab]\naws_access_key_id = {report['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {report['AWS_SECRET_ACCESS_KEY']}\n"
    )
    (tmp_path / ".aws" / "config").write_text(
        f"[profile lab]\nregion = {report['AWS_REGION']}\nendpoint_url = {report['AWS_ENDPOINT_URL']}\n"
    )
    environment = {name: value for name, value in report.items() if not name.startswith("AWS_")}
    environment |= {"HOME": str(tmp_path), "AWS_PROFILE": "lab"}
    brim("build", source, destination.address, "--quiet", *LARGE, env=environment)
    is_whole(destination, source)
    ledgers = list((tmp_path / "machine").rglob("ledger.jsonl"))
    assert ledgers
    for path in ledgers:
        assert report["AWS_SECRET_ACCESS_KEY"] not in path.read_text()
        assert report["AWS_ACCESS_KEY_ID"] not in path.read_text()


def test_no_such_bucket(destination: BucketDestination, source: Path) -> None:
    result = run(destination, "build", source, "s3://not-there-at-all/x", check=2)
    assert "does not exist" in result.stderr

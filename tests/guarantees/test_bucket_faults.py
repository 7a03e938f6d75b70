"""A bucket that fails, stalls, garbles or disappears; runs that are killed; two runs at once."""

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
from tests.places import BucketPlace, listing, run, start
from tests.s3 import FaultProxy, S3Server

LARGE = ("--shard-size", "30MB")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of four parts each."""
    return write_files(tmp_path_factory.mktemp("large"), {f"{n}.bin": random_bytes(27_000_000, n) for n in range(2)})


@pytest.fixture
def place(s3: S3Server, s3_proxy: FaultProxy, s3_prefix: str, tmp_path: Path) -> BucketPlace:
    return BucketPlace(s3, tmp_path / "machine", s3_prefix.rstrip("/"), s3_proxy)


def built(place: BucketPlace, source: Path) -> dict[str, object]:
    done = run(place, "build", source, place.address, "--json", *LARGE)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def until_it_sends(place: BucketPlace, what: str = "data/") -> None:
    """Wait until the run has begun an upload of what it makes; what it asks of the store before is none."""
    until = time.monotonic() + 60
    while not place.server.uploads("private", f"{place.prefix}/{what}"):
        assert time.monotonic() < until, "nothing was sent"
        time.sleep(0.05)


def is_whole(place: BucketPlace, source: Path) -> None:
    run(place, "verify", place.address, source, "--deep", "--quiet")
    assert place.server.uploads("private", place.prefix) == []
    left = place.server.objects("private", f"{place.prefix}/.brim/")
    assert list(left) == [f"{place.prefix}/.brim/default/train.jsonl"]


def test_errors_that_pass(place: BucketPlace, source: Path) -> None:
    """503 to parts and to small requests, connections cut in the middle, an answer that is lost."""
    proxy = place.proxy
    assert proxy is not None
    proxy.fail(503, times=2, method="PUT", contains="partNumber=2")
    proxy.fail(503, times=1, method="POST")
    proxy.cut(after_bytes=3_000_000, times=2, method="PUT", contains="partNumber=3")
    proxy.lose(times=1, method="PUT", contains="/.brim/lock")
    proxy.lose(times=1, method="POST", contains="uploadId")
    for begun in ("list-type", "uploads=", "README.md"):  # answers that begin and do not end
        proxy.cut(after_bytes=20, times=1, method="GET", contains=begun)
    assert built(place, source)["shards"] == 2
    is_whole(place, source)


def test_pieces_are_handed_on_as_they_came(place: BucketPlace, source: Path, tmp_path: Path) -> None:
    """From bucket to bucket, in parts that do not begin where pieces do, with a connection that is cut: the shards of a
    folder."""
    assert place.proxy is not None
    for path in source.iterdir():
        place.server.write("private", f"{place.prefix}/in/{path.name}", path.read_bytes())
    there = [BucketPlace(place.server, tmp_path / name, f"{place.prefix}/{name}", place.proxy) for name in ("a", "b")]
    place.proxy.cut(after_bytes=3_000_000, times=1, method="PUT", contains="partNumber=2")
    run(there[0], "build", f"{place.address}/in", there[0].address, "--quiet", *LARGE)
    run(there[1], "build", source, there[1].address, "--quiet", *LARGE)
    assert listing(there[0]) == listing(there[1])
    run(there[0], "verify", there[0].address, source, "--deep", "--quiet")


def test_garbled_part_is_sent_again(place: BucketPlace, source: Path) -> None:
    assert place.proxy is not None
    place.proxy.corrupt(after_bytes=100_000, times=1, method="PUT", contains="partNumber=2")
    built(place, source)
    is_whole(place, source)


def test_killed_run_leaves_nothing_to_pay_for(place: BucketPlace, source: Path) -> None:
    assert place.proxy is not None
    place.proxy.slow(4_000_000, method="PUT", contains="partNumber")
    process = start(place, "build", source, place.address, "--quiet", *LARGE)
    until_it_sends(place)
    process.kill()
    process.wait()
    assert place.server.uploads("private", place.prefix)
    assert listing(place) == {}
    place.proxy.clear()
    done = run(place, "build", source, place.address, *LARGE)
    assert "never finished" in done.stderr
    is_whole(place, source)


def test_vectors_in_one_file(place: BucketPlace, tmp_path: Path) -> None:
    """Killed while it sends them, the same command leaves no upload behind; another, nothing of the former files."""
    model = "import numpy as np\ndef make():\n    return lambda batch: np.ones((len(batch['text']), 300_000), 'f4')\n"
    write_files(tmp_path, {"rows.jsonl": b'{"text": "a"}\n' * 20, "ones.py": model.encode()})
    plain = ("embed", tmp_path / "rows.jsonl", f"{place.address}/v.npy", "--model", "ones:make", "--column", "text")
    command = (*plain, "--keep", "text")
    environment = place.environment | {"PYTHONPATH": f"{tmp_path}:{place.environment.get('PYTHONPATH', '')}"}
    assert place.proxy is not None
    place.proxy.slow(2_000_000, method="PUT", contains="partNumber")
    process = forked.start(*command, "--quiet", env=environment)
    until_it_sends(place, "v.npy")
    process.kill()
    process.wait()
    place.proxy.clear()
    done = brim(*command, env=environment)
    assert "1 kept" in done.stdout
    assert place.server.uploads("private", place.prefix) == []
    assert sorted(place.content()) == ["v.npy", "v.npy.rows.parquet"]
    brim(*plain, "--fresh", env=environment)
    assert {name: len(data) for name, data in place.content().items()} == {"v.npy": 24_000_128}


def test_stopped_run_aborts_its_uploads(place: BucketPlace, source: Path) -> None:
    assert place.proxy is not None
    place.proxy.slow(2_000_000, method="PUT", contains="partNumber")
    process = start(place, "build", source, place.address, "--quiet", *LARGE)
    until_it_sends(place)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 6
    assert place.server.uploads("private", place.prefix) == []
    assert not any(name.endswith("lock") for name in place.server.objects("private", f"{place.prefix}/.brim/"))


def test_stopped_while_a_source_does_not_answer(place: BucketPlace, tmp_path: Path) -> None:
    """A stop is heard while a read waits."""
    assert place.proxy is not None
    place.server.write("private", f"{place.prefix}/a.bin", random_bytes(1_000_000))
    place.proxy.stall(60.0, after_bytes=1000, times=None, method="GET", contains="a.bin")
    process = start(place, "build", place.address, tmp_path / "out", "--quiet")
    until = time.monotonic() + 20
    while not place.proxy.count("GET", "a.bin"):
        assert time.monotonic() < until, "nothing was asked for"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 6


def test_stopped_while_the_destination_is_silent(place: BucketPlace, tmp_path: Path) -> None:
    """While a small shard is sent, and while it is read back."""
    assert place.proxy is not None
    files = write_files(tmp_path / "in", {"a.bin": random_bytes(100_000)})
    for method, command in (
        ("PUT", ("build", files, place.address)),
        ("GET", ("verify", place.address, "--deep")),
    ):
        place.proxy.stall(60.0, after_bytes=1000, times=None, method=method, contains="/data/")
        process = start(place, *command, "--quiet")
        until = time.monotonic() + 20
        while not place.proxy.count(method, "/data/"):
            assert time.monotonic() < until, "nothing was asked for"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 6
        place.proxy.clear()
        run(place, "build", files, place.address, "--quiet")


@pytest.mark.long
def test_server_killed_and_back(place: BucketPlace, source: Path) -> None:
    """For two seconds nobody answers: the run waits, and nothing is lost."""
    assert place.proxy is not None
    place.proxy.slow(8_000_000, method="PUT", contains="partNumber")
    process = start(place, "build", source, place.address, "--quiet", *LARGE)
    until_it_sends(place)
    place.server.kill()
    time.sleep(1.0)
    place.server.restart()
    assert process.wait(60) == 0
    is_whole(place, source)


@pytest.mark.parametrize(
    ("words", "way"),
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
    words: tuple[str, ...], way: str, place: BucketPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that takes connections and says nothing is waited for, but not against the user's will: whoever asks is
    heard at once, also before a job has begun."""
    write_files(tmp_path, {"rows/a.jsonl": b'{"n": 1}\n', "fn.py": b"def same(row): return row"})
    monkeypatch.chdir(tmp_path)
    more = ("--stop-file", "halt") if way == "file" else ()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = start(place, *words, *more, "--endpoint-url", address)
        silent.settimeout(30)
        line, _ = silent.accept()
        with line:
            line.recv(1)
            began = time.monotonic()
            if way == "file":
                (tmp_path / "halt").touch()
            else:
                process.send_signal(getattr(signal, way))
            assert process.wait(20) == 6
            assert time.monotonic() - began < 6  # half a second on a machine that has nothing else to do
    assert not (tmp_path / "halt").exists()


def test_stopped_while_workers_wait_for_a_store(
    place: BucketPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units whose objects do not come are given up when somebody asks, by a signal or from another thread."""
    assert place.proxy is not None
    place.server.write("private", f"{place.prefix}/in/a.jsonl", b'{"text": "a row"}\n' * 60_000)
    write_files(tmp_path, {"fn.py": b"def same(row): return row"})
    rows, function = f"{place.address}/in/a.jsonl", f"{tmp_path}/fn.py:same"

    def until_it_waits() -> float:
        until, before = time.monotonic() + 30, place.proxy.count("GET", "a.jsonl")
        while place.proxy.count("GET", "a.jsonl") < before + 1:
            assert time.monotonic() < until, "nothing was asked for"
            time.sleep(0.05)
        time.sleep(0.5)
        return time.monotonic()

    place.proxy.stall(60.0, after_bytes=100_000, times=None, method="GET", contains="a.jsonl")
    process = start(place, "map", rows, tmp_path / "out", "--fn", function, "--quiet")
    began = until_it_waits()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 6
    assert time.monotonic() - began < 6
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    stop, heard = library.Stop(), []

    def ask() -> None:
        heard.append(until_it_waits())
        stop.request("a test")

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(StoppedError, match="a test"):
        library.map(rows, function, destination=tmp_path / "other", stop=stop)
    thread.join()
    assert time.monotonic() - heard[0] < 6


def test_server_that_stays_away(place: BucketPlace, source: Path) -> None:
    place.server.kill()
    environment = {**place.environment, "BRIM_STALL_SECONDS": "2"}
    done = brim("build", source, place.address, *LARGE, check=5, env=environment)
    assert "does not answer" in done.stderr
    assert "continue" in done.stderr
    place.server.restart()


def test_a_store_that_takes_no_parts(place: BucketPlace, source: Path, tmp_path: Path) -> None:
    """Small shards are uploaded, and a large one is refused with the reason."""
    assert place.proxy is not None
    place.proxy.fail(405, times=None, method="POST", contains="uploads")
    done = run(place, "build", source, place.address, *LARGE, check=2)
    assert "takes no uploads in parts" in done.stderr
    assert "--shard-size 8MB" in done.stderr
    small = write_files(tmp_path / "small", {"a.bin": random_bytes(100_000)})
    run(place, "build", small, f"{place.address}/small", "--quiet")


def test_https(place: BucketPlace, s3_https: tuple[FaultProxy, Path], source: Path) -> None:
    """Over https payloads are not signed and all is the same; an authority of one's own is trusted if it is named."""
    proxy, authority = s3_https
    environment = {**place.environment, "AWS_ENDPOINT_URL": proxy.endpoint, "BRIM_STALL_SECONDS": "1"}
    unknown = brim("build", source, place.address, *LARGE, check=2, env=environment)
    assert "certificate" in unknown.stderr
    assert "AWS_CA_BUNDLE" in unknown.stderr
    environment["AWS_CA_BUNDLE"] = str(authority)
    proxy.slow(4_000_000, method="PUT", contains="partNumber")
    process = forked.start("build", source, place.address, "--quiet", *LARGE, env=environment)
    until_it_sends(place)
    process.kill()
    process.wait()
    proxy.clear()
    environment.pop("BRIM_STALL_SECONDS")
    done = brim("build", source, place.address, *LARGE, env=environment)
    assert "never finished" in done.stderr
    is_whole(place, source)
    none = brim("verify", place.address, check=2, env={**environment, "AWS_CA_BUNDLE": str(source / "0.bin")})
    assert "AWS_CA_BUNDLE" in none.stderr


def test_two_runs_at_once(place: BucketPlace, source: Path, tmp_path: Path) -> None:
    """Another machine sees that somebody is at it, by an object that changes."""
    assert place.proxy is not None
    place.proxy.slow(300_000, method="PUT", contains="partNumber")
    first = start(place, "build", source, place.address, "--quiet", *LARGE)
    until_it_sends(place)
    environment = {**place.environment, "XDG_STATE_HOME": str(tmp_path / "other")}
    second = brim("build", source, place.address, *LARGE, check=2, env=environment)
    assert "Another brim is building" in second.stderr
    place.proxy.clear()
    first.kill()
    first.wait()
    # The same machine continues at once, although nobody gave the place back.
    began = time.monotonic()
    built(place, source)
    assert time.monotonic() - began < 15
    is_whole(place, source)


@pytest.mark.parametrize(
    ("command", "option", "name"), [("map", "--fn", ""), ("embed", "--model", "/vectors.npy")], ids=["dataset", "file"]
)
def test_a_second_machine_computes_nothing(
    place: BucketPlace, tmp_path: Path, command: str, option: str, name: str
) -> None:
    """The destination is reserved before the first unit is computed, not when results are sent after hours."""
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
        (command, rows, f"{place.address}{name}", option, f"{steps}:{mark.name}_{command}", *column) for mark in marks
    ]
    first = start(place, *lines[0])
    until = time.monotonic() + 60
    while not marks[0].exists():
        assert time.monotonic() < until, "nothing was computed"
        time.sleep(0.05)
    environment = {**place.environment, "XDG_STATE_HOME": str(tmp_path / "other")}
    second = brim(*lines[1], check=2, env=environment)
    assert "Another brim is building" in second.stderr
    assert not marks[1].exists()
    assert first.poll() is None, "the first one still computes"
    first.kill()
    first.wait()


def test_source_object_changes(place: BucketPlace, source: Path, tmp_path: Path) -> None:
    """A bucket as the source: what was planned is not what is there."""
    for path in sorted(source.iterdir()):
        place.server.write("private", f"{place.prefix}/in/{path.name}", path.read_bytes())
    code = (
        "import brim, sys\n"
        "plan = brim.plan(sys.argv[1], sys.argv[2], shard_size='30MB')\n"
        "print('planned', flush=True)\ninput()\n"
        "try:\n    plan.run()\nexcept brim.errors.SourceChangedError as error:\n    sys.exit(error.facts['path'])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, f"{place.address}/in", str(tmp_path / "out")],
        env=place.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "planned\n"
    place.server.write("private", f"{place.prefix}/in/1.bin", random_bytes(27_000_000, 9))
    _, said = process.communicate("\n", timeout=60)
    assert said.strip() == "1.bin"
    assert [path.name for path in (tmp_path / "out" / "data").glob("*")] in ([], ["train-00000-of-00002.parquet"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "does not accept the credentials"),
        ({"AWS_PROFILE": "nobody"}, "no such profile"),
    ],
)
def test_credentials(place: BucketPlace, source: Path, change: dict[str, str], said: str, tmp_path: Path) -> None:
    environment = {**place.environment, "HOME": str(tmp_path), **change}
    done = brim("build", source, place.address, check=2, env=environment)
    assert said in done.stderr
    for secret in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        assert environment[secret] not in done.stderr


def test_profile(place: BucketPlace, source: Path, tmp_path: Path) -> None:
    """Keys, region and endpoint of a profile in ~/.aws, and nothing in the environment."""
    told = place.environment
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        f"[lab]\naws_access_key_id = {told['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {told['AWS_SECRET_ACCESS_KEY']}\n"
    )
    (tmp_path / ".aws" / "config").write_text(
        f"[profile lab]\nregion = {told['AWS_REGION']}\nendpoint_url = {told['AWS_ENDPOINT_URL']}\n"
    )
    environment = {name: value for name, value in told.items() if not name.startswith("AWS_")}
    environment |= {"HOME": str(tmp_path), "AWS_PROFILE": "lab"}
    brim("build", source, place.address, "--quiet", *LARGE, env=environment)
    is_whole(place, source)
    ledgers = list((tmp_path / "machine").rglob("ledger.jsonl"))
    assert ledgers
    for path in ledgers:
        assert told["AWS_SECRET_ACCESS_KEY"] not in path.read_text()
        assert told["AWS_ACCESS_KEY_ID"] not in path.read_text()


def test_no_such_bucket(place: BucketPlace, source: Path) -> None:
    done = run(place, "build", source, "s3://not-there-at-all/x", check=2)
    assert "does not exist" in done.stderr

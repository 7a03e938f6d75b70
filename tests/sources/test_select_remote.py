"""Selecting rows of remote datasets: requests, manifests, tokens, and changes during the read."""

from __future__ import annotations

import functools
import http.server
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import brim as library
from brim.errors import SourceChangedError
from brim.memory.meter import tree_bytes
from brim.sources import value_locator as far_values
from brim.state.record_log import record_line, records_of
from brim.storage.http_files import HttpStorage
from brim.storage.location import Location
from brim.storage.storage import ByteRange
from brim.storage.storage_error import StorageError
from tests.forked import brim
from tests.hub import TestHub
from tests.publishing import DEST, REPO, Machine
from tests.s3 import FaultProxy, S3Server
from tests.s3.server import PRIVATE
from tests.sources.test_parquet_source import rows_of
from tests.sources.test_select import FILE, people, read, shards
from tests.sources.test_select_writers import by_pyarrow, random_table

MANIFEST = ".brim/default/train.jsonl"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[TestHub]:
    with TestHub(tmp_path / "hub", regular_bytes=1000) as running:
        yield running


def everything(rows: int = 120) -> pa.Table:
    """Return a table with null rows, files without content, empty files, lists, plain bytes and nested ones."""
    rng = random.Random(rows)

    def file(n: int, size: int) -> dict[str, Any] | None:
        return None if n % 17 == 5 else {"bytes": None if n % 19 == 3 else rng.randbytes(size), "path": f"{n}.png"}

    def deep(n: int) -> dict[str, Any] | None:
        return None if n % 11 == 4 else {"site": "xyz"[n % 3], "image": file(n, 500), "raws": [[b"a" * n], [], None]}

    lists = [None if n % 13 == 2 else [file(n + k, 40 * k) for k in range(n % 4)] for n in range(rows)]
    return pa.table(
        {
            "n": range(rows),
            "kind": pa.array(["a", "b", "c"] * (rows // 3)).dictionary_encode(),
            "scan": pa.array([file(n, 20_000) for n in range(rows)], FILE),
            "more": pa.array(lists, pa.list_(FILE)),
            "raw": pa.array([None if n % 5 == 0 else rng.randbytes(n) for n in range(rows)]),
            "deep": pa.array([deep(n) for n in range(rows)]),
        }
    )


def test_a_manifest_lists_the_rows(hub: TestHub, tmp_path: Path) -> None:
    """The manifest of brim locates the selected rows, so shards without them are not requested."""
    table = everything()
    pq.write_table(table, tmp_path / "in.parquet")
    machine = Machine(hub, tmp_path)
    brim("select", tmp_path / "in.parquet", DEST, "--shard-size", "300KB", env=machine.environment)
    names = [name for name in hub.files(REPO) if name.endswith(".parquet")]
    assert len(names) > 5
    hub.log.clear()
    brim("select", DEST, tmp_path / "out", "--where", "n >= 60 and n < 63", env=machine.environment)
    assert read(tmp_path / "out").to_pylist() == table.slice(60, 3).to_pylist()
    requested = {name for name in names if any(line.endswith(name) for line in hub.log)}
    assert len(requested) <= 3  # the first shard, for its columns, and those with the rows
    hub.log.clear()
    brim("select", DEST, tmp_path / "site", "--where", "deep.site == 'x' and n > 100", env=machine.environment)
    selection = [row for row in table.to_pylist() if row["deep"] and row["deep"]["site"] == "x" and row["n"] > 100]
    assert read(tmp_path / "site").to_pylist() == selection
    assert len({name for name in names if any(line.endswith(name) for line in hub.log)}) < len(names)
    brim("select", DEST, tmp_path / "all", "--shuffle", "3", "--num-shards", "1", env=machine.environment)
    assert read(tmp_path / "all").sort_by("n").to_pylist() == table.to_pylist()
    brim("verify", DEST, "--deep", env=machine.environment)


@pytest.mark.parametrize("damage", ["other rows", "no listing", "not base64", "a bomb", "another shard"])
def test_a_manifest_that_does_not_fit_is_left_alone(
    s3: S3Server, s3_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """With a damaged manifest, the rows still equal those of the shards, or an error is raised."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    destination, table = f"s3://{PRIVATE}/{s3_prefix.rstrip('/')}", people(30, 3000)
    brim("select", shards(tmp_path / "in", table, 1), destination, "--rows-per-shard", "10")
    key = f"{s3_prefix.rstrip('/')}/{MANIFEST}"
    records = list(records_of(s3.read(PRIVATE, key).splitlines(keepends=True)))
    listings = [record for record in records if record["type"] == "listing"]
    assert len(listings) == 3
    if damage == "other rows":
        listings[0]["rows"] = listings[1]["rows"][: len(listings[1]["rows"]) // 2]
    elif damage == "no listing":
        records.remove(listings[0])
    elif damage == "not base64":
        listings[1]["rows"] = "***"
    elif damage == "a bomb":
        import base64
        import zlib

        listings[1]["rows"] = base64.b64encode(zlib.compress(bytes(200_000_000), 9)).decode()
    else:
        next(record for record in records if record["type"] == "shard")["etag"] = '"another"'
    s3.write(PRIVATE, key, b"".join(map(record_line, records)))
    actual = library.dataset(destination).where("age > 40")
    expected = [row for row in table.to_pylist() if row["age"] is not None and row["age"] > 40]
    assert actual.small(["subject", "age"]).to_pylist() == [
        {"subject": row["subject"], "age": row["age"]} for row in expected
    ]


def test_changed_in_a_bucket(s3: S3Server, s3_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is replaced after planning raises SourceChangedError, and nothing is published."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    destination = f"s3://{PRIVATE}/{s3_prefix.rstrip('/')}"
    brim("select", shards(tmp_path / "in", people(30, 3000), 1), destination, "--rows-per-shard", "10")
    plan = library.plan(library.dataset(destination).where("age > 40"), tmp_path / "out")
    for key in s3.objects(PRIVATE, s3_prefix):
        if key.endswith(".parquet"):
            s3.write(PRIVATE, key, s3.read(PRIVATE, key)[::-1])
    with pytest.raises(SourceChangedError):
        plan.run()
    assert not list((tmp_path / "out").glob("data/train*"))


def test_changed_on_the_hub(hub: TestHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit during the read has no effect: an opened repository is read at its own revision to the end."""
    machine = Machine(hub, tmp_path)
    first, second = people(30, 3000), people(60, 3000)
    brim("select", shards(tmp_path / "one", first, 1), DEST, env=machine.environment)
    repeated = [sys.executable, "-m", "brim", "select", str(tmp_path / "two"), DEST, "--fresh"]
    code = f"""
import brim, subprocess
rows = brim.dataset({DEST!r}).where('age > 21')
subprocess.run({repeated!r}, check=True)
brim.plan(rows, {str(tmp_path / "out")!r}).run()
"""
    shards(tmp_path / "two", second, 1)
    subprocess.run([sys.executable, "-c", code], env=machine.environment, check=True, capture_output=True)
    expected = [row for row in first.to_pylist() if row["age"] is not None and row["age"] > 21]
    assert read(tmp_path / "out").to_pylist() == expected


class _Sends(http.server.BaseHTTPRequestHandler):
    """Redirect every request to another server."""

    to = ""

    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("Location", f"{self.to}{self.path}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        return None


class _Listens(http.server.SimpleHTTPRequestHandler):
    """Log the headers of each request, and serve ranges."""

    told: list[str] = []  # noqa: RUF012 - shared by all requests of a test

    def do_GET(self) -> None:
        data = Path(self.translate_path(self.path)).read_bytes()
        self.told.append(json.dumps(dict(self.headers.items())))
        first, _, last = (self.headers.get("Range") or f"bytes=0-{len(data) - 1}").removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("ETag", f'"{len(data)}"')
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        return None


def test_no_token_follows_a_redirect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A redirect from the Hub to another host does not forward the token."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the module may be loaded already
    pq.write_table(people(6), tmp_path / "a.parquet")
    listens = functools.partial(_Listens, directory=str(tmp_path))
    _Listens.told.clear()
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), listens) as remote,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Sends) as local,
    ):
        _Sends.to = f"http://127.0.0.1:{remote.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{local.server_port}")
        for server in (remote, local):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        actual = library.dataset(f"http://127.0.0.1:{local.server_port}/a.parquet").where("age > 21")
        assert actual.table().rows.num_rows == 4
        remote.shutdown()
        local.shutdown()
    assert _Listens.told
    assert not any("hf_secret" in line or "uthorization" in line for line in _Listens.told)


class _WholeFiles(http.server.SimpleHTTPRequestHandler):
    """Answer requests for ranges with the whole file, as `python -m http.server` does."""

    gets: list[str] = []  # noqa: RUF012 - shared by all requests of a test

    def do_GET(self) -> None:
        self.gets.append(self.path)
        super().do_GET()

    def log_message(self, *_: object) -> None:
        return None


@pytest.fixture
def whole_files(tmp_path: Path) -> Iterator[str]:
    """Return the address of a server of whole files for the folder `served`."""
    (tmp_path / "served").mkdir()
    _WholeFiles.gets.clear()
    handler = functools.partial(_WholeFiles, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def peak_of(*arguments: str | os.PathLike[str]) -> int:
    """Run a brim command successfully and return its peak memory without file cache, in bytes.

    The memory is measured 100 times per second from outside.
    """
    online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    args = [sys.executable, "-m", "brim", *map(os.fspath, arguments)]
    with subprocess.Popen(args, env=online, stdout=subprocess.DEVNULL) as run:
        peak = 0
        while run.poll() is None:
            peak = max(peak, tree_bytes(run.pid))
            time.sleep(0.01)
    assert run.returncode == 0
    return peak


@pytest.mark.parametrize("options", [["--where", "id < 5"], []], ids=["some", "all"])
def test_select_from_a_server_without_ranges_keeps_the_limit(
    tmp_path: Path, whole_files: str, options: list[str]
) -> None:
    """If a server ignores ranges and sends whole files, a file is kept on disk and downloaded only a few times."""
    values = np.random.default_rng(0).bytes(120_000_000)
    table = pa.table({"id": range(1200), "x": [values[n * 100_000 : (n + 1) * 100_000] for n in range(1200)]})
    pq.write_table(table, tmp_path / "served" / "a.parquet", row_group_size=100, compression="none")
    peak = peak_of("select", f"{whole_files}/a.parquet", tmp_path / "out", *options, "--memory", "200MB", "--quiet")
    assert peak < 200_000_000
    assert len(_WholeFiles.gets) < 8  # some requests began before the first answer
    assert read(tmp_path / "out")["id"].to_pylist() == list(range(5 if options else 1200))


def test_ranges_of_a_server_without_ranges_are_of_one_version(
    tmp_path: Path, whole_files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local copy of a file serves the listed version. A new version is detected and downloaded again."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the module may be loaded already
    path, address = tmp_path / "served" / "a.bin", Location("http", whole_files.removeprefix("http://"), "")
    path.write_bytes(bytes(range(200)))
    storage = HttpStorage(address)

    def version() -> str:
        (info,) = storage.stat(["a.bin"])
        return info.etag if info is not None else ""

    def read(start: int, stop: int, etag: str) -> Any:
        return storage.fetch([ByteRange("a.bin", start, stop, etag)]).result()[0]

    first = version()
    assert read(50, 60, first) == bytes(range(50, 60))
    path.write_bytes(bytes(200))
    os.utime(path, (1, 1))
    assert read(190, 200, first) == bytes(range(190, 200))
    assert len(_WholeFiles.gets) == 1
    second = version()
    assert read(50, 60, second) == bytes(10)
    changed = read(50, 60, first)
    assert isinstance(changed, StorageError)
    assert changed.kind == "changed"


def test_several_shards_at_once(s3: S3Server, s3_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Footers, small columns and pages of several foreign shards are requested concurrently."""
    table = people(120, 2000)
    folder = shards(tmp_path / "in", table, 12, write_page_index=True)
    for file in folder.iterdir():
        s3.write(PRIVATE, f"{s3_prefix}{file.name}", file.read_bytes())
    with FaultProxy(s3.endpoint) as proxy:
        proxy.delay_s = 0.05
        for name, value in s3.environment_at(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        brim("select", f"s3://{PRIVATE}/{s3_prefix.rstrip('/')}", tmp_path / "out", "--where", "age > 50", "--quiet")
        assert proxy.most_at_once >= 6
    expected = [row for row in table.to_pylist() if row["age"] is not None and row["age"] > 50]
    assert read(tmp_path / "out").to_pylist() == expected


def test_statistics_leave_row_groups_out(
    s3: S3Server, s3_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row groups of a foreign shard whose statistics exclude all selected rows are not requested."""
    table = people(600, 2000)
    shards(tmp_path / "in", table, 1, row_group_size=100, write_page_index=True)
    s3.write(PRIVATE, f"{s3_prefix}a.parquet", next((tmp_path / "in").iterdir()).read_bytes())
    with FaultProxy(s3.endpoint) as proxy:
        for name, value in s3.environment_at(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        rows = library.dataset(f"s3://{PRIVATE}/{s3_prefix.rstrip('/')}")

        def asked() -> int:
            return sum(request.path.endswith(".parquet") and request.method == "GET" for request in proxy.requests)

        assert len(rows.where("age > 1000 or subject == 'x'")) == 0
        assert asked() <= 3  # the footer, and the names of the first files next to their bytes
        first = rows.where("subject in ['s150']")
        assert len(first) == 3
        assert first.small(["sex"])["sex"].to_pylist() == ["F", "M", None]
        assert asked() <= 5
        first.where("age is not None").sort("-age").table()
        assert asked() <= 7
        brim("select", f"s3://{PRIVATE}/{s3_prefix.rstrip('/')}", tmp_path / "out", "--where", "subject == 's150'")
    assert read(tmp_path / "out").to_pylist() == table.slice(450, 3).to_pylist()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 60), data=st.data())
def test_lengths_are_followed(
    s3: S3Server, s3_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, rows: int, data: Any
) -> None:
    """Remote values equal those of pyarrow, whether they are fetched together or with separate requests.

    The simulated cost of a request is low, so that even small values are fetched separately.
    """
    monkeypatch.setattr(far_values, "REQUEST_BYTES", data.draw(st.sampled_from([1, 100, 3000])))
    monkeypatch.setattr(far_values, "_SLACK", data.draw(st.sampled_from([0.5, 1.02])))  # estimated sizes may be wrong
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    rng = random.Random(seed)
    kind = pa.struct([("a", pa.binary()), ("b", pa.list_(pa.binary()))])
    table = random_table(rng, rows).drop_columns(["image"])
    deep = [{"a": rng.randbytes(900), "b": [rng.randbytes(200)] * rng.randrange(3)} for _ in range(rows)]
    table = table.append_column("deep", pa.array(deep, kind))
    by_pyarrow(table, tmp_path / "a.parquet", rng)
    s3.write(PRIVATE, f"{s3_prefix}{seed}.parquet", (tmp_path / "a.parquet").read_bytes())
    actual = library.dataset(f"s3://{PRIVATE}/{s3_prefix}{seed}.parquet")
    some = sorted(rng.sample(range(rows), rng.randrange(1, rows + 1)))
    rng.shuffle(some)
    assert rows_of(actual.take(some).table()) == [table.to_pylist()[n] for n in some]


@pytest.mark.parametrize(
    ("index", "page_bytes"), [(False, 1 << 30), (True, 1 << 30), (True, 1 << 20), (False, 1 << 20)]
)
def test_one_subject_costs_its_bytes(
    s3: S3Server, s3_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: bool, page_bytes: int
) -> None:
    """Unpacking some values of a foreign shard downloads little more than their bytes, for any page size.

    There is neither a manifest nor, in one variant, a page index.
    """
    rng = random.Random(1)
    values = [{"bytes": rng.randbytes(300_000 + n), "path": f"{n}.bin"} for n in range(40)]
    table = pa.table({"n": range(40), "scan": pa.array(values, FILE)})
    options = {"compression": "none", "use_dictionary": False, "write_batch_size": 1, "data_page_size": page_bytes}
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20, write_page_index=index, **options)
    s3.write(PRIVATE, f"{s3_prefix}a.parquet", (tmp_path / "a.parquet").read_bytes())
    with FaultProxy(s3.endpoint) as proxy:
        for name, value in s3.environment_at(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        result = library.unpack(
            f"s3://{PRIVATE}/{s3_prefix}a.parquet", tmp_path / "files", where="n in [12, 13, 14, 35]"
        )
        size = sum(request.received_bytes for request in proxy.requests)
    assert result.files == 4
    assert size < 1.1 * 4 * 300_000 + 2 * 66_000  # the footer, and small columns next to the values
    for n in (12, 13, 14, 35):
        assert (tmp_path / "files" / f"{n}.bin").read_bytes() == values[n]["bytes"]

"""A bucket is a source like a folder: the same tables, the same shards and the same errors."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import brim as library
from brim.errors import (
    DestinationUnavailableError,
    InputError,
    InvalidFilesError,
    MissingDependencyError,
    SourceChangedError,
    SourceError,
)
from brim.options.groups import ShardOptions
from brim.plans.plan import make_plan
from brim.sources.file_table import FileTable
from brim.sources.open_source import read_source
from brim.sources.source_options import SourceOptions
from brim.storage.location import Access, parse_location
from brim.storage.reading import RANGE_BYTES, RangeStream, RemoteFile
from brim.storage.storage import ByteRange
from tests.conftest import brim, random_bytes, tree_digest, write_files
from tests.generators import bids
from tests.hub import TestHub
from tests.publishing import DEST, Machine
from tests.s3 import FaultProxy, S3Server

PRIVATE, PUBLIC = "private", "public"
ODD = ["a b.png", "ü/é.png", "c+d.png", "e%20f.png", "g#h.png", "i?j.png", "k&l=m.png", "a/1.png", "a-b/1.png", "~.png"]
RECIPE = """
name = "scans"
rows = "p-*"
key = ["person"]
[[columns]]
name = "scan"
pattern = "{person}/scan.nii.gz"
type = "nifti"
[[columns]]
name = "note"
pattern = "{person}/*.txt"
type = "text"
[[tables]]
pattern = "people.csv"
key = {person = "id"}
[tables.columns]
"age" = {name = "age", type = "int64"}
"""


@dataclass(frozen=True)
class Kind:
    """A kind of source: its files, the options for reading it, and one file that becomes part of a shard."""

    files: Mapping[str, bytes]
    sample: str
    options: SourceOptions = field(default_factory=SourceOptions)
    table: str = ""  # name of a table file to use as the source instead of the folder


def _kinds() -> dict[str, Kind]:
    photos = {f"{'train' if i % 3 else 'test'}/c{i % 2}/{i}.png": random_bytes(900 + i, i) for i in range(9)}
    hidden = {".DS_Store": b"x", "__MACOSX/1.png": b"x", "old/.brim/ledger": b"x", "old/data/x.png": b"x"}
    names = "file_name,label\n" + "".join(f"{i}.png,{i % 2}\n" for i in range(5))
    people = {f"p-{i}/scan.nii.gz": bids.nifti(i) for i in range(1, 12)}
    people |= {f"p-{i}/note.txt": f"No. {i}\r\n".encode() for i in range(1, 12, 2)}
    rows = "image,age\n" + "".join(f"./img/{i}.png,00{i}\n" for i in range(5))
    images = {f"{i}.png": random_bytes(700, i) for i in range(5)}
    return {
        "plain": Kind(photos | hidden, "test/c0/0.png", SourceOptions(label_from="parent")),
        "odd": Kind({name: random_bytes(50, i) for i, name in enumerate(ODD)}, "e%20f.png"),
        "metadata": Kind(images | {"metadata.csv": names.encode()}, "3.png"),
        "bids": Kind(bids.sessions(), "sub-01/ses-a/anat/sub-01_ses-a_T1w.nii.gz"),
        "eeg": Kind(bids.eeg(), "sub-1/eeg/sub-1_task-x_eeg.vhdr"),
        "recipe": Kind(
            people | {"people.csv": b"id,age\np-1,7\np-10,9\n"}, "p-10/scan.nii.gz", SourceOptions(recipe_text=RECIPE)
        ),
        "table": Kind(
            {f"img/{name}": data for name, data in images.items()} | {"t.csv": rows.encode()},
            "img/2.png",
            table="t.csv",
        ),
    }


KINDS = _kinds()


@dataclass
class Bucket:
    """A separate prefix in a bucket."""

    server: S3Server
    prefix: str
    name: str = PRIVATE

    @property
    def address(self) -> str:
        return f"s3://{self.name}/{self.prefix.rstrip('/')}"

    def put(self, files: Mapping[str, bytes]) -> str:
        for path, content in files.items():
            self.server.write(self.name, self.prefix + path, content)
        return self.address


class Disk:
    """A folder with the same interface as `Bucket`."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder)

    def put(self, files: Mapping[str, bytes]) -> str:
        write_files(Path(self.address), files)
        return self.address


@pytest.fixture
def bucket(s3: S3Server, s3_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return Bucket(s3, s3_prefix)


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Disk | Bucket:
    return Disk(tmp_path / "elsewhere") if request.param == "folder" else request.getfixturevalue("bucket")


def same_table(mine: FileTable, theirs: FileTable) -> None:
    assert mine.rows.equals(theirs.rows)
    assert mine.files.paths.equals(theirs.files.paths)
    assert mine.files.sizes.tolist() == theirs.files.sizes.tolist()
    for name in ("columns", "features", "splits", "refused", "warnings", "recipe", "about", "saved"):
        assert getattr(mine, name) == getattr(theirs, name), name
    plans = [make_plan(table, "parquet", ShardOptions()) for table in (mine, theirs)]
    assert plans[0].fingerprint == plans[1].fingerprint


def build(table: Any, out: Path, **options: Any) -> dict[str, str]:
    """Build the table and return the bytes of the shards and the card."""
    library.build(table, out, allow_empty=True, **options)
    return {name: digest for name, digest in tree_digest(out).items() if not name.startswith(".brim")}


@pytest.mark.parametrize("kind", KINDS)
class TestSources:
    """Guarantees of all sources, independent of the location of their files."""

    def test_table_and_shards(self, kind: str, store: Disk | Bucket, tmp_path: Path) -> None:
        """Copies of the same files give the same table and shards, and a job can continue with another copy."""
        about = KINDS[kind]
        home = write_files(tmp_path / "home", about.files)
        address = store.put(about.files)
        theirs = read_source(home / about.table, about.options)
        mine = read_source(f"{address}/{about.table}".rstrip("/"), about.options)
        same_table(mine, theirs)
        assert about.sample in mine.files.paths.to_pylist()
        assert build(mine, tmp_path / "mine", rows_per_shard=2) == build(theirs, tmp_path / "theirs", rows_per_shard=2)
        repeated = library.build(mine, tmp_path / "theirs", allow_empty=True, rows_per_shard=2)
        assert repeated.written == 0

    def test_changed(self, kind: str, store: Disk | Bucket, tmp_path: Path) -> None:
        """A file that differs from the plan is an error with its name, and is not part of any shard."""
        about = KINDS[kind]
        address = store.put(about.files)
        table = read_source(f"{address}/{about.table}".rstrip("/"), about.options)
        plan = library.plan(table, tmp_path / "out", allow_empty=True)
        before, after = about.files[about.sample], about.files[about.sample][::-1]
        store.put({about.sample: after})
        with pytest.raises(SourceChangedError) as caught:
            plan.run()
        assert caught.value.facts["path"] == about.sample
        shards = [path.read_bytes() for path in (tmp_path / "out").rglob("*.parquet")]
        assert not any(before in shard or after in shard for shard in shards)


def test_missing_and_pointers(store: Disk | Bucket) -> None:
    """Missing files, empty files, pointers, folders and URLs are refused before the build, with the reason."""
    lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    files = {"a.png": b"x" * 2000, "lfs.png": lfs, "none.png": b"", "folder/b.png": b"x" * 2000}
    table = b"image\na.png\nlfs.png\nnone.png\ngone.png\nfolder\nhttp://x/y.png\n"
    address = store.put(files | {"t.csv": table})
    with pytest.raises(InvalidFilesError) as caught:
        library.plan(library.table(f"{address}/t.csv", files="image")).check()
    refused = {problem["path"]: problem["reason"] for problem in caught.value.facts["problems"]}
    assert refused == {
        "lfs.png": "lfs", "none.png": "empty", "gone.png": "missing", "folder": "folder", "http://x/y.png": "url",
    }  # fmt: skip


def test_check(store: Disk | Bucket) -> None:
    """`brim check` reads headers of objects by range, and gzip streams to their last byte."""
    whole = gzip.compress(gzip.decompress(bids.nifti(3)) + random_bytes(5000))
    png = bytes.fromhex("89504e470d0a1a0a0000000d494844520000000100000001080200000090")
    files = {"ok.nii.gz": whole, "cut.nii.gz": whole[:-9], "no.nii.gz": b"not gzip" * 9, "broken.png": png}
    table = library.files(store.put(files), column="scan:file")
    report = library.check(table, everything=True)
    actual = {path: fault for check in report.failed for path, fault in zip(check.failed, check.faults, strict=True)}
    assert sorted(actual) == ["broken.png", "cut.nii.gz", "no.nii.gz"]
    assert actual["no.nii.gz"] == "is not gzip"
    assert "is cut off" in actual["cut.nii.gz"]


def test_marks_of_folders(bucket: Bucket, tmp_path: Path) -> None:
    """An object whose key ends in / is a folder, even without files. Any other empty object is a file."""
    address = bucket.put({"p-1/scan.nii.gz": bids.nifti(1), "p-1/": b"", "p-2/": b"", "empty.png": b""})
    table = read_source(address, SourceOptions(recipe_text=RECIPE.partition("[[tables]]")[0]))
    assert table.rows.column("person").to_pylist() == ["p-1", "p-2"]
    assert library.files(address).files.paths.to_pylist() == ["empty.png", "p-1/scan.nii.gz"]


def test_an_empty_object_that_is_filled(bucket: Bucket, tmp_path: Path) -> None:
    """An empty object that gets content after planning is detected, although its bytes are never read."""
    plan = library.plan(library.files(bucket.put({"a.bin": b"x", "b.bin": b""})), tmp_path / "out", allow_empty=True)
    bucket.put({"b.bin": b"now"})
    with pytest.raises(SourceChangedError, match=r"b\.bin"):
        plan.run()


def test_an_object_and_a_folder_of_one_name(bucket: Bucket) -> None:
    """An object with the name of a folder is refused by name, and can be excluded."""
    address = bucket.put({"a.png": b"x", "a.png/b.png": b"y", "c.png": b"z"})
    with pytest.raises(InvalidFilesError, match=r"an object with the name of a folder: a\.png"):
        library.plan(address).check()
    library.plan(library.files(address, exclude="a.png")).check()


class TestTables:
    """Tables with paths of objects."""

    FILES: Mapping[str, bytes] = {f"img/{i}.png": random_bytes(300, i) for i in range(3)}

    def test_addresses_in_a_local_table(self, bucket: Bucket, tmp_path: Path) -> None:
        """Addresses of objects in one bucket become paths relative to their common prefix."""
        address = bucket.put(self.FILES)
        table = library.table([{"image": f"{address}/img/{i}.png", "n": i} for i in range(3)])
        assert table.files.paths.to_pylist() == ["0.png", "1.png", "2.png"]
        local = write_files(tmp_path / "home", self.FILES)
        theirs = library.table([{"image": f"{local}/img/{i}.png", "n": i} for i in range(3)])
        same_table(table, theirs)
        assert build(table, tmp_path / "out") == build(theirs, tmp_path / "theirs")

    def test_root_in_a_bucket(self, bucket: Bucket) -> None:
        """--root sets the prefix for the relative paths of a local table."""
        address = bucket.put(self.FILES)
        table = library.table([{"image": "0.png"}, {"image": "2.png"}], root=f"{address}/img")
        assert table.files.paths.to_pylist() == ["0.png", "2.png"]
        with pytest.raises(SourceError, match="outside root="):
            library.table([{"image": "../x.png"}], files="image", root=f"{address}/img")

    def test_beside_the_table(self, bucket: Bucket) -> None:
        """A table can refer to objects above its folder."""
        address = bucket.put({**self.FILES, "tables/t.jsonl": b'{"image": "../img/1.png"}\n'})
        table = library.table(f"{address}/tables/t.jsonl", files="image")
        assert (table.files.paths.to_pylist(), table.refused) == (["1.png"], ())

    @pytest.mark.parametrize(
        ("paths", "arguments"),
        [
            (["s3://private/a.png", "s3://public/a.png"], "several buckets"),
            (["s3://private/a.png", "b.png"], "and files of this machine"),
        ],
    )
    def test_two_places(self, bucket: Bucket, paths: list[str], arguments: str) -> None:
        """All files of a table must be in one bucket."""
        with pytest.raises(SourceError, match=arguments):
            library.table([{"image": path} for path in paths], files="image")


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """Run a server with the same answer to every request, and return its address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class TestErrors:
    """Errors have a cause and a suggestion, without a traceback."""

    def test_nothing_there(self, bucket: Bucket) -> None:
        with pytest.raises(SourceError, match=f"{bucket.address}"):
            library.plan(bucket.address)

    def test_no_bucket(self, bucket: Bucket) -> None:
        with pytest.raises(SourceError, match="The bucket s3://no-such-bucket does not exist"):
            library.files("s3://no-such-bucket/x")

    def test_no_permission(self, bucket: Bucket) -> None:
        with pytest.raises(SourceError, match=r"You may not read s3://private.*AWS_ACCESS_KEY_ID"):
            library.files("s3://private/x", anonymous=True)

    def test_wrong_keys(self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
        with pytest.raises(SourceError, match="does not accept the credentials") as caught:
            library.files("s3://private/x")
        assert "wrong-secret" not in str(caught.value)

    def test_a_key_that_has_no_name(self, bucket: Bucket) -> None:
        bucket.put({"fine.png": b"x", "a\nb.png": b"x"})
        with pytest.raises(SourceError, match=r"holds a key that obstore cannot name: .*a\\nb\.png") as caught:
            library.files(bucket.address)
        assert caught.value.facts["key"].endswith("a\nb.png")

    def test_a_key_with_an_empty_name(self, bucket: Bucket) -> None:
        """A key with an empty name is refused. A stub server lists it, because SeaweedFS changes `a//b` to `a/b`."""
        listed = b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>x/a//b.png</Key><Size>1</Size>"
        listed += b"<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents></ListBucketResult>"

        arguments = r"holds a key that obstore cannot name: 'x/a//b\.png'"
        with answering(200, listed) as endpoint, pytest.raises(SourceError, match=arguments):
            library.files("s3://private/x", endpoint_url=endpoint)

    def test_another_region(self, bucket: Bucket) -> None:
        """A redirect without a target, as Amazon sends for another region, is an error with the setting to change."""
        began, refusal = time.monotonic(), b"<Error><Code>PermanentRedirect</Code></Error>"
        with answering(301, refusal) as endpoint, pytest.raises(SourceError, match=r"in another region.*AWS_REGION"):
            library.files("s3://private/x", endpoint_url=endpoint)
        assert time.monotonic() - began < 3  # no retries

    def test_no_store(self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server that answers every request with a page of its network is not an object store."""
        monkeypatch.setenv("BRIM_STALL_SECONDS", "1")
        with (
            answering(200, b"") as endpoint,
            pytest.raises(DestinationUnavailableError, match="does not answer as such a store does"),
        ):
            library.files("s3://private/x", endpoint_url=endpoint)

    def test_another_scheme(self) -> None:
        with pytest.raises(SourceError, match="cannot read ftp:// as a source"):
            library.plan("ftp://host/folder")

    def test_no_obstore(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("obstore", "obstore.store"):
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, "brim.storage.objects", raising=False)
        with pytest.raises(MissingDependencyError, match=r"pip install 'obstore>="):
            library.files("s3://some-bucket-without-a-store/x")

    def test_not_answering(self, bucket: Bucket, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BRIM_STALL_SECONDS", "1")
        s3_proxy.fail(503, times=None)
        with pytest.raises(DestinationUnavailableError, match="503"):
            library.files(bucket.address, endpoint_url=s3_proxy.endpoint)


Spoil = Callable[[FaultProxy], object]


class TestFaults:
    """A bucket with failing requests gives the same bytes."""

    FILES: Mapping[str, bytes] = {f"{i:02}.bin": random_bytes(400_000, i) for i in range(6)} | {"e.bin": b""}

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda proxy: proxy.fail(503, times=5, method="GET"),
            lambda proxy: proxy.cut(after_bytes=100_000, times=5, method="GET", contains=".bin"),
            # slower than the time limit for silence, but never silent
            lambda proxy: proxy.slow(200_000, method="GET", contains=".bin"),
            lambda proxy: proxy.stall(1.0, after_bytes=1000, times=3, method="GET"),
        ],
        ids=["503", "cut", "slow", "stall"],
    )
    def test_the_same_bytes(
        self,
        bucket: Bucket,
        s3_proxy: FaultProxy,
        tmp_path: Path,
        spoil: Spoil,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("BRIM_STALL_SECONDS", "1.5")
        address = bucket.put(self.FILES)
        local = library.files(write_files(tmp_path / "home", self.FILES))
        rule: Any = spoil(s3_proxy)
        table = library.files(address, endpoint_url=s3_proxy.endpoint)
        assert build(table, tmp_path / "out", num_shards=2) == build(local, tmp_path / "theirs", num_shards=2)
        assert rule.fired

    def test_forbidden_object(self, bucket: Bucket, s3_proxy: FaultProxy, tmp_path: Path) -> None:
        """An object that can be listed but not read is an error with its name."""
        address = bucket.put(self.FILES)
        s3_proxy.fail(403, times=None, method="GET", contains="03.bin")
        with pytest.raises(InputError, match=r"You may not read s3://.*/03\.bin"):
            library.build(address, tmp_path / "out", allow_empty=True, endpoint_url=s3_proxy.endpoint)


def test_large_objects_come_in_pieces(bucket: Bucket, s3_proxy: FaultProxy) -> None:
    """Large objects are read in ranges of limited size with correct offsets, also after the connection is cut."""
    large, small = random_bytes(10_000_001, 1), b"0123456789"
    location = parse_location(bucket.put({"large.bin": large, "small.bin": small}), Access(s3_proxy.endpoint))
    rule: Any = s3_proxy.cut(after_bytes=3_000_000, times=2, method="GET", contains="large.bin")
    file = RemoteFile(location, "large.bin", len(large), "")
    ranges = [*file.ranges(5, len(large)), ByteRange("small.bin", 2, 10)]
    inputs = [(item, bytes(data)) for item, data in RangeStream(location, ranges)]
    assert rule.fired
    assert b"".join(data for _, data in inputs) == large[5:] + small[2:]
    for entry, data in inputs:
        assert data == (large if entry.name == "large.bin" else small)[entry.start : entry.stop]
    assert [len(data) for _, data in inputs[:2]] == [RANGE_BYTES - 5, RANGE_BYTES]
    assert len(inputs) == 4


def test_a_piece_is_held_by_whoever_took_it(bucket: Bucket) -> None:
    """While the next range is awaited, only the consumer holds the previous one.

    Otherwise a build would need the memory of one more range.
    """
    data = random_bytes(3 * RANGE_BYTES, 1)
    location = parse_location(bucket.put({"large.bin": data}))
    coming = RangeStream(location, RemoteFile(location, "large.bin", len(data), "").ranges(0, len(data)))
    _, view = next(coming)
    retained = view.obj
    del view
    until = time.monotonic() + 20
    while (
        sys.getrefcount(retained) > 2 and time.monotonic() < until
    ):  # the requesting thread may not have released it yet
        time.sleep(0.01)
    assert sys.getrefcount(retained) == 2
    assert sum(len(remainder) for _, remainder in coming) == 2 * RANGE_BYTES


def test_threads_of_requests_share_one_heap(bucket: Bucket) -> None:
    """All request threads share one heap: separate heaps would keep the freed memory of other threads."""
    location = bucket.put({f"{i}.bin": random_bytes(8 << 20, i) for i in range(4)})
    arguments = ["brim", "plan", location, "--quiet"]
    program = f"""
import ctypes, sys, brim.cli
sys.argv, sys.exit = {arguments!r}, lambda code: ctypes.CDLL("libc.so.6").malloc_stats()
brim.cli.main()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Arena 0:" in result.stderr
    assert "Arena 1:" not in result.stderr


def test_sidecars_are_asked_for_together(bucket: Bucket, s3_proxy: FaultProxy) -> None:
    """BIDS needs one listing, and reads each of its many small files once, several at a time."""
    tree = bids.base()
    for i in range(40):
        stem = f"sub-{i:02}/anat/sub-{i:02}_T1w"
        tree |= {f"{stem}.nii.gz": b"x" * 2000, f"{stem}.json": json.dumps({"EchoTime": i}).encode()}
    address = bucket.put(tree)
    s3_proxy.stall(0.05, times=None, method="GET", contains=".json")
    table = library.bids(address, endpoint_url=s3_proxy.endpoint)
    assert table.rows.column("t1w_json")[7].as_py() == '{"EchoTime": 7}'
    requested = [exchange.path for exchange in s3_proxy.requests]
    assert sum("list-type" in exchange.query for exchange in s3_proxy.requests) == 1
    assert len(requested) == len(set(requested))
    assert s3_proxy.most_at_once > 8


@pytest.fixture
def anonymous_environment() -> dict[str, str]:
    """Return the environment of a user without credentials."""
    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}


def test_the_command(bucket: Bucket, anonymous_environment: dict[str, str], tmp_path: Path) -> None:
    """A public bucket is planned, checked, built and verified without credentials, and no endpoint is stored."""
    public = Bucket(bucket.server, bucket.prefix, PUBLIC)
    address = public.put(KINDS["bids"].files)
    existing = ("--anonymous", "--endpoint-url", bucket.server.endpoint)
    assert "rows  3" in brim("plan", address, *existing, env=anonymous_environment).stdout
    brim("check", address, *existing, env=anonymous_environment)
    result = brim("build", address, tmp_path / "out", *existing, env=anonymous_environment)
    assert f"{address} --endpoint-url {bucket.server.endpoint} --anonymous" in " ".join(result.stdout.split())
    assert (
        "files are inside, byte for byte"
        in brim("verify", tmp_path / "out", address, *existing, env=anonymous_environment).stdout
    )
    ledger = "".join(path.read_text() for path in (tmp_path / "out" / ".brim").iterdir())
    assert bucket.server.endpoint not in ledger
    assert "s3://" not in ledger


def test_from_bucket_to_hub(bucket: Bucket, tmp_path: Path) -> None:
    """Files of a bucket are published to the Hub, and the result verifies against the bucket."""
    address = bucket.put(KINDS["recipe"].files)
    recipe = tmp_path / "scans.toml"
    recipe.write_text(RECIPE)
    theirs = library.bids(write_files(tmp_path / "home", KINDS["recipe"].files), recipe=recipe)
    with TestHub(tmp_path / "hub") as hub:
        machine = Machine(hub, tmp_path / "machine", more=bucket.server.environment)
        brim("build", address, DEST, "--recipe", recipe, env=machine.environment)
        result = brim("verify", DEST, address, "--deep", env=machine.environment)
        assert f"{theirs.file_count()} files are inside" in result.stdout


def test_access_is_not_remembered() -> None:
    """Endpoint and credentials are not part of the stored options, because they do not affect the rows."""
    options = SourceOptions(limit=3, access=Access("https://s3.example.org", anonymous=True))
    assert options.recipe() == {"limit": 3}
    assert SourceOptions.from_recipe({"limit": 3}, access=options.access) == options

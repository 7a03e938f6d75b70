"""The test Hub against the real, unmodified clients, each in a separate process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import huggingface_hub.errors
import pytest

from tests.hub import TestHub

PRELUDE = """
import hashlib, io, os, sys
from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi, HfFileSystem
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
api, repo = HfApi(), dict(repo_id="ada/data", repo_type="dataset")
def content(size, seed=0):
    return hashlib.shake_128(bytes([seed])).digest(size)
def upload(size, path="a.bin", seed=0):
    return api.upload_file(path_or_fileobj=content(size, seed), path_in_repo=path, **repo)
def status(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except (HfHubHTTPError, RuntimeError) as error:
        error = error if isinstance(error, HfHubHTTPError) else error.__cause__
        return error.response.status_code
    return 200
"""
Client = Callable[..., str]


def content(size: int, seed: int = 0) -> bytes:
    return hashlib.shake_128(bytes([seed])).digest(size)


def described(data: bytes) -> tuple[int, str]:
    return len(data), hashlib.sha256(data).hexdigest()


def run_client(hub: TestHub, home: Path, code: str, *, token: str | None, xet: bool, check: bool) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "0" if xet else "1"}
    environment |= {"HF_TOKEN": token} if token else {}
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 or not check, result.stderr
    return result.stdout.strip()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[TestHub]:
    """Start a Hub with small limits, so that 3 MB is a multipart upload and five files are two pages."""
    with TestHub(tmp_path / "hub", multipart_bytes=2 << 20, part_bytes=1 << 20, page_size=3) as hub:
        hub.create("ada/data")
        yield hub


@pytest.fixture
def client(hub: TestHub, tmp_path: Path) -> Client:
    def run(code: str, *, token: str | None = "hf_write", xet: bool = False, check: bool = True) -> str:
        return run_client(hub, tmp_path / "home", code, token=token, xet=xet, check=check)

    return run


def test_create_info_settings_delete(hub: TestHub, client: Client) -> None:
    """A repository can be created once, made private, listed with its references, and deleted."""
    client("""
        new = dict(repo_id="ada/new", repo_type="dataset")
        assert api.whoami()["name"] == "ada"
        assert api.create_repo(**new, private=True).endswith("/datasets/ada/new")
        assert status(api.create_repo, **new) == 409
        api.create_repo(**new, exist_ok=True)
        assert api.repo_info(**new).private
        api.update_repo_settings(**new, private=False)
        assert not api.repo_info(**new).private
        api.create_branch(**new, branch="side/way")
        assert [b.name for b in api.list_repo_refs(**new).branches] == ["main", "side/way"]
        api.delete_branch(**new, branch="side/way")
        assert [b.name for b in api.list_repo_refs(**new).branches] == ["main"]
        api.auth_check(**new, write=True)
        api.delete_repo(**new)
        assert not api.repo_exists(**new)
    """)
    assert hub.counters.requests["create"] == 3


def test_upload_and_read_back(hub: TestHub, client: Client) -> None:
    """Texts in a commit, objects by one PUT and large objects by parts are returned completely and by range."""
    client("""
        class Stream(io.BufferedIOBase):
            def __init__(self, data): self.inner = io.BytesIO(data)
            def readable(self): return True
            def seekable(self): return True
            def read(self, size=-1): return self.inner.read(size)
            def seek(self, *where): return self.inner.seek(*where)
            def tell(self): return self.inner.tell()
        api.upload_file(path_or_fileobj=b"# text", path_in_repo="README.md", **repo)
        upload(1000, "a/small.bin")
        upload(3_000_001, "a/large.bin", 1)
        api.upload_file(path_or_fileobj=Stream(content(3_000_000, 2)), path_in_repo="a/stream.bin", **repo)
        tree = {f.path: f for f in api.list_repo_tree(**repo, recursive=True, expand=True)}
        assert list(tree) == [".gitattributes", "README.md", "a", "a/large.bin", "a/small.bin", "a/stream.bin"]
        assert tree["README.md"].lfs is None and tree["a/large.bin"].lfs.size == 3_000_001
        assert tree["a/large.bin"].lfs.sha256 == hashlib.sha256(content(3_000_001, 1)).hexdigest()
        assert [f.path for f in api.get_paths_info(**repo, paths=["a", "README.md", "no"])] == ["a", "README.md"]
        read = lambda path: open(hf_hub_download(**repo, filename=path), "rb").read()
        assert read("README.md") == b"# text" and read("a/large.bin") == content(3_000_001, 1)
        with HfFileSystem().open("datasets/ada/data/a/stream.bin", block_size=4096) as file:
            file.seek(-8, 2)
            assert file.read() == content(3_000_000, 2)[-8:]
            file.seek(1_000_000)
            assert file.read(100) == content(3_000_000, 2)[1_000_000:1_000_100]
    """)
    assert hub.files("ada/data")["a/stream.bin"] == described(content(3_000_000, 2))
    assert hub.read("ada/data", "a/large.bin") == content(3_000_001, 1)
    assert hub.counters.requests["put"] == 1
    assert hub.counters.requests["part"] == 6
    assert hub.counters.bytes_received == 6_001_001
    assert hub.counters.bytes_repeated == 0
    assert hub.counters.requests["tree"] >= 2


def test_an_object_is_sent_once(hub: TestHub, client: Client) -> None:
    """An object that exists under another name is not requested again until garbage collection has deleted it."""
    client("""
        upload(1000, "a.bin")
        upload(1000, "b.bin")
        api.preupload_lfs_files(additions=[CommitOperationAdd("c.bin", content(1000, 5))], **repo)
    """)
    assert hub.counters.puts == 2
    assert hub.collect_garbage("ada/data") == {described(content(1000, 5))[1]}
    client('api.preupload_lfs_files(additions=[CommitOperationAdd("c.bin", content(1000, 5))], **repo)')
    assert hub.counters.puts == 3
    assert hub.counters.bytes_repeated == 1000


def test_commit_with_deletions_and_conflict(hub: TestHub, client: Client) -> None:
    """One commit adds, copies and deletes files. A commit with an outdated parent is refused with status 412."""
    client("""
        first = upload(1000, "old/a.bin").oid
        operations = [
            CommitOperationAdd("new.txt", b"new"),
            CommitOperationCopy("old/a.bin", "copy.bin"),
            CommitOperationDelete("old/", is_folder=True),
        ]
        done = api.create_commit(operations=operations, commit_message="all", parent_commit=first, **repo)
        again = [CommitOperationDelete("new.txt")]
        assert status(api.create_commit, operations=again, commit_message="x", parent_commit=first, **repo) == 412
        gone = [CommitOperationDelete("né\u2014.bin")]
        assert status(api.create_commit, operations=gone, commit_message="x", **repo) == 404
        assert [c.title for c in api.list_repo_commits(**repo)][0] == "all"
        assert api.repo_info(**repo).sha == done.oid
    """)
    assert set(hub.files("ada/data")) == {".gitattributes", "copy.bin", "new.txt"}
    assert hub.counters.commits == 2


def test_a_pointer_needs_its_object(hub: TestHub, client: Client) -> None:
    """A commit with a pointer to a missing object is refused."""
    client("""
        addition = CommitOperationAdd("a.bin", content(1000))
        addition._upload_mode, addition._is_uploaded = "lfs", True
        assert status(api.create_commit, operations=[addition], commit_message="x", **repo) == 400
    """)
    assert "a.bin" not in hub.files("ada/data")


def test_pull_request(hub: TestHub, client: Client) -> None:
    """A draft pull request takes commits that readers see only after it is opened and merged."""
    client("""
        pull = api.create_pull_request(title="fill", **repo)
        assert pull.status == "draft" and pull.git_reference == "refs/pr/1"
        for i in range(2):
            api.upload_file(path_or_fileobj=content(9, i), path_in_repo=f"{i}.bin", revision="refs/pr/1", **repo)
        api.comment_discussion(discussion_num=1, comment="half way", **repo)
        assert not api.file_exists("ada/data", "0.bin", repo_type="dataset")
        assert api.file_exists("ada/data", "0.bin", repo_type="dataset", revision="refs/pr/1")
        assert status(api.merge_pull_request, discussion_num=1, **repo) == 400
        api.change_discussion_status(discussion_num=1, new_status="open", **repo)
        assert [(d.num, d.title, d.status) for d in api.get_repo_discussions(**repo)] == [(1, "fill", "open")]
        assert len(api.list_repo_refs(**repo, include_pull_requests=True).pull_requests) == 1
        api.merge_pull_request(discussion_num=1, **repo)
        told = api.get_discussion_details(discussion_num=1, **repo)
        assert told.status == "merged" and told.merge_commit_oid == api.repo_info(**repo).sha
        assert [e.type for e in told.events] == ["comment", "commit", "commit", "comment"] + ["status-change"] * 2
        assert api.upload_file(path_or_fileobj=b"x", path_in_repo="x", create_pr=True, **repo).pr_num == 2
    """)
    assert set(hub.files("ada/data")) == {".gitattributes", "0.bin", "1.bin"}
    assert hub.history("ada/data") == ["fill (#1)", "initial commit"]


def test_datasets_round_trip(hub: TestHub, client: Client) -> None:
    """`datasets` pushes and loads a dataset, plain and streaming."""
    client("""
        import datasets
        pushed = datasets.Dataset.from_dict({"x": list(range(100)), "y": [str(i) for i in range(100)]})
        pushed.push_to_hub("ada/rows", num_shards=3, private=True)
        assert datasets.load_dataset("ada/rows", split="train").to_dict() == pushed.to_dict()
        streamed = datasets.load_dataset("ada/rows", split="train", streaming=True)
        assert [row["x"] for row in streamed] == list(range(100))
    """)
    assert "data/train-00002-of-00003.parquet" in hub.files("ada/rows")


def test_who_may_do_what(hub: TestHub, client: Client) -> None:
    """Private repositories are hidden without a token, bad tokens fail, and read-only tokens cannot write."""
    hub.create("ada/private", private=True)
    hub.create("ada/gated").gated = "auto"
    private = 'private = dict(repo_id="ada/private", repo_type="dataset")\n'
    client(private + "assert not api.repo_exists(**private) and api.repo_exists(**repo)", token=None)
    client(private + "assert api.repo_exists(**private) and status(upload, 1000) == 403", token="hf_read")
    client("assert status(api.whoami) == 401 and status(upload, 1000) == 401", token="hf_wrong")
    client('assert status(hf_hub_download, "ada/gated", "x", repo_type="dataset") == 403', token="hf_read")
    assert hub.counters.puts == 0


@pytest.mark.parametrize("keep", [True, False])
def test_a_wrong_object_is_refused(tmp_path: Path, keep: bool) -> None:
    """Bytes with another SHA-256 than announced are not stored."""
    code = """
        addition = CommitOperationAdd("a.bin", content({size}))
        addition.path_or_fileobj = content({size}, 1)
        assert status(api.create_commit, operations=[addition], commit_message="x", **repo) == {status}
    """
    with TestHub(tmp_path / "hub", keep=keep, multipart_bytes=2 << 20, part_bytes=1 << 20) as hub:
        hub.create("ada/data")
        for size, expected in ((1000, 400), (3_000_000, 422)):
            script = textwrap.dedent(code).format(size=size, status=expected)
            run_client(hub, tmp_path / "home", script, token="hf_write", xet=False, check=True)
        assert hub.objects.sizes == {}


def test_only_hashed(tmp_path: Path) -> None:
    """A server that does not store content still knows sizes and SHA-256, and the last bytes if requested."""
    code = """
        upload(1_000_000, "a.bin")
        upload(3_000_001, "b.bin", 1)
        assert api.get_paths_info(**repo, paths=["b.bin"])[0].lfs.size == 3_000_001
        with HfFileSystem().open("datasets/ada/data/b.bin", block_size=64, cache_type="none") as file:
            file.seek(-50, 2)
            assert file.read() == content(3_000_001, 1)[-50:]
            file.seek(0)
            assert status(file.read, 10) == 410
    """
    limits = {"multipart_bytes": 2 << 20, "part_bytes": 1 << 20}
    with TestHub(tmp_path / "hub", keep=False, tail_bytes=100, **limits) as hub:
        hub.create("ada/data")
        run_client(hub, tmp_path / "home", code, token="hf_write", xet=False, check=True)
        assert hub.files("ada/data")["b.bin"] == described(content(3_000_001, 1))
    assert sum(path.stat().st_size for path in (tmp_path / "hub").rglob("*") if path.is_file()) == 200


def test_xet(tmp_path: Path) -> None:
    """With Xet enabled, the real hf_xet uploads and downloads. Without it, the client fails as with an old server."""
    code = """
        for path, seed in (("a.bin", 1), ("b.bin", 2)):
            upload(700_000, path, seed)
            assert open(hf_hub_download(**repo, filename=path), "rb").read() == content(700_000, seed)
        with HfFileSystem().open("datasets/ada/data/a.bin", block_size=64) as file:
            file.seek(-8, 2)
            assert file.read() == content(700_000, 1)[-8:]
    """
    with TestHub(tmp_path / "hub", xet=True) as hub:
        hub.create("ada/data")
        fault = hub.faults.add("xorb", status=503)
        run_client(hub, tmp_path / "home", code, token="hf_write", xet=True, check=True)
        assert hub.files("ada/data")["a.bin"] == described(content(700_000, 1))
        assert hub.read("ada/data", "b.bin") == content(700_000, 2)
        assert hub.counters.requests["put"] == 0
        assert fault.fired == 1
        assert hub.counters.bytes_received > 2_100_000
        assert 0 < hub.counters.bytes_repeated < 800_000
        hub.xet = None
        code = 'try: upload(9000, "c.bin", 3)\nexcept Exception as error: print(type(error).__name__)'
        assert run_client(hub, tmp_path / "home", code, token="hf_write", xet=True, check=True)
        assert "c.bin" not in hub.files("ada/data")


def test_fault_status(hub: TestHub, client: Client) -> None:
    """The client retries each of these statuses, and the upload succeeds."""
    faults = [
        hub.faults.add("preupload", status=500),
        hub.faults.add("batch", status=502),
        hub.faults.add("part", status=503, nth=2),
        hub.faults.add("complete", status=504),
        hub.faults.add("verify", status=429, retry_after=0),
    ]
    client("upload(3_000_000)")
    assert [fault.fired for fault in faults] == [1] * 5
    assert hub.files("ada/data")["a.bin"] == described(content(3_000_000))
    assert hub.counters.bytes_received == 3_000_000 + (1 << 20)
    assert hub.counters.bytes_repeated == 1 << 20


def test_fault_status_not_retried(hub: TestHub, client: Client) -> None:
    """The client does not retry an expired URL (403), a lost login (401), or a commit with status 503."""
    hub.faults.add("put", status=403)
    hub.faults.add("preupload", nth=2, status=401)
    hub.faults.add("commit", status=503)
    client("assert [status(upload, 1000) for _ in range(4)] == [403, 401, 503, 200]")
    assert hub.counters.puts == 2


def test_expired_url(hub: TestHub, client: Client) -> None:
    """The storage host refuses an expired pre-signed URL."""
    hub.url_lifetime_s = -1
    client("assert status(upload, 1000) == 403")


def test_fault_cut(hub: TestHub, client: Client) -> None:
    """The client resumes after the connection is cut during a PUT or a download, and the server counts the bytes."""
    fault = hub.faults.add("put", action="cut", after_bytes=500_000)
    get = hub.faults.add("object", action="cut", after_bytes=300_000)
    client("""
        upload(1_500_000)
        assert open(hf_hub_download(**repo, filename="a.bin"), "rb").read() == content(1_500_000)
    """)
    assert (fault.fired, get.fired) == (1, 1)
    assert hub.counters.bytes_received == 2_000_000
    assert hub.counters.bytes_repeated == 500_000
    assert hub.counters.puts == 2


def test_fault_stall(hub: TestHub, client: Client) -> None:
    """Stalled requests continue after their delay, and concurrent ones are counted."""
    fault = hub.faults.add("put", times=2, action="stall", after_bytes=1000, seconds=1.5)
    start = time.monotonic()
    client("""
        files = [CommitOperationAdd(f"{i}.bin", content(1_000_000, i)) for i in range(2)]
        api.create_commit(operations=files, commit_message="both", **repo)
    """)
    assert fault.fired == 2
    assert time.monotonic() - start > 1.5
    assert (hub.counters.puts, hub.counters.peak_puts) == (2, 2)


def test_fault_lose(hub: TestHub, client: Client) -> None:
    """The commit is made although its answer is lost."""
    hub.faults.add("commit", action="lose")
    client("""
        try: upload(1000)
        except Exception as error: sys.exit(type(error).__name__ != "RemoteProtocolError")  # of httpx or of httpx2
        sys.exit(1)
    """)
    assert "a.bin" in hub.files("ada/data")
    assert hub.counters.commits == 1


def test_fault_conflict(hub: TestHub, client: Client) -> None:
    """A concurrent commit leads to status 412, and the second attempt of the client adds its file."""
    hub.faults.add("commit", action="conflict")
    client("assert [status(upload, 1000), status(upload, 1000)] == [412, 200]")
    assert set(hub.files("ada/data")) == {".gitattributes", "a.bin", "someone-else.txt"}
    assert len(hub.history("ada/data")) == 3


def test_restart(hub: TestHub, client: Client) -> None:
    """A server that restarts during an upload keeps its objects, and the client retries successfully."""
    before = hub.endpoint
    hub.faults.add("part", nth=2, action="stall", seconds=30)
    finished = threading.Thread(target=client, args=("upload(1000); upload(3_000_000, 'b.bin', 1)",))
    finished.start()
    while hub.counters.requests["part"] < 2:
        time.sleep(0.02)
    hub.restart(pause_s=0.2)
    finished.join()
    assert hub.endpoint == before
    assert hub.files("ada/data")["b.bin"] == described(content(3_000_000, 1))
    assert hub.read("ada/data", "a.bin") == content(1000)


def test_buckets(tmp_path: Path) -> None:
    """Storage buckets are created, filled, listed by prefix, copied and read, and each failed operation is reported."""
    if not hasattr(huggingface_hub.errors, "BucketBatchError"):
        pytest.skip(f"huggingface_hub {huggingface_hub.__version__} has no calls for buckets")
    code = """
        from huggingface_hub.errors import BucketBatchError, BucketNotFoundError
        url = api.create_bucket("ada/things", private=True)
        assert (url.bucket_id, api.create_bucket("ada/things", exist_ok=True).bucket_id) == ("ada/things",) * 2
        assert status(api.create_bucket, "ada/things") == 409
        add = [(content(5000, n), f"logs/a b{n}.bin") for n in range(3)] + [(b"x", "logs.json")]
        api.batch_bucket_files("ada/things", add=add)
        found = {f.path: f for f in api.list_bucket_tree("ada/things", prefix="logs", recursive=True)}
        assert sorted(found) == ["logs.json", *(f"logs/a b{n}.bin" for n in range(3))]
        top = sorted((f.type, f.path) for f in api.list_bucket_tree("ada/things"))
        assert top == [("directory", "logs"), ("file", "logs.json")], top
        api.copy_files("hf://buckets/ada/things/logs/a b1.bin", "hf://buckets/ada/things/copy.bin")
        api.batch_bucket_files("ada/things", delete=["logs/a b0.bin"])
        told = list(api.get_bucket_paths_info("ada/things", ["copy.bin", "logs/a b0.bin", "logs/a b1.bin"]))
        assert [t.path for t in told] == ["copy.bin", "logs/a b1.bin"] and told[0].xet_hash == told[1].xet_hash
        assert api.get_bucket_file_metadata("ada/things", "copy.bin").size == 5000
        with HfFileSystem().open("hf://buckets/ada/things/copy.bin") as file:
            file.seek(100)
            assert file.read(50) == content(5000, 1)[100:150]
        try:
            api.batch_bucket_files("ada/things", delete=["nothing"], add=[(b"y", "y")])
            raise SystemExit("nothing failed")
        except BucketBatchError as error:
            assert [failure["path"] for failure in error.failures] == ["nothing"], error.failures
        info = api.bucket_info("ada/things")
        assert (info.private, info.total_files) == (True, 5)
        api.delete_bucket("ada/things")
        try:
            api.bucket_info("ada/things")
            raise SystemExit("it is there")
        except BucketNotFoundError:
            pass
    """
    with TestHub(tmp_path / "hub", xet=True, page_size=2) as hub:
        run_client(hub, tmp_path / "home", code, token="hf_write", xet=True, check=True)
        assert hub.counters.requests["bucket-batch"] == 4

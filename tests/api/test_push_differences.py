"""Differences between brim.push_to_hub and the original, with a test per row of docs/reference/push-to-hub.md."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
import yaml

import brim
from tests.hub import TestHub
from tests.publishing import Machine

PAGE = Path(__file__).parents[2] / "docs/reference/push-to-hub.md"
PUSHED = r"""
import json, os, sys
import datasets, brim
from huggingface_hub import HfApi
from PIL import Image

datasets.disable_progress_bars()
said = {}

def both(name, do):
    "The same with the original and with brim: the result, or the error."
    for library in ("original", "brim"):
        def push(dataset, *given, **options):
            if library == "original":
                return dataset.push_to_hub(f"ada/{name}-original", *given, **options)
            return brim.push_to_hub(dataset, f"ada/{name}-brim", *given, progress=False, **options)
        try:
            said[f"{name}-{library}"] = type(do(push)).__name__
        except Exception as error:
            said[f"{name}-{library}"] = [one.__name__ for one in type(error).__mro__]

ds = datasets.Dataset.from_dict({"n": list(range(1000)), "t": ["x" * 100] * 1000}, split="train")
few = datasets.Dataset.from_dict({"n": [1, 2, 3]})
both("plain", lambda push: push(ds))
both("sized", lambda push: push(ds, max_shard_size="30KB"))
both("numbered", lambda push: push(ds, num_shards=3))
both("public", lambda push: push(few, private=False))

def several(push):
    push(datasets.DatasetDict({"train": ds, "test": ds.select(range(10))}))
    push(ds, "b", split="more")
    push(ds.select(range(20)), split="test")
both("many", several)

uneven = datasets.Dataset.from_dict({"t": ["long " * 1000] * 10 + ["short"] * 90})
both("uneven", lambda push: push(uneven, num_shards=2))
brim.push_to_hub(few, "ada/processes-brim", num_proc=2, progress=False)
few.push_to_hub("ada/processes-original", num_shards=2)  # what num_proc=2 makes, without starting two Pythons
both("too-many", lambda push: push(few, num_shards=5))
both("one-number", lambda push: push(datasets.DatasetDict({"train": few}), num_shards=2))
both("stream", lambda push: push(few.to_iterable_dataset(num_shards=3)))
both("stream-sized", lambda push: push(few.to_iterable_dataset(num_shards=3), max_shard_size=20))
datasets.config.MAX_SHARD_SIZE = 10
both("stream-large", lambda push: push(few.to_iterable_dataset()))
datasets.config.MAX_SHARD_SIZE = "30KB"
both("setting", lambda push: push(ds))
datasets.config.MAX_SHARD_SIZE = "500MB"
datasets.config.UPLOADS_MAX_NUMBER_PER_COMMIT = 1
both("commits", lambda push: push(few, num_shards=3))
datasets.config.UPLOADS_MAX_NUMBER_PER_COMMIT = 50

pictures = datasets.Dataset.from_dict({"i": [Image.new("RGB", (8, 8))] * 4}).cast_column("i", datasets.Image())
both("pictures", lambda push: push(pictures))
for number in range(3):
    with open(f"{os.environ['TMPDIR']}/{number}.pdf", "wb") as file:
        file.write(os.urandom(20_000))
pages = datasets.Dataset.from_dict({"p": [f"{os.environ['TMPDIR']}/{n}.pdf" for n in range(3)]})
both("pages", lambda push: push(pages.cast_column("p", datasets.Pdf(decode=False)), max_shard_size="30KB"))

both("bad-data", lambda push: push(few, "data"))
both("bad-both", lambda push: push(few, max_shard_size="1MB", num_shards=2))
both("bad-split", lambda push: push(few, split="a b"))
both("bad-size", lambda push: push(few, max_shard_size="many"))
both("bad-splits", lambda push: push(datasets.DatasetDict({"train": few, "test": uneven})))
both("bad-default", lambda push: (push(few), push(few, "x", True)))
both("bad-features", lambda push: (push(few), push(uneven, split="test")))
both("odd-all", lambda push: push(few, "all"))
both("odd-name", lambda push: push(few, "a b"))
both("odd-folder", lambda push: push(few, data_dir="a b"))

api, old = HfApi(), {"features": {"n": {"dtype": "int64", "_type": "Value"}}, "dataset_size": 1, "download_size": 1}
old["splits"] = {"train": {"name": "train", "num_bytes": 1, "num_examples": 1}}
for library in ("original", "brim"):
    api.create_repo(f"ada/old-{library}", repo_type="dataset")
    api.upload_file(path_or_fileobj=json.dumps({"default": old}).encode(), path_in_repo="dataset_infos.json",
                    repo_id=f"ada/old-{library}", repo_type="dataset")
both("old", lambda push: push(few))
assert datasets.load_dataset("ada/old-brim", split="train").num_rows == 3
print(json.dumps(said))
"""
_tests: dict[str, list[str]] = {}


def line(arguments: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a test with the table row that it covers, by its first words. Both push, so the test is slow."""

    def named(test: Callable[..., None]) -> Callable[..., None]:
        _tests.setdefault(arguments, []).append(test.__name__)
        return pytest.mark.slow(test) if inspect.signature(test).parameters else test

    return named


class Pushed:
    """The repositories that both published with the same calls."""

    def __init__(self, hub: TestHub, messages: dict[str, Any]) -> None:
        self.hub, self.said = hub, messages

    def shards(self, repo: str) -> list[str]:
        return [name for name in self.hub.files(f"ada/{repo}") if name.endswith(".parquet")]

    def card(self, repo: str) -> dict[str, Any]:
        actual: dict[str, Any] = yaml.safe_load(self.hub.read(f"ada/{repo}", "README.md").decode().split("---\n")[1])
        return actual

    def rows(self, repo: str) -> list[int]:
        read = (BytesIO(self.hub.read(f"ada/{repo}", name)) for name in self.shards(repo))
        return [pq.read_metadata(file).num_rows for file in read]

    def sent(self, repo: str, under: str = "") -> int:
        files = self.hub.files(f"ada/{repo}").items()
        return sum(size for name, (size, _) in files if name.endswith(".parquet") and name.startswith(under))


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pushed]:
    folder = tmp_path_factory.mktemp("push")
    with TestHub(folder / "hub") as hub:
        result = Machine(hub, folder / "machine").python(PUSHED)
        yield Pushed(hub, json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("repo", ["plain", "sized", "numbered", "processes", "stream", "stream-sized", "setting"])
def test_the_same_shards(pushed: Pushed, repo: str) -> None:
    """brim writes as many shards as the original for `max_shard_size`, `num_shards`, `num_proc`, streams and
    `datasets.config`."""
    assert pushed.shards(f"{repo}-brim") == pushed.shards(f"{repo}-original")
    assert (len(pushed.shards(f"{repo}-brim")) > 1) == (repo != "plain")


@pytest.mark.slow
@pytest.mark.parametrize("repo", ["plain", "sized", "numbered"])
def test_the_same_card(pushed: Pushed, repo: str) -> None:
    """The card has the same patterns and `dataset_size`; its download size is the size of the shards."""
    mine, second = pushed.card(f"{repo}-brim"), pushed.card(f"{repo}-original")
    assert mine["configs"] == second["configs"]
    for same in ("features", "splits", "dataset_size"):
        assert mine["dataset_info"][same] == second["dataset_info"][same]
    assert mine["dataset_info"]["download_size"] == pushed.sent(f"{repo}-brim")


@pytest.mark.slow
def test_the_same_splits_and_configs(pushed: Pushed) -> None:
    """A split or config that is pushed later is listed as by the original, and the totals are correct."""
    mine, second = pushed.card("many-brim"), pushed.card("many-original")
    configs = [sorted(fields["configs"], key=str) for fields in (mine, second)]
    assert configs[0] == configs[1]
    infos = {i["config_name"]: i for i in mine["dataset_info"]}
    for expected in second["dataset_info"]:
        actual = infos[expected["config_name"]]
        assert sorted(actual["splits"], key=str) == sorted(expected["splits"], key=str)
        assert actual["dataset_size"] == expected["dataset_size"]
        folder = "data" if expected["config_name"] == "default" else expected["config_name"]
        assert actual["download_size"] == pushed.sent("many-brim", f"{folder}/")


@pytest.mark.slow
def test_the_same_commit(pushed: Pushed) -> None:
    assert pushed.hub.history("ada/plain-brim") == pushed.hub.history("ada/plain-original")


@line("a new repository without `private=`")
def test_private_unless_said(pushed: Pushed) -> None:
    repos = pushed.hub.repos
    observed = [
        repos.get("datasets", f"ada/{repo}").private for repo in ("plain-brim", "plain-original", "public-brim")
    ]
    assert observed == [True, False, False]


@line("shards of media columns")
def test_media_by_their_true_size(pushed: Pushed) -> None:
    """Media count with their true size: with a limit of 30 kB, each file of 20 kB gets its own shard."""
    assert (pushed.rows("pages-original"), pushed.rows("pages-brim")) == ([3], [1, 1, 1])


@line("where the cuts are")
def test_cuts_by_bytes(pushed: Pushed) -> None:
    assert pushed.rows("uneven-original") == [50, 50]
    first, second = pushed.rows("uneven-brim")
    assert first < 10
    assert first + second == 100


@line("more `num_shards` or `num_proc` than rows")
def test_no_shard_without_rows(pushed: Pushed) -> None:
    assert "IndexError" in pushed.said["too-many-original"]
    assert pushed.rows("too-many-brim") == [1, 1, 1]


@line("`num_shards` of a `DatasetDict`")
def test_one_number_for_all(pushed: Pushed) -> None:
    assert "ValueError" in pushed.said["one-number-original"]
    assert pushed.rows("one-number-brim") == [1, 2] or pushed.rows("one-number-brim") == [2, 1]


@line("a stream without `max_shard_size`")
def test_streams(pushed: Pushed) -> None:
    """A stream gives as many shards as it is read in, or more if these would be too large."""
    assert (pushed.rows("stream-large-original"), pushed.rows("stream-large-brim")) == ([3], [1, 1, 1])


@line("`num_proc`")
def test_no_processes(tmp_path: Path) -> None:
    """brim uploads with threads: no other process is running when the shards arrive."""
    code = """
    import os, datasets, brim
    started, spawn = [], os.posix_spawn
    import subprocess
    real = subprocess.Popen.__init__
    subprocess.Popen.__init__ = lambda self, *a, **o: (started.append(a), real(self, *a, **o))[1]
    ds = datasets.Dataset.from_dict({"n": [1, 2, 3]})
    assert brim.push_to_hub(ds, "ada/data", num_proc=2, progress=False).shards == 2
    assert not started, started
    """
    with TestHub(tmp_path / "hub") as hub:
        Machine(hub, tmp_path / "machine").python(code)


@pytest.mark.slow
def test_a_stop_is_heard(tmp_path: Path) -> None:
    """A Stop request ends the push, and the same call without it succeeds."""
    code = """
    import datasets, brim
    ds, stop = datasets.Dataset.from_dict({"n": [1, 2, 3]}), brim.Stop()
    stop.request("the test")
    try:
        brim.push_to_hub(ds, "ada/data", stop=stop, progress=False)
    except brim.StoppedError as stopped:
        print("the test" in str(stopped))
    assert brim.push_to_hub(ds, "ada/data", progress=False).rows == 3
    """
    with TestHub(tmp_path / "hub") as hub:
        assert Machine(hub, tmp_path / "machine").python(code).stdout == "True\n"


@line("`dataset_size` of media columns and streams")
def test_sizes_of_media_and_streams(pushed: Pushed) -> None:
    for repo in ("pictures", "stream"):
        mine, second = (pushed.card(f"{repo}-{actor}")["dataset_info"] for actor in ("brim", "original"))
        assert mine["features"] == second["features"]
        assert mine["dataset_size"] == mine["download_size"] == pushed.sent(f"{repo}-brim")


@line("above 50 files")
def test_one_commit(pushed: Pushed) -> None:
    assert len(pushed.hub.history("ada/commits-original")) == 5
    assert pushed.hub.history("ada/commits-brim") == ["Upload dataset", "initial commit"]


REPEATED = """
import sys, datasets, brim
ds = datasets.Dataset.from_dict({"n": list(range(300))})
try:
    if sys.argv[1:] == ["original"]:
        ds.push_to_hub("ada/data", num_shards=3)
    else:
        built = brim.push_to_hub(ds, "ada/data", num_shards=3, progress=False)
        print(built.written, built.kept)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@line("a rerun after a crash")
def test_it_goes_on(tmp_path: Path) -> None:
    """A push that is repeated creates and uploads no shard again."""
    with TestHub(tmp_path / "hub") as hub:
        machine = Machine(hub, tmp_path / "machine")
        hub.faults.add("commit", action="status", status=403)
        assert machine.python(REPEATED, check=False).returncode
        sent = hub.counters.puts
        assert machine.python(REPEATED).stdout == "0 3\n"
        assert (hub.counters.puts, len(hub.files("ada/data"))) == (sent, 3 + 3)


@line("another commit during the upload")
def test_another_commit_during_the_upload(tmp_path: Path) -> None:
    with TestHub(tmp_path / "hub") as hub:
        machine = Machine(hub, tmp_path / "machine")
        hub.create("ada/data")
        hub.faults.add("commit", action="conflict")
        failed = machine.python(f"import sys; sys.argv = ['', 'original']\n{REPEATED}", check=False)
        assert "412" in failed.stderr
        hub.faults.add("commit", action="conflict")
        assert machine.python(REPEATED).stdout == "3 0\n"


@line("`.brim/CONFIG/SPLIT.jsonl`")
def test_files_of_brim(pushed: Pushed) -> None:
    """brim adds one small file per split to the files of the original, and no others."""
    extra = set(pushed.hub.files("ada/many-brim")) - set(pushed.hub.files("ada/many-original"))
    assert extra == {".brim/default/train.jsonl", ".brim/default/test.jsonl", ".brim/b/more.jsonl"}


@line("text of the card")
def test_text_of_a_new_card(pushed: Pushed) -> None:
    assert b"<!-- brim:begin -->" in pushed.hub.read("ada/plain-brim", "README.md")
    assert not pushed.hub.read("ada/plain-original", "README.md").decode().split("---\n")[2].strip()


@line("`dataset_infos.json` of an old repository")
def test_old_infos(pushed: Pushed) -> None:
    sizes = [
        json.loads(pushed.hub.read(f"ada/old-{actor}", "dataset_infos.json"))["default"]["dataset_size"]
        for actor in ("original", "brim")
    ]
    assert sizes == [24, 1]


@line("names of configs and folders")
@pytest.mark.parametrize("name", ["odd-all", "odd-name", "odd-folder"])
def test_plain_names(pushed: Pushed, name: str) -> None:
    assert pushed.said[f"{name}-original"] == "CommitInfo"
    assert "ArgumentError" in pushed.said[f"{name}-brim"]


@line("`buckets/ORG/NAME`")
def test_buckets_by_map(tmp_path: Path) -> None:
    """The destination that the error suggests works with brim.map."""
    code = """
    import datasets, brim
    from huggingface_hub import HfApi
    HfApi().create_bucket("ada/data", private=True)
    ds = datasets.Dataset.from_dict({"n": [1, 2, 3]})
    try:
        brim.push_to_hub(ds, "buckets/ada/data", progress=False)
    except ValueError as error:
        to = str(error).partition("destination='")[2].partition("'")[0]
    assert brim.map(ds, None, destination=to, progress=False, memory="1GB").rows == 3
    assert datasets.load_dataset("buckets/ada/data", split="train")["n"][:] == [1, 2, 3]
    """
    with TestHub(tmp_path / "hub", xet=True) as hub:
        Machine(hub, tmp_path / "machine", more={"HF_HUB_DISABLE_XET": "0"}).python(code)


@line("return value")
def test_what_it_returns(pushed: Pushed) -> None:
    assert (pushed.said["plain-original"], pushed.said["plain-brim"]) == ("CommitInfo", "BuildResult")


@line("errors")
@pytest.mark.parametrize("name", ["data", "both", "split", "size", "splits", "default", "features"])
def test_errors_are_values(pushed: Pushed, name: str) -> None:
    """If the original raises ValueError, brim's error is a ValueError too, and nothing was uploaded."""
    assert "ValueError" in pushed.said[f"bad-{name}-original"]
    assert {"ArgumentError", "ValueError"} <= set(pushed.said[f"bad-{name}-brim"])


@line("positional arguments")
@line("`append=`, `memory=`, `upload_with=`, `state_dir=`, `stop=`, `progress=`")
def test_the_arguments_are_those_of_the_original() -> None:
    """brim has all arguments of `Dataset.push_to_hub`, in order, with their defaults; those of DatasetDict exist by
    name."""
    ours = inspect.signature(brim.push_to_hub).parameters.values()
    for kind in (datasets.Dataset, datasets.IterableDataset):
        theirs = list(inspect.signature(kind.push_to_hub).parameters.values())[1:]
        positional = [p for p in ours if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD][1:]
        assert [(p.name, p.default) for p in positional] == [(p.name, p.default) for p in theirs]
    for several in (datasets.DatasetDict, datasets.IterableDatasetDict):
        assert not inspect.signature(several.push_to_hub).parameters.keys() - {p.name for p in ours} - {"self"}
    own = {p.name for p in ours if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert own == {"append", "memory", "upload_with", "state_dir", "stop", "progress"}


def test_every_line_of_the_table_is_tested() -> None:
    """Every row of the table has a test, and every test names a row."""
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| ")][1:]
    lines = [row.strip("| ").split(" | ")[0] for row in rows]
    assert sorted(lines) == sorted(_tests)

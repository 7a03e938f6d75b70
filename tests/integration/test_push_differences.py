"""What brim.push_to_hub and the original do differently: the table of docs/publish.md, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.hub import TestHub
from tests.publishing import Machine

PUSHED = """
import datasets, brim
from PIL import Image
ds = datasets.Dataset.from_dict({"n": list(range(1000)), "t": ["x" * 100] * 1000}, split="train")
asked = [{}, {"max_shard_size": "30KB"}, {"num_shards": 3}]
for number, options in enumerate(asked):
    ds.push_to_hub(f"ada/original{number}", private=False, **options)
    told = brim.push_to_hub(ds, f"ada/brim{number}", **options)
assert (told.rows, told.shards, told.commits, told.pull_request) == (1000, 3, 1, 0), told
assert brim.push_to_hub(ds, "ada/two", num_proc=2).shards == 2  # as the original counts
many = datasets.DatasetDict({"train": ds, "test": ds.select(range(10))})
for push, repo in ((many.push_to_hub, "ada/many-original"), (lambda r: brim.push_to_hub(many, r), "ada/many-brim")):
    push(repo)
ds.push_to_hub("ada/many-original", config_name="b", split="more")
brim.push_to_hub(ds, "ada/many-brim", config_name="b", split="more")
ds.select(range(20)).push_to_hub("ada/many-original", split="test")
brim.push_to_hub(ds.select(range(20)), "ada/many-brim", split="test")
for bad in ({"config_name": "data"}, {"max_shard_size": "1MB", "num_shards": 2}, {"split": "a b"}):
    for push in (ds.push_to_hub, lambda r, **o: brim.push_to_hub(ds, r, **o)):
        try:
            push("ada/bad", **bad)
        except ValueError as error:
            assert push == ds.push_to_hub or isinstance(error, brim.ArgumentError), error
        else:
            raise AssertionError(bad)
pictures = datasets.Dataset.from_dict({"i": [Image.new("RGB", (8, 8))] * 4}).cast_column("i", datasets.Image())
pictures.push_to_hub("ada/pictures-original")
brim.push_to_hub(pictures, "ada/pictures-brim")
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHub]:
    folder = tmp_path_factory.mktemp("push")
    with TestHub(folder / "hub") as hub:
        Machine(hub, folder / "machine").python(PUSHED)
        yield hub


def card(hub: TestHub, repo: str) -> dict[str, object]:
    found = yaml.safe_load(hub.read(repo, "README.md").decode().split("---\n")[1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("number", range(3))
def test_shards_and_card(hub: TestHub, number: int) -> None:
    """The same names of shards, patterns and `dataset_size`; what is downloaded is what the shards weigh."""
    ours, theirs = (f"ada/{who}{number}" for who in ("brim", "original"))
    names = [name for name in hub.files(ours) if name.endswith(".parquet")]
    assert names == [name for name in hub.files(theirs) if name.endswith(".parquet")]
    mine, other = card(hub, ours), card(hub, theirs)
    assert mine["configs"] == other["configs"]
    info, wanted = mine["dataset_info"], other["dataset_info"]
    assert isinstance(info, dict)
    assert isinstance(wanted, dict)
    for same in ("features", "splits", "dataset_size"):
        assert info[same] == wanted[same]
    assert info["download_size"] == sum(hub.files(ours)[name][0] for name in names)


def test_private_unless_said(hub: TestHub) -> None:
    assert hub.repos.get("datasets", "ada/brim0").private
    assert not hub.repos.get("datasets", "ada/original0").private


def test_splits_and_configs(hub: TestHub) -> None:
    """A split or config that is pushed later is listed as the original lists it, and the sums are right."""
    mine, other = card(hub, "ada/many-brim"), card(hub, "ada/many-original")
    configs = [sorted(fields["configs"], key=str) for fields in (mine, other)]  # type: ignore[call-overload]
    assert configs[0] == configs[1]
    infos = {i["config_name"]: i for i in mine["dataset_info"]}  # type: ignore[attr-defined]
    for wanted in other["dataset_info"]:  # type: ignore[attr-defined]
        found = infos[wanted["config_name"]]
        assert sorted(found["splits"], key=str) == sorted(wanted["splits"], key=str)
        assert found["dataset_size"] == wanted["dataset_size"]
        folder = "data" if wanted["config_name"] == "default" else wanted["config_name"]
        files = hub.files("ada/many-brim").items()
        assert found["download_size"] == sum(size for name, (size, _) in files if name.startswith(f"{folder}/"))


def test_files_of_brim(hub: TestHub) -> None:
    """One small file for each split beside what the original writes, and a text in a new card."""
    extra = set(hub.files("ada/many-brim")) - set(hub.files("ada/many-original"))
    assert extra == {".brim/default/train.jsonl", ".brim/default/test.jsonl", ".brim/b/more.jsonl"}
    assert b"<!-- brim:begin -->" in hub.read("ada/brim0", "README.md")


def test_media(hub: TestHub) -> None:
    """Of media, `dataset_size` is the bytes of the shards, and the features are the same."""
    mine, other = card(hub, "ada/pictures-brim")["dataset_info"], card(hub, "ada/pictures-original")["dataset_info"]
    assert mine["features"] == other["features"]  # type: ignore[index]
    assert mine["dataset_size"] == mine["download_size"]  # type: ignore[index]


def test_the_page_has_the_table() -> None:
    """Each difference is told in docs/publish.md."""
    page = (Path(__file__).parents[2] / "docs" / "publish.md").read_text()
    for words in (
        "a new repository without `private=`",
        "`num_proc`",
        "`.brim/CONFIG/SPLIT.jsonl`",
        "brim.ArgumentError",
    ):
        assert words in page

"""Publishing to repositories with hand-written cards and foreign data: brim neither hides nor breaks them."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml

from tests.conftest import write_files
from tests.hub import TestHub
from tests.publishing import DEST, REPO, Machine, add_files, card, put_by_hand

ROWS = ("--rows-per-shard", "2")


HAND_WRITTEN = """---
# its license
license: 'cc-by-4.0'   # asked in May
configs: []

# two languages
language: [en, "de"]
dataset_info:
  dataset_size: 1
# the last word
tags:
- "a: b"
# the end
---
# Our scans

Prose with trailing blanks.  \n
| a | table |
"""


def test_hand_written_card(hub: TestHub, machine: Machine, source: Path) -> None:
    """A hand-written card keeps its text and its other YAML lines byte for byte, including comments and quotes."""
    hub.create(REPO)
    put_by_hand(hub, {"README.md": HAND_WRITTEN.encode()})
    machine.publish(source)
    once = hub.read(REPO, "README.md").decode()
    assert card(hub)["configs"] == [
        {"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]}
    ]
    assert once.partition("---\n# Our")[2] == HAND_WRITTEN.partition("---\n# Our")[2]
    expected = [line for line in HAND_WRITTEN.splitlines() if line not in ("configs: []", "  dataset_size: 1")]
    remaining = iter(once.splitlines())
    assert [line for line in expected if line not in remaining] == []
    add_files(source, 5, 6)
    machine.publish(source, "--update")
    reread = hub.read(REPO, "README.md").decode()
    assert re.sub(r"\d+", "", reread) == re.sub(r"\d+", "", once)


def test_broken_card(hub: TestHub, machine: Machine, source: Path) -> None:
    """A card with unreadable YAML is an error before anything is uploaded, and the card stays as it is."""
    hub.create(REPO)
    put_by_hand(hub, {"README.md": b"---\na: [1\n---\n"})
    assert "YAML at the top of README.md is not valid" in machine.publish(source, check=2).stderr
    assert hub.counters.puts == hub.counters.commits == 0


@pytest.mark.parametrize(
    ("front", "remaining"),
    [
        ("dataset_info: &x\n  a: 1\nother: *x\n", {"other": {"a": 1}}),
        ("configs: []\nmy key: 1\nfoo.bar: [2]\n", {"my key": 1, "foo.bar": [2]}),
        ("license: mit\n...\n", {"license": "mit"}),
        ("license: mit\r\nx: .nan\r\n", {"license": "mit"}),
        ("configs:\n- data_files: old/*\n", {}),
        ("# a comment\n", {}),
    ],
)
def test_odd_yaml_keeps_what_it_says(
    hub: TestHub, machine: Machine, source: Path, front: str, remaining: object
) -> None:
    """Unusual YAML keeps the values of its other fields, and the dataset gets exactly one config."""
    hub.create(REPO)
    put_by_hand(hub, {"README.md": f"---\n{front}---\n# Ours\n".encode()})
    machine.publish(source)
    actual = card(hub)
    assert [entry["config_name"] for entry in actual.pop("configs")] == ["default"]  # type: ignore[attr-defined]
    assert actual.pop("dataset_info")
    assert {name: value for name, value in actual.items() if value == value} == remaining
    assert ("# a comment" in front) == (b"# a comment" in hub.read(REPO, "README.md"))
    assert hub.read(REPO, "README.md").endswith(b"---\n# Ours\n")


@pytest.mark.parametrize(
    "text", [b"---\ndate: 2024-13-45\n---\n", b"---\na: " + b"[" * 3000 + b"\n---\n", b"H\xe9llo\n"]
)
def test_cards_that_cannot_be_read(hub: TestHub, machine: Machine, source: Path, text: bytes) -> None:
    """A card with an impossible date, endless nesting or another encoding is a clear error, also for `brim verify`."""
    machine.publish(source)
    put_by_hand(hub, {"README.md": text})
    assert "README.md" in machine.publish(source, "--fresh", check=2).stderr
    result = machine.run("verify", DEST)
    assert (result.returncode, "README.md: " in result.stderr) == (3, True), result.stderr


def test_text_between_rules_is_no_yaml(hub: TestHub, machine: Machine, source: Path) -> None:
    """A card that starts with a text between two horizontal rules keeps this text."""
    hub.create(REPO)
    put_by_hand(hub, {"README.md": b"---\njust text\n---\nmore\n"})
    machine.publish(source)
    assert hub.read(REPO, "README.md").endswith(b"---\n---\njust text\n---\nmore\n")


def test_text_around_the_yaml(hub: TestHub, machine: Machine, source: Path) -> None:
    """Publishing keeps all bytes around the fields that brim writes: blank lines, quotes and line endings."""
    hub.create(REPO)
    front = '\r\n"license": \'mit\'\r\nabout: "two\r\n  configs: lines"\r\n'
    body = "\n\n  # Ours \r\n\n'quoted'\n\n\n"
    put_by_hand(hub, {"README.md": f"---\r\n{front}---\r\n{body}".encode()})
    machine.publish(source)
    once = hub.read(REPO, "README.md").decode()
    assert once.startswith(f"---\r\n{front}configs:\n")
    assert once.endswith(f"\n---\r\n{body}")
    add_files(source, 5, 6)
    machine.publish(source, "--update")
    assert re.sub(r"\d+", "", hub.read(REPO, "README.md").decode()) == re.sub(r"\d+", "", once)


UNLISTED = {
    "shards": {"data/train-00000-of-00001.parquet": 3, "data/dev-00000-of-00001.parquet": 2, "notes.csv": 1},
    "folders": {"train/a.parquet": 3, "test/b.parquet": 2, "c.parquet": 1},
    "names": {"my_train.parquet": 3, "eval.1.parquet": 2, "c.parquet": 1},
    "everything": {"a.parquet": 3, "deep/er/b.parquet": 2},
}


@pytest.mark.parametrize(
    "mode", ["shards", *(pytest.param(method, marks=pytest.mark.slow) for method in list(UNLISTED)[1:])]
)
def test_data_without_a_card_is_not_hidden(hub: TestHub, machine: Machine, source: Path, mode: str) -> None:
    """Data in a repository without a card stays loadable by `load_dataset` after another config is published."""
    hub.create(REPO)
    put_by_hand(hub, {name: table_of(rows, name) for name, rows in UNLISTED[mode].items()})
    load = """
        from datasets import load_dataset
        print({name: sorted(split["n"]) for name, split in load_dataset("ada/data").items()})
    """
    before = machine.python(load).stdout
    machine.publish(source, "--config", "extra")
    assert machine.python(load).stdout == before
    count = 'from datasets import load_dataset; print(len(load_dataset("ada/data", "extra", split="train")))'
    assert machine.python(count).stdout == "5\n"


def table_of(rows: int, name: str) -> bytes:
    table = pa.table({"n": [f"{name} {row}" for row in range(rows)]})
    out = io.BytesIO()
    pa.csv.write_csv(table, out) if name.endswith(".csv") else pq.write_table(table, out)
    return out.getvalue()


def test_a_split_beside_data_without_a_card(hub: TestHub, machine: Machine) -> None:
    """Adding a split to data without a card keeps the other splits loadable."""
    hub.create(REPO)
    put_by_hand(hub, {"data/train-00000-of-00001.parquet": table_of(3, "x")})
    machine.python(f"""
        import brim, datasets
        ds = datasets.Dataset.from_dict({{"n": ["one", "two"]}})
        brim.push_to_hub(ds, "{REPO}", split="test")
        counts = {{name: split.num_rows for name, split in datasets.load_dataset("{REPO}").items()}}
        assert counts == {{"train": 3, "test": 2}}, counts
    """)


@pytest.mark.parametrize(
    ("entry", "options", "arguments"),
    [
        ("{config_name: default, data_files: csv/*.csv}", (), "loads 1 other file(s), such as csv/a.csv"),
        ("{config_name: default, data_dir: csv}", ("--split", "test"), "written by hand (it says data_dir)"),
        ("{config_name: default, data_files: csv/*.csv, sep: ;}", ("--split", "test"), "(it says sep)"),
        ("{config_name: default, data_files: csv/*.csv}", ("--split", "test"), "(its files are .csv)"),
        ("{config_name: all, data_files: '**/*.parquet'}", (), "so it would also load the new shards"),
    ],
)
def test_configs_by_hand_are_not_broken(
    hub: TestHub, machine: Machine, source: Path, entry: str, options: tuple[str, ...], arguments: str
) -> None:
    """A hand-written config that publishing would break is refused before anything is uploaded."""
    hub.create(REPO)
    put_by_hand(hub, {"README.md": f"---\nconfigs:\n- {entry}\n---\n".encode(), "csv/a.csv": b"n\n1\n"})
    head = hub.head(REPO)
    result = machine.publish(source, *options, check=2)
    assert arguments in result.stderr
    assert "--config" in result.stderr
    assert (hub.head(REPO), hub.counters.puts) == (head, 0)
    machine.publish(source, "--config", "mine", *options) if "all" not in entry else None


def test_files_with_the_names_of_shards_are_somebodys(hub: TestHub, machine: Machine, source: Path) -> None:
    """Foreign files with the names of planned shards are replaced only with --fresh."""
    hub.create(REPO)
    put_by_hand(hub, {"data/train-00000-of-00001.parquet": table_of(3, "x")})
    head = hub.head(REPO)
    assert "1 foreign file(s) that brim did not write" in machine.publish(source, check=2).stderr
    assert (hub.head(REPO), hub.counters.puts) == (head, 0)
    machine.publish(source, "--fresh")


@pytest.mark.parametrize("repeated", [("--fresh",), ("--update",)])
def test_files_that_two_configs_share(hub: TestHub, machine: Machine, source: Path, repeated: tuple[str, ...]) -> None:
    """Replacing a shard is refused before any upload if a hand-written config loads this shard by its exact name.

    A config that loads the shards by a pattern is allowed.
    """
    machine.publish(source, "--config", "x", *ROWS)
    front = yaml.safe_load(hub.read(REPO, "README.md").decode().split("---\n")[1])
    front["configs"].append({"config_name": "some", "data_files": "x/train-00000-of-00003.parquet"})
    front["configs"].append({"config_name": "every", "data_files": "x/*.parquet"})
    put_by_hand(hub, {"README.md": f"---\n{yaml.safe_dump(front)}---\n".encode()})
    machine.run("verify", DEST).check_returncode()
    add_files(source, 5, 7)
    head, puts = hub.head(REPO), hub.counters.puts
    result = machine.publish(source, "--config", "x", *ROWS, *repeated, check=2)
    assert (
        "The config 'some' of the card loads x/train-00000-of-00003.parquet, which would no longer exist"
        in result.stderr
    )
    assert (hub.head(REPO), hub.counters.puts) == (head, puts)
    front["configs"] = [entry for entry in front["configs"] if entry["config_name"] != "some"]
    put_by_hand(hub, {"README.md": f"---\n{yaml.safe_dump(front)}---\n".encode()})
    machine.publish(source, "--config", "x", *ROWS, *repeated)
    machine.run("verify", DEST).check_returncode()


@pytest.mark.parametrize(
    "message",
    [
        "splits: [{name: train, num_bytes: many, num_examples: few}]",
        "splits: 3",
        "splits: [3, {name: train}]",
    ],
)
def test_numbers_that_are_none(hub: TestHub, machine: Machine, source: Path, message: str) -> None:
    """Invalid sizes of existing splits in a card do not prevent publishing another split."""
    hub.create(REPO)
    front = f"configs:\n- config_name: default\n  data_files:\n    train: x/*.parquet\ndataset_info:\n  {message}\n"
    put_by_hand(hub, {"README.md": f"---\n{front}---\n".encode(), "x/a.parquet": table_of(3, "x")})
    machine.publish(source, "--split", "test")
    assert [entry["split"] for entry in card(hub)["configs"][0]["data_files"]] == ["train", "test"]  # type: ignore[index]


def test_a_config_whose_name_is_a_number(hub: TestHub, machine: Machine, source: Path) -> None:
    """A config whose name is a YAML number is treated as the config with that text as its name."""
    hub.create(REPO)
    front = "configs:\n- config_name: 2024\n  data_files: x/*.parquet\n"
    put_by_hand(hub, {"README.md": f"---\n{front}---\n".encode(), "x/a.parquet": table_of(3, "x")})
    assert (
        "config '2024' of the card loads 1 other file(s)" in machine.publish(source, "--config", "2024", check=2).stderr
    )
    machine.publish(source, "--config", "2025")
    assert [entry["config_name"] for entry in card(hub)["configs"]] == ["2024", "2025"]  # type: ignore[attr-defined]


def test_a_config_that_names_nothing(hub: TestHub, machine: Machine, source: Path) -> None:
    """`brim verify` reports a config of the card that loads no files. It ignores files outside the repository."""
    machine.publish(source, "--config", "x")
    front = yaml.safe_load(hub.read(REPO, "README.md").decode().split("---\n")[1])
    front["configs"] += [
        {"config_name": "far", "data_files": "https://example.org/a.parquet"},
        {"config_name": "below", "data_dir": "gone", "data_files": "a.parquet"},
    ]
    put_by_hand(hub, {"README.md": f"---\n{yaml.safe_dump(front)}---\n".encode()})
    machine.run("verify", DEST).check_returncode()
    front["configs"].append({"config_name": "old", "data_files": [{"split": "test", "path": "y/*.csv"}]})
    put_by_hand(hub, {"README.md": f"---\n{yaml.safe_dump(front)}---\n".encode()})
    result = machine.run("verify", DEST)
    assert (result.returncode, "config 'old' names y/*.csv, and there is no such file" in result.stderr) == (3, True)


@pytest.mark.parametrize("name", ["README.md", "readme.MD", "x" * 201, "data"])
def test_names_that_are_taken(hub: TestHub, machine: Machine, source: Path, name: str) -> None:
    """Config names that equal the card's name or that no file system allows are refused before any request."""
    machine.publish(source, "--config", name, check=2)
    assert not hub.log


def test_a_file_in_the_place_of_a_config(hub: TestHub, machine: Machine, source: Path) -> None:
    hub.create(REPO)
    put_by_hand(hub, {"notes.csv": b"n\n1\n"})
    result = machine.publish(source, "--config", "notes.csv", check=2)
    assert "has a file named notes.csv" in result.stderr
    assert (hub.counters.puts, hub.counters.commits) == (0, 0)


def test_a_repository_that_was_renamed(hub: TestHub, machine: Machine, source: Path, tmp_path: Path) -> None:
    """brim follows the redirect of a renamed repository for every command and prints the new name.

    The redirected requests carry the token, because a private repository requires it.
    """
    machine.publish(source, *ROWS)
    hub.move(REPO, "ada/other")
    add_files(source, 5, 6)
    result = machine.publish(source, *ROWS, "--update")
    assert f"{REPO} is called ada/other now" in result.stderr
    for arguments in (("verify", DEST, str(source)), ("info", DEST), ("unpack", DEST, str(tmp_path / "back"))):
        machine.run(*arguments).check_returncode()
    assert len(list((tmp_path / "back").iterdir())) == 6
    more_files = write_files(tmp_path / "more", {"z.bin": b"z"})
    machine.publish(more_files, "--append")
    assert len([name for name in hub.files("ada/other") if name.startswith("data/")]) == 4


def test_what_a_server_answers_is_not_the_disk(hub: TestHub, machine: Machine, source: Path, tmp_path: Path) -> None:
    """If a repository disappears during `brim unpack`, the error names the repository and not the target folder."""
    machine.publish(source)
    hub.faults.add("resolve", nth=3, times=99, status=404, code="RepoNotFound")
    result = machine.run("unpack", DEST, str(tmp_path / "back"))
    assert (result.returncode, "There is no dataset ada/data on the Hub" in result.stderr) == (2, True), result.stderr

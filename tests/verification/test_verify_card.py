"""`brim verify` compares what the card's `data_files` and `dataset_info` resolve to with the shards."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brim
from brim.errors import BrimError, VerificationError
from tests import forked
from tests.destinations import HubDestination, run
from tests.hub import TestHub

FLIPS = 260


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with files and values of several types. Tests that change its card restore it."""
    folder = tmp_path_factory.mktemp("card")
    lines = ["file,label,n,x"]
    for number in range(12):
        (folder / f"{number}.bin").write_bytes(bytes([number]) * 100)
        lines.append(f"{number}.bin,c{number % 3},{number},{number / 7}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    brim.build(str(folder / "table.csv"), str(folder / "out"), num_shards=2, progress=False)
    return folder / "out"


def findings(folder: Path) -> list[str]:
    """Return the findings of verify, which are empty for a valid dataset."""
    try:
        brim.verify(folder, progress=False)
    except VerificationError as error:
        return list(error.facts["findings"])
    return []


@pytest.mark.long
def test_verify_finds_every_flip_in_the_card_that_breaks_load_dataset(built: Path, tmp_path: Path) -> None:
    """Of 260 single-bit flips in the card's YAML, verify finds all that change or break the result of
    `load_dataset`."""
    import datasets

    card = built / "README.md"
    data = card.read_bytes()
    end, random_places = data.index(b"\n---\n") + 5, random.Random(7)
    passed, broken = 0, []
    try:
        for number in range(FLIPS):
            flipped = bytearray(data)
            position, bit = random_places.randrange(end), random_places.randrange(8)
            flipped[position] ^= 1 << bit
            card.write_bytes(bytes(flipped))
            if findings(built):
                continue
            passed += 1
            try:
                loaded = datasets.load_dataset(str(built), cache_dir=str(tmp_path / str(number)))
                assert {split: len(rows) for split, rows in loaded.items()} == {"train": 12}
            except Exception as error:  # noqa: BLE001  # of whatever kind: it does not load
                broken.append((position, bit, repr(error)))
    finally:
        card.write_bytes(data)
    assert not broken
    assert passed < FLIPS // 2  # some flips are in fields that `datasets` ignores
    assert not findings(built)


CHANGES = {
    "another file name": ("data/train-*", "data/trAin-*", "there is no such file"),
    "a wildcard for the folder": ("data/train", "data?train", "there is no such file"),
    "a double wildcard": ("-*.parquet", "-**parquet", "there is no such file"),
    "one shard of two": ("train-*.parquet", "train-00000-*.parquet", "name 1 of its 2 shards"),
    "another split": ("split: train", "split: test", "names the splits test"),
    "no split": ("split: train", "spliu: train", "must have a `split`"),
    "a number as split": ("split: train", "split: 7", "must have a `split`"),
    "no path": ("    path: data", "    pati: data", "must have a `split`"),
    "no files": ("data_files:", "data_fhles:", "unknown field `data_fhles`"),
    "no name of the config": ("config_name: default", "config_namd: default", "no field `config_name`"),
    "another config": ("config_name: default", "config_name: other", "does not list the shards"),
    "no configs": ("configs:", "cOnfigs:", "does not list the shards"),
    "configs that are a text": ("configs:\n", "configs: some\nothers:\n", "not a list of configs"),
    "another type of a column": ("dtype: int64", "dtype: int32", "says int32 of the column 'n'"),
    "no name of a column": ("- name: label", "- nbme: label", "not a list of columns"),
    "features that are no list": ("  features:\n", "  features: 3\n  others:\n", "not a list of columns"),
    "no rows of a split": ("num_examples:", "num_exampler:", "is not its name, rows and bytes"),
    "rows that are a text": ("num_examples: 12", "num_examples: 1o", "is not its name, rows and bytes"),
    "fewer rows": ("num_examples: 12", "num_examples: 11", "says 11 rows of train"),
    "a split of the info": ("- name: train", "- name: trail", "tells of the splits trail"),
    "a size that is a text": ("download_size: ", "download_size: x", "is not a number"),
    "a field twice": ("dataset_info:", "configs: []\ndataset_info:", "has the field `configs` twice"),
    "no fields at all": ("---\nconfigs", "--,\nconfigs", "does not list the shards"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_verify_names_what_in_the_card_does_not_fit_the_shards(change: str, built: Path) -> None:
    old, new, message = CHANGES[change]
    card = built / "README.md"
    text = card.read_text()
    assert old in text
    card.write_text(text.replace(old, new, 1))
    try:
        assert any(message in finding for finding in findings(built)), findings(built)
    finally:
        card.write_text(text)


@pytest.mark.parametrize("text", ["", "# A title and nothing else\n"], ids=["empty", "no-yaml"])
def test_verify_finds_a_card_without_fields_and_a_build_writes_it_again(
    text: str, many_files: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = many_files(4), tmp_path / "out"
    forked.brim("build", source, out)
    (out / "README.md").write_text(text)
    assert "does not list the shards" in forked.brim("verify", out, check=3).stderr
    forked.brim("build", source, out)
    forked.brim("verify", out)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_verify_compares_the_card_of_a_computed_dataset_and_map_writes_it_again(form: str, tmp_path: Path) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "out"
    source.write_text("".join(f'{{"n": {n}}}\n' for n in range(20)))
    (tmp_path / "doubled.py").write_text("def double(row):\n    return {'n': row['n'] * 2}\n")
    command = ("map", source, out, "--fn", f"{tmp_path}/doubled.py:double", "--format", form, "--workers", "1")
    forked.brim(*command)
    card = out / "README.md"
    text = card.read_text()
    for old, new in (("data/train-", "data/trAin-"), ("dtype: int64", "dtype: int32")):
        card.write_text(text.replace(old, new))
        assert "README.md: " in forked.brim("verify", out, check=3).stderr
    forked.brim(*command)
    assert card.read_text() == text
    forked.brim("verify", out)


def test_verify_compares_the_card_of_a_repository(
    hub: TestHub, many_files: Callable[..., Path], tmp_path: Path
) -> None:
    source, destination = many_files(4), HubDestination(hub, tmp_path / "machine")
    run(destination, "build", source, destination.address)
    card = destination.content()["README.md"]
    for wrong in (b"", card.replace(b"data/train-", b"data/trAin-")):
        destination.plant("README.md", wrong)
        assert "README.md: " in run(destination, "verify", destination.address, check=3).stderr
    run(destination, "build", source, destination.address)
    run(destination, "verify", destination.address)


@pytest.mark.parametrize("lost", [b"", b"not a ledger\n"], ids=["empty", "unreadable"])
def test_verify_finds_a_lost_ledger(lost: bytes, many_files: Callable[..., Path], tmp_path: Path) -> None:
    source, out = many_files(4), tmp_path / "out"
    forked.brim("build", source, out)
    (out / ".brim" / "ledger.jsonl").write_bytes(lost)
    failed = forked.brim("verify", out, check=3).stderr
    assert ".brim/ledger.jsonl: " in failed
    assert "1 problem found" in failed
    (out / ".brim" / "ledger.jsonl").unlink()  # as the error suggests
    forked.brim("verify", out, source)


CARD = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {}\n---\n# Somebody's data\n"


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("a.parquet", "a.parquet"), ("data/a.parquet", "data/*.parquet"), ("deep/er/a.parquet", "**/*.parquet")],
)
def test_verify_passes_an_intact_folder_of_others_whose_card_lists_its_files(
    name: str, pattern: str, tmp_path: Path
) -> None:
    folder = tmp_path / "theirs"
    (folder / name).parent.mkdir(parents=True)
    pq.write_table(pa.table({"n": [1, 2, 3]}), folder / name)
    (folder / "README.md").write_text(CARD.format(f'"{pattern}"'))
    assert brim.verify(folder, progress=False).rows == 3
    (folder / "README.md").write_text("# No fields: `load_dataset` takes what it finds\n")
    assert brim.verify(folder, progress=False).rows == 3
    (folder / "README.md").write_text(CARD.format('"b.parquet"'))
    with pytest.raises(BrimError, match=r"b\.parquet"):
        brim.verify(folder, progress=False)


def test_verify_still_names_files_that_the_card_does_not_list(many_files: Callable[..., Path], tmp_path: Path) -> None:
    source, out = many_files(4), tmp_path / "out"
    forked.brim("build", source, out)
    shutil.rmtree(out / ".brim")
    pq.write_table(pa.table({"n": [1]}), out / "data" / "extra.parquet")
    assert "data/extra.parquet: is not part of the dataset" in forked.brim("verify", out, check=3).stderr

"""The card of a dataset when a split is added to a config that already has other splits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from brim.errors import DestinationError
from brim.formats.card import (
    CardFacts,
    SplitFacts,
    card_info,
    card_splits,
    read_card,
    write_card,
    write_unfinished_card,
)

BY_HAND = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {}\n---\n"


def facts(split: str, *, bare: bool = False) -> CardFacts:
    return CardFacts([SplitFacts(split, 2, 100, 1)], None, ".parquet", [], keep_splits=True, bare=bare)


@pytest.mark.parametrize("bare", [False, True])
def test_beside_one_that_is_listed_with_its_ending(bare: bool) -> None:
    """A new split is added to a card that lists its splits with file endings or without."""
    started_at = write_unfinished_card(write_card(facts("train"), None), split="test")
    assert card_splits(read_card(started_at)) == {"train", "test"}
    content = read_card(write_card(facts("test", bare=bare), started_at))
    assert card_splits(content) == {"train", "test"}
    assert [split["name"] for split in card_info(content)["splits"]] == ["train", "test"]


def test_beside_one_of_which_nothing_is_told() -> None:
    """No split sizes are written if the card has none for an existing split.

    `load_dataset` refuses a split that is listed in `configs` and missing from `dataset_info`.
    """
    content = read_card(write_card(facts("test"), BY_HAND.format("mine/*.parquet")))
    assert card_splits(content) == {"train", "test"}
    assert "splits" not in card_info(content)


def test_beside_files_of_another_kind() -> None:
    """A split of shards cannot be added to a config of CSV files, because a config has only one reader."""
    with pytest.raises(DestinationError, match=r"its files are \.csv"):
        write_card(facts("test", bare=True), BY_HAND.format("mine/*.csv"))


def test_in_the_place_of_files_of_another_kind() -> None:
    """A split of any format can be replaced if the caller asked for it, as `push_to_hub` does."""
    replacing = replace(facts("train", bare=True), replace=True)
    content = read_card(write_card(replacing, BY_HAND.format("mine/*.csv")))
    assert content["configs"] == [
        {"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*"}]}
    ]
    with pytest.raises(DestinationError, match=r"its files are \.csv"):
        write_card(facts("train", bare=True), BY_HAND.format("mine/*.csv"))


def test_another_default_beside_the_config_of_that_name() -> None:
    """A config cannot become the default next to a config named default, because `load_dataset` prefers that name."""
    existing = write_card(facts("train"), None)
    expected = replace(facts("train"), config="x", folder="x", set_default=True)
    with pytest.raises(DestinationError, match="a config named 'default'"):
        write_card(expected, existing)
    (mine,) = read_card(write_card(expected, None))["configs"]
    assert (mine["config_name"], mine["default"]) == ("x", True)

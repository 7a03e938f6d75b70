"""A dataset of `datasets` that brim builds loads like the one that the original `push_to_hub` publishes."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import nibabel
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, Features, IterableDataset, Value

import brim
from benchmarks.peak import measure
from brim.errors import SourceChangedError
from brim.sources.dataset_source import dataset_source
from tests.api import dropin_cases
from tests.api.dropin_cases import CASES, IMAGE, OPTIONS, content, image_rows, make_files, mapped
from tests.conftest import made_once, tree_digest
from tests.hub import TestHub

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.long  # slow, because both publish all cases


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the files of all cases."""
    datasets.disable_progress_bars()
    return made_once(tmp_path_factory, "dropin-source", make_files)


def publish(source: Path, folder: Path, publisher: str) -> None:
    """Publish every case to a Hub with the original or with brim, and download it."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HOME": str(folder / "home"), "HF_TOKEN": "hf_write", "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_UPDATE_DOWNLOAD_COUNTS": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"XDG_STATE_HOME": str(folder / "state")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(brim.__file__).parents[1])])
    with TestHub(folder / "hub") as hub:
        command = [sys.executable, "-m", "tests.api.dropin_cases", str(source), str(folder), publisher]
        result = subprocess.run(
            command,
            env={**environment, "HF_ENDPOINT": hub.endpoint},
            cwd=source,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="session")
def theirs(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cases as published by the original."""
    return made_once(tmp_path_factory, "dropin-theirs", lambda folder: publish(source, folder, "original"))


@pytest.fixture(scope="session")
def ours_from_the_hub(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cases as published by brim.push_to_hub."""
    return made_once(tmp_path_factory, "dropin-ours", lambda folder: publish(source, folder, "brim"))


@pytest.fixture(autouse=True)
def _at_the_source(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in the source folder, so that relative paths resolve."""
    monkeypatch.chdir(source)


def load(folder: Path, cache: Path) -> Any:
    return datasets.load_dataset(str(folder), cache_dir=str(cache))


def values(dataset: Any) -> pa.Table:
    """Return the stored bytes and paths, undecoded."""
    return dataset.with_format("arrow")[:].combine_chunks()


def build(dataset: Any, tmp_path: Path, **options: Any) -> Path:
    reading = {name: options.pop(name) for name in ("split", "embed_external_files") if name in options}
    table = dataset_source(dataset, spill=tmp_path / "spill", **reading)
    brim.plan(table, tmp_path / "ours", allow_empty=True, **options).run()
    return tmp_path / "ours"


EMPTY = ("no_rows", "splits_of_which_one_is_empty")  # `datasets` can publish this case but not load it again


@pytest.mark.parametrize("name", [name for name in CASES if name not in EMPTY])
def test_the_same_as_the_original(name: str, source: Path, theirs: Path, tmp_path: Path) -> None:
    """Splits, features, rows, bytes and paths equal those that `push_to_hub` publishes."""
    ours = load(build(CASES[name](source), tmp_path, **OPTIONS[name]), tmp_path / "cache")
    assert_the_same(ours, load(theirs / name, tmp_path / "cache"))


@pytest.mark.parametrize("name", [name for name in CASES if name not in EMPTY])
def test_push_to_hub_publishes_the_same(name: str, ours_from_the_hub: Path, theirs: Path, tmp_path: Path) -> None:
    """The repository that brim.push_to_hub publishes loads like the one of the original."""
    ours = load(ours_from_the_hub / name, tmp_path / "cache")
    assert_the_same(ours, load(theirs / name, tmp_path / "cache"))


def assert_the_same(ours: Any, original: Any) -> None:
    assert list(ours) == list(original)
    for split in original:
        assert ours[split].features == original[split].features
        got, expected = values(ours[split]), values(original[split])
        assert got.schema == expected.schema
        for column in expected.column_names:
            assert got.column(column).to_pylist() == expected.column(column).to_pylist(), column


@pytest.mark.parametrize("name", EMPTY)
def test_a_split_without_rows_is_published_like_the_original(
    name: str, source: Path, theirs: Path, tmp_path: Path
) -> None:
    """An empty split has a shard of the same name, with the same schema and no rows."""
    ours = build(CASES[name](source), tmp_path, **OPTIONS[name])
    for shard in (theirs / name / "data").iterdir():
        original, built = pq.read_table(shard), pq.read_table(ours / "data" / shard.name)
        assert built.schema.equals(original.schema)
        assert built.num_rows == original.num_rows
        assert Features.from_arrow_schema(built.schema) == Features.from_arrow_schema(original.schema)
    assert brim.verify(ours).findings == []


def test_what_is_mapped_is_not_copied(source: Path, tmp_path: Path) -> None:
    """Values in memory-mapped files and in separate files are not spilled to disk, in any order."""
    notes: list[str] = []
    for dataset in (mapped(source), mapped(source).shuffle(seed=1), dropin_cases.media_as_paths(source)):
        dataset_source(dataset, spill=tmp_path / "spill", note=notes.append)
    assert notes == []
    assert not (tmp_path / "spill").exists()


def test_what_is_only_in_memory_is_spilled_and_told(source: Path, tmp_path: Path) -> None:
    """`note` reports the reason, the number of bytes and the folder, which contains them."""
    notes: list[str] = []
    dataset_source(dropin_cases.media_in_memory(source), spill=tmp_path / "spill", note=notes.append)
    size = sum(path.stat().st_size for path in (tmp_path / "spill").iterdir())
    assert size == sum(len(content(name, n)) for name in dropin_cases.KINDS for n in range(4))
    assert any("spilling the bytes of nifti values" in note for note in notes)
    assert str(tmp_path / "spill") in notes[-1]
    assert "spilled" in notes[-1]


def test_a_mapped_file_that_was_deleted_is_spilled(source: Path, tmp_path: Path) -> None:
    """Bytes in a memory-mapped file that was deleted are still published."""
    shutil.copytree(source / "images", tmp_path / "images")
    dataset = datasets.load_from_disk(tmp_path / "images")
    shutil.rmtree(tmp_path / "images")
    ours = load(build(dataset, tmp_path), tmp_path / "cache")["train"]
    assert values(ours).equals(values(mapped(source)))
    assert list((tmp_path / "spill").iterdir())


def test_the_order_of_a_large_selection_goes_to_disk(tmp_path: Path) -> None:
    """Large values selected by an indices mapping are spilled in order, in batches limited by bytes."""
    texts = [chr(97 + n % 26) * (3_000_000 if n == 7 else 200_000) for n in range(100)]
    dataset = Dataset.from_dict({"id": range(100), "text": texts}).shuffle(seed=3)
    notes: list[str] = []
    table = dataset_source(dataset, spill=tmp_path / "spill", note=notes.append)
    assert "in order" in notes[0]
    assert table.rows.column("id").to_pylist() == dataset["id"][:]
    assert table.rows.column("text").to_pylist() == dataset["text"][:]
    assert table.rows.column("text").num_chunks > 1


def test_a_generator_keeps_its_bytes(source: Path, tmp_path: Path) -> None:
    """Values of a stream are published unchanged: not decoded, not encoded again, with their base names."""
    ours = load(build(dropin_cases.stream_from_a_generator(source), tmp_path), tmp_path / "cache")["train"]
    assert ours.features == Features({"image": datasets.Image(), "pdf": datasets.Pdf()})
    images = values(ours).column("image").to_pylist()
    names = [f"{n}.png" for n in range(5)] + ["0.png", "1.png", "2.png", None, "empty.png"]
    assert [image["path"] for image in images] == names
    assert [image["bytes"] for image in images] == [content("image", n % 5) for n in range(9)] + [b""]


def scans() -> Any:
    for number in range(3):
        volume = nibabel.Nifti1Image(np.full((3, 4, 5), number, np.int16), np.eye(4)).to_bytes()
        yield {"id": number, "scan": {"bytes": gzip.compress(volume, mtime=0), "path": f"sub/{number}.nii.gz"}}


SCANS = Features({"id": Value("int64"), "scan": datasets.Nifti()})


@pytest.mark.parametrize(
    "change",
    [
        lambda stream: stream,
        lambda stream: stream.rename_column("id", "number"),
        lambda stream: stream.remove_columns("id"),
        lambda stream: stream.take(3).with_format("numpy"),
        lambda stream: stream.decode(False).filter(lambda row: True).cast(SCANS),
        lambda stream: datasets.concatenate_datasets([stream, stream]).take(3),
    ],
)
def test_streamed_scans_stay_compressed(change: Any, tmp_path: Path) -> None:
    """NIfTI bytes of a stream stay gzipped and named, also after columns were renamed or removed."""
    stream = change(IterableDataset.from_generator(scans, features=SCANS))
    ours = load(build(stream, tmp_path), tmp_path / "cache")["train"]
    expected = [{**row["scan"], "path": f"{row['id']}.nii.gz"} for row in scans()]
    assert values(ours).column("scan").to_pylist() == expected
    assert ours[2]["scan"].get_fdata().max() == 2


def test_a_stream_that_encodes_anew_says_so(tmp_path: Path) -> None:
    """A filter on decoded media loses the original bytes, and `note` explains how to keep them."""
    notes: list[str] = []
    stream = IterableDataset.from_generator(scans, features=SCANS).filter(lambda row: row["scan"] is not None)
    dataset_source(stream, spill=tmp_path, note=notes.append)
    assert any("decode=False" in note for note in notes)


def test_a_stream_whose_first_rows_are_null(tmp_path: Path) -> None:
    """Types come from the features, not from each row; the original fails in this case."""
    rows = [{"text": None, "list": []}, {"text": "a", "list": [1]}]
    features = Features({"text": Value("string"), "list": datasets.List(Value("int64"))})
    stream = IterableDataset.from_generator(lambda: iter(rows), features=features)
    assert load(build(stream, tmp_path), tmp_path / "cache")["train"][:] == {"text": [None, "a"], "list": [[], [1]]}


def test_a_value_with_neither_bytes_nor_path(tmp_path: Path) -> None:
    """The value is unchanged, neither null nor empty; the original fails in this case."""
    cells = [{"bytes": None, "path": None}, {"bytes": b"x", "path": None}, None]
    rows = pa.table({"image": pa.array(cells, IMAGE.arrow_schema.field("image").type)})
    dataset = Dataset(datasets.table.InMemoryTable(rows)).cast_column("image", datasets.Image())
    ours = load(build(dataset, tmp_path), tmp_path / "cache")["train"]
    assert values(ours).column("image").to_pylist() == cells


def test_a_huge_row_is_one_batch(tmp_path: Path) -> None:
    """Rows larger than a batch are written and read correctly."""
    rows = [{"text": "a" * size} for size in (10, 40_000_000, 0, 20_000_000)]
    stream = IterableDataset.from_generator(lambda: iter(rows), features=Features({"text": Value("string")}))
    ours = load(build(stream, tmp_path), tmp_path / "cache")["train"]
    assert [len(text) for text in ours["text"]] == [10, 40_000_000, 0, 20_000_000]


def test_missing_files_are_refused_before_the_first_byte(source: Path, tmp_path: Path) -> None:
    """All missing files are listed, with the reason."""
    paths = [str(source / "image" / "1.png"), "/nowhere/a.png", str(source / "image"), ""]
    dataset = Dataset.from_dict({"image": paths}, features=Features({"image": datasets.Image()}))
    table = dataset_source(dataset, spill=tmp_path / "spill")
    with pytest.raises(brim.BrimError) as caught:
        brim.plan(table, tmp_path / "ours").run()
    assert {problem["path"] for problem in caught.value.facts["problems"]} == set(paths[1:])


def test_another_selection_of_equal_values_is_another_dataset(tmp_path: Path) -> None:
    """Ranges of one file with equal sizes and no paths are distinguished by their offsets."""
    cells = [{"bytes": bytes([65 + n]) * 100, "path": None} for n in range(10)]
    Dataset.from_dict({"image": cells}, features=Features({"image": datasets.Image()})).save_to_disk(tmp_path / "disk")
    dataset = datasets.load_from_disk(tmp_path / "disk")
    for rows in ([1, 2, 3], [3, 2, 1]):
        ours = load(build(dataset.select(rows), tmp_path), tmp_path / f"cache{rows[0]}")["train"]
        assert [image["bytes"] for image in values(ours).column("image").to_pylist()] == [
            cells[n]["bytes"] for n in rows
        ]


def test_two_builds_give_the_same_bytes(source: Path, tmp_path: Path) -> None:
    """Mapped, in-memory and streamed values give the same shards."""
    dataset = mapped(source)
    sources = [dataset, dataset.select(list(range(20))), Dataset.from_dict(image_rows(20), features=IMAGE)]
    digests = []
    for number, item in enumerate([*sources, dataset.to_iterable_dataset()]):
        digests.append(tree_digest(build(item, tmp_path / str(number)) / "data"))
    assert all(digest == digests[0] for digest in digests)


def test_a_container_that_changed_is_noticed(source: Path, tmp_path: Path) -> None:
    """An Arrow file that changes after planning raises a SourceChangedError that names it."""
    shutil.copytree(source / "images", tmp_path / "images")
    table = dataset_source(datasets.load_from_disk(tmp_path / "images"), spill=tmp_path / "spill")
    plan = brim.plan(table, tmp_path / "ours", allow_empty=True)
    os.utime(tmp_path / "images" / "data-00001-of-00003.arrow", ns=(1, 1))
    with pytest.raises(SourceChangedError, match=r"data-00001-of-00003\.arrow"):
        plan.run()


def _sizes(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "data").iterdir())


def test_num_shards_of_each_split(source: Path, tmp_path: Path) -> None:
    """num_shards may be a number per split; the other splits are cut by size."""
    dataset = DatasetDict({"train": mapped(source), "test": mapped(source, "more"), "extra": mapped(source)})
    ours = build(dataset, tmp_path, num_shards={"train": 3, "extra": 2})
    assert _sizes(ours) == [
        *(f"extra-0000{n}-of-00002.parquet" for n in range(2)),
        "test-00000-of-00001.parquet",
        *(f"train-0000{n}-of-00003.parquet" for n in range(3)),
    ]
    table = dataset_source(dataset, spill=tmp_path / "spill")
    with pytest.raises(brim.BrimError, match="'dev', which does not exist"):
        brim.plan(table, tmp_path / "other", num_shards={"dev": 1})
    with pytest.raises(brim.BrimError, match="above zero"):
        brim.plan(table, tmp_path / "other", num_shards={"train": 0})


@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        (Dataset.from_dict({"a": [1]}, split="train+test"), {}, "'train\\+test' is not the name of a split"),
        (Dataset.from_dict({"a": [1]}, split="train[:10%]"), {}, "is not the name of a split"),
        (Dataset.from_dict({"a": [1]}), {"split": "a b"}, "is not the name of a split"),
        (DatasetDict({"train": Dataset.from_dict({"a": [1]})}), {"split": "test"}, "can only be used with one dataset"),
        (DatasetDict(), {}, "is empty"),
        ({"train": Dataset.from_dict({"a": [1]})}, {}, "This is a dict"),
        (pa.table({"a": [1]}), {}, "This is a Table"),
        (
            DatasetDict({"train": Dataset.from_dict({"a": [1]}), "test": Dataset.from_dict({"a": ["1"]})}),
            {},
            "differ in the column 'a'",
        ),
        (IterableDataset.from_generator(lambda: iter(())), {}, "has no rows, so its columns are unknown"),
        (
            IterableDataset.from_generator(lambda: iter([{"a": "x"}]), features=Features({"a": Value("int64")})),
            {},
            "do not match its features",
        ),
        (
            IterableDataset.from_generator(lambda: iter([{"a": None}] * 2000 + [{"a": "x"}])),
            {},
            "do not match its features",
        ),
    ],
)
def test_what_cannot_be_published_is_said(dataset: Any, options: dict[str, Any], says: str, tmp_path: Path) -> None:
    """Invalid input is an InputError with a message of one sentence."""
    with pytest.raises(brim.BrimError, match=says) as caught:
        dataset_source(dataset, spill=tmp_path, **options)
    assert caught.value.exit_code == 2


def test_a_split_of_datasets_own_type(tmp_path: Path) -> None:
    """`split=` accepts datasets.Split."""
    table = dataset_source(Dataset.from_dict({"a": [1]}), split=datasets.Split.TEST, spill=tmp_path)  # type: ignore[arg-type]
    assert [split.name for split in table.splits] == ["test"]


BASELINE = "import datasets, brim.api, pyarrow.parquet; datasets.Dataset.from_file({arrow!r}).features"
BUILD = """
import pathlib, brim, datasets
from brim.sources.dataset_source import dataset_source
dataset = datasets.Dataset.from_file({arrow!r})
table = dataset_source(dataset.shuffle(seed=1, keep_in_memory=True), spill=pathlib.Path({spill!r}))
build = brim.plan(table, {out!r}, memory="1GB")
print(build.forecast.total, build.run().bytes)
"""


@pytest.mark.slow
def test_memory_of_a_gigabyte_of_media(tmp_path: Path) -> None:
    """Building 1 GB of mapped media takes 50 MB more than the imports (measured: 90 MB), and matches the forecast."""
    features = Features({"image": datasets.Image(), "id": Value("int64")})
    block = np.random.default_rng(0).bytes(500_000)
    batch = {"image": [{"bytes": block, "path": None}] * 100, "id": range(100)}
    rows = pa.table(batch, schema=features.arrow_schema)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
        for _ in range(20):
            writer.write_table(rows)
    names = {"arrow": str(tmp_path / "a.arrow"), "spill": str(tmp_path / "spill"), "out": str(tmp_path / "out")}
    environment = {**os.environ, "PYTHONPATH": str(Path(brim.__file__).parents[1])}
    baseline, built = (
        measure([sys.executable, "-c", code.format(**names)], env=environment) for code in (BASELINE, BUILD)
    )
    assert built.exit_code == 0, built.output
    forecast, size = map(int, built.output.split()[-2:])
    assert size > 1_000_000_000
    assert built.peak_bytes < baseline.peak_bytes + 50_000_000
    assert built.peak_bytes < 1.2 * forecast


TEXT = """
import pathlib, brim, datasets
from brim.sources.dataset_source import dataset_source
table = dataset_source(datasets.Dataset.from_file({arrow!r}), spill=pathlib.Path({spill!r}))
build = brim.plan(table, {out!r}, memory="1GB", workers=2, shard_size="150MB")
print(build.forecast.total, build.run().bytes)
"""


@pytest.mark.slow
def test_memory_of_texts(tmp_path: Path) -> None:
    """Building 400 MB of mapped texts holds one row group instead of a whole shard, and matches the forecast."""
    words = np.random.default_rng(0).integers(97, 123, 4_000_000).astype(np.uint8).tobytes().decode()
    rows = pa.table({"text": [words[n * 4000 : (n + 1) * 4000] for n in range(1000)]})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
        for _ in range(100):
            writer.write_table(rows)
    names = {"arrow": str(tmp_path / "a.arrow"), "spill": str(tmp_path / "spill"), "out": str(tmp_path / "out")}
    environment = {**os.environ, "PYTHONPATH": str(Path(brim.__file__).parents[1])}
    built = measure([sys.executable, "-c", TEXT.format(**names)], env=environment)
    assert built.exit_code == 0, built.output
    forecast = int(built.output.split()[-2])
    assert built.peak_bytes < forecast < 400_000_000

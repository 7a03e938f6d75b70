"""Datasets of `datasets` for the tests of the drop-in, rebuilt from the same folder each time.

Run as a script (`python -m tests.api.dropin_cases FOLDER OUT original|brim`), it publishes every case
with the original `push_to_hub` or with brim's to the Hub that HF_ENDPOINT names, and downloads the
published files below OUT.
"""

from __future__ import annotations

import datetime
import decimal
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict, List, Value

Case = Callable[[Path], Any]
CASES: dict[str, Case] = {}
OPTIONS: dict[str, dict[str, Any]] = {}

KINDS: dict[str, tuple[Any, str]] = {
    "image": (datasets.Image(), "png"),
    "audio": (datasets.Audio(), "wav"),
    "video": (datasets.Video(), "mp4"),
    "pdf": (datasets.Pdf(), "pdf"),
    "nifti": (datasets.Nifti(), "nii.gz"),
    **({"mesh": (datasets.Mesh(), "glb")} if hasattr(datasets, "Mesh") else {}),  # since version 4.8
}
MEDIA = Features({"id": Value("int64"), **{name: feature for name, (feature, _) in KINDS.items()}})
IMAGE = Features({"id": Value("int64"), "image": datasets.Image(), "text": Value("string")})


def content(name: str, number: int) -> bytes:
    """Return bytes that no code decodes, because the drop-in ignores them. Those of scans begin like gzip's."""
    seed = [number, *name.encode()]
    head = b"\x1f\x8b" if name == "nifti" else b""
    return head + np.random.default_rng(seed).bytes(400 + 37 * number)


def make_files(folder: Path) -> None:
    """Write the files that the cases refer to."""
    for name, (_, extension) in KINDS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(6):
            (folder / name / f"{number}.{extension}").write_bytes(content(name, number))
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        archive.write(folder / "image" / "1.png", "inside/1.png")
    (folder / "seq.fasta").write_bytes(b">a\nACGT\n")
    save(folder, "media", media_in_memory(folder))
    save(folder, "images", Dataset.from_dict(image_rows(20), features=IMAGE))
    save(folder, "more", Dataset.from_dict(image_rows(7, first=100), features=IMAGE))
    Dataset.from_dict(image_rows(20), features=IMAGE).to_parquet(folder / "images.parquet")


def save(folder: Path, name: str, dataset: Any) -> None:
    dataset.save_to_disk(folder / name, num_shards=3)


def mapped(folder: Path, name: str = "images") -> Any:
    return datasets.load_from_disk(folder / name)


def media_rows(folder: Path, with_bytes: bool) -> dict[str, list[Any]]:
    """Return six rows of every kind of media: the last is null; among rows with bytes, some have no path and one is
    empty."""
    rows: dict[str, list[Any]] = {"id": list(range(6))}
    for name, (_, extension) in KINDS.items():
        paths = [str(folder / name / f"{number}.{extension}") for number in range(5)]
        values: list[Any] = [{"bytes": None, "path": path} for path in paths]
        if with_bytes:
            values = [{"bytes": content(name, n), "path": f"deep/er/{n}.{extension}"} for n in range(3)]
            values += [{"bytes": content(name, 3), "path": None}, {"bytes": b"", "path": f"empty.{extension}"}]
        rows[name] = [*values, None]
    return rows


def media_dataset(rows: dict[str, list[Any]]) -> Any:
    """Create a dataset without encoding the values, for which `datasets` needs torch."""
    return Dataset(datasets.table.InMemoryTable(pa.table(rows, schema=MEDIA.arrow_schema)))


def image_rows(count: int, first: int = 0) -> dict[str, list[Any]]:
    numbers = range(first, first + count)
    images = [{"bytes": content("image", n), "path": None if n % 3 == 0 else f"{n}.png"} for n in numbers]
    return {"id": list(numbers), "image": images, "text": [f"text {n}" * (n % 5) for n in numbers]}


def case(**options: Any) -> Callable[[Case], Case]:
    def keep(make: Case) -> Case:
        CASES[make.__name__] = make
        OPTIONS[make.__name__] = options
        return make

    return keep


@case()
def media_as_paths(folder: Path) -> Any:
    return media_dataset(media_rows(folder, with_bytes=False))


@case()
def media_in_memory(folder: Path) -> Any:
    return media_dataset(media_rows(folder, with_bytes=True))


@case()
def media_mapped(folder: Path) -> Any:
    return mapped(folder, "media")


@case()
def paths_and_bytes_in_one_column(folder: Path) -> Any:
    return datasets.concatenate_datasets([media_as_paths(folder), media_mapped(folder), media_in_memory(folder)])


@case(embed_external_files=False)
def nothing_embedded(folder: Path) -> Any:
    return paths_and_bytes_in_one_column(folder)


@case()
def undecoded(folder: Path) -> Any:
    dataset = media_as_paths(folder)
    return dataset.cast_column("image", datasets.Image(decode=False, mode="RGB")).cast_column(
        "audio", datasets.Audio(sampling_rate=16000, decode=False)
    )


@case()
def addresses_and_relative_paths(folder: Path) -> Any:
    paths = [f"zip://inside/1.png::{folder}/images.zip", "image/3.png", str(folder / "image" / "2.png")]
    return Dataset.from_dict({"image": [*paths, paths[0]]}, features=Features({"image": datasets.Image()}))


def image_values(folder: Path) -> tuple[list[Any], list[Any]]:
    """Return six images as paths and six with bytes."""
    paths = [{"bytes": None, "path": str(folder / "image" / f"{n}.png")} for n in range(6)]
    return paths, [{"bytes": content("image", n), "path": f"a/{n}.png"} for n in range(6)]


@case()
def lists_of_media(folder: Path) -> Any:
    path, byte = image_values(folder)
    rows = [[path[0], byte[1]], [], None, [byte[2], None, path[3]], [path[4]], [byte[5]] * 3]
    features = Features(
        {
            "list": List(datasets.Image()),
            "large": datasets.LargeList(datasets.Image()),
            "sequence": datasets.Sequence(datasets.Image()),
            "pair": List(datasets.Image(), length=2),
        }
    )
    pairs = [[path[0], byte[1]], [byte[1], byte[2]]] * 3
    return Dataset.from_dict({"list": rows, "large": rows, "sequence": rows, "pair": pairs}, features=features)


@case()
def shuffled_lists_of_media(folder: Path) -> Any:
    rows = [[{"bytes": content("image", n), "path": f"{i}.png"} for i in range(n % 4)] or None for n in range(12)]
    dataset = Dataset.from_dict({"l": rows}, features=Features({"l": List(datasets.Image())}))
    return dataset.shuffle(seed=3).select([5, 2, 2, 11, 0])


@case()
def media_deep_inside(folder: Path) -> Any:
    path, byte = image_values(folder)
    features = Features(
        {
            "dict": {"picture": datasets.Image(), "n": Value("int32"), "deeper": {"scan": datasets.Nifti()}},
            "lists": List(List(datasets.Image())),
            "dicts": List({"picture": datasets.Image(), "n": Value("int32")}),
            "old": datasets.Sequence({"picture": datasets.Image(), "n": Value("int32")}),
        }
    )
    scan = str(folder / "nifti" / "1.nii.gz")
    rows = {
        "dict": [
            {"picture": path[0], "n": 1, "deeper": {"scan": scan}},
            {"picture": byte[1], "n": None, "deeper": None},
        ],
        "lists": [[[path[0], byte[1]], [], None], []],
        "dicts": [[{"picture": path[2], "n": 1}, {"picture": None, "n": 2}], []],
        "old": [{"picture": [path[3], byte[4]], "n": [1, 2]}, {"picture": [], "n": []}],
    }
    return Dataset.from_dict(rows, features=features)


@case()
def selected(folder: Path) -> Any:
    return mapped(folder).select([17, 3, 3, 0, 19])


@case()
def sliced(folder: Path) -> Any:
    return mapped(folder).select(range(5, 15)).skip(2).take(6)


@case()
def shuffled(folder: Path) -> Any:
    return mapped(folder).shuffle(seed=5)


@case()
def sharded(folder: Path) -> Any:
    return mapped(folder).shard(num_shards=3, index=1, contiguous=False)


@case()
def filtered(folder: Path) -> Any:
    return mapped(folder).filter(lambda i: i % 3 == 1, input_columns=["id"])


@case()
def sorted_and_flattened(folder: Path) -> Any:
    return mapped(folder).sort("id", reverse=True).flatten_indices()


@case()
def concatenated(folder: Path) -> Any:
    parts = [mapped(folder), mapped(folder, "more"), Dataset.from_dict(image_rows(4, first=50), features=IMAGE)]
    return datasets.concatenate_datasets(parts).shuffle(seed=1)


@case()
def side_by_side(folder: Path) -> Any:
    second = mapped(folder).rename_columns({"id": "id2", "image": "image2", "text": "text2"})
    return datasets.concatenate_datasets([mapped(folder), second.shuffle(seed=2)], axis=1)


@case()
def columns_changed(folder: Path) -> Any:
    dataset = mapped(folder).rename_column("image", "picture").remove_columns("id")
    paths = [str(folder / "image" / f"{n % 6}.png") for n in range(20)]
    dataset = dataset.add_column("later", paths).cast_column("later", datasets.Image())
    return dataset.select_columns(["later", "text", "picture"])


@case()
def mapped_by_a_function(folder: Path) -> Any:
    return mapped(folder).map(lambda i: {"double": 2 * i}, input_columns=["id"])


@case()
def formatted(folder: Path) -> Any:
    return mapped(folder).with_format("numpy", columns=["id"])


@case()
def transformed(folder: Path) -> Any:
    return mapped(folder).with_transform(lambda batch: {"nothing": [0] * len(batch["id"])})


@case(num_shards={"train": 3, "test": 1})
def splits(folder: Path) -> Any:
    return DatasetDict(mapped(folder).train_test_split(test_size=0.3, seed=4))


@case()
def splits_of_which_one_is_empty(folder: Path) -> Any:
    return DatasetDict({"validation": mapped(folder), "train": mapped(folder).select([])})


@case(split="eval.v1")
def another_split(folder: Path) -> Any:
    return mapped(folder).select(range(3))


@case()
def no_rows(folder: Path) -> Any:
    return mapped(folder, "media").select([])


@case(num_shards=3)
def every_other_feature(folder: Path) -> Any:
    day = datetime.datetime(2026, 1, 2, 3, 4, 5, 6)
    columns: dict[str, tuple[Any, list[Any]]] = {
        "label": (datasets.ClassLabel(names=["cat", "dog"]), [0, 1, None]),
        "matrix": (datasets.Array2D((2, 3), "float32"), [np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)]),
        "ragged": (datasets.Array3D((None, 2, 2), "uint8"), [np.ones((n, 2, 2), np.uint8) for n in (1, 3)]),
        "json": (datasets.Json(), [{"a": [1, {"b": None}]}, None, "text"]),
        "jsons": (List(datasets.Json()), [[{"b": 0}, {"c": 0}], [], None]),
        "view": (Value("string_view"), ["short", "a text that is longer than a view", None]),
        "large": (Value("large_string"), ["x" * 50, "", None]),
        "raw": (Value("large_binary"), [b"\x00\xff", b"", None]),
        "when": (Value("timestamp[us, tz=UTC]"), [day, None]),
        "date": (Value("date32"), [day.date(), None]),
        "price": (Value("decimal128(8, 2)"), [decimal.Decimal("1.10"), None]),
        "half": (Value("float16"), [np.float16(1.5), np.float16(-2)]),
        "flag": (Value("bool"), [True, None, False]),
        "null": (Value("null"), [None]),
        "vector": (List(Value("float32"), length=3), [[1.0, 2.0, 3.0], [0.5, 0.25, 0.125]]),
        "views": (List(Value("string_view")), [["a", None], None, []]),
        "nested": (
            {"a": {"b": [{"c": Value("string")}]}, "d": List(Value("int8"))},
            [{"a": {"b": []}, "d": [1]}, None],
        ),
        "tokens": (datasets.LargeList(Value("int32")), [[1, 2, 3], [], None]),
    }
    features = Features({name: feature for name, (feature, _) in columns.items()})
    return Dataset.from_dict({name: (values * 7)[:7] for name, (_, values) in columns.items()}, features=features)


@case()
def every_other_feature_shuffled(folder: Path) -> Any:
    return every_other_feature(folder).shuffle(seed=6)


@case()
def translations(folder: Path) -> Any:
    features = Features(
        {
            "pair": datasets.Translation(["en", "fr"]),
            "many": datasets.TranslationVariableLanguages(languages=["en", "fr"]),
        }
    )
    pairs = [{"en": "dog", "fr": "chien"}, {"en": "cat", "fr": None}]
    return Dataset.from_dict({"pair": pairs, "many": [{"en": "dog", "fr": ["chien", "toutou"]}] * 2}, features=features)


@case()
def sequences_of_life(folder: Path) -> Any:
    features = Features({"fasta": datasets.BioSequence()})
    return Dataset.from_dict({"fasta": [str(folder / "seq.fasta")] * 2}, features=features)


@case()
def stream_from_a_dataset(folder: Path) -> Any:
    return mapped(folder).to_iterable_dataset(num_shards=2)


@case()
def stream_from_parquet(folder: Path) -> Any:
    return datasets.load_dataset("parquet", data_files=str(folder / "images.parquet"), split="train", streaming=True)


def generate(folder: str) -> Any:
    for with_bytes in (False, True):
        rows = media_rows(Path(folder), with_bytes)
        for number in range(5):
            yield {name: rows[name][number] for name in ("image", "pdf")}


def stream_from_a_generator(folder: Path) -> Any:
    """Not a case, because the original decodes and encodes the values of a generator."""
    features = Features({"image": datasets.Image(), "pdf": datasets.Pdf()})
    return IterableDataset.from_generator(generate, features=features, gen_kwargs={"folder": str(folder)})


@case()
def stream_without_features(folder: Path) -> Any:
    return IterableDataset.from_generator(generate_plain, gen_kwargs={"count": 30})


def generate_plain(count: int) -> Any:
    for number in range(count):
        yield {"id": number, "text": f"row {number}", "list": [number] * (1 + number % 3)}


@case()
def formatted_stream(folder: Path) -> Any:
    return stream_without_features(folder).with_format("numpy")


@case()
def streams(folder: Path) -> Any:
    return IterableDatasetDict(
        {"train": stream_from_parquet(folder), "test": mapped(folder, "more").to_iterable_dataset()}
    )


def main(folder: Path, out: Path, publisher: str) -> None:
    from huggingface_hub import snapshot_download

    import brim

    datasets.disable_progress_bars()
    for name, make in CASES.items():
        dataset, repo = make(folder), f"ada/{name}"
        if publisher == "brim":
            brim.push_to_hub(dataset, repo, **OPTIONS[name])
        else:
            dataset.push_to_hub(repo, **OPTIONS[name])
        snapshot_download(f"ada/{name}", repo_type="dataset", local_dir=out / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])

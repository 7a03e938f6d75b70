"""Functions and datasets for which map must give the result of `Dataset.map`."""

from __future__ import annotations

import datetime
import inspect
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import nibabel
import numpy as np
import pandas as pd
import PIL.Image
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Array2D, ClassLabel, Dataset, Features, Image, LargeList, List, Nifti, Value

TAKES_MIXED = "on_mixed_types" in inspect.signature(Dataset.map).parameters  # since datasets 4.7


@dataclass(frozen=True)
class Case:
    name: str
    data: Callable[[], Dataset]
    function: Callable[..., Any] | None
    options: dict[str, Any] = field(default_factory=dict)


def plain() -> Dataset:
    """Return numbers, text, lists, structs and nulls: 23 rows."""
    rows = range(23)
    return Dataset.from_dict(
        {
            "n": list(rows),
            "x": [i / 4 if i % 5 else None for i in rows],
            "text": [f"word {i} " * (i % 3) for i in rows],
            "tags": [[f"t{j}" for j in range(i % 4)] if i % 7 else None for i in rows],
            "box": [{"w": i, "names": ["a"] * (i % 2)} for i in rows],
        }
    )


def typed() -> Dataset:
    """Return types that inference would not choose."""
    features = Features(
        {
            "small": Value("int32"),
            "half": Value("float32"),
            "big": Value("large_string"),
            "day": Value("date32"),
            "at": Value("timestamp[s]"),
            "ids": List(Value("int16")),
            "many": LargeList(Value("int64")),
            "pair": List(Value("float32"), length=2),
            "raw": Value("binary"),
            "label": ClassLabel(names=["no", "yes"]),
        }
    )
    rows = range(12)
    day = datetime.date(2020, 1, 1)
    return Dataset.from_dict(
        {
            "small": list(rows),
            "half": [i + 0.5 for i in rows],
            "big": [str(i) for i in rows],
            "day": [day + datetime.timedelta(days=i) for i in rows],
            "at": [datetime.datetime(2021, 1, 1 + i) for i in rows],
            "ids": [list(range(i)) for i in rows],
            "many": [[i, None] for i in rows],
            "pair": [[i, -i] for i in rows],
            "raw": [bytes([i]) for i in rows],
            "label": [i % 2 for i in rows],
        },
        features=features,
    )


def images() -> Dataset:
    def png(i: int) -> dict[str, Any]:
        file = io.BytesIO()
        PIL.Image.new("RGB", (4 + i, 3), (i * 20, 0, 9)).save(file, "PNG")
        return {"bytes": file.getvalue(), "path": f"{i}.png"}

    return Dataset.from_dict(
        {"image": [png(i) if i != 3 else None for i in range(6)], "n": list(range(6))},
        features=Features({"image": Image(), "n": Value("int64")}),
    )


def volumes() -> Dataset:
    def nii(i: int) -> dict[str, Any]:
        return {"bytes": nibabel.Nifti1Image(np.full((2, 2, 2), i, np.int16), np.eye(4)).to_bytes(), "path": f"{i}.nii"}

    return Dataset.from_dict(
        {"scan": [nii(i) for i in range(4)], "n": list(range(4))},
        features=Features({"scan": Nifti(), "n": Value("int64")}),
    )


def matrices() -> Dataset:
    return Dataset.from_dict(
        {"m": [np.full((2, 3), i, "float32").tolist() for i in range(5)], "n": list(range(5))},
        features=Features({"m": Array2D((2, 3), "float32"), "n": Value("int64")}),
    )


def formatted(kind: str, **options: Any) -> Callable[[], Dataset]:
    return lambda: plain().select_columns(["n", "x", "text"]).with_format(kind, **options)


def numbers() -> Dataset:
    return plain().select_columns(["n", "x"])


# functions that need more than an expression


def in_place(row: Any) -> Any:
    row["n"] = row["n"] * 2
    row["new"] = "yes"
    return row


def in_place_and_return(row: Any) -> dict[str, Any]:
    row["text"] = "changed"
    del row["box"]
    return {"new": len(row["tags"] or [])}


def batch_changed_in_place(batch: Any) -> dict[str, Any]:
    batch["n"][1] = 77
    return {"m": [len(batch["n"])] * len(batch["n"])}


def batch_only_read(batch: Any) -> dict[str, Any]:
    return {"m": [n for n in batch["n"]]}  # noqa: C416


def batch_removed_and_set_again(batch: Any) -> dict[str, Any]:
    retained = batch["n"]
    del batch["n"]
    batch["n"] = retained
    return {}


def list_in_place(row: Any) -> dict[str, Any]:
    if row["tags"] is not None:
        row["tags"].append("more")
    return {}


def group(batch: Any) -> dict[str, list[Any]]:
    text = "".join(batch["text"])
    return {"piece": [text[i : i + 10] for i in range(0, len(text), 10)]}


def double_rows(batch: Any) -> dict[str, list[Any]]:
    return {name: [value for value in batch[name] for _ in range(2)] for name in batch}


def keep_odd(batch: Any) -> dict[str, list[Any]]:
    keep = [i for i, n in enumerate(batch["n"]) if n % 2]
    return {name: [batch[name][i] for i in keep] for name in batch}


def arrow_batch(table: pa.Table) -> pa.Table:
    return table.append_column("twice", pc.multiply(table["n"], 2)).drop_columns(["text"])


def pandas_batch(frame: pd.DataFrame) -> pd.DataFrame:
    frame["twice"] = frame["n"] * 2
    return frame


def flip(row: Any) -> dict[str, Any]:
    return {"image": None if row["image"] is None else row["image"].transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT)}


def tokens(batch: Any) -> dict[str, list[list[int]]]:
    ids = [[len(value) for value in text.split()] for text in batch["text"]]
    return {
        "input_ids": ids,
        "attention_mask": [[1] * len(i) for i in ids],
        "token_type_ids": [[0] * len(i) for i in ids],
    }


REPEATED: dict[str, Any] = {}


def same_dict(row: Any) -> dict[str, Any]:
    REPEATED["y"] = row["n"]
    return REPEATED


def transformed() -> Dataset:
    return plain().select_columns(["n", "text"]).with_transform(lambda b: {"n": [-n for n in b["n"]], "z": b["text"]})


async def slowly(row: Any) -> dict[str, Any]:
    return {"y": row["n"] + 1}


C = Case
ROW_CASES = [
    C("adds a column", plain, lambda r: {"y": r["n"] + 1}),
    C("replaces a column", plain, lambda r: {"text": r["text"].upper()}),
    C("changes a type", plain, lambda r: {"n": str(r["n"]) + "!"}),
    C("digits in a number column", plain, lambda r: {"n": str(r["n"])}),
    C("number to float", plain, lambda r: {"n": r["n"] / 8}),
    C("whole floats in an integer column", plain, lambda r: {"n": float(r["n"])}),
    C("number in a text column", plain, lambda r: {"text": r["n"]}),
    C("all None", plain, lambda r: {"text": None}),
    C("new column of None", plain, lambda r: {"y": None}),
    C("None for some", plain, lambda r: {"y": r["n"] if r["n"] > 15 else None}),
    C("int then float", plain, lambda r: {"y": r["n"] if r["n"] < 15 else r["n"] + 0.5}),
    *([C("mixed numbers and text", plain, lambda r: {"y": r["n"] if r["n"] % 2 else "odd"})] if TAKES_MIXED else []),
    C("empty lists then values", plain, lambda r: {"y": [] if r["n"] < 12 else [r["n"]]}),
    C("nothing", plain, lambda r: None),
    C("nothing, with columns to remove", plain, lambda r: None, {"remove_columns": ["n"]}),
    C("empty dict", plain, lambda r: {}),
    C("empty dict, reads all", plain, lambda r: {} if dict(r) else None),
    C("no function", plain, None),
    C("in place", plain, in_place),
    C("in place, another dict", plain, in_place_and_return),
    C("a list in place", plain, list_in_place),
    C("in place, removed", plain, in_place, {"remove_columns": ["n", "box"]}),
    C("spread", plain, lambda r: {**r, "y": 1}),
    C("spread, removed", plain, lambda r: {**r, "y": 1}, {"remove_columns": ["tags"]}),
    C("or", plain, lambda r: r | {"y": r["n"]}),
    C("or from the right", plain, lambda r: {"y": 1} | r),
    C("copy", plain, lambda r: r.copy()),
    C("remove one", plain, lambda r: {"y": r["n"]}, {"remove_columns": "text"}),
    C("remove all", plain, lambda r: {"y": r["n"]}, {"remove_columns": ["n", "x", "text", "tags", "box"]}),
    C("removed but returned", plain, lambda r: {"n": r["n"] + 1}, {"remove_columns": ["n", "x"]}),
    C("indices", plain, lambda r, i: {"i": i * 10}, {"with_indices": True}),
    C("input columns", plain, lambda n, text: {"y": f"{n}{text}"}, {"input_columns": ["n", "text"]}),
    C("input columns, removed", plain, lambda n: {"n": n * 2}, {"input_columns": "n", "remove_columns": ["n", "x"]}),
    C("input columns and indices", plain, lambda n, i: {"y": n - i}, {"input_columns": ["n"], "with_indices": True}),
    C("kwargs", plain, lambda r, k: {"y": r["n"] * k}, {"fn_kwargs": {"k": 3}}),
    C("nested", plain, lambda r: {"y": {"a": [r["n"], None], "b": {"c": r["text"]}}}),
    C("dicts with other keys", plain, lambda r: {"y": {"a": 1} if r["n"] % 2 else {"b": 2}}),
    C("dicts with other keys, late", plain, lambda r: {"y": {"a": 1} if r["n"] < 17 else {"b": 2}}),
    C("list of dicts", plain, lambda r: {"y": [{"role": "u", "k": None}, {"role": "b", "k": r["n"]}]}),
    C("struct in place of struct", plain, lambda r: {"box": {"w": 1.5, "names": []}}),
    C("struct with a field missing", plain, lambda r: {"box": {"w": 7}}),
    C("struct with a field more", plain, lambda r: {"box": {"w": 7, "names": ["a"], "z": 1}}),
    C("tuples", plain, lambda r: {"y": (r["n"], 2)}),
    C(
        "bytes and dates",
        plain,
        lambda r: {"b": b"x", "d": datetime.date(2020, 1, 1), "t": datetime.datetime(2020, 1, 2)},
    ),
    C("token ids", plain, lambda r: {"input_ids": [1, r["n"]], "attention_mask": [1, 1]}),
    C(
        "token ids that do not fit",
        plain,
        lambda r: {"input_ids": [2**40 if r["n"] == 20 else 1], "attention_mask": 300},
    ),
    C("numpy scalars", plain, lambda r: {"a": np.int16(r["n"]), "b": np.float32(1), "c": np.bool_(True)}),
    C("numpy vectors", plain, lambda r: {"v": np.arange(r["n"], dtype="int32")}),
    C("numpy matrices", plain, lambda r: {"v": np.ones((2, 3), "float32") * r["n"]}),
    C("numpy vectors and None", plain, lambda r: {"v": np.ones(3) if r["n"] % 3 else None}),
    C("lists of numpy vectors", plain, lambda r: {"v": [np.ones(2), np.zeros(3)]}),
    C("lists of numpy matrices", plain, lambda r: {"v": [np.ones((2, 2)), np.zeros((1, 3))]}),
    C("numpy vector for a list column", plain, lambda r: {"tags": np.array(["a", "b"])}),
    C("pandas timestamps", plain, lambda r: {"t": pd.Timestamp("2020-01-01") + pd.Timedelta(days=r["n"])}),
    C("arrow row", plain, lambda r: pa.table({"a": [r["n"]]})),
    C("pandas row", plain, lambda r: pd.DataFrame({"a": [r["n"]], "b": ["x"]})),
    C("async", plain, slowly),
    C("the same dict again", plain, same_dict),
    C("format of one's own", transformed, lambda r: {"y": r["n"], "k": sorted(r)}),
    C("typed, untouched", typed, lambda r: {"y": 1}),
    C("typed, all read", typed, lambda r: dict(r)),
    C("typed, changed", typed, lambda r: {"small": r["small"] + 1, "half": 1, "big": "z", "ids": [5], "pair": [1, 2]}),
    C("typed, does not fit", typed, lambda r: {"small": 2**40, "ids": [10**6], "pair": [1, 2, 3], "raw": "text"}),
    C("typed, from arrays", typed, lambda r: {"ids": np.arange(3), "half": np.float64(2), "many": np.ones(2)}),
    C("label by name", typed, lambda r: {"label": "yes"}),
    C("label by number", typed, lambda r: {"label": 1 - r["label"]}),
    C("label to text", typed, lambda r: {"label": None}),
    C(
        "features",
        numbers,
        lambda r: {"y": r["n"]},
        {"features": Features({"n": Value("int8"), "x": Value("string"), "y": Value("string")})},
    ),
    C(
        "features with labels",
        numbers,
        lambda r: {"n": "b"},
        {"features": Features({"n": ClassLabel(names=["a", "b"]), "x": Value("float64")})},
    ),
    C(
        "features with arrays",
        numbers,
        lambda r: {"m": [[1, 2]]},
        {"features": Features({"n": Value("int64"), "x": Value("float64"), "m": Array2D((1, 2), "int32")})},
    ),
    C("image, untouched", images, lambda r: {"y": r["n"]}),
    C("image, read", images, lambda r: {"width": r["image"].width if r["image"] else None}),
    C("image, changed", images, flip),
    C(
        "image, removed",
        images,
        lambda r: {"size": r["image"].size if r["image"] else None},
        {"remove_columns": ["image"]},
    ),
    C("image, made", plain, lambda r: {"image": PIL.Image.new("L", (2, 2), r["n"])}),
    C("image, made for some", plain, lambda r: {"image": PIL.Image.new("L", (2, 2), r["n"]) if r["n"] > 12 else None}),
    C("images, lists made", plain, lambda r: {"images": [PIL.Image.new("L", (2, 2), 5)] * 2}),
    C("image as input column", images, lambda image: {"w": image.width if image else -1}, {"input_columns": "image"}),
    C("volume, read", volumes, lambda r: {"mean": float(r["scan"].get_fdata().mean())}, {"remove_columns": ["scan"]}),
    C("volume, untouched", volumes, lambda r: {"y": r["n"]}),
    C("matrix, untouched", matrices, lambda r: {"y": r["n"]}),
    C("matrix, changed", matrices, lambda r: {"m": (np.array(r["m"]) * 2)}),
    C("matrix, read", matrices, lambda r: {"s": float(np.sum(r["m"]))}),
    C("format numpy", formatted("numpy"), lambda r: {"y": r["n"] * 2, "k": type(r["n"]).__name__}),
    C("format numpy with columns", formatted("numpy", columns=["n"]), lambda r: {"y": r["n"], "k": sorted(r)}),
    C("format pandas", formatted("pandas"), lambda r: {"y": int(r["n"].iloc[0])}),
    C("format arrow", formatted("arrow"), lambda r: r.append_column("y", r["n"])),
]

B: dict[str, Any] = {"batched": True, "batch_size": 5}
BATCH_CASES = [
    C("batch adds", plain, lambda b: {"y": [n + 1 for n in b["n"]]}, B),
    C("batch replaces", plain, lambda b: {"text": [t.upper() for t in b["text"]]}, B),
    C("batch nothing", plain, lambda b: None, B),
    C("batch no function", plain, None, B),
    C("batch, a list changed", plain, batch_changed_in_place, B),
    C("batch, a list only read", plain, batch_only_read, B),
    C("batch, a list that was away", plain, batch_removed_and_set_again, B),
    C("batch in place", plain, lambda b: b | {"n": [-n for n in b["n"]]}, B),
    C("batch spread", plain, lambda b: dict(b), B),
    C("batch groups", plain, group, B | {"remove_columns": ["n", "x", "text", "tags", "box"]}),
    C(
        "batch groups of all",
        plain,
        group,
        {"batched": True, "batch_size": None, "remove_columns": ["n", "x", "text", "tags", "box"]},
    ),
    C("batch of all, by zero", plain, lambda b: {"y": [len(b["n"])] * len(b["n"])}, {"batched": True, "batch_size": 0}),
    C("batch doubles rows", plain, double_rows, B),
    C("batch drops rows", plain, keep_odd, B),
    C("batch drops all but some", plain, lambda b: keep_odd(b) if 7 in b["n"] else {k: [] for k in b}, B),
    C("batch indices", plain, lambda b, i: {"i": i}, B | {"with_indices": True}),
    C("batch indices, last dropped", plain, lambda b, i: {"i": i}, B | {"with_indices": True, "drop_last_batch": True}),
    C("batch input columns", plain, lambda n, x: {"y": [len(n)] * len(x)}, B | {"input_columns": ["n", "x"]}),
    C("batch of all, last dropped", plain, lambda b: b, {"batched": True, "batch_size": None, "drop_last_batch": True}),
    C("batch kwargs", plain, lambda b, k: {"y": [k] * len(b["n"])}, B | {"fn_kwargs": {"k": "v"}}),
    C("batch tokens", plain, tokens, {"batched": True}),
    C("batch numpy", plain, lambda b: {"y": np.array(b["n"]) * 2, "z": np.ones((len(b["n"]), 2, 3), "float32")}, B),
    C("batch numpy text", plain, lambda b: {"y": np.array(b["text"])}, B),
    C(
        "batch numpy for a column",
        typed,
        lambda b: {"small": np.array(b["small"]) + 1, "half": np.array(b["small"])},
        B,
    ),
    C("batch of vectors", plain, lambda b: {"y": [np.arange(n) for n in b["n"]]}, {"batched": True}),
    C("batch pandas series", plain, lambda b: {"y": pd.Series(b["n"]) * 2, "s": pd.Series(b["text"])}, B),
    C("batch polars series", plain, lambda b: {"y": pl.Series(b["n"])}, B),
    C("batch arrow table", plain, lambda b: pa.table({"y": b["n"], "z": pa.array(b["n"], pa.int8())}), B),
    C("batch data frame", plain, lambda b: pd.DataFrame({"y": b["n"]}), B),
    C("batch polars frame", plain, lambda b: pl.DataFrame({"y": b["n"]}), B),
    C("batch of dicts", plain, lambda b: {"y": [{"a": n, "b": [{"c": "x"}]} for n in b["n"]]}, B),
    C("batch of mixed dicts", plain, lambda b: {"y": [{"a": n} if n % 2 else {"b": n} for n in b["n"]]}, B),
    C("batch removes and returns", plain, lambda b: {"n": b["text"]}, B | {"remove_columns": ["n"]}),
    C("batch label names", typed, lambda b: {"label": ["yes"] * len(b["small"])}, B),
    C("batch images, read", images, lambda b: {"w": [i and i.width for i in b["image"]]}, B),
    C("batch images, untouched", images, lambda b: {"y": b["n"]}, B),
    C("batch images, made", plain, lambda b: {"image": [PIL.Image.new("L", (2, 2), n) for n in b["n"]]}, B),
    C(
        "batch volumes",
        volumes,
        lambda b: {"shape": [list(v.shape) for v in b["scan"]]},
        B | {"remove_columns": ["scan"]},
    ),
    C("batch matrices", matrices, lambda b: {"m": np.array(b["m"]) + 1}, B),
    C("batch format arrow", formatted("arrow"), arrow_batch, B),
    C("batch format pandas", formatted("pandas"), pandas_batch, B),
    C("batch format numpy", formatted("numpy"), lambda b: {"y": b["n"] * 2}, B),
    C("batch format polars", formatted("polars"), lambda f: f.with_columns(y=pl.col("n") * 2), B),
    C("batch format and input columns", formatted("numpy"), lambda n: {"y": n + 0.5}, B | {"input_columns": ["n"]}),
    C(
        "batch features",
        numbers,
        lambda b: {"y": b["n"]},
        B | {"features": Features({"y": Value("int8"), "x": Value("float32"), "n": Value("string")})},
    ),
    C(
        "batch arrow with features",
        formatted("arrow"),
        lambda t: t.select(["n"]),
        B | {"features": Features({"n": Value("int16")})},
    ),
]

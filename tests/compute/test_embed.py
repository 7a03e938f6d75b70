"""Embedding returns the input rows with their vectors, for any windows, model and interruptions."""

from __future__ import annotations

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brim
from brim.compute.outputs.output import Units
from brim.compute.outputs.vector_output import FinishedVectors, VectorOutput, finish_vectors, rows_path
from brim.compute.steps.embed_step import EmbedStep, EmbedStepOptions
from brim.compute.steps.step import BadRow, RowBatch
from brim.errors import BrimError, InputError, MemoryLimitError
from brim.options.compute_options import ModelOptions
from brim.state.ledger import Receipt
from tests.embed_models import NoRed, Small

MODELS = "tests.embed_models"
TEXTS = [f"{'word ' * (i * 7 % 23)}{i}" for i in range(300)]


def run(options: EmbedStepOptions, table: pa.Table, small: bool = False) -> pa.Table:
    """Run the step as a worker does: pickle it, then pass its batches."""
    step = pickle.loads(pickle.dumps(EmbedStep(options)))
    step.open(table.schema)
    try:
        return pa.concat_tables(
            part
            for start in range(0, table.num_rows, step.batch_rows)
            for part in step.apply(RowBatch(table.slice(start, step.batch_rows), start, None), small)
        )
    finally:
        step.close()


def texts_table(texts: list[Any] = TEXTS) -> pa.Table:
    return pa.table({"id": [f"k{i}" for i in range(len(texts))], "caption": pa.array(texts, pa.string())})


def embed(model: str, table: pa.Table | None = None, small: bool = False, **options: Any) -> pa.Table:
    options = {"column": "caption", **options}
    return run(EmbedStepOptions(f"{MODELS}:{model}", **options), texts_table() if table is None else table, small)


def vectors(table: pa.Table, name: str = "embedding") -> Any:
    column = table[name].combine_chunks()
    return column.flatten().to_numpy().reshape(len(column), -1)


def test_rows_stay_in_order_and_batches_are_sorted_in_a_window() -> None:
    """Batches hold texts of similar length; rows and kept columns keep the input order."""
    table = embed("hashing", keep_columns=("id",), batch_size=8, window=5)
    assert table["id"].to_pylist() == [f"k{i}" for i in range(300)]
    expected = np.zeros((300, 4), np.float32)
    for start in range(0, 300, 40):
        order = sorted(range(start, min(start + 40, 300)), key=lambda row: -len(TEXTS[row]))
        for index in range(0, len(order), 8):
            rows = order[index : index + 8]
            expected[rows] = vectors(embed("hashing", texts_table([TEXTS[row] for row in rows]), batch_size=8))
    np.testing.assert_array_equal(vectors(table), expected)
    assert table.schema.field("embedding").type == pa.list_(pa.float32(), 4)


def test_short_of_memory_gives_the_same() -> None:
    """When memory is short, batches are not prepared in advance, and the output is the same bit for bit."""
    assert embed("hashing", small=True).equals(embed("hashing"))


def test_the_batch_plan_is_part_of_the_facts() -> None:
    """Options that change vectors change the facts; the device does not."""

    def facts(**options: Any) -> dict[str, Any]:
        model_options = ModelOptions(
            **{k: options.pop(k) for k in list(options) if k in ModelOptions.__dataclass_fields__}
        )
        return EmbedStep(
            EmbedStepOptions(f"{MODELS}:hashing", column="caption", loading=model_options, **options)
        ).facts

    assert facts()["model files"]
    for change in ({"batch_size": 16}, {"window": 4}, {"normalize": True}, {"dtype": "float16"}, {"prompt": "q: "}):
        assert facts(**change) != facts()
    for same in ({"device": "cuda"}, {"window": 32}):
        assert facts(**same) == facts()


def test_a_model_folder_is_known_by_its_content(tmp_path: Path) -> None:
    """A copy in another folder is the same model; other weights are another model."""

    def files(folder: Path, last: bytes) -> str:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(5_000_000) + last)
        return str(EmbedStep(EmbedStepOptions(str(folder), column="t")).facts["model files"])

    first = files(tmp_path / ".a" / "m", b"1")
    assert first == files(tmp_path / "b" / "m", b"1")
    assert first != files(tmp_path / "c" / "m", b"2")


@pytest.mark.parametrize("batch_size", [7, 8, 32])
def test_a_device_without_room_gets_halves(batch_size: int) -> None:
    """Every batch is tried whole, then in halves, and the rows are correct."""
    Small.asked = []
    table = embed("Small", batch_size=batch_size, keep_columns=("id",))
    assert vectors(table, "a")[:, 0].tolist() == [len(text) for text in TEXTS]
    assert table.column_names == ["id", "a", "b"]
    assert max(Small.asked) == batch_size
    assert Small.asked.count(batch_size) == 300 // batch_size


def test_a_row_that_never_fits_is_named() -> None:
    """A row that does not fit on the device alone is an error that names it."""
    with pytest.raises(BadRow) as caught:
        embed("Small", loading=ModelOptions(model_arg={"budget": 0}), batch_size=4)
    assert caught.value.rows == 1
    assert isinstance(caught.value.__cause__, MemoryLimitError)


def test_values_that_are_no_numbers() -> None:
    """NaN values are an error that names the row, or are kept unchanged."""
    table = texts_table(["a", "bbbb", "bad", "c"])
    with pytest.raises(BadRow) as caught:
        embed("with_nan", table)
    assert (caught.value.row, caught.value.rows) == (2, 1)
    assert "nan='keep'" in str(caught.value.__cause__)
    remaining = vectors(embed("with_nan", table, nan="keep"))
    assert remaining.dtype == np.float16
    assert np.isnan(remaining[:, 0]).tolist() == [False, False, True, False]


@pytest.mark.parametrize(("bad", "label"), [(None, "null"), ("", "empty")])
def test_texts_that_are_not_there(bad: str | None, label: str) -> None:
    """A missing text is an error that names its row, or is embedded as an empty text."""
    table = texts_table(["a", "b", bad])
    with pytest.raises(BadRow) as caught:
        embed("hashing", table)
    assert caught.value.row == 2
    assert f"'caption' is {label}" in str(caught.value.__cause__)
    assert len(embed("hashing", table, empty="keep")) == 3


@pytest.mark.parametrize("text", [" ", "\n", "\u3000"])
def test_a_text_of_white_space_is_not_empty(text: str) -> None:
    """Only null and the empty text are empty: the model decides about white space."""
    table = texts_table(["a", "b", text])
    np.testing.assert_array_equal(vectors(embed("hashing", table)), vectors(embed("hashing", table, empty="keep")))


@pytest.mark.parametrize(
    ("model", "options", "arguments"),
    [
        ("failing", {}, ""),
        ("wrong_shape", {}, r"\(301, 3\) for 300 rows"),
        ("growing", {"batch_size": 256}, "44 values of float32, and 256"),
        ("hashing", {"column": "text"}, "no column 'text'. It has id, caption"),
        ("hashing", {"keep_columns": ("id",), "name": {"embedding": "id"}}, "called 'id'"),
        ("hashing", {"name": {"text": "t"}}, "gives no 'text'"),
        ("hashing", {"loading": ModelOptions(model_arg={"size": 3})}, "takes no argument 'size'"),
        ("hashing", {"image": "id"}, "."),
        ("nothing", {}, "has no 'nothing'"),
        ("given_texts", {}, "needs an argument 'texts', which brim does not pass"),
        ("not_a_model", {}, "encode"),
    ],
)
def test_models_and_columns_that_are_wrong(model: str, options: dict[str, Any], arguments: str) -> None:
    """A wrong model or column is an error of brim without a traceback; an error of the user's function names the
    rows."""
    if model == "failing":
        with pytest.raises(BadRow) as caught:
            embed(model, batch_size=32, **options)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        return
    with pytest.raises((InputError, BadRow), match=arguments if arguments != "." else None):
        embed(model, **({"batch_size": 512} if model == "wrong_shape" else {}) | options)


@pytest.mark.parametrize(
    "options",
    [
        {"column": None},
        {"batch_size": 0},
        {"nan": "skip"},
        {"keep_columns": ("id", "id")},
        {"loading": {"dtype": "int8"}},
        {"loading": {"device": "tpu"}},
        {"loading": {"pooling": "max"}},
    ],
)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    model_options = options.pop("loading", {})
    with pytest.raises(InputError):
        EmbedStepOptions("m", **{"column": "a", "loading": ModelOptions(**model_options), **options})


def test_models_that_are_not_there(tmp_path: Path) -> None:
    """A missing model folder or module is an error."""
    for spec in (str(tmp_path / "nowhere"), "no_such_module_here:f"):
        with pytest.raises(InputError, match=r"No module named|does not exist"):
            run(EmbedStepOptions(spec, column="caption"), texts_table())


def test_normalize() -> None:
    whole = vectors(embed("hashing", normalize=True))
    np.testing.assert_allclose(np.linalg.norm(whole, axis=1), 1, rtol=1e-6)


def picture(colour: tuple[int, int, int], size: tuple[int, int] = (9, 7)) -> bytes:
    image = pytest.importorskip("PIL.Image", reason="embedding images is not proved here: no Pillow")
    buffer = io.BytesIO()
    image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def test_images_as_columns_hold_them(tmp_path: Path) -> None:
    """Images may be bytes with a path, bytes alone, or paths with a root; a damaged image is named."""
    colours = [(i, 2 * i, 255 - i) for i in range(50)]
    files = [picture(colour) for colour in colours]
    for number, content in enumerate(files):
        (tmp_path / f"{number}.png").write_bytes(content)
    both = pa.array([{"bytes": content, "path": "x.png"} for content in files])
    paths = pa.array([{"bytes": None, "path": f"{number}.png"} for number in range(50)])
    names = pa.array([f"{number}.png" for number in range(50)])
    for column in (both, pa.array(files, pa.binary()), paths, names):
        options = EmbedStepOptions(f"{MODELS}:mean_colour", image="image", batch_size=8, image_root=str(tmp_path))
        np.testing.assert_array_equal(vectors(run(options, pa.table({"image": column})), "vision"), colours)
    broken = [*files[:20], files[20][:40], *files[21:]]
    for cells, arguments in ((broken, "cannot be decoded"), ([*files[:20], None], "null")):
        with pytest.raises(BadRow) as caught:
            run(options, pa.table({"image": pa.array(cells, pa.binary())}).slice(0, 30))
        assert caught.value.row == 20
        assert arguments in str(caught.value.__cause__)
    with pytest.raises(InputError, match="not images"):
        run(options, pa.table({"image": [1, 2]}))


@pytest.mark.parametrize("early", [False, True])
def test_images_on_which_the_model_fails_are_left_out_alone(early: bool) -> None:
    """Damaged images are left out too; the rest of each batch is computed as one batch."""
    colours = [(255, 0, 0) if n in (3, 4, 17) else (0, n, 0) for n in range(20)]
    cells: list[bytes] = [picture(colour) for colour in colours]
    cells[9] = b"no image"
    table = pa.table({"id": range(20), "image": pa.array(cells, pa.binary())})
    options = EmbedStepOptions(
        f"{MODELS}:NoRed",
        image="image",
        keep_columns=("id",),
        batch_size=8,
        loading=ModelOptions(model_arg={"early": early}),
    )
    NoRed.worked = []
    step = EmbedStep(options)
    step.open(table.schema)
    left_out: dict[int, str] = {}
    batch = RowBatch(table, 0, None, leave_out=lambda row, error: left_out.update({row: str(error)}))
    result = pa.concat_tables(step.apply(batch, False))
    step.close()
    assert list(left_out) == [3, 4, 9, 17]
    assert [left_out[row] for row in (3, 4, 17)] == ["red"] * 3
    assert result["id"].to_pylist() == [n for n in range(20) if n not in left_out]
    assert vectors(result, "vision")[:, 1].tolist() == [n for n in range(20) if n not in left_out]
    # Of batches of 8, 8 and 4 rows. Before `encode` failed, parts of the first and the last succeeded.
    assert NoRed.worked == [6, 7, 3] if early else NoRed.worked[-1] == 3


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("imgs/a.png", "The image 'imgs/a.png' cannot be decoded: No such file or directory. Relative paths begin at"),
        ("/none/a.png", "The image 'a.png' cannot be decoded: No such file or directory. Leave"),
        ("text.png", "The image 'text.png' cannot be decoded: it is damaged, or no image."),
        ("", "The path of the image is empty."),
        ("imgs", "The image 'imgs' cannot be decoded: Is a directory."),
    ],
)
def test_an_image_path_is_shown_as_the_row_has_it(tmp_path: Path, cell: str, message: str) -> None:
    """The error shows the path as in the row, not a wrong absolute path or a folder of this machine."""
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "imgs").mkdir(exist_ok=True)
    table = pa.table({"image": pa.array([cell], pa.string())})
    with pytest.raises(BadRow) as caught:
        embed("mean_colour", table, column=None, image="image", image_root=str(tmp_path))
    tokens = " ".join(caught.value.__cause__.words)  # type: ignore[union-attr]
    assert tokens.startswith(message)
    assert str(tmp_path) not in tokens


def write_units(folder: Path, table: pa.Table, cuts: list[int]) -> list[Path]:
    folder.mkdir()
    units = []
    for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, table.num_rows], strict=True)):
        units.append(folder / f"{number}.arrow")
        with pa.ipc.new_stream(units[-1], table.schema) as writer:
            writer.write_table(table.slice(start, stop - start), max_chunksize=30)
    return units


@pytest.mark.parametrize("suffix", [".safetensors", ".npy", ".parquet"])
def test_finish(tmp_path: Path, suffix: str) -> None:
    """Finishing twice gives the same file of all units; kept columns are in it, or in a file next to it."""
    if suffix == ".safetensors":
        pytest.importorskip("safetensors", reason="finishing .safetensors is not proved here: not installed")
    table = embed("Small", keep_columns=("id",))
    units = write_units(tmp_path / "units", table, [100, 100, 170])
    target = tmp_path / f"emb{suffix}"
    created = finish_vectors(units, target, tmp_path / "work", metadata={"model": "small"})
    assert created.rows == 300
    before = {path: path.read_bytes() for path in created.files}
    assert (
        finish_vectors(units, target, tmp_path / "work", rows=[100, 0, 70, 130], metadata={"model": "small"}) == created
    )
    assert {path: path.read_bytes() for path in created.files} == before
    if suffix == ".parquet":
        read = pq.read_table(target)
        assert created.files == (target,)
        assert read.schema.metadata[b"model"] == b"small"
        columns = {column.path_in_schema: column.compression for column in _columns(target)}
        assert columns == {"id": "ZSTD", "a.list.element": "UNCOMPRESSED", "b.list.element": "UNCOMPRESSED"}
        np.testing.assert_array_equal(vectors(read, "a"), vectors(table, "a"))
    else:
        read = pq.read_table(rows_path(target))
        np.testing.assert_array_equal(brim.open_tensors(target)["a"], vectors(table, "a"))
        assert read.column_names == ["id"]
    assert read["id"].equals(table["id"])
    assert not list((tmp_path / "work").iterdir())


def _columns(path: Path) -> list[Any]:
    group = pq.ParquetFile(path).metadata.row_group(0)
    return [group.column(number) for number in range(group.num_columns)]


def test_finish_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash after some rows, or between two renames, leaves no wrong file, and the next call finishes."""
    table = embed("Small")
    units = write_units(tmp_path / "units", table, [100, 170])
    target, work = tmp_path / "emb.npy", tmp_path / "work"
    whole = finish_vectors(units, target, work)
    expected = {path.name: path.read_bytes() for path in whole.files}
    assert sorted(expected) == ["emb.a.npy", "emb.b.npy"]

    def crash(step: int, name: str, home: str) -> None:
        for path in whole.files:
            path.unlink(missing_ok=True)
        act, calls = __import__(home, fromlist=[name]), 0
        plain = getattr(act, name)

        def counted(*inputs: Any, **extra: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == step:
                raise KeyboardInterrupt
            return plain(*inputs, **extra)

        with monkeypatch.context() as patch:
            patch.setattr(f"{home}.{name}", counted)
            with pytest.raises(KeyboardInterrupt):
                finish_vectors(units, target, work)
        assert finish_vectors(units, target, work) == FinishedVectors(300, whole.files, whole.outputs)
        assert {path.name: path.read_bytes() for path in whole.files} == expected

    for step in (1, 2):
        crash(step, "rename", "brim.compute.outputs.vector_output")
    for step in (1, 4, 9):
        crash(step, "batch_for", "brim.compute.outputs.vector_output")


@pytest.mark.parametrize("name", ["emb.npy", "emb.parquet"])
def test_finish_is_stopped(tmp_path: Path, name: str) -> None:
    """A stop after any table leaves no wrong state: the next call gives the same files and hashes, vectors last."""
    table = embed("Small", keep_columns=("id",))
    paths = write_units(tmp_path / "units", table, [100, 170])
    rows = [100, 70, 130]
    receipts = [Receipt(p.name, "", n, p.stat().st_size, "", "", "", "") for p, n in zip(paths, rows, strict=True)]
    output = VectorOutput(name, 30)

    def finish(step: int, work: str) -> dict[str, str]:
        calls = 0

        def advance(size: int) -> None:
            nonlocal calls
            calls += 1
            if calls == step:
                raise KeyboardInterrupt

        units = Units(tmp_path / "units", receipts, 1 << 30, table.schema, tmp_path / work)
        created = output.finish(units, "data", advance).shards
        assert all(hashlib.sha256(item.path.read_bytes()).hexdigest() == item.sha256 for item in created.values())
        return {shard: entry.sha256 for shard, entry in created.items()}

    expected = finish(0, "whole")
    assert list(expected)[-1] == ("emb.a.npy" if name == "emb.npy" else name)
    for step in (1, 5, 9):
        with pytest.raises(KeyboardInterrupt):
            finish(step, "work")
        assert finish(0, "work") == expected


def test_finish_without_rows(tmp_path: Path) -> None:
    """Without units no file is written; a file that is not a unit is refused."""
    with pytest.raises(InputError, match="no rows"):
        finish_vectors([], tmp_path / "a.npy", tmp_path / "work")
    with pytest.raises(InputError, match="ending"):
        finish_vectors([tmp_path / "x"], tmp_path / "a.bin", tmp_path / "work")
    (tmp_path / "x").write_bytes(b"abcd" * 10)
    with pytest.raises(BrimError, match="cannot be read"):
        finish_vectors([tmp_path / "x"], tmp_path / "a.npy", tmp_path / "work")

"""The headers of tensor files equal those of the libraries, byte for byte."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.errors import InputError, VerificationError
from brim.tensors import tensor_files as ours
from brim.tensors.tensor_files import NpyLayout, SafetensorsLayout, Tensor, read_header

theirs = pytest.importorskip("safetensors", reason="byte identity with safetensors is not proved here: not installed")

TYPES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
         "float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2"]  # fmt: skip

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
tensors = st.dictionaries(
    names, st.tuples(st.sampled_from(TYPES), st.lists(st.integers(1, 9), max_size=3), st.integers(0, 12)), min_size=1
)


def whole_file(spec: dict[str, tuple[str, list[int], int]], metadata: dict[str, str] | None) -> bytes:
    """Return the file that the library writes for tensors in memory."""
    inputs, remaining = {}, []
    for name, (dtype, dims, rows) in spec.items():
        array = np.ones((rows, *dims), Tensor(name, tuple(dims), dtype).carrier)
        remaining.append(array)
        destination = {"data_ptr": array.ctypes.data, "data_len": array.nbytes}
        inputs[name] = theirs.TensorSpec(dtype=dtype, shape=[rows, *dims], **destination)
    return bytes(theirs.serialize(inputs, metadata=metadata))


def our_file(spec: dict[str, tuple[str, list[int], int]], metadata: dict[str, str] | None) -> bytes:
    layout = SafetensorsLayout([Tensor(name, tuple(dims), dtype) for name, (dtype, dims, _) in spec.items()], metadata)
    body = layout.body({name: rows for name, (_, _, rows) in spec.items()})
    created = io.BytesIO()
    created.write(body.header)
    for name, start in body.starts.items():
        dtype, dims, rows = spec[name]
        assert created.tell() == start
        created.write(np.ones((rows, *dims), Tensor(name, tuple(dims), dtype).carrier).tobytes())
    assert created.tell() == body.size
    return created.getvalue()


@given(tensors, st.none() | st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(), max_size=1))
def test_any_names_types_and_shapes(spec: dict[str, Any], metadata: dict[str, str] | None) -> None:
    """Order, spelling, offsets and padding equal the library's for any tensor names."""
    assert our_file(spec, metadata) == whole_file(spec, metadata)


def test_every_two_types() -> None:
    """The library sorts by type before name; every pair of types is checked in both orders."""
    for item, second in itertools.product(TYPES, repeat=2):
        spec = {"b": (item, [3], 2), "a": (second, [2, 2], 5)}
        assert our_file(spec, None) == whole_file(spec, None), (item, second)


def test_several_notes_are_sorted() -> None:
    """The library orders several metadata entries randomly; brim writes one of these orders, always the same."""
    spec = {"a": ("float32", [2], 1)}
    notes = {"model": "clip", "by": "brim", "é\n": '"'}
    ours = our_file(spec, notes)
    assert ours == our_file(spec, dict(reversed(notes.items())))
    assert ours in {whole_file(spec, notes) for _ in range(300)}


def test_a_library_that_writes_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """brim compares its headers with the library's for small shapes, and refuses a library that differs."""
    monkeypatch.setattr(ours, "_ALIGNMENT", 16)
    with pytest.raises(InputError, match="does not know"):
        SafetensorsLayout([Tensor("a", (2,), "float32")], None)


@pytest.mark.parametrize("dtype", [name for name in TYPES if "bf" not in name and "float8" not in name])
@pytest.mark.parametrize("shape", [(0, 3), (1,), (7, 5, 3), (123456, 2)])
def test_npy_is_what_numpy_saves(dtype: str, shape: tuple[int, ...]) -> None:
    """Header and values equal those of np.save."""
    saved = io.BytesIO()
    array = np.ones(shape, Tensor("t", shape[1:], dtype).carrier)
    np.save(saved, array)
    body = NpyLayout(Tensor("t", shape[1:], dtype)).body({"t": shape[0]})
    assert body.header + array.tobytes() == saved.getvalue()
    assert body.size == len(saved.getvalue())


@pytest.mark.parametrize("damage", ["cut", "longer", "no header", "wrong length", "not json", "empty"])
def test_a_damaged_file_is_found(tmp_path: Path, damage: str) -> None:
    """Opening a file checks its size and offsets, not its values."""
    whole = whole_file({"a": ("float32", [2], 3), "b": ("int8", [], 3)}, None)
    created = {
        "cut": whole[:-1],
        "longer": whole + b"x",
        "no header": whole[:20],
        "wrong length": b"\xff" * 8 + whole[8:],
        "not json": whole[:8] + b"x" + whole[9:],
        "empty": b"",
    }[damage]
    path = tmp_path / "a.safetensors"
    path.write_bytes(created)
    with pytest.raises(VerificationError, match="not a whole safetensors file"):
        read_header(path)

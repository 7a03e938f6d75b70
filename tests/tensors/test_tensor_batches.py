"""Tensor descriptions, and the conversion of batches to bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from brim.errors import InputError
from brim.tensors import tensor_batches
from brim.tensors.tensor_batches import batch_for
from brim.tensors.tensor_files import Tensor, tensors_from

NUMBERS = np.arange(24, dtype=np.float32).reshape(6, 4)


def content(tensor: Tensor, value: Any) -> bytes:
    """Return all bytes of a batch, one stream after the other."""
    return b"".join(bytes(block) for stream in batch_for(tensor, value).streams for block in stream())


@pytest.mark.parametrize(
    ("inputs", "dims", "dtype"),
    [
        ((768, "float32"), (768,), "float32"),
        ([3, 5, np.float16], (3, 5), "float16"),
        ((np.int64(2), np.dtype(">i8")), (2,), "int64"),
        ("bool", (), "bool"),
        (("int64",), (), "int64"),
        (bool, (), "bool"),
        ((8, "torch.bfloat16"), (8,), "bfloat16"),
        (str, (), "string"),
    ],
)
def test_ways_to_describe_a_tensor(inputs: Any, dims: tuple[int, ...], dtype: str) -> None:
    """A tensor is described by name, NumPy type or torch type; the sizes of a row come first."""
    assert tensors_from({"t": inputs}) == (Tensor("t", dims, dtype),)


@pytest.mark.parametrize(
    "inputs",
    [{"t": (768,)}, {"t": ("float32", 768)}, {"t": (0, "float32")}, {"t": (-1, "int8")}, {"t": (2, "float31")},
     {"t": ()}, {"t": (True, "int8")}, {"t": (2, "string")}, {"t": None}, {"": "int8"}, {"__metadata__": "int8"},
     {"\udc80": "int8"}, {}],
)  # fmt: skip
def test_what_describes_no_tensor(inputs: dict[str, Any]) -> None:
    """A wrong description is an error with an example of a correct one."""
    with pytest.raises(InputError):
        tensors_from(inputs)


@pytest.mark.parametrize(
    "value",
    [
        NUMBERS,
        np.asfortranarray(NUMBERS),
        NUMBERS.astype(">f4"),
        np.repeat(NUMBERS, 2, axis=0)[::2],
        pa.FixedSizeListArray.from_arrays(pa.array(NUMBERS.ravel()), 4),
        pa.FixedSizeListArray.from_arrays(pa.array(np.r_[np.zeros(8, np.float32), NUMBERS.ravel()]), 4)[2:],
        pa.chunked_array([NUMBERS[:2].tolist(), NUMBERS[2:].tolist()], pa.list_(pa.float32())),
        pa.FixedShapeTensorArray.from_numpy_ndarray(NUMBERS),
    ],
    ids=["contiguous", "transposed", "big-endian", "strided", "arrow", "arrow slice", "arrow lists", "arrow tensor"],
)  # fmt: skip
def test_batches_become_the_same_bytes(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any memory layout of a batch, transposed in chunks of any size, gives the same bytes."""
    for piece_bytes in (tensor_batches.CHUNK_BYTES, 17):
        monkeypatch.setattr(tensor_batches, "CHUNK_BYTES", piece_bytes)
        assert content(Tensor("t", (4,), "float32"), value) == NUMBERS.tobytes()


def test_memory_that_fits_is_not_copied() -> None:
    """A contiguous array is written without a copy."""
    [stream] = batch_for(Tensor("t", (4,), "float32"), NUMBERS).streams
    [block] = stream()
    assert np.shares_memory(np.frombuffer(block, np.uint8), NUMBERS)


@pytest.mark.parametrize(
    "value",
    [["a", "", "é"], np.array(["a", "", "é"]), pa.array(["x", "a", "", "é"])[1:], pa.chunked_array([["a"], ["", "é"]]),
     pa.array(["a", "", "é"]).dictionary_encode(), ("a", "", "é")],
)  # fmt: skip
def test_strings_are_lengths_and_text(value: Any) -> None:
    """Strings take two streams: their lengths, from which the ends follow, and the concatenated text."""
    lengths = np.array([1, 0, 2], np.int64).tobytes()
    assert content(Tensor("id", (), "string"), value) == lengths + "aé".encode()


def _turned() -> Any:
    """Return values whose memory is ordered by rows while the array is ordered by columns."""
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 3], permutation=[1, 0])
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype=np.float32)), 6)
    return pa.ExtensionArray.from_storage(kind, values)


@pytest.mark.parametrize(
    ("tensor", "value", "arguments"),
    [
        (Tensor("t", (4,), "float32"), np.zeros((6, 5), np.float32), r"\(5,\).*\(4,\)"),
        (Tensor("t", (4,), "float32"), np.zeros((6, 4)), "float64.*float32.*astype"),
        (Tensor("t", (4,), "float32"), np.zeros(4, np.float32), r"\(\).*\(4,\)"),
        (Tensor("t", (), "float32"), np.float32(3), "single value|not an array"),
        (Tensor("t", (), "int64"), np.ma.masked_array([1, 2], [True, False]), "masked"),
        (Tensor("t", (), "int64"), pa.array([1, None]), "nulls"),
        (Tensor("t", (2,), "int64"), pa.array([[1, 2], [3]]), "different lengths"),
        (Tensor("t", (), "int64"), pa.array(["a"]), "cannot be written"),
        (Tensor("t", (), "int64"), np.array(["a"]), "cannot be written"),
        (Tensor("t", (), "int64"), {"a": 1}, "not an array"),
        (Tensor("t", (), "string"), [1, 2], "not made of strings"),
        (Tensor("t", (), "string"), ["a", None], "nulls"),
        (Tensor("t", (), "string"), pa.array([1, 2]), "int64, and not of strings"),
        (Tensor("t", (2, 3), "float32"), _turned(), "another order"),
    ],
)
def test_a_batch_that_does_not_fit(tensor: Tensor, value: Any, arguments: str) -> None:
    """The error names the tensor, and the expected and actual type or shape."""
    with pytest.raises(InputError, match=arguments) as caught:
        batch_for(tensor, value)
    assert "'t'" in caught.value.message


def test_raw_bits_stand_for_types_that_numpy_lacks() -> None:
    """bfloat16 works without torch: NumPy arrays hold its bits, as returned by the reader."""
    bits = np.array([[0x3F80, 0x4000]], np.uint16)
    assert content(Tensor("t", (2,), "bfloat16"), bits) == bits.tobytes()
    with pytest.raises(InputError, match=r"uint16.*float16"):
        batch_for(Tensor("t", (2,), "float16"), bits)

"""Models for the tests of `brim embed` that only need NumPy."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

Given = dict[str, list[Any]]


class OutOfMemoryError(RuntimeError):
    """Stand-in for torch's error of the same name."""


def hashing(device: str, dim: int = 4) -> Callable[[Given], Any]:
    """Return a vector that depends on its text and slightly on the longest text of its batch, as padding would."""

    def encode(given: Given) -> Any:
        longest = max(map(len, given["text"]))
        rows = [[zlib.crc32(f"{text}/{position}".encode()) for position in range(dim)] for text in given["text"]]
        return (np.array(rows) / 2**32 + longest * 1e-3).astype(np.float32)

    return encode


def given_texts(texts: list[str]) -> Any:
    """Embed a batch directly; a function that embeds, not a factory for one."""
    return np.zeros((len(texts), 2), np.float32)


def with_nan() -> Callable[[Given], Any]:
    return lambda inputs: np.array([[np.nan if text == "bad" else 1.0, 2.0] for text in inputs["text"]], np.float16)


class Small:
    """A device with memory for four rows, which records the size of each batch."""

    asked: list[int] = []  # noqa: RUF012 - shared by everybody, which is the point

    def __init__(self, budget: int = 4) -> None:
        self._room = budget

    def prepare(self, given: Given) -> list[str]:
        return given["text"]

    def encode(self, texts: list[str]) -> Any:
        Small.asked.append(len(texts))
        if len(texts) > self._room:
            raise OutOfMemoryError("no room")
        return {"a": np.array([[len(text)] for text in texts], np.float32), "b": np.zeros((len(texts), 2), np.float32)}


def failing() -> Callable[[Given], Any]:
    def encode(given: Given) -> Any:
        raise ZeroDivisionError("no")

    return encode


def wrong_shape() -> Callable[[Given], Any]:
    return lambda inputs: np.zeros((len(inputs["text"]) + 1, 3), np.float32)


def growing() -> Callable[[Given], Any]:
    return lambda inputs: np.zeros((len(inputs["text"]), len(inputs["text"])), np.float32)


def mean_colour() -> Callable[[Given], Any]:
    return lambda inputs: {"vision": np.array([np.asarray(image).mean((0, 1)) for image in inputs["image"]])}


class NoRed:
    """A model that fails on red images in `prepare_image` or `encode` and counts the rows of each successful batch."""

    worked: list[int] = []  # noqa: RUF012 - shared by everybody, which is the point

    def __init__(self, early: bool = False) -> None:
        self._early = early

    def _check(self, colour: Any) -> None:
        if tuple(colour) == (255, 0, 0):
            raise ValueError("red")

    def prepare_image(self, image: Any) -> Any:
        colour = np.asarray(image).mean((0, 1))
        if self._early:
            self._check(colour)
        return colour

    def encode(self, given: Given) -> Any:
        for colour in given["image"]:
            self._check(colour)
        NoRed.worked.append(len(given["image"]))
        return {"vision": np.array(given["image"], np.float32)}


def not_a_model() -> int:
    return 3

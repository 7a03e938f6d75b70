"""A model that the user wrote: `package.module:factory`.

The factory is called once in each worker, with `device`, `dtype` and the arguments of the command line, as far as it
takes them. It returns a callable, or an object with `encode`, that is given a dict of lists, `text` (strings) and
`image` (RGB images of Pillow), and gives back an array with a row for each, or a dict of arrays by name. If the
object has `prepare`, that is called first, on another thread, with the same dict, and `encode` gets its result; if it
has `prepare_image`, every image goes through that first. `lengths` may tell the lengths of a list of texts, by which
they are sorted into batches; characters count if there is none.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.compute.embedding.libraries import device_for
from brim.compute.embedding.model import Output
from brim.compute.embedding.options import ModelOptions
from brim.compute.functions import load_function
from brim.errors import InputError


class FactoryModel:
    def __init__(self, spec: str, options: ModelOptions) -> None:
        factory = load_function(spec)
        torch = sys.modules.get("torch")
        plain = "cpu" if options.device == "auto" else options.device
        device = plain if torch is None else device_for(options.device, torch)
        self._made = factory(**_taken(spec, factory, {"device": device, "dtype": options.dtype}, options.arguments))
        self._encode = getattr(self._made, "encode", self._made)
        if not callable(self._encode):
            raise InputError(
                f"What {spec} returns can neither be called nor has it encode().",
                hint="Return a function of a dict of lists, {'text': […]}, that gives an array.",
            )
        self._prepare = getattr(self._made, "prepare", None)
        self._lengths = getattr(self._made, "lengths", None)
        self._prepare_image = getattr(self._made, "prepare_image", None)
        self.outputs: Mapping[str, Output] | None = None

    def lengths(self, texts: Sequence[str]) -> Sequence[int]:
        given: Sequence[int] = [len(text) for text in texts] if self._lengths is None else self._lengths(texts)
        return given

    def prepare_image(self, image: Any) -> Any:
        return image if self._prepare_image is None else self._prepare_image(image)

    def prepare(self, texts: Sequence[str] | None, images: Sequence[Any] | None) -> Any:
        given: dict[str, list[Any]] = {}
        if texts is not None:
            given["text"] = list(texts)
        if images is not None:
            given["image"] = list(images)
        return given if self._prepare is None else self._prepare(given)

    def encode(self, prepared: Any) -> Mapping[str, Any]:
        found = self._encode(prepared)
        return found if isinstance(found, Mapping) else {"embedding": found}

    def close(self) -> None:
        if callable(close := getattr(self._made, "close", None)):
            close()


def _taken(
    spec: str, factory: Callable[..., Any], offered: dict[str, Any], asked: tuple[tuple[str, Any], ...]
) -> dict[str, Any]:
    """What brim offers is left out where the factory has no place for it; what the user asks for is not."""
    parameters = inspect.signature(factory).parameters
    open_end = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for name, _ in asked:
        if name not in parameters and not open_end:
            raise InputError(f"{spec} takes no argument {name!r}.", hint=f"It takes {', '.join(parameters) or 'none'}.")
    return {name: value for name, value in offered.items() if open_end or name in parameters} | dict(asked)

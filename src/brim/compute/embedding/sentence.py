"""Models of sentence-transformers, asked batch by batch. `SentenceTransformer.encode` keeps all vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sentence_transformers
import torch
import transformers

from brim.compute.embedding.model import Output
from brim.compute.embedding.options import ModelOptions
from brim.compute.embedding.pretrained import moved, outputs_of, token_counts
from brim.errors import InputError


class SentenceModel:
    """The preprocessing, prompts, pooling and normalisation are those of the model's own files."""

    def __init__(self, spec: str, options: ModelOptions, device: str, *, text: bool, image: bool) -> None:
        if options.pooling is not None or not options.projection:
            raise InputError(
                "A sentence-transformers model has its own pooling.", hint="Leave --pooling and --no-projection out."
            )
        folder = Path(spec).expanduser()
        self._model = sentence_transformers.SentenceTransformer(
            str(folder) if folder.is_dir() else spec,
            device=device,
            revision=options.revision,
            model_kwargs={"dtype": options.dtype},
        ).eval()
        self._device = device
        if options.max_tokens is not None:
            self._model.max_seq_length = options.max_tokens
        default = self._model.prompts.get(self._model.default_prompt_name) if self._model.default_prompt_name else None
        self._prompt = default if options.prompt is None else options.prompt
        self.outputs: Mapping[str, Output] | None = outputs_of(self, text=text, image=image)

    def lengths(self, texts: Sequence[str]) -> Sequence[int]:
        tokenizer = getattr(self._model, "tokenizer", None)
        if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
            return [len(text) for text in texts]
        return token_counts(tokenizer, texts, self._model.max_seq_length)

    def prepare_image(self, image: Any) -> Any:
        return image

    def prepare(self, texts: Sequence[str] | None, images: Sequence[Any] | None) -> dict[str, Any]:
        prepared = {}
        if texts is not None:
            prepared["text"] = self._features(list(texts), self._prompt)
        if images is not None:
            prepared["vision"] = self._features(list(images), None)
        return prepared

    def _features(self, given: list[Any], prompt: str | None) -> Any:
        if hasattr(self._model, "preprocess"):
            return self._model.preprocess(given, prompt=prompt)
        return self._model.tokenize([prompt + text for text in given] if prompt else given)

    def encode(self, prepared: dict[str, Any]) -> dict[str, Any]:
        with torch.inference_mode():
            found = {}
            for name, features in prepared.items():
                vectors = self._model(moved(features, self._device))["sentence_embedding"]
                found[name] = vectors if self._model.truncate_dim is None else vectors[:, : self._model.truncate_dim]
            return found

    def close(self) -> None:
        del self._model

"""Load models of transformers: for texts, for images, or for both in one space (such as CLIP)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sentence_transformers
import torch
import transformers

from brim.compute.steps.embedding_models import Model, VectorType, need
from brim.errors import InputError
from brim.options.compute_options import ModelOptions

_POSITIONS = ("position_embeddings", "position_embedding", "wpe")  # as BERT, CLIP and GPT-2 call the table
_UNSET_LENGTH = 100_000  # a tokenizer without a limit has 10**30


def pretrained_model(spec: str, options: ModelOptions, device: str, *, text: bool, image: bool) -> Model:
    folder = Path(spec).expanduser()
    path = str(folder) if folder.is_dir() else spec
    model = transformers.AutoModel.from_pretrained(path, dtype=options.dtype, revision=options.revision)
    model = model.to(device).eval()
    parts = _Parts(path, model, options, device)
    if hasattr(model, "get_text_features") and hasattr(model, "get_image_features"):
        return _DualModel(parts, text=text, image=image)
    if text and image:
        raise InputError("This model is not one for texts and images together.", hint="Leave --column or --image out.")
    return _OneModel(parts, text=text)


class _Parts:
    """A loaded model with its tokenizer and image processor."""

    def __init__(self, path: str, model: Any, options: ModelOptions, device: str) -> None:
        self.path, self.model, self.options, self.device = path, model, options, device
        config = getattr(model.config, "text_config", None) or model.config
        positions = text_positions(getattr(model, "text_model", model))
        refuse_more_tokens(options.max_tokens, positions)
        self._most_tokens = options.max_tokens or positions or getattr(config, "max_position_embeddings", None)

    def tokenizer(self) -> Any:
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.path, revision=self.options.revision)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        if self._most_tokens is None or tokenizer.model_max_length < self._most_tokens:
            self._most_tokens = (
                tokenizer.model_max_length if tokenizer.model_max_length < _UNSET_LENGTH else self._most_tokens
            )
        return tokenizer

    def tokens(self, tokenizer: Any, texts: Sequence[str]) -> Any:
        prompted = [self.options.prompt + text for text in texts] if self.options.prompt else list(texts)
        # SigLIP was trained with texts that are filled up to the end.
        padding = "max_length" if self.model.config.model_type.startswith("siglip") else True
        cut = self._most_tokens is not None
        return tokenizer(prompted, padding=padding, truncation=cut, max_length=self._most_tokens, return_tensors="pt")

    def image_processor(self) -> Any:
        need("PIL")
        processors: Any = transformers.AutoImageProcessor
        return processors.from_pretrained(self.path, revision=self.options.revision)

    def lengths(self, tokenizer: Any, texts: Sequence[str]) -> list[int]:
        return token_counts(tokenizer, texts, self._most_tokens)


def text_positions(model: Any) -> int | None:
    """Return the number of positions of a model's table; None if it has no such table."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _POSITIONS and isinstance(module, torch.nn.Embedding):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1  # as in RoBERTa
            positions: int = module.num_embeddings - unused
            return positions
    return None


def refuse_more_tokens(max_tokens: int | None, positions: int | None) -> None:
    if max_tokens is not None and positions is not None and max_tokens > positions:
        raise InputError(
            f"--max-tokens={max_tokens} is more than the {positions} positions of this model.",
            hint=f"Use --max-tokens={positions} or less: longer texts are cut.",
        )


def token_counts(tokenizer: Any, texts: Sequence[str], max_tokens: int | None) -> list[int]:
    """Count tokens. Sorted by tokens instead of characters, batches have up to a third less padding."""
    encoding = tokenizer(
        list(texts), truncation=max_tokens is not None, max_length=max_tokens, return_attention_mask=False
    )
    return [len(ids) for ids in encoding["input_ids"]]


class _DualModel:
    """A model with a text half and an image half. With `projection`, both map into one space."""

    def __init__(self, parts: _Parts, *, text: bool, image: bool) -> None:
        self._parts = parts
        self._tokenizer = parts.tokenizer() if text else None
        self._processor = parts.image_processor() if image else None
        self.outputs: Mapping[str, VectorType] | None = outputs_of(self, text=text, image=image)

    def lengths(self, texts: Sequence[str]) -> Sequence[int]:
        return self._parts.lengths(self._tokenizer, texts)

    def prepare_image(self, image: Any) -> Any:
        return _pixels_of(self._processor, image)

    def prepare(self, texts: Sequence[str] | None, images: Sequence[Any] | None) -> tuple[Any, Any]:
        tokens = None if texts is None else self._parts.tokens(self._tokenizer, texts)
        return tokens, None if images is None else torch.stack(list(images))

    def encode(self, prepared: tuple[Any, Any]) -> dict[str, Any]:
        with torch.inference_mode():
            tokens, pixels = prepared
            model, projected, outputs = self._parts.model, self._parts.options.projection, {}
            if tokens is not None:
                ask = model.get_text_features if projected else model.text_model
                outputs["text"] = _pooled(ask(**move_to_device(tokens, self._parts.device)))
            if pixels is not None:
                ask = model.get_image_features if projected else model.vision_model
                outputs["vision"] = _pooled(ask(pixel_values=pixels.to(self._parts.device, model.dtype)))
            return outputs

    def close(self) -> None:
        del self._parts.model


class _OneModel:
    """A model of texts or of images. By default, pools the mean of the tokens; of an image, the first one."""

    def __init__(self, parts: _Parts, *, text: bool) -> None:
        self._parts = parts
        self._reads_text = text
        self._pooling: str = parts.options.pooling or ("mean" if text else "cls")
        self._reader = parts.tokenizer() if text else parts.image_processor()
        self.outputs: Mapping[str, VectorType] | None = outputs_of(self, text=text, image=not text)

    def lengths(self, texts: Sequence[str]) -> Sequence[int]:
        return self._parts.lengths(self._reader, texts)

    def prepare_image(self, image: Any) -> Any:
        return _pixels_of(self._reader, image)

    def prepare(self, texts: Sequence[str] | None, images: Sequence[Any] | None) -> dict[str, Any]:
        if texts is not None:
            return dict(self._parts.tokens(self._reader, texts))
        return {"pixel_values": torch.stack(list(images or ()))}

    def encode(self, prepared: dict[str, Any]) -> dict[str, Any]:
        with torch.inference_mode():
            inputs = move_to_device(prepared, self._parts.device)
            if "pixel_values" in inputs:
                inputs["pixel_values"] = inputs["pixel_values"].to(self._parts.model.dtype)
            states = self._parts.model(**inputs).last_hidden_state
            mask = inputs.get("attention_mask")
            name = "text" if self._reads_text else "vision"
            return {name: _pool(states, mask, self._pooling)}

    def close(self) -> None:
        del self._parts.model


def outputs_of(model: Any, *, text: bool, image: bool) -> dict[str, VectorType]:
    """Encode a sample to get the types of the outputs, which config files name in many ways."""
    images = None
    if image:
        from PIL import Image

        images = [model.prepare_image(Image.new("RGB", (64, 64)))]
    vectors = model.encode(model.prepare(["a"] if text else None, images))
    return {
        name: VectorType(int(each.shape[1]), str(each.dtype).removeprefix("torch.")) for name, each in vectors.items()
    }


def move_to_device(features: Mapping[str, Any], device: str) -> dict[str, Any]:
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in features.items()
    }


def _pixels_of(processor: Any, image: Any) -> Any:
    return processor(images=image, return_tensors="pt")["pixel_values"][0]


def _pooled(result: Any) -> Any:
    """Return the vectors; older versions of transformers return them directly."""
    return result if isinstance(result, torch.Tensor) else result.pooler_output


def _pool(states: Any, mask: Any, pooling: str) -> Any:
    if states.dim() == 4:  # a convolutional model has a picture of channels
        return states.mean(dim=(2, 3))
    if pooling == "cls":
        return states[:, 0]
    if mask is None:
        return states.mean(dim=1) if pooling == "mean" else states[:, -1]
    if pooling == "mean":
        weights = mask.unsqueeze(-1).to(states.dtype)
        return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = (mask * (positions + 1)).argmax(dim=1)  # correct for padding on either side
    return states[torch.arange(len(states), device=states.device), last]


class SentenceModel:
    """A sentence-transformers model, with preprocessing, prompts, pooling and normalization of the model's files."""

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
            refuse_more_tokens(options.max_tokens, text_positions(self._model) if text else None)
            self._model.max_seq_length = options.max_tokens
        default = self._model.prompts.get(self._model.default_prompt_name) if self._model.default_prompt_name else None
        self._prompt = default if options.prompt is None else options.prompt
        self.outputs: Mapping[str, VectorType] | None = outputs_of(self, text=text, image=image)

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

    def _features(self, inputs: list[Any], prompt: str | None) -> Any:
        if hasattr(self._model, "preprocess"):
            return self._model.preprocess(inputs, prompt=prompt)
        return self._model.tokenize([prompt + text for text in inputs] if prompt else inputs)

    def encode(self, prepared: dict[str, Any]) -> dict[str, Any]:
        with torch.inference_mode():
            outputs = {}
            for name, features in prepared.items():
                vectors = self._model(move_to_device(features, self._device))["sentence_embedding"]
                outputs[name] = vectors if self._model.truncate_dim is None else vectors[:, : self._model.truncate_dim]
            return outputs

    def close(self) -> None:
        del self._model

"""Which model a name means: a function of the user, a sentence-transformers model, or one of transformers."""

from __future__ import annotations

import re
from pathlib import Path

from brim.compute.embedding.libraries import device_for, need
from brim.compute.embedding.model import Model
from brim.compute.embedding.options import ModelOptions
from brim.errors import InputError

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_SENTENCE_FILES = ("modules.json", "config_sentence_transformers.json")


def is_factory(spec: str) -> bool:
    """Whether it is `package.module:function`."""
    return _FACTORY.fullmatch(spec) is not None and not Path(spec).exists()


def load_model(spec: str, options: ModelOptions, *, text: bool = True, image: bool = False) -> Model:
    """The model, ready to be asked for vectors of texts, of images, or of both."""
    if is_factory(spec):
        from brim.compute.embedding.factory import FactoryModel

        return FactoryModel(spec, options)
    _refuse_missing_folder(spec)
    torch = need("torch")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = device_for(options.device, torch)
    need("transformers.utils.logging").disable_progress_bar()  # a worker's bars would be in the way of brim's
    try:
        if _is_sentence_model(spec, options.revision):
            need("sentence_transformers")
            from brim.compute.embedding.sentence import SentenceModel

            return SentenceModel(spec, options, device, text=text, image=image)
        from brim.compute.embedding.pretrained import pretrained_model

        return pretrained_model(spec, options, device, text=text, image=image)
    except (OSError, ValueError) as error:  # what both libraries raise for names and folders that are no models
        raise InputError(
            f"The model {_shown(spec)!r} cannot be loaded: {str(error).strip().splitlines()[0]}",
            hint="Name a folder with its files, a model of the Hub, or package.module:function.",
        ) from error


def _refuse_missing_folder(spec: str) -> None:
    path = Path(spec).expanduser()
    looks_like_path = spec.startswith((".", "/", "~")) or spec.count("/") > 1
    if looks_like_path and not path.is_dir():
        raise InputError(f"There is no folder {_shown(spec)!r}.", hint="--model takes a folder or a name on the Hub.")


def _is_sentence_model(spec: str, revision: str | None) -> bool:
    folder = Path(spec).expanduser()
    if folder.is_dir():
        return any((folder / name).exists() for name in _SENTENCE_FILES)
    if "/" not in spec:
        return True  # its names without an owner: all-MiniLM-L6-v2
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        hf_hub_download(spec, _SENTENCE_FILES[0], revision=revision)
    except EntryNotFoundError:
        return False
    return True


def _shown(spec: str) -> str:
    """A folder by its name."""
    return Path(spec).name or spec if Path(spec).is_absolute() else spec

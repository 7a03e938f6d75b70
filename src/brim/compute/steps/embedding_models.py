"""Load embedding models: of sentence-transformers, of transformers, or of a user's factory `package.module:factory`.

Each worker calls the factory once, with `device`, `dtype` and the arguments of the command line, as far as it takes
them. It returns a callable, or an object with `encode`, whose argument is a dict of lists, `text` (strings) and `image`
(RGB images of Pillow), and whose result is an array with a row for each, or a dict of arrays by name. If the object has
`prepare`, that is called first, on another thread, with the same dict, and `encode` gets its result; if it has
`prepare_image`, it is called for every image before that. `lengths` may return the lengths of a list of texts, by which
texts are sorted into batches; by default, characters are counted.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from brim.compute.steps.functions import add_working_folder, load_function
from brim.compute.steps.module_source import own_file, resolve_import
from brim.errors import ArgumentError, InputError, MissingDependencyError
from brim.extras import EXTRAS, missing
from brim.options.compute_options import ModelOptions
from brim.records import dataclass


@dataclass(frozen=True, slots=True)
class VectorType:
    """The vectors of one output of a model: their length and the type of their values."""

    dim: int
    dtype: str


class Model(Protocol):
    """Converts texts and images to vectors in two steps, so that one batch is prepared while another is computed.

    `prepare_image` and `prepare` run on separate threads. `prepare_image` gets one image and returns the model's input
    for it, which is smaller. `encode` runs on one thread. Its arrays, of NumPy or torch, have a row per text or image.
    """

    outputs: Mapping[str, VectorType] | None  # None until the first batch is computed

    def lengths(self, texts: Sequence[str]) -> Sequence[int]:
        """Return the length of each text for the model, so that texts of similar length share a batch."""

    def prepare_image(self, image: Any) -> Any: ...

    def prepare(self, texts: Sequence[str] | None, images: Sequence[Any] | None) -> Any: ...

    def encode(self, prepared: Any) -> Mapping[str, Any]: ...

    def close(self) -> None: ...


def device_for(device: str, torch: Any) -> str:
    """Return the device to use; `auto` is the fastest available one."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return next(name for name, is_available in available.items() if is_available)
    if not available[device.partition(":")[0]]:
        raise InputError(f"torch finds no {device} here.", hint="Use --device=auto, or install torch for it.")
    return device


def need(module: str) -> Any:
    """Import an optional library."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != package:
            raise
        if package not in EXTRAS["embed"].packages:
            raise MissingDependencyError(
                f"This model needs {package}.", hint=f"pip install {package}", extra="embed"
            ) from error
        raise missing("embed", f"This model needs {EXTRAS['embed'].packages[package]}.", package) from error


_WHOLE_BYTES = 4_000_000
_BLOCKS, _BLOCK_BYTES = 32, 65_536
_IGNORED = (".md", ".lock", ".png")


def model_facts(spec: str) -> dict[str, str]:
    """Return a model's fingerprint inputs: a folder's files, a factory's source and imports, or a Hub name."""
    if is_factory(spec):
        module, _, name = spec.rpartition(":")
        if module.endswith(".py"):  # loaded as a file
            file = Path(module)
            return {
                "model": f"{file.name}:{name}",
                "model files": _digest(_own_files(file, "")) if file.is_file() else "",
            }
        add_working_folder()
        try:
            module_spec = find_spec(module)
        except ModuleNotFoundError:
            module_spec = None
        source = Path(module_spec.origin) if module_spec is not None and module_spec.origin is not None else None
        if source is None or not source.is_file():
            return {"model": spec, "model files": ""}
        package = module if source.name == "__init__.py" else module.rpartition(".")[0]
        return {"model": spec, "model files": _digest(_own_files(source, package))}
    folder = Path(spec).expanduser()
    if not folder.is_dir():
        return {"model": spec, "model files": ""}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _counts(path.relative_to(folder)))
    return {"model": folder.resolve().name, "model files": _digest(files, folder)}


def _own_files(file: Path, package: str) -> list[Path]:
    """Return the source files of a model and of all the user's modules that it imports, directly or not."""
    packages = {os.path.realpath(file): package}
    sys.path.insert(0, str(file.parent))
    try:
        for path in (queue := [*packages]):
            try:
                tree = ast.parse(Path(path).read_bytes())
            except (SyntaxError, ValueError, OSError):
                continue  # the worker reports the error
            for module in _imported(tree, packages[path]):
                own = own_file(module)
                if own is not None and os.path.realpath(own) not in packages:
                    is_package = os.path.basename(own) == "__init__.py"
                    packages[os.path.realpath(own)] = module if is_package else module.rpartition(".")[0]
                    queue.append(os.path.realpath(own))
    finally:
        sys.path.remove(str(file.parent))
    return [file, *map(Path, sorted([*packages][1:]))]


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield every module that a source may import, and its packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_import(node.module or "", node.level, package)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _counts(path: Path) -> bool:
    return path.suffix not in _IGNORED and not any(part.startswith(".") for part in path.parts)


def _digest(files: list[Path], root: Path | None = None) -> str:
    """Hash small files completely; of large ones the size and some blocks, since training changes the whole file."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        name = path.name if root is None else path.relative_to(root).as_posix()
        digest.update(f"{name}\0{size}\0".encode())
        with open(path, "rb") as file:
            if size <= _WHOLE_BYTES:
                digest.update(file.read())
                continue
            for number in range(_BLOCKS):
                file.seek((size - _BLOCK_BYTES) * number // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:32]


class FactoryModel:
    """A model made by a user's factory: a callable, or an object with `encode`."""

    def __init__(self, spec: str, options: ModelOptions) -> None:
        factory = load_function(spec)
        torch = sys.modules.get("torch")
        plain = "cpu" if options.device == "auto" else options.device
        device = plain if torch is None else device_for(options.device, torch)
        arguments = options.model_arg or {}
        self._model = factory(
            **_factory_arguments(spec, factory, {"device": device, "dtype": options.dtype}, arguments)
        )
        self._encode = getattr(self._model, "encode", self._model)
        if not callable(self._encode):
            raise InputError(
                f"What {spec} returns can neither be called nor has it encode().",
                hint="Return a function of a dict of lists, {'text': […]}, that gives an array.",
            )
        self._prepare = getattr(self._model, "prepare", None)
        self._lengths = getattr(self._model, "lengths", None)
        self._prepare_image = getattr(self._model, "prepare_image", None)
        self.outputs: Mapping[str, VectorType] | None = None

    def lengths(self, texts: Sequence[str]) -> Sequence[int]:
        lengths: Sequence[int] = [len(text) for text in texts] if self._lengths is None else self._lengths(texts)
        return lengths

    def prepare_image(self, image: Any) -> Any:
        return image if self._prepare_image is None else self._prepare_image(image)

    def prepare(self, texts: Sequence[str] | None, images: Sequence[Any] | None) -> Any:
        inputs: dict[str, list[Any]] = {}
        if texts is not None:
            inputs["text"] = list(texts)
        if images is not None:
            inputs["image"] = list(images)
        return inputs if self._prepare is None else self._prepare(inputs)

    def encode(self, prepared: Any) -> Mapping[str, Any]:
        output = self._encode(prepared)
        return output if isinstance(output, Mapping) else {"embedding": output}

    def close(self) -> None:
        if callable(close := getattr(self._model, "close", None)):
            close()


def _factory_arguments(
    spec: str, factory: Callable[..., Any], offered: dict[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments for a factory: those of brim that it has parameters for, and all of the user's."""
    parameters = inspect.signature(factory).parameters
    open_end = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for name in arguments:
        if name not in parameters and not open_end:
            raise InputError(f"{spec} takes no argument {name!r}.", hint=f"It takes {', '.join(parameters) or 'none'}.")
    passed = {name: value for name, value in offered.items() if open_end or name in parameters} | dict(arguments)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for name, each in parameters.items():
        if each.default is each.empty and each.kind not in variable and name not in passed:
            raise InputError(
                f"{spec} needs an argument {name!r}, which brim does not pass.",
                hint=f"Pass it with `--model-arg {name}=VALUE`, or name a function that returns the model.",
            )
    return passed


_FACTORY = re.compile(r"(?:[A-Za-z_][\w.]*|.+\.py):[A-Za-z_][\w.]*")
_SENTENCE_FILES = ("modules.json", "config_sentence_transformers.json")


def model_name(model: str | os.PathLike[str] | Callable[..., Any]) -> str:
    """Return the name of a model; for a factory, the name under which workers import it."""
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    module, name = getattr(model, "__module__", None), getattr(model, "__qualname__", None)
    if callable(model) and name is not None and module not in (None, "__main__") and name.isidentifier():
        return f"{module}:{name}"
    raise ArgumentError(
        f"model= takes a name, a folder, or a factory that can be imported, not {reprlib.repr(model)}.",
        hint='Put the function that makes the model into a separate module, and give "MODULE:FACTORY".',
        option="model",
    )


def is_factory(spec: str) -> bool:
    """Return whether a name is `package.module:function` or `path/to/file.py:function`."""
    return _FACTORY.fullmatch(spec) is not None and not Path(spec).exists()


def load_model(spec: str, options: ModelOptions, *, text: bool = True, image: bool = False) -> Model:
    """Load a model for texts, images, or both."""
    if is_factory(spec):
        return FactoryModel(spec, options)
    looks_like_path = spec.startswith((".", "/", "~")) or spec.count("/") > 1
    if looks_like_path and not Path(spec).expanduser().is_dir():
        hint = "--model takes a folder or a name on the Hub."
        raise InputError(f"The folder {_shown(spec)!r} does not exist.", hint=hint)
    torch = need("torch")
    device = device_for(options.device, torch)
    need("transformers.utils.logging").disable_progress_bar()  # a worker's bars would disturb brim's
    try:
        if _is_sentence_model(spec, options.revision):
            need("sentence_transformers")
            from brim.compute.steps.transformers_models import SentenceModel

            return SentenceModel(spec, options, device, text=text, image=image)
        from brim.compute.steps.transformers_models import pretrained_model

        return pretrained_model(spec, options, device, text=text, image=image)
    except (OSError, ValueError) as error:  # both libraries raise these for invalid names and folders
        raise InputError(
            f"The model {_shown(spec)!r} cannot be loaded: {str(error).strip().splitlines()[0]}",
            hint="Name a folder with its files, a model of the Hub, or package.module:function.",
        ) from error


def _is_sentence_model(spec: str, revision: str | None) -> bool:
    folder = Path(spec).expanduser()
    if folder.is_dir():
        return any((folder / name).exists() for name in _SENTENCE_FILES)
    if "/" not in spec:
        return True  # names of sentence-transformers need no owner: all-MiniLM-L6-v2
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        hf_hub_download(spec, _SENTENCE_FILES[0], revision=revision)
    except EntryNotFoundError:
        return False
    return True


def _shown(spec: str) -> str:
    """Return a name without the folders of this machine."""
    return Path(spec).name or spec if Path(spec).is_absolute() else spec

"""Apply the other files of a tokenizer's folder, such as tokenizer_config.json, which may change ids.

`AutoTokenizer.from_pretrained(folder)` adds tokens and changes settings of tokenizer.json by these files. Where
transformers is installed it loads the folder once, in a separate short-lived process: workers get the backend's JSON
and never import it. Otherwise a folder whose files would change ids is refused.

Not covered: classes of transformers that build their tokenizer from the vocabulary. Only transformers can load those.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from brim.errors import InputError
from brim.monitor.watching.launch import HOME
from brim.records import dataclass

FILE = "tokenizer.json"
CONFIG, SPECIAL_MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word")


@dataclass(frozen=True, slots=True)
class FolderTokenizer:
    """A folder's tokenizer as transformers loads it. `data` is None if tokenizer.json is unchanged.

    `special_tokens` are its special tokens by name, also those that only the class of the tokenizer names.
    """

    data: bytes | None
    eos: str | None
    version: str
    special_tokens: tuple[tuple[str, str], ...] = ()


def load_folder(folder: Path) -> FolderTokenizer | None:
    """Load the tokenizer with transformers; None if the folder has no configuration or transformers is missing.

    Raises:
        InputError: The configuration changes ids, and transformers cannot load it.
    """
    if not any((folder / name).is_file() for name in (CONFIG, SPECIAL_MAP, ADDED)):
        return None
    failure = "transformers is not installed"
    if has_transformers():
        answer = _ask_transformers(folder)
        if isinstance(answer, FolderTokenizer):
            return answer
        failure = f"transformers cannot load the folder ({answer})"
    if (change := find_id_change(folder)) is not None:
        raise InputError(
            f"The files next to {str(folder / FILE)!r} change its ids ({change}), and {failure}.",
            hint=f"pip install transformers, which reads them; or use that file alone: --tokenizer={folder / FILE}.",
        )
    return None


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def _ask_transformers(folder: Path) -> FolderTokenizer | str:
    """Load the folder in a child process; return the tokenizer, or the reason why it could not be loaded."""
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    path = os.pathsep.join([str(HOME), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.run(
        [sys.executable, "-P", "-m", "brim.compute.steps.tokenizer_folder", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **quiet, "PYTHONPATH": path},
        check=False,
    )
    try:
        answer: FolderTokenizer | str = pickle.loads(process.stdout)
    except (pickle.UnpicklingError, EOFError):
        return f"its process ended with {process.returncode}"
    return answer


def find_id_change(folder: Path) -> str | None:
    """Return the first setting next to tokenizer.json that changes the ids of some texts, or None."""
    tokenizer, config = read_json(folder / FILE), read_json(folder / CONFIG)
    added = {token["content"]: token for token in tokenizer.get("added_tokens") or ()}
    for name, content, flags in _named_tokens(folder, config):
        if content not in added:
            return f"{name} adds {content!r}"
        for flag, value in flags.items():
            if added[content].get(flag, value) != value:
                return f"{name} sets {flag} of {content!r} to {value}"
    return next(_changed_settings(tokenizer, config), None)


def _named_tokens(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the tokens in the files next to tokenizer.json: the setting, the token, and its flags."""
    decoder = config.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        content, flags = _token(token)
        yield "added_tokens_decoder", content, {**flags, "id": int(number)}
    for name, settings in ((CONFIG, config), (SPECIAL_MAP, read_json(folder / SPECIAL_MAP))):
        tokens = [(key, settings[key]) for key in _SPECIAL if settings.get(key)]
        for key in _SPECIAL_LISTS:
            values = settings.get(key) or ()
            tokens += [(key, value) for value in (values.values() if isinstance(values, dict) else values)]
        for key, token in tokens:
            yield f"{key} of {name}", *_token(token)
    if not decoder:
        for content, number in read_json(folder / ADDED).items():
            yield ADDED, content, {"id": number}


def _token(token: Any) -> tuple[str, dict[str, Any]]:
    """Return the content of a token, and its flags if it has any."""
    if not isinstance(token, dict):
        return str(token), {}
    return str(token.get("content")), {flag: token[flag] for flag in _FLAGS if flag in token}


def named_special_tokens(held: Mapping[str, Any]) -> dict[str, str]:
    """Return the contents of the special tokens that a configuration names one by one."""
    return {name: _token(held[name])[0] for name in _SPECIAL if held.get(name)}


def _changed_settings(tokenizer: dict[str, Any], config: dict[str, Any]) -> Iterator[str]:
    """Yield settings of the configuration that differ from tokenizer.json."""
    for part in _parts(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        prefix = config.get("add_prefix_space")
        if part.get("type") == "ByteLevel":
            has_prefix = bool(part.get("add_prefix_space"))
        elif part.get("type") == "Metaspace":
            has_prefix = part.get("prepend_scheme", "always") != "never"
        else:
            continue
        if isinstance(prefix, bool) and prefix != has_prefix:
            yield f"add_prefix_space is {prefix}"
    same = {
        "do_lower_case": "lowercase",
        "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "handle_chinese_chars",
    }
    for part in _parts(tokenizer.get("normalizer"), "normalizers"):
        for key, name in same.items() if part.get("type") == "BertNormalizer" else ():
            if key in config and config[key] != part.get(name):
                yield f"{key} is {config[key]}"
    around = json.dumps(tokenizer.get("post_processor"))
    for key, name in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
        content, _ = _token(config.get(name))
        if isinstance(config.get(key), bool) and config.get(name) and config[key] != (json.dumps(content) in around):
            yield f"{key} is {config[key]}"


def _parts(part: Any, key: str) -> list[dict[str, Any]]:
    """Return a normalizer or pre-tokenizer as a list, or the members of a sequence."""
    if not isinstance(part, dict):
        return []
    return [inner for each in part[key] for inner in _parts(each, key)] if key in part else [part]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of the folder; an empty dict if it does not exist."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"The file {str(path)!r} cannot be read: {error}.", hint="Fix it, or move it away.") from error
    return content if isinstance(content, dict) else {}


def main() -> None:
    """In the child: load the folder, and return a FolderTokenizer or the reason of a failure to the parent."""
    answer = os.dup(1)
    os.dup2(2, 1)  # the output of transformers goes to stderr
    try:
        result: FolderTokenizer | str = _load_here(sys.argv[1])
    except Exception as error:  # noqa: BLE001  transformers raises anything
        result = (str(error).splitlines() or [type(error).__name__])[0]
    with open(answer, "wb") as file:
        file.write(pickle.dumps(result))


def _load_here(folder: str) -> FolderTokenizer | str:
    for name in ("torch", "tensorflow", "jax", "flax"):
        sys.modules[name] = None  # type: ignore[assignment]  # a tokenizer needs none, and they take hundreds of MB
    import tokenizers
    import transformers

    loaded = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        return f"{type(loaded).__name__} has no fast tokenizer"
    serialized = backend.to_str()
    plain = tokenizers.Tokenizer.from_file(os.path.join(folder, FILE)).to_str()
    data = None if _deciding(serialized) == _deciding(plain) else serialized.encode()
    eos = loaded.eos_token
    special = named_special_tokens(loaded.special_tokens_map)
    return FolderTokenizer(data, eos if eos is None else str(eos), transformers.__version__, tuple(special.items()))


def _deciding(text: str) -> dict[str, Any]:
    """Return the settings that determine ids: without truncation and padding, which brim switches off."""
    settings: dict[str, Any] = json.loads(text)
    settings["truncation"] = settings["padding"] = None
    for token in settings["added_tokens"]:
        del token["special"]
    return settings


if __name__ == "__main__":
    # The parent knows the classes by their module's name, which is not __main__.
    from brim.compute.steps import tokenizer_folder

    tokenizer_folder.main()

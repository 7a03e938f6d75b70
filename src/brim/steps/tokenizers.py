"""Which tokenizer: a file, a folder, a name on the Hub, or an object, found once and known by its SHA-256."""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from brim.errors import InputError, MissingExtra, SourceChanged
from brim.state.durable import reason

FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """`path` is where workers read it; `data` travels with the step where there is no file."""

    name: str  # for people: what was given
    sha256: str
    path: str | None = None
    data: bytes | None = None

    def read(self) -> bytes:
        data = self.data if self.path is None else _bytes_of(Path(self.path))
        assert data is not None
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise SourceChanged(
                f"The tokenizer {self.name} is not what it was when the job began.",
                hint="Give the old file back, or start over with --fresh.",
                path=self.path,
            )
        return data


class LoadedTokenizer:
    """A tokenizer as brim uses it: its own truncation and padding are off, and `switched_off` names what was on."""

    def __init__(self, data: bytes, name: str) -> None:
        self.raw = _parse(data, name)
        self.name = name
        on = (("truncation", self.raw.truncation), ("padding", self.raw.padding))
        self.switched_off = tuple(what for what, setting in on if setting is not None)
        self.raw.no_truncation()
        self.raw.no_padding()

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, which is what a model's embedding needs."""
        return 1 + max(self.raw.get_vocab(with_added_tokens=True).values(), default=-1)

    def id_of(self, token: str) -> int:
        found: int | None = self.raw.token_to_id(token)
        if found is not None:
            return found
        near = difflib.get_close_matches(token, self._likely(token), n=4, cutoff=0.5)
        hint = (
            f"Close to it are {', '.join(map(repr, near))}." if near else "Tokens that can be added stand in its file."
        )
        raise InputError(f"The tokenizer {self.name} has no token {token!r}.", hint=hint, token=token)

    def frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that are put before and after a document."""
        for probe in ("a", "the", "0", "."):
            bare = self.raw.encode(probe, add_special_tokens=False).ids
            whole = self.raw.encode(probe, add_special_tokens=True).ids
            for start in range(len(whole) - len(bare) + 1) if bare else ():
                if whole[start : start + len(bare)] == bare:
                    return whole[:start], whole[start + len(bare) :]
        return [], []

    def _likely(self, token: str) -> list[str]:
        """Special tokens first: it is mostly one of them that is meant."""
        special = [added.content for added in self.raw.get_added_tokens_decoder().values()]
        first = [known for known in self.raw.get_vocab() if known[:1] == token[:1] and known not in special]
        return special + sorted(first)[:5000]


def find_tokenizer(given: Any) -> TokenizerFile:
    """A path to tokenizer.json or to a folder that has one, a name on the Hub, or a tokenizer of `tokenizers`
    or `transformers` (fast)."""
    backend = getattr(given, "backend_tokenizer", given)
    if hasattr(backend, "to_str"):
        data = str(backend.to_str()).encode()
        return TokenizerFile("given as an object", hashlib.sha256(data).hexdigest(), data=data)
    path = Path(given).expanduser()
    if path.is_dir():
        if not (path / FILE).is_file():
            raise InputError(
                f"The folder {str(given)!r} has no {FILE}.",
                hint="Save the fast tokenizer there: AutoTokenizer.from_pretrained(...).save_pretrained(folder).",
            )
        path = path / FILE
    elif not path.exists():
        path = _from_hub(str(given))
    data = _bytes_of(path)
    return TokenizerFile(str(given), hashlib.sha256(data).hexdigest(), path=str(path.resolve()))


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"The tokenizer {str(path)!r} cannot be read: {reason(error)}.", path=str(path)) from error


def _from_hub(name: str) -> Path:
    if name.endswith(".json") or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise InputError(f"There is no tokenizer file {name!r}.", hint=f"Give the path of a {FILE}.")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, FILE))
    except HFValidationError as error:
        raise InputError(
            f"{name!r} is no file, no folder and no name on the Hub.", hint=f"Give the path of a {FILE}."
        ) from error
    except LocalEntryNotFoundError as error:
        raise InputError(
            f"{name!r} is no file or folder here, not in the local cache, and the Hub cannot be reached.",
            hint=f"Connect once to fetch it, or give the path of its {FILE}.",
        ) from error
    except EntryNotFoundError as error:
        raise InputError(
            f"{name!r} on the Hub has no {FILE}.",
            hint="Load it with transformers, save_pretrained(folder), and give the folder.",
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise InputError(
            f"{name!r} is no file or folder here, and the Hub does not give it: {str(error).splitlines()[0]}",
            hint="Check the name; a private one needs `hf auth login`.",
        ) from error


def _parse(data: bytes, name: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtra(
            "Tokenising needs the tokenizers library.", hint="pip install 'brim[compute]'", extra="compute"
        ) from error
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises nothing more exact
        raise InputError(f"{name} is not a tokenizer: {str(error).splitlines()[0]}", hint=f"Give a {FILE}.") from error

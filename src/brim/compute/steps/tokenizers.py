"""Which tokenizer: a file, a folder, a name on the Hub, or an object, found once and known by its SHA-256.

What encoding gives is the ids of all texts in one array, and where each text ends in it. No Python lists.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import json
import re
import tempfile
from array import array
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.compute.steps.tokenizer_folder import ADDED, CONFIG, FILE, SPECIAL_MAP, load_folder, read_json
from brim.errors import InputError, SourceChangedError
from brim.extras import missing
from brim.records import dataclass
from brim.state.atomic_files import reason

Ids = npt.NDArray[np.uint32]
Places = npt.NDArray[np.uint32]  # a row for each token: where it starts and ends


@dataclass(frozen=True, slots=True)
class Encoded:
    """Text `n` has `values[offsets[n] : offsets[n + 1]]`."""

    offsets: npt.NDArray[np.int64]
    values: Ids

    @classmethod
    def of(cls, parts: Sequence[Ids]) -> Encoded:
        return cls(offsets_of(list(map(len, parts))), np.concatenate(parts) if parts else np.empty(0, np.uint32))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> Ids:
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    def with_others(self, rows: npt.NDArray[np.int64], others: Encoded) -> Encoded:
        """These and others in one: `rows` are the places of the others, in the order of the result."""
        if not len(rows):
            return self
        count = len(self) + len(rows)
        places = np.zeros(count, bool)
        places[rows] = True
        lengths = np.empty(count, np.int64)
        lengths[places], lengths[~places] = others.lengths, self.lengths
        values = np.empty(len(self.values) + len(others.values), np.uint32)
        theirs = np.repeat(places, lengths)
        values[theirs], values[~theirs] = others.values, self.values
        return Encoded(offsets_of(lengths), values)

    def cut(self, most: int) -> Encoded:
        """No text has more than so many ids: those at its start."""
        lengths = self.lengths
        if not len(lengths) or lengths.max() <= most:
            return self
        place = np.arange(len(self.values)) - np.repeat(self.offsets[:-1], lengths)
        return Encoded(offsets_of(np.minimum(lengths, most)), self.values[place < most])

    def framed(self, before: Sequence[int], after: Sequence[int], rows: npt.NDArray[np.bool_]) -> Encoded:
        """With the same ids before and after each of the texts that `rows` says."""
        if not (before or after) or not rows.any():
            return self
        lengths = self.lengths + rows * (len(before) + len(after))
        offsets = offsets_of(lengths)
        values = np.empty(int(offsets[-1]), np.uint32)
        inside = np.ones(len(values), bool)
        starts, ends = offsets[:-1][rows], offsets[1:][rows]
        for number, one in enumerate(before):
            values[starts + number], inside[starts + number] = one, False
        for number, one in enumerate(reversed(after), 1):
            values[ends - number], inside[ends - number] = one, False
        values[inside] = self.values
        return Encoded(offsets, values)


class Encoder(Protocol):
    """Who turns texts into ids, without special tokens around them. Texts are strings of Arrow without nulls."""

    @property
    def encoder(self) -> str:
        """What encodes, for people."""

    def encode(self, texts: pa.Array) -> Encoded: ...


def offsets_of(lengths: Any) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


_BESIDE = (CONFIG, SPECIAL_MAP, ADDED, "config.json")  # what transformers reads of a repository, beside FILE


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """`path` is where workers read it; `data` travels with the step where there is no file."""

    name: str  # for people: what was given
    sha256: str
    path: str | None = None
    data: bytes | None = None
    eos: str | None = None  # the token that ends a document, as the tokenizer's configuration names it
    eos_from: str = ""  # the file, or the object, that names it
    note: str = ""  # for people: what was done to load it
    folder: str | None = None  # where its other files are
    special_tokens: tuple[tuple[str, str], ...] | None = None  # by name, as transformers tells them

    def read(self) -> bytes:
        data = self.data if self.path is None else _bytes_of(Path(self.path))
        assert data is not None
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise SourceChangedError(
                f"The tokenizer {self.name} is not what it was when the job began.",
                hint="Give the old file back, or start over with --fresh.",
                path=self.path,
            )
        return data


class LoadedTokenizer:
    """The reference: the `tokenizers` that is installed, 0.2x or 1.x, as brim uses it.

    A tokenizer's own truncation and padding are off, and `switched_off` names what was on.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self.name, self.generation, self._data = name, generation(), data
        self.raw = _parse(data, name)
        on = (("truncation", self.raw.truncation), ("padding", self.raw.padding))
        self.switched_off = tuple(what for what, setting in on if setting is not None)
        if self.generation:
            self.raw.truncation = self.raw.padding = None
        else:
            self.raw.no_truncation()
            self.raw.no_padding()

    @property
    def encoder(self) -> str:
        """What encodes, for people."""
        return reference_name()

    @property
    def dropout(self) -> float:
        """The share of merges that are left out by chance, so that a text has other ids each time. 1.x has none."""
        return (0 if self.generation else getattr(self.raw.model, "dropout", None)) or 0.0

    def refuse_dropout(self) -> None:
        """Raise InputError if a text would have other ids each time."""
        if 0 < self.dropout < 1:
            raise InputError(
                f"The tokenizer {self.name} leaves out merges by chance (dropout {self.dropout:.2g}): a text would "
                "have other ids each time.",
                hint='Set "dropout" of its model to null.',
            )

    def ids(self, texts: Sequence[str], special: bool = False) -> list[Ids]:
        """The ids of each text, by itself; with what the tokenizer puts around it if it is `special`."""
        if not texts:
            return []
        if self.generation:
            return [each.ids_array for each in self.raw.encode_batch(list(texts), add_special_tokens=special)]
        # As arrays of C integers: NumPy takes a list of them apart several times as slowly.
        return [
            np.frombuffer(array("I", each.ids), np.uint32)
            for each in self.raw.encode_batch_fast(list(texts), add_special_tokens=special)
        ]

    def encode(self, texts: pa.Array) -> Encoded:
        return Encoded.of(self.ids(texts.to_pylist()))

    def ids_and_places(self, texts: Sequence[str]) -> list[tuple[Ids, Places]]:
        """Return the ids of each text, and where each token starts and ends in it (in characters)."""
        found = []
        for each in self.raw.encode_batch(list(texts), add_special_tokens=False):
            places = array("I", itertools.chain.from_iterable(each.offsets))
            pairs = np.frombuffer(places, np.uint32).reshape(-1, 2) if places else np.empty((0, 2), np.uint32)
            found.append((np.frombuffer(array("I", each.ids), np.uint32), pairs))
        return found

    def token_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Where the words end, and where the other tokens; nothing if the library does not tell."""
        if self.generation:
            return [], list(range(1, len(text)))
        found = self.raw.encode(text, add_special_tokens=False)
        words, ends = found.word_ids, [end for _, end in found.offsets]
        inside = range(len(ends) - 1)
        last = [ends[number] for number in inside if words[number] != words[number + 1]]
        return last, [ends[number] for number in inside if words[number] == words[number + 1]]

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        if not self.generation:
            found: dict[str, int] = self.raw.get_vocab(with_added_tokens=True)
            return found
        held = json.loads(self._data)
        words = held["model"]["vocab"]
        if not isinstance(words, dict):  # of Unigram: each with its score
            words = {word: number for number, (word, _) in enumerate(words)}
        return words | {added["content"]: added["id"] for added in held.get("added_tokens") or ()}

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, which is what a model's embedding needs."""
        return 1 + max(self._vocabulary.values(), default=-1)

    def has(self, token: str) -> bool:
        return (self._vocabulary.get(token) if self.generation else self.raw.token_to_id(token)) is not None

    def id_of(self, token: str) -> int:
        found: int | None = self._vocabulary.get(token) if self.generation else self.raw.token_to_id(token)
        if found is not None:
            return found
        near = difflib.get_close_matches(token, self._likely(token), n=4, cutoff=0.5)
        hint = (
            f"Close to it are {', '.join(map(repr, near))}." if near else "Tokens that can be added stand in its file."
        )
        raise InputError(f"The tokenizer {self.name} has no token {token!r}.", hint=hint, token=token)

    def frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that are put before and after a document, whatever it is."""
        probes = self._known(("a", "the", "0", ".")) or self._known(list(itertools.islice(self._vocabulary, 64)))
        bare = [ids.tolist() for ids in self.ids(probes)]
        whole = [ids.tolist() for ids in self.ids(probes, special=True)]
        if not probes:  # nothing that it knows: what stands around nothing
            (around,) = self.ids([""], special=True)
            return around.tolist(), []
        for start in range(len(whole[0]) - len(bare[0]) + 1):
            before, after = whole[0][:start], whole[0][start + len(bare[0]) :]
            if all([*before, *inner, *after] == outer for inner, outer in zip(bare, whole, strict=True)):
                return before, after
        raise InputError(
            f"What the tokenizer {self.name} adds to a text depends on the text.",
            hint="Leave it out with --no-special-tokens.",
        )

    def _known(self, texts: Sequence[str]) -> list[str]:
        """Those that have ids."""
        return [text for text, ids in zip(texts, self.ids(texts), strict=True) if len(ids)]

    def _likely(self, token: str) -> list[str]:
        """Special tokens first: it is mostly one of them that is meant."""
        special = [added["content"] for added in json.loads(self._data).get("added_tokens") or ()]
        first = [known for known in self._vocabulary if known[:1] == token[:1] and known not in special]
        return special + sorted(first)[:5000]


def find_tokenizer(given: Any) -> TokenizerFile:
    """A path to tokenizer.json or to a folder that has one, a name on the Hub, or a tokenizer of `tokenizers`
    or `transformers` (fast)."""
    backend = getattr(given, "backend_tokenizer", given)
    if (data := _object_bytes(backend)) is not None:
        eos = getattr(given, "eos_token", None)
        return TokenizerFile("given as an object", hashlib.sha256(data).hexdigest(), None, data, eos, "the tokenizer")
    path = Path(given).expanduser()
    is_file = path.is_file()
    if path.is_dir():
        if not (path / FILE).is_file():
            raise InputError(
                f"The folder {str(given)!r} has no {FILE}.",
                hint="Save the fast tokenizer there: AutoTokenizer.from_pretrained(...).save_pretrained(folder).",
            )
        path = path / FILE
    elif not path.exists():
        path = _from_hub(str(given))
    loaded = None if is_file else load_folder(path.parent)
    folder, special = str(path.parent), None if loaded is None else loaded.special_tokens
    eos, eos_from = _configured_eos(path.parent)
    if loaded is not None:
        eos, eos_from = loaded.eos, eos_from or "its class"
    if loaded is None or loaded.data is None:
        sha256 = hashlib.sha256(_bytes_of(path)).hexdigest()
        return TokenizerFile(str(given), sha256, str(path.resolve()), None, eos, eos_from, "", folder, special)
    sha256 = hashlib.sha256(loaded.data).hexdigest()
    note = f"the files next to {FILE} change it: transformers {loaded.version} loaded the folder"
    return TokenizerFile(str(given), sha256, None, loaded.data, eos, eos_from, note, folder, special)


def _configured_eos(folder: Path) -> tuple[str | None, str]:
    """The `eos_token` that the files next to a tokenizer name, and the name of the file."""
    for name in (CONFIG, SPECIAL_MAP):
        token = read_json(folder / name).get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and content:
            return content, name
    return None, ""


# A file, mistyped or not there: a name on the Hub has dots for versions (Llama-3.1-8B), hardly such an end.
_FILE_NAME = re.compile(r"(^|/)tokenizer\.|\.(jso?n?|josn|jsonl|txt|model|bin|vocab|bpe|spm|zip|gz|zst)$", re.I)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"The tokenizer {str(path)!r} cannot be read: {reason(error)}.", path=str(path)) from error


def _from_hub(name: str) -> Path:
    if _FILE_NAME.search(name) or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise InputError(f"There is no tokenizer file {name!r}.", hint=f"Give the path of a {FILE}.")
    _version()  # before the Hub is asked: without the library its file is of no use
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(hf_hub_download(name, FILE))
        for other in _BESIDE:
            with contextlib.suppress(EntryNotFoundError):
                hf_hub_download(name, other)
        return path
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


def _object_bytes(given: Any) -> bytes | None:
    """What a tokenizer of `tokenizers` would save; None if it is not one."""
    if hasattr(given, "to_str"):
        return str(given.to_str()).encode()
    if type(given).__module__.partition(".")[0] != "tokenizers":
        return None
    # 1.x saves nothing, and travels by pickle as its file's text.
    held = given.__reduce__()[1]
    if held and isinstance(held[0], str):
        return held[0].encode()
    raise InputError("This tokenizer cannot be sent to workers.", hint=f"Give the path of its {FILE}.")


@cache
def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tokenizers")
    except PackageNotFoundError as error:
        raise missing("compute", "Tokenising needs the tokenizers library.", "tokenizers") from error


def reference_name() -> str:
    return f"tokenizers {_version()}"


def generation() -> int:
    """0 for tokenizers 0.2x, 1 for 1.x: their tables of Unicode differ, and so may the ids."""
    return min(int(_version().partition(".")[0]), 1)


def _parse(data: bytes, name: str) -> Any:
    _version()
    from tokenizers import Tokenizer

    try:
        if not generation():
            return Tokenizer.from_buffer(data)
        with tempfile.NamedTemporaryFile(suffix=".json") as file:  # 1.x reads nothing else
            file.write(data)
            file.flush()
            return Tokenizer.from_file(file.name)
    except Exception as error:  # tokenizers raises nothing more exact
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if _has_model(data):
            raise InputError(
                f"tokenizers {_version()} does not take the tokenizer {name}: {reason}",
                hint="Another version may: pip install 'tokenizers<1'." if generation() else "A newer version may.",
            ) from error
        raise InputError(f"{name} is not a tokenizer: {reason}", hint=f"Give a {FILE}.") from error


def _has_model(data: bytes) -> bool:
    """Whether this is what a tokenizer's file looks like."""
    try:
        held = json.loads(data)
    except ValueError:
        return False
    return isinstance(held, dict) and isinstance(held.get("model"), dict)

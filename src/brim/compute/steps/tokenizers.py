"""Which tokenizer: a file, a folder, a name on the Hub, or an object, found once and known by its SHA-256.

Encoding returns the ids of all texts in one array, and where each text ends in it. No Python lists.
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
import pyarrow.compute as pc

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
    def from_parts(cls, parts: Sequence[Ids]) -> Encoded:
        return cls(offsets_of(list(map(len, parts))), np.concatenate(parts) if parts else np.empty(0, np.uint32))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> Ids:
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    def with_others(self, rows: npt.NDArray[np.int64], inserted: Encoded) -> Encoded:
        """Insert other texts: `rows` are their rows in the result, in order."""
        if not len(rows):
            return self
        count = len(self) + len(rows)
        is_inserted = np.zeros(count, bool)
        is_inserted[rows] = True
        lengths = np.empty(count, np.int64)
        lengths[is_inserted], lengths[~is_inserted] = inserted.lengths, self.lengths
        values = np.empty(len(self.values) + len(inserted.values), np.uint32)
        theirs = np.repeat(is_inserted, lengths)
        values[theirs], values[~theirs] = inserted.values, self.values
        return Encoded(offsets_of(lengths), values)

    def cut(self, max_ids: int) -> Encoded:
        """Keep the first `max_ids` ids of each text."""
        lengths = self.lengths
        if not len(lengths) or lengths.max() <= max_ids:
            return self
        position = np.arange(len(self.values)) - np.repeat(self.offsets[:-1], lengths)
        return Encoded(offsets_of(np.minimum(lengths, max_ids)), self.values[position < max_ids])

    def framed(self, before: Sequence[int], after: Sequence[int], rows: npt.NDArray[np.bool_]) -> Encoded:
        """Add the same ids before and after each text for which `rows` is true."""
        if not (before or after) or not rows.any():
            return self
        lengths = self.lengths + rows * (len(before) + len(after))
        offsets = offsets_of(lengths)
        values = np.empty(int(offsets[-1]), np.uint32)
        inside = np.ones(len(values), bool)
        starts, ends = offsets[:-1][rows], offsets[1:][rows]
        for number, token in enumerate(before):
            values[starts + number], inside[starts + number] = token, False
        for number, token in enumerate(reversed(after), 1):
            values[ends - number], inside[ends - number] = token, False
        values[inside] = self.values
        return Encoded(offsets, values)


class Encoder(Protocol):
    """Converts texts to ids, without special tokens. Texts are an Arrow array of strings without nulls."""

    @property
    def encoder(self) -> str:
        """The name and version of the library, for messages."""

    def encode(self, texts: pa.Array) -> Encoded: ...


def offsets_of(lengths: Any) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


_OTHER_FILES = (CONFIG, SPECIAL_MAP, ADDED, "config.json")  # the other files of a repository that transformers reads


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A tokenizer: workers read it from `path`; `data` is sent with the step if it has no file."""

    name: str  # for messages: as the user gave it
    sha256: str
    path: str | None = None
    data: bytes | None = None
    eos: str | None = None  # the token that ends a document, as the tokenizer's configuration names it
    eos_from: str = ""  # the file, or the object, that names it
    note: str = ""  # for messages: how it was loaded
    folder: str | None = None  # where its other files are
    special_tokens: tuple[tuple[str, str], ...] | None = None  # by name, as transformers has them

    def read(self) -> bytes:
        data = self.data if self.path is None else _bytes_of(Path(self.path))
        assert data is not None
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise SourceChangedError(
                f"The tokenizer {self.name} changed since the job began.",
                hint="Give the old file back, or start over with --fresh.",
                path=self.path,
            )
        return data


_GROUP_BYTES = 1 << 18  # of text that one thread encodes at once, which takes up to 50 MB


class LoadedTokenizer:
    """The reference: the `tokenizers` that is installed, 0.2x or 1.x, as brim uses it.

    The tokenizer's truncation and padding are switched off; `switched_off` names those that were on.
    """

    def __init__(self, data: bytes, name: str, threads: int = 1) -> None:
        self.name, self.generation, self._data = name, generation(), data
        self._group_bytes = _GROUP_BYTES * threads
        self.raw = _parse(data, name)
        on = (("truncation", self.raw.truncation), ("padding", self.raw.padding))
        self.switched_off = tuple(label for label, setting in on if setting is not None)
        if self.generation:
            self.raw.truncation = self.raw.padding = None
        else:
            self.raw.no_truncation()
            self.raw.no_padding()

    @property
    def encoder(self) -> str:
        """The name and version of the library, for messages."""
        return reference_name()

    @property
    def dropout(self) -> float:
        """The fraction of merges that are skipped at random, so that ids of a text vary. 1.x has none."""
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
        """Return the ids of each text, with the tokenizer's special tokens if `special`."""
        if not texts:
            return []
        if self.generation:
            return [each.ids_array for each in self.raw.encode_batch(list(texts), add_special_tokens=special)]
        # As arrays of C integers: NumPy converts lists several times more slowly.
        return [
            np.frombuffer(array("I", each.ids), np.uint32)
            for each in self.raw.encode_batch_fast(list(texts), add_special_tokens=special)
        ]

    def encode(self, texts: pa.Array) -> Encoded:
        """Encode groups of texts, since the library needs up to 200 bytes per byte of text."""
        parts, start = list[Ids](), 0
        ends = np.cumsum(pc.binary_length(texts).to_numpy(zero_copy_only=False), dtype=np.int64)
        while start < len(texts):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + self._group_bytes, side="right")))
            parts += self.ids(texts.slice(start, stop - start).to_pylist())
            start = stop
        return Encoded.from_parts(parts)

    def ids_and_places(self, texts: Sequence[str]) -> list[tuple[Ids, Places]]:
        """Return the ids of each text, and where each token starts and ends in it (in characters)."""
        found = []
        for each in self.raw.encode_batch(list(texts), add_special_tokens=False):
            places = array("I", itertools.chain.from_iterable(each.offsets))
            pairs = np.frombuffer(places, np.uint32).reshape(-1, 2) if places else np.empty((0, 2), np.uint32)
            found.append((np.frombuffer(array("I", each.ids), np.uint32), pairs))
        return found

    def token_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return where words end and where other tokens end; 1.x does not report ends of words."""
        if self.generation:
            return [], list(range(1, len(text)))
        encoding = self.raw.encode(text, add_special_tokens=False)
        word_ids, ends = encoding.word_ids, [end for _, end in encoding.offsets]
        inside = range(len(ends) - 1)
        last = [ends[number] for number in inside if word_ids[number] != word_ids[number + 1]]
        return last, [ends[number] for number in inside if word_ids[number] == word_ids[number + 1]]

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        if not self.generation:
            vocabulary: dict[str, int] = self.raw.get_vocab(with_added_tokens=True)
            return vocabulary
        settings = json.loads(self._data)
        vocabulary = settings["model"]["vocab"]
        if not isinstance(vocabulary, dict):  # Unigram: pairs of token and score
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        return vocabulary | {added["content"]: added["id"] for added in settings.get("added_tokens") or ()}

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, which is what a model's embedding needs."""
        return 1 + max(self._vocabulary.values(), default=-1)

    def has_token(self, token: str) -> bool:
        return (self._vocabulary.get(token) if self.generation else self.raw.token_to_id(token)) is not None

    def id_of(self, token: str) -> int:
        number: int | None = self._vocabulary.get(token) if self.generation else self.raw.token_to_id(token)
        if number is not None:
            return number
        close = difflib.get_close_matches(token, self._likely(token), n=4, cutoff=0.5)
        listed = f"Close to it are {', '.join(map(repr, close))}."
        hint = listed if close else "Tokens that can be added stand in its file."
        raise InputError(f"The tokenizer {self.name} has no token {token!r}.", hint=hint, token=token)

    def frame(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that are put before and after every document."""
        probes = self._with_ids(("a", "the", "0", ".")) or self._with_ids(list(itertools.islice(self._vocabulary, 64)))
        bare = [ids.tolist() for ids in self.ids(probes)]
        whole = [ids.tolist() for ids in self.ids(probes, special=True)]
        if not probes:  # no text has ids: use the special tokens of an empty text
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

    def _with_ids(self, texts: Sequence[str]) -> list[str]:
        """Return the texts that have ids."""
        return [text for text, ids in zip(texts, self.ids(texts), strict=True) if len(ids)]

    def _likely(self, token: str) -> list[str]:
        """Return tokens to suggest, special tokens first."""
        special = [added["content"] for added in json.loads(self._data).get("added_tokens") or ()]
        first = [text for text in self._vocabulary if text[:1] == token[:1] and text not in special]
        return special + sorted(first)[:5000]


def find_tokenizer(tokenizer: Any) -> TokenizerFile:
    """Find a tokenizer by path (tokenizer.json or its folder) or Hub name, or use a tokenizer object."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if (data := _object_bytes(backend)) is not None:
        eos = getattr(tokenizer, "eos_token", None)
        return TokenizerFile("given as an object", hashlib.sha256(data).hexdigest(), None, data, eos, "the tokenizer")
    path = Path(tokenizer).expanduser()
    is_file = path.is_file()
    if path.is_dir():
        if not (path / FILE).is_file():
            raise InputError(
                f"The folder {str(tokenizer)!r} has no {FILE}.",
                hint="Save the fast tokenizer there: AutoTokenizer.from_pretrained(...).save_pretrained(folder).",
            )
        path = path / FILE
    elif not path.exists():
        path = _from_hub(str(tokenizer))
    loaded = None if is_file else load_folder(path.parent)
    folder, special = str(path.parent), None if loaded is None else loaded.special_tokens
    eos, eos_from = _configured_eos(path.parent)
    if loaded is not None:
        eos, eos_from = loaded.eos, eos_from or "its class"
    if loaded is None or loaded.data is None:
        sha256 = hashlib.sha256(_bytes_of(path)).hexdigest()
        return TokenizerFile(str(tokenizer), sha256, str(path.resolve()), None, eos, eos_from, "", folder, special)
    sha256 = hashlib.sha256(loaded.data).hexdigest()
    note = f"the files next to {FILE} change it: transformers {loaded.version} loaded the folder"
    return TokenizerFile(str(tokenizer), sha256, None, loaded.data, eos, eos_from, note, folder, special)


def _configured_eos(folder: Path) -> tuple[str | None, str]:
    """Return the `eos_token` in the files next to a tokenizer, and the name of the file."""
    for name in (CONFIG, SPECIAL_MAP):
        token = read_json(folder / name).get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and content:
            return content, name
    return None, ""


# A mistyped or missing file: names on the Hub have dots for versions (Llama-3.1-8B), but not these endings.
_FILE_NAME = re.compile(r"(^|/)tokenizer\.|\.(jso?n?|josn|jsonl|txt|model|bin|vocab|bpe|spm|zip|gz|zst)$", re.I)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"The tokenizer {str(path)!r} cannot be read: {reason(error)}.", path=str(path)) from error


def _from_hub(name: str) -> Path:
    if _FILE_NAME.search(name) or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise InputError(f"The tokenizer file {name!r} does not exist.", hint=f"Give the path of a {FILE}.")
    _version()  # before the request: without the library the file cannot be used
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(hf_hub_download(name, FILE))
        for file_name in _OTHER_FILES:
            with contextlib.suppress(EntryNotFoundError):
                hf_hub_download(name, file_name)
        return path
    except HFValidationError as error:
        raise InputError(
            f"{name!r} is not a file, a folder or a name on the Hub.", hint=f"Give the path of a {FILE}."
        ) from error
    except LocalEntryNotFoundError as error:
        raise InputError(
            f"{name!r} is not a local file or folder, not in the local cache, and the Hub cannot be reached.",
            hint=f"Connect once to fetch it, or give the path of its {FILE}.",
        ) from error
    except EntryNotFoundError as error:
        raise InputError(
            f"{name!r} on the Hub has no {FILE}.",
            hint="Load it with transformers, save_pretrained(folder), and give the folder.",
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise InputError(
            f"{name!r} is not a local file or folder, and the Hub does not provide it: {str(error).splitlines()[0]}",
            hint="Check the name; a private one needs `hf auth login`.",
        ) from error


def _object_bytes(tokenizer: Any) -> bytes | None:
    """Return the JSON of a `tokenizers` tokenizer; None for other objects."""
    if hasattr(tokenizer, "to_str"):
        return str(tokenizer.to_str()).encode()
    if type(tokenizer).__module__.partition(".")[0] != "tokenizers":
        return None
    # 1.x cannot save, but its pickle contains the text of its file.
    arguments = tokenizer.__reduce__()[1]
    if arguments and isinstance(arguments[0], str):
        return arguments[0].encode()
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
    """Return 0 for tokenizers 0.2x, 1 for 1.x: their Unicode tables differ, and so may the ids."""
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
        settings, reason = None, (str(error).splitlines() or [type(error).__name__])[0]
        with contextlib.suppress(ValueError):
            settings = json.loads(data)
        if isinstance(settings, dict) and isinstance(settings.get("model"), dict):
            raise InputError(
                f"tokenizers {_version()} does not take the tokenizer {name}: {reason}",
                hint="Another version may: pip install 'tokenizers<1'." if generation() else "A newer version may.",
            ) from error
        raise InputError(f"{name} is not a tokenizer: {reason}", hint=f"Give a {FILE}.") from error

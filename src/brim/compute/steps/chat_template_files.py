"""Find the chat templates of a tokenizer, and the special tokens that they may name.

In this order: a file that the user passes; `chat_template.jinja` and `additional_chat_templates/` next to the
tokenizer; the `chat_template` of `tokenizer_config.json`. A tokenizer with several templates has a default one and one
for conversations with tools.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brim.compute.steps.tokenizer_folder import CONFIG, SPECIAL_MAP, named_special_tokens, read_json
from brim.compute.steps.tokenizers import TokenizerFile
from brim.errors import InputError
from brim.records import dataclass
from brim.state.atomic_files import reason

FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"
DEFAULT, WITH_TOOLS = "default", "tool_use"
# What templates get where the user names no date: the one that the templates of Llama 3 have where there is no clock.
NO_DATE = "2024-07-26"
_USES_DATE = re.compile(r"\bstrftime_now\b")


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """The templates of a tokenizer by name, its special tokens by name, and where the templates come from."""

    texts: tuple[tuple[str, str], ...]
    special_tokens: tuple[tuple[str, str], ...]
    source: str

    def choose(self, tools: Any) -> str:
        """Return the name of the template for a conversation with these tools."""
        names = [name for name, _ in self.texts]
        return WITH_TOOLS if tools is not None and WITH_TOOLS in names else names[0]

    @property
    def uses_date(self) -> bool:
        return any(_USES_DATE.search(text) for _, text in self.texts)

    @property
    def fingerprint_inputs(self) -> dict[str, Any]:
        digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.texts}
        return {"templates": digests, "special_tokens": dict(self.special_tokens)}


def find_chat_templates(
    given: Any, tokenizer: TokenizerFile, path: str | None, *, is_needed: bool = True
) -> ChatTemplates | None:
    """Return the templates for a tokenizer; `given` is what the user passed as one, `path` the user's template.

    None if there is none and none is needed, as for pairs of plain texts.

    Raises:
        InputError: There is no template, or several without a default one.
    """
    special = tuple(sorted(_special_tokens(given, tokenizer).items()))
    if path is not None:
        return ChatTemplates(((DEFAULT, _read(Path(path).expanduser())),), special, str(path))
    found = _of_object(given)
    if found is None and tokenizer.folder is not None:
        folder = Path(tokenizer.folder)
        if not Path(given).expanduser().exists():
            _download(str(given))  # it is a name on the Hub
        found = _of_folder(folder)
    if not found:
        if not is_needed:
            return None
        raise InputError(
            f"The tokenizer {tokenizer.name} has no chat template.", hint="Pass one: --chat-template=FILE."
        )
    if DEFAULT not in found and len(found) > 1:
        names = ", ".join(sorted(found))
        raise InputError(
            f"The tokenizer {tokenizer.name} has the chat templates {names}, and none is the default.",
            hint="Save the one to use in a file, and pass it: --chat-template=FILE.",
        )
    first = DEFAULT if DEFAULT in found else next(iter(found))
    texts = [(first, found[first])] + [(WITH_TOOLS, found[name]) for name in found if name == WITH_TOOLS != first]
    return ChatTemplates(tuple(texts), special, tokenizer.name)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(
            f"The chat template {str(path)!r} cannot be read: {why}.",
            hint="Pass the path of a text file.",
            path=str(path),
        ) from error


def _of_object(given: Any) -> dict[str, str] | None:
    """Return the templates of a tokenizer of transformers."""
    template = getattr(given, "chat_template", None)
    if template is None:
        return None
    return dict(template) if isinstance(template, Mapping) else {DEFAULT: str(template)}


def _of_folder(folder: Path) -> dict[str, str]:
    found = {DEFAULT: _read(folder / FILE)} if (folder / FILE).is_file() else {}
    found |= {path.stem: _read(path) for path in sorted((folder / FOLDER).glob("*.jinja"))}
    if found:
        return found
    template = read_json(folder / CONFIG).get("chat_template")
    if isinstance(template, list):
        return {str(each["name"]): str(each["template"]) for each in template}
    return {DEFAULT: template} if isinstance(template, str) else {}


def _download(name: str) -> None:
    """Fetch the template files of a repository next to its tokenizer; those that it does not have are left out."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    for file in (FILE, f"{FOLDER}/{WITH_TOOLS}.jinja"):
        with contextlib.suppress(EntryNotFoundError, HfHubHTTPError, OSError):
            hf_hub_download(name, file)


def _special_tokens(given: Any, tokenizer: TokenizerFile) -> dict[str, str]:
    """Return the special tokens by name, as transformers tells them or as the files next to the tokenizer do."""
    of_object = getattr(given, "special_tokens_map", None)
    if isinstance(of_object, Mapping):
        return {name: str(token) for name, token in of_object.items() if isinstance(token, str)}
    if tokenizer.special_tokens is not None:
        return dict(tokenizer.special_tokens)
    if tokenizer.folder is None:
        return {}
    folder = Path(tokenizer.folder)
    return named_special_tokens(read_json(folder / SPECIAL_MAP)) | named_special_tokens(read_json(folder / CONFIG))

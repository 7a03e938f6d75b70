"""Read conversations from rows: messages, prompts with completions, and ShareGPT turns.

The result is what a chat template takes: messages with a role and a content, tools, and further arguments. Keys that
are null are removed at every depth, because Arrow fills missing keys of a struct with null and a template would take
them as given. Values that are JSON texts (columns of JSONL files, and `tools`) are parsed row by row.

Not covered: images, audio and video in messages, which need a processor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from brim.errors import InputError
from brim.records import dataclass

MESSAGES, SHAREGPT = "messages", "conversations"
TOOLS, TEMPLATE_ARGUMENTS = "tools", "chat_template_kwargs"
# The roles that ShareGPT datasets use, and the roles of chat templates.
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatColumns:
    """The columns of a source that make a conversation.

    Either `messages`, or `prompt` and `completion`. `json_columns` hold JSON texts. `roles` renames roles.
    """

    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    roles: tuple[tuple[str, str], ...] = ()
    tools: bool = False
    template_arguments: bool = False
    json_columns: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        optional = [TOOLS] * self.tools + [TEMPLATE_ARGUMENTS] * self.template_arguments
        return tuple(name for name in (self.messages, self.prompt, self.completion, *optional) if name is not None)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a row. The first `prompt_messages` of them are the prompt, if the row has one."""

    messages: list[Message]
    prompt_messages: int | None = None
    tools: list[Any] | None = None
    arguments: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TextPair:
    """A prompt and a completion that are plain texts: no chat template applies to them."""

    prompt: str
    completion: str


def read_conversation(row: Mapping[str, Any], columns: ChatColumns) -> Conversation | TextPair:
    """Return the conversation of a row; InputError says what is wrong with it."""
    values = {name: _parsed(row[name], name) if name in columns.json_columns else row[name] for name in columns.names}
    tools = _read_tools(values.get(TOOLS))
    arguments = _read_arguments(values.get(TEMPLATE_ARGUMENTS))
    if columns.prompt is None or columns.completion is None:
        assert columns.messages is not None
        messages = _read_messages(values[columns.messages], columns.messages, columns)
        return Conversation(messages, None, tools, arguments)
    prompt, completion = values[columns.prompt], values[columns.completion]
    if isinstance(prompt, str) and isinstance(completion, str):
        return TextPair(prompt, completion)
    if _is_plain_text(prompt) or _is_plain_text(completion):
        raise InputError(
            f"Of the columns {columns.prompt!r} and {columns.completion!r}, one has text and the other does not.",
            hint="Write both as text, or both as lists of messages.",
        )
    before = _read_messages(prompt, columns.prompt, columns)
    after = _read_messages(completion, columns.completion, columns)
    return Conversation(before + after, len(before), tools, arguments)


def _is_plain_text(value: Any) -> bool:
    return isinstance(value, str) and not value.lstrip().startswith(("[", "{"))


def without_nulls(value: Any) -> Any:
    """Remove the keys whose value is null, at every depth."""
    if isinstance(value, dict):
        return {name: without_nulls(own) for name, own in value.items() if own is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(own) for own in value]
    return value


def _parsed(value: Any, column: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise InputError(f"The column {column!r} is not JSON: {error}.", hint="Write it as JSON.") from error
    except RecursionError as error:
        raise InputError(f"The column {column!r} is nested too deeply.", hint="Use fewer levels.") from error


def _read_messages(value: Any, column: str, columns: ChatColumns) -> list[Message]:
    value = _parsed(value, column)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        what = "is missing" if value is None else "has no messages" if value == [] else "is not a list of messages"
        raise InputError(
            f"The column {column!r} {what}.",
            hint='A conversation is a list such as [{"role": "user", "content": "Hello"}].',
            column=column,
        )
    renamed = dict(columns.roles)
    return [_read_message(_parsed(each, column), number, column, renamed) for number, each in enumerate(value)]


def _read_message(value: Any, number: int, column: str, roles: Mapping[str, str]) -> Message:
    if not isinstance(value, dict):
        raise InputError(
            f"Message {number} of {column!r} is not an object with a role and a content.",
            hint='A message is like {"role": "user", "content": "Hello"}.',
            column=column,
        )
    message: Message = without_nulls(value)
    if "from" in message and "role" not in message:
        speaker = str(message.pop("from"))
        named = roles.get(speaker) or SHAREGPT_ROLES.get(speaker)
        if named is None:
            raise InputError(
                f"Message {number} of {column!r} is from {speaker!r}, which is not a role that brim knows.",
                hint=f"Name its role: --role={speaker}=user, assistant, system or tool.",
                column=column,
            )
        content = message.pop("value", "")
        message = {"role": named, "content": content, **message}
    else:
        role = message.get("role")
        if not isinstance(role, str):
            raise InputError(
                f"Message {number} of {column!r} has no role.",
                hint='A message is like {"role": "user", "content": "Hello"}.',
                column=column,
            )
        if role in roles:
            message["role"] = roles[role]
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = [_read_part(part, number, column) for part in content]
    elif content is not None and not isinstance(content, str):
        raise InputError(
            f"The content of message {number} of {column!r} is not text.",
            hint="Write it as text, or as a list of text parts.",
            column=column,
        )
    return message


def _read_part(part: Any, number: int, column: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        kind = type(part).__name__
    else:
        kind = part.get("type") or ("text" if "text" in part else next(iter(part), "none"))
    if kind != "text" or not isinstance(part.get("text"), str):
        wrong = f"a part of type {kind!r}" if kind != "text" else "a text part without a text"
        raise InputError(
            f"Message {number} of {column!r} has {wrong}: brim tokenizes text parts only.",
            hint="Use the processor of a model for images.",
            column=column,
        )
    return dict(part)


def _read_tools(value: Any) -> list[Any] | None:
    """Return the tools of a row; an empty list is none, as Arrow has it for rows without tools."""
    value = _parsed(value, TOOLS) if value else None
    if value is None or value == []:
        return None
    if isinstance(value, dict):
        value = [value]
    tools = [without_nulls(_parsed(tool, TOOLS)) for tool in value] if isinstance(value, list) else [value]
    if not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f"The column {TOOLS!r} is not a list of tools.", hint="Write each tool as a JSON schema.")
    return tools


def _read_arguments(value: Any) -> Mapping[str, Any] | None:
    value = _parsed(value, TEMPLATE_ARGUMENTS) if value else None
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InputError(
            f"The column {TEMPLATE_ARGUMENTS!r} is not an object.", hint='Write it like {"enable_thinking": false}.'
        )
    found: dict[str, Any] = without_nulls(value)
    check_template_arguments(found, f"The column {TEMPLATE_ARGUMENTS!r}")
    return found


def check_template_arguments(arguments: Mapping[str, Any], where: str) -> None:
    """Raise InputError for an argument that is not one of the template: brim sets it."""
    taken = sorted({"messages", TOOLS, "add_generation_prompt"} & {*arguments})
    if taken:
        raise InputError(f"{where} sets {taken[0]!r}, which brim sets.", hint=f"Remove {taken[0]!r}.")


def takes_text(message: Message) -> Message:
    """Return a message whose text parts are joined to one text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def assistant_turns(messages: Sequence[Message]) -> list[int]:
    """Return the numbers of the messages of the assistant."""
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]

"""Render chat templates exactly as transformers does, without importing it.

The environment has what `transformers.utils.chat_template_utils` sets up: a sandbox in which nothing can be changed,
`trim_blocks`, `lstrip_blocks`, loop controls, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, and
`{% generation %}`, whose places in the rendered text are the spans that a model is trained on. Two things are brim's:
`strftime_now` formats a date that is part of the job, and text parts are joined for templates that take only text.

This module needs jinja2, so workers import it when they open a chat step.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from brim.compute.steps.chat_template_files import ChatTemplates
from brim.compute.steps.conversations import Conversation, Message, check_template_arguments, takes_text
from brim.errors import InputError
from brim.records import dataclass

_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_PROBE = "brim-probe"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation, and the parts of it that the template marks, in characters."""

    text: str
    spans: list[tuple[int, int]]


class _GenerationMarks(jinja2.ext.Extension):
    """Record where the text of `{% generation %}` blocks is. `position` is the length of what was rendered so far."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.position = 0
        self.spans: list[tuple[int, int]] = []
        environment.extend(generation_marks=self)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        text: str = caller()
        self.spans.append((self.position, self.position + len(text)))
        return text


class _Namespace(jinja2.utils.Namespace):
    """A namespace without names that begin with an underscore, as transformers has it."""

    def __init__(*values: Any, **attributes: Any) -> None:
        self, *given = values
        found = dict(*given, **attributes)
        for name in found:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"A chat template cannot store {name!r} in a namespace.")


class _Dict:
    """`dict` for templates: it makes dicts, and gives no access to the type."""

    def __call__(self, *values: Any, **attributes: Any) -> dict[Any, Any]:
        return dict(*values, **attributes)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        return dict.fromkeys(*values)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


class ChatRenderer:
    """Render conversations by the templates of a tokenizer. `date` is what `strftime_now` formats."""

    def __init__(self, templates: ChatTemplates, arguments: Mapping[str, Any], date: datetime.date) -> None:
        self._templates = templates
        check_template_arguments(arguments, "--template-arg")
        self._arguments = {**dict(templates.special_tokens), "documents": None, **arguments}
        self.eos: str = dict(templates.special_tokens).get("eos_token", "")
        self._environment: Any = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMarks, jinja2.ext.loopcontrols]
        )
        moment = datetime.datetime.combine(date, datetime.time())
        self._environment.filters["tojson"] = _tojson
        self._environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": moment.strftime,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        self._compiled = {name: self._compile(text) for name, text in templates.texts}
        self._takes_parts = {name: self._can_take_parts(name) for name in self._compiled}

    def _compile(self, text: str) -> jinja2.Template:
        try:
            template: jinja2.Template = self._environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise InputError(
                f"The chat template of {self._templates.source} is not valid: {error.message} (line {error.lineno}).",
                hint="Correct it, or pass another one with --chat-template=FILE.",
            ) from error
        return template

    def _can_take_parts(self, name: str) -> bool:
        """Try whether a template renders a list of text parts as their text."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = self._generate(name, [message], None, True, {}).text
        except Exception:  # noqa: BLE001  a template may raise anything
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text

    def has_marks(self, conversation: Conversation) -> bool:
        """Return whether the template of a conversation says by `{% generation %}` what the assistant wrote."""
        return bool(_MARK.search(dict(self._templates.texts)[self._templates.choose(conversation.tools)]))

    def render(
        self, conversation: Conversation, count: int | None = None, *, generation_prompt: bool = False
    ) -> Rendered:
        """Render the first `count` messages; all by default. InputError if the template refuses them."""
        name = self._templates.choose(conversation.tools)
        messages = conversation.messages[:count]
        if not self._takes_parts[name]:
            messages = [takes_text(message) for message in messages]
        messages = [_with_reasoning(message) for message in messages]
        try:
            return self._generate(
                name, messages, conversation.tools, generation_prompt, dict(conversation.arguments or {})
            )
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise InputError(
                f"The chat template cannot render this conversation: {reason}.",
                hint="Correct its messages, or pass another template with --chat-template=FILE.",
            ) from error

    def _generate(
        self,
        name: str,
        messages: Sequence[Message],
        tools: list[Any] | None,
        generation_prompt: bool,
        arguments: Mapping[str, Any],
    ) -> Rendered:
        values = {**self._arguments, **arguments, "messages": messages, "tools": tools}
        marks = self._environment.generation_marks
        marks.position, marks.spans = 0, []
        blocks = []
        for block in self._compiled[name].generate(values, add_generation_prompt=generation_prompt):
            blocks.append(block)
            marks.position += len(block)
        return Rendered("".join(blocks), marks.spans)


def _with_reasoning(message: Message) -> Message:
    """Give the reasoning of a message the names under which templates look for it, as transformers does."""
    found = next((message[name] for name in _REASONING_NAMES if name in message), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}

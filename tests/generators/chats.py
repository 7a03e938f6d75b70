"""Chat templates in the styles in use, written for these tests, and conversations with odd texts.

«…» in a template is around what an answer adds: a {% generation %} block with marks, and nothing without marks.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.generators.tokenizers import prose

_CHATML = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "«{{ message.content + '<|im_end|>\n' }}»{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content "
    "+ '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_HEADERS = """{{- bos_token }}
{%- set found = namespace(system='You help.') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set found.system = message.content | trim %}
    {%- endif %}
{%- endfor %}
{{- '<|head|>system<|/head|>\n\n' + found.system + '<|eot|>' }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {{- '<|head|>' + message.role + '<|/head|>\n\n' }}
    {%- if message.role == 'assistant' %}«{{- message.content | trim + '<|eot|>' }}»
    {%- else %}
    {{- message.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|/head|>\n\n' }}
{%- endif %}"""
_BRACKETS = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + message.content + "
    "' [/INST]' }}{% elif message.role == 'assistant' %}«{{ ' ' + message.content + eos_token }}»"
    "{% elif message.role == 'system' %}{{ '<<SYS>>' + message.content + '<</SYS>>' }}"
    "{% else %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}{% endfor %}"
)
_TURNS = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\n' }}{% if role == 'model' %}«{{ message.content | trim + '<end_of_turn>\n' }}»"
    "{% else %}{{ message.content | trim + '<end_of_turn>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_TOOLS = (
    "{% if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}{{ '</tools>\n' }}"
    "{% endif %}{% for message in messages %}{% if message.role == 'assistant' %}{{ '<bot>' }}«"
    "{% if message.tool_calls is defined %}{% for call in message.tool_calls %}"
    "{{ '<call>' + call.function | tojson + '</call>' }}{% endfor %}"
    "{% endif %}{% if message.content %}{{ message.content }}{% endif %}{{ '</bot>\n' }}»{% else %}"
    "{{ '<' + message.role + '>' + message.content + '</' + message.role + '>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bot>' }}{% endif %}"
)
_DATED = "{{ 'Today is ' + strftime_now('%d %B %Y') + '.\n' }}" + _CHATML
_PARTS = (
    "{% macro text(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{{ part.text }}{% endfor %}{% endif %}{% endmacro %}{% for message in messages %}{{ '## ' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}«{{ text(message.content) + '\n\n' }}»{% else %}{{ text(message.content) + "
    "'\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '## assistant\n' }}{% endif %}"
)
_WHITE = (
    "{% for message in messages %}\n  {% if message.role == 'assistant' %}\nA: «{{ message.content + '\n' }}»"
    "{{ '' -}}\n  {% else %}\nQ: {{ message.content + '\n' -}}\n  {% endif %}\n{% endfor %}\n"
    "{% if add_generation_prompt %}\nA: {{ '' -}}\n{% endif %}"
)
# Removes the thoughts of earlier answers, so that the prefixes of a conversation do not extend each other.
THINKING = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "«{% if not loop.last and '</think>' in message.content %}{{ message.content.split('</think>')[-1] }}{% else %}"
    "{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}»{% else %}{{ '<|im_start|>' + message.role + '\n' + "
    "message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STYLES = {
    "chatml": _CHATML,
    "headers": _HEADERS,
    "brackets": _BRACKETS,
    "turns": _TURNS,
    "tools": _TOOLS,
    "dated": _DATED,
    "parts": _PARTS,
    "white": _WHITE,
}
SPECIAL_TOKENS = {"bos_token": "[CLS]", "eos_token": "</s>", "unk_token": "[UNK]"}
CALL = {"type": "function", "function": {"name": "sum", "arguments": {"a": [1, 2], "b": {"c": None}, "ü": "<&'>"}}}
TOOL = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object", "properties": {"a": {}}}}}
ODD = [
    "",
    " ",
    "\n\n two blank  lines \n",
    "</s> and [CLS] and <|im_end|> inside",
    "🙂👩‍👩‍👧 e\u0301 𝔘",
    "שלום עולם مرحبا",
    "tabs\tand\r\nreturns\u00a0\u200b",
    "<think>why</think>because",
]


def with_marks(template: str) -> str:
    return template.replace("«", "{% generation %}").replace("»", "{% endgeneration %}")


def without_marks(template: str) -> str:
    return template.replace("«", "").replace("»", "")


def conversations() -> list[list[dict[str, Any]]]:
    """Return conversations of one to three turns, with and without a system message, of plain and of odd texts."""
    actual = [[_user("hello"), _answer("hi")], [_user("a"), _answer("b"), _user("c")]]
    for number, odd in enumerate(ODD):
        actual.append([_user(odd), _answer("yes."), _user("x" + odd), _answer("no " + odd + "!")])
        actual.append([{"role": "system", "content": prose(5, number)}, _user(prose(20, number)), _answer(odd + "end")])
    return actual


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def chat_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of ordinary conversations, of which every third one has a system message."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        messages = [{"role": "system", "content": prose(6, number)}] if number % 3 == 0 else []
        for _ in range(draw.randint(1, 3)):
            messages.append(_user(prose(draw.randint(2, 30), draw.randrange(1 << 30))))
            messages.append(_answer(prose(draw.randint(2, 50), draw.randrange(1 << 30))))
        rows.append({"id": number, "messages": messages})
    return rows


def write_chats(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def write_chat_tokenizer(folder: Path, template: str, tokenizer: Path) -> Path:
    """Save a tokenizer with a chat template and its special tokens, as transformers would."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL_TOKENS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return folder

"""Rows are read as conversations, rendered and masked, or refused with a clear message."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from brim.compute.steps.chat_masks import TrainOn, render_with_spans
from brim.compute.steps.chat_template_files import ChatTemplates
from brim.compute.steps.conversations import ChatColumns, Conversation, TextPair, read_conversation
from brim.compute.steps.template_environment import ChatRenderer
from brim.errors import InputError
from tests.generators.chats import STYLES, with_marks, without_marks

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
PAIR = ChatColumns(prompt="p", completion="c")
MESSAGES = ChatColumns(messages="messages", tools=True, template_arguments=True)


def read_messages(*messages: Any, **extra: Any) -> Conversation:
    actual = read_conversation(
        {"messages": [*messages], "tools": None, "chat_template_kwargs": None, **extra}, MESSAGES
    )
    assert isinstance(actual, Conversation)
    return actual


def make_renderer(template: str, **arguments: Any) -> ChatRenderer:
    templates = ChatTemplates((("default", template),), (("eos_token", "</s>"),), "the test")
    return ChatRenderer(templates, arguments, datetime.date(2026, 1, 31))


def trained_texts(template: str, conversation: Conversation, train_on: TrainOn) -> list[str]:
    text, spans = render_with_spans(make_renderer(template), conversation, train_on)
    return [text[start:stop] for start, stop in spans]


@pytest.mark.parametrize(
    ("part", "arguments"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "a part of type 'image_url'"),
        ({"image": "a.png"}, "a part of type 'image'"),
        ({"type": "text", "text": None}, "a text part without a text"),
        ({}, "a part of type 'none'"),
        (3, "a part of type 'int'"),
    ],
)
def test_parts_without_text_are_refused_by_their_type(part: Any, arguments: str) -> None:
    with pytest.raises(InputError, match=f"Message 0 of 'messages' has {arguments}"):
        read_messages({"role": "user", "content": [part]}, ANSWER)


def test_pair_of_a_text_and_messages_is_refused() -> None:
    for row in ({"p": "2+2=", "c": [ANSWER]}, {"p": [USER], "c": "four"}):
        with pytest.raises(InputError, match="one has text and the other does not"):
            read_conversation(row, PAIR)
    assert read_conversation({"p": "2+2=", "c": "4"}, PAIR) == TextPair("2+2=", "4")
    as_texts = {"p": json.dumps([USER]), "c": [ANSWER]}  # a JSON text next to a list is parsed as a list, too
    assert read_conversation(as_texts, PAIR) == Conversation([USER, ANSWER], 1)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_arguments_that_brim_sets_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"chat_template_kwargs' sets '{name}'"):
        read_messages(USER, ANSWER, chat_template_kwargs={name: True})
    with pytest.raises(InputError, match=f"template_arg= sets '{name}'"):
        make_renderer("x", **{name: True})


def test_documents_reach_the_template() -> None:
    template = "{{ documents[0].title if documents else 'none' }}"
    assert make_renderer(template).render(read_messages(USER, ANSWER)).text == "none"
    assert make_renderer(template, documents=[{"title": "a"}]).render(read_messages(USER, ANSWER)).text == "a"


@pytest.mark.parametrize("marks", [with_marks, without_marks])
@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_conversation_without_an_assistant_names_its_roles(marks: Any, train_on: TrainOn) -> None:
    messages = [{"role": "human", "content": "q"}, {"role": "gpt", "content": "a"}]
    with pytest.raises(InputError, match=r"the roles are gpt, human\. .* gpt=assistant"):
        trained_texts(marks(STYLES["chatml"]), read_messages(*messages), train_on)


@pytest.mark.parametrize(
    ("prompt", "completion", "trained"),
    [
        ([USER], [ANSWER], "a<|im_end|>\n"),
        ([USER], [USER], "<|im_start|>user\nq<|im_end|>\n"),
        ([USER, ANSWER], [ANSWER], "<|im_start|>assistant\na<|im_end|>\n"),
        ([USER, ANSWER], [USER, ANSWER], "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"),
    ],
)
def test_completion_is_what_follows_the_prompt(prompt: Any, completion: Any, trained: str) -> None:
    """The start of an answer belongs to the prompt if the next message is an answer; other messages count as a
    whole."""
    actual = read_conversation({"p": prompt, "c": completion}, PAIR)
    assert isinstance(actual, Conversation)
    assert trained_texts(without_marks(STYLES["chatml"]), actual, "completion") == [trained]


def test_hint_names_the_option_for_a_template() -> None:
    template = "{% for m in messages %}{{ loop.last }}{{ m.content }}{% endfor %}"
    with pytest.raises(InputError, match=r"Pass a template .*generation.*chat_template='FILE'"):
        trained_texts(template, read_messages(USER, ANSWER, USER, ANSWER), "last")

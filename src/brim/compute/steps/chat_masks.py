"""Find out which tokens of a rendered conversation a model is trained on.

The trained parts are spans of characters of the full rendering: what `{% generation %}` marks, or else what the
rendering up to an answer adds to the rendering before it. They are never counted in tokens of a prefix, because a
tokenizer may join characters across its end. A token is trained if its characters overlap a span.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from brim.compute.steps.conversations import Conversation, assistant_turns
from brim.compute.steps.tokenizers import Places
from brim.errors import InputError

if TYPE_CHECKING:  # it needs jinja2
    from brim.compute.steps.template_environment import ChatRenderer

TrainOn = Literal["assistant", "last", "completion", "all"]
Spans = list[tuple[int, int]]
IGNORED_LABEL = -100  # the label of tokens that do not count, as torch's cross entropy has it
_MARKED_TEMPLATE = "a template that marks answers with {% generation %}: --chat-template=FILE."


def render_with_spans(renderer: ChatRenderer, conversation: Conversation, train_on: TrainOn) -> tuple[str, Spans]:
    """Return the text of a conversation, and the spans of it that are trained."""
    full = renderer.render(conversation)
    text, messages = full.text, conversation.messages
    if train_on == "all":
        return text, [(0, len(text))]
    if train_on == "completion":
        count = conversation.prompt_messages or 0
        # The prompt ends with the start of an answer only if an answer follows a message of another role.
        around = [message["role"] == "assistant" for message in messages[max(count - 1, 0) : count + 1]]
        return text, [(_prefix(renderer, conversation, text, count, train_on, around == [False, True]), len(text))]
    turns = assistant_turns(messages)
    if not turns and not full.spans:
        roles = ", ".join(sorted({message["role"] for message in messages}))
        raise InputError(
            f"No message is from the assistant: the roles are {roles}.",
            hint="Name the role of the answers with --role, such as gpt=assistant, or use --train-on=all.",
        )
    if train_on == "last":
        turns = turns[-1:]
    if renderer.has_marks(conversation):
        # Marks before the last answer are those of the messages before it.
        skipped = len(renderer.render(conversation, turns[0]).spans) if train_on == "last" and turns and turns[0] else 0
        return text, full.spans[skipped:]
    spans = []
    for turn in turns:
        start = _prefix(renderer, conversation, text, turn, train_on, True)
        is_last = turn + 1 == len(messages)
        end = len(text) if is_last else _prefix(renderer, conversation, text, turn + 1, train_on, False)
        spans.append((start, end))
    return text, spans


def _prefix(
    renderer: ChatRenderer, conversation: Conversation, text: str, count: int, train_on: TrainOn, prompted: bool
) -> int:
    """Return the length of the first messages as rendered, which must be how the full text starts."""
    hint = f"Pass {_MARKED_TEMPLATE}" if train_on != "assistant" else f"Use --train-on=last, or pass {_MARKED_TEMPLATE}"
    try:
        before = renderer.render(conversation, count, generation_prompt=prompted).text
    except InputError as error:
        raise InputError(
            f"Where the answer in message {count} starts cannot be told: {error.words[0]}", hint=hint
        ) from error
    if not text.startswith(before) and not prompted:
        before = before.removesuffix(renderer.eos)  # that some templates put after the last message
    if not text.startswith(before):
        raise InputError(
            f"The chat template renders the first {count} messages in another way once others follow, so which tokens "
            "are the answers' cannot be told.",
            hint=hint,
        )
    return len(before)


def token_mask(places: Places, spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Return which tokens overlap a span. Between the first and the last of a span, all tokens belong to it."""
    mask = np.zeros(len(places), bool)
    if not len(places):
        return mask
    starts, ends = np.maximum.accumulate(places[:, 0]), np.maximum.accumulate(places[:, 1])
    for start, end in spans:
        if start < end:
            first, stop = np.searchsorted(ends, start, side="right"), np.searchsorted(starts, end, side="left")
            mask[first:stop] = True
    return mask


def label_tokens(ids: npt.NDArray[np.uint32], mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Return the ids as labels, with IGNORED_LABEL for the tokens that are not trained."""
    return np.where(mask, ids.astype(np.int32), np.int32(IGNORED_LABEL))

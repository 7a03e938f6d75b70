"""Chats compared with transformers: the ids of `apply_chat_template`, and the masks of `return_assistant_tokens_mask`.

The real templates are those of huggingface/trl (https://github.com/huggingface/trl/tree/main/trl/chat_templates,
Apache-2.0), read from the installed package: those of Qwen2.5, Qwen3, Llama 3, Phi-3, Gemma, GLM-4, SmolVLM and others.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from brim.compute.steps.chat_step import ChatStep, ChatStepOptions
from brim.compute.steps.chat_template_files import ChatTemplates
from brim.compute.steps.conversations import ChatColumns
from brim.compute.steps.step import RowBatch
from brim.compute.steps.tokenizers import find_tokenizer
from tests.generators.chats import (
    CALL,
    SPECIAL_TOKENS,
    STYLES,
    THINKING,
    TOOL,
    conversations,
    with_marks,
    without_marks,
    write_chat_tokenizer,
)
from tests.generators.tokenizers import made_tokenizers, prose

pytestmark = pytest.mark.trainers
KINDS = ["gpt4", "metaspace", "wordpiece"]
# Templates of TRL with marks, for text models whose templates only need messages.
REAL = ["qwen2_5", "qwen3", "llama3", "phi3", "gemma", "glm4moe", "deepseekv3", "cohere", "qwen3_instruct_2507"]
# WordPiece gives spaces no token. transformers then marks nothing, or all text up to the end; brim marks the
# tokens that overlap the answer.
# The generation prompt opens a thought, which answers without thoughts do not have.
OPENS_A_THOUGHT = {"deepseekv3"}
DROPS_BLANKS = {"wordpiece"}


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made_tokenizers(tmp_path_factory.mktemp("tokenizers"))


def read_real(name: str) -> str:
    actual = importlib.util.find_spec("trl")
    assert actual is not None
    assert actual.origin is not None
    return (Path(actual.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def load(path: Path, template: str) -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path), chat_template=template, clean_up_tokenization_spaces=False, **SPECIAL_TOKENS
    )


def tokenize(path: Path, template: str, rows: list[dict[str, Any]], **options: Any) -> list[dict[str, Any] | str]:
    """Return the step's result for each row, or its error."""
    import json

    texts = {name: [json.dumps(row[name]) if name in row else None for row in rows] for name in ("messages", "tools")}
    table = pa.table({name: pa.array(values, pa.string()) for name, values in texts.items()})
    columns = ChatColumns(messages="messages", tools=True, json_columns=("messages", "tools"))
    templates = ChatTemplates((("default", template),), tuple(SPECIAL_TOKENS.items()), "the test")
    values = {"chat": True, "train_on": "assistant", "date": "2026-01-31", **options}
    step = ChatStep(find_tokenizer(str(path)), templates, columns, ChatStepOptions(**values))
    step.open(table.schema)
    errors: dict[int, str] = {}
    actual = list(
        step.apply(RowBatch(table, 0, None, lambda row, error: errors.update({row: " ".join(error.words)})), False)
    )
    created = iter([row for each in actual for row in each.to_pylist()])
    return [errors[number] if number in errors else next(created) for number in range(len(rows))]


def overlapping(tokenizer: Any, template: str, row: dict[str, Any]) -> list[int]:
    """Return the mask of the tokens whose characters overlap a marked part, computed token by token."""
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), (spans,) = render_jinja_template(
        [row["messages"]],
        tools=row.get("tools"),
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    positions = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [int(any(start < b and end > a for a, b in spans)) for start, end in positions]


def check(path: Path, kind: str, template: str, marked: str, rows: list[dict[str, Any]]) -> int:
    """Compare every row; return the number of rows that transformers could render."""
    compared = 0
    tokenizer = load(path, template)
    for row, match in zip(rows, tokenize(path, template, rows), strict=True):
        try:
            expected = tokenizer.apply_chat_template(
                row["messages"],
                tools=row.get("tools"),
                chat_template=marked,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except Exception:  # noqa: BLE001  a template may refuse a conversation: then brim must, too
            assert isinstance(match, str), row
            continue
        mask = overlapping(tokenizer, marked, row)
        if not any(mask):
            assert isinstance(match, str), row
            continue
        assert isinstance(match, dict), (match, row)
        assert match["input_ids"] == expected["input_ids"], row
        if kind not in DROPS_BLANKS:
            assert expected["assistant_masks"] == mask, row
        assert match["assistant_masks"] == mask, row
        required = [token if bit else -100 for token, bit in zip(match["input_ids"], mask, strict=True)]
        assert match["labels"] == required
        compared += 1
    return compared


@pytest.fixture(autouse=True)
def january(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a fixed date for `strftime_now` in transformers."""
    import datetime

    from transformers.utils import chat_template_utils

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2026, 1, 31)

    monkeypatch.setattr(chat_template_utils, "datetime", Fixed)


def all_rows() -> list[dict[str, Any]]:
    return [{"messages": messages} for messages in conversations()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
def test_marks_and_prefixes_give_the_ids_and_masks_of_transformers(
    tokenizer_files: dict[str, Path], kind: str, style: str
) -> None:
    """Without marks, the expected masks come from the same template with marks."""
    marked, bare = with_marks(STYLES[style]), without_marks(STYLES[style])
    rows = all_rows()
    if style == "tools":
        call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        rows.append({"messages": [{"role": "user", "content": "sum"}, call], "tools": [TOOL]})
        # brim removes nulls inside arguments at every depth; transformers only removes those of messages.
        rows[-1]["messages"][1] = {"role": "assistant", "tool_calls": [without_inner_null()]}
    assert check(tokenizer_files[kind], kind, marked, marked, rows) >= len(rows) - 2
    assert check(tokenizer_files[kind], kind, bare, marked, rows) >= len(rows) - 2


def without_inner_null() -> dict[str, Any]:
    return {"type": "function", "function": {"name": "sum", "arguments": {"a": [1, 2], "b": {}, "ü": "<&'>"}}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REAL)
def test_real_templates_with_marks(tokenizer_files: dict[str, Path], kind: str, name: str) -> None:
    """Templates of TRL that mark answers are compared on all conversations that they accept."""
    template = read_real(f"{name}_training")
    assert check(tokenizer_files[kind], kind, template, template, all_rows()) >= 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REAL)
def test_real_templates_without_marks(tokenizer_files: dict[str, Path], kind: str, name: str) -> None:
    """The original templates give the ids of transformers; labels exist if prefixes extend each other, otherwise an
    error."""
    template = read_real(name)
    tokenizer, rows, same = load(tokenizer_files[kind], template), all_rows(), 0
    all_values = tokenize(tokenizer_files[kind], template, rows, train_on="all")
    answers = tokenize(tokenizer_files[kind], template, rows)
    for row, match, labeled in zip(rows, all_values, answers, strict=True):
        try:
            expected = tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]
        except Exception:  # noqa: BLE001  a template may refuse a conversation: then brim must, too
            assert isinstance(match, str)
            continue
        assert isinstance(match, dict)
        assert match["input_ids"] == match["labels"] == expected
        if isinstance(labeled, str):
            assert "--train-on=last" in labeled or "No token" in labeled, labeled
            continue
        assert labeled["input_ids"] == expected
        trained = [token for token in labeled["labels"] if token != -100]
        if row["messages"][-1]["content"] == "hi" and kind == "gpt4":
            assert "hi" in "".join(tokenizer.convert_ids_to_tokens(trained))
        same += 1
    assert same == 0 if name in OPENS_A_THOUGHT else same >= 8


@pytest.mark.parametrize("kind", KINDS)
def test_thoughts_that_are_removed(tokenizer_files: dict[str, Path], kind: str) -> None:
    """Prefixes that do not extend each other are an error with two solutions, and both give the masks of the marks."""
    marked, bare = with_marks(THINKING), without_marks(THINKING)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>b</think>c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "<think>e</think>f"},
    ]
    rows = [{"messages": messages}]
    assert check(tokenizer_files[kind], kind, marked, marked, rows) == 1
    (error,) = tokenize(tokenizer_files[kind], bare, rows)
    assert isinstance(error, str)
    assert "--train-on=last" in error
    assert "--chat-template=FILE" in error
    (bare_last,) = tokenize(tokenizer_files[kind], bare, rows, train_on="last")
    (marked_last,) = tokenize(tokenizer_files[kind], marked, rows, train_on="last")
    assert bare_last == marked_last
    assert isinstance(bare_last, dict)
    assert 0 < np.count_nonzero(bare_last["assistant_masks"]) < len(bare_last["input_ids"]) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_of_a_megabyte(tokenizer_files: dict[str, Path], kind: str) -> None:
    text = prose(150_000, 3)[:1_000_000]
    rows = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[:70_000] + "!"}]}]
    marked = with_marks(STYLES["chatml"])
    assert check(tokenizer_files[kind], kind, marked, marked, rows) == 1


def test_the_step_never_imports_transformers(tokenizer_files: dict[str, Path], tmp_path: Path) -> None:
    """A child process loads the folder once with transformers; the step in the workers does not import it."""
    folder = write_chat_tokenizer(tmp_path / "t", with_marks(STYLES["chatml"]), tokenizer_files["gpt4"])
    code = (
        "import sys; import brim.api.chat_plan, brim.compute.steps.template_environment; "
        "from brim.compute.steps.tokenizers import find_tokenizer; "
        "from brim.compute.steps.chat_template_files import find_chat_templates; "
        f"f = find_tokenizer({str(folder)!r}); t = find_chat_templates({str(folder)!r}, f, None); "
        "print(dict(t.special_tokens)['bos_token'], 'transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["[CLS]", "False"]

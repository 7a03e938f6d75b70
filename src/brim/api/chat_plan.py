"""Plan `brim tokenize --chat`: the columns, the chat template, and the step and output that follow from the options."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from brim.api.row_reading import LEAST_TOKEN_UNIT_BYTES, row_options
from brim.compute.outputs.token_output import FinishOptions, TokenOutput, token_splits
from brim.compute.rows.open_rows import open_rows
from brim.compute.rows.unit import RowSource
from brim.compute.steps.chat_masks import TrainOn
from brim.compute.steps.chat_step import ChatStep, ChatStepOptions
from brim.compute.steps.chat_template_files import NO_DATE, find_chat_templates
from brim.compute.steps.conversations import MESSAGES, SHAREGPT, TEMPLATE_ARGUMENTS, TOOLS, ChatColumns
from brim.compute.steps.tokenize_step import choose_dtype
from brim.compute.steps.tokenizers import LoadedTokenizer, find_tokenizer
from brim.errors import InputError
from brim.jobs.preflight import ComputePlan, JobSettings
from brim.options.compute_options import ChatOptions, TextOptions, TokenFileOptions, TokenizeOptions

_TEXT_COLUMN = TextOptions().column  # the default, which stands for no column here


def chat_plan(options: TokenizeOptions, settings: JobSettings, note: Callable[[str], None]) -> ComputePlan:
    """Plan the job that turns conversations into token ids with labels."""
    file = find_tokenizer(options.tokenizer)
    loaded = LoadedTokenizer(file.read(), file.name)
    dtype = choose_dtype(options.dtype, options.format, loaded.vocab_size)
    if file.note:
        note(file.note)
    if options.prompt is not None:
        possible_names: tuple[str, ...] = (options.prompt, str(options.completion))
    else:
        possible_names = (MESSAGES, SHAREGPT) if options.column == _TEXT_COLUMN else (options.column,)
    reading = row_options(
        options,
        options.source,
        options.name,
        json_columns=(*possible_names, TOOLS, TEMPLATE_ARGUMENTS),
        other_columns=None if options.where is not None else tuple(options.keep_columns),
        least_unit_bytes=LEAST_TOKEN_UNIT_BYTES,
    )
    rows = open_rows(options.source, reading)
    columns = _find_columns(options, rows, possible_names)
    is_pair = options.prompt is not None
    train_on: TrainOn = options.train_on or ("completion" if is_pair else "assistant")
    template_path = None if options.chat_template is None else os.fspath(options.chat_template)
    templates = find_chat_templates(options.tokenizer, file, template_path, is_needed=not is_pair)
    date = None
    if templates is not None and templates.uses_date:
        date = options.template_date or NO_DATE
        if options.template_date is None:
            note(f"the chat template asks for the date: it gets {date} (--template-date changes it)")
    max_length = options.max_length if options.pack is None else min(options.max_length or options.pack, options.pack)
    step_options: dict[str, Any] = {**options.values(TextOptions), **options.values(ChatOptions)}
    step_options |= {"train_on": train_on, "date": date, "max_length": max_length, "dtype": dtype}
    step_options |= {"eos": file.eos if is_pair and file.eos is not None and loaded.has_token(file.eos) else None}
    step_options |= {"add_special_tokens": is_pair and options.special_tokens is not False}
    step = ChatStep(file, templates, columns, ChatStepOptions(**step_options))
    step.output_schema(rows.schema)
    step.check()
    files = {**options.values(TokenFileOptions), "dtype": dtype}
    finish = FinishOptions(**files, splits=token_splits(options), is_chat=True, position_ids=options.position_ids)
    return ComputePlan("tokenize", rows, step, TokenOutput(finish, file.name), settings.on_error)


def _find_columns(options: TokenizeOptions, rows: RowSource, possible_names: tuple[str, ...]) -> ChatColumns:
    """Choose the columns of the conversations among those of the source."""
    names = rows.schema.names
    json_columns = tuple(name for name in rows.reading.options.get("json_columns", ()) if name in names)
    shared: dict[str, Any] = {
        "roles": tuple((options.role or {}).items()),
        "tools": TOOLS in names,
        "template_arguments": TEMPLATE_ARGUMENTS in names,
        "json_columns": json_columns,
    }
    if options.prompt is not None:
        return ChatColumns(prompt=options.prompt, completion=options.completion, **shared)
    messages = next((name for name in possible_names if name in names), None)
    if messages is None:
        listed = ", ".join(map(repr, names[:20]))
        raise InputError(
            f"The source has no column {' or '.join(map(repr, possible_names))}.",
            hint=f"It has {listed}. Name the column of the messages with --column.",
        )
    return ChatColumns(messages=messages, **shared)

"""brim tokenize --chat end to end: real files, kills, parts and a bucket."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brim as library
from brim.errors import BrimError
from tests.conftest import brim, tree_digest
from tests.generators.chats import (
    STYLES,
    THINKING,
    chat_rows,
    with_marks,
    without_marks,
    write_chat_tokenizer,
    write_chats,
)
from tests.generators.tokenizers import made_tokenizers
from tests.s3.server import PRIVATE, S3Server

tokenizers = pytest.importorskip("tokenizers")
ROWS = chat_rows(400)
LIMIT = "400MB"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a conversation file and tokenizers whose templates have marks or none."""
    folder = tmp_path_factory.mktemp("chat")
    created = made_tokenizers(folder)
    write_chat_tokenizer(folder / "marked", with_marks(STYLES["chatml"]), created["gpt4"])
    write_chat_tokenizer(folder / "bare", without_marks(STYLES["chatml"]), created["gpt4"])
    write_chats(folder / "chats.jsonl", ROWS)
    return folder


def tokenize(work: Path, source: Any, out: Path | str, *extra: str, tokenizer: str = "marked", **options: Any) -> Any:
    """Run brim tokenize and return the last line of --json."""
    arguments = ["--tokenizer", tokenizer, "--chat", "--memory", LIMIT, *extra, "--json"]
    return json.loads(brim("tokenize", source, out, *arguments, cwd=work, **options).stdout.splitlines()[-1])


def rows_of(out: Path, split: str = "train") -> list[dict[str, Any]]:
    return [row for path in sorted((out / "data").glob(f"{split}-*")) for row in pq.read_table(path).to_pylist()]


def expected(work: Path, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Return the ids and labels of a conversation in ChatML, computed character by character."""
    raw = tokenizers.Tokenizer.from_file(str(work / "marked/tokenizer.json"))
    text, spans = "", []
    for message in messages:
        text += f"<|im_start|>{message['role']}\n"
        start = len(text)
        text += f"{message['content']}<|im_end|>\n"
        spans += [(start, len(text))] * (message["role"] == "assistant")
    actual = raw.encode(text, add_special_tokens=False)
    labels = [
        token if any(start < b and end > a for a, b in spans) else -100
        for token, (start, end) in zip(actual.ids, actual.offsets, strict=True)
    ]
    return actual.ids, labels


def test_ids_and_labels_by_marks_and_by_prefixes(work: Path, tmp_path: Path) -> None:
    """Marks and prefixes give the same rows; kept columns and the attention mask are next to them."""
    for name in ("marked", "bare"):
        result = tokenize(
            work, "chats.jsonl", tmp_path / name, "--keep-columns", "id", "--attention-mask", tokenizer=name
        )
        assert (result["documents"], result["overlong"], result["truncated"]) == (len(ROWS), 0, 0)
    actual = rows_of(tmp_path / "marked")
    assert actual == rows_of(tmp_path / "bare")
    assert result["trained"] == sum(sum(row["assistant_masks"]) for row in actual)
    for row, inputs in zip(actual, ROWS, strict=True):
        ids, labels = expected(work, inputs["messages"])
        assert (row["id"], row["input_ids"], row["labels"]) == (inputs["id"], ids, labels)
        assert row["assistant_masks"] == [int(label != -100) for label in labels]
        assert row["length"] == len(ids)
        assert row["attention_mask"] == [1] * len(ids)


def test_every_source_gives_the_same_rows(work: Path, tmp_path: Path) -> None:
    """JSONL, Parquet with nulls that Arrow filled in, a list of dicts, and ShareGPT with a table of roles give the same
    rows."""
    tokenize(work, "chats.jsonl", tmp_path / "jsonl")
    required = [row["labels"] for row in rows_of(tmp_path / "jsonl")]
    rich = [{"messages": [{**m, "tool_calls": None, "x": None} for m in row["messages"]]} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(rich), tmp_path / "chats.parquet")
    tokenize(work, tmp_path / "chats.parquet", tmp_path / "parquet")
    assert [row["labels"] for row in rows_of(tmp_path / "parquet")] == required
    names = {"user": "human", "assistant": "expert", "system": "system"}
    shared = [
        {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in row["messages"]]} for row in ROWS
    ]
    write_chats(tmp_path / "shared.jsonl", shared)
    error = brim("tokenize", "shared.jsonl", "x", "--tokenizer", work / "marked", "--chat", cwd=tmp_path, check=2)
    assert "--role expert=user" in error.stderr
    tokenize(work, tmp_path / "shared.jsonl", tmp_path / "shared", "--role", "expert=assistant")
    assert [row["labels"] for row in rows_of(tmp_path / "shared")] == required
    mixed = [
        {**row, "messages": [{**m, "x": number or "a"} for number, m in enumerate(row["messages"])]} for row in ROWS
    ]
    library.tokenize(mixed, work / "marked", destination=tmp_path / "list", chat=True, memory=LIMIT, progress=False)
    assert [row["labels"] for row in rows_of(tmp_path / "list")] == required


def test_prompts_and_completions(work: Path, tmp_path: Path) -> None:
    """Texts get special tokens and the end-of-text token; messages get the template. Labels start after the prompt."""
    raw = tokenizers.Tokenizer.from_file(str(work / "marked/tokenizer.json"))
    write_chats(tmp_path / "texts.jsonl", [{"q": "the words", "a": " of a café"}])
    tokenize(work, tmp_path / "texts.jsonl", tmp_path / "texts", "--prompt", "q", "--completion", "a")
    (row,) = rows_of(tmp_path / "texts")
    prompt, whole = raw.encode("the words").ids, raw.encode("the words of a café</s>").ids
    assert row["input_ids"] == whole
    assert row["labels"] == [-100] * len(prompt) + whole[len(prompt) :]
    chats = [{"q": row["messages"][:-1], "a": row["messages"][-1:]} for row in ROWS[:20]]
    write_chats(tmp_path / "chats.jsonl", chats)
    tokenize(work, tmp_path / "chats.jsonl", tmp_path / "chats", "--prompt", "q", "--completion", "a")
    tokenize(work, "chats.jsonl", tmp_path / "last", "--train-on", "last", "--limit", "20")
    assert rows_of(tmp_path / "chats") == rows_of(tmp_path / "last")


def test_rows_that_are_too_long(work: Path, tmp_path: Path) -> None:
    """Long rows are dropped, truncated or an error; rows without trained tokens are then an error or skipped, and
    counted."""
    tokenize(work, "chats.jsonl", tmp_path / "whole")
    lengths = [row["length"] for row in rows_of(tmp_path / "whole")]
    maximum = sorted(lengths)[200]
    result = tokenize(work, "chats.jsonl", tmp_path / "drop", "--max-length", str(maximum))
    over = sum(length > maximum for length in lengths)
    assert (result["overlong"], result["rows"]) == (over, len(ROWS) - over)
    assert [row["length"] for row in rows_of(tmp_path / "drop")] == [n for n in lengths if n <= maximum]
    result = tokenize(work, "chats.jsonl", tmp_path / "cut", "--max-length", str(maximum), "--overlong", "truncate",
                    "--on-error", "skip")  # fmt: skip
    assert result["truncated"] + result["bad_rows"] == over
    assert result["rows"] == len(ROWS) - result["bad_rows"]
    assert max(row["length"] for row in rows_of(tmp_path / "cut")) == maximum
    with pytest.raises(BrimError, match="more than max_length="):
        library.tokenize(
            work / "chats.jsonl", work / "marked", destination=tmp_path / "e", chat=True, max_length=maximum,
            overlong="error", progress=False,
        )  # fmt: skip
    with pytest.raises(BrimError, match=f"All {len(ROWS)} conversations are longer than max_length="):
        library.tokenize(
            work / "chats.jsonl",
            work / "marked",
            destination=tmp_path / "none",
            chat=True,
            max_length=2,
            progress=False,
        )


def test_packing(work: Path, tmp_path: Path) -> None:
    """Rows hold whole conversations and are nearly full; workers and units do not change them."""
    options = ("--pack", "512", "--position-ids")
    tokenize(work, "chats.jsonl", tmp_path / "rows", "--max-length", "512")
    result = tokenize(work, "chats.jsonl", tmp_path / "a", *options, "--workers", "1")
    tokenize(work, "chats.jsonl", tmp_path / "b", *options, "--workers", "2", "--unit-size", "50KB")
    assert tree_digest(tmp_path / "a/data") == tree_digest(tmp_path / "b/data")
    assert result["fill_rate"] > 0.95
    whole = {tuple(row["input_ids"]): row for row in rows_of(tmp_path / "rows")}
    observed = 0
    for row in rows_of(tmp_path / "a"):
        assert sum(row["seq_lengths"]) == row["length"] == len(row["input_ids"]) <= 512
        start = 0
        for length in row["seq_lengths"]:
            part = slice(start, start + length)
            own = whole[tuple(row["input_ids"][part])]
            assert row["labels"][part] == [-100, *own["labels"][1:]]
            assert row["assistant_masks"][part] == [0, *own["assistant_masks"][1:]]
            assert row["position_ids"][part] == list(range(length))
            start, observed = start + length, observed + 1
    assert observed == result["documents"] - result["overlong"] == len(rows_of(tmp_path / "rows"))


def test_bad_rows_are_quarantined(work: Path, tmp_path: Path) -> None:
    """A row that cannot be rendered stops the job with its position, or is quarantined with the reason."""
    image = {"role": "user", "content": [{"type": "image", "image": "a.png"}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    answer = {"role": "assistant", "content": "c"}
    rows = [{"messages": [image, answer]}, {"messages": [parts, answer]}, {"messages": []}, {"messages": None}]
    write_chats(tmp_path / "rows.jsonl", [*ROWS[:3], *rows])
    arguments = ("tokenize", tmp_path / "rows.jsonl", tmp_path / "out", "--tokenizer", work / "marked", "--chat")
    error = brim(*arguments, "--memory", LIMIT, check=2).stderr
    assert "row 3" in error
    assert "type 'image'" in error
    result = tokenize(work, tmp_path / "rows.jsonl", tmp_path / "out", "--on-error", "quarantine", "--fresh")
    assert (result["rows"], result["bad_rows"]) == (4, 3)
    bad = pq.read_table(next(tmp_path.rglob("quarantine.parquet"))).to_pylist()
    assert len(bad) == 3
    assert rows_of(tmp_path / "out")[3]["input_ids"] == expected(work, [{**parts, "content": "ab"}, answer])[0]


def test_templates_that_remove_thoughts(work: Path, tmp_path: Path) -> None:
    """The error names both solutions, and a template of the user is one of them."""
    messages = [{"role": role, "content": f"<think>{n}</think>{n}"} for n, role in enumerate(["user", "assistant"] * 2)]
    write_chats(tmp_path / "rows.jsonl", [{"messages": messages}])
    (tmp_path / "bare.jinja").write_text(without_marks(THINKING))
    (tmp_path / "marked.jinja").write_text(with_marks(THINKING))
    arguments = ["tokenize", tmp_path / "rows.jsonl", tmp_path / "out", "--tokenizer", work / "marked", "--chat"]
    error = brim(*arguments, "--chat-template", tmp_path / "bare.jinja", check=2).stderr
    assert "--train-on last" in error
    assert "--chat-template FILE" in error
    tokenize(work, tmp_path / "rows.jsonl", tmp_path / "marked", "--chat-template", str(tmp_path / "marked.jinja"))
    first = ("--chat-template", str(tmp_path / "bare.jinja"), "--train-on", "last")
    tokenize(work, tmp_path / "rows.jsonl", tmp_path / "last", *first)
    assert sum(rows_of(tmp_path / "last")[0]["assistant_masks"]) < sum(
        rows_of(tmp_path / "marked")[0]["assistant_masks"]
    )


def test_the_date_is_part_of_the_job(work: Path, tmp_path: Path) -> None:
    """strftime_now does not depend on the day of the run: another date is another job, and the default date is
    fixed."""
    (tmp_path / "dated.jinja").write_text(with_marks(STYLES["dated"]))
    arguments = ("--chat-template", str(tmp_path / "dated.jinja"), "--limit", "1", "--train-on", "all")
    raw = tokenizers.Tokenizer.from_file(str(work / "marked/tokenizer.json"))
    for number, (date, text) in enumerate({"2026-02-03": "03 February 2026", "": "26 July 2024"}.items()):
        out = tmp_path / str(number)
        tokenize(work, "chats.jsonl", out, *arguments, *(("--template-date", date) if date else ()))
        start = raw.encode(f"Today is {text}.", add_special_tokens=False).ids
        assert rows_of(out)[0]["input_ids"][: len(start)] == start
    error = brim(
        "tokenize", "chats.jsonl", tmp_path / "0", "--tokenizer", "marked", "--chat", *arguments, cwd=work, check=2
    )
    assert "--fresh" in error.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--eos", "</s>", "--chat"], "--eos cannot be used with --chat"),
        (["--format", "bin", "--chat"], "--format bin cannot be used with --chat"),
        (["--format", "megatron", "--chat"], "--format megatron cannot be used with --chat"),
        (["--format", "megatron", "--pack", "8"], "--pack cannot be used with --format megatron"),
        (["--train-on", "last"], "--train-on can only be used with --chat"),
        (["--chat", "--prompt", "text"], "--prompt needs --completion"),
        (["--chat", "--position-ids"], "--position-ids can only be used with --pack"),
        (["--chat", "--pack", "8", "--max-length", "9"], "--max-length 9 is more than --pack 8"),
        (["--chat", "--train-on", "completion"], "--train-on completion can only be used"),
        (["--chat", "--template-date", "today"], "--template-date takes a date such as 2026-01-31"),
        (["--chat", "--column", "nothing"], "nothing"),
    ],
)
def test_options_that_do_not_go_together(work: Path, tmp_path: Path, options: list[str], message: str) -> None:
    result = brim("tokenize", "chats.jsonl", tmp_path / "out", "--tokenizer", "marked", *options, cwd=work, check=2)
    assert message in result.stderr


def test_in_parts_and_in_a_bucket(
    work: Path, tmp_path: Path, s3: S3Server, s3_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A saved plan in two parts and a bucket give the same shards as a folder."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    options = ("--pack", "256", "--unit-size", "100KB", "--tokenizer", "marked", "--chat", "--memory", LIMIT, "-q")
    brim("tokenize", "chats.jsonl", tmp_path / "whole", *options, cwd=work)
    brim("tokenize", "chats.jsonl", tmp_path / "parts", *options[:-3], "--save", tmp_path / "plan", cwd=work)
    for part in ("1/2", "2/2"):
        brim("tokenize", "--plan", tmp_path / "plan", "--part", part, "--memory", LIMIT, "-q")
    brim("tokenize", "--plan", tmp_path / "plan", "--finish", "--memory", LIMIT, "-q")
    assert tree_digest(tmp_path / "parts/data") == tree_digest(tmp_path / "whole/data")
    address = f"s3://{PRIVATE}/{s3_prefix}chats"
    brim("tokenize", "chats.jsonl", address, *options, "--state-dir", tmp_path / "state", cwd=work)
    brim("verify", address, "--deep")
    for path in sorted((tmp_path / "whole/data").iterdir()):
        assert s3.read(PRIVATE, f"{s3_prefix}chats/data/{path.name}") == path.read_bytes()


def test_killed_and_resumed(work: Path, tmp_path: Path) -> None:
    """After kill -9 in every part of the job, the output equals that of an uninterrupted run, bit for bit."""
    arguments = ["tokenize", "chats.jsonl", "--tokenizer", "bare", "--chat", "--pack", "256", "--shuffle", "3"]
    arguments += ["--split-into", "train=0.9,test=0.1", "--unit-size", "30KB", "--memory", LIMIT, "--quiet"]

    def command(out: str) -> list[str]:
        return [sys.executable, "-m", "brim", *arguments[:2], str(tmp_path / out), *arguments[2:]]

    began = time.monotonic()
    subprocess.run(command("whole"), cwd=work, check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - began
    moments, killed = random.Random("chat"), 0
    for _ in range(12):
        process = subprocess.Popen(command("out"), cwd=work, stdout=subprocess.DEVNULL)
        try:
            assert process.wait(moments.uniform(0.5, seconds)) == 0
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
        if killed == 4:
            break
    assert killed
    subprocess.run(command("out"), cwd=work, check=True, stdout=subprocess.DEVNULL)
    assert tree_digest(tmp_path / "out") == tree_digest(tmp_path / "whole")

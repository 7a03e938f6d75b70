"""Every command as a Python function: its options, results, stopping, and docs/how-to/python.md."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import brim
from brim.options.compute_options import SaveOptions
from brim.options.declare import declared_options
from brim.options.groups import ShowOptions
from tests.conftest import write_files
from tests.embed_models import hashing

DOCS = Path(__file__).parents[2] / "docs/how-to/python.md"


def test_help_shows_the_words() -> None:
    """help() lists every keyword, and an unknown keyword is a TypeError."""
    assert "rows_per_shard: int | None = None" in str(inspect.signature(brim.tokenize))
    with pytest.raises(TypeError, match=r"^build\(\) got .* 'worker'. Did you mean 'workers'\?"):
        brim.build("a", "b", worker=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("command", ["map", "tokenize", "embed"])
def test_command_and_function_take_options_of_one_class(command: str) -> None:
    """Every command option is declared once and is a keyword of the function, except those for the terminal."""
    options = importlib.import_module(f"brim.cli.{command}_command").COMMAND.options
    function = getattr(brim, command).options
    shared = next(kind for kind in options.__mro__ if kind in function.__mro__ and kind is not options)
    assert shared.__name__ == f"{command.title()}Options"
    terminal = {name for kind in (SaveOptions, ShowOptions) for name in declared_options(kind)}
    parameters = inspect.signature(getattr(brim, command)).parameters
    for name, item in declared_options(options).items():
        if name in terminal or name == "destination":
            continue
        assert declared_options(shared)[name].option is item.option
        default = parameters[name].default
        assert default is inspect.Parameter.empty if item.default is MISSING else default == item.default


def test_deprecated_keywords_warn_at_the_callers_line(corpus: Path, tmp_path: Path) -> None:
    """Option names and values of earlier versions give the same result and one warning each."""
    arguments: dict[str, Any] = {"cache_dir": tmp_path / "cache", "memory": "1GB", "progress": False}
    tokenizer = tokenizer_file(tmp_path)
    with pytest.warns(DeprecationWarning, match="is now") as caught:
        old = brim.tokenize(corpus, tokenizer, keep="n", split="0.9/0.1", **arguments)
    assert [str(item.message) for item in caught] == [
        "keep= is now keep_columns=.",
        "split='0.9/0.1' is now split_into='train=0.9,validation=0.1'.",
    ]
    assert {entry.filename for entry in caught} == {__file__}
    shares = {"train": 0.9, "validation": 0.1}
    new = brim.tokenize(corpus, tokenizer, keep_columns="n", split_into=shares, **arguments)
    assert list(new) == ["train", "validation"]
    assert new["train"]["n"][:] == old["train"]["n"][:]
    dev = brim.tokenize(corpus, tokenizer, split="dev", destination=tmp_path / "dev", memory="1GB", progress=False)
    assert [path.name for path in (tmp_path / "dev" / "data").iterdir()] == ["dev-00000-of-00001.parquet"]
    assert [label for label, _ in dev.next_steps()] == ["load", "verify with"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"the cat {n} sat", "n": n}) + "\n" for n in range(300)))
    return path


def tokenizer_file(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    arguments = ["[UNK]", "the", "cat", "sat", *map(str, range(300)), "[EOS]"]
    tokenizer = Tokenizer(models.WordLevel({text: number for number, text in enumerate(arguments)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_tokens_without_a_destination(corpus: Path, tmp_path: Path) -> None:
    """Without a destination, token ids are a cached Dataset, packed on request, and are not computed again."""
    tokenizer = tokenizer_file(tmp_path)
    cache = tmp_path / "cache"
    result = brim.tokenize(corpus, tokenizer, keep_columns="n", cache_dir=cache, memory="1GB")
    assert result["input_ids"][7] == [1, 2, 4 + 7, 3]
    assert result["n"][7] == 7
    packed = brim.tokenize(corpus, tokenizer, pack=8, no_eos=True, cache_dir=cache, memory="1GB")
    assert {len(row) for row in packed["input_ids"]} == {8}
    assert packed["seq_lengths"][:] == [[4, 4]] * 150
    assert len(packed) == 300 * 4 // 8
    remaining = brim.caches(cache)
    assert [item.done for item in remaining] == [True, True]
    assert {entry.rows for entry in remaining} == {300, 150}
    assert all(element.removed for element in brim.clean(remove=True, cache_dir=cache))
    assert brim.caches(cache) == []


TEXT_LISTS = [["a", "b"], ("How are you?", "[fine] * thanks"), ["x" * 5000, "a\0b"]]


@pytest.mark.parametrize("texts", TEXT_LISTS)
def test_a_list_of_texts_is_refused_with_the_rows_to_give(tmp_path: Path, texts: Any) -> None:
    """Every function that takes rows refuses a list of texts, and following the hint works."""
    tokenizer = tokenizer_file(tmp_path)
    arguments: dict[str, Any] = {"cache_dir": tmp_path / "cache", "memory": "1GB"}
    calls = (
        lambda rows: brim.tokenize(rows, tokenizer, **arguments),
        lambda rows: brim.map(rows, len, cache_dir=tmp_path / "cache", memory="1GB"),
        lambda rows: brim.embed(rows, hashing, column="text", **arguments),
    )
    for call in calls:
        with pytest.raises(brim.InputError, match="A list of strings must name files") as caught:
            call(texts)
        assert '[{"text": text} for text in texts]' in caught.value.hint
    assert len(brim.tokenize([{"text": text} for text in texts], tokenizer, **arguments)) == 2


def test_a_list_of_paths_and_globs_names_files(corpus: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_file(tmp_path)
    for inputs in ([str(corpus)], [corpus], [str(corpus.parent / "*.jsonl")]):
        assert len(brim.tokenize(inputs, tokenizer, cache_dir=tmp_path / "cache", memory="1GB")) == 300
    with pytest.raises(brim.InputError, match=r"'missing\.jsonl' does not exist"):
        brim.tokenize([str(corpus), "missing.jsonl"], tokenizer, cache_dir=tmp_path / "cache", memory="1GB")


def test_vectors_without_a_destination(corpus: Path, tmp_path: Path) -> None:
    """Without a destination, vectors are arrays by name, equal to those of a file, and are not computed again."""
    model = "tests.embed_models:hashing"
    arguments = {"column": "text", "keep_columns": "n", "model_arg": {"dim": 5}, "memory": "2GB"}
    created = brim.embed(corpus, model, cache_dir=tmp_path / "cache", **arguments)  # type: ignore[call-overload]
    (name,) = created
    assert created[name].shape == (300, 5)
    assert created.rows == 300
    assert created.kept is not None
    repeated = brim.embed(corpus, hashing, cache_dir=tmp_path / "cache", **arguments)  # type: ignore[call-overload]
    assert repeated.computed.computed == 0
    assert repeated.path == created.path
    brim.embed(corpus, model, destination=tmp_path / "v.npy", **arguments)  # type: ignore[call-overload]
    assert (np.load(tmp_path / "v.npy") == repeated[name]).all()
    assert [item.done for item in brim.caches(tmp_path / "cache")] == [True]


@pytest.mark.parametrize("model", [lambda: None, 3, None])
def test_a_model_that_workers_cannot_import(corpus: Path, tmp_path: Path, model: object) -> None:
    """The error comes before the job starts and asks for MODULE:FACTORY."""
    with pytest.raises(brim.ArgumentError, match="model= takes a name") as caught:
        brim.embed(corpus, model, destination=tmp_path / "v.npy", column="text")  # type: ignore[call-overload]
    assert "MODULE:FACTORY" in str(caught.value)
    assert list(tmp_path.iterdir()) == [corpus]


def test_a_destination_is_what_the_command_makes(corpus: Path, tmp_path: Path) -> None:
    """map and tokenize with a destination give the same shards as the command line, byte for byte."""
    tokenizer = tokenizer_file(tmp_path)
    computed = brim.tokenize(corpus, tokenizer, destination=tmp_path / "python", memory="1GB")
    assert isinstance(computed, brim.MapResult)
    arguments = ["tokenize", corpus, tmp_path / "terminal", "--tokenizer", tokenizer, "--memory", "1GB", "--quiet"]
    subprocess.run([sys.executable, "-m", "brim", *map(str, arguments)], check=True, capture_output=True)
    ours, theirs = (sorted((tmp_path / method / "data").iterdir()) for method in ("python", "terminal"))
    assert [path.read_bytes() for path in ours] == [path.read_bytes() for path in theirs]
    mapped = brim.map(corpus, lambda row: {"n": row["n"] + 1}, destination=tmp_path / "mapped", memory="1GB")
    assert mapped.rows == 300


@pytest.mark.parametrize("text", [{"public": True}, {"state": "x"}, {"commit_message": "x"}, {"format": "arrow"}])
def test_words_of_a_destination_need_one(corpus: Path, tmp_path: Path, text: dict[str, object]) -> None:
    """Options for publishing are refused if the result stays in the cache."""
    with pytest.raises(brim.InputError, match="needs a destination"):
        brim.map(corpus, len, cache_dir=tmp_path / "cache", **text)  # type: ignore[call-overload]


def test_a_plan_in_parts(tmp_path: Path) -> None:
    """A saved plan runs in parts, reports its progress, and finishes like a build."""
    source = tmp_path / "files"
    source.mkdir()
    for number in range(6):
        (source / f"{number}.bin").write_bytes(bytes([number]) * 100)
    brim.plan(source, tmp_path / "out", rows_per_shard=1, include="*.bin").save(tmp_path / "plan")
    result = brim.open_plan(tmp_path / "plan").part("1/2")
    assert (result.shards, result.parts) == (3, 2)
    assert brim.open_plan(tmp_path / "plan").status.missing_parts == [2]
    brim.open_plan(tmp_path / "plan").part("2/2")
    assert brim.open_plan(tmp_path / "plan").finish().rows == 6
    assert brim.open_plan(tmp_path / "plan").status.finished


def test_how_a_path_is_read_is_not_said_of_a_table(tmp_path: Path) -> None:
    """Options for reading files are refused for a source that is already a table."""
    (tmp_path / "a.bin").write_bytes(b"a")
    with pytest.raises(brim.InputError, match=r"has been read already"):
        brim.plan(brim.files(tmp_path), None, include="*.bin")


def test_another_thread_may_stop_a_job(corpus: Path, tmp_path: Path) -> None:
    """A job in a thread raises Stopped on a stop request and resumes when it is called again."""
    stop, caught = brim.Stop(), []

    def work() -> None:
        try:
            brim.map(corpus, _slow, cache_dir=tmp_path / "cache", unit_size=1000, workers=1, memory="1GB", stop=stop)
        except brim.StoppedError as stopped:
            caught.append(stopped)

    thread = threading.Thread(target=work)
    thread.start()
    while not list((tmp_path / "cache").rglob("units/*.arrow")):  # the first unit is done
        assert thread.is_alive()
        time.sleep(0.02)
    stop.request("the server")
    thread.join(60)
    assert not thread.is_alive()
    assert "the server" in caught[0].message


def _slow(row: dict[str, int]) -> dict[str, int]:
    time.sleep(0.05)
    return {"n": row["n"]}


_HOST = """
import os, signal, sys, time
import brim

def slow(row):
    time.sleep(0.05)
    return row

signal.signal(signal.SIGUSR1, lambda *_: print("heard", flush=True))
class Said(brim.progress.Progress):
    def start(self, *_):
        print("begun", flush=True)

try:
    brim.map(sys.argv[1], slow, cache_dir=sys.argv[2], unit_size=1000, workers=1, memory="1GB", progress=Said())
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
"""


def test_a_host_hears_its_own_signals(corpus: Path, tmp_path: Path) -> None:
    """In a program, Ctrl-C ends the job with KeyboardInterrupt; the program keeps its handlers of other signals."""
    script = tmp_path / "host.py"
    script.write_text(_HOST.replace("import brim\n", "import brim, brim.progress\n", 1))
    with subprocess.Popen(
        [sys.executable, script, corpus, tmp_path / "cache"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "heard\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted True\n"
    assert process.returncode == 0


def test_the_python_guide_names_every_function() -> None:
    """The Python guide mentions every function. `make test-docs` runs its code blocks."""
    names = set(re.findall(r"brim\.(\w+)", DOCS.read_text()))
    assert {name for name in brim.__all__ if name[0].islower()} <= names


def test_plan_has_its_numbers_as_attributes_and_build_reports_the_same_size(tmp_path: Path) -> None:
    """The plan and the result print the size of the files under the same label."""
    source = write_files(tmp_path / "source", {f"{i}.bin": bytes(1000 + i) for i in range(6)})
    plan = brim.plan(source, tmp_path / "out", rows_per_shard=2)
    assert (plan.rows, plan.bytes, plan.shards) == (6, 6015, 3)
    assert plan.bytes == plan.facts["file_bytes"]
    result = plan.run()
    assert result.file_bytes == plan.bytes < result.bytes
    size = ("size of the files", "6.01 KB")
    assert size in plan.lines
    assert size in result.lines
    added = write_files(tmp_path / "more", {"more.bin": bytes(500)})
    assert brim.build(added, tmp_path / "out", append=True).file_bytes == 6515

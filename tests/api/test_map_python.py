"""brim.map and brim.filter from Python: arguments, errors, signals, several processes and threads."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import brim
from brim.execution.failures import pack_exception, user_error
from brim.jobs.cache_entries import list_caches, open_cache

MEMORY = "1GB"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BRIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BRIM_MEMORY", MEMORY)
    return tmp_path / "cache"


@pytest.fixture
def rows() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"n": list(range(12)), "text": [f"row {n}" for n in range(12)]})


# Arguments


@pytest.mark.parametrize("name", ["map", "filter"])
def test_the_arguments_are_those_of_the_original(name: str) -> None:
    """brim.map has all arguments of the original, in order, with their defaults and kinds; those of DatasetDict exist
    by name."""
    ours = inspect.signature(getattr(brim, name)).parameters
    theirs = list(inspect.signature(getattr(datasets.Dataset, name)).parameters.values())[1:]
    positional = [p for p in ours.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD][1:]
    assert [(p.name, p.default) for p in positional] == [(p.name, p.default) for p in theirs]
    several = inspect.signature(getattr(datasets.DatasetDict, name)).parameters
    assert not several.keys() - ours.keys() - {"self"}


def test_by_position(rows: datasets.Dataset) -> None:
    """Arguments can be passed by position, as with the original."""
    mapped = brim.map(rows, lambda n, index, rank: {"sum": n + index, "rank": rank}, True, True, ["n"])
    assert mapped["sum"][:] == [2 * n for n in range(12)]
    assert set(mapped["rank"]) == {0}
    with pytest.raises(brim.InputError, match="input_columns= takes"):
        brim.map(datasets.DatasetDict(a=rows), lambda row: row, False, False, True)


def test_the_rank_is_a_slot(rows: datasets.Dataset) -> None:
    """A replacement worker has the rank of the worker that it replaces."""

    def dies_once(row: Any, rank: int, marker: str) -> dict[str, int]:
        if row["n"] == 6 and not os.path.exists(marker):
            open(marker, "w").close()
            os._exit(1)
        return {"rank": rank}

    marker = {"marker": os.path.join(os.environ["BRIM_CACHE"] + "-died")}
    mapped = brim.map(rows, dies_once, with_rank=True, num_proc=2, fn_kwargs=marker, unit_size=64, batch_size=2)
    assert set(mapped["rank"]) <= {0, 1}
    assert os.path.exists(marker["marker"])


def test_what_has_no_effect_is_said_once(rows: datasets.Dataset, capfd: pytest.CaptureFixture[str]) -> None:
    """Arguments without an effect on the rows are accepted and reported in one line."""
    mapped = brim.map(rows, lambda row: {"m": 1}, cache_file_name="x.arrow", suffix_template="_{rank}_of_{num_proc}")
    assert mapped.num_rows == 12
    output = capfd.readouterr().err.splitlines()
    assert [line for line in output if "no effect" in line] == [
        "brim: cache_file_name and suffix_template have no effect: the result is mapped from brim's cache (cache_dir=)"
    ]
    assert brim.map(rows, lambda row: {"m": 2}, new_fingerprint="mine")._fingerprint == "mine"


def test_types_are_found_as_was_asked(rows: datasets.Dataset) -> None:
    """on_mixed_types, try_original_type and disable_nullable have the same effect as in the original."""
    small = rows.cast_column("n", datasets.Value("int32"))
    remaining = {"batched": True, "load_from_cache_file": False}
    for keep in (True, False):
        ours = brim.map(small, lambda b: {"n": [n + 1 for n in b["n"]]}, try_original_type=keep, **remaining)
        theirs = small.map(lambda b: {"n": [n + 1 for n in b["n"]]}, try_original_type=keep, **remaining)
        assert ours.features == theirs.features
    assert brim.map(rows, lambda row: {"x": [1, "a"]}).features["x"] == datasets.List(datasets.Json())
    with pytest.raises(Exception, match="x"):
        brim.map(rows, lambda row: {"x": [1, "a"]}, on_mixed_types=None)
    with pytest.raises(ValueError, match="nulls"):
        brim.map(rows, lambda row: {"x": None if row["n"] == 3 else 1}, disable_nullable=True)


# Errors


class OwnError(Exception):
    def __init__(self, first: int, second: str) -> None:
        super().__init__(f"{first} and {second}")
        self.first, self.message = first, "its own"


def fails(row: Any) -> Any:
    return {"x": 1 // (row["n"] - 7)}


def fails_in_its_own_way(row: Any) -> Any:
    raise OwnError(row["n"], "two")


def fails_with_a_file(row: Any) -> Any:
    open(f"/nowhere/{row['n']}").close()


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (fails, ZeroDivisionError, "integer division or modulo by zero"),
        (fails_in_its_own_way, OwnError, "0 and two"),
        (fails_with_a_file, FileNotFoundError, "[Errno 2] No such file or directory: '/nowhere/0'"),
    ],
)
def test_what_a_function_raises_is_raised(
    rows: datasets.Dataset, function: Any, kind: type[Exception], text: str
) -> None:
    """The error is of the function's type and a UserFunctionError, has the worker's traceback, and survives
    pickling."""
    with pytest.raises(kind) as caught:
        brim.map(rows, function)
    error = caught.value
    assert isinstance(error, brim.UserFunctionError)
    assert str(error) == text
    assert f'File "{__file__}"' in error.__notes__[-1]
    assert f"in {function.__name__}\n" in error.__notes__[-1]
    assert any("row " in note and "(unit 0)" in note for note in error.__notes__)
    assert isinstance(pickle.loads(pickle.dumps(error)), kind)
    assert error.facts["unit"] == 0
    if isinstance(error, OwnError):
        assert (error.first, error.message) == (0, "its own")


def test_a_keyboard_interrupt_of_the_function_is_one(rows: datasets.Dataset) -> None:
    """A function that raises KeyboardInterrupt ends the job, whatever --on-error says about failing rows."""

    def interrupts(row: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        brim.map(rows, interrupts, on_error="skip")


def test_types_that_do_not_combine(rows: datasets.Dataset) -> None:
    """An exception that would end the program, or that cannot be pickled, becomes the cause or text of a
    UserFunctionError."""

    def exits(row: Any) -> Any:
        raise SystemExit(3)

    def has_no_next(row: Any) -> Any:
        return {"x": next(iter([]))}

    for function, kind in ((exits, SystemExit), (has_no_next, StopIteration)):
        with pytest.raises(brim.UserFunctionError, match="row 0") as caught:
            brim.map(rows, function)
        assert not isinstance(caught.value, kind)
        assert isinstance(caught.value.__cause__, kind)
    failed = brim.UserFunctionError("It failed.", parts=b"no pickle", traceback="where", place="here")
    assert user_error(failed) is failed
    assert failed.__notes__ == ["where"]
    lock = RuntimeError(threading.Lock())
    assert b"RuntimeError" in pack_exception(lock)  # with the part of its message that survives


def test_the_command_shows_it_as_ever(tmp_path: Path) -> None:
    """The command prints one sentence and the next step, without a traceback."""
    (tmp_path / "steps.py").write_text("def bad(row):\n    raise ValueError('no good')\n")
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n')
    command = [sys.executable, "-m", "brim", "map", "rows.jsonl", "out", "--fn", "steps:bad"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert "The function failed at rows.jsonl, row 0 (byte 0) (unit 0): ValueError: no good" in result.stderr
    assert "Traceback" not in result.stderr


# Several processes

SCRIPT = """
import os, sys, time
import datasets, brim
rows = datasets.Dataset.from_dict({"n": list(range(24))})

def slow(batch):
    open(os.path.join(os.environ['MARKS'], f"{batch['n'][0]}-{os.getppid()}"), 'w').close()
    time.sleep(0.25)
    return {"m": [n + 1 for n in batch["n"]]}

made = brim.map(rows, slow, batched=True, batch_size=4, num_proc=1, unit_size=1)
assert made["m"][:] == list(range(1, 25))
print("done", os.getpid())
"""


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "marks").mkdir()
    monkeypatch.setenv("MARKS", str(tmp_path / "marks"))
    return tmp_path / "marks"


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(actual: Any, label: str) -> Any:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        if value := actual():
            return value
        time.sleep(0.02)
    raise AssertionError(f"no {label} in five minutes")


@pytest.mark.slow
def test_four_processes_and_one_is_killed(marks: Path) -> None:
    """One process computes while the others wait and report it. If it is killed, another resumes, and only the unit
    in progress is computed again."""
    running = [start(SCRIPT) for _ in range(4)]
    first = int(wait_for(lambda: [mark.name for mark in marks.iterdir()][1:2], "second mark")[0].split("-")[1])
    os.kill(first, signal.SIGKILL)
    ends = {item.pid: (*item.communicate(timeout=300), item.returncode) for item in running}
    assert ends[first][2] == -signal.SIGKILL
    assert [end[2] for pid, end in ends.items() if pid != first] == [0, 0, 0]
    messages = [end[1].count("another process computes the same: waiting for it") for end in ends.values()]
    assert sum(messages) >= 3
    finished = [mark.name.split("-") for mark in marks.iterdir()]
    assert len({pid for _, pid in finished}) == 2
    assert len({position for position, _ in finished}) == 6
    assert len(finished) <= 7 + 1  # the lost unit, plus the first batch, whose types the new process infers


def test_a_wait_can_be_stopped(rows: datasets.Dataset, marks: Path) -> None:
    """A Stop request ends the wait for the process that computes the same."""
    second = start(SCRIPT)
    wait_for(lambda: list(marks.iterdir()), "mark")
    stop = brim.Stop()
    stop.request("the test")
    source = SCRIPT.split("made =")[0]
    space: dict[str, Any] = {"__name__": "other"}
    try:
        exec(source, space)
        with pytest.raises(brim.StoppedError):
            brim.map(space["rows"], space["slow"], batched=True, batch_size=4, num_proc=1, unit_size=1, stop=stop)
    finally:
        second.kill()
        second.communicate()


# Signals, threads and scripts


def interrupted(marks: Path, number: int, tail: str = "") -> tuple[int, str, str]:
    script = "import signal\nbefore = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)\n"
    body = textwrap.indent(SCRIPT.split("made =")[1], " " * 0)
    script += SCRIPT.split("made =")[0] + "try:\n    made =" + body.splitlines()[0] + "\n" + tail
    running = start(script)
    wait_for(lambda: list(marks.iterdir()), "mark")
    running.send_signal(number)
    out, err = running.communicate(timeout=300)
    return running.returncode, out, err


def test_ctrl_c_is_a_keyboard_interrupt(marks: Path) -> None:
    """Ctrl-C stops cleanly and restores the previous signal handlers; the same call resumes."""
    tail = (
        "except KeyboardInterrupt as error:\n"
        "    after = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)\n"
        "    print('interrupted', after == before, isinstance(error, Exception))\n"
    )
    code, out, err = interrupted(marks, signal.SIGINT, tail)
    assert (code, out) == (0, "interrupted True False\n"), err
    result = start(SCRIPT).communicate(timeout=300)
    assert result[0].startswith("done"), result[1]


def test_sigterm_ends_the_process_as_it_would(marks: Path) -> None:
    """SIGTERM terminates the caller: no thread blocks it, and no worker survives."""
    code, _, _ = interrupted(marks, signal.SIGTERM, "finally:\n    pass\n")
    assert code == -signal.SIGTERM
    time.sleep(0.2)
    count = len(list(marks.iterdir()))
    time.sleep(0.6)
    assert len(list(marks.iterdir())) == count


def test_a_thread_has_no_handlers(rows: datasets.Dataset) -> None:
    """In a thread, brim installs no signal handlers; a Stop request from another thread ends the call."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop, ended = brim.Stop(), []

    def slow(row: Any) -> Any:
        time.sleep(0.05)
        return row

    def work() -> None:
        try:
            brim.map(rows, slow, stop=stop, writer_batch_size=1)
        except brim.StoppedError as stopped:
            ended.append(stopped)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.3)
    assert {number: signal.getsignal(number) for number in before} == before
    stop.request("the server")
    thread.join(30)
    assert "the server" in str(ended[0])


def _takes_much(row: dict[str, Any]) -> dict[str, Any]:
    return {"held": len(bytearray(b"x") * (600 << 20))}


@pytest.mark.long
def test_other_programs_of_the_caller_are_not_the_jobs(rows: datasets.Dataset) -> None:
    """Other processes of the caller (a server, DataLoader workers) do not count towards the limit and do not raise
    it."""
    fat = "import sys; held = bytearray(b'x') * (700 << 20); print('there', flush=True); sys.stdin.read()"
    second = subprocess.Popen([sys.executable, "-c", fat], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert second.stdout is not None
        assert second.stdout.readline() == "there\n"
        subset = rows.select(range(10))
        assert brim.map(subset, lambda row: {"m": row["n"]}, memory="350MB")["m"][:] == subset["n"][:]
        assert len(brim.filter(subset, lambda row: False, memory="350MB")) == 0
        with pytest.raises(brim.MemoryLimitError):
            brim.map(subset.select([0]), _takes_much, memory="350MB")
    finally:
        second.communicate()


def test_in_a_coroutine(rows: datasets.Dataset) -> None:
    """brim.map works inside a running event loop, alone and concurrently with other tasks, also with asynchronous
    functions."""

    async def double(row: Any) -> Any:
        await asyncio.sleep(0)
        return {"m": 2 * row["n"]}

    async def main() -> tuple[Any, Any]:
        local = brim.map(rows, double)
        concurrent = await asyncio.to_thread(brim.filter, rows, lambda row: row["n"] > 9)
        return local, concurrent

    present, neighbor = asyncio.run(main())
    assert present["m"][:] == [2 * n for n in range(12)]
    assert neighbor["n"][:] == [10, 11]


@pytest.mark.parametrize("method", ["stdin", "file"])
def test_a_script_without_a_main_guard(tmp_path: Path, marks: Path, method: str) -> None:
    """A script without a main guard runs from a file and from stdin (`python -`)."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command, text = ([sys.executable, "-"], SCRIPT) if method == "stdin" else ([sys.executable, "script.py"], None)
    result = subprocess.run(command, input=text, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.stdout.startswith("done"), result.stderr


# Results


def test_nothing_returned_is_the_dataset_itself(rows: datasets.Dataset, marks: Path, cache: Path) -> None:
    """The result is the same object, and nothing is cached: the next call repeats the side effects."""

    def touches(row: Any, folder: str) -> None:
        open(os.path.join(folder, f"{row['n']}-{time.monotonic_ns()}"), "w").close()

    for _ in range(2):
        mapped = brim.map(rows, touches, fn_kwargs={"folder": str(marks)}, remove_columns=["text"])
        assert mapped is rows
    assert sorted({mark.name.split("-")[0] for mark in marks.iterdir()}, key=int) == [str(n) for n in range(12)]
    assert len(list(marks.iterdir())) >= 24
    assert not list_caches(cache)


class Counter:
    def __init__(self) -> None:
        self.calls, self.seen, self.lock = 0, [0], b"x" * 10**6

    def __call__(self, row: Any) -> None:
        self.calls += 1
        self.seen.append(row["n"])


def test_changes_of_a_callable_object_stay_in_the_workers(rows: datasets.Dataset) -> None:
    """Changes of a callable object are lost with its worker, as with `num_proc=` of `Dataset.map`."""
    counter = Counter()
    assert brim.map(rows, counter) is rows
    assert (counter.calls, counter.seen) == (0, [0])


@pytest.mark.parametrize("batched", [False, True])
def test_all_columns_removed_and_none_returned(rows: datasets.Dataset, batched: bool) -> None:
    """The result has no columns and no rows, as in the original."""
    options = {"remove_columns": rows.column_names, "batched": batched}
    ours, theirs = brim.map(rows, lambda _: {}, **options), rows.map(lambda _: {}, **options)
    assert (ours.features, len(ours)) == (theirs.features, len(theirs)) == ({}, 0)


def test_the_only_batch_is_dropped(rows: datasets.Dataset) -> None:
    """The result has no rows; the original returns its input rows unmapped."""
    options = {"batched": True, "batch_size": 100, "drop_last_batch": True}
    assert len(brim.map(rows, lambda batch: {"m": batch["n"]}, **options)) == 0
    assert rows.map(lambda batch: {"m": batch["n"]}, **options) is rows


def test_streams_are_computed_now(rows: datasets.Dataset) -> None:
    """A stream is computed immediately to a dataset with the stream's features; results of other streams are not
    reused."""
    features = datasets.Features({"n": datasets.Value("int32"), "text": datasets.Value("string")})
    stream = rows.cast(features).to_iterable_dataset()
    mapped = brim.map(stream, lambda row: {"m": row["n"]})
    assert type(mapped) is datasets.Dataset
    assert mapped.features["n"] == datasets.Value("int32")
    assert brim.filter(stream, lambda row: row["n"] < 2)[:] == rows[:2]
    other_items = datasets.IterableDatasetDict(a=stream, b=stream.skip(10))
    both = brim.map(other_items, lambda row: {"m": row["n"]})
    assert type(both) is datasets.DatasetDict
    assert both["b"]["m"][:] == [10, 11]
    assert brim.map(iter([{"a": 1}]), str_of)["b"][:] == ["1"]
    assert brim.map(iter([{"a": 2}]), str_of)["b"][:] == ["2"]


def str_of(row: Any) -> dict[str, str]:
    return {"b": str(row["a"])}


class Listening(brim.Progress):
    """A progress object that counts the bars that begin and end."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def start(self, label: str, total_bytes: int, shards: int, limit_bytes: int) -> None:
        self.said.append((label, total_bytes))

    def finish(self) -> None:
        self.said.append("finish")

    def advance(self, size: int) -> None: ...
    def hashed(self, size: int) -> None: ...
    def committed(self) -> None: ...
    def shard(self, name: str, size: int, sha256: str, method: str) -> None: ...
    def note(self, text: str) -> None: ...
    def nodes(self, retained: Any) -> None: ...


def test_splits_are_one_job_with_one_bar(rows: datasets.Dataset, tmp_path: Path) -> None:
    """The bar's total is the number of rows of all splits; with_split passes each split's name to the function."""
    rows.save_to_disk(tmp_path / "rows")
    part = datasets.load_from_disk(tmp_path / "rows")
    several, watched = datasets.DatasetDict(train=part, test=part), Listening()
    mapped = brim.map(several, lambda row, split: {"split": split}, with_split=True, progress=watched)
    assert mapped["test"]["split"][:] == ["test"] * 12
    (label, total), *remainder = watched.said
    assert label == "map"
    assert total > 0
    assert remainder == ["finish"]
    with pytest.raises(brim.InputError, match="with_split"):
        brim.map(rows, lambda row: row, with_split=True)


def test_quiet(rows: datasets.Dataset, capfd: pytest.CaptureFixture[str]) -> None:
    """`progress=False` prints nothing, not even the note about arguments without an effect."""
    brim.map(rows, lambda row: row, keep_in_memory=True, progress=False)
    assert capfd.readouterr().err == ""
    with pytest.raises(brim.InputError, match=r"brim\.Progress"):
        brim.map(rows, progress="loud")


# Filter


def test_filter_is_that_of_datasets(rows: datasets.Dataset, tmp_path: Path) -> None:
    """Rows, order and features equal those of the original; for a Dataset only indices are written, and a second call
    reuses them."""
    shuffled = rows.shuffle(seed=3)
    for source in (rows, shuffled, rows.with_format("numpy"), rows.select(range(3, 9))):
        ours = brim.filter(source, lambda row: row["n"] % 3 == 0)
        theirs = source.filter(lambda row: row["n"] % 3 == 0)
        assert list(ours["n"]) == list(theirs["n"])
        assert (ours.features, ours.format) == (theirs.features, theirs.format)
    assert brim.filter(rows, lambda n, index: index > 9, True, False, "n")["n"][:] == [10, 11]
    assert brim.filter(rows, lambda batch: [n > 9 for n in batch["n"]], batched=True, batch_size=5)["n"][:] == [10, 11]
    assert len(brim.filter(rows, lambda row: False)) == 0
    assert len(brim.filter(rows)) == 12
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert brim.filter(tmp_path / "rows.jsonl", lambda row: row["n"] > 9)["text"][:] == ["row 10", "row 11"]


# Caches


def test_caches_have_a_cap(rows: datasets.Dataset, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """The least recently used results are removed first; open results stay."""
    rows = datasets.Dataset.from_dict({"n": list(range(2000))})
    open_one = brim.map(rows, lambda row: {"m": 1})
    for number in (2, 3):
        brim.map(rows, lambda row, number: {"m": number}, fn_kwargs={"number": number})
    sizes = {entry.folder: entry.bytes for entry in brim.caches()}
    assert len(sizes) == 3
    monkeypatch.setenv("BRIM_CACHE_MAX", str(2 * max(sizes.values()) + 1000))
    brim.map(rows, lambda row: {"m": 4})
    remaining = {one.folder for one in brim.caches()}
    assert len(remaining) == 2
    assert Path(open_one.cache_files[0]["filename"]).parents[1] in remaining
    assert open_one["m"][1999] == 1
    shown = subprocess.run([sys.executable, "-m", "brim", "clean"], capture_output=True, text=True, check=True).stdout
    assert "BRIM_CACHE_MAX" in shown
    monkeypatch.setenv("BRIM_CACHE_MAX", "lots")
    with pytest.raises(brim.InputError, match="BRIM_CACHE_MAX"):
        brim.map(rows, lambda row: {"m": 5})


# Comparison with the original

VALUES = st.one_of(
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False, width=32),
    st.text(max_size=6),
    st.booleans(),
)
KINDS = [st.integers(-(2**40), 2**40), st.text(max_size=5), st.booleans(), st.lists(st.integers(0, 9), max_size=3)]


def changes(batch: Any, *extra: Any, kind: int = 0, offset: int = 0) -> Any:
    """Return one of several batch functions."""
    keys = list(batch)
    first, count = keys[0], len(batch[keys[0]])
    if kind == 0:
        return {"size": [len(str(value)) + offset for value in batch[first]]}
    if kind == 1:
        return {first: [str(value) for value in batch[first]]}
    if kind == 2:
        return {"more": [extra[0][row] if extra else row for row in range(count)]}
    if kind == 3:
        return {name: list(batch[name])[::2] for name in keys}
    return {name: [value for value in batch[name] for _ in range(2)] for name in keys}


def of_rows(row: Any, *extra: Any, kind: int = 0, offset: int = 0) -> Any:
    """Return one of several row functions."""
    first = next(iter(row))
    if kind == 0:
        return {"size": len(str(row[first])) + offset}
    if kind == 1:
        row[first] = str(row[first])
        return row
    if kind == 2:
        return {"more": extra[0] if extra else 0}
    if kind == 3:
        return {"nested": {"a": row[first], "b": [offset]}}
    return {first: None if row[first] in (0, "", False, []) else row[first]}


def is_long(row: Any, *extra: Any, kind: int = 0, offset: int = 0) -> Any:
    first = next(iter(row))
    return (len(str(row[first])) + kind + offset + (extra[0] if extra else 0)) % 2 == 0


def are_long(batch: Any, *extra: Any, kind: int = 0, offset: int = 0) -> Any:
    first = next(iter(batch))
    inputs = extra[0] if extra else [0] * len(batch[first])
    return [(len(str(value)) + kind + offset + n) % 2 == 0 for value, n in zip(batch[first], inputs, strict=True)]


@st.composite
def tables(draw: Any) -> dict[str, list[Any]]:
    count = draw(st.integers(1, 12))
    columns = draw(st.lists(st.sampled_from(range(len(KINDS))), min_size=1, max_size=3))
    return {
        f"c{index}": draw(st.lists(st.one_of(st.none(), KINDS[kind]), min_size=count, max_size=count))
        for index, kind in enumerate(columns)
    }


@pytest.mark.slow
@settings(max_examples=20)
@given(
    table=tables(),
    kind=st.integers(0, 4),
    offset=st.integers(0, 2),
    with_indices=st.booleans(),
    batched=st.booleans(),
    batch_size=st.sampled_from([1, 3, 1000, None]),
    reordered=st.booleans(),
    removed=st.booleans(),
    last_dropped=st.booleans(),
)
def test_beside_the_original(
    table: Any,
    kind: int,
    offset: int,
    with_indices: bool,
    batched: bool,
    batch_size: Any,
    reordered: bool,
    removed: bool,
    last_dropped: bool,
) -> None:
    """The same random dataset, function and arguments give the same rows and features as the original, or both fail."""
    source = datasets.Dataset.from_dict(table)
    source = source.shuffle(seed=offset) if reordered else source
    options = {
        "with_indices": with_indices,
        "batched": batched,
        "batch_size": batch_size,
        "fn_kwargs": {"kind": kind, "offset": offset},
        "load_from_cache_file": False,
    }
    function = changes if batched else of_rows
    last_dropped = batched and last_dropped and (batch_size or 0) <= len(source)  # or no columns remain
    extra = {"remove_columns": list(table)[:1] if removed else None, "drop_last_batch": last_dropped}
    ours, theirs = (_made(make, function, options | extra) for make in (brim_map(source), source.map))
    assert ours == theirs
    keeps = are_long if batched else is_long
    ours, theirs = (_made(make, keeps, options) for make in (brim_filter(source), source.filter))
    assert ours == theirs


def brim_map(source: Any) -> Any:
    return lambda function, **options: brim.map(source, function, **options)


def brim_filter(source: Any) -> Any:
    return lambda function, **options: brim.filter(source, function, **options)


def _made(make: Any, function: Any, options: Any) -> Any:
    try:
        created = make(function, **options)
    except Exception as error:  # noqa: BLE001  the original raises many
        return type(error).__mro__[-3:]
    return created[:], created.features


def test_a_cache_is_opened_by_many_at_once(cache: Path) -> None:
    """Several ranks of one program can open a cache at the same moment, before one of them holds its lock."""
    about = {"what": "map", "source": "rows"}

    def opens(_: int) -> Path:
        return open_cache(cache, "job", about)

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(opens, range(100))) == {cache / "job"}
    assert [path.name for path in (cache / "job").iterdir()] == ["about.json"]

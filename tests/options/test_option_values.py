"""Options with fixed values or a minimum refuse all other values before anything runs."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brim
from brim.cli.commands import SYNONYMS
from brim.errors import InputError
from tests.conftest import brim as terminal

ROWS = "".join(f'{{"text": "row {number}", "n": {number}}}\n' for number in range(20))
Call = Callable[[Path, Path], Any]


def _table(source: Path, **options: Any) -> Any:
    return brim.table(source / "t.csv", files="f", **options)


PYTHON: dict[str, Call] = {
    "format": lambda s, d: brim.build(s / "files", d, format="zip"),
    "oversize": lambda s, d: brim.build(s / "files", d, oversize="keep"),
    "via": lambda s, d: brim.build(s / "files", "hf://datasets/a/b", via="ftp"),
    "engine": lambda s, d: brim.build(s / "files", d, engine="dask"),
    "address": lambda s, d: brim.build(s / "files", d, address="a:1"),
    "workers": lambda s, d: brim.build(s / "files", d, workers=0),
    "num_shards": lambda s, d: brim.build(s / "files", d, num_shards=0),
    "rows_per_shard": lambda s, d: brim.build(s / "files", d, rows_per_shard=0),
    "shard_size": lambda s, d: brim.build(s / "files", d, shard_size="0"),
    "memory": lambda s, d: brim.build(s / "files", d, memory="lots"),
    "public in a folder": lambda s, d: brim.build(s / "files", d, public=True),
    "config in a folder": lambda s, d: brim.build(s / "files", d, config="x"),
    "via in a folder": lambda s, d: brim.build(s / "files", d, via="xet"),
    "commit_message in a bucket": lambda s, d: brim.plan(s / "files", "s3://b/p", commit_message="x"),
    "fresh and update": lambda s, d: brim.build(s / "files", d, fresh=True, update=True),
    "files label_from": lambda s, d: brim.files(s / "files", label_from="child"),  # type: ignore[arg-type]
    "files limit": lambda s, d: brim.files(s / "files", limit=0),
    "files column": lambda s, d: brim.files(s / "files", column="f:scan"),
    "table limit": lambda s, d: _table(s, limit=-1),
    "table split": lambda s, d: _table(s, split="a b"),
    "bids rows": lambda s, d: brim.bids(s / "files", rows="scan"),  # type: ignore[arg-type]
    "bids sidecars": lambda s, d: brim.bids(s / "files", sidecars="some"),  # type: ignore[arg-type]
    "check sample_size": lambda s, d: brim.check(s / "files", sample_size=-1),
    "check oversize": lambda s, d: brim.check(s / "files", oversize="keep"),  # type: ignore[arg-type]
    "map on_error": lambda s, d: brim.map(s / "rows.jsonl", _fails, on_error="raise", cache_dir=d),  # type: ignore[arg-type]
    "map input": lambda s, d: brim.map(s / "rows.jsonl", _fails, input="polars", cache_dir=d),  # type: ignore[arg-type]
    "map num_proc": lambda s, d: brim.map(s / "rows.jsonl", _fails, num_proc=-1, cache_dir=d),
    "map writer_batch_size": lambda s, d: brim.map(s / "rows.jsonl", _fails, writer_batch_size=-1, cache_dir=d),
    "map memory": lambda s, d: brim.map(s / "rows.jsonl", _fails, memory="much", cache_dir=d),
    "map both": lambda s, d: brim.map(
        s / "rows.jsonl", _fails, load_from_cache_file=False, keep_done=True, cache_dir=d
    ),
    "push via": lambda s, d: brim.push_to_hub(None, "a/b", via="ftp"),  # type: ignore[arg-type]
    "push num_proc": lambda s, d: brim.push_to_hub(None, "a/b", num_proc=-1),
    "push num_shards": lambda s, d: brim.push_to_hub(None, "a/b", num_shards=-1),
    "push config_name": lambda s, d: brim.push_to_hub(None, "a/b", config_name="a b"),
    "clean older_than": lambda s, d: brim.clean(older_than="x"),  # type: ignore[arg-type]
    "watch lead": lambda s, d: brim.watch(lead=-1),
    "why pid": lambda s, d: brim.why("a.log"),  # type: ignore[arg-type]
    "shuffle seed": lambda s, d: brim.dataset(s / "shards").shuffle(seed="x"),  # type: ignore[arg-type]
    "limit of a selection": lambda s, d: brim.dataset(s / "shards").limit(-1),
    "forecast shape": lambda s, d: brim.forecast("guess"),  # type: ignore[arg-type]
    "forecast dtype": lambda s, d: brim.forecast("concat", rows=1, dims=1, dtype="float3"),
    "forecast copies": lambda s, d: brim.forecast("concat", rows=1, dims=1, copies=1),
    "forecast workers": lambda s, d: brim.forecast("map", row_bytes=1, workers=0),
    "watch alert": lambda s, d: brim.watch("1GB", alert="120%", log=d),
    "watch memory": lambda s, d: brim.watch("0", log=d),
    "why since": lambda s, d: brim.why(since="long ago"),
    "TensorWriter dtype": lambda s, d: brim.TensorWriter(d / "x.npy", 1, a=(1, "float3")),
    "TensorWriter rows": lambda s, d: brim.TensorWriter(d / "x.npy", -1, a=(1, "float32")),
    "TensorWriter checkpoint_rows": lambda s, d: brim.TensorWriter(d / "x.npy", 1, checkpoint_rows=0, a=(1, "int8")),
    "TensorWriter checkpoint_seconds": lambda s, d: brim.TensorWriter(
        d / "x.npy", 1, checkpoint_seconds=-1, a=(1, "int8")
    ),
    "TensorWriter format": lambda s, d: brim.TensorWriter(d / "x.zip", 1, a=(1, "int8")),
    "open_tensors framework": lambda s, d: brim.open_tensors(d / "x.npy", framework="jax"),  # type: ignore[arg-type]
    "save_file format": lambda s, d: brim.save_file({"a": [[1]]}, d / "x.zip"),
    "fresh": lambda s, d: brim.build(s / "files", d, fresh="no"),  # type: ignore[arg-type]
    "public": lambda s, d: brim.plan(s / "files", "hf://datasets/a/b", public="false"),  # type: ignore[arg-type]
    "stop": lambda s, d: brim.build(s / "files", d, stop=True),  # type: ignore[arg-type]
    "config": lambda s, d: brim.build(s / "files", d, config=None),  # type: ignore[arg-type]
    "shard_size of a kind": lambda s, d: brim.build(s / "files", d, shard_size=True),
    "memory of a kind": lambda s, d: brim.build(s / "files", d, memory=b"1GB"),  # type: ignore[arg-type]
    "no destination": lambda s, d: brim.build(s / "files", ""),
    "unpack to nothing": lambda s, d: brim.unpack(s / "shards", ""),
    "verify nothing": lambda s, d: brim.verify(""),
    "verify deep": lambda s, d: brim.verify(s / "shards", deep="no"),  # type: ignore[arg-type]
    "check anonymous": lambda s, d: brim.check(s / "files", anonymous="no"),  # type: ignore[arg-type]
    "clean remove": lambda s, d: brim.clean(remove="no", cache_dir=d),  # type: ignore[arg-type]
    "map with_indices": lambda s, d: brim.map(s / "rows.jsonl", _fails, with_indices="no", cache_dir=d),  # type: ignore[call-overload]
    "map workers": lambda s, d: brim.map(s / "rows.jsonl", _fails, workers="2", cache_dir=d),  # type: ignore[call-overload]
    "map from_split": lambda s, d: brim.map(s / "rows.jsonl", _fails, from_split="test", cache_dir=d),
    "tokenize shuffle": lambda s, d: brim.tokenize(
        s / "rows.jsonl", s / "tokenizer.json", destination=d, shuffle="x"  # type: ignore[call-overload]
    ),
    "unpack to": lambda s, d: brim.unpack(s / "files", "s3://b/p"),
}  # fmt: skip

JOB = ["--on-error raise", "--workers 0", "--memory lots", "--engine dask", "--address a:1", "--via ftp", "--public"]
JOB += ["--config x", "--direct", "--commit-message x", "--fresh --keep-done", "--input-format xml", "--text words"]
JOB += [
    "--from-split x",
    "--from-config x",
    "--delimiter ;",
    "--text document",
    "--delimiter ab",
    "--limit 0",
    "--unit-size 0",
    "--endpoint-url nowhere",
]
MAP = ["--input polars", "--format zip", "--rows-per-shard 0"]
TOKENIZE = ["--format zip", "--dtype int8", "--pack 1", "--pack-tail cut", "--pack-tail keep", "--split-into 3"]
TOKENIZE += ["--long-documents skip", "--long-chars 3", "--max-length 0", "--rows-per-shard 0", "--keep-done"]
EMBED = ["--device tpu", "--device cpu:x", "--dtype int8", "--pooling max", "--nan skip", "--empty skip"]
EMBED += ["--batch-size 0", "--max-tokens 0", "--keep-done", "--name x"]
READ = ["--oversize keep", "--rows scan", "--sidecars some", "--label-from child", "--limit 0", "--files f:scan"]
BUILD = ["--format zip", "--num-shards 0", "--rows-per-shard 0", "--shard-size 0", "--workers 0", "--memory lots"]
BUILD += ["--via ftp", "--public", "--direct", "--config x", "--commit-message x"]

COMMANDS = [
    *[
        f"build files DEST {arguments}"
        for arguments in [*READ, *BUILD, "--engine dask", "--fresh --update", "--part 1/2"]
    ],
    *[f"plan files DEST {args}" for args in [*READ, *BUILD]],
    *[f"check files {options}" for options in [*READ, "--sample-size -1", "--tolerance 3 --recipe arc"]],
    *[f"map rows.jsonl DEST --fn fails.py:fails {cli_arguments}" for cli_arguments in [*JOB, *MAP]],
    *[f"tokenize rows.jsonl DEST --tokenizer tokenizer.json {words}" for words in [*JOB, *TOKENIZE]],
    *[f"embed rows.jsonl DEST --column text --model model.py:make {words}" for words in [*JOB, *EMBED]],
    *[f"embed rows.jsonl DEST.npy --column text --model model.py:make {words}" for words in [*JOB, "--split test"]],
    "forecast concat --rows 1 --dims 1 --dtype float3",
    "forecast map --row-bytes 1 --workers 0",
    "run --alert 120% --log DEST -- true",
    "run --grace -1 --log DEST -- true",
    "run --fraction 2 --log DEST -- true",
    "watch 1 --stop-at x --log DEST",
    "why --since soon",
    "lab map --mode all",
]


def _fails(row: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("it was run")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder of files, a table and rows, and the code that computes them; all are valid inputs."""
    from tokenizers import Tokenizer, models

    home = tmp_path_factory.mktemp("source")
    (home / "files").mkdir()
    (home / "files" / "a.bin").write_bytes(b"a" * 100)
    (home / "t.csv").write_text("f\nfiles/a.bin\n")
    (home / "shards").mkdir()
    pq.write_table(pa.table({"f": [{"bytes": b"a", "path": "a"}]}), home / "shards" / "a.parquet")
    (home / "rows.jsonl").write_text(ROWS)
    (home / "fails.py").write_text("def fails(row):\n    raise ValueError('it was run')\n")
    (home / "model.py").write_text("def make(**options):\n    raise ValueError('it was run')\n")
    Tokenizer(models.WordLevel({"row": 0, "?": 1}, "?")).save(str(home / "tokenizer.json"))
    return home


@pytest.mark.parametrize("name", PYTHON)
def test_python_refuses_what_is_not_known(source: Path, tmp_path: Path, name: str) -> None:
    """An invalid value is an error that names no flag, and nothing is written."""
    dest = tmp_path / "dest"
    with pytest.raises(InputError) as caught:
        PYTHON[name](source, dest)
    assert "it was run" not in str(caught.value)
    assert "--" not in str(caught.value)
    assert not dest.exists()


_RUN = """
import contextlib, os, sys, tempfile
from brim.cli import main
home = os.getcwd()
for line in sys.stdin.read().splitlines():
    sys.argv = ["brim", *line.split()]
    out = tempfile.TemporaryFile("w+", encoding="utf-8")  # the command takes its descriptor
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main()
    except SystemExit as end:
        out.seek(0)
        said = out.read().replace("\\n", " ")
        print(end.code, os.path.lexists("DEST") or os.path.lexists("DEST.npy") or os.path.lexists(".DEST.npy.brim"), said)
"""  # noqa: E501  one process for all: a start takes longer than a refusal


def test_the_terminal_refuses_what_is_not_known(source: Path) -> None:
    """Every command with an invalid value exits with 2, runs nothing, and leaves nothing at DEST."""
    result = subprocess.run(
        [sys.executable, "-c", _RUN], input="\n".join(COMMANDS), cwd=source, capture_output=True, text=True, timeout=300
    )
    answers = result.stdout.splitlines()
    assert len(answers) == len(COMMANDS), result.stderr
    wrong = [
        f"{command}: {answer}"
        for command, answer in zip(COMMANDS, answers, strict=True)
        if not answer.startswith("2 False ") or "it was run" in answer or "bug" in answer
    ]
    assert not wrong, "\n".join(wrong)


def test_an_option_and_its_earlier_name_exclude_each_other(source: Path, tmp_path: Path) -> None:
    result = terminal("build", source / "files", tmp_path / "out", "--state", "a", "--state-dir", "b", check=2)
    assert "--state cannot be used with --state-dir" in result.stderr
    with pytest.raises(TypeError, match="got both 'state' and 'state_dir'"):
        brim.build(source / "files", tmp_path / "out", state="a", state_dir="b")  # type: ignore[call-arg]
    assert not (tmp_path / "out").exists()


def test_suggestions_name_no_deprecated_option_and_hints_can_be_copied(source: Path, tmp_path: Path) -> None:
    assert "Did you mean --state-dir?" in terminal("build", "a", "b", "--state-di", "c", check=2).stderr
    assert "--unique" not in terminal("select", "a", "b", "--uniq", "c", check=2).stderr
    assert "brim plan SOURCE DEST --save PLAN" in terminal("build", "a", "b", "--part", "1/2", check=2).stderr
    noted = terminal("build", source / "files", tmp_path / "out", "--shard-size", "1KB")
    assert "--shard-size 1KB is 1,000 bytes. Shards below" in noted.stderr


def test_other_names_of_commands_get_a_command_to_copy() -> None:
    for name, command in SYNONYMS.items():
        error_output = terminal(name, "a", "b", check=2).stderr
        assert f"Unknown command {name!r}." in error_output
        assert f"Try: {command}" in error_output


def test_refusal_names_only_the_option_that_was_typed(source: Path, tmp_path: Path) -> None:
    for option, second in (("--drop", "--split-by"), ("--split-by", "--drop")):
        error_output = terminal("build", source / "files", tmp_path / "out", option, "label", check=2).stderr
        assert f"{option} can only be used with a table" in error_output
        assert second not in error_output


def test_file_is_not_called_a_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "v.npy").write_bytes(b"x")
    for command in ("verify", "info"):
        assert "is a file, and a dataset is a folder" in terminal(command, tmp_path / "v.npy", check=2).stderr


def test_version_and_help_ignore_what_follows() -> None:
    assert terminal("--version", "extra").stdout == terminal("-V").stdout
    assert terminal("--help-all").stdout == terminal("help", "help").stdout == terminal().stdout
    assert terminal("help", "forecast").stdout == terminal("forecast", "--help").stdout

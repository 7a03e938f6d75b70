"""The modules that each command and its workers import, and those that they avoid, because every worker pays for
them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("tokenizers")
# Each of these adds 10 to 300 ms and up to 85 MB to a worker.
HEAVY = (
    "pandas",
    "datasets",
    "torch",
    "huggingface_hub",
    "click",
    "rich",
    "pydantic",
    "yaml",
    "polars",
    "awkward",
)
FINDING = (
    "brim.sources.folder_tree",
    "brim.sources.dataset_source",
    "brim.compute.rows.row_files",
    "brim.jobs",
    "brim.plans.plan",
)

_TOLD = """
import atexit, json, os, sys
if "brim.execution.worker" in " ".join(sys.orig_argv):
    out = open(os.environ["BRIM_TEST_MODULES"] + f".{os.getpid()}", "w")
    before = os._exit
    def tell(*code):
        if not out.closed:
            json.dump(sorted(sys.modules), out)
            out.close()
    def leave(code):
        tell()
        before(code)
    os._exit = leave
    atexit.register(tell)
"""


def worker_modules(tmp_path: Path, *arguments: str) -> list[set[str]]:
    """Return the modules of each worker of a real job, as loaded at its end."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "sitecustomize.py").write_text(_TOLD)
    paths = [str(home), str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "BRIM_TEST_MODULES": str(tmp_path / "modules")}
    result = subprocess.run([sys.executable, "-m", "brim", *arguments], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [set(json.loads(path.read_text())) for path in tmp_path.glob("modules.*")]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {number} of the text"}) + "\n" for number in range(200)))
    return path


def test_workers_of_tokenize(tmp_path: Path, source: Path) -> None:
    """Workers of tokenize load nothing of the command line, source discovery or the Hub, and no pandas even if
    installed."""
    from tests.generators.tokenizers import made_tokenizers

    created = made_tokenizers(tmp_path)
    for modules in worker_modules(
        tmp_path, "tokenize", str(source), str(tmp_path / "out"), "--tokenizer", str(created["bpe"])
    ):
        assert "brim.compute.steps.tokenize_step" in modules
        assert not [name for name in (*HEAVY, *FINDING) if name in modules]


def test_workers_of_map(tmp_path: Path, source: Path) -> None:
    """Workers of map load nothing of the command line, source discovery or other steps; pandas only if the function
    uses it."""
    (tmp_path / "own.py").write_text("def same(row):\n    return row\n")
    actual = worker_modules(tmp_path, "map", str(source), str(tmp_path / "out"), "--fn", "own:same")
    assert actual
    for modules in actual:
        assert "own" in modules
        other_items = ("brim.compute.steps.tokenize_step", "brim.compute.steps.embed_step")
        assert not [name for name in (*HEAVY, *FINDING, *other_items) if name in modules]


def test_workers_of_embed(tmp_path: Path, source: Path) -> None:
    """Workers of embed load nothing of the command line, source discovery or other steps, and only the requested
    model."""
    (tmp_path / "own.py").write_text(
        "import numpy\ndef model():\n    return lambda given: numpy.ones((len(given['text']), 4), numpy.float32)\n"
    )
    actual = worker_modules(
        tmp_path, "embed", str(source), str(tmp_path / "out.npy"), "--model", "own:model", "--column", "text"
    )
    assert actual
    for modules in actual:
        assert "own" in modules
        other_items = (
            "brim.compute.steps.tokenize_step",
            "brim.compute.steps.map_step",
            "transformers",
            "sentence_transformers",
            "PIL",
        )
        assert not [name for name in (*HEAVY, *FINDING, *other_items) if name in modules]


def test_a_worker_that_waits(tmp_path: Path) -> None:
    """A worker that is started before there is a job has loaded brim, Arrow and the step that it is for."""
    from brim.execution.worker_process import _MODULES, _STEP_MODULES

    for step in ("map_step", "tokenize_step", "embed_step"):
        name = f"brim.compute.steps.{step}"
        code = f"import sys, importlib\nfor name in {(*_MODULES, name, *_STEP_MODULES.get(name, ()))!r}:\n"
        code += "    importlib.import_module(name)\nprint(*sys.modules)"
        message = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
        modules = set(message.stdout.split())
        other_items = {f"brim.compute.steps.{second}" for second in ("map_step", "tokenize_step", "embed_step")} - {
            name
        }
        assert not [each for each in (*HEAVY, *FINDING, "asyncio", "gigatoken", *other_items) if each in modules]


def test_a_function_may_use_pandas(tmp_path: Path, source: Path) -> None:
    """pyarrow accepts pandas objects once the function imports pandas, although an earlier lookup failed."""
    pytest.importorskip("pandas")
    (tmp_path / "own.py").write_text(
        "def frame(rows):\n"
        "    import pandas, pyarrow\n"
        "    gap = pyarrow.array(pandas.Series([1.0, float('nan')]))\n"
        "    return pandas.DataFrame({'nulls': [gap.null_count] * len(rows['text'])})\n"
    )
    (modules,) = worker_modules(
        tmp_path, "map", str(source), str(tmp_path / "out"), "--fn", "own:frame", "--batched", "--workers", "1"
    )
    assert "pandas" in modules
    (created,) = (tmp_path / "out" / "data").iterdir()
    assert set(pq.read_table(created)["nulls"].to_pylist()) == {1}


def command_modules(*arguments: str) -> set[str]:
    """Return the modules of a command at its end."""
    code = (
        "import contextlib, io, json, os, sys\n"
        f"sys.argv = ['brim', *{list(arguments)}]\n"
        "from brim.cli import main\n"
        "with contextlib.suppress(SystemExit):\n    main()\n"
        "os.write(3, json.dumps(sorted(sys.modules)).encode())\n"
    )
    read, write = os.pipe()
    bound = f"import os; os.dup2({write}, 3)\n{code}"
    subprocess.run([sys.executable, "-c", bound], check=True, stdout=subprocess.DEVNULL, pass_fds=(write,))
    os.close(write)
    with open(read) as file:
        return set(json.load(file))


def test_a_small_build(tmp_path: Path) -> None:
    """A build of a folder of files loads no pages, recipes, BIDS or HTTP."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "one.bin").write_bytes(b"1")
    modules = command_modules("build", str(tmp_path / "files"), str(tmp_path / "out"), "--quiet", "--workers", "1")
    assert (tmp_path / "out" / "data").is_dir()
    pages = tuple(f"brim.monitor.report.{name}" for name in ("live_server", "page"))
    pages += ("http.client", "http.server", "xml.etree.ElementTree")
    other_items = (
        "brim.sources.recipe",
        "brim.sources.bids_recipe",
        "brim.sources.parquet_source",
        "brim.compute.rows.read_unit",
    )
    assert not [
        name for name in (*HEAVY, *pages, *other_items, "psutil") if name in modules and name not in ("click", "yaml")
    ]


def test_the_command_imports_only_its_verb() -> None:
    """The list of commands needs no parser; a command's help imports no unrelated command and nothing that runs it."""
    from brim.cli.commands import COMMANDS

    names = [name for name in COMMANDS if name != "help"]
    with ThreadPoolExecutor(2) as pool:
        bare, *actual = pool.map(
            lambda arguments: command_modules(*arguments), [["--help"], *([name, "--help"] for name in names)]
        )
    assert not {"rich", "pydantic", "click", "numpy", "pyarrow"} & bare
    other_items = {
        "build": {"plan"},
        "select": {"plan"},
        "watch": {"run"},
        **{key: {"compute"} for key in ("map", "tokenize", "embed")},
    }
    running = ("brim.jobs", "brim.compute.rows", "brim.execution.worker", "numpy", "pyarrow", "psutil", "tokenizers")
    for name, modules in zip(names, actual, strict=True):
        assert not [heavy for heavy in (*HEAVY, *running) if heavy in modules and heavy != "click"]
        commands = {module for module in modules if module.startswith("brim.cli.") and module.endswith("_command")}
        assert commands == {f"brim.cli.{each}_command" for each in {name} | other_items.get(name, set())}


@pytest.mark.parametrize(
    "arguments", ["select nothing out", "build nothing out", "verify nothing", "unpack nothing out"]
)
def test_numpy_is_loaded_before_the_parser(arguments: str, tmp_path: Path) -> None:
    """NumPy is imported before the parser: from deeper in the stack, calls during its import would each allocate a
    block."""
    command = [sys.executable, "-X", "importtime", "-m", "brim", *arguments.split()]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    loaded = [line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time")]
    assert loaded.index("numpy") < loaded.index("click")


def test_verbs_that_look_at_a_dataset(tmp_path: Path) -> None:
    """Commands that inspect a dataset load nothing of the Hub, HTTP or models, each of which takes at least 0.1 s."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "one.txt").write_bytes(b"1")
    source, out = str(tmp_path / "files"), str(tmp_path / "out")
    assert "brim.jobs.build_job" in command_modules("build", source, out, "--workers", "1")
    lines = [
        ["plan", source],
        ["info", out],
        ["check", source],
        ["verify", out],
        ["unpack", out, str(tmp_path / "back")],
    ]
    with ThreadPoolExecutor(2) as pool:
        for line, modules in zip(lines, pool.map(lambda line: command_modules(*line), lines), strict=True):
            usual = ("click", "yaml", "rich")
            assert line[0] in " ".join(name for name in modules if name.startswith("brim.cli."))
            assert not [
                n for n in (*HEAVY, "http.client", "ray", "duckdb", "obstore") if n in modules and n not in usual
            ]
    assert (tmp_path / "back" / "one.txt").read_bytes() == b"1"

"""Compare the time of small jobs with `python -c "import pyarrow"` in the same round: `make bench-start`.

    python benchmarks/start.py [--repeats 5] [--json FILE]

Whole processes take turns, and the minimum of all rounds counts, which excludes most other load on the machine. CPU is
user and system time with children. `brim.map` is called twice in one process, which times the second call itself.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peak import as_installed
from tables import Part, at_most, machine, print_goals, print_machine, print_part, progress, write_json

_MAP = """
import sys, time, datasets, brim
datasets.disable_progress_bars()
rows = datasets.Dataset.from_dict({"n": list(range(25))})
for call in (1, 2):
    begin = time.monotonic()
    brim.map(rows, lambda row: {"m": row["n"] + 1}, cache_dir=sys.argv[1] + str(call), memory="1GB")
    print(time.monotonic() - begin, flush=True)
"""
GOALS_S = {"brim --help": 0.12, "brim build, 12 files": 0.35, "brim tokenize, 3,000 documents": 1.2}
MAP_GOALS_S = {"brim.map, 25 rows": 0.45, "brim.map, the next time": 0.08}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runs: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        prepare(home)
        for _ in range(arguments.repeats):
            for name, command in commands(home).items():
                shutil.rmtree(home / "out", ignore_errors=True)
                seconds, cpu, output = run_once(command)
                runs.setdefault(name, []).append((seconds, cpu))
                progress(f"{name}: {seconds:.2f} s, {cpu:.2f} CPU-s")
                if name == "python, two calls of brim.map":
                    first, second = (float(line) for line in output.split()[-2:])
                    runs.setdefault("brim.map, 25 rows", []).append((first, 0))
                    runs.setdefault("brim.map, the next time", []).append((second, 0))
                    shutil.rmtree(home / "cache1", ignore_errors=True)
                    shutil.rmtree(home / "cache2", ignore_errors=True)
    part = Part("small jobs", ("what", "least s", "least CPU-s", "times import pyarrow"))
    base = min(seconds for seconds, _ in runs["import pyarrow"])
    for name, each in runs.items():
        least, cpu = min(seconds for seconds, _ in each), min(cpu for _, cpu in each)
        part.rows.append((name, f"{least:.3f}", f"{cpu:.3f}" if cpu else "", f"{least / base:.1f}×"))
        goal = (GOALS_S | MAP_GOALS_S).get(name)
        if goal is not None:
            part.goals.append(at_most(name, least, goal, " s"))
    part.runs = {name: [{"seconds": s, "cpu_s": c} for s, c in each] for name, each in runs.items()}
    print_part(part)
    print_goals({"start": part})
    facts = machine(Path(tempfile.gettempdir()), ("tokenizers", "pyarrow"))
    print_machine(facts)
    write_json(arguments.json, facts, {"start": part})


def prepare(home: Path) -> None:
    from tokens_texts import read_texts, write_bpe, write_texts

    (home / "files").mkdir()
    for number in range(12):
        (home / "files" / f"{number}.bin").write_bytes(os.urandom(2000))
    write_texts(home / "texts.jsonl", 3000)
    write_bpe(home / "bpe.json", read_texts(home / "texts.jsonl"))
    (home / "map.py").write_text(_MAP)


def commands(home: Path) -> dict[str, list[str]]:
    brim = [sys.executable, "-m", "brim"]
    tokenize = [*brim, "tokenize", str(home / "texts.jsonl"), str(home / "out"), "--tokenizer", str(home / "bpe.json")]
    created = {
        "import pyarrow": [sys.executable, "-c", "import pyarrow"],
        "brim --help": [*brim, "--help"],
        "brim build, 12 files": [*brim, "build", str(home / "files"), str(home / "out"), "--quiet"],
        "brim tokenize, 3,000 documents": [*tokenize, "--quiet"],
    }
    try:
        import datasets  # noqa: F401
    except ImportError:
        progress("datasets is not installed: brim.map is left out")
        return created
    return created | {"python, two calls of brim.map": [sys.executable, str(home / "map.py"), str(home / "cache")]}


def run_once(command: list[str]) -> tuple[float, float, str]:
    with tempfile.TemporaryFile("w+") as message:
        started_at = time.monotonic()
        process = subprocess.Popen(
            command, stdout=message, stderr=message, stdin=subprocess.DEVNULL, env=as_installed(os.environ)
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - started_at
        process.returncode = os.waitstatus_to_exitcode(status)
        message.seek(0)
        text = message.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{text[-2000:]}")
    return seconds, used.ru_utime + used.ru_stime, text


if __name__ == "__main__":
    main()

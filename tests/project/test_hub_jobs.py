"""examples/hub-jobs: a saved plan in parts, each as a Job on the Hub.

The real client `hf jobs run` checks the command with --dry-run. The job's command then runs on this machine, because
no server for Jobs can be installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import random_bytes, write_files
from tests.forked import brim
from tests.hub import TestHub
from tests.publishing import Machine

SCRIPT = Path(__file__).parents[2] / "examples/hub-jobs/brim-jobs.sh"
HF = """#!{python}
import subprocess, sys
words = sys.argv[1:]
if words[:2] == ["jobs", "run"]:
    options = [word for word in words if word != "--quiet"]
    with open("{folder}/checked", "a") as file:
        subprocess.run(["{folder}/hf", *options[:2], "--dry-run", *options[2:]], stdout=file, check=True)
    subprocess.run([*words[words.index("brim") :], "--quiet"], check=True)
    print("job", len(open("{folder}/checked").read()))
"""


def test_missing_parts_run_as_jobs_and_the_dataset_is_published(tmp_path: Path) -> None:
    source = write_files(tmp_path / "source", {f"f{i:02d}.bin": random_bytes(1000, i) for i in range(6)})
    (tmp_path / "bin").mkdir()
    (tmp_path / "hf").symlink_to(Path(sys.executable).parent / "hf")
    programs = {
        "hf": HF.replace("{python}", sys.executable).replace("{folder}", str(tmp_path)),
        "brim": f'#!/bin/sh\nexec {sys.executable} -m brim "$@"\n',
    }
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    with TestHub(tmp_path / "hub") as hub:
        environment = Machine(hub, tmp_path / "machine").environment
        environment |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "IMAGE": "registry.example/brim:1"}
        plan = str(tmp_path / "a.plan")
        brim("plan", source, "hf://datasets/ada/data", "--rows-per-shard", "1", "--save", plan, env=environment)
        brim("build", "--plan", plan, "--part", "2/3", env=environment)
        command = ["bash", str(SCRIPT), plan, "3"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "parts 1,3 of 3: 2 jobs" in result.stdout
        checked = (tmp_path / "checked").read_text()
        assert [part for part in ("1/3", "2/3", "3/3") if f"--part {part}" in checked] == ["1/3", "3/3"]
        assert "secrets   HF_TOKEN=***" in checked
        assert len([name for name in hub.files("ada/data") if name.endswith(".parquet")]) == 6

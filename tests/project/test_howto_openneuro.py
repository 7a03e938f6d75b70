"""docs/how-to/openneuro-to-the-hub.md, run as written on a copy of the dataset's tree with tiny files."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.generators.arc import make_arc
from tests.hub import TestHub
from tests.publishing import Machine

PAGE = Path(__file__).parents[2] / "docs/how-to/openneuro-to-the-hub.md"


def commands() -> list[str]:
    blocks = PAGE.read_text().split("```console\n")[1:]
    lines = [line for block in blocks for line in block.split("```")[0].splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


@pytest.mark.slow
def test_every_command_runs_as_written(tmp_path: Path) -> None:
    """Every command of the page succeeds in order, and the published dataset meets the expectations of the recipe."""
    machine_folder = tmp_path / "machine"
    make_arc(machine_folder / "ds004884", 902)
    actual = commands()
    assert len(actual) == 9
    messages = {}
    with TestHub(tmp_path / "hub", tokens={"hf_write": {"user": "me", "can_write": True}}) as hub:
        machine = Machine(hub, machine_folder)
        for command in actual:
            arguments = shlex.split(command)
            assert arguments[0] == "brim"
            result = subprocess.run(
                [sys.executable, "-m", *arguments], cwd=machine_folder, env=machine.environment,
                capture_output=True, text=True, timeout=240, check=False,
            )  # fmt: skip
            assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-2000:]}"
            messages[command] = result.stdout
    published = messages["brim check hf://datasets/me/arc --recipe arc"]
    assert "files in dwi" in published
    assert "FAIL" not in published
    assert "902" in messages["brim info hf://datasets/me/arc"]
    assert "dwi: list of nifti, 613 rows, 2,089 files" in messages["brim plan ds004884/ --recipe arc"]


def test_the_plan_of_the_trap_is_made_from_the_tree(tmp_path: Path) -> None:
    """The plan in docs/concepts/why-uploads-fail.md is the output of brim plan for that tree, except for memory."""
    make_arc(tmp_path / "ds004884", 902, sparse_sizes=True)
    command = [sys.executable, "-m", "brim", "plan", "ds004884/", "--recipe", "arc"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True)
    page = (PAGE.parents[1] / "concepts/why-uploads-fail.md").read_text()
    shown = page.split("$ brim plan ds004884/ --recipe arc\n")[1].split("```")[0]
    local = [line for line in result.stdout.splitlines() if not line.strip().startswith("memory")]
    assert [line for line in shown.splitlines() if not line.strip().startswith("memory")] == local

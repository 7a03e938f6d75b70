"""README.md and docs/ are true: every block of code is run, or says why it is not.

Every block of a page is run, in order. A comment `<!-- not run: REASON -->` before a block, or below the title for the
whole page, excludes it; the reason names the test that runs it elsewhere. Commands and options of excluded blocks must
still exist, and their Python must compile.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from tests.hub.server import TestHub
from tests.publishing import Machine

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parents[2]
# Written by docs/make/reference.py from the declared options, the changelog and the decisions.
GENERATED = {
    "docs/contributing/decisions.md",
    "docs/reference/changelog.md",
    "docs/reference/commands.md",
    "docs/reference/python.md",
}
BLOCK = re.compile(
    r"(?:<!--\s*not run: (?P<reason>[^>]+?)\s*-->\s*)?^```(?P<kind>[a-z]*)[^\n]*\n(?P<text>.*?)^```", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    kind: str
    text: str
    reason: str

    @property
    def commands(self) -> list[str]:
        """What is typed in it, with lines that go on joined. A block of sh on a page that is run is nothing else."""
        joined = self.text.replace("\\\n", " ").splitlines()
        if self.kind == "sh" and not reason_not_run(self.page):
            return [line for line in joined if line.strip()]
        return [line[2:] for line in joined if self.kind == "console" and line.startswith("$ ")]


def reason_not_run(page: str) -> str:
    """Return why no block of this page is run: a comment below its title. Empty if blocks are run."""
    comment = re.match(r"# .*\n\s*<!--\s*not run: (.+?)\s*-->", (ROOT / page).read_text())
    return comment[1] if comment else ""


def blocks_of(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("kind")) + 1
        yield Block(page, line, found["kind"], found["text"], found["reason"] or "")


def pages() -> list[str]:
    written = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    return ["README.md", *sorted(set(written) - GENERATED)]


@pytest.fixture(scope="module")
def group() -> Any:
    from brim.cli.commands import COMMANDS
    from brim.cli.parser import BrimGroup

    made = BrimGroup("brim")
    context = click.Context(made)
    return click.Group("brim", commands={name: made.get_command(context, name) for name in COMMANDS})  # type: ignore[misc]


@pytest.mark.parametrize("page", [page for page in pages() if reason_not_run(page)])
def test_reasons_for_pages_not_run_name_existing_files(page: str) -> None:
    """A test file or script that the reason names exists."""
    named = re.findall(r"[\w/]+\.py", reason_not_run(page))
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", pages())
def test_extras_are_named_as_they_can_be_installed(page: str) -> None:
    """From this folder: an index may have another project of this name."""
    assert re.findall(r"brim\[[a-z0-9,]+\]", (ROOT / page).read_text()) == []


@pytest.mark.parametrize("page", pages())
def test_commands_and_python_are_what_brim_has(page: str, group: Any) -> None:
    """Every verb and option that is shown exists, and Python compiles."""
    for block in blocks_of(page):
        where = f"{page}:{block.line}"
        if block.kind == "python":
            lines = block.text.splitlines()
            typed = [line[4:] for line in lines if line.startswith((">>> ", "... "))]
            compile("\n".join(typed or lines), where, "exec")
        for command in block.commands:
            check_command(command, group, where)


def check_command(command: str, group: Any, where: str) -> None:
    words = shlex.split(command, comments=True)
    if (
        "brim" not in words
        or any(word in words for word in ("|", "&&", "|| true"))
        or words[0] not in ("brim", "until")
    ):
        return
    words = words[words.index("brim") + 1 :]
    if ";" in "".join(words):
        words = [word.rstrip(";") for word in words[: next(n for n, word in enumerate(words) if ";" in word) + 1]]
    node = group
    while words and hasattr(node, "commands") and words[0] in node.commands:
        node, words = node.commands[words[0]], words[1:]
    known = {name for parameter in node.params for name in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"-h", "--help", "--help-all", "--debug", "--install-completion", "--show-completion"}
    asked = words[: words.index("--")] if "--" in words else words
    unknown = [word for word in asked if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]
    assert not unknown, f"{where}: {command}: {unknown}"


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A copy of examples/sample, as README.md and docs/tutorials/twenty-tasks.md tell to make one, and a Hub."""
    here = tmp_path_factory.mktemp("fresh")
    with TestHub(here / "hub") as hub:
        machine = Machine(hub, here / "machine")
        work = here / "work"
        shutil.copytree(ROOT / "examples/sample", work)
        yield machine


def typed(place: Machine, command: str) -> subprocess.CompletedProcess[str]:
    """Run a line as a shell would, with this Python and this brim."""
    words = shlex.split(command, comments=True)
    if words[0] == "brim":
        words = [sys.executable, "-m", *words]
    words = [sys.executable if word == "python" else word for word in words]
    work = place.folder.parent / "work"
    return subprocess.run(words, cwd=work, env=place.environment, capture_output=True, text=True, timeout=300)


def tasks() -> list[tuple[str, str, str]]:
    page = (ROOT / "docs/tutorials/twenty-tasks.md").read_text()
    rows = re.findall(r"^\| +(\d+) \| (.+?) \| `(.+?)` \| `(.+?)` \|$", page, re.M)
    return [(task, command, says) for _, task, command, says in rows]


def test_a_fresh_user(place: Machine) -> None:
    """Twenty tasks, in their order, each as the page says."""
    went = []
    for task, command, says in tasks():
        done = typed(place, command)
        well = done.returncode == 0 and re.sub(r"\s+", " ", says) in re.sub(r"\s+", " ", done.stdout + done.stderr)
        went.append((task, well, "" if well else f"{command}\n{done.returncode}\n{done.stdout}\n{done.stderr}"))
    assert len(went) == 20
    assert not [told for told in went if not told[1]]


@pytest.mark.parametrize("page", [page for page in pages() if not reason_not_run(page)])
def test_pages_run(page: str, place: Machine) -> None:
    """Blocks of a page, from the first to the last; a Python block is one program."""
    for block in blocks_of(page):
        if block.reason:
            continue
        where = f"{page}:{block.line}"
        if block.kind == "python":
            done = typed(place, shlex.join(["python", "-c", block.text]))
            assert done.returncode == 0, f"{where}\n{done.stdout}\n{done.stderr}"
        for command in block.commands:
            done = typed(place, command)
            assert done.returncode == 0, f"{where}: {command}\n{done.stdout}\n{done.stderr}"


NOT_RUN = {
    "embed": "needs torch; make test-embed",
    "run": "names a program of the reader's",
    "why": "reads the kernel log of the machine",
}


def test_commands_of_the_readme_table_run(place: Machine, group: Any) -> None:
    """The table "I want to … / type …" works from top to bottom, after the blocks above it."""
    commands = re.findall(r"^\| .+ \| `(brim .+)` \|$", (ROOT / "README.md").read_text(), re.M)
    assert len(commands) >= 9
    assert typed(place, "brim build photos out --label-from parent").returncode == 0
    for command in commands:
        check_command(command, group, "README.md")
        if command.split()[1] not in NOT_RUN and "s3://" not in command:
            done = typed(place, command)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_figures_are_what_was_measured() -> None:
    """docs/benchmarks/results.md and the table of README.md are made of benchmarks/results, and not by hand."""
    done = subprocess.run([sys.executable, "benchmarks/page.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_benchmark_writes_its_tables() -> None:
    """What prints tables takes --json, and writes them so that they land on the page."""
    texts = {path.name: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    printing = {name for name, text in texts.items() if "print_part(" in text and name != "tables.py"}
    written = {
        name
        for name in printing
        if '"--json"' in texts[name] and re.search("write_json\\(|asdict\\(part\\)", texts[name])
    }
    assert printing >= {"arc.py", "embed.py", "map.py", "package.py", "start.py", "tokens.py"}
    assert written == printing

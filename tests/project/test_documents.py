"""The code blocks of README.md and docs/ run with the output that they show, or state why they are not run.

tests/documents.py runs pages and explains their comments. Commands and options of blocks that are not run must still
exist, and their Python must compile.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from tests.documents import ROOT, blocks_of, check_page, pages, reader, reason_not_run

pytestmark = pytest.mark.docs
RUN = [page for page in pages() if not reason_not_run(page) and any(blocks_of(page))]
CHEAT_SHEET = "docs/tutorials/twenty-tasks.md"


@pytest.fixture(scope="module")
def group() -> Any:
    from brim.cli.commands import COMMANDS
    from brim.cli.parser import BrimGroup

    created = BrimGroup("brim")
    context = click.Context(created)
    return click.Group("brim", commands={name: created.get_command(context, name) for name in COMMANDS})  # type: ignore[misc]


def all_reasons() -> list[tuple[str, str]]:
    pairs = [(page, reason_not_run(page)) for page in pages()]
    pairs += [(f"{page}:{block.line}", block.reason) for page in pages() for block in blocks_of(page)]
    return [(position, reason) for position, reason in pairs if reason]


@pytest.mark.parametrize(("where", "reason"), all_reasons())
def test_reasons_for_blocks_not_run_name_existing_files(where: str, reason: str) -> None:
    """The test file or script in a reason exists."""
    assert not [name for name in re.findall(r"[\w/]+\.py", reason) if not (ROOT / name).exists()], where


@pytest.mark.parametrize("page", pages())
def test_extras_are_named_as_they_can_be_installed(page: str) -> None:
    """Pages install extras from a checkout, because a package index may have another project named brim."""
    assert re.findall(r"brim\[[a-z0-9,]+\]", (ROOT / page).read_text()) == []


@pytest.mark.parametrize("page", [*pages(), *(str(path.relative_to(ROOT)) for path in ROOT.glob("adr/*.md"))])
def test_links_to_files_exist(page: str) -> None:
    """Links of README.md and of pages to repository files lead to existing files, as on a code host."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)|(?:src|srcset)=\"([^\"]+)\"", (ROOT / page).read_text())
    local = [link for pair in links for link in pair if link and not re.match(r"[a-z]+:", link)]
    generated = set(re.findall(r"^docs/.*\.md$", (ROOT / ".gitignore").read_text(), re.M))
    missing = [link for link in local if not (ROOT / page).parent.joinpath(link).exists()]
    resolved = {(ROOT / page).parent.joinpath(link).resolve().relative_to(ROOT).as_posix() for link in missing}
    assert not resolved - generated


@pytest.mark.parametrize("page", pages())
def test_commands_and_python_exist(page: str, group: Any) -> None:
    """Every command and option on the pages exists, and the Python code compiles."""
    for block in blocks_of(page):
        location = f"{page}:{block.line}"
        if block.kind == "python":
            lines = block.text.splitlines()
            typed = [line[4:] for line in lines if line.startswith((">>> ", "... "))]
            compile("\n".join(typed or lines), location, "exec")
        for command, _ in block.commands if block.kind != "setup" else ():
            for part in re.split(r"&&|\||;", command.replace("\\\n", " ")):
                check_command(part, group, location)


def check_command(command: str, group: Any, where: str) -> None:
    try:
        arguments = shlex.split(command, comments=True)
    except ValueError:  # a quote that an earlier split cut in two
        return
    if "brim" not in arguments[:2]:
        return
    node, arguments = group, arguments[arguments.index("brim") + 1 :]
    while arguments and hasattr(node, "commands") and arguments[0] in node.commands:
        node, arguments = node.commands[arguments[0]], arguments[1:]
    known_values = {name for parameter in node.params for name in (*parameter.opts, *parameter.secondary_opts)}
    known_values |= {"-h", "--help", "--help-all", "--debug", "--version", "--install-completion", "--show-completion"}
    inputs = arguments[: arguments.index("--")] if "--" in arguments else arguments
    unknown = [
        argument
        for argument in inputs
        if re.match(r"--[a-z]|-[a-z]$", argument) and argument.partition("=")[0] not in known_values
    ]
    assert not unknown, f"{where}: {command}: {unknown}"


@pytest.mark.parametrize("page", RUN)
def test_pages_run(page: str, tmp_path: Path) -> None:
    """The blocks of a page run in order and print the output on the page."""
    assert check_page(page, tmp_path) == []


def test_twenty_tasks(tmp_path: Path) -> None:
    """The tasks of the cheat sheet run in order and print the output in the table."""
    rows = re.findall(r"^\| +(\d+) \| (.+?) \| `(.+?)` \| `(.+?)` \|$", (ROOT / CHEAT_SHEET).read_text(), re.M)
    assert len(rows) == 20
    wrong = []
    with reader(tmp_path, CHEAT_SHEET) as shell:
        for _, task, command, output in rows:
            result = shell.run(command)
            if result.exit_code or re.sub(r"\s+", " ", output) not in re.sub(r"\s+", " ", result.output):
                wrong.append(f"{task}: {command}\n{result.exit_code}\n{result.output}")
    assert not wrong


# Rows of the README's table that cannot run in this test, and the reasons.
NOT_RUN = {
    "embed": "needs torch; make test-embed",
    "run": "names a program of the reader's",
    "why": "reads the kernel log of the machine",
}


def test_commands_of_the_readme_table_run(tmp_path: Path, group: Any) -> None:
    """The commands of the table "I want to … / type …" run in order, after the blocks above it."""
    commands = re.findall(r"^\| .+ \| `(brim .+)` \|$", (ROOT / "README.md").read_text(), re.M)
    assert len(commands) >= 9
    with reader(tmp_path, "README.md") as shell:
        assert shell.run("brim build photos out --label-from parent").exit_code == 0
        for command in commands:
            check_command(command, group, "README.md")
            if command.split()[1] not in NOT_RUN:
                result = shell.run(command)
                assert result.exit_code == 0, f"{command}\n{result.output}"


def test_figures_are_what_was_measured() -> None:
    """docs/benchmarks/results.md and the table of README.md are generated from benchmarks/results."""
    result = subprocess.run([sys.executable, "benchmarks/page.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_benchmark_writes_its_tables() -> None:
    """A benchmark that prints tables accepts --json, so that its results can appear on the page."""
    texts = {path.name: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    printing = {name for name, text in texts.items() if "print_part(" in text and name != "tables.py"}
    written = {
        name
        for name in printing
        if '"--json"' in texts[name] and re.search("write_json\\(|asdict\\(part\\)", texts[name])
    }
    assert printing >= {"arc.py", "embed.py", "map.py", "package.py", "start.py", "tokens.py"}
    assert written == printing

"""Run the code blocks of documentation pages as a reader would, and compare their output.

    python -m tests.documents docs/how-to/package-files.md           # print the output of every command that shows some
    python -m tests.documents docs/how-to/package-files.md --write   # write the actual output into the page

The blocks of a page run in order in one folder: a copy of examples/sample, with a local Hub whose user is `me`, and an
S3 server with the bucket `my-bucket` if the page needs one.

    console                  each `$ command` runs in one bash session; each line below it must be in its output
    sh                       a line is a command; no output is compared
    bash                     a script
    python                   one program; `print(…)  # text` must print the text
    any with title="FILE"    the block is written to FILE instead of being run

Sizes, durations, rates and percentages in an output may differ, and `…` stands for any text. Comments of a page that no
reader sees: `<!-- not run: REASON -->` below the title or before a block, `<!-- setup: COMMANDS -->`, and
`<!-- exit: CODE -->` before a block whose last command is expected to fail.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.hub import TestHub
from tests.publishing import Machine
from tests.s3 import S3Server

ROOT = Path(__file__).parents[1]
BUCKET = "my-bucket"
TIMEOUT_S = 300
BLOCK = re.compile(
    r"<!--\s*setup:\s*\n(?P<setup>.*?)-->"
    r"|(?:<!--\s*not run: (?P<reason>[^>]+?)\s*-->\s*|<!--\s*exit: (?P<exit>\d+)\s*-->\s*)?"
    r"^(?P<indent> *)```(?P<kind>[a-z]*)(?P<attributes>[^\n]*)\n(?P<text>.*?)^ *```",
    re.M | re.S,
)
VARYING = re.compile(
    r"(?<![\w.])\d[\d,.]*(?: to \d[\d,.]*)? ?(?:[kKMGT]i?B|B|ms|s|min|%)(?![\w])"
    r"|\d[\d,.]* (?:workers?|\w* ?(?:a|per) (?:second|minute))|\b[0-9a-f]{12,}\b"
    r"|(?<=bytes\": )\d+|\b\d+\.\d+\.\d+\b|\bpid \d+|:\d{4,5}\b|\d+-\d\d-\d\d[ T][\d:.]+"
)


@dataclass(frozen=True)
class Block:
    """A block of code of a page, or the hidden commands of a setup comment."""

    page: str
    line: int
    kind: str
    text: str
    title: str = ""
    reason: str = ""  # why it is not run
    exit_code: int = 0

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """Each command with the lines of output that are shown below it."""
        if self.kind == "setup":
            return [(self.text, [])]
        if self.kind == "bash":
            return [(f"(\n{self.text})", [])]
        if self.kind == "sh":
            return [(line, []) for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]
        actual: list[tuple[str, list[str]]] = []
        continued = False
        for line in self.text.splitlines() if self.kind == "console" else ():
            if continued:
                actual[-1] = (f"{actual[-1][0]}\n{line}", [])
            elif line.startswith("$ "):
                actual.append((line[2:], []))
            elif actual:
                actual[-1][1].append(line)
            continued = line.endswith("\\") and (continued or line.startswith("$ "))
        return actual


def pages() -> list[str]:
    """Return every page that is written by hand. Pages that docs/make generates come from data that other tests
    check."""
    ignored = {line for line in (ROOT / ".gitignore").read_text().splitlines() if line.startswith("docs/")}
    written = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    return ["README.md", "CONTRIBUTING.md", *sorted(written - ignored)]


def reason_not_run(page: str) -> str:
    """Return the reason why no block of this page runs, from the comment below its title; empty if blocks run."""
    comment = re.match(r"# .*\n\s*<!--\s*not run: (.+?)\s*-->", (ROOT / page).read_text())
    return comment[1] if comment else ""


def blocks_of(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("setup" if match["setup"] else "kind")) + 1
        if match["setup"]:
            yield Block(page, line, "setup", match["setup"])
            continue
        title = re.search(r'title="([^"]+)"', match["attributes"])
        content = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.M)
        yield Block(
            page,
            line,
            match["kind"],
            content,
            title[1] if title else "",
            match["reason"] or "",
            int(match["exit"] or 0),
        )


@dataclass(frozen=True)
class Done:
    command: str
    exit_code: int
    output: str


class Shell:
    """One bash session in a folder. `cd`, variables and background jobs persist between commands."""

    # Commands come through descriptor 3, so that programs cannot read them from stdin.
    LOOP = "while IFS= read -r -d '' -u 3 command; do eval \"$command\" </dev/null 3<&-; printf '\\n\\0%d\\0' $?; done"

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder  # left out of the output: paths in it are absolute
        read_end, self._commands = os.pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec 3<&{read_end}; {self.LOOP}"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(read_end,),
        )
        os.close(read_end)

    def run(self, command: str) -> Done:
        os.write(self._commands, command.encode() + b"\0")
        assert self._process.stdout is not None
        output, until = b"", time.monotonic() + TIMEOUT_S
        while not (ended := re.search(rb"\n\0(\d+)\0$", output)):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0, until - time.monotonic()))
            data = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not data:
                self._process.kill()
                raise AssertionError(f"{command}\nended the shell, or did not end\n{output.decode(errors='replace')}")
            output += data
        text = output[: ended.start()].decode(errors="replace")
        return Done(command, int(ended[1]), text.replace(f"{self._folder}/", ""))

    def close(self) -> None:
        os.close(self._commands)
        self._process.wait(60)


@contextlib.contextmanager
def reader(folder: Path, page: str) -> Iterator[Shell]:
    """A shell as a reader of the page has it: the sample data, `brim`, `python`, a Hub and a bucket."""
    with contextlib.ExitStack() as stack:
        text = (ROOT / page).read_text()
        tokens = {"hf_write": {"user": "me", "can_write": True}}
        xet = "hf://buckets/" in text  # storage buckets of the Hub have no LFS
        hub = stack.enter_context(TestHub(folder / "hub", tokens=tokens, xet=xet))
        environment = Machine(hub, folder / "machine").environment | ({"HF_HUB_DISABLE_XET": "0"} if xet else {})
        if f"s3://{BUCKET}" in text:
            server = stack.enter_context(S3Server(folder / "s3"))
            server.create_bucket(BUCKET)
            environment |= server.environment
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        environment["PYTHONPATH"] = str(ROOT)  # hidden setup commands use tests.generators
        environment["COLUMNS"] = "140"
        work = folder / "work"
        shutil.copytree(ROOT / "examples/sample", work)
        shell = Shell(work, environment)
        stack.callback(shell.close)
        yield shell


def plain(line: str) -> str:
    """Return a line without surrounding spaces and without the numbers that differ from run to run."""
    return re.sub(r"\s+", " ", re.sub("[▁-█]+", "▁", VARYING.sub("#", line))).strip()


def missing_lines(shown: list[str], output: str) -> list[str]:
    """Return the shown lines that the output does not contain."""
    actual = [plain(line) for line in output.splitlines()]
    patterns = [".*".join(re.escape(part) for part in re.split(r"…|\.\.\.", plain(line))) for line in shown]
    return [
        line
        for line, pattern in zip(shown, patterns, strict=True)
        if line.strip() and not any(re.fullmatch(pattern, text) for text in actual)
    ]


def run_block(block: Block, shell: Shell) -> Iterator[tuple[Done, list[str], int]]:
    """Run a block and yield each finished command, the lines shown below it, and the expected exit code."""
    if block.reason:
        return
    if block.title:
        shell.run(f"mkdir -p {shlex.quote(os.path.dirname(block.title) or '.')}")
        result = shell.run(f"cat > {shlex.quote(block.title)} <<'END OF FILE'\n{block.text}END OF FILE")
        yield result, [], 0
    elif block.kind == "python":
        shell.run(f"cat > .block.py <<'END OF FILE'\n{block.text}END OF FILE")
        shown = re.findall(r"^print\(.*\)  # (.+)$", block.text, re.M)
        yield shell.run("python .block.py"), shown, block.exit_code
    else:
        commands = block.commands
        for number, (command, shown) in enumerate(commands):
            last = number == len(commands) - 1
            yield shell.run(command), shown, block.exit_code if last else 0


def check_page(page: str, folder: Path) -> list[str]:
    """Run a page and return the differences between its output and the shown output."""
    wrong = []
    with reader(folder, page) as shell:
        for block in blocks_of(page):
            for completed, shown, exit_code in run_block(block, shell):
                location = f"{page}:{block.line}: {completed.command}\n{completed.output}"
                if completed.exit_code != exit_code:
                    wrong.append(f"{location}\nexit code {completed.exit_code} instead of {exit_code}")
                elif missing := missing_lines(shown, completed.output):
                    wrong.append(f"{location}\ndoes not print:\n" + "\n".join(missing))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the code blocks of pages and print their output.")
    parser.add_argument("pages", nargs="+")
    parser.add_argument("--write", action="store_true", help="write the actual output into the page")
    arguments = parser.parse_args()
    failed = 0
    for page in arguments.pages:
        with tempfile.TemporaryDirectory(prefix="brim-page-") as folder, reader(Path(folder), page) as shell:
            text = (ROOT / page).read_text()
            for block in blocks_of(page):
                for completed, shown, exit_code in run_block(block, shell):
                    differs = missing_lines(shown, completed.output)
                    failed += completed.exit_code != exit_code
                    if completed.exit_code != exit_code or differs or (shown and not arguments.write):
                        print(f"== {page}:{block.line}: {completed.command} (exit code {completed.exit_code})")
                        print(completed.output)
                        print(*(f"NOT PRINTED {line}" for line in differs), sep="\n")
                    if arguments.write and differs and block.kind == "console":
                        before = "\n".join([f"$ {completed.command}", *shown])
                        output = "\n".join(line.rstrip() for line in completed.output.strip("\n").splitlines())
                        text = text.replace(before, f"$ {completed.command}\n{output}", 1)
            (ROOT / page).write_text(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

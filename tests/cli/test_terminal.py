"""Conventions of other commands: completion, `help COMMAND`, doctor, --quiet, and escaped file names."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from brim.cli.print_output import escape_controls
from brim.extras import EXTRAS
from brim.monitor.report.progress_renderers import PlainLines, TerminalBar
from brim.progress import Progress
from brim.state.atomic_files import private_folder
from tests.conftest import brim, write_files

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def completed(line: str, **environment: str) -> list[str]:
    """Return the completions that bash gets for a line that ends at the cursor, without those of the shell itself."""
    requested = {"_BRIM_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    code = "import sys; sys.argv = ['brim']; from brim.cli import main; main()"
    environment = {**os.environ, **requested, **environment}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return [line.removeprefix("plain,") for line in result.stdout.splitlines() if line.startswith("plain,")]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("brim tok", ["tokenize"]),
        ("brim help sel", ["select"]),
        ("brim build --oversize s", ["skip"]),
        ("brim build --recipe a", ["aomic-piop1", "arc"]),
        ("brim build --memo", ["--memory"]),
        ("brim build scans", []),  # a file, which the shell completes
    ],
)
def test_completion(line: str, offered: list[str]) -> None:
    """Completion offers commands, options, values and recipes without a request to a server."""
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    assert completed(line, **nowhere) == offered


@pytest.mark.parametrize(
    ("shell", "file", "line"),
    [
        ("bash", ".bashrc", 'eval "$(_BRIM_COMPLETE=bash_source brim)"'),
        ("zsh", ".zshrc", 'eval "$(_BRIM_COMPLETE=zsh_source brim)"'),
        ("fish", ".config/fish/completions/brim.fish", "_BRIM_COMPLETE=fish_source brim | source"),
    ],
)
def test_completion_is_installed_once(shell: str, file: str, line: str, tmp_path: Path) -> None:
    """--install-completion adds one line to the start-up file of the shell; --show-completion prints the script."""
    destination = {**os.environ, "HOME": str(tmp_path), "SHELL": f"/usr/bin/{shell}"}
    for _ in range(2):
        assert file in brim("--install-completion", env=destination).stdout
    assert (tmp_path / file).read_text().count(line) == 1
    assert f"{shell}_complete" in brim("--show-completion", env=destination).stdout
    refused = brim("--show-completion", env={**destination, "SHELL": "/bin/tcsh"}, check=2).stderr
    assert "bash, zsh or fish" in refused
    (tmp_path / file).unlink()
    assert "takes no arguments" in brim("--install-completion", "--help", env=destination, check=2).stderr
    assert not (tmp_path / file).exists()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_with_the_installed_line(tmp_path: Path) -> None:
    """A real bash that reads the installed line offers the commands."""
    destination = {**os.environ, "HOME": str(tmp_path), "SHELL": "/bin/bash"}
    destination["PATH"] = f"{Path(sys.executable).parent}:{destination['PATH']}"
    brim("--install-completion", env=destination)
    script = 'source ~/.bashrc; COMP_WORDS=(brim veri); COMP_CWORD=1; _brim_completion brim; echo "${COMPREPLY[@]}"'
    result = subprocess.run(["bash", "-c", script], env=destination, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["verify"]


def test_help_command_prints_the_help_of_a_command() -> None:
    """`brim help COMMAND` is `brim COMMAND --help`, flags and arguments have no type, and -V is the version."""
    text = brim("help", "verify").stdout
    assert text == brim("verify", "--help").stdout
    assert "<bool>" not in text
    assert "<str>" not in text
    assert "help" in brim("help").stdout
    assert brim("-V").stdout == brim("--version").stdout


def test_doctor(tmp_path: Path) -> None:
    """The doctor command lists installed and missing libraries, and creates no files."""
    destination = {
        **os.environ,
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "HF_HUB_OFFLINE": "1",
    }
    destination.pop("HF_TOKEN", None)
    facts = json.loads(brim("doctor", "--json", env=destination).stdout)
    extras = {extra["name"]: extra for extra in facts["extras"]}
    assert set(extras) == set(EXTRAS)
    assert "obstore" in {**extras["s3"]["installed"], **dict.fromkeys(extras["s3"]["missing"])}
    assert facts["memory"]["limit_bytes"] > 0
    assert facts["hub"]["token"] is False
    assert any("hf auth login" in line for line in facts["advice"])
    assert "[s3]" in brim("doctor", env=destination).stdout
    assert list(tmp_path.iterdir()) == []


def test_doctor_does_not_wait_for_the_hub(tmp_path: Path) -> None:
    """A Hub that does not answer is reported; the token is not printed."""
    destination = {
        **os.environ,
        "HF_TOKEN": "hf_abcdefghijklmnop",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0",
    }
    output = brim("doctor", env=destination).stdout
    assert "the Hub does not answer" in output
    assert "abcdefgh" not in output


def test_extras_are_those_of_the_package() -> None:
    """The extras in the table and in pyproject.toml name the same libraries."""
    optional = PROJECT["optional-dependencies"]
    assert set(EXTRAS) == set(optional) - {"all", "dev", "docs"}
    for name, extra in EXTRAS.items():
        assert {line.partition(">")[0].partition(";")[0].strip() for line in optional[name]} == set(
            extra.packages.values()
        )
    assert optional["all"] == [f"brim[{','.join(sorted(EXTRAS))}]"]


def test_quiet_prints_only_errors(tmp_path: Path) -> None:
    """With --quiet only errors are printed: no result, no note, no progress."""
    source = write_files(tmp_path / "source", {"a.txt": b"a"})
    result = brim("build", source, tmp_path / "out", "--quiet")
    assert result.stdout == result.stderr == ""
    result = brim("verify", tmp_path / "out", tmp_path / "nowhere", "-q", check=2)
    assert result.stdout == ""
    assert "nowhere" in result.stderr


def test_verify_reports_another_source_first(tmp_path: Path) -> None:
    """A wrong SOURCE is reported as such, with ten differences instead of one per file."""
    source = write_files(tmp_path / "source", {f"{i}.txt": b"a" for i in range(20)})
    other_files = write_files(tmp_path / "other", {f"{i}.bin": b"b" for i in range(20)})
    brim("build", source, tmp_path / "out", "-q")
    error_output = brim("verify", tmp_path / "out", other_files, check=3).stderr.splitlines()
    assert error_output[0] == "brim: This is another source: 0 of its 20 files are in the shards."
    assert len([line for line in error_output if (": " in line and "txt" in line) or "bin" in line]) == 10
    assert "and 30 more differences" in "".join(error_output)


def test_destination_like_a_repository_name_is_a_folder(tmp_path: Path) -> None:
    """DEST `out/arc` looks like a repository name but is a folder; the Hub needs hf://."""
    source = write_files(tmp_path / "source", {"a.txt": b"a"})
    brim("build", source, "out/arc", "-q", cwd=tmp_path)
    assert (tmp_path / "out" / "arc" / "README.md").is_file()


@pytest.mark.parametrize("arguments", ["build a b", "map a.jsonl b --fn f:f", "verify b", "unpack a b", "select a b"])
def test_removed_working_folder_is_reported(tmp_path: Path, arguments: str) -> None:
    """The error names the missing working folder, and is not reported as a bug in brim."""
    start = "import os, sys; os.mkdir('x'); os.chdir('x'); os.rmdir('../x'); from brim.cli import main; main()"
    command = [sys.executable, "-c", start, *arguments.split()]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert result.returncode == 2, result.stderr
    assert "The working folder does not exist any more." in result.stderr


def test_a_mistyped_tokenizer_is_not_asked_of_the_hub(tmp_path: Path) -> None:
    """An argument that looks like a file name is reported as a missing file."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    destination = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    arguments = ["tokenize", "rows.jsonl", "out", "--tokenizer", "tokenizer.jsn"]
    assert (
        "The tokenizer file 'tokenizer.jsn' does not exist"
        in brim(*arguments, cwd=tmp_path, env=destination, check=2).stderr
    )


TITLE = "a\x1b]0;pwned\x07b"


def test_control_characters_in_file_names_are_escaped(tmp_path: Path) -> None:
    """A file name cannot set the title of the terminal in results, errors or notes."""
    source = write_files(tmp_path / "source", {f"{TITLE}.txt": b"abc", f"{TITLE}2.txt": b""})
    for arguments in (["check"], ["plan"], ["plan", "--allow-empty"]):
        result = brim(*arguments, source, check=None)
        assert "\x1b" not in result.stdout + result.stderr
        assert r"a\x1b]0;pwned\x07b" in result.stdout + result.stderr


def test_bar_notes_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters in the notes of a progress bar are escaped."""
    Progress(TerminalBar()).note(f"{TITLE}: skipped")
    assert r"a\x1b]0;pwned\x07b: skipped" in capsys.readouterr().err


def test_escape_controls() -> None:
    """Control characters and those that reverse the text direction are escaped; other letters stay."""
    assert escape_controls("é\tß\n") == "é\tß\n"
    assert escape_controls("\x9b31m\u202e") == r"\x9b31m\u202e"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_estimate_the_remaining_time_after_progress(tmp_path: Path) -> None:
    """The progress line counts rows; the remaining time appears after the first progress."""
    with open(tmp_path / "said", "w+") as out:
        clock = Clock()
        lines = Progress(PlainLines(out), clock=clock)
        lines.start("build", 1000, 4, 10**9)
        clock.now = 10.0
        lines.advance(0)
        lines.rows(1234)
        clock.now = 20.0
        lines.advance(500)
        first, second = (tmp_path / "said").read_text().splitlines()
    assert "left" not in first
    assert "1,234 rows" in second
    assert "0:20 left" in second


def test_state_is_private(tmp_path: Path) -> None:
    """Only the owner can read state folders and the parent folders that brim creates."""
    private_folder(tmp_path / "state" / "brim" / "hub")
    for folder in (tmp_path / "state", tmp_path / "state" / "brim", tmp_path / "state" / "brim" / "hub"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_progress_bar_moves_the_cursor_unescaped(tmp_path: Path) -> None:
    """The bar's own cursor movements are not escaped; names are."""
    import pty

    source = write_files(tmp_path / "source", {f"{TITLE}.txt": b"abc"})
    shown, terminal = pty.openpty()
    command = [sys.executable, "-m", "brim", "build", str(source), str(tmp_path / "out")]
    with subprocess.Popen(command, stderr=terminal, stdout=subprocess.DEVNULL) as process:
        os.close(terminal)
        message = b""
        with contextlib.suppress(OSError):  # the other end of the pseudo-terminal
            while segment := os.read(shown, 65536):
                message += segment
    os.close(shown)
    assert process.returncode == 0
    assert b"\x1b[" in message
    assert b"\\x1b[" not in message
    assert b"\x1b]0;" not in message

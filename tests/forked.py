"""Run the brim command in a separate process without importing its libraries each time.

One process per test worker imports the libraries that the command needs and then forks: each command is a real process
with its own arguments, environment, working folder, streams and exit code. Tests that measure memory or time start a
fresh interpreter instead (`started` of tests/conftest.py). Libraries that read environment variables at import time
(huggingface_hub, datasets, obstore) are not imported in advance.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import pkgutil
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

_HEADER = 16
# Modules that libraries import on first use.
_FOREIGN = (
    *("numpy.ma", "rich.progress", "yaml", "filelock", "tqdm.auto"),
    *("httpx", "httpx2", "httpcore", "httpcore2", "truststore", "psutil"),
)
_IMPORTS = re.compile(
    r"^(?:from|import) (?:huggingface_hub|datasets|obstore|tokenizers|transformers|sentence_transformers|ray|torch"
    r"|brim\.storage\.(?:hub_api|http_files|hub_repository|hub_bucket|objects))\b",
    re.MULTILINE,
)
_TIMEOUT_S = 300.0


def brim(
    *arguments: str | os.PathLike[str],
    check: int | None = 0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    preload: str = "",
    before: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run the brim command and check its exit code, unless `check` is None.

    `preload` is the value of LD_PRELOAD; `before` is Python code that the process runs first.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start(
            *arguments, env=env, cwd=cwd, preload=preload, before=before, outputs=(out.fileno(), err.fileno())
        )
        code = process.wait(_TIMEOUT_S)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    result = subprocess.CompletedProcess(["brim", *map(os.fspath, arguments)], code, *texts)
    if check is not None:
        assert code == check, f"exit {code}\n{result.stdout}\n{result.stderr}"
    assert "Traceback" not in result.stderr or "--debug" in arguments, result.stderr
    return result


def start(
    *arguments: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    preload: str = "",
    before: str = "",
    outputs: tuple[int, int] | None = None,
) -> Process:
    """A running brim command. Its output goes to two file descriptors or is discarded."""
    args = [os.fspath(argument) for argument in arguments]
    body = json.dumps([args, dict(env or os.environ), os.fspath(cwd or os.getcwd()), before]).encode()
    with open(os.devnull, "r+b") as nowhere:
        out, err = outputs or (nowhere.fileno(), nowhere.fileno())
        return Process(_Zygote.mine(preload).send(body, [nowhere.fileno(), out, err]))


class Process:
    """The part of the subprocess.Popen interface that tests need."""

    def __init__(self, answers: int) -> None:
        self._answers = open(answers, "rb", buffering=0)  # noqa: SIM115  for as long as this is
        pid = self._answer(_TIMEOUT_S)
        assert pid, "the command does not start"  # signals to process 0 would reach the tests themselves
        self.pid = pid
        self.returncode: int | None = None

    def _answer(self, seconds: float) -> int | None:
        if not select.select([self._answers], [], [], seconds)[0]:
            return None
        return int(self._answers.read(_HEADER) or b"")

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._answer(0)
        return self.returncode

    def wait(self, timeout: float = _TIMEOUT_S) -> int:
        if self.returncode is None:
            self.returncode = self._answer(timeout)
            if self.returncode is None:
                self.kill()
                raise TimeoutError(f"process {self.pid} takes longer than {timeout:.0f} s")
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # the process has ended and its exit code is on the way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Zygote:
    """The forking process, as its client sees it."""

    _all: ClassVar[dict[tuple[int, str], _Zygote]] = {}
    _sending: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def mine(cls, preload: str) -> _Zygote:
        mark = (os.getpid(), preload)
        with cls._sending:
            if mark not in cls._all:
                cls._all[mark] = cls(preload)
            return cls._all[mark]

    def __init__(self, preload: str) -> None:
        self._socket, theirs = socket.socketpair()
        root = str(Path(__file__).parent.parent)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        if preload:
            environment["LD_PRELOAD"] = preload
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno())], pass_fds=(theirs.fileno(),), env=environment
        )
        theirs.close()
        atexit.register(self._process.kill)

    def send(self, body: bytes, descriptors: list[int]) -> int:
        """Request a command; return a pipe that receives its process id and, at its end, its exit code."""
        answers, theirs = os.pipe()
        with self._sending:
            socket.send_fds(self._socket, [f"{len(body):>{_HEADER}}".encode()], [*descriptors, theirs])
            self._socket.sendall(body)
        os.close(theirs)
        return answers


def main() -> None:
    """Fork one process per requested command, and another process that waits for it.

    Without a preloaded library (which may count or fail calls), commands skip fsync: the page cache keeps the data of
    a killed process, and no test simulates a power failure.
    """
    _import_everything()
    if "LD_PRELOAD" not in os.environ:
        os.fsync = _check_descriptor
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the exit status of the waiting processes is not needed
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        while True:
            header, descriptors, _, _ = socket.recv_fds(connection, _HEADER, 4)
            if not header:
                return
            body = b""
            while len(body) < int(header):
                body += connection.recv(int(header) - len(body))
            if os.fork() == 0:
                _wait_for(body, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)


def _check_descriptor(descriptor: int) -> None:
    """Raise the error of os.fsync for a descriptor that is not open."""
    os.fstat(descriptor)


def _wait_for(body: bytes, descriptors: list[int]) -> None:
    """Run as the command's parent; does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        _become(*json.loads(body), descriptors)
    _, status = os.waitpid(child, 0)
    os.write(descriptors[3], f"{os.waitstatus_to_exitcode(status):>{_HEADER}}".encode())
    os._exit(0)


def _import_everything() -> None:
    """Import all of brim except modules whose libraries read the environment at import time."""
    from brim.block_pandas import do_without_pandas

    do_without_pandas()
    import brim

    for match in pkgutil.walk_packages(brim.__path__, "brim."):
        source = Path(match.module_finder.path, *match.name.rpartition(".")[2:]).with_suffix(".py")  # type: ignore[union-attr]
        if not match.ispkg and not match.name.endswith("__main__") and not _IMPORTS.search(source.read_text()):
            importlib.import_module(match.name)
    for name in _FOREIGN:
        try:
            importlib.import_module(name)
        except ImportError:  # from another version of a library
            continue
    early = {"huggingface_hub", "datasets", "obstore", "tokenizers", "pandas", "ray", "torch"} & set(sys.modules)
    assert not early, f"imported before the command knows its environment: {early}"


def _become(
    arguments: list[str], environment: dict[str, str], folder: str, before: str, descriptors: list[int]
) -> None:
    """Run the command itself; does not return."""
    code = 1
    try:
        *streams, answers = descriptors
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        os.closerange(3, answers)
        os.closerange(answers + 1, 256)
        os.write(answers, f"{os.getpid():>{_HEADER}}".encode())  # from this point it is a process like any other
        os.close(answers)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        signal.set_wakeup_fd(-1)
        sys.argv = ["brim", *arguments]
        from brim.cli import main as command

        exec(before, {})
        command()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  as an interpreter would show it
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                pass
        os._exit(code)


if __name__ == "__main__":
    main()

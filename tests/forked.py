"""The brim command in a process of its own that need not import everything first.

One process per test worker imports what the command needs and then forks: each command is a real process with its own
arguments, environment, working folder, streams and exit code. Only for tests that do not measure memory or time and set
no variable that a library reads when it is imported: those start a fresh interpreter (tests/conftest.py).
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import pkgutil
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

_HEADER = 16
_TIMEOUT_S = 300.0
_IMPORTS = re.compile(r"^(?:from|import) (?:huggingface_hub|datasets|ray|torch)", re.MULTILINE)


def brim(
    *arguments: str | os.PathLike[str],
    check: int | None = 0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    preload: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run the brim command; unless `check` is None, its exit code must be that. `preload` is what LD_PRELOAD loads."""
    words = [os.fspath(argument) for argument in arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as nothing:
        code = _Zygote.mine(preload).run(
            words, dict(env or os.environ), os.fspath(cwd or os.getcwd()), [nothing, out, err]
        )
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    done = subprocess.CompletedProcess(["brim", *words], code, *texts)
    if check is not None:
        assert code == check, f"exit {code}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done


class _Zygote:
    """The process that forks, as this one sees it."""

    _all: ClassVar[dict[tuple[int, str], _Zygote]] = {}

    @classmethod
    def mine(cls, preload: str) -> _Zygote:
        mark = (os.getpid(), preload)
        if mark not in cls._all:
            cls._all[mark] = cls(preload)
        return cls._all[mark]

    def __init__(self, preload: str) -> None:
        self._mark = (os.getpid(), preload)
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_TIMEOUT_S)
        root = str(Path(__file__).parent.parent)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        if preload:
            environment["LD_PRELOAD"] = preload
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno())], pass_fds=(theirs.fileno(),), env=environment
        )
        theirs.close()
        atexit.register(self._process.kill)

    def run(self, words: list[str], environment: dict[str, str], folder: str, files: list[object]) -> int:
        body = json.dumps([words, environment, folder]).encode()
        descriptors = [file.fileno() for file in files]  # type: ignore[attr-defined]
        socket.send_fds(self._socket, [f"{len(body):>{_HEADER}}".encode()], descriptors)
        self._socket.sendall(body)
        try:
            return int(self._socket.recv(_HEADER))
        except TimeoutError:
            self._process.kill()
            del _Zygote._all[self._mark]
            raise


def main() -> None:
    """Fork a command for each request, one at a time."""
    _import_what_commands_do()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        while True:
            header, descriptors, _, _ = socket.recv_fds(connection, _HEADER, 3)
            if not header:
                return
            body = b""
            while len(body) < int(header):
                body += connection.recv(int(header) - len(body))
            child = os.fork()
            if child == 0:
                _become(*json.loads(body), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            _, status = os.waitpid(child, 0)
            connection.sendall(f"{os.waitstatus_to_exitcode(status):>{_HEADER}}".encode())


def _import_what_commands_do() -> None:
    """All of brim, but for what imports a library that reads the environment as it is imported."""
    import brim
    from brim.no_pandas import do_without_pandas

    do_without_pandas()
    for found in pkgutil.walk_packages(brim.__path__, "brim."):
        source = Path(found.module_finder.path, *found.name.rpartition(".")[2:]).with_suffix(".py")  # type: ignore[union-attr]
        if not found.ispkg and not found.name.endswith("__main__") and not _IMPORTS.search(source.read_text()):
            importlib.import_module(found.name)
    assert not {"huggingface_hub", "datasets", "ray", "torch"} & sys.modules.keys()


def _become(words: list[str], environment: dict[str, str], folder: str, descriptors: list[int]) -> None:
    """The command itself; does not return."""
    code = 1
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(3, 256)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        signal.set_wakeup_fd(-1)
        sys.argv = ["brim", *words]
        from brim.cli import main as command

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

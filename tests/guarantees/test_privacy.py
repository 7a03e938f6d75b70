"""Published files do not contain paths, users or hosts of the machine."""

from __future__ import annotations

import getpass
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from brim.errors import SourceError
from brim.formats.parquet_reader import locate_parquet
from brim.formats.range_readers import LocalFile
from brim.formats.tar_shard import locate_tar
from brim.sources.table_source import published_root
from tests.conftest import brim, random_bytes, write_files
from tests.hub import TestHub
from tests.publishing import DEST, Machine


@pytest.mark.parametrize("format", ["parquet", "webdataset"])
@pytest.mark.parametrize("kind", ["folder", "relative table", "absolute table"])
def test_no_place_user_or_host(tmp_path: Path, format: str, kind: str) -> None:
    """All bytes that brim wrote, including the ledger, are searched for paths and names; file contents are excluded."""
    home = tmp_path / "home-of-somebody"
    source = write_files(home / "project", {f"scans/{i}.bin": random_bytes(300, i) for i in range(4)})
    out = tmp_path / "published"
    target = source
    if kind != "folder":
        start = f"{source}/" if kind == "absolute table" else ""
        (source / "t.csv").write_text("f,n\n" + "".join(f"{start}scans/{i}.bin,{i}\n" for i in range(4)))
        target = source / "t.csv"
    user, host = "user-4711", "host-0815"
    environment = {**os.environ, "HOME": str(home), "USER": user, "LOGNAME": user, "HOSTNAME": host}
    brim("build", target, out, "--format", format, "--num-shards", "2", env=environment)
    secrets = {str(tmp_path), str(home), "home-of-somebody", user, host, "published", str(out), str(os.getpid())}
    secrets |= {socket.gethostname(), platform.node()} - {"", "localhost", "vm"}
    if len(getpass.getuser()) > 4:
        secrets.add(getpass.getuser())
    for path in sorted(p for p in out.rglob("*") if p.is_file()):
        data = bytearray(path.read_bytes())
        if path.parent.name == "data":
            locate = locate_parquet if format == "parquet" else locate_tar
            for match in list(locate(LocalFile(path))):
                data[match.offset : match.offset + match.size] = bytes(match.size)
        for secret in secrets - {str(os.getpid())}:
            assert secret.encode() not in data, f"{secret!r} stands in {path.name}"
    assert "project" not in (out / "README.md").read_text()


@pytest.mark.parametrize("token", ["hf_" + "VerySecret0123456789", "a-token-of-another-kind"])
@pytest.mark.parametrize("route", ["info", "batch", "commit"])
def test_debug_tracebacks_show_no_token_that_a_server_echoes(tmp_path: Path, token: str, route: str) -> None:
    """Tracebacks of --debug include all causes, and each one hides the token in the server's message."""
    source = write_files(tmp_path / "in", {"1.bin": b"1" * 3000})
    with TestHub(tmp_path / "hub", tokens={token: {"user": "ada", "can_write": True}}) as hub:
        machine = Machine(hub, tmp_path / "machine", token)
        hub.faults.add(route, times=None, status=400, said=f"no right for {token} (Authorization: Bearer {token})")
        for option in ("--debug", "--json"):
            result = machine.run("build", str(source), DEST, option)
            assert result.returncode not in (0, 1), result.stderr
            assert token not in result.stdout + result.stderr
            assert ("Traceback" in result.stderr) is (option == "--debug")


def test_debug_hides_the_values_of_secret_variables(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['brim', 'info', 'x', '--debug']\n"
        "import brim.cli\n"
        "def fail(arguments): raise ValueError('key 9f8e7d6c5b4a in cause') from KeyError('9f8e7d6c5b4a')\n"
        "import brim.cli.program\n"
        "brim.cli.program.static_page = fail\n"
        "brim.cli.main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "AWS_SECRET_ACCESS_KEY": "9f8e7d6c5b4a"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "ValueError: key *** in cause" in result.stderr
    assert "9f8e7d6c5b4a" not in result.stderr


def test_a_table_that_names_files_of_two_homes_is_refused(tmp_path: Path) -> None:
    """A table with files of two home folders is refused, because its relative paths would publish user names."""
    users = tmp_path / "users"
    write_files(users, {"alice/proj/f/1.bin": b"1", "bob/scans/2.bin": b"2"})
    table = users / "alice" / "proj" / "t.csv"
    table.write_text(f"f\nf/1.bin\n{users}/bob/scans/2.bin\n")
    environment = {**os.environ, "HOME": str(users / "alice")}
    result = brim("build", table, tmp_path / "out", env=environment, check=2)
    assert "--root" in result.stderr
    assert "home folder" in result.stderr
    assert not (tmp_path / "out").exists()
    checked = brim("check", table, env=environment, check=None)
    assert checked.returncode != 0
    assert "home folder" in checked.stdout + checked.stderr
    table.write_text(f"f\nalice/proj/f/1.bin\n{users}/bob/scans/2.bin\n")
    brim("build", table, tmp_path / "out", "--root", users, env=environment)
    assert _paths(tmp_path / "out") == {"alice/proj/f/1.bin", "bob/scans/2.bin"}


@pytest.mark.parametrize(
    ("base", "paths"),
    [
        ("/home/alice/proj", ["/home/alice/proj/f/1.bin", "/home/bob/scans/2.bin"]),
        ("/srv/t", ["/home/alice/1.bin", "/home/bob/2.bin"]),
        ("/home/alice", ["/home/alice/1.bin", "/Users/bob/2.bin"]),
        ("/var/home/alice", ["/var/home/alice/1.bin", "/var/data/2.bin"]),
        ("/home", ["/home/alice/1.bin", "/home/alice/2.bin"]),
        ("/", ["/home/alice/1.bin"]),
    ],
)
def test_table_root_publishes_no_home_folder(base: str, paths: list[str]) -> None:
    with pytest.raises(SourceError, match="root=") as refused:
        published_root(base, paths, is_fixed=False)
    assert "home folder" in str(refused.value)


@pytest.mark.parametrize(
    ("base", "paths", "root"),
    [
        ("/home/alice/proj", ["/home/alice/proj/f/1.bin", "/home/alice/proj/2.bin"], "/home/alice/proj"),
        ("/home/alice/proj", ["/home/alice/proj/f/1.bin", "/home/alice/scans/2.bin"], "/home/alice"),
        ("/data/tables", ["/data/a/1.bin", "/data/b/2.bin"], "/data"),
        ("/data/x/y", ["/data/x/home/kitchen/1.bin", "/data/x/home/garden/2.bin"], "/data/x/home"),
        ("/", ["/data/1.bin"], "/"),
        ("/srv", ["/srv/1.bin"], "/srv"),
    ],
)
def test_table_root_is_the_common_folder_elsewhere(base: str, paths: list[str], root: str) -> None:
    assert published_root(base, paths, is_fixed=False) == root


def _paths(out: Path) -> set[str]:
    return {str(match.path) for shard in (out / "data").iterdir() for match in locate_parquet(LocalFile(shard))}

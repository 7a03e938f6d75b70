"""Nothing that is published says where it was made."""

from __future__ import annotations

import getpass
import os
import platform
import socket
from pathlib import Path

import pytest

from brim.formats.parquet_index import locate_parquet
from brim.formats.readable import LocalFile
from brim.formats.tar_shard import locate_tar
from tests.conftest import brim, random_bytes, write_files


@pytest.mark.parametrize("format", ["parquet", "webdataset"])
@pytest.mark.parametrize("kind", ["folder", "relative table", "absolute table"])
def test_no_place_user_or_host(tmp_path: Path, format: str, kind: str) -> None:
    """Every byte brim wrote that is not file content, the ledger too, is searched for paths and names."""
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
            for found in list(locate(LocalFile(path))):
                data[found.offset : found.offset + found.size] = bytes(found.size)
        for secret in secrets - {str(os.getpid())}:
            assert secret.encode() not in data, f"{secret!r} stands in {path.name}"
    assert "project" not in (out / "README.md").read_text()

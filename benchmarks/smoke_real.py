"""Verify on the live Hub what the tests can only simulate: `make smoke-real`. Not a test, and not run by any test.

    HF_TOKEN=… python benchmarks/smoke_real.py SOURCE [--owner NAME] [--keep]

SOURCE is a small BIDS dataset or any folder, local or at s3://openneuro.org/dsNNNNNN (public: read without
credentials). The script creates a private repository with a random name, publishes by LFS and by Xet, by a pull
request, appends, verifies without and with a download, does the same in a storage bucket, and deletes both. It needs a
token with write access, and the network.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", nargs="?", default="s3://openneuro.org/ds000001")
    parser.add_argument("--owner", help="whose repository it becomes (default: the token's)")
    parser.add_argument("--keep", action="store_true", help="do not delete the repository at the end")
    arguments = parser.parse_args()
    token = os.environ.get("HF_TOKEN", "")
    if not token:
        sys.exit("smoke-real: there is no token. Set HF_TOKEN to one that may write; a private repository is made.")
    if os.environ.get("HF_ENDPOINT"):
        sys.exit("smoke-real: HF_ENDPOINT is set, so this would not be the live Hub. Unset it.")
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    owner = arguments.owner or api.whoami()["name"]
    repo = f"{owner}/brim-smoke-{secrets.token_hex(4)}"
    print(f"smoke-real: {repo}, private; it is deleted at the end")
    try:
        prove(repo, arguments.source)
    finally:
        if not arguments.keep:
            api.delete_repo(repo, repo_type="dataset", missing_ok=True)
            api.delete_bucket(repo, missing_ok=True)
            print(f"smoke-real: deleted {repo}, the repository and the bucket")


def prove(repo: str, source: str) -> None:
    """Run the steps, each of which is a command that must succeed."""
    dest, bucket = f"hf://datasets/{repo}", f"hf://buckets/{repo}/some/where"
    reading = ["--anonymous"] if source.startswith("s3://") else []
    with tempfile.TemporaryDirectory(prefix="smoke-") as folder:
        extra = Path(folder) / "more"
        extra.mkdir()
        first, second = extra / "first", extra / "second"
        for number, position in enumerate((first, second)):
            position.mkdir()
            (position / f"{number}.bin").write_bytes(secrets.token_bytes(1_000_000))
        steps = [
            ("create, LFS", ["build", source, dest, "--limit", "4", *reading]),
            ("again: nothing", ["build", source, dest, "--limit", "4", *reading]),
            ("verify", ["verify", dest]),
            ("verify, read back", ["verify", dest, "--deep"]),
            ("Xet, a config", ["build", str(first), dest, "--config", "more", "--via", "xet"]),
            ("append", ["build", str(second), dest, "--config", "more", "--append"]),
            ("pull request", ["build", many(Path(folder) / "many"), dest, "--config", "many", "--rows-per-shard", "1"]),
            ("every config", ["verify", dest]),
            ("what it is", ["info", dest]),
            ("files back", ["unpack", dest, str(Path(folder) / "back"), "--from-config", "more"]),
            ("a bucket", ["build", str(first), bucket]),
            ("append to it", ["build", str(second), bucket, "--append"]),
            ("verify it, read back", ["verify", bucket, "--deep"]),
            ("rows from it", ["select", bucket, str(Path(folder) / "rows"), "--limit", "1"]),
        ]
        for name, arguments in steps:
            start = time.monotonic()
            quiet = [] if arguments[0] == "info" else ["--quiet"]
            subprocess.run([sys.executable, "-m", "brim", *arguments, *quiet], check=True)
            print(f"smoke-real: {name}: done in {time.monotonic() - start:.0f} s")
        back = sorted(path.read_bytes() for path in (Path(folder) / "back").iterdir())
        if back != sorted(next(destination.iterdir()).read_bytes() for destination in (first, second)):
            sys.exit("smoke-real: the files that came back are not those that were sent")


def many(folder: Path) -> str:
    """Publish more shards than one commit takes."""
    folder.mkdir()
    for number in range(120):
        (folder / f"{number:03d}.bin").write_bytes(secrets.token_bytes(2_000))
    return str(folder)


if __name__ == "__main__":
    main()

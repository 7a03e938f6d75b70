"""make demo: build a dataset of 1 GB under a memory limit of 300 MB, kill it halfway, resume, verify, load.

The images are the photos of examples/sample, enlarged to uncompressed bitmaps. The kernel enforces the limit: with
a cgroup where one can be made, otherwise with a limit on the data of each process, and the demo says which.
"""

from __future__ import annotations

import argparse
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from brim.memory.cgroup import Cgroup, open_group

MB = 10**6
PHOTOS = Path(__file__).parent / "sample" / "photos"
BITMAP_PIXELS = 2889  # on each side: 25 MB at three bytes per pixel
IN_MEMORY = """\
import pathlib, sys
import pyarrow as pa, pyarrow.parquet as pq

paths = sorted(pathlib.Path(sys.argv[1]).rglob("*.bmp"))
rows = [{"image": path.read_bytes(), "label": path.parent.name} for path in paths]
pq.write_table(pa.Table.from_pylist(rows), sys.argv[2])
"""
LOAD = """\
from datasets import load_dataset

dataset = load_dataset("out", split="train", streaming=True)
row = next(iter(dataset))
print(row["image"].size, dataset.features["label"].int2str(row["label"]))
"""


def say(text: str, color: str = "1") -> None:
    print(f"\033[{color}m{text}\033[0m" if sys.stdout.isatty() else text, flush=True)


def make_images(folder: Path, count: int) -> None:
    """Write bitmaps in one folder per class, by repeating the pixels of the sample photos."""
    photos = sorted(PHOTOS.rglob("*.jpg"))
    for number in range(count):
        photo = photos[number % len(photos)]
        pixels = np.asarray(Image.open(photo).convert("RGB"))
        repeats = -(-BITMAP_PIXELS // min(pixels.shape[:2]))
        large = np.tile(pixels, (repeats, repeats, 1))[:BITMAP_PIXELS, :BITMAP_PIXELS]
        target = folder / photo.parent.name / f"{number:03d}.bmp"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(large).save(target)


def enforce(limit_bytes: int, limit: Cgroup | str) -> Callable[[], None]:
    """Return what a child process calls to place itself under the limit."""
    if isinstance(limit, Cgroup):
        return limit.join

    def limit_data() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))  # the stacks of threads count as data in full
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

    return limit_data


class Demo:
    def __init__(self, folder: Path, enter_limit: Callable[[], None]) -> None:
        self.folder, self._enter_limit = folder, enter_limit
        self._step = 0

    def announce(self, text: str) -> None:
        self._step += 1
        say(f"\n{self._step}. {text}")

    def run(self, *command: str, kill_at_shards: int = 0) -> int:
        """Run a command under the limit; with `kill_at_shards`, kill it once that many shards exist."""
        say(f"$ {shlex.join(command)}", "36")
        words = [sys.executable, "-m", *command] if command[0] == "brim" else [sys.executable, *command[1:]]
        process = subprocess.Popen(words, preexec_fn=self._enter_limit, stderr=subprocess.STDOUT, cwd=self.folder)
        while kill_at_shards and process.poll() is None:
            if len(list(self.folder.glob("out/data/*.parquet"))) >= kill_at_shards:
                process.kill()
                break
            time.sleep(0.01)
        return process.wait()


def describe(code: int) -> str:
    return f"killed by signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def demonstrate(folder: Path, count: int, limit_mb: int) -> bool:
    """Run all steps in `folder`; True if each ended as announced."""
    limit = open_group(limit_mb * MB)
    demo = Demo(folder, enforce(limit_mb * MB, limit))
    try:
        demo.announce(f"Make {count} images of 25 MB, {25 * count:,} MB in all, in one folder per class")
        make_images(folder / "photos", count)
        say(f"   from now on no step may use more than {limit_mb} MB; the kernel enforces it")
        if isinstance(limit, str):
            say("   no cgroup can be made here, so each process gets a limit on its data (as ulimit -d does)")

        demo.announce("Without brim: read the images, make a table, write Parquet. This is going to fail")
        (folder / "in_memory.py").write_text(IN_MEMORY)
        print(IN_MEMORY.rstrip())
        in_memory = demo.run("python", "in_memory.py", "photos", "all.parquet")
        say(f"   {describe(in_memory)}", "31")

        demo.announce("What brim would build, before it builds it")
        planned = demo.run(
            "brim", "plan", "photos", "--label-from", "parent", "--shard-size", "60MB", "--memory", "200MB"
        )

        demo.announce("brim build under the same limit. Halfway we kill it with kill -9")
        build = (
            "brim",
            "build",
            "photos",
            "out",
            "--label-from",
            "parent",
            "--shard-size",
            "60MB",
            "--memory",
            "200MB",
        )
        killed = demo.run(*build, kill_at_shards=count // 4)
        shards = len(list(folder.glob("out/data/*.parquet")))
        say(f"   {describe(killed)}, {shards} shards written", "31")

        demo.announce("The same command again: it keeps the finished shards and writes the missing ones")
        resumed = demo.run(*build)

        demo.announce("Compare every byte of the dataset with the images")
        verified = demo.run("brim", "verify", "out", "photos")

        demo.announce("Load it with datasets")
        (folder / "load.py").write_text(LOAD)
        print(LOAD.rstrip())
        loaded = subprocess.run([sys.executable, "load.py"], cwd=folder).returncode

        expected_kill = -signal.SIGKILL
        failed_in_memory = in_memory == expected_kill if isinstance(limit, Cgroup) else in_memory != 0
        return failed_in_memory and killed == expected_kill and planned == resumed == verified == loaded == 0
    finally:
        if isinstance(limit, Cgroup):
            limit.remove()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--limit", type=int, default=300, help="memory limit in MB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="brim-demo-") as folder:
        as_announced = demonstrate(Path(folder), arguments.images, arguments.limit)
    say("\nEvery step ended as announced." if as_announced else "\nA step did NOT end as announced.")
    return 0 if as_announced else 1


if __name__ == "__main__":
    sys.exit(main())

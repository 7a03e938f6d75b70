"""make demo-limit: the minute that convinces.

Under a limit that the kernel holds, a script in the usual way packages generated files and is killed; `brim why` says
by whom. `brim build` does the same job under the same limit, is killed with `kill -9` halfway, continues, and
`brim verify` proves every byte.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from brim.memory.cgroup import Cgroup, open_group

MB = 10**6
USUAL = """
import sys, pathlib, pyarrow as pa, pyarrow.parquet as pq
rows = [{"path": p.name, "bytes": p.read_bytes()} for p in sorted(pathlib.Path(sys.argv[1]).iterdir())]
pq.write_table(pa.Table.from_pylist(rows), sys.argv[2])
"""
ROW = """
import sys, pathlib, pyarrow.parquet as pq
shard = sorted(pathlib.Path(sys.argv[1], "data").iterdir())[0]
file = next(pq.ParquetFile(shard).iter_batches(batch_size=1)).column("file")[0].as_py()
print(f"   {file['path']}: {len(file['bytes']):,} bytes")
"""


def say(text: str, colour: str = "1") -> None:
    print(f"\033[{colour}m{text}\033[0m" if sys.stdout.isatty() else text, flush=True)


def limited(group: Cgroup, folder: Path, command: list[str], *, kill_when: Path | None = None, shards: int = 0) -> int:
    """Run a command where the kernel holds the line. `kill_when`: kill -9 once so many shards are there."""
    say(f"$ {shlex.join(command).replace(f'{sys.executable} -m brim', 'brim').replace(sys.executable, 'python')}", "36")
    process = subprocess.Popen(command, preexec_fn=group.join, stderr=subprocess.STDOUT, cwd=folder)
    while kill_when is not None and process.poll() is None:
        if len(list(kill_when.glob("data/*.parquet"))) >= shards:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.01)
    return process.wait()


def told(code: int) -> str:
    return f"killed by signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--megabytes", type=int, default=25, help="of each file")
    parser.add_argument("--limit", type=int, default=300, help="megabytes")
    arguments = parser.parse_args()
    group = open_group(arguments.limit * MB)
    if isinstance(group, str):
        print(f"No limit that the kernel holds can be made here: {group}.")
        print("Try: systemd-run --user --scope -p Delegate=yes make demo-limit; or run it as root.")
        return 2
    brim = [sys.executable, "-m", "brim"]
    began = "1h"
    try:
        with tempfile.TemporaryDirectory(prefix="demo-limit-") as folder:
            here = Path(folder)
            source, out = here / "scans", here / "out"
            source.mkdir()
            for number in range(arguments.files):
                (source / f"{number:03d}.bin").write_bytes(os.urandom(arguments.megabytes * MB))
            total = arguments.files * arguments.megabytes
            say(f"{arguments.files} files, {total:,} MB; limit {arguments.limit} MB, held by the kernel")

            say("\n1. The usual way: read, make a table, write")
            (here / "usual.py").write_text(USUAL)
            print(USUAL.strip())
            code = limited(group, here, [sys.executable, "usual.py", "scans", "usual.parquet"])
            say(f"   {told(code)}; the group counts {group.oom_kills()} kill(s)", "31")
            usual_died = code == -signal.SIGKILL

            say("\n2. brim why: who, when, at what limit")
            why = subprocess.run([*brim, "why", "--since", began], text=True, capture_output=True)
            print("\n".join(f"   {line}" for line in (why.stdout or why.stderr).splitlines()[:4]))

            say("\n3. brim build: the same files, the same limit; kill -9 halfway")
            build = [*brim, "build", "scans", "out", "--memory", f"{arguments.limit // 2}MB", "--shard-size", "50MB"]
            code = limited(group, here, build, kill_when=out, shards=max(total // 100, 1))
            there = len(list(out.glob("data/*.parquet")))
            say(f"   {told(code)} with {there} shards written", "31")
            was_killed = code == -signal.SIGKILL

            say("\n4. The same command again: it does what is missing")
            continued = limited(group, here, build)

            say("\n5. brim verify: every byte, against the files")
            proved = limited(group, here, [*brim, "verify", "out", "scans"])

            say("\n6. A row is loaded")
            (here / "row.py").write_text(ROW)
            loaded = limited(group, here, [sys.executable, "row.py", "out"])
            peak = group.peak_bytes()
            fine = usual_died and was_killed and continued == proved == loaded == 0
            most = f"; at most {peak / MB:.0f} MB, page cache too" if peak else ""
            say(f"\n{'All' if fine else 'NOT'} as promised{most}.")
            return 0 if fine else 1
    finally:
        group.remove()


if __name__ == "__main__":
    sys.exit(main())

"""The shape that breaks uploads: 902 sessions, 273 GB of sparse files, planned and checked.

    python benchmarks/arc.py [FOLDER]

Makes the dataset (it takes no disk to speak of), then measures time and peak memory from outside for
`brim plan` and `brim check`, with and without the built-in recipe. Nothing is built.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peak import measure
from tests.generators.arc import make_arc

COMMANDS = (
    ["plan"],
    ["plan", "--recipe", "arc"],
    ["check", "--recipe", "arc", "--sample-size", "0"],  # sparse files have no headers to look at
)
MOST_SECONDS, MOST_BYTES = 2, 100_000_000  # of a plan


def main(folder: Path) -> int:
    make_arc(folder / "ds004884", sessions=902, sparse_sizes=True)
    missed = 0
    print("| command | seconds | peak memory |\n|---|---:|---:|")
    for verb, *options in COMMANDS:
        done = measure([sys.executable, "-m", "brim", verb, str(folder / "ds004884"), *options])
        over = verb == "plan" and (done.seconds > MOST_SECONDS or done.peak_bytes > MOST_BYTES)
        missed += done.exit_code != 0 or over
        print(f"| brim {' '.join([verb, *options])} | {done.seconds:.1f} | {done.peak_bytes / 1e6:.0f} MB |")
    print(f"\nGoal: {MOST_SECONDS} s and {MOST_BYTES / 1e6:.0f} MB: {'MISSED' if missed else 'reached'}")
    return missed


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(main(Path(sys.argv[1])))
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(Path(temporary)))

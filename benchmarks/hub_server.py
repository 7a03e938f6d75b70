"""A local Hub in a process of its own, for publish.py: prints its address, ends when stdin does.

    python benchmarks/hub_server.py FOLDER [--xet] [--keep]

Without --keep it hashes what it gets and stores nothing, so that a disk does not decide what is measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.hub import TestHub

# The real Hub sends larger objects in parts; one part or many makes no difference that was measured here.
MULTIPART_BYTES = 5 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--xet", action="store_true")
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    with TestHub(arguments.folder, keep=arguments.keep, xet=arguments.xet, multipart_bytes=MULTIPART_BYTES) as hub:
        print(hub.endpoint, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()

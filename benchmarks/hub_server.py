"""Run a local Hub in a separate process for publish.py; it prints its address and exits when stdin closes.

    python benchmarks/hub_server.py FOLDER [--xet] [--keep] [--tail BYTES] [--user NAME=TOKEN]

Without --keep it hashes uploads and stores nothing (or the last BYTES of each object), so that a disk does not
limit the measured speed. For each line on stdin it prints its counters as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.hub import TestHub
from tests.hub.server import TOKENS

# The real Hub receives larger objects in parts; the number of parts made no measurable difference.
MULTIPART_BYTES = 5 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--xet", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--tail", type=int, default=0, metavar="BYTES")
    parser.add_argument("--user", help="NAME=TOKEN of somebody who may write, in the place of the usual ones")
    arguments = parser.parse_args()
    tokens = TOKENS
    if arguments.user:
        name, _, token = arguments.user.partition("=")
        tokens = {token: {"user": name, "can_write": True}}
    with TestHub(
        arguments.folder,
        tokens,
        keep=arguments.keep,
        tail_bytes=arguments.tail,
        xet=arguments.xet,
        multipart_bytes=MULTIPART_BYTES,
    ) as hub:
        print(hub.endpoint, flush=True)
        for _ in sys.stdin:
            observed = hub.counters
            records = {
                "received": observed.bytes_received,
                "sent": observed.bytes_sent,
                "requests": sum(observed.requests.values()),
            }
            records["objects_read"] = observed.requests["object"]
            print(json.dumps(records), flush=True)


if __name__ == "__main__":
    main()

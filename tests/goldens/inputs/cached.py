"""brim.map of a file, or of a dataset that `datasets` has saved, into the folder `out`; prints what came of it.

A unit is at least 8 MiB here, so the file has 24 MB and is made when it is needed.
"""

import json
import os
import sys

from steps import twice

import brim

DATE_NS = 1_700_000_000_123_456_789


def write_large(path):
    with open(path, "w") as file:
        for number in range(240):
            file.write(json.dumps({"id": number, "text": f"row {number} " + "x" * 100_000}) + "\n")
    os.utime(path, ns=(DATE_NS, DATE_NS))


if __name__ == "__main__":
    source = sys.argv[1]
    if source == "large.jsonl":
        write_large(source)
    else:
        from datasets import load_from_disk

        source = load_from_disk(source)
    made = brim.map(source, twice, remove_columns=["text"], cache_dir="out", num_proc=1, memory="600MB")
    sys.stdout.write(json.dumps({"rows": len(made), "twice": sum(made["twice"])}))

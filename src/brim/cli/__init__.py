"""The command line: one module per command, which parses, calls the library and prints the result.

The list of commands and the version are printed without importing anything else: `brim --help` takes as long as Python
itself.
"""

import gc
import os
import sys


def main() -> None:
    """Run the `brim` command."""
    from brim.cli.commands import static_page

    arguments = sys.argv[1:]
    page = None if "_BRIM_COMPLETE" in os.environ else static_page(arguments)
    if page is not None and _write(f"{page}\n".encode()):
        return
    # Imports create 70,000 objects; with the default threshold of 700, the collector would run a hundred times.
    gc.set_threshold(100_000)
    from brim.cli.program import run

    run(arguments)


def _write(text: bytes) -> bool:
    """Write to stdout. False if that failed: `program` then tries it again, and reports the failure."""
    try:
        while text:
            text = text[os.write(1, text) :]
    except OSError:
        return False
    return True

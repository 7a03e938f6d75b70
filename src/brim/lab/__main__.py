"""The child of an experiment: `python -m brim.lab MODULE:FUNCTION OPTIONS-AS-JSON`."""

import importlib
import json
import sys


def main() -> None:
    module, _, function = sys.argv[1].partition(":")
    part = getattr(importlib.import_module(f"brim.lab.{module}"), function)
    part(**json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()

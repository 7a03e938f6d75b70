"""Run the child of an experiment: `python -m brim.lab FUNCTION OPTIONS-AS-JSON`."""

import json
import sys

from brim.lab import experiments

if __name__ == "__main__":
    getattr(experiments, sys.argv[1])(**json.loads(sys.argv[2]))

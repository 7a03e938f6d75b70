"""What the child of an experiment says to the process that measures it: JSON lines on stdout.

A step waits until it has been measured, so that a number belongs to the moment it is named after. Lines are
written with one system call each, because forked workers say things too.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def step(name: str) -> None:
    """Be measured now, under this name."""
    _say({"step": name})
    sys.stdin.readline()


def tell(**facts: Any) -> None:
    """Something that the measuring process wants to know."""
    _say(facts)


def _say(entry: dict[str, Any]) -> None:
    os.write(1, json.dumps(entry).encode() + b"\n")

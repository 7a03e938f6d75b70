"""A Hugging Face Hub on loopback for tests, real enough for the real clients."""

from .faults import Fault, Faults
from .objects import Counters
from .server import TestHub

__all__ = ["Counters", "Fault", "Faults", "TestHub"]

"""A Hugging Face Hub on the loopback interface for tests, complete enough for the real clients."""

from .faults import Fault, Faults
from .objects import Counters
from .server import TestHub

__all__ = ["Counters", "Fault", "Faults", "TestHub"]

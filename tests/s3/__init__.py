"""A real S3 server for the tests, a proxy that injects faults, and a client that is independent of obstore."""

from .proxy import Exchange, FaultProxy
from .rules import Rule
from .server import S3Server, Upload

__all__ = ["Exchange", "FaultProxy", "Rule", "S3Server", "Upload"]

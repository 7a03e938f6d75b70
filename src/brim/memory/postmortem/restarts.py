"""Machines that came up again without having been shut down: a boot that no farewell stands before.

Only logs in which the service manager or syslog speaks can tell: the kernel alone says nothing when it is
shut down in order.
"""

from __future__ import annotations

import re
from datetime import datetime

from brim.memory.postmortem.records import Restart
from brim.memory.postmortem.timestamps import Clock

NEEDLES = (
    b"Linux version ",
    b"exiting on signal 15",
    b"Shutting down",
    b"Powering",
    b"ystem Reboot",
    b"Power-Off",
    b"systemd-shutdown",
    b"Journal stopped",
    b"reboot: ",
)
_BOOT = re.compile(r"(?:^|kernel: |\] |;)(?:\[\s*[\d.]+\] )?Linux version \d+\.\d+")
_FAREWELL = re.compile(
    r"exiting on signal 15|systemd\[1\]: Shutting down|Reached target .*(?:Shutdown|Reboot|Power[- ]Off|Halt)"
    r"|System is (?:rebooting|powering down)|systemd-shutdown|Journal stopped|reboot: (?:Restarting|Power down)"
    r"|Received SIGTERM from PID 1 "
)
_SERVICES = (b"systemd[1]:", b"rsyslogd", b"systemd-journald", b"CRON[", b"sshd[")


class Restarts:
    """Feed it lines; `boot` counts boots, `restarts` grows."""

    def __init__(self, source: str, clock: Clock) -> None:
        self.source, self.clock = source, clock
        self.boot = 0
        self.restarts: list[Restart] = []
        self._services = False
        self._farewell = False
        self._last = ""

    def feed(self, number: int, text: str) -> None:
        if "Linux version " in text and _BOOT.search(text):
            self._booted(number, text)
        elif not self._farewell and _FAREWELL.search(text):
            self._farewell = True
        if text:
            self._last = text

    def glance(self, block: bytes) -> None:
        """See whether anybody but the kernel writes to this log."""
        if not self._services:
            self._services = any(word in block for word in _SERVICES)

    def _booted(self, number: int, text: str) -> None:
        self.boot += 1
        if self._last and self._services and not self._farewell:
            last, first = self._date(self._last), self._date(text)
            self.restarts.append(Restart(self.source, last, first, number))
        self._farewell = False

    def _date(self, text: str) -> datetime | None:
        return self.clock.stamp(text).when

"""What a watcher is told: whom to watch, against which limit, what to do about it, where to write it down."""

from __future__ import annotations

import json
from dataclasses import asdict, field
from typing import Any

from brim.choices import seconds
from brim.memory.guard import DEFAULT_LEAD_S, Line, check_order, parse_level, standard_lines
from brim.records import dataclass


@dataclass(frozen=True, slots=True)
class Ladder:
    """Warn, stop, kill: at which levels ("80%", "40GB", "off"), how long after, and by what means."""

    alert: str = "80%"
    stop: str = "90%"
    kill: str = "97%"
    system: str = "90%"
    alert_after_s: float = 10.0
    stop_after_s: float = 3.0
    lead_s: float = DEFAULT_LEAD_S
    grace_s: float = 30.0
    stop_file: str | None = None
    alerts: str | None = None
    on_alert: str | None = None
    act: bool = True
    act_on_all: bool = False  # of several programs that match
    heard: bool = False  # the watched program itself asks whether it should stop

    def __post_init__(self) -> None:
        for name in ("alert_after", "stop_after", "lead", "grace"):
            seconds(name.replace("_", "-"), getattr(self, f"{name}_s"))

    def lines(self, limit_bytes: int) -> list[Line]:
        """The lines for the tree; an InputError if they are out of order."""
        alert, stop, kill = map(parse_level, (self.alert, self.stop, self.kill))
        lines = standard_lines(alert, stop, kill, self.alert_after_s, self.stop_after_s)
        check_order(lines, limit_bytes)
        return lines

    def system_lines(self) -> list[Line]:
        """The line for the machine, which is only warned about: whose fault it is, is not known."""
        level = parse_level(self.system)
        return [Line("system", level, self.alert_after_s)] if level else []


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to watch.

    `command`: what `owner` will start, and all below it. `process`: `pid` and all below it. `match`: whatever
    has `pattern` in the name of its program or script, found again when it starts anew. `machine`: everything.
    """

    kind: str
    pid: int | None = None
    pattern: str | None = None
    owner: int | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Orders:
    """Everything a watcher needs to know; travels as one JSON line."""

    target: Target
    log: str
    limit_bytes: int
    limit_why: str
    enforced: str = "best effort"
    floating: bool = False  # nobody set the limit: it is what the machine has left, which changes
    group: dict[str, Any] | None = None
    ladder: Ladder = field(default_factory=Ladder)
    fraction: float | None = None  # of the work, for `brim forecast sampled`
    board: int | None = None
    speak: bool = True
    detached: bool = False
    aside: tuple[int, ...] = ()  # processes beside the command that are brim's own

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Orders:
        facts = json.loads(text)
        target = facts.pop("target")
        target["command"] = tuple(target["command"])
        facts["aside"] = tuple(facts["aside"])
        return cls(target=Target(**target), ladder=Ladder(**facts.pop("ladder")), **facts)

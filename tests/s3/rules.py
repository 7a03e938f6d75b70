"""Rules for faults between a client and the S3 server, matched against requests in the order of arrival."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Literal

Action = Literal["fail", "lose", "cut", "stall", "slow", "corrupt"]


@dataclass(slots=True)
class Rule:
    """A fault for the next `times` matching requests (None: all of them), after the first `skip`.

    fail     read the request's body, then answer `status` like a busy S3; the server does not get the request
    lose     the server handles the request, but the connection closes instead of the answer
    cut      the connection closes after `after_bytes` of a body
    stall    after `after_bytes` of a body no data moves for `seconds`, then it continues
    slow     a body passes at `bytes_per_s`
    corrupt  one bit of a body is flipped, `after_bytes` from its start

    "A body" is the request's if it has one, otherwise the answer's; `answer` always selects the answer's.
    A body that is not longer than `after_bytes` is unchanged.
    """

    action: Action
    times: int | None = 1
    method: str = ""
    contains: str = ""
    """Only requests whose path and query, as they are sent, contain this."""
    skip: int = 0
    answer: bool = False
    status: int = 503
    retry_after_s: int | None = None
    after_bytes: int = 0
    seconds: float = 1.0
    bytes_per_s: float = 0.0
    fired: int = 0
    seen: int = field(default=0, repr=False)

    def due(self, method: str, target: str) -> bool:
        """Return whether this request matches the rule; each call counts as one request."""
        if (self.method and method != self.method) or self.contains not in target:
            return False
        self.seen += 1
        return self.seen > self.skip and (self.times is None or self.fired < self.times)


class Rules:
    """The fault rules of a proxy. Of several rules that apply, the one added first is used."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self._lock = threading.Lock()

    def _add(self, rule: Rule) -> Rule:
        with self._lock:
            self._rules.append(rule)
        return rule

    def fail(self, status: int = 503, *, retry_after_s: int | None = None, **matching: Any) -> Rule:
        return self._add(Rule("fail", status=status, retry_after_s=retry_after_s, **matching))

    def lose(self, **matching: Any) -> Rule:
        return self._add(Rule("lose", **matching))

    def cut(self, after_bytes: int = 0, **matching: Any) -> Rule:
        return self._add(Rule("cut", after_bytes=after_bytes, **matching))

    def stall(self, seconds: float, after_bytes: int = 0, **matching: Any) -> Rule:
        return self._add(Rule("stall", seconds=seconds, after_bytes=after_bytes, **matching))

    def slow(self, bytes_per_s: float, *, times: int | None = None, **matching: Any) -> Rule:
        return self._add(Rule("slow", bytes_per_s=bytes_per_s, times=times, **matching))

    def corrupt(self, after_bytes: int = 0, **matching: Any) -> Rule:
        return self._add(Rule("corrupt", after_bytes=after_bytes, **matching))

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()

    def take(self, method: str, target: str) -> Rule | None:
        subset = None
        with self._lock:
            for rule in self._rules:
                if rule.due(method, target) and subset is None:
                    rule.fired += 1
                    subset = rule
        return subset

"""What can go wrong on the way to the S3 server: rules, matched against requests in the order in which they come."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Literal

Action = Literal["fail", "lose", "cut", "stall", "slow", "corrupt"]


@dataclass(slots=True)
class Rule:
    """One fault, for the next `times` requests that match (None: all of them), after `skip` that are let through.

    fail     read the request's body, then answer `status` as S3 does when it is busy; the server never sees it
    lose     the server does the work, but the connection closes instead of its answer
    cut      the connection closes after `after_bytes` of a body
    stall    after `after_bytes` of a body nothing moves for `seconds`, then it continues
    slow     a body passes with `bytes_per_s`
    corrupt  one bit of a body is flipped, `after_bytes` from its start

    "A body" is the request's if it has one, else the answer's; `answer` means the answer's in any case. Nothing happens
    to one that is not longer than `after_bytes`.
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
        """Whether this request falls under the rule; each call counts as one request."""
        if (self.method and method != self.method) or self.contains not in target:
            return False
        self.seen += 1
        return self.seen > self.skip and (self.times is None or self.fired < self.times)


class Rules:
    """The switches of a proxy. Of several rules that are due, the one added first fires."""

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

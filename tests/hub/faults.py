"""Faults of the test Hub: rules that are matched against requests in the order in which they arrive."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Action = Literal["status", "cut", "stall", "lose", "conflict", "answer", "garble"]


@dataclass(slots=True)
class Fault:
    """One rule: apply `action` to `times` requests of a route, from the `nth` one after the rule was added.

    status    read the body, answer `status` (with Retry-After if set) and do no work
    cut       close the connection after `after_bytes` of the request's body (of the response's for a GET)
    stall     after `after_bytes` of the body, neither read nor answer for `seconds`, then continue
    lose      do the work, then close the connection instead of answering
    answer    answer `status` with `said` as the body and do no work
    garble    do the work, then answer as for `answer`
    conflict  commit to that revision from another process first; the answer is 412
    """

    route: str
    nth: int = 1
    times: int | None = 1
    action: Action = "status"
    status: int = 503
    retry_after: float | None = None
    after_bytes: int = 0
    seconds: float = 1.0
    code: str = ""
    """What storage calls it, in the XML of its answer; for the Hub, its X-Error-Code."""
    said: str = ""
    path: str = ""
    """Only requests whose path contains this count."""
    fired: int = 0
    seen: int = field(default=0, repr=False)

    def matches(self, route: str, path: str) -> bool:
        return route == self.route and self.path in path

    def due(self) -> bool:
        return self.seen >= self.nth and (self.times is None or self.fired < self.times)


class Faults:
    """The rules of one hub. If several rules match a request, the one added first applies."""

    def __init__(self) -> None:
        self._rules: list[Fault] = []
        self._lock = threading.Lock()

    def add(
        self,
        route: str,
        *,
        nth: int = 1,
        times: int | None = 1,
        action: Action = "status",
        status: int = 503,
        retry_after: float | None = None,
        after_bytes: int = 0,
        seconds: float = 1.0,
        code: str = "",
        said: str = "",
        path: str = "",
    ) -> Fault:
        rule = Fault(route, nth, times, action, status, retry_after, after_bytes, seconds, code, said, path)
        with self._lock:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()

    def take(self, route: str, path: str) -> Fault | None:
        """Return the rule that matches this request; each call counts as one request."""
        subset = None
        with self._lock:
            for rule in self._rules:
                if rule.matches(route, path):
                    rule.seen += 1
                    if subset is None and rule.due():
                        rule.fired += 1
                        subset = rule
        return subset

    def __iter__(self) -> Iterator[Fault]:
        return iter(list(self._rules))

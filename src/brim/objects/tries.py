"""How often the same is asked for. obstore asks again by itself, but not once an answer has begun."""

from __future__ import annotations

import time

from brim.objects.failures import is_passing
from brim.objects.store import patience_s

_WAITS_S = (0.2, 1.0, 3.0)


class Tries:
    """Of one request. What obstore has asked for in vain until its patience ended is not asked for again."""

    def __init__(self) -> None:
        self._waits = iter(_WAITS_S)
        self.begin()

    def begin(self) -> None:
        """What took long was answered: the next part of it has obstore's patience anew."""
        self._until = time.monotonic() + patience_s() / 2

    def next_s(self) -> float | None:
        """How long to wait before the next try; None if there is none."""
        return next(self._waits, None) if time.monotonic() < self._until else None

    def after(self, error: BaseException) -> float | None:
        """The same, if it failed like this."""
        return self.next_s() if is_passing(error) else None

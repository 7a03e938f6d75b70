"""A forecast: what takes how much, as ranges, against a limit. It only adds and compares."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from brim.memory.limit import Limit
from brim.sizes import format_both

MODERATE_FROM = 0.70
HIGH_ABOVE = 0.90


class Verdict(StrEnum):
    """How likely the work is to run out of memory."""

    LOW = "LOW"
    MODERATE = "MODERATE"
    HIGH = "HIGH"


def verdict_of(need_bytes: float, limit_bytes: float) -> Verdict:
    """LOW below 70 % of the limit, MODERATE up to 90 %, HIGH above."""
    if need_bytes > HIGH_ABOVE * limit_bytes:
        return Verdict.HIGH
    return Verdict.MODERATE if need_bytes >= MODERATE_FROM * limit_bytes else Verdict.LOW


@dataclass(frozen=True, slots=True)
class Component:
    """One thing that takes memory. The range is what was measured or what is not known."""

    name: str
    low_bytes: int
    high_bytes: int
    why: str

    @classmethod
    def exactly(cls, name: str, size: int, why: str) -> Component:
        return cls(name, size, size, why)


@dataclass(frozen=True, slots=True)
class Reasons:
    """What speaks for a crash and what against, beyond the numbers; and what to do instead."""

    for_crash: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    better: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Forecast:
    """Components that are held at the same time. Print it; `facts` is for programs."""

    shape: str
    components: tuple[Component, ...]
    limit: Limit
    reasons: Reasons = Reasons()
    moment: str = "at the peak"
    remark: tuple[str, str] | None = None  # a line of its own, where it says more than the table
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def low_bytes(self) -> int:
        return sum(component.low_bytes for component in self.components)

    @property
    def high_bytes(self) -> int:
        return sum(component.high_bytes for component in self.components)

    @property
    def verdict(self) -> Verdict:
        """Of the high end: a forecast that may be too careful is better than one that may be too bold."""
        return verdict_of(self.high_bytes, self.limit.bytes)

    @property
    def verdict_low(self) -> Verdict:
        """Of the low end."""
        return verdict_of(self.low_bytes, self.limit.bytes)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The table and the judgement, as (label, text)."""
        rows = [(c.name, format_both(c.low_bytes, c.high_bytes), c.why) for c in self.components]
        rows.append((self.moment, format_both(self.low_bytes, self.high_bytes), "all of it together"))
        rows.append(("limit", format_both(self.limit.bytes), self.limit.reason))
        width = max(len(size) for _, size, _ in rows)
        lines = [(name, f"{size:<{width}}  {why}") for name, size, why in rows]
        if self.remark is not None:
            lines.append(self.remark)
        lines.append(("verdict", self._judgement()))
        lines += [("for a crash", text) for text in self.reasons.for_crash]
        lines += [("against", text) for text in self.reasons.against]
        lines += [("better", text) for text in self.reasons.better]
        return lines

    def _judgement(self) -> str:
        low, high = (_percent(size / self.limit.bytes) for size in (self.low_bytes, self.high_bytes))
        if self.verdict_low != self.verdict:
            return (
                f"{self.verdict} if the high end comes true ({high} % of the limit), "
                f"{self.verdict_low} if the low end does ({low} %)"
            )
        share = high if low == high else f"{low} to {high}"
        return f"{self.verdict}: {share} % of the limit"

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.lines)
        return "\n".join(f"{label:>{width}}  {text}" for label, text in self.lines)

    @property
    def facts(self) -> dict[str, Any]:
        """The forecast for programs."""
        return {
            "shape": self.shape,
            "components": [
                {"name": c.name, "low_bytes": c.low_bytes, "high_bytes": c.high_bytes, "why": c.why}
                for c in self.components
            ],
            "low_bytes": self.low_bytes,
            "high_bytes": self.high_bytes,
            "limit_bytes": self.limit.bytes,
            "limit_reason": self.limit.reason,
            "verdict": str(self.verdict),
            "verdict_low": str(self.verdict_low),
            "for_crash": list(self.reasons.for_crash),
            "against": list(self.reasons.against),
            "better": list(self.reasons.better),
            **self.details,
        }


def _percent(share: float) -> str:
    """With a decimal where rounding would move it onto a verdict's border."""
    near = min(abs(share - MODERATE_FROM), abs(share - HIGH_ABOVE)) < 0.005
    return f"{100 * share:,.{1 if near else 0}f}"

"""Format curves and times of runs for the terminal and the report."""

from __future__ import annotations

import time
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(points: Sequence[tuple[float, float]], width: int = 60, top: float = 0.0) -> str:
    """Draw the highest value of each span of time as a bar; `top` is the value of a full bar."""
    if not points:
        return ""
    start, end = points[0][0], points[-1][0]
    span = (end - start) / width or 1.0
    highest: list[float | None] = [None] * width
    for when, size in points:
        number = min(int((when - start) / span), width - 1)
        highest[number] = max(highest[number] or 0.0, size)
    top = max(top, max(size for _, size in points), 1.0)
    bars, last = [], 0.0
    for value in highest:
        last = last if value is None else value
        bars.append(_BARS[min(int(last / top * len(_BARS)), len(_BARS) - 1)])
    return "".join(bars)


def stamp(seconds: float) -> str:
    """Format a time since the start: "4.2 s", "7:35 min", "1:02:03 h", "4 d 1:02 h"."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, remainder = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24}:{minutes:02d} h"
    return f"{hours}:{minutes:02d}:{remainder:02d} h" if hours else f"{minutes}:{remainder:02d} min"


def date_time(t: float | None) -> str:
    """Format a time of day, in the zone of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t)) if t is not None else "an unknown time"


def percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %" if ratio >= 0.0095 or ratio <= 0 else f"{100 * ratio:.1f} %"

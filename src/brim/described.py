"""Plans, forecasts and results as people see them: lines of a label and a text, in a notebook a table."""

from __future__ import annotations

import html

from brim.wording import worded


class Described:
    """Has `lines`. Printed and as the value of a cell it is those, not what a program would want to know."""

    __slots__ = ()
    label_width = 0  # at least

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Labels and texts, for people."""
        raise NotImplementedError

    def __str__(self) -> str:
        width = max([self.label_width, *(len(label) for label, _ in self.lines)])
        return "\n".join(f"{label:>{width}}  {worded(text)}" for label, text in self.lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align:right;vertical-align:top">{html.escape(label)}</th>'
            f'<td style="text-align:left;white-space:pre-wrap">{html.escape(worded(text))}</td></tr>'
            for label, text in self.lines
        )
        return f"<table>{rows}</table>"

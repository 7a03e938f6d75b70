"""Recognize log lines by tables of phrases.

A phrase is a row `(needle, pattern, template)`: a line must contain the needle, the pattern finds the values, and the
template is the kill that it reports. To support another log format, add rows to `service_phrases` or
`program_phrases` and a fixture with a public sample.

Groups of a pattern that are named like a field set that field (see `_SIZE_FIELDS` and `fill`); all groups can be used
in the texts of the template: `{unit}`, or `{name|id}` for the first of two that matched.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Literal

from brim.monitor.oom.kills import Evidence, Job, Kill
from brim.monitor.oom.log_lines import Clock
from brim.monitor.oom.merge_kills import combine
from brim.records import dataclass
from brim.redact import redact
from brim.sizes import format_size

# kill: it reports a kill. context: it adds to the next kill of the same killer. detail: it adds to the previous
# kill of the same killer, or to the next one.
Role = Literal["kill", "context", "detail"]
NEAR_LINES = 60
_CLOSE_LINES = 5
_QUOTED = 300
_SIGNALS = {"KILL": 9, "SIGKILL": 9, "TERM": 15, "SIGTERM": 15}
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_AMOUNT = re.compile(r"\s*([\d.]+)\s*([KMGTP]?)(i?)B?", re.I)
_ALTERNATIVES = re.compile(r"\{([\w|]+)\}")
# group: (part of the kill, field). A suffix fixes the unit: rss_mib, limit_kib; `_binary` reads "4 GB" as 4 GiB.
_SIZE_FIELDS = {
    "rss": ("sizes", "rss_bytes"),
    "anon": ("sizes", "anon_bytes"),
    "file": ("sizes", "file_bytes"),
    "shmem": ("sizes", "shmem_bytes"),
    "swapped": ("sizes", "swap_bytes"),
    "limit": ("bound", "bytes"),
    "usage": ("bound", "usage_bytes"),
    "requested": ("bound", "requested_bytes"),
    "ram": ("room", "ram_bytes"),
    "available": ("room", "available_bytes"),
    "swap": ("room", "swap_bytes"),
    "swapfree": ("room", "swap_free_bytes"),
    "swapinuse": ("text", ""),  # only in texts
}
_SUFFIXES = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "gb": 10**9}


@dataclass(frozen=True, slots=True)
class Phrase:
    """One wording of a log line."""

    needle: str
    pattern: re.Pattern[str]
    template: Kill
    role: Role = "kill"
    reach: int = NEAR_LINES  # lines between a context or detail and its kill
    signal: int | None = None  # a context or detail only of kills by this signal
    needs_context: bool = False  # alone it proves nothing


def table(role: Role, *rows: tuple[str, str, Kill]) -> list[Phrase]:
    """Make phrases of rows `(needle, pattern, template)`."""
    return [Phrase(needle, re.compile(pattern), template, role) for needle, pattern, template in rows]


_JOB_COMMANDS: list[tuple[str, Job]] = [
    (r"tokeni[sz]e", "tokenize"),
    (r"embed|encode", "embed"),
    (r"push_to_hub|to_parquet|upload", "build"),
]


def called_job(command: str | None) -> Job | None:
    """Return the kind of work that a command line names."""
    return next((job for pattern, job in _JOB_COMMANDS if re.search(pattern, command or "", re.I)), None)


def parse_amount(text: str, suffix: str = "") -> int | None:
    """Return the bytes of "12345", "22.62 GiB", "16Gi" or "5.5 GB"; None if the text is not an amount."""
    match = _AMOUNT.match(text)
    try:
        number = float(match[1]) if match else float("inf")
        if match is None or number > 1e18:
            return None
        if suffix in _SUFFIXES:
            return round(number * _SUFFIXES[suffix])
        base = 1024 if match[3] or suffix == "binary" else 1000
        return round(number * float(base) ** _UNITS[match[2].lower()])
    except (ValueError, KeyError):
        return None


def _group_values(match: re.Match[str]) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """Return the texts of the groups, and the sizes by the part of the kill that they belong to."""
    texts: dict[str, str] = {}
    parts: dict[str, dict[str, int]] = {"sizes": {}, "bound": {}, "room": {}, "text": {}}
    for group, text in match.groupdict().items():
        if text is None:
            continue
        name, _, suffix = group.rstrip("0123456789").partition("_")
        if name in _SIZE_FIELDS and (amount := parse_amount(text, suffix)) is not None:
            part, field = _SIZE_FIELDS[name]
            parts[part].setdefault(field, amount)
            texts[name] = format_size(amount)
        else:
            texts[group.rstrip("0123456789")] = text.strip()
    if (ram := parts["room"].get("ram_bytes")) is not None:
        if "fraction" in texts:
            parts["bound"]["bytes"] = round(ram * float(texts["fraction"]))
        if "usage_bytes" in parts["bound"]:
            parts["room"]["available_bytes"] = ram - parts["bound"]["usage_bytes"]
    return texts, parts


def fill(template: Kill, match: re.Match[str], clock: Clock) -> Kill:
    """Return the kill that a line reports: the template with the values of the groups."""
    texts, parts = _group_values(match)

    def expand(text: str) -> str:
        return _ALTERNATIVES.sub(
            lambda names: next((texts[name] for name in names[1].split("|") if texts.get(name)), ""), text
        )

    values: dict[str, Any] = {}
    for field in ("pid", "uid", "count"):
        if texts.get(field, "").isdigit():
            values[field] = int(texts[field])
    for field in ("name", "host"):
        if texts.get(field):
            values[field] = texts[field]
    if texts.get("command") and texts["command"] != "...":
        values["command"] = redact(texts["command"])
        program = next((word for word in texts["command"].split() if "=" not in word), "")
        values.setdefault("name", program.rsplit("/", 1)[-1] or None)
        values["job"] = called_job(texts["command"])
    if signal := texts.get("signal"):
        values["signal"] = int(signal) if signal.isdigit() else _SIGNALS.get(signal)
        values["effect"] = "killed" if values["signal"] == 9 else "asked to end"
    if timestamp := texts.get("epoch"):
        values["when"] = datetime.fromtimestamp(int(timestamp), UTC).astimezone()
    elif timestamp := texts.get("finished"):
        values["when"] = clock.stamp(timestamp).when
    unit = texts.get("unit")
    if template.unit and all(any(map(texts.get, names.split("|"))) for names in _ALTERNATIVES.findall(template.unit)):
        unit = expand(template.unit)
    bound = replace(
        template.bound,
        **parts["bound"],
        group=texts.get("group") or template.bound.group,
        task_group=texts.get("task_group") or template.bound.task_group,
        kind=expand(template.bound.kind),
        text=expand(template.bound.text),
    )
    sizes = replace(template.sizes, **parts["sizes"]) if parts["sizes"] else template.sizes
    machine = replace(template.room, **parts["room"]) if parts["room"] else template.room
    return replace(
        template, **values, unit=unit, reason=expand(template.reason), bound=bound, sizes=sizes, room=machine
    )


_STAMP = re.compile(r"\d\d:\d\d:\d\d|\[\s*\d+\.\d+\]")
_CODE = re.compile(
    r"""\s*(?://|/\*|\*\s|\#\s|<!--|;;|--\s|[-*]\s["'`]|\(["']|(?:print|printf|assert|echo|raise|except|logger|log|re"""
    r"""|return(?! code| exit)|grep|if|for|with|def|self|const|let|var|case|expect|e\.g)[ (.])"""
)
_OPEN_QUOTE = re.compile(r"""(?<![=:\]])\s?["'`“‘«]$|(?:^|[\s(\[,])["'`]$""")
_FIELD = re.compile(r"""[\w"']\s*[=:]\s*["']$|\]\s+"$""")  # msg="…, "log":"…, klog's file.go:47] "…
_PROSE = re.compile(r"(?:\b[a-z]{2,}[ ,]+){4,}[\"'`(]?$")


def is_quotation(text: str, start: int) -> bool:
    """Return whether a phrase that begins at `start` is quoted by prose or source code instead of being logged."""
    before = text[:start]
    if _CODE.match(text):
        return True
    if _STAMP.search(before) or _FIELD.search(before):
        return False
    return bool(_OPEN_QUOTE.search(before) or _PROSE.search(before))


class PhraseReader:
    """Collects the kills that one log reports, by the phrases of a table."""

    def __init__(self, table: Sequence[Phrase], source: str, clock: Clock) -> None:
        self.source, self.clock = source, clock
        self.kills: list[Kill] = []
        self._table = table
        self._context: dict[tuple[str, int], tuple[int, Phrase, Kill]] = {}  # by killer and reach

    def read(self, number: int, text: str) -> bool:
        """Read one line; return whether it reports a kill."""
        for phrase in self._table:
            if phrase.needle not in text or (match := phrase.pattern.search(text)) is None:
                continue
            if is_quotation(text, match.start()) or (phrase.needs_context and not self._has_context(number, phrase)):
                continue
            kill, stamp = fill(phrase.template, match, self.clock), self.clock.stamp(text)
            quote = Evidence(self.source, number, redact(text.strip()[:_QUOTED]))
            kill = replace(
                kill,
                when=kill.when or stamp.when,
                boot_s=stamp.boot_s,
                host=kill.host or stamp.host,
                evidence=() if phrase.role == "context" else (quote,),
            )
            if phrase.role == "context":
                self._remember(number, phrase, kill)
                continue  # it may report a kill as well
            if phrase.role == "kill":
                self.kills.append(self._with_context(number, kill))
                return True
            last = self.kills[-1] if self.kills else None
            if (
                last is None
                or number - (last.evidence[-1].line or 0) > phrase.reach
                or not _extends(phrase, kill, last)
            ):
                self._remember(number, phrase, kill)
            else:
                self.kills[-1] = combine(last, kill)
                return False
        return False

    def _has_context(self, number: int, phrase: Phrase) -> bool:
        return any(
            killer == phrase.template.killer and number - context_line <= min(context.reach, _CLOSE_LINES)
            for (killer, _), (context_line, context, _) in self._context.items()
        )

    def _with_context(self, number: int, kill: Kill) -> Kill:
        for key, (context_line, phrase, context) in list(self._context.items()):
            if not _extends(phrase, context, kill):
                continue
            if number - context_line <= phrase.reach:
                effect, signal = kill.effect, kill.signal
                kill = combine(kill, context)
                if phrase.role == "context":
                    kill = replace(kill, effect=effect, signal=signal)
            if phrase.reach <= NEAR_LINES:  # it was about this kill; the kind of work stays the same for the whole log
                del self._context[key]
        return kill

    def _remember(self, number: int, phrase: Phrase, kill: Kill) -> None:
        key = kill.killer, phrase.reach
        context_line, _, context = self._context.get(key, (-phrase.reach - 1, phrase, kill))
        if number - context_line <= phrase.reach:
            kill = combine(kill, context)
        self._context[key] = number, phrase, kill


def _extends(phrase: Phrase, detail: Kill, kill: Kill) -> bool:
    if detail.killer != kill.killer or (phrase.signal is not None and kill.signal != phrase.signal):
        return False
    return detail.unit is None or kill.unit is None or detail.unit == kill.unit

"""Out-of-memory records of the kernel, from a stream of lines.

A record is a header ("invoked oom-killer"), what was full, a table of processes and the line that says what
was killed. Any part may be missing: header and table are rate-limited, logs are cut, and lines of other
machines may stand between. So the line "Killed process" makes a kill by itself, and the rest is added where
it certainly belongs: by process id, or because only one record was open. What cannot be told apart is left out.
"""

from __future__ import annotations

from dataclasses import replace

from brim.oom import kernel_lines as lines
from brim.oom.kernel_record import Announced, Record, assemble, take
from brim.oom.kills import Evidence, Kill, Scope, Sizes
from brim.oom.log_lines import Clock, Stamp
from brim.redact import redact

NEEDLES = (
    b"oom",
    b"illed process ",
    b"ill process ",
    b"killed as a result of limit",
    b"no killable",
    b"memory: usage ",
    b"Manual OOM execution",
)
_NEAR_S = 10.0  # the kernel writes a record within a second; a console that is slow takes longer
_STALE_LINES = 20_000
_MOST_OPEN = 16
_QUOTED = 500
_ALONE = "only the line with the victim was found"


class KernelRecords:
    """Feed it lines; `kills` grows. `finish()` gives what was announced and never confirmed."""

    def __init__(self, source: str, clock: Clock) -> None:
        self.source, self.clock = source, clock
        self.kills: list[Kill] = []
        self._records: dict[str, list[Record]] = {}  # by machine
        self._announced: dict[str, dict[tuple[int, bool], Announced]] = {}
        self._alone: list[Stamp] = []  # kills that no record could be found for
        self._host, self._number = "", 0

    @property
    def busy(self) -> bool:
        """Whether lines that tell nothing by themselves may belong to something."""
        return any(
            not record.kills and self._number - record.number <= _STALE_LINES
            for records in self._records.values()
            for record in records
        )

    def feed(self, number: int, text: str) -> None:
        """Take a line in; whatever it is, this does not raise."""
        self._number = number
        if "oom" not in text and "ill" not in text and "emory" not in text:
            if self.busy:
                self._detail(number, text)
        elif (at := text.find("invoked oom-killer:")) >= 0:
            self._begin(number, text, lines.invoker_name(text[:at]), asked_for=", order=-1," in text)
        elif "memory: usage " in text and not self._near(self.clock.stamp(text), number) and lines.USAGE.search(text):
            self._begin(number, text, None)  # the header is missing: a log that was cut, or rate-limited
            self._detail(number, text)
        elif "Killed process " in text and (victim := lines.killed(text)):
            self._kill(number, text, victim)
        elif not self._announce(number, text) and not self._other(number, text) and self.busy:
            self._detail(number, text)

    def finish(self) -> list[Kill]:
        for host, announced in self._announced.items():
            for entry in list(announced.values()):
                self._unconfirmed(host, entry)
        for records in self._records.values():
            for record in records:
                self._abandon(record)
        self._records.clear()
        self._announced.clear()
        return self.kills

    def _begin(self, number: int, text: str, invoked_by: str | None, asked_for: bool = False) -> None:
        stamp = self.clock.stamp(text)
        records = self._records.setdefault(stamp.host or "", [])
        records[:] = [record for record in records if not record.kills]
        if len(records) >= _MOST_OPEN:
            self._abandon(records.pop(0))
        quotes = [self._quote(number, text)] if invoked_by is not None else []
        records.append(Record(stamp, number, invoked_by, quotes=quotes, asked_for=asked_for))

    def _near(self, stamp: Stamp, number: int) -> list[Record]:
        """The records of a line's machine that it may belong to."""
        records = self._records.get(stamp.host or "", [])
        return [record for record in records if _is_near(record.stamp, record.number, stamp, number)]

    def _announce(self, number: int, text: str) -> bool:
        match = lines.OOM_KILL.search(text) if "oom-kill:" in text else None
        if match is None:
            match = lines.CHOSEN.search(text) if "ill process " in text else None
            if match is None:
                return False
            scope, limit, task, is_choice, note = lines.scope_of(match["cause"]), None, None, True, ""
        else:
            limit, task, is_choice = match["limit"], match["task_group"], False
            scope = "cgroup" if limit else "machine" if match["global"] else "unknown"
            note = lines.node_note(match["constraint"], match["nodes"])
        stamp = self.clock.stamp(text)
        announced = Announced(
            int(match["pid"]),
            match["name"],
            scope,
            limit,
            task,
            stamp,
            number,
            self._quote(number, text),
            is_choice,
            note,
        )
        self._announced.setdefault(stamp.host or "", {})[announced.pid, is_choice] = announced
        for record in self._near(stamp, number)[-1:]:
            record.stats_of = None
        return True

    def _other(self, number: int, text: str) -> bool:
        """Lines that stand for something by themselves, but neither begin nor end a record."""
        if match := lines.REAPED.search(text):
            for index in range(len(self.kills) - 1, max(len(self.kills) - 20, -1), -1):
                if self.kills[index].pid == int(match["pid"]):
                    self._add_quote(index, self._quote(number, text))
                    break
        elif match := lines.GROUP_KILL.search(text):
            for record in self._near(self.clock.stamp(text), number)[-1:]:
                record.whole_group = True
                record.limit_group = record.limit_group or match["group"]
        elif lines.NOBODY.search(text):
            stamp = self.clock.stamp(text)
            self.kills.append(
                Kill(
                    "kernel",
                    "machine",
                    "refused",
                    "likely",
                    "the kernel says that it found nothing to kill",
                    when=stamp.when,
                    boot_s=stamp.boot_s,
                    host=stamp.host,
                    notes=("Nothing could be killed. The kernel usually stops the machine after this.",),
                    evidence=(self._quote(number, text),),
                )
            )
        else:
            return False
        return True

    def _detail(self, number: int, text: str) -> None:
        """A line that belongs to the newest open record of its machine."""
        stamp = self.clock.stamp(text)
        if text.startswith((" ", "\t")):  # the second line of a message has no prefix to say whose it is
            stamp = Stamp(host=self._host)
        self._host = stamp.host or ""
        records = [record for record in self._near(stamp, number) if not record.kills]
        if not records:
            return
        record = records[-1]
        if told := take(record, text):
            record.tangled = record.tangled or len(records) > 1
            record.number = number
            if stamp.when is not None or stamp.boot_s is not None:
                record.stamp = stamp
            if told == "quote":
                record.quotes.append(self._quote(number, text))

    def _kill(self, number: int, text: str, victim: lines.Killed) -> None:
        stamp = self.clock.stamp(text)
        announced = self._announced.setdefault(stamp.host or "", {})
        for entry in [announced.get((victim.pid, False)), announced.get((victim.pid, True))]:
            if entry is not None and not _is_near(entry.stamp, entry.number, stamp, number):
                self._unconfirmed(stamp.host or "", entry)  # long ago: another process of that number
        spoken = announced.pop((victim.pid, False), None)
        choice = announced.pop((victim.pid, True), None)
        replaced = None
        if choice is None:
            choices = [
                entry
                for entry in announced.values()
                if entry.is_choice and _is_near(entry.stamp, entry.number, stamp, number)
            ]
            if len(choices) == 1:
                replaced = choice = choices[0]
                del announced[choice.pid, True]
        record = _record_of(self._near(stamp, number), victim.pid, replaced.pid if replaced else None)
        kill = assemble(victim, spoken, choice, record)
        if replaced is not None:
            note = f"The kernel chose process {replaced.pid} ({replaced.name}) and killed {victim.pid} in its place."
            kill = replace(kill, chosen_pid=replaced.pid, notes=(*kill.notes, note))
        quotes = [q for q in (spoken and spoken.quote, choice and choice.quote, self._quote(number, text)) if q]
        before = record.quotes if record is not None else []
        self.kills.append(
            replace(
                kill,
                reason="the kernel's record names the victim" if record or spoken or choice else _ALONE,
                when=stamp.when,
                boot_s=stamp.boot_s,
                host=stamp.host,
                evidence=(*before, *quotes),
            )
        )
        if record is not None:
            record.kills += 1
        else:
            self._alone.append(stamp)

    def _abandon(self, record: Record) -> None:
        """A record that nobody was killed by, as far as the log goes."""
        if record.kills or self._is_explained(record):
            return
        scope: Scope = "cgroup" if record.limit_group or record.usages else "unknown"
        bare = assemble(lines.Killed(-1, None, None, scope, Sizes()), None, None, record)
        self.kills.append(
            replace(
                bare,
                pid=None,
                sure="likely",
                reason="the record is cut before the line that names the victim",
                when=record.stamp.when,
                boot_s=record.stamp.boot_s,
                host=record.stamp.host,
                evidence=tuple(record.quotes),
            )
        )

    def _is_explained(self, record: Record) -> bool:
        """Whether one of the kills that stand alone was this record's, though nobody can say which."""
        for stamp in self._alone:
            gap = record.stamp.seconds_to(stamp)
            if gap is None or abs(gap) <= _NEAR_S:
                self._alone.remove(stamp)
                return True
        return False

    def _unconfirmed(self, host: str, entry: Announced) -> None:
        """A victim that was named, and whose last line is missing."""
        announced = self._announced.get(host, {})
        announced.pop((entry.pid, entry.is_choice), None)
        twin = announced.pop((entry.pid, not entry.is_choice), None)
        record = _record_of(self._near(entry.stamp, entry.number), entry.pid, None)
        victim = lines.Killed(entry.pid, entry.name, None, entry.scope, Sizes())
        spoken, choice = (twin, entry) if entry.is_choice else (entry, twin)
        self.kills.append(
            replace(
                assemble(victim, spoken, choice, record),
                sure="likely",
                reason="the kernel named it as the victim; the line that says it was killed is missing",
                when=entry.stamp.when,
                boot_s=entry.stamp.boot_s,
                host=entry.stamp.host,
                evidence=(*(record.quotes if record else ()), *([twin.quote] if twin else ()), entry.quote),
            )
        )
        if record is not None:
            record.kills += 1

    def _add_quote(self, index: int, quote: Evidence) -> None:
        self.kills[index] = replace(self.kills[index], evidence=(*self.kills[index].evidence, quote))

    def _quote(self, number: int, text: str) -> Evidence:
        return Evidence(self.source, number, redact(text.strip()[:_QUOTED]))


def _is_near(then: Stamp, line: int, now: Stamp, number: int) -> bool:
    gap = then.seconds_to(now)
    return abs(number - line) <= _STALE_LINES and (gap is None or abs(gap) <= _NEAR_S)


def _record_of(records: list[Record], pid: int, chosen: int | None) -> Record | None:
    """The record that a victim belongs to, if that is beyond doubt."""
    unfinished = [record for record in records if not record.kills]
    for record in reversed(unfinished):
        rows = record.table.rows if record.table and not record.tangled else {}
        if pid in rows or chosen in rows:
            return record
    if len(unfinished) == 1:
        return unfinished[0]
    if not unfinished and records and records[-1].whole_group:
        return records[-1]
    return None

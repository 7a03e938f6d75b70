"""Read the kernel's out-of-memory records from a stream of lines.

A record is a header ("invoked oom-killer"), the limit that was reached, a process table and "Killed process …".
Any part may be missing: header and table are rate-limited, logs are cut, and lines of other machines may be in between.
So "Killed process …" alone makes a kill. Other lines are added if they certainly belong to it, by process id or
because only one record was open; ambiguous values are left out.
"""

from __future__ import annotations

from dataclasses import replace

from brim.monitor.oom import kernel_lines as lines
from brim.monitor.oom.kernel_record import Announced, Record, assemble, take
from brim.monitor.oom.kills import Evidence, Kill, Scope, Sizes
from brim.monitor.oom.log_lines import Clock, Stamp
from brim.monitor.oom.phrases import is_quotation
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
_ONLY_VICTIM = "the kernel logged the kill; the rest of the record is missing"


class KernelRecords:
    """Collects kills from lines; `finish()` adds victims that were announced and not confirmed."""

    def __init__(self, source: str, clock: Clock) -> None:
        self.source, self.clock = source, clock
        self.kills: list[Kill] = []
        self._records: dict[str, list[Record]] = {}  # by machine
        self._announced: dict[str, dict[tuple[int, bool], Announced]] = {}
        self._unmatched: list[Stamp] = []  # kills without a record
        self._host, self._number = "", 0

    @property
    def busy(self) -> bool:
        """Whether a record is open, to which any line may belong."""
        return any(
            not record.kills and self._number - record.number <= _STALE_LINES
            for records in self._records.values()
            for record in records
        )

    def read(self, number: int, text: str) -> bool:
        """Read one line of any content; return whether it completes a kill."""
        count = len(self.kills)
        self._read(number, text)
        return len(self.kills) > count

    def _read(self, number: int, text: str) -> None:
        self._number = number
        if "oom" not in text and "ill" not in text and "emory" not in text:
            if self.busy:
                self._detail(number, text)
        elif (start := text.find("invoked oom-killer:")) >= 0:
            if not is_quotation(text, start):
                self._open(number, text, lines.invoker_name(text[:start]), asked_for=", order=-1," in text)
        elif (
            "memory: usage " in text
            and not self._open_records(self.clock.stamp(text), number)
            and lines.USAGE.search(text)
        ):
            self._open(number, text, None)  # the header is missing: the log was cut or rate-limited
            self._detail(number, text)
        elif "Killed process " in text and (victim := lines.parse_killed(text)):
            self._kill(number, text, victim)
        elif not self._announce(number, text) and not self._follow_up(number, text) and self.busy:
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

    def _open(self, number: int, text: str, invoked_by: str | None, asked_for: bool = False) -> None:
        stamp = self.clock.stamp(text)
        records = self._records.setdefault(stamp.host or "", [])
        records[:] = [record for record in records if not record.kills]
        if len(records) >= _MOST_OPEN:
            self._abandon(records.pop(0))
        quotes = [self._quote(number, text)] if invoked_by is not None else []
        records.append(Record(stamp, number, invoked_by, quotes=quotes, asked_for=asked_for))

    def _open_records(self, stamp: Stamp, number: int) -> list[Record]:
        """Return the records that a line may belong to: those of its machine, written shortly before."""
        records = self._records.get(stamp.host or "", [])
        return [record for record in records if _is_close(record.stamp, record.number, stamp, number)]

    def _announce(self, number: int, text: str) -> bool:
        spoken = lines.OOM_KILL.search(text) if "oom-kill:" in text else None
        match = spoken or (lines.SELECTED_VICTIM.search(text) if "ill process " in text else None)
        if match is None or is_quotation(text, match.start()):
            return False
        if spoken is None:
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
        for record in self._open_records(stamp, number)[-1:]:
            record.stats_of = None
        return True

    def _follow_up(self, number: int, text: str) -> bool:
        """Handle lines outside of a record: a reaped victim, a kill of a whole group, no victim."""
        if match := lines.REAPED.search(text):
            for index in range(len(self.kills) - 1, max(len(self.kills) - 20, -1), -1):
                if self.kills[index].pid == int(match["pid"]):
                    self._add_quote(index, self._quote(number, text))
                    break
        elif match := lines.GROUP_KILL.search(text):
            for record in self._open_records(self.clock.stamp(text), number)[-1:]:
                record.whole_group = True
                record.limit_group = record.limit_group or match["group"]
        elif lines.NO_VICTIM.search(text):
            stamp = self.clock.stamp(text)
            self.kills.append(
                Kill(
                    "kernel",
                    "machine",
                    "refused",
                    "likely",
                    "the kernel logged that it found no process to kill",
                    when=stamp.when,
                    boot_s=stamp.boot_s,
                    host=stamp.host,
                    notes=("No process could be killed. The kernel usually stops the machine after this.",),
                    evidence=(self._quote(number, text),),
                )
            )
        else:
            return False
        return True

    def _detail(self, number: int, text: str) -> None:
        """Add a line to the newest open record of its machine."""
        stamp = self.clock.stamp(text)
        if text.startswith((" ", "\t")):  # the second line of a message has no prefix with a host
            stamp = Stamp(host=self._host)
        self._host = stamp.host or ""
        records = [record for record in self._open_records(stamp, number) if not record.kills]
        if not records:
            return
        record = records[-1]
        if kind := take(record, text):
            record.tangled = record.tangled or len(records) > 1
            record.number = number
            if stamp.when is not None or stamp.boot_s is not None:
                record.stamp = stamp
            if kind == "quote":
                record.quotes.append(self._quote(number, text))

    def _kill(self, number: int, text: str, victim: lines.Killed) -> None:
        stamp = self.clock.stamp(text)
        announced = self._announced.setdefault(stamp.host or "", {})
        for entry in [announced.get((victim.pid, False)), announced.get((victim.pid, True))]:
            if entry is not None and not _is_close(entry.stamp, entry.number, stamp, number):
                self._unconfirmed(stamp.host or "", entry)  # long ago: another process with that number
        spoken = announced.pop((victim.pid, False), None)
        choice = announced.pop((victim.pid, True), None)
        replaced = None
        if choice is None:
            choices = [
                entry
                for entry in announced.values()
                if entry.is_choice and _is_close(entry.stamp, entry.number, stamp, number)
            ]
            if len(choices) == 1:
                replaced = choice = choices[0]
                del announced[choice.pid, True]
        record = _record_of(self._open_records(stamp, number), victim.pid, replaced.pid if replaced else None)
        kill = assemble(victim, spoken, choice, record)
        if replaced is not None:
            note = f"The kernel selected process {replaced.pid} ({replaced.name}); it killed {victim.pid} in its place."
            kill = replace(kill, chosen_pid=replaced.pid, notes=(*kill.notes, note))
        quotes = [q for q in (spoken and spoken.quote, choice and choice.quote, self._quote(number, text)) if q]
        before = record.quotes if record is not None else []
        self.kills.append(
            replace(
                kill,
                reason="the kernel's record names the victim" if record or spoken or choice else _ONLY_VICTIM,
                when=stamp.when,
                boot_s=stamp.boot_s,
                host=stamp.host,
                evidence=(*before, *quotes),
            )
        )
        if record is not None:
            record.kills += 1
        else:
            self._unmatched.append(stamp)

    def _abandon(self, record: Record) -> None:
        """Add the kill of a record without a victim."""
        if record.kills or self._has_kill(record):
            return
        scope: Scope = "cgroup" if record.limit_group or record.usages else "unknown"
        bare = assemble(lines.Killed(-1, None, None, scope, Sizes()), None, None, record)
        self.kills.append(
            replace(
                bare,
                pid=None,
                sure="likely",
                reason="the record ends before its victim is named",
                when=record.stamp.when,
                boot_s=record.stamp.boot_s,
                host=record.stamp.host,
                evidence=tuple(record.quotes),
            )
        )

    def _has_kill(self, record: Record) -> bool:
        """Return whether one of the kills without a record was shortly after this one."""
        for stamp in self._unmatched:
            gap = record.stamp.seconds_to(stamp)
            if gap is None or abs(gap) <= _NEAR_S:
                self._unmatched.remove(stamp)
                return True
        return False

    def _unconfirmed(self, host: str, entry: Announced) -> None:
        """Add a victim that was announced, and whose line "Killed process" is missing."""
        announced = self._announced.get(host, {})
        announced.pop((entry.pid, entry.is_choice), None)
        second = announced.pop((entry.pid, not entry.is_choice), None)
        record = _record_of(self._open_records(entry.stamp, entry.number), entry.pid, None)
        victim = lines.Killed(entry.pid, entry.name, None, entry.scope, Sizes())
        spoken, choice = (second, entry) if entry.is_choice else (entry, second)
        self.kills.append(
            replace(
                assemble(victim, spoken, choice, record),
                sure="likely",
                reason="the kernel selected this process; the confirmation of the kill is missing",
                when=entry.stamp.when,
                boot_s=entry.stamp.boot_s,
                host=entry.stamp.host,
                evidence=(*(record.quotes if record else ()), *([second.quote] if second else ()), entry.quote),
            )
        )
        if record is not None:
            record.kills += 1

    def _add_quote(self, index: int, quote: Evidence) -> None:
        self.kills[index] = replace(self.kills[index], evidence=(*self.kills[index].evidence, quote))

    def _quote(self, number: int, text: str) -> Evidence:
        return Evidence(self.source, number, redact(text.strip()[:_QUOTED]))


def _is_close(then: Stamp, earlier_number: int, now: Stamp, number: int) -> bool:
    gap = then.seconds_to(now)
    return abs(number - earlier_number) <= _STALE_LINES and (gap is None or abs(gap) <= _NEAR_S)


def _record_of(records: list[Record], pid: int, chosen_pid: int | None) -> Record | None:
    """Return the record that a victim certainly belongs to."""
    unfinished = [record for record in records if not record.kills]
    for record in reversed(unfinished):
        rows = record.table.rows if record.table and not record.tangled else {}
        if pid in rows or chosen_pid in rows:
            return record
    if len(unfinished) == 1:
        return unfinished[0]
    if not unfinished and records and records[-1].whole_group:
        return records[-1]
    return None

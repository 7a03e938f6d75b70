"""Read the kernel's out-of-memory records from a stream of lines.

A record is a header ("invoked oom-killer"), the limit that was reached, a process table and "Killed process …".
Any part may be missing: header and table are rate-limited, logs are cut, and lines of other machines may be in between.
So "Killed process …" alone makes a kill. Other lines are added if they certainly belong to it, by process id or
because only one record was open; ambiguous values are left out.
"""

from __future__ import annotations

from dataclasses import replace

from brim.monitor.oom import kernel_record as patterns
from brim.monitor.oom.kernel_record import Announced, Record, assemble, parse_killed, take
from brim.monitor.oom.kills import Evidence, Kill, Scope, Sure
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
        count, self._number = len(self.kills), number
        if "oom" not in text and "ill" not in text and "emory" not in text:
            if self.busy:
                self._add_detail(number, text)
        elif (start := text.find("invoked oom-killer:")) >= 0:
            if not is_quotation(text, start):
                self._open(number, text, patterns.invoker_name(text[:start]), asked_for=", order=-1," in text)
        elif (
            "memory: usage " in text
            and not self._open_records(self.clock.stamp(text), number)
            and patterns.USAGE.search(text)
        ):
            self._open(number, text, None)  # the header is missing: the log was cut or rate-limited
            self._add_detail(number, text)
        elif "Killed process " in text and (victim := parse_killed(text)):
            self._add_victim(number, text, victim)
        elif not self._announce(number, text) and not self._follow_up(number, text) and self.busy:
            self._add_detail(number, text)
        return len(self.kills) > count

    def finish(self) -> list[Kill]:
        for host, announced in self._announced.items():
            for entry in list(announced.values()):
                self._add_unconfirmed(host, entry)
        for records in self._records.values():
            for record in records:
                self._abandon(record)
        self._records.clear()
        self._announced.clear()
        return self.kills

    def _add_kill(
        self, kill: Kill, stamp: Stamp, quotes: tuple[Evidence, ...], reason: str, sure: Sure = "certain"
    ) -> None:
        kill = replace(kill, when=stamp.when, boot_s=stamp.boot_s, host=stamp.host)
        self.kills.append(replace(kill, reason=reason, sure=sure, evidence=quotes))

    def _quote(self, number: int, text: str) -> Evidence:
        return Evidence(self.source, number, redact(text.strip()[:_QUOTED]))

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
        """Read the line that names a victim before the kill; return whether it is one."""
        spoken = patterns.OOM_KILL.search(text) if "oom-kill:" in text else None
        match = spoken or (patterns.SELECTED_VICTIM.search(text) if "ill process " in text else None)
        if match is None or is_quotation(text, match.start()):
            return False
        limit = task = None
        scope, note = patterns.scope_of(match["cause"]) if spoken is None else "unknown", ""
        if spoken is not None:
            limit, task = match["limit"], match["task_group"]
            scope = "cgroup" if limit else "machine" if match["global"] else "unknown"
            note = patterns.node_note(match["constraint"], match["nodes"])
        stamp, pid, is_choice, quote = (
            self.clock.stamp(text),
            int(match["pid"]),
            spoken is None,
            self._quote(number, text),
        )
        entry = Announced(pid, match["name"], scope, limit, task, stamp, number, quote, is_choice, note)
        self._announced.setdefault(stamp.host or "", {})[pid, is_choice] = entry
        for record in self._open_records(stamp, number)[-1:]:
            record.stats_of = None
        return True

    def _follow_up(self, number: int, text: str) -> bool:
        """Handle lines outside of a record: a reaped victim, a kill of a whole group, no victim."""
        if match := patterns.REAPED.search(text):
            for index in range(len(self.kills) - 1, max(len(self.kills) - 20, -1), -1):
                kill = self.kills[index]
                if kill.pid == int(match["pid"]):
                    self.kills[index] = replace(kill, evidence=(*kill.evidence, self._quote(number, text)))
                    break
        elif match := patterns.GROUP_KILL.search(text):
            for record in self._open_records(self.clock.stamp(text), number)[-1:]:
                record.whole_group = True
                record.limit_group = record.limit_group or match["group"]
        elif patterns.NO_VICTIM.search(text):
            note = "No process could be killed. The kernel usually stops the machine after this."
            reason = "the kernel logged that it found no process to kill"
            kill = Kill("kernel", "machine", "refused", notes=(note,))
            self._add_kill(kill, self.clock.stamp(text), (self._quote(number, text),), reason, "likely")
        else:
            return False
        return True

    def _add_detail(self, number: int, text: str) -> None:
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

    def _add_victim(self, number: int, text: str, victim: Kill) -> None:
        stamp, pid = self.clock.stamp(text), victim.pid or 0
        announced = self._announced.setdefault(stamp.host or "", {})
        for entry in [announced.get((pid, False)), announced.get((pid, True))]:
            if entry is not None and not _is_close(entry.stamp, entry.number, stamp, number):
                self._add_unconfirmed(stamp.host or "", entry)  # long ago: another process with that number
        spoken = announced.pop((pid, False), None)
        choice = announced.pop((pid, True), None)
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
        record = _record_of(self._open_records(stamp, number), pid, replaced.pid if replaced else None)
        kill = assemble(victim, spoken, choice, record)
        if replaced is not None:
            note = f"The kernel selected process {replaced.pid} ({replaced.name}); it killed {pid} in its place."
            kill = replace(kill, chosen_pid=replaced.pid, notes=(*kill.notes, note))
        is_record = record is not None or spoken is not None or choice is not None
        reason = "the kernel's record names the victim"
        if not is_record:
            reason = "the kernel logged the kill; the rest of the record is missing"
        before = record.quotes if record is not None else []
        quotes = (*before, *(entry.quote for entry in (spoken, choice) if entry), self._quote(number, text))
        self._add_kill(kill, stamp, quotes, reason)
        if record is not None:
            record.kills += 1
        else:
            self._unmatched.append(stamp)

    def _abandon(self, record: Record) -> None:
        """Add the kill of a record without a victim, unless a kill without a record was written shortly after it."""
        if record.kills:
            return
        for stamp in self._unmatched:
            gap = record.stamp.seconds_to(stamp)
            if gap is None or abs(gap) <= _NEAR_S:
                self._unmatched.remove(stamp)
                return
        scope: Scope = "cgroup" if record.limit_group or record.usages else "unknown"
        kill = replace(assemble(Kill("kernel", scope, pid=-1, signal=9), None, None, record), pid=None)
        quotes = tuple(record.quotes)
        self._add_kill(kill, record.stamp, quotes, "the record ends before its victim is named", "likely")

    def _add_unconfirmed(self, host: str, entry: Announced) -> None:
        """Add a victim that was announced, and whose line "Killed process" is missing."""
        announced = self._announced.get(host, {})
        announced.pop((entry.pid, entry.is_choice), None)
        second = announced.pop((entry.pid, not entry.is_choice), None)
        record = _record_of(self._open_records(entry.stamp, entry.number), entry.pid, None)
        victim = Kill("kernel", entry.scope, pid=entry.pid, name=entry.name, signal=9)
        spoken, choice = (second, entry) if entry.is_choice else (entry, second)
        kill = assemble(victim, spoken, choice, record)
        reason = "the kernel selected this process; the confirmation of the kill is missing"
        quotes = (*(record.quotes if record else ()), *((second.quote,) if second else ()), entry.quote)
        self._add_kill(kill, entry.stamp, quotes, reason, "likely")
        if record is not None:
            record.kills += 1


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

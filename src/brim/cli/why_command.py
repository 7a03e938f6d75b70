"""brim why: explain why a process was killed."""

import shutil
import sys

from brim.cli.command import Command
from brim.cli.print_output import emit
from brim.options.groups import JsonOptions
from brim.options.monitor_options import WhyOptions
from brim.records import dataclass


@dataclass(frozen=True, kw_only=True)
class WhyCommand(JsonOptions, WhyOptions):
    """`brim why [PID]`.

    Examples:
        brim why
        brim why 1540763 --since 3d
        brim why --log /var/log/kern.log.1 --log slurm-191.out

    Reads the logs of this machine (dmesg, the journal, kern.log and messages with their rotated files, cgroup
    counters, logs of brim), or only the files of --log: kernel logs, the output of a job, a log of brim; also
    compressed by gzip or xz.

    For each kill, prints the time, the process, its memory, the killer and the limit, how certain this is, the log
    lines that show it, and one way to prevent it. Logs that could not be read are listed.
    """


def run(options: WhyCommand) -> None:
    from brim.monitor.oom.why import why

    report = why(**options.values(WhyOptions))
    if options.json:
        facts = report.facts
        for kill in facts.pop("kills"):
            emit("kill", **kill)
        emit("why", **facts)
        return
    print(report.text(_columns()))


def _columns() -> int:
    if not sys.stdout.isatty():
        return 80
    return min(max(shutil.get_terminal_size().columns, 50), 110)


COMMAND = Command(WhyCommand, run)

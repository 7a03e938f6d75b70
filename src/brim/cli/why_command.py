"""brim why: find out-of-memory kills and explain them."""

import shutil
import sys
from typing import Annotated

import typer

from brim.cli.flags import Many, ShowingFlags
from brim.cli.show import emit

HELP = """Why did it die? Find out-of-memory kills and explain them.

Reads what this machine has written down (dmesg, the journal, kern.log and messages with what was rotated,
cgroup counters, brim's own logs), or only the files given: kernel logs, the output of a job, a log of brim;
gzip and xz too. Says for each kill when, what, how much it held, who killed it and against which limit, how
sure that is and on which lines it rests, and one thing to do about it. What could not be read is listed.

[bold]Examples[/bold]

  brim why
  brim why 1540763 --since 3d
  brim why --log /var/log/kern.log.1 --log slurm-191.out
  brim why --boot -1 --json
"""


def why(
    showing: ShowingFlags,
    pid: Annotated[int | None, typer.Argument(metavar="PID", help="Only kills of this process.")] = None,
    log: Annotated[
        Many,
        typer.Option(
            "--log", metavar="FILE", help="Read this file (- for stdin) and not the machine. May be repeated."
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Not what is older: today, yesterday, 2h, 3d or 2026-05-31T14:00."),
    ] = None,
    boot: Annotated[
        int | None, typer.Option(metavar="N", help="Only one boot: 0 is this one, -1 the one before.")
    ] = None,
) -> None:
    from brim.oom.why import why as explain

    report = explain(pid, logs=log or (), since=since, boot=boot)
    if showing.json:
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

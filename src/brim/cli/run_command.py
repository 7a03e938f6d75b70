"""brim run: any command under watch."""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from brim.cli.flags import LiveFlags
from brim.cli.watch_flags import Rungs, Written, check_report, ladder_of, log_path, say, tell, write_report
from brim.errors import InputError

HELP = """Run any command under watch.

The command and all it starts are watched from outside: how much memory they hold that the kernel cannot take
back, against a limit. brim warns, then asks it to stop, then kills it, before the machine does it to something
else; where the system allows it, the kernel holds the line (a cgroup). stdin, stdout, signals and the exit
code are the command's; brim writes to stderr. Exits 4 if the command was ended for its memory.

[bold]Examples[/bold]

  brim run -- python train.py
  brim run --memory 40GB --stop-file run/stop -- python train.py --epochs 8
  brim run --memory 300MB --log run.jsonl --report run.html -- ./job.sh
  brim run --fraction 1/32 -- python embed.py     (then `brim forecast sampled`)
"""

_FOR_MEMORY = 4
_ASKED_FOR = (None, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)  # ends that are no news


def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND…", help="What to run, after --.")],
    rungs: Rungs,
    written: Written,
    live: LiveFlags,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="The limit, like 40GB. (default: what is available)")
    ] = None,
    no_cgroup: Annotated[
        bool, typer.Option("--no-cgroup", help="Watch from outside only, even where the kernel could hold the line.")
    ] = False,
    fraction: Annotated[
        str | None,
        typer.Option(
            "--fraction",
            metavar="1/N",
            help="The command does this part of the work (it finds it in BRIM_FRACTION); for `brim forecast sampled`.",
        ),
    ] = None,
    json_line: Annotated[
        bool, typer.Option("--json", help="At the end one JSON object on stderr, and nothing else there.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say only what goes wrong.")] = False,
) -> None:
    from brim.errors import CommandNotStarted
    from brim.memory.cgroup import Cgroup, open_group
    from brim.memory.limit import watch_limit
    from brim.memory.meter import blind_spots
    from brim.redact import redact_command
    from brim.report.live_server import shown_live
    from brim.watching.launch import Orders, Target
    from brim.watching.run_log import prepare_log
    from brim.watching.supervisor import run as supervise

    check_report(written)
    if not (quiet or json_line):
        _warn_of_own_options(command)
    part = None if fraction is None else _fraction(fraction)
    if part is not None:
        os.environ["BRIM_FRACTION"] = repr(part)  # the command inherits it
    began = datetime.now().astimezone()
    limit = watch_limit(memory)
    given = limit.asked_for
    log = log_path(written, Path(command[0]).name)
    shown = redact_command(list(command))
    ladder = ladder_of(rungs, written, log, act=True, command=shown)
    ladder.lines(limit.bytes), ladder.system_lines()  # wrong levels are refused before anything runs
    prepare_log(log, anew=True)
    group = "--no-cgroup" if no_cgroup else open_group(limit.asked_bytes if given else None)
    enforced, refused = "best effort", ""
    if isinstance(group, Cgroup):
        enforced = group.kind if group.limited else "best effort"
    else:
        refused = "" if no_cgroup or not given else f": {group}"
    orders = Orders(
        target=Target("command", command=tuple(shown)),
        log=str(log),
        limit_bytes=limit.bytes,
        limit_why=limit.reason,
        enforced=enforced,
        floating=not given,
        asked_bytes=limit.asked_bytes,
        ladder=ladder,
        fraction=part,
        speak=not json_line,
    )
    if not (quiet or json_line):
        tell(f"brim: watching under {limit}, {_hold(enforced)}{refused}; log {log}")
        for text in blind_spots():
            tell(f"brim: {text}")
    elif limit.warning and not json_line:
        tell(f"brim: {limit.warning}")
    with shown_live(log, live.port, live.open_page, tell) as aside:
        try:
            outcome = supervise(command, replace(orders, aside=aside), group if isinstance(group, Cgroup) else None)
        except CommandNotStarted:
            log.unlink(missing_ok=True)  # nothing ran, so there is nothing to tell of
            raise
        postmortem = _postmortem(outcome, log, began)
        if postmortem:
            _write_down(log, postmortem)
    _show(outcome, log, quiet, json_line, postmortem)
    if outcome.end and outcome.end["lost_lines"] and not json_line:
        tell(f"brim: {outcome.end['lost_lines']} lines of the log could not be written: is the disk full?")
    write_report(written, log)
    if outcome.stopped_for_memory:
        sys.exit(_FOR_MEMORY)
    if outcome.signal == signal.SIGINT:
        _die_of_interrupt()
    sys.exit(outcome.exit_code)


_OWN_OPTIONS = ("--memory", "--stop-file", "--stop-at", "--kill-at", "--log", "--report", "--no-cgroup", "--live")


def _warn_of_own_options(command: list[str]) -> None:
    """Say that options of brim after the command go to the command, unless `--` shows that this is meant."""
    given = [word for word in command[1:] if word.partition("=")[0] in _OWN_OPTIONS]
    if given and "--" not in sys.argv:
        program = Path(command[0]).name
        tell(f"brim: {given[0]} is given to {program}; for brim, put it first: brim run {given[0]} … -- {program} …")


def _die_of_interrupt() -> None:
    """A shell ends its loop at Ctrl-C only if the command has died of it, not if it exits with 130."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _hold(enforced: str) -> str:
    return "best effort" if enforced == "best effort" else f"held by the kernel ({enforced})"


def _show(outcome: Any, log: Path, quiet: bool, json_line: bool, postmortem: list[str]) -> None:
    from brim.report.watch_view import screen, summarise

    summary = summarise(log)
    if json_line:
        facts = {**summary.facts(), "exit_code": outcome.exit_code, "signal": outcome.signal, "pid": outcome.pid}
        tell(json.dumps({"event": "ran", **facts}))
    elif not quiet or outcome.stopped_for_memory or outcome.signal not in _ASKED_FOR:
        say(screen(summary, postmortem))


def _postmortem(outcome: Any, log: Path, began: datetime) -> list[str]:
    """Why it died, if it did: from what the machine has written down, and from brim's own log."""
    from brim.oom.why import why
    from brim.report.watch_view import evidence

    if outcome.signal is None and not outcome.stopped_for_memory:
        return []
    found = why(outcome.pid, since=began, runs=[log])
    return found.text().splitlines() if found.kills else evidence(outcome.end or {})


def _write_down(log: Path, lines: list[str]) -> None:
    """For the report, which is made from the log alone."""
    from brim.watching.run_log import LogWriter

    writer = LogWriter(log)
    writer.write("event", {"t": time.time(), "kind": "postmortem", "text": "why it died", "lines": lines})
    writer.close()


def _fraction(text: str) -> float:
    """1/32, 0.03 or 3%."""
    from brim.forecasts.measured import parse_fraction

    try:
        value = parse_fraction(text)
    except InputError as error:
        raise InputError(f"--fraction takes a part between 0 and 1, like 1/32, not {text!r}.") from error
    if value > 1:
        raise InputError(f"--fraction takes a part between 0 and 1, not {text!r}.")
    return value

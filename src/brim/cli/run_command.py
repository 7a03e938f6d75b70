"""brim run: run any command under a memory limit and record its memory."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from brim.cli.command import Command
from brim.cli.print_output import absolute, page_path, print_stderr, print_stderr_lines
from brim.errors import BrimError, CommandStartError, InputError
from brim.memory.cgroup import Cgroup, open_group
from brim.memory.limit import watch_limit
from brim.memory.meter import blind_spots
from brim.monitor.log_records import parse_end
from brim.monitor.log_writer import LogWriter, alerts_path, check_log, new_log_path, prepare_log
from brim.monitor.report.live_server import shown_live
from brim.monitor.report.run_summary import evidence, screen, summary_facts
from brim.monitor.run_log import read_run
from brim.monitor.watching.launch import StopLevels, WatchConfig, WatchTarget
from brim.monitor.watching.stop_sequence import lead_of
from brim.monitor.watching.supervisor import run as supervise
from brim.options.declare import Argument, Common, Names, Option
from brim.options.groups import LiveOptions, QuietOptions
from brim.options.monitor_options import MonitorOptions
from brim.records import dataclass
from brim.redact import redact_command
from brim.state.stop import settle_stop_file

_FOR_MEMORY = 4
_OWN_OPTIONS = ("--memory", "--stop-file", "--stop-at", "--kill-at", "--log", "--report", "--no-cgroup", "--live")
# With --quiet, a run that ends by one of these signals is not reported.
_EXPECTED_SIGNALS = (None, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)


@dataclass(frozen=True, kw_only=True)
class RunCommand(LiveOptions, QuietOptions, MonitorOptions, panel="Run"):
    """`brim run -- COMMAND…`.

    Examples:
        brim run -- python train.py
        brim run --memory 40GB --stop-file run/stop -- python train.py --epochs 8
        brim run --memory 300MB --log run.jsonl --report run.html -- ./job.sh

    Watches the command and all its child processes from outside: the memory that the kernel cannot take back,
    against a limit. brim warns, then asks the command to stop, then kills it, before the kernel kills something
    else; where the system allows it, the kernel enforces the limit (a cgroup). stdin, stdout, signals and the exit
    code are those of the command; brim prints to stderr. Exits with 4 if the command was stopped for its memory.

    With --fraction, the command processes a part of its data, and `brim forecast sampled` estimates all of it.
    """

    command: Annotated[Names, Argument("The command to run, after --.", "COMMAND…")]
    cgroup: Annotated[bool, Option("Let the kernel enforce the limit where it can (a cgroup).")] = True
    fraction: Annotated[
        str | None,
        Option("The command processes this part of its data (BRIM_FRACTION), for brim forecast sampled.", "1/N"),
    ] = None
    json: Annotated[bool, Common("At the end print one JSON object on stderr, and nothing else there.")] = False
    quiet: Annotated[bool, Common("Print only problems.", flags=("--quiet", "-q"))] = False


def run(options: RunCommand) -> None:
    command, is_silent = list(options.command), options.quiet or options.json
    check_report(options)
    if not is_silent:
        _warn_of_own_options(command)
    part = None if options.fraction is None else _fraction(options.fraction)
    if part is not None:
        os.environ["BRIM_FRACTION"] = repr(part)  # the command inherits it
    began = datetime.now().astimezone()
    limit = watch_limit(options.memory)
    log = log_path(options, Path(command[0]).name)
    shown = redact_command(command)
    levels = make_levels(options, log, limit.bytes, enforce=True, command=shown)
    prepare_log(log, replace=True)
    group = open_group(limit.asked_bytes if limit.asked_for else None) if options.cgroup else None
    config = WatchConfig(
        target=WatchTarget("command", command=tuple(shown)),
        log=str(log),
        limit=limit,
        is_floating=not limit.asked_for,
        levels=levels,
        group=group if isinstance(group, Cgroup) else None,
        fraction=part,
        speak=not options.json,
    )
    if not is_silent:
        enforced = config.enforced
        enforced = enforced if enforced == "best effort" else f"enforced by the kernel ({enforced})"
        refused = f": {group}" if isinstance(group, str) and limit.asked_for else ""
        print_stderr(f"brim: watching under {limit}, {enforced}{refused}; log {log}")
        for text in blind_spots():
            print_stderr(f"brim: {text}")
    elif limit.warning and not options.json:
        print_stderr(f"brim: {limit.warning}")
    with shown_live(log, options.port, options.open_page, print_stderr) as own_pids:
        try:
            outcome = supervise(command, replace(config, excluded_pids=own_pids))
        except CommandStartError:
            log.unlink(missing_ok=True)  # nothing ran, so there is nothing to record
            raise
        postmortem = _explain(outcome, log, began)
    finished = read_run(log)
    if options.json:
        facts = {
            **summary_facts(finished),
            "exit_code": outcome.exit_code,
            "signal": outcome.signal,
            "pid": outcome.pid,
        }
        print_stderr(json.dumps({"event": "ran", **facts}))
    elif not options.quiet or outcome.stopped_for_memory or outcome.signal not in _EXPECTED_SIGNALS:
        print_stderr_lines(screen(finished, postmortem))
    if outcome.end and outcome.end["lost_lines"] and not options.json:
        print_stderr(f"brim: {outcome.end['lost_lines']} lines of the log could not be written: is the disk full?")
    write_report(options, log)
    if outcome.stopped_for_memory:
        sys.exit(_FOR_MEMORY)
    if outcome.signal == signal.SIGINT:  # a shell leaves its loop only after this signal, not after exit code 130
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(outcome.exit_code)


def _warn_of_own_options(command: list[str]) -> None:
    """Warn about options of brim after the command, which go to the command, unless `--` makes this explicit."""
    misplaced = [text for text in command[1:] if text.partition("=")[0] in _OWN_OPTIONS]
    if misplaced and "--" not in sys.argv:
        program, flag = Path(command[0]).name, misplaced[0]
        print_stderr(f"brim: {flag} is given to {program}; for brim, put it first: brim run {flag} … -- {program} …")


def _explain(outcome: Any, log: Path, began: datetime) -> list[str]:
    """Explain why the command was killed, from the system logs and from brim's log, and append it; [] if it was not."""
    from brim.monitor.oom.why import why

    if outcome.signal is None and not outcome.stopped_for_memory:
        return []
    report = why(outcome.pid, since=began, runs=[log])
    lines = report.text().splitlines() if report.kills else evidence(parse_end(outcome.end or {}))
    if lines:  # the report is made from the log alone
        writer = LogWriter(log)
        writer.write("event", {"t": time.time(), "kind": "postmortem", "text": "why it died", "lines": lines})
        writer.close()
    return lines


def _fraction(text: str) -> float:
    """Parse a fraction such as 1/32, 0.03 or 3%."""
    from brim.monitor.forecasts.measured import parse_fraction

    try:
        value = parse_fraction(text)
    except InputError as error:
        raise InputError(f"--fraction takes a part between 0 and 1, such as 1/32, not {text!r}.") from error
    if value > 1:
        raise InputError(f"--fraction takes a part between 0 and 1, not {text!r}.")
    return value


def make_levels(
    options: MonitorOptions,
    log: Path,
    limit_bytes: int,
    *,
    enforce: bool,
    command: Iterable[str] = (),
    enforce_all: bool = False,
) -> Any:
    """Return the levels of the watch. Raise for wrong ones, before anything runs."""
    stop_file = None if options.stop_file is None else absolute(str(options.stop_file))
    if stop_file is not None and (note := settle_stop_file(stop_file)):
        print_stderr(f"brim: {note}")
    lead_s, reason = (options.stop_lead, "") if options.stop_lead is not None else lead_of(command, log)
    if reason:
        print_stderr(f"brim: lead {lead_s:.0f} s: {reason}")
    levels = StopLevels(
        alert=options.alert,
        stop=options.stop_at,
        kill=options.kill_at,
        system=options.alert_system,
        alert_after_s=options.alert_after,
        stop_after_s=options.stop_after,
        grace_s=options.grace,
        stop_file=None if stop_file is None else str(stop_file),
        alerts=str(absolute(str(options.alerts)) if options.alerts else alerts_path(log)),
        on_alert=options.on_alert,
        lead_s=lead_s,
        enforce=enforce,
        enforce_all=enforce_all,
    )
    levels.thresholds(limit_bytes), levels.system_thresholds()
    return levels


def log_path(options: MonitorOptions, name: str) -> Path:
    """Return the path of the log: the file of --log, which must be new or a log, or a new file. Write nothing."""
    if options.log is None:
        try:
            return new_log_path(name)
        except OSError as error:
            raise InputError(
                f"The log cannot be written to {error.filename!r}: {error.strerror}.",
                hint="Choose another file with --log FILE.",
            ) from error
    path = absolute(str(options.log))
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"The log {str(options.log)!r} cannot be written.", hint="Name a file in an existing folder.")
    check_log(path)
    return path


def check_report(options: MonitorOptions) -> None:
    """Raise before the command runs if the report cannot be written."""
    if options.report is not None:
        page_path(options.report)


def write_report(options: MonitorOptions, log: Path) -> None:
    """Write the HTML page from the log. A failure is printed, and the exit code stays that of the command."""
    if options.report is None:
        return
    from brim.monitor.report.page import write_page

    try:
        write_page(log, Path(options.report))
    except (BrimError, OSError) as error:
        reason = error.message if isinstance(error, BrimError) else f"{error.strerror}."
        print_stderr(f"brim: the report was not written: {reason} The log is complete: {log}")


COMMAND = Command(RunCommand, run, is_wrapper=True)

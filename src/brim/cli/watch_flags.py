"""Options that `brim run` and `brim watch` share: the limit, the ladder, where it is written down."""

import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from brim.cli.show import absolute, page_path
from brim.errors import BrimError, InputError
from brim.records import dataclass
from brim.state.stop import settle_stop_file


def _option(*names: str, panel: str, metavar: str | None = None, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel)


_ladder = functools.partial(_option, panel="Ladder")
_written = functools.partial(_option, panel="Written down")


@dataclass(frozen=True)
class Rungs:
    """When to warn, stop and kill."""

    alert: Annotated[
        str, _ladder("--alert", metavar="LEVEL", help="Warn at this level for 10 s: a share, a size, or off.")
    ] = "80%"
    stop_at: Annotated[str, _ladder("--stop-at", metavar="LEVEL", help="Stop it gracefully at this level for 3 s.")] = (
        "90%"
    )
    kill_at: Annotated[str, _ladder("--kill-at", metavar="LEVEL", help="Kill all of it at this level.")] = "97%"
    alert_system: Annotated[
        str, _ladder("--alert-system", metavar="LEVEL", help="Warn when the machine's memory is at this level.")
    ] = "90%"
    alert_after: Annotated[float, _ladder("--alert-after", metavar="S", help="Seconds above before a warning.")] = 10.0
    stop_after: Annotated[float, _ladder("--stop-after", metavar="S", help="Seconds above before a stop.")] = 3.0
    lead: Annotated[
        float | None,
        _ladder(
            "--lead",
            metavar="S",
            help="Seconds it needs to stop: it is asked when less is predicted to remain; 0 predicts nothing. "
            "(default: what it took last time, or 30)",
        ),
    ] = None
    grace: Annotated[
        float, _ladder("--grace", metavar="S", help="Seconds from the stop file to SIGTERM, and from that to SIGKILL.")
    ] = 30.0
    stop_file: Annotated[
        str | None, _ladder("--stop-file", metavar="FILE", help="Made to ask it to stop, before SIGTERM.")
    ] = None


@dataclass(frozen=True)
class Written:
    """Where it is written down, and who is told."""

    log: Annotated[
        str | None, _written("--log", metavar="FILE.jsonl", help="The log. (default: in ~/.local/state/brim/runs)")
    ] = None
    alerts: Annotated[
        str | None,
        _written("--alerts", metavar="FILE", help="Warnings as text to tail -f. (default: beside the log)"),
    ] = None
    on_alert: Annotated[
        str | None,
        _written("--on-alert", metavar="COMMAND", help="Run at every warning, with its facts as BRIM_… variables."),
    ] = None
    report: Annotated[
        str | None, _written("--report", metavar="FILE.html", help="A page with the whole curve, at the end.")
    ] = None


def ladder_of(
    rungs: Rungs, written: Written, log: Path, act: bool, command: Iterable[str] = (), act_on_all: bool = False
) -> Any:
    """The ladder as the watcher understands it."""
    from brim.watching.act import lead_of
    from brim.watching.launch import Ladder
    from brim.watching.run_log import alerts_path

    if rungs.stop_file is not None and (note := settle_stop_file(absolute(rungs.stop_file))):
        tell(f"brim: {note}")
    lead_s, why = (rungs.lead, "") if rungs.lead is not None else lead_of(command, log)
    if why:
        tell(f"brim: lead {lead_s:.0f} s: {why}")
    return Ladder(
        alert=rungs.alert,
        stop=rungs.stop_at,
        kill=rungs.kill_at,
        system=rungs.alert_system,
        alert_after_s=rungs.alert_after,
        stop_after_s=rungs.stop_after,
        grace_s=rungs.grace,
        stop_file=str(absolute(rungs.stop_file)) if rungs.stop_file else None,
        alerts=str(absolute(written.alerts) if written.alerts else alerts_path(log)),
        on_alert=written.on_alert,
        lead_s=lead_s,
        act=act,
        act_on_all=act_on_all,
    )


def log_path(written: Written, name: str) -> Path:
    """The log's file: the user's, which must be new or a log, or one in the folder of logs. Nothing is touched yet."""
    from brim.watching.run_log import check_log, new_log_path

    if written.log is None:
        try:
            return new_log_path(name)
        except OSError as error:
            raise InputError(
                f"The log cannot be written to {error.filename!r}: {error.strerror}.",
                hint="Choose another: --log FILE.",
            ) from error
    path = absolute(written.log)
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"The log {written.log!r} cannot be written there.", hint="Name a file in an existing folder.")
    check_log(path)
    return path


def check_report(written: Written) -> None:
    """Refuse a report that cannot be written before the command runs, not after."""
    if written.report is not None:
        page_path(written.report)


def write_report(written: Written, log: Path) -> None:
    """The HTML page, made from the log. If that fails it is said, and the command's exit code stays what it is."""
    if written.report is None:
        return
    from brim.report.page import write_page

    try:
        write_page(log, Path(written.report))
    except (BrimError, OSError) as error:
        reason = error.message if isinstance(error, BrimError) else f"{error.strerror}."
        tell(f"brim: the report was not written: {reason} The log has everything: {log}")


def say(lines: list[tuple[str, str]]) -> None:
    """To stderr: stdout belongs to the command."""
    width = max((len(label) for label, _ in lines), default=0)
    for label, text in lines:
        tell(f"{label:>{width}}  {text}")


def tell(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass  # whoever read it is gone, and the exit code must still be right

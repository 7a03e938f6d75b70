"""brim watch: something that runs already."""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from brim.cli.flags import LiveFlags, ShowingFlags, WatchingFlags
from brim.cli.show import emit
from brim.cli.watch_flags import Rungs, Written, check_report, ladder_of, log_path, say, tell, write_report
from brim.errors import InputError

HELP = """Watch something that runs already.

The same as brim run, for a process that was started without it: by its number, by the name of its program or script
(and found again when it is started anew), or the whole machine. Warns, and touches the stop file if there is
one; ends nothing unless told to with --act. Ctrl-C ends the watch, not what is watched.

[bold]Examples[/bold]

  brim watch 4711
  brim watch --match train.py --memory 40GB --background
  brim watch 4711 --memory 40GB --act --stop-file run/stop
  brim watch --system --alert-system 85%
"""

_FOR_MEMORY = 4


def watch(
    showing: ShowingFlags,
    watching: WatchingFlags,
    rungs: Rungs,
    written: Written,
    live: LiveFlags,
    pid: Annotated[int | None, typer.Argument(metavar="PID", help="The process to watch, with all it started.")] = None,
    match: Annotated[
        str | None,
        typer.Option("--match", metavar="TEXT", help="Whatever has this in the name of its program or script."),
    ] = None,
    system: Annotated[bool, typer.Option("--system", help="The whole machine.")] = False,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="The limit. (default: what it has and may still get)")
    ] = None,
    act: Annotated[bool, typer.Option("--act", help="Stop and kill it when it is over the lines.")] = False,
    act_on_all: Annotated[
        bool, typer.Option("--all", help="With --match --act: act on every program that matches.")
    ] = False,
    background: Annotated[bool, typer.Option("--background", help="Go on in the background.")] = False,
    for_s: Annotated[float | None, typer.Option("--for", metavar="S", help="End the watch after this long.")] = None,
) -> None:
    from brim.report.live_server import shown_live
    from brim.watching.launch import Board, Orders, WatcherProcess
    from brim.watching.run_log import prepare_log

    check_report(written)
    target = _target(pid, match, system)
    if act_on_all and not (act and match):
        raise InputError("--all says that --act may end every program that --match finds: it needs both.")
    if act and match:
        _show_matches(match, act_on_all, showing.json)
    limit, given = _limit(memory, target)
    log = log_path(written, match or ("system" if system else f"pid{pid}"))
    ladder = ladder_of(rungs, written, log, act, target.command, act_on_all)
    ladder.lines(limit.bytes), ladder.system_lines()
    if for_s is not None and not 0 < for_s < math.inf:
        raise InputError(f"--for takes seconds, not {for_s:g}.")
    if background and live.port is not None:
        raise InputError(
            "--live ends with this command; look at a watch in the background with: brim report LOG --follow"
        )
    if background and written.report:
        raise InputError("--report is written at the end, which --background does not wait for.")
    prepare_log(log, anew=True)
    board = None if background else Board()
    orders = Orders(
        target=target,
        log=str(log),
        limit_bytes=limit.bytes,
        limit_why=limit.reason,
        floating=not given and not system,
        asked_bytes=limit.asked_bytes,
        ladder=ladder,
        board=board.descriptor if board else None,
        speak=not (background or showing.json),
        detached=background,
    )
    watcher = WatcherProcess(orders)
    if board is None:
        watcher.let_go()
        _say_background(watcher.pid, log, ladder.alerts, showing.json)
        return
    if not (showing.json or watching.quiet):
        tell(f"brim: watching {_name(target)} under {limit}, {'acting' if act else 'only looking'}; log {log}")
    with shown_live(log, live.port, live.open_page, tell):
        end = _follow(watcher, board, _view(showing.json, watching.quiet, limit.bytes), for_s)
    _show(log, showing.json)
    write_report(written, log)
    sys.exit(_FOR_MEMORY if act and end.get("stopped") else 0)


def _target(pid: int | None, match: str | None, system: bool) -> Any:
    from brim.memory.meter import started
    from brim.redact import redact_command
    from brim.watching.find_processes import command_line
    from brim.watching.launch import Target

    if sum((pid is not None, match is not None, system)) != 1:
        raise InputError("Say what to watch: a process number, --match TEXT, or --system.")
    if system:
        return Target("machine")
    if match is not None:
        if not match.strip():
            raise InputError("--match takes a part of the name of a program or script, like train.py.")
        return Target("match", pattern=match)
    assert pid is not None
    if sys.platform == "linux" and started(pid) is None:
        raise InputError(f"There is no process {pid} that this user can see.", hint="ps -e lists them.")
    return Target("process", pid=pid, command=tuple(redact_command(list(command_line(pid)))))


def _show_matches(pattern: str, act_on_all: bool, as_json: bool) -> None:
    """What would be acted on; several programs only if that was asked for."""
    from brim.redact import redact_command
    from brim.watching.find_processes import command_line, find, leaders

    roots = leaders(find(pattern))
    lines = [f"{pid}  {' '.join(redact_command(command_line(pid)))[:100]}" for pid in roots]
    if len(roots) > 1 and not act_on_all:
        raise InputError(
            f"{len(roots)} programs match {pattern!r}, and --act would end all of them:\n  " + "\n  ".join(lines[:20]),
            hint="Name one by its number, or add --all.",
        )
    if not as_json:
        for line in lines:
            tell(f"brim: acting on process {line}")


def _limit(memory: str | None, target: Any) -> tuple[Any, bool]:
    """What was asked for; else what it holds already and what is left."""
    from brim.memory.limit import Limit, watch_limit
    from brim.memory.meter import machine_now, tree_bytes

    held = None if target.pid is None else tree_bytes(target.pid)
    limit = watch_limit(memory, held_bytes=held, pid=target.pid or "self")
    if memory is not None or os.environ.get("BRIM_MEMORY"):
        return limit, True
    if target.kind == "machine":
        return Limit(machine_now().total_bytes or limit.bytes, "the machine's memory"), False
    return limit, False


def _name(target: Any) -> str:
    if target.kind == "machine":
        return "the machine"
    return f"{target.pattern!r}" if target.pattern else f"process {target.pid}"


def _say_background(pid: int, log: Path, alerts: str, as_json: bool) -> None:
    if as_json:
        emit("watching", pid=pid, log=str(log), alerts=alerts)
        return
    say(
        [
            ("watching", f"in the background, as process {pid}; to end it: kill {pid}"),
            ("alerts", f"tail -F {alerts}"),
            ("log", str(log)),
        ]
    )


def _view(as_json: bool, quiet: bool, limit_bytes: int) -> Any:
    from brim.report.watch_view import JsonView, NoView, PlainView, TerminalView

    if as_json:
        return JsonView(emit)
    if quiet:
        return NoView()
    return TerminalView(limit_bytes) if sys.stderr.isatty() else PlainView(limit_bytes, tell)


def _follow(watcher: Any, board: Any, view: Any, for_s: float | None) -> dict[str, Any]:
    """Show what the watcher sees, until it or the user ends it."""
    import time

    deadline = math.inf if for_s is None else time.monotonic() + for_s
    wait: Callable[[float], Any] = watcher.await_end
    try:
        with view:
            while wait(min(view.every_s, max(deadline - time.monotonic(), 0.0))) is None and not watcher.silent:
                view.show(board)
                if time.monotonic() >= deadline:
                    break
    except KeyboardInterrupt:
        pass  # the way to end a watch
    watcher.tell("finish")
    end = wait(10.0)
    watcher.let_go()
    return end or {}


def _show(log: Path, as_json: bool) -> None:
    from brim.report.watch_view import screen, summarise

    summary = summarise(log)
    if as_json:
        emit("watched", **summary.facts())
    else:
        say(screen(summary))

"""brim watch: watch a process that is already running."""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from brim.cli.command import Command
from brim.cli.print_output import emit, print_stderr, print_stderr_lines
from brim.cli.run_command import check_report, log_path, make_levels, write_report
from brim.errors import InputError
from brim.options.declare import Argument, Common, Option
from brim.options.groups import ShowOptions
from brim.options.monitor_options import MonitorOptions, Seconds
from brim.records import dataclass

_FOR_MEMORY = 4


@dataclass(frozen=True, kw_only=True)
class WatchCommand(ShowOptions, MonitorOptions):
    """`brim watch [PID]`.

    Examples:
        brim watch 4711
        brim watch --match train.py --memory 40GB --background
        brim watch 4711 --memory 40GB --enforce --stop-file run/stop

    Watches a process that was not started by `brim run`: by its process id, by the name of its program or script
    (also after a restart), or the whole machine. Prints warnings and creates the file of --stop-file. Stops and
    kills a process only with --enforce. Ctrl-C ends the watch; the watched process continues.
    """

    pid: Annotated[int | None, Argument("The process to watch, with its child processes.", "PID", minimum=1)] = None
    match: Annotated[str | None, Common("Watch processes whose program or script has this in its name.", "TEXT")] = None
    system: Annotated[bool, Common("Watch the whole machine.")] = False
    enforce: Annotated[bool, Common("Stop and kill the process at these levels, not only warn.", old="act")] = False
    enforce_all: Annotated[bool, Option("With --match and --enforce: stop every program that matches.", old="all")] = (
        False
    )
    background: Annotated[bool, Common("Continue in the background.")] = False
    for_s: Annotated[Seconds | None, Option("End the watch after this many seconds.", flags=("--for",))] = None

    def check_options(self) -> None:
        if sum((self.pid is not None, self.match is not None, self.system)) != 1:
            raise InputError(
                "Name what to watch: a process number, --match TEXT, or --system.", hint="brim watch --match train.py"
            )
        if self.match is not None and not self.match.strip():
            raise InputError("--match takes a part of the name of a program or script, such as train.py.")
        if self.enforce_all and not (self.enforce and self.match):
            raise InputError("--enforce-all can only be used with --match and --enforce.")
        if self.for_s == 0:
            raise InputError("--for takes seconds above zero, not 0.")
        if self.background and self.port is not None:
            raise InputError(
                "--live cannot be used with --background.", hint="Follow the log: brim report LOG.jsonl --follow"
            )
        if self.background and self.report:
            raise InputError("--report cannot be used with --background.", hint="Later: brim report LOG.jsonl")


def run(options: WatchCommand) -> None:
    from brim.monitor.report.live_server import shown_live
    from brim.monitor.watching.launch import Board, Orders, WatcherProcess
    from brim.monitor.watching.run_log import prepare_log

    check_report(options)
    target = _target(options)
    if options.enforce and options.match:
        _show_matches(options.match, options.enforce_all, options.json)
    limit, is_limit_set = _limit(options.memory, target)
    log = log_path(options, options.match or ("system" if options.system else f"pid{options.pid}"))
    levels = make_levels(options, log, enforce=options.enforce, command=target.command, enforce_all=options.enforce_all)
    levels.lines(limit.bytes), levels.system_lines()  # raises for wrong levels before the watch starts
    prepare_log(log, anew=True)
    board = None if options.background else Board()
    orders = Orders(
        target=target,
        log=str(log),
        limit_bytes=limit.bytes,
        limit_why=limit.reason,
        floating=not is_limit_set and not options.system,
        asked_bytes=limit.asked_bytes,
        ladder=levels,
        board=board.descriptor if board else None,
        speak=not (options.background or options.json),
        detached=options.background,
    )
    watcher = WatcherProcess(orders)
    if board is None:
        watcher.let_go()
        _show_background(watcher.pid, log, levels.alerts, options.json)
        return
    if not (options.json or options.quiet):
        mode = "acting" if options.enforce else "only watching"
        print_stderr(f"brim: watching {_name(target)} under {limit}, {mode}; log {log}")
    with shown_live(log, options.port, options.open_page, print_stderr):
        end = _follow(watcher, board, _view(options.json, options.quiet, limit.bytes), options.for_s)
    _show(log, options.json)
    write_report(options, log)
    sys.exit(_FOR_MEMORY if options.enforce and end.get("stopped") else 0)


def _target(options: WatchCommand) -> Any:
    from brim.memory.meter import started
    from brim.monitor.watching.find_processes import command_line
    from brim.monitor.watching.launch import Target
    from brim.redact import redact_command

    if options.system:
        return Target("machine")
    if options.match is not None:
        return Target("match", pattern=options.match)
    assert options.pid is not None
    if sys.platform == "linux" and started(options.pid) is None:
        raise InputError(f"There is no process {options.pid} that this user can see.", hint="ps -e lists them.")
    return Target("process", pid=options.pid, command=tuple(redact_command(list(command_line(options.pid)))))


def _show_matches(pattern: str, enforce_all: bool, as_json: bool) -> None:
    """Print the processes that --enforce would stop; raise for several programs without --enforce-all."""
    from brim.monitor.watching.find_processes import command_line, find, leaders
    from brim.redact import redact_command

    roots = leaders(find(pattern))
    lines = [f"{pid}  {' '.join(redact_command(command_line(pid)))[:100]}" for pid in roots]
    if len(roots) > 1 and not enforce_all:
        raise InputError(
            f"{len(roots)} programs match {pattern!r}, and --enforce would stop all of them:\n  "
            + "\n  ".join(lines[:20]),
            hint="Name one by its number, or add --enforce-all.",
        )
    if not as_json:
        for process in lines:
            print_stderr(f"brim: acting on process {process}")


def _limit(memory: str | int | float | None, target: Any) -> tuple[Any, bool]:
    """Return the limit and whether the user has set it. The default is the memory in use plus the available memory."""
    from brim.memory.limit import Limit, watch_limit
    from brim.memory.meter import machine_now, tree_bytes

    used_bytes = None if target.pid is None else tree_bytes(target.pid)
    limit = watch_limit(memory, held_bytes=used_bytes, pid=target.pid or "self")
    if memory is not None or os.environ.get("BRIM_MEMORY"):
        return limit, True
    if target.kind == "machine":
        return Limit(machine_now().total_bytes or limit.bytes, "the machine's memory"), False
    return limit, False


def _name(target: Any) -> str:
    if target.kind == "machine":
        return "the machine"
    return f"{target.pattern!r}" if target.pattern else f"process {target.pid}"


def _show_background(pid: int, log: Path, alerts: str, as_json: bool) -> None:
    if as_json:
        emit("watching", pid=pid, log=str(log), alerts=alerts)
        return
    print_stderr_lines(
        [
            ("watching", f"in the background, as process {pid}; to stop watching: kill {pid}"),
            ("alerts", f"tail -F {alerts}"),
            ("log", str(log)),
        ]
    )


def _view(as_json: bool, quiet: bool, limit_bytes: int) -> Any:
    from brim.monitor.report.watch_view import JsonView, NoView, PlainView, TerminalView

    if as_json:
        return JsonView(emit)
    if quiet:
        return NoView()
    return TerminalView(limit_bytes) if sys.stderr.isatty() else PlainView(limit_bytes, print_stderr)


def _follow(watcher: Any, board: Any, view: Any, for_s: float | None) -> dict[str, Any]:
    """Show the measurements of the watcher until the watcher exits, the time is over, or the user presses Ctrl-C."""
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
        pass  # Ctrl-C is how the user ends the watch
    watcher.tell("finish")
    end = wait(10.0)
    watcher.let_go()
    return end or {}


def _show(log: Path, as_json: bool) -> None:
    from brim.monitor.report.watch_view import screen, summarise

    summary = summarise(log)
    if as_json:
        emit("watched", **summary.facts())
    else:
        print_stderr_lines(screen(summary))


COMMAND = Command(WatchCommand, run)

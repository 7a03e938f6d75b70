"""brim watch: watch a process that is already running."""

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from brim.cli.command import Command
from brim.cli.print_output import emit, print_stderr, print_stderr_lines
from brim.cli.run_command import check_report, log_path, make_levels, write_report
from brim.errors import InputError
from brim.memory.limit import Limit, watch_limit
from brim.memory.meter import machine_now, started, tree_bytes
from brim.monitor.log_writer import prepare_log
from brim.monitor.report.live_server import shown_live
from brim.monitor.report.run_summary import screen, summary_facts
from brim.monitor.run_log import read_run
from brim.monitor.text_formats import sparkline
from brim.monitor.watching.find_processes import command_line, find, leaders
from brim.monitor.watching.launch import SharedValues, WatchConfig, WatcherProcess, WatchTarget
from brim.options.declare import Argument, Common, Option
from brim.options.groups import ShowOptions
from brim.options.monitor_options import MonitorOptions, Seconds
from brim.records import dataclass
from brim.redact import redact_command
from brim.sizes import format_size
from brim.wording import drawing_stream

_FOR_MEMORY = 4
_GAUGE_S = 120.0  # shown by the curve in a terminal


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
    enforce: Annotated[
        bool, Common("Stop and kill the process above --stop-at and --kill-at, not only warn.", old="act")
    ] = False
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
    check_report(options)
    target = _target(options)
    if options.enforce and options.match:
        _show_matches(options.match, options.enforce_all, options.json)
    limit, is_limit_set = _limit(options.memory, target)
    log = log_path(options, options.match or ("system" if options.system else f"pid{options.pid}"))
    enforce, enforce_all = options.enforce, options.enforce_all
    levels = make_levels(options, log, limit.bytes, enforce=enforce, command=target.command, enforce_all=enforce_all)
    prepare_log(log, replace=True)
    values = None if options.background else SharedValues()
    config = WatchConfig(
        target=target,
        log=str(log),
        limit=limit,
        is_floating=not is_limit_set and not options.system,
        levels=levels,
        values_descriptor=values.descriptor if values else None,
        speak=not (options.background or options.json),
        detached=options.background,
    )
    watcher = WatcherProcess(config)
    if values is None:
        watcher.detach()
        _show_background(watcher.pid, log, levels.alerts, options.json)
        return
    if not (options.json or options.quiet):
        mode = "acting" if options.enforce else "only watching"
        name = f"process {target.pid}" if target.pid else repr(target.pattern) if target.pattern else "the machine"
        print_stderr(f"brim: watching {name} under {limit}, {mode}; log {log}")
    with shown_live(log, options.port, options.open_page, print_stderr):
        end = _follow(watcher, values, options, limit.bytes)
    finished = read_run(log)
    if options.json:
        emit("watched", **summary_facts(finished))
    else:
        print_stderr_lines(screen(finished))
    write_report(options, log)
    sys.exit(_FOR_MEMORY if options.enforce and end.get("stopped") else 0)


def _target(options: WatchCommand) -> Any:
    if options.system:
        return WatchTarget("machine")
    if options.match is not None:
        return WatchTarget("match", pattern=options.match)
    assert options.pid is not None
    if sys.platform == "linux" and started(options.pid) is None:
        raise InputError(f"There is no process {options.pid} that this user can see.", hint="ps -e lists them.")
    return WatchTarget("process", pid=options.pid, command=tuple(redact_command(list(command_line(options.pid)))))


def _show_matches(pattern: str, enforce_all: bool, as_json: bool) -> None:
    """Print the processes that --enforce would stop; raise for several programs without --enforce-all."""
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
    used_bytes = None if target.pid is None else tree_bytes(target.pid)
    limit = watch_limit(memory, held_bytes=used_bytes, pid=target.pid or "self")
    if memory is not None or os.environ.get("BRIM_MEMORY"):
        return limit, True
    if target.kind == "machine":
        return Limit(machine_now().total_bytes or limit.bytes, "the machine's memory"), False
    return limit, False


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


@contextmanager
def _view(as_json: bool, quiet: bool, limit_bytes: int) -> Iterator[tuple[float, Callable[[Any], None]]]:
    """Return a context with the interval at which the values of the watcher are shown, and the function for it."""
    kinds = ("anon_bytes", "shmem_bytes", "swap_bytes", "file_bytes", "total_bytes", "peak_bytes")

    def text(values: Any) -> str:
        total, peak, files = (format_size(values.get(f"{name}_bytes")) for name in ("total", "peak", "file"))
        share = 100 * values.get("total_bytes") / max(limit_bytes, 1)
        return f"{total} of {format_size(limit_bytes)} ({share:.0f} %), peak {peak}, file pages {files}"

    if as_json:
        yield (
            1.0,
            lambda values: emit("sample", t=values.get("t_ns") / 1e9, **{kind: values.get(kind) for kind in kinds}),
        )
    elif quiet:
        yield 1.0, lambda values: None
    elif not sys.stderr.isatty():
        yield 10.0, lambda values: print_stderr(f"brim: {text(values)}")
    else:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        points: deque[tuple[float, float]] = deque()
        console = Console(file=drawing_stream())
        width = max(min(console.width - 75, 40), 10)

        def draw(values: Any) -> None:
            """Draw one line: a curve of the last two minutes, the memory, the peak, the limit."""
            now = time.monotonic()
            points.append((now, values.get("total_bytes")))
            while now - points[0][0] > _GAUGE_S:
                points.popleft()
            bars = sparkline(list(points), width, top=limit_bytes)
            live.update(
                Text.assemble((bars, "cyan"), " ", text(values), no_wrap=True, overflow="ellipsis"), refresh=True
            )

        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield 0.5, draw


def _follow(watcher: Any, values: Any, options: WatchCommand, limit_bytes: int) -> dict[str, Any]:
    """Show the measurements of the watcher until it exits, the time is over, or the user presses Ctrl-C."""
    deadline = math.inf if options.for_s is None else time.monotonic() + options.for_s
    try:
        with _view(options.json, options.quiet, limit_bytes) as (every_s, show):
            while time.monotonic() < deadline and not watcher.is_silent:
                if watcher.await_end(min(every_s, deadline - time.monotonic())) is not None:
                    break
                show(values)
    except KeyboardInterrupt:
        pass  # Ctrl-C is how the user ends the watch
    watcher.send("finish")
    end: dict[str, Any] = watcher.await_end(10.0) or {}
    watcher.detach()
    return end


COMMAND = Command(WatchCommand, run)

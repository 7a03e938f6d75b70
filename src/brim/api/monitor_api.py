"""watch and why: the memory of this program, and why a process was killed. Loads neither numpy nor pyarrow."""

from brim.monitor.oom import why as oom
from brim.monitor.watching import watching
from brim.options.declare import takes
from brim.options.monitor_options import WatchOptions, WhyOptions


@takes(WatchOptions)
def watch(options: WatchOptions) -> watching.MemoryWatch:
    """Watch the memory of this program and of its child processes, while a `with` block runs.

    A separate process takes the samples, so that a program that hangs is seen too. It warns, writes the log, creates
    the stop file and answers `should_stop()`. It stops and kills the program only with `enforce`.

    Returns:
        The watch, a context manager with `now`, `peak`, `usage`, `mark(text)`, `should_stop()`, `callback(save)` and
        `trainer_callback()`.

    Raises:
        ArgumentError: A level or a size is wrong.

    Examples:
        >>> with brim.watch(memory="40GB", quiet=True) as meter:
        ...     meter.should_stop()
        False
    """
    return watching.MemoryWatch(**options.values())


@takes(WhyOptions)
def why(options: WhyOptions) -> oom.WhyReport:
    """Explain the out-of-memory kills on this machine, or those in the files of `logs`.

    Returns:
        The report: `kills`, `restarts`, `sources` that were read or could not be read; print it.

    Raises:
        InputError: The time is wrong.

    Examples:
        >>> [(kill.pid, kill.name) for kill in brim.why(logs=["kern.log"]).kills]
        [(1540763, 'python')]
    """
    return oom.why(**options.values())

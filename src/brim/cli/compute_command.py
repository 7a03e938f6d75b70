"""Run a job or a saved plan and print the result: the common code of the commands map, tokenize and embed."""

import functools
import shlex
import time
from collections.abc import Callable
from typing import Any

from brim.cli.print_output import emit, memory_held, print_lines, print_result, show_progress, waiting_for
from brim.errors import InputError
from brim.execution.worker_process import start_warm_worker
from brim.options.groups import SavedPlanOptions
from brim.storage.location import Access

# Takes a job, its result and the seconds that it took. Returns lines for people, and values for the JSON object.
Describe = Callable[[Any, Any, float], tuple[list[tuple[str, str]], dict[str, Any]]]


def run_compute(
    command: str,
    options: Any,
    make_job: Callable[[Any], Any],
    describe: Describe = lambda *_: ([], {}),
    workers: int = 0,
) -> None:
    """Run a job, save it as a plan (--save), or process a saved plan (--plan).

    `workers` is how many workers the command uses without --workers.
    """
    if getattr(options, "engine", "local") == "local":
        # The first worker imports its modules while this process opens the source.
        start_warm_worker(f"brim.compute.steps.{command}_step", options.workers or workers or None)
    if isinstance(options, SavedPlanOptions):
        _run_saved(command, options)
        return
    with waiting_for(str(getattr(options, "source", None) or getattr(options, "dataset", ""))):
        if options.save is not None:
            _save_plan(options)
            return
        job = make_job(options)
    start = time.monotonic()
    result, progress = _run_job(options, job, job.run)
    _show_result(options, result, progress, job, *describe(job, result, max(time.monotonic() - start, 1e-6)))


def _run_saved(command: str, options: SavedPlanOptions) -> None:
    """Process a part of a saved plan, publish all parts, or process the missing parts and publish."""
    from brim.api.saved_jobs import no_caller, open_saved_job

    saved = open_saved_job(options.plan, Access(options.endpoint_url), options, no_caller)
    if saved.plan.verb != command:
        raise InputError(f"{saved.place.shown!r} is a plan of brim {saved.plan.verb}.", hint=saved.command("--finish"))
    if options.part is None:
        result, progress = _run_job(options, saved.job, saved.finish if options.finish else saved.run)
        _show_result(options, result, progress, saved.job, [], {})
        return
    result, _ = _run_job(options, saved.job, functools.partial(saved.part, options.part))
    print_result("done", result, options.json)


def _save_plan(options: Any) -> None:
    """Save the job as a plan, and print the next step."""
    from brim.api.saved_jobs import no_caller, write_plan

    saved = write_plan(options.save, options, measure_caller=no_caller)
    units = saved.plan.units
    if options.json:
        emit("saved", path=saved.place.shown, fingerprint=saved.plan.fingerprint, units=units)
        return
    part = shlex.join(["brim", saved.plan.verb, "--plan", saved.place.shown, "--part"])
    print_lines([
        ("saved", saved.place.shown),
        ("units", f"{units:,} (the largest possible number of parts)"),
        ("next step", f"{part} I/N  (I from 1 to N, on any machine)"),
    ])  # fmt: skip


def _run_job(options: Any, job: Any, run: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Run a job with its progress, live page and report. Return the result and the progress."""
    with show_progress(options, limit=job.limit, report=options.report, stop_file=job.stop_file) as progress:
        return run(progress), progress


def _show_result(
    options: Any, result: Any, progress: Any, job: Any, lines: list[tuple[str, str]], values: dict[str, Any]
) -> None:
    """Print a result: `lines` are added for people, `values` to the JSON object."""
    if options.json:
        peak = max(result.peak_bytes, getattr(progress, "peak_bytes", 0))
        emit("done", **(result.as_dict() | {"peak_bytes": peak} | values))
        return
    # `lines` has the counts as text, and `memory_held` reports the memory of all processes.
    first, second, *remaining = [item for item in result.summary() if item[0] not in (*result.counts, "peak memory")]
    print_lines([
        first, second, *lines, *remaining,
        *memory_held(progress, job.limit.bytes, result.peak_bytes), *result.next_steps(),
    ])  # fmt: skip

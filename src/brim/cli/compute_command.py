"""Run a job or a saved plan and print the result: the common code of the commands map, tokenize and embed."""

import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.cli.print_output import emit, memory_held, print_lines, show_progress
from brim.errors import InputError
from brim.options.groups import SavedPlanOptions


def start_worker(step: str, options: Any, workers: int | None = None) -> None:
    """Start the first worker early, so that it imports its modules while this process opens the source."""
    from brim.execution.worker_process import start_warm_worker

    if getattr(options, "engine", "local") == "local":
        start_warm_worker(step, options.workers or workers)


def run_saved(command: str, options: SavedPlanOptions) -> None:
    """Process a part of a saved plan, publish all parts, or process the missing parts and publish."""
    from brim.api.saved_jobs import no_caller, open_saved_job
    from brim.storage.location import Access

    saved = open_saved_job(options.plan, Access(options.endpoint_url), options, no_caller)
    if saved.plan.verb != command:
        raise InputError(f"{saved.place.shown!r} is a plan of brim {saved.plan.verb}.", hint=saved.command("--finish"))
    if options.part is None:
        result, progress = run_job(options, saved.job, saved.finish if options.finish else saved.run)
        show_result(options, result, progress, saved.job)
        return
    result, _ = run_job(options, saved.job, functools.partial(saved.part, options.part))
    if options.json:
        emit("done", **result.as_dict())
    else:
        print_lines(result.summary())


def save_plan(options: Any) -> None:
    """Save the job as a plan, and print the next step."""
    from brim.api.saved_jobs import no_caller, write_plan

    saved = write_plan(options.save, options, held=no_caller)
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


def run_job(options: Any, job: Any, run: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Run a job with its progress, live page and report. Return the result and the progress."""
    with show_progress(options, limit=job.limit, report=options.report, stop_file=job.stop_file) as progress:
        return run(progress), progress


def show_result(
    options: Any,
    result: Any,
    progress: Any,
    job: Any,
    lines: Sequence[tuple[str, str]] = (),
    values: Mapping[str, Any] | None = None,
) -> None:
    """Print a result: `lines` are added for people, `values` to the JSON object."""
    if options.json:
        peak = max(result.peak_bytes, getattr(progress, "peak_bytes", 0))
        emit("done", **(result.as_dict() | {"peak_bytes": peak} | dict(values or {})))
        return
    # `lines` has the counts as text, and `memory_held` reports the memory of all processes.
    first, second, *remaining = [item for item in result.summary() if item[0] not in (*result.counts, "peak memory")]
    print_lines([
        first, second, *lines, *remaining,
        *memory_held(progress, job.limit.bytes, result.peak_bytes), *result.next_steps(),
    ])  # fmt: skip

"""What the verbs that compute share: reading rows, running the job, and saying what came of it."""

import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from brim.cli.flags import (
    ComputingFlags,
    LiveFlags,
    PartFlags,
    ScalingFlags,
    ShowingFlags,
    WatchingFlags,
    all_true,
    split_names,
)
from brim.cli.show import emit, followed, memory_held, print_lines
from brim.errors import InputError
from brim.progress import Progress

# What a machine may say of a plan that was saved; the plan says the rest.
_WITH_PLAN = (
    "memory", "workers", "state", "stop_file", "report", "endpoint_url", "json", "quiet", "live", "live_port", "open",
    "plan", "part", "finish",
)  # fmt: skip


def start_worker(step: str, workers: int | None, scaling: ScalingFlags) -> None:
    """The first one loads what it needs while this process does, and looks at the source."""
    from brim.schedule.worker_process import start_spare

    if scaling.engine == "local":
        start_spare(step, workers)


def words_of(*groups: Any) -> dict[str, Any]:
    """What a job is told in Python. A page about it is made here, where the command is known."""
    words = {name: value for group in groups for name, value in vars(group).items()}
    words.pop("report")
    return words | {"columns": split_names(words["columns"]), "where": all_true(words["where"])}


def need(argument: str | None, name: str) -> str:
    """What only a saved plan can stand for."""
    if argument is None:
        raise InputError(f"{name} is missing.", hint="Give it, or a plan that was saved: --plan PLAN.")
    return argument


def is_saved(parts: PartFlags, context: typer.Context) -> bool:
    """Whether a saved plan says what is to be done; InputError for what cannot go with it."""
    if parts.plan is None:
        if parts.part is not None or parts.finish:
            raise InputError(
                f"{'--finish' if parts.part is None else '--part'} needs a plan that was saved.",
                hint="Save one by adding --save PLAN to the command, then give --plan PLAN.",
            )
        return False
    if parts.part is not None and parts.finish:
        raise InputError("Choose one of --part (compute) and --finish (publish).")
    given = [
        parameter.opts[0] if parameter.param_type_name == "option" else str(parameter.name).upper()
        for parameter in context.command.params
        if parameter.name and parameter.name not in _WITH_PLAN
        and getattr(context.get_parameter_source(parameter.name), "name", "") == "COMMANDLINE"
    ]  # fmt: skip
    if given:
        raise InputError(
            f"{', '.join(given)} cannot go with --plan: the plan says what is done, from what and where.",
            hint="Leave it out, or save another plan.",
        )
    return True


def run_saved(
    verb: str,
    parts: PartFlags,
    words: dict[str, Any],
    computing: ComputingFlags,
    showing: ShowingFlags,
    watching: WatchingFlags,
    live: LiveFlags,
) -> None:
    """A part of a saved plan, its end, or all that is missing."""
    from brim.api.job_options import RunningGiven
    from brim.api.saved_jobs import no_caller, opened_job
    from brim.buckets.bucket_address import Access

    machine = RunningGiven(**{name: words[name] for name in ("memory", "workers", "state", "stop_file")})
    saved = opened_job(need(parts.plan, "PLAN"), Access(words["endpoint_url"]), machine, no_caller)
    if saved.plan.verb != verb:
        raise InputError(f"{saved.place.shown!r} is a plan of brim {saved.plan.verb}.", hint=saved.command("--finish"))
    if parts.part is None:
        do: Callable[[Progress], Any] = saved.finish if parts.finish else saved.run
        computed, progress = _followed(do, saved.job, computing, showing, watching, live)
        tell(computed, progress, saved.job, showing)
        return
    do = functools.partial(saved.part, parts.part)
    result, _ = _followed(do, saved.job, computing, showing, watching, live)
    if showing.json:
        emit("done", **{name: getattr(result, name) for name in result.__slots__})
        return
    print_lines(result.lines)


def tell_saved(saved: Any, showing: ShowingFlags) -> None:
    """What was saved, and what to do with it."""
    units = saved.plan.units
    if showing.json:
        emit("saved", path=saved.place.shown, fingerprint=saved.plan.fingerprint, units=units)
        return
    part = shlex.join(["brim", saved.plan.verb, "--plan", saved.place.shown, "--part"])
    print_lines([
        ("saved", saved.place.shown),
        ("units", f"{units:,}, to be shared by at most as many parts"),
        ("next", f"{part} I/N  (I from 1 to N, on any machine)"),
    ])  # fmt: skip


def run_job(
    job: Any, computing: ComputingFlags, showing: ShowingFlags, watching: WatchingFlags, live: LiveFlags
) -> tuple[Any, Any]:
    """Run it under the progress that fits, and with a page about it if asked for."""
    return _followed(job.run, job, computing, showing, watching, live)


def _followed(
    run: Callable[[Progress], Any],
    job: Any,
    computing: ComputingFlags,
    showing: ShowingFlags,
    watching: WatchingFlags,
    live: LiveFlags,
) -> tuple[Any, Any]:
    about: dict[str, Any] = {"limit": job.limit, "report": computing.report, "stop_file": job.stop_file}
    with followed(showing, watching, live, **about) as progress:
        return run(progress), progress


def tell(
    computed: Any,
    progress: Any,
    job: Any,
    showing: ShowingFlags,
    more: Sequence[tuple[str, str]] = (),
    more_facts: Mapping[str, Any] | None = None,
) -> None:
    """What was done. `more` are lines for people, `more_facts` keys for --json."""
    built, outcome = computed.built, computed.outcome
    peak = max(outcome.peak_bytes, getattr(progress, "peak_bytes", 0))
    units = len(outcome.receipts)
    if showing.json:
        facts = {name: getattr(built, name) for name in built.__slots__}
        counted = {
            "units": units,
            "computed": outcome.computed,
            "retries": outcome.retries,
            "bad_rows": outcome.bad_rows,
            "bad_batches": outcome.bad_batches,
            "peak_bytes": peak,
            **({"encoders": outcome.encoders} if outcome.encoders else {}),
            **computed.counts,
            **(more_facts or {}),
        }
        emit("done", **(facts | counted), quarantine=computed.quarantine)
        return
    told_otherwise = {*computed.counts, "memory"}
    done, holds, *rest = [line for line in computed.lines if line[0] not in told_otherwise]
    lines = [done, holds, *more, *rest]
    lines += memory_held(progress, job.limit.bytes, outcome.peak_bytes)
    print_lines(lines)

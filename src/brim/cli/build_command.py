"""brim build: package files into shards."""

import functools
import shlex
from typing import Annotated, Any

from brim.cli.command import Command
from brim.cli.plan_command import show_plan
from brim.cli.print_output import emit, memory_held, print_lines, show_progress, waiting_for
from brim.memory.peak import PeakSampler
from brim.options.build_options import BuildOptions
from brim.options.declare import Common, Option, Path
from brim.options.groups import RunOptions, SavedPlanOptions, ShowOptions
from brim.records import dataclass


@dataclass(frozen=True, kw_only=True)
class BuildCommand(ShowOptions, BuildOptions, panel="Run"):
    """`brim build SOURCE DEST`.

    Examples:
        brim build photos/ out/ --label-from parent --memory 1GB
        brim build scans.csv hf://datasets/me/scans --files t1w:nifti
        brim build s3://openneuro.org/ds004884 out/ --recipe arc --anonymous

    Writes Parquet (or WebDataset) shards and a dataset card, so that `load_dataset("DEST")` works and decodes, in
    about 60 MB of memory (100 MB to the Hub, up to 200 MB from or to an object store) however large the files are.
    Run the same command again after a crash, a kill or Ctrl-C: it resumes.

    To the Hub or an object store nothing is written to disk but a ledger. Readers of the Hub see the old version or
    the new one, never a part of it. The token comes from `hf auth login` or HF_TOKEN, the keys of a store from the
    environment, AWS_PROFILE or the role of the machine.

    With --plan, a plan that `brim plan --save` wrote is built: part I of N with --part I/N, on any machine that
    sees the source (--root names its folder where that differs); --finish publishes the output of all parts;
    without either option, this machine builds all missing parts and publishes.
    """

    dry_run: Annotated[bool, Common("Only show the plan, as brim plan does.")] = False


@dataclass(frozen=True, kw_only=True)
class BuildPartCommand(SavedPlanOptions):
    """`brim build --plan PLAN`."""

    root: Annotated[Path | None, Option("Folder of the source on this machine.", "DIR")] = None


def run(options: BuildCommand | BuildPartCommand) -> None:
    from brim.api.build_api import make_build_plan, open_plan

    part = options.part if isinstance(options, BuildPartCommand) else None
    job: Any
    with PeakSampler() as sampler:  # reading a table may use more memory than building it
        if isinstance(options, BuildPartCommand):
            running = options.values(RunOptions)
            job = open_plan(options.plan, root=options.root, endpoint_url=options.endpoint_url, **running)
            do: Any = functools.partial(job.part, part) if part else job.finish if options.finish else job.run
        else:
            with waiting_for(str(options.source)):
                job = make_build_plan(options, runs=not options.dry_run)
            do = job.run
            if options.dry_run:
                show_plan(job, options.json)
                return
        # A part has a separate stop file next to the plan; the user's stop file stops all parts.
        stop_file = None if part is not None and options.stop_file is None else job.stop_file
        with show_progress(
            options, limit=job.limit, report=options.report, takes=job.takes, stop_file=stop_file
        ) as progress:
            for note in job.plan.table.notes() if part is None else ():
                progress.note(note)
            result = do(progress)
    if options.json:
        emit("done", **result.as_dict())
        return
    if part is not None:
        print_lines(result.lines)
        return
    lines = [*result.lines, *memory_held(progress, job.limit.bytes, sampler.peak_bytes)]
    print_lines([*lines, *_next_steps(options, job, result)])


def _next_steps(options: BuildCommand | BuildPartCommand, job: Any, result: Any) -> list[tuple[str, str]]:
    """Return the commands that load and verify the dataset."""
    from brim.jobs.results import load_dataset

    if isinstance(options, BuildPartCommand):
        destination, config, source = str(result.destination), job.hub.config, []
        store = job.destination.access.endpoint if job.destination is not None else None
        passed = [("--state-dir", options.state_dir), ("--endpoint-url", store)]
    else:
        destination, config, store = str(options.destination), options.config, options.endpoint_url
        source = [] if options.append else [str(options.source)]  # an appended part is not all of the dataset
        passed = [("--root", options.root), ("--state-dir", options.state_dir), ("--endpoint-url", store)]
        passed += [("--source-endpoint-url", options.source_endpoint_url)]
    flags = [str(text) for flag, value in passed if value for text in (flag, value)]
    flags += ["--anonymous"] if isinstance(options, BuildCommand) and options.anonymous else []
    lines = []
    if job.plan.format == "parquet":
        lines.append(("load", load_dataset(destination, config, (shard.split for shard in job.plan.shards), store)))
    return [*lines, ("verify with", shlex.join(["brim", "verify", destination, *source, *flags]))]


COMMAND = Command(BuildCommand, run, saved=BuildPartCommand)

"""brim map: apply a function to rows."""

from brim.cli.command import Command
from brim.cli.compute_command import run_job, run_saved, save_plan, show_result, start_worker
from brim.cli.print_output import waiting_for
from brim.options.compute_options import MapToDestinationOptions, SaveOptions
from brim.options.groups import SavedPlanOptions, ShowOptions
from brim.records import dataclass


@dataclass(frozen=True, kw_only=True)
class MapCommand(ShowOptions, SaveOptions, MapToDestinationOptions):
    """`brim map SOURCE DEST`.

    Examples:
        brim map docs.jsonl out/ --fn mymodule:clean --memory 4GB
        brim map 'logs/*.jsonl.zst' out/ --fn steps.py:parse --batched
        brim map table.csv out/

    SOURCE is JSONL, CSV, TSV, Parquet, Arrow or text (also .gz and .zst), a folder or a glob of them, also in an
    object store, or a folder that `datasets` has saved. The function takes and returns the same values as for
    `Dataset.map`. Without --fn, the rows are written unchanged.

    As many workers run as the memory limit allows. A batch that runs out of memory is retried with more memory,
    then in smaller parts if that cannot change the result. Run the same command again after a crash, a kill or
    Ctrl-C: finished units are not computed again.

    With --save, nothing is computed: brim map --plan PLAN --part 3/100 then processes one of 100 parts on any
    machine, and brim map --plan PLAN --finish publishes the result.
    """


def run(options: MapCommand | SavedPlanOptions) -> None:
    start_worker("brim.compute.steps.map_step", options)
    if isinstance(options, SavedPlanOptions):
        run_saved("map", options)
        return
    from brim.api.compute_api import map_job

    with waiting_for(str(options.dataset)):
        if options.save is not None:
            save_plan(options)
            return
        job = map_job(options, held_bytes=0)
    result, progress = run_job(options, job, job.run)
    show_result(options, result, progress, job)


COMMAND = Command(MapCommand, run, saved=SavedPlanOptions)

"""brim embed: compute embeddings of texts and images."""

import time

from brim.cli.command import Command
from brim.cli.compute_command import run_job, run_saved, save_plan, show_result, start_worker
from brim.cli.print_output import waiting_for
from brim.options.compute_options import EmbedToDestinationOptions, SaveOptions
from brim.options.groups import SavedPlanOptions, ShowOptions
from brim.records import dataclass


@dataclass(frozen=True, kw_only=True)
class EmbedCommand(ShowOptions, SaveOptions, EmbedToDestinationOptions):
    """`brim embed SOURCE DEST`.

    Examples:
        brim embed texts.parquet emb.npy --column text --model intfloat/e5-small-v2
        brim embed photos/ emb.npy --image image --model openai/clip-vit-large-patch14
        brim embed pairs.jsonl vectors/ --column caption --model mine:factory

    SOURCE is rows (JSONL, CSV, Parquet, Arrow, text; also .gz and .zst) or a folder of images, also in an object
    store. DEST ends in .safetensors, .npy or .parquet; or it is a folder, hf://datasets/ORG/NAME or
    s3://BUCKET/PREFIX for Parquet shards. Vectors are written to disk as they are computed, in the order of the
    rows; run the same command again after a crash to resume.

    With --save, nothing is computed: brim embed --plan PLAN --part 3/100 then processes one of 100 parts on any
    machine, and brim embed --plan PLAN --finish publishes the result.
    """


def run(options: EmbedCommand | SavedPlanOptions) -> None:
    start_worker("brim.compute.steps.embed_step", options, 1)
    if isinstance(options, SavedPlanOptions):
        run_saved("embed", options)
        return
    from brim.api.compute_api import embed_job

    with waiting_for(str(options.source)):
        if options.save is not None:
            save_plan(options)
            return
        job = embed_job(options, held_bytes=0)
    start = time.monotonic()
    result, progress = run_job(options, job, job.run)
    rate = result.rows / max(time.monotonic() - start, 1e-6)
    lines = [("rate", f"{rate:,.1f} rows per second, loading included")] if result.computed else []
    show_result(options, result, progress, job, lines)


COMMAND = Command(EmbedCommand, run, saved=SavedPlanOptions)

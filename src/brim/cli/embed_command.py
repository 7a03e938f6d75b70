"""brim embed: compute embeddings of texts and images."""

from typing import Any

from brim.cli.command import Command
from brim.cli.compute_command import run_compute
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
    run_compute("embed", options, _make_job, _describe, workers=1)


def _make_job(options: EmbedCommand) -> Any:
    from brim.api.compute_api import embed_job

    return embed_job(options, held_bytes=0)


def _describe(job: Any, result: Any, seconds: float) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    rate = f"{result.rows / seconds:,.1f} rows per second, loading included"
    return [("rate", rate)] if result.computed else [], {}


COMMAND = Command(EmbedCommand, run, saved=SavedPlanOptions)

"""brim embed: vectors of texts and images, within a limit."""

import json
import time
from typing import Annotated, Any

import typer

from brim.cli.compute_flags import is_saved, need, run_job, run_saved, start_worker, tell, tell_saved, words_of
from brim.cli.flags import (
    ComputingFlags,
    KeepingFlags,
    LiveFlags,
    Many,
    PartFlags,
    PublishingFlags,
    RowFlags,
    RunningFlags,
    ScalingFlags,
    ShowingFlags,
    StoringFlags,
    WatchingFlags,
)
from brim.cli.show import waiting_for
from brim.errors import InputError

HELP = """Put rows through an embedding model and write their vectors, without ever holding them.

SOURCE is rows (JSONL, CSV, Parquet, Arrow, text; also .gz and .zst) or a folder of images; s3://BUCKET/PREFIX is a
folder too. DEST ends in .safetensors, .npy or .parquet, or is a folder, hf://datasets/ORG/NAME or s3://BUCKET/PREFIX
for Parquet shards. Vectors go to disk as they come, in the order of the rows; run the same command again after a
crash. docs/embed.md has models, formats and promises.

[bold]Examples[/bold]

  brim embed captions.parquet emb.safetensors --column caption \\
      --model sentence-transformers/all-MiniLM-L6-v2
  brim embed photos/ emb.npy --image image --keep image \\
      --model openai/clip-vit-large-patch14
  brim embed pairs.jsonl vectors/ --model mine:factory --column caption \\
      --image path --keep id --memory 8GB
"""


def _model(*names: str, metavar: str | None = None, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Model")


def _vectors(*names: str, metavar: str | None = None, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Vectors")


def embed(
    context: typer.Context,
    rows: RowFlags,
    publishing: PublishingFlags,
    running: RunningFlags,
    scaling: ScalingFlags,
    computing: ComputingFlags,
    keeping: KeepingFlags,
    showing: ShowingFlags,
    watching: WatchingFlags,
    live: LiveFlags,
    storing: StoringFlags,
    parts: PartFlags,
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="A file, folder or glob of rows; or images; or s3://…")
    ] = None,
    dest: Annotated[
        str | None, typer.Argument(metavar="DEST", help="A file, a folder, hf://datasets/ORG/NAME, or s3://…")
    ] = None,
    model: Annotated[
        str | None,
        _model(
            "--model",
            metavar="NAME|FOLDER|MODULE:FACTORY",
            help="sentence-transformers, transformers, or yours (or FILE.py:FACTORY).",
        ),
    ] = None,
    column: Annotated[str | None, _vectors("--column", metavar="NAME", help="The column of texts.")] = None,
    image: Annotated[str | None, _vectors("--image", metavar="NAME", help="The column of images.")] = None,
    keep: Annotated[
        Many, _vectors("--keep", metavar="COLUMN", help="Stays beside the vectors. May be repeated.")
    ] = None,
    batch_size: Annotated[int, _vectors("--batch-size", metavar="ROWS", help="Rows in the model at a time.")] = 32,
    normalize: Annotated[bool, _vectors("--normalize", help="Make every vector one long.")] = False,
    nan: Annotated[str, _vectors("--nan", metavar="error|keep", help="Vectors that are no numbers.")] = "error",
    empty: Annotated[str, _vectors("--empty", metavar="error|keep", help="Texts that are missing or empty.")] = "error",
    name: Annotated[
        Many, _vectors("--name", metavar="OLD=NEW", help="Another name for the model's vectors. May be repeated.")
    ] = None,
    device: Annotated[str, _model("--device", metavar="auto|cpu|cuda|mps", help="Where the model runs.")] = "auto",
    dtype: Annotated[
        str, _model("--dtype", metavar="auto|float32|float16|bfloat16", help="auto: that of the weights.")
    ] = "auto",
    pooling: Annotated[
        str | None, _model("--pooling", metavar="mean|cls|last", help="For transformers models of text.")
    ] = None,
    no_projection: Annotated[
        bool, _model("--no-projection", help="CLIP: the vectors before the common space.")
    ] = False,
    max_tokens: Annotated[int | None, _model("--max-tokens", metavar="N", help="Texts are cut to N tokens.")] = None,
    prompt: Annotated[str | None, _model("--prompt", metavar="TEXT", help="Before every text.")] = None,
    revision: Annotated[str | None, _model("--revision", metavar="REV", help="Of a model on the Hub.")] = None,
    argument: Annotated[
        Many, _model("--argument", metavar="NAME=VALUE", help="For a factory of yours; JSON values. May be repeated.")
    ] = None,
    split: Annotated[str, _vectors("--split", metavar="NAME", help="The split that shards become.")] = "train",
) -> None:
    start_worker("brim.steps.embed_step", running.workers or 1, scaling)
    from brim.api.compute_api import embed_job
    from brim.api.job_options import EmbedGiven

    words = words_of(rows, publishing, running, scaling, computing, keeping, storing)
    if is_saved(parts, context):
        run_saved("embed", parts, words, computing, showing, watching, live)
        return
    source, dest, model = need(source, "SOURCE"), need(dest, "DEST"), need(model, "--model")
    given = EmbedGiven(
        **words,
        keep=keep, batch_size=batch_size, normalize=normalize, name=dict(_pairs(name, "--name")), device=device,
        nan=nan, empty=empty, dtype=dtype, pooling=pooling,  # type: ignore[arg-type]  # checked by the job
        projection=not no_projection, max_tokens=max_tokens, prompt=prompt, revision=revision,
        argument={key: _value(text) for key, text in _pairs(argument, "--argument")}, split=split,
    )  # fmt: skip
    with waiting_for(source):
        job = embed_job(source, model, dest, column, image, given, held_bytes=0)
        if parts.save is not None:
            from brim.api.saved_jobs import no_caller, write_plan

            named = {"source": source, "model": model, "destination": dest, "column": column, "image": image}
            tell_saved(write_plan(parts.save, job, given, named, held=no_caller), showing)
            return
    began = time.monotonic()
    computed, progress = run_job(job, computing, showing, watching, live)
    rate = computed.built.rows / max(time.monotonic() - began, 1e-6)
    more = [("rate", f"{rate:,.1f} rows a second, loading included")] if computed.outcome.computed else []
    tell(computed, progress, job, showing, more)


def _pairs(given: list[str] | None, option: str) -> tuple[tuple[str, str], ...]:
    pairs = [word.partition("=") for word in given or ()]
    for left, sign, right in pairs:
        if not (left and sign and right):
            raise InputError(f"{option} takes NAME=VALUE, not {left + sign + right!r}.")
    return tuple((left, right) for left, _, right in pairs)


def _value(text: str) -> Any:
    """A number, true, a list; anything that is not JSON is a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text

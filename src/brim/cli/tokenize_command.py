"""brim tokenize: a column of text as token ids, within a limit."""

import time
from typing import Annotated, Any

import typer

from brim.cli.compute_flags import is_saved, need, run_job, run_saved, start_worker, tell, tell_saved, words_of
from brim.cli.flags import (
    DESTINATIONS,
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
from brim.cli.show import progress_for, waiting_for

HELP = """Turn a column of text into token ids, on all cores, within a memory limit.

SOURCE is JSONL, CSV, TSV, Parquet, Arrow or text (also .gz and .zst), a folder or a glob of them, also in a bucket
(s3://BUCKET/PREFIX), or a folder that `datasets` has saved. Ids are those of `Tokenizer.encode`. The output does not
depend on workers, memory or where a run was interrupted; run the same command again to continue. docs/tokenize.md has
the formats.

[bold]Examples[/bold]

  brim tokenize corpus.jsonl.zst tokens/ --tokenizer gpt2.json --memory 2GB
  brim tokenize 'books/*.parquet' blocks/ --tokenizer gpt2 --pack 2048 --eos '<|endoftext|>'
  brim tokenize corpus.jsonl flat/ --tokenizer gpt2 --eos '<|endoftext|>' \\
      --format bin --split 0.99/0.01
  brim tokenize 's3://lab/texts/*.jsonl.zst' s3://lab/tokens --tokenizer gpt2
"""


def _tokens(*names: str, metavar: str | None = None, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Tokens")


def _output(*names: str, metavar: str | None = None, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Output")


def tokenize(
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
        str | None, typer.Argument(metavar="SOURCE", help="A file, folder or glob of rows; or s3://…")
    ] = None,
    dest: Annotated[
        str | None,
        typer.Argument(metavar="DEST", help=DESTINATIONS),
    ] = None,
    tokenizer: Annotated[
        str | None,
        _tokens(
            "--tokenizer",
            metavar="FILE|NAME",
            help="A tokenizer.json as it is; or a folder or name on the Hub, as AutoTokenizer loads it.",
        ),
    ] = None,
    column: Annotated[str, _tokens("--column", metavar="NAME", help="The column of text.")] = "text",
    keep: Annotated[Many, _tokens("--keep", metavar="COLUMN", help="Stays beside the ids. May be repeated.")] = None,
    eos: Annotated[
        str | None,
        _tokens(
            "--eos",
            metavar="TOKEN",
            help="Append this token to every document. (default: none; with --pack the tokenizer's eos_token)",
        ),
    ] = None,
    no_eos: Annotated[bool, _tokens("--no-eos", help="Pack documents without a token at their end.")] = False,
    special_tokens: Annotated[
        bool | None,
        _tokens(
            "--special-tokens/--no-special-tokens",
            help="What the tokenizer puts around a text. (default: yes; no with --pack)",
        ),
    ] = None,
    max_length: Annotated[
        int | None, _tokens("--max-length", metavar="N", help="Documents are cut to N tokens. (default: not cut)")
    ] = None,
    encoder: Annotated[
        str,
        _tokens(
            "--encoder",
            metavar="auto|reference|fast",
            help="Who encodes: the same ids. auto: the fast one where it is installed, proved while it runs.",
        ),
    ] = "auto",
    long_documents: Annotated[
        str,
        _tokens(
            "--long-documents", metavar="cut|refuse", help="Longer texts than --long-chars: in pieces, or an error."
        ),
    ] = "cut",
    long_chars: Annotated[int, _tokens("--long-chars", metavar="N", help="What a long text is.")] = 65_536,
    pack: Annotated[
        int | None, _output("--pack", metavar="N", help="Rows of exactly N tokens, across documents.")
    ] = None,
    pack_tail: Annotated[
        str, _output("--pack-tail", metavar="drop|keep", help="The tokens at the end that do not fill a row.")
    ] = "drop",
    format: Annotated[str, _output("--format", metavar="parquet|arrow|bin", help="What is written.")] = "parquet",
    dtype: Annotated[
        str, _output("--dtype", metavar="auto|uint16|uint32", help="auto: int32; for bin the smallest that fits.")
    ] = "auto",
    split: Annotated[
        str | None,
        _output("--split-into", "--split", metavar="SHARES", help="Of train, validation (and test), like 0.99/0.01."),
    ] = None,
    shuffle: Annotated[
        int | None, _output("--shuffle", metavar="SEED", help="Documents in random order, out of core.")
    ] = None,
    rows_per_shard: Annotated[
        int | None, _output("--rows-per-shard", metavar="N", help="(default: about 256 MB of ids)")
    ] = None,
) -> None:
    start_worker("brim.steps.tokenize_step", running.workers, scaling)
    from brim.api.compute_api import tokenize_job
    from brim.api.job_options import TokenizeGiven

    words = words_of(rows, publishing, running, scaling, computing, keeping, storing)
    if is_saved(parts, context):
        run_saved("tokenize", parts, words, computing, showing, watching, live)
        return
    source, dest, tokenizer = need(source, "SOURCE"), need(dest, "DEST"), need(tokenizer, "--tokenizer")
    given = TokenizeGiven(
        **words,
        keep=keep, eos=eos, no_eos=no_eos, special_tokens=special_tokens, max_length=max_length,
        encoder=encoder,  # type: ignore[arg-type]  # checked by the job, as are those below
        long_documents=long_documents, long_chars=long_chars,  # type: ignore[arg-type]
        pack=pack, pack_tail=pack_tail, format=format, dtype=dtype,  # type: ignore[arg-type]
        split=split, shuffle=shuffle, rows_per_shard=rows_per_shard,
    )  # fmt: skip
    with waiting_for(source):
        note = progress_for(showing.json, watching.quiet).note
        job, step = tokenize_job(source, tokenizer, dest, column, given, note=note, held_bytes=0)
        if parts.save is not None:
            from brim.api.saved_jobs import no_caller, write_plan

            named = {"source": source, "tokenizer": tokenizer, "destination": dest, "column": column}
            tell_saved(write_plan(parts.save, job, given, named, held=no_caller), showing)
            return
    if not watching.quiet:
        progress_for(showing.json, quiet=False).note(f"encoder: {step.encoder}")
    began = time.monotonic()
    computed, progress = run_job(job, computing, showing, watching, live)
    more = _told(computed, time.monotonic() - began, step.options.eos, pack)
    tell(computed, progress, job, showing, more, {"eos": step.options.eos})


def _told(computed: Any, seconds: float, eos: str | None, pack: int | None) -> list[tuple[str, str]]:
    """What was counted, in words."""
    none = "none: packed documents follow each other without a token between them"
    end = [("eos", none if eos is None else eos)] if eos is not None or pack is not None else []
    counts = computed.counts
    if not counts:
        return end
    rate = f", {counts['tokens'] / max(seconds, 1e-6):,.0f} a second" if computed.outcome.computed else ""
    lines = [("tokens", f"{counts['tokens']:,} of {counts['documents']:,} documents{rate}"), *end]
    if computed.outcome.encoders:
        most = sorted(computed.outcome.encoders.items(), key=lambda one: -one[1])
        lines.append(("encoder", ", ".join(name if len(most) == 1 else f"{name} ({n:,} units)" for name, n in most)))
    said = {
        "empty": "empty texts: {:,}",
        "null": "missing texts: {:,}",
        "cut": "long texts encoded in pieces: {:,}",
        "rough": "of them cut where no place was safe: {:,}",
        "dropped_tail": "tokens at the end that did not fill a row: {:,}",
    }
    notes = [text.format(counts[name]) for name, text in said.items() if counts[name]]
    return [*lines, ("of note", "; ".join(notes))] if notes else lines

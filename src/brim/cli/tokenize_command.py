"""brim tokenize: turn text into token ids."""

from typing import Any

from brim.cli.command import Command
from brim.cli.compute_command import run_compute
from brim.cli.print_output import print_stderr, progress_for
from brim.options.compute_options import SaveOptions, TokenizeToDestinationOptions
from brim.options.groups import SavedPlanOptions, ShowOptions
from brim.records import dataclass


@dataclass(frozen=True, kw_only=True)
class TokenizeCommand(ShowOptions, SaveOptions, TokenizeToDestinationOptions):
    """`brim tokenize SOURCE DEST`.

    Examples:
        brim tokenize corpus.jsonl.zst tokens/ --tokenizer gpt2 --memory 2GB
        brim tokenize 'corpus/*.parquet' blocks/ --tokenizer gpt2 --pack 2048
        brim tokenize a.jsonl out/ --tokenizer gpt2 --split-into train=0.9,test=0.1

    SOURCE is JSONL, CSV, TSV, Parquet, Arrow or text (also .gz and .zst), a folder or a glob of them, also in an
    object store, or a folder that `datasets` has saved. The ids are those of `Tokenizer.encode`. The output does
    not depend on the number of workers, the memory or an interruption; run the same command again to resume.

    With --save, nothing is computed: brim tokenize --plan PLAN --part 3/100 then processes one of 100 parts on any
    machine, and brim tokenize --plan PLAN --finish publishes the result.
    """


def run(options: TokenizeCommand | SavedPlanOptions) -> None:
    if isinstance(options, TokenizeCommand) and options.deprecated_shares is not None:
        option, old, new = options.deprecated_shares
        print_stderr(f"brim: --{option.replace('_', '-')} {old} is now --split-into {new}.")
    run_compute("tokenize", options, _make_job, _describe)


def _make_job(options: TokenizeCommand) -> Any:
    from brim.api.compute_api import tokenize_job

    note = progress_for(options.json, options.quiet).note
    job = tokenize_job(options, note=note, held_bytes=0)
    plan: Any = job.plan
    note(f"encoder: {plan.step.encoder}")
    return job


def _describe(job: Any, result: Any, seconds: float) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Return the lines about tokens, encoders and unusual texts."""
    if job.plan.step.facts["step"] == "chat":
        return _describe_chats(job, result)
    eos, counts = job.plan.step.options.eos, result.counts
    none = "none: packed documents follow each other without a token between them"
    end = [("eos", none if eos is None else eos)] if eos is not None or job.plan.output.options.pack is not None else []
    if not counts:
        return end, {"eos": eos}
    rate = f", {counts['tokens'] / seconds:,.0f} per second" if result.computed else ""
    lines = [("tokens", f"{counts['tokens']:,} of {counts['documents']:,} documents{rate}"), *end]
    if result.encoders:
        encoders = sorted(result.encoders.items(), key=lambda item: -item[1])
        lines.append(
            ("encoder", ", ".join(name if len(encoders) == 1 else f"{name} ({n:,} units)" for name, n in encoders))
        )
    texts = {
        "empty": "empty texts: {:,}",
        "null": "missing texts: {:,}",
        "cut": "long texts encoded in parts: {:,}",
        "rough": "of them cut inside a word, where the ids may differ: {:,}",
        "dropped_tail": "tokens at the end that did not fill a row: {:,}",
    }
    notes = [text.format(counts[name]) for name, text in texts.items() if counts[name]]
    return [*lines, *([("notes", "; ".join(notes))] if notes else [])], {"eos": eos}


def _describe_chats(job: Any, result: Any) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Return the lines about conversations, labels, packed rows and rows that were left out."""
    options, counts = job.plan.output.options, result.counts
    if not counts:
        return [], {}
    kept = counts["documents"] - counts["overlong"]
    share = counts["trained"] / max(counts["tokens"], 1)
    lines = [("tokens", f"{counts['tokens']:,} of {kept:,} conversations, {share:.1%} with labels")]
    values: dict[str, Any] = {}
    if options.pack is not None and result.rows:
        fill = counts["tokens"] / (result.rows * options.pack)
        lines.append(("packed", f"rows of at most {options.pack:,} tokens, {fill:.1%} full"))
        values["fill_rate"] = round(fill, 4)
    texts = {
        "overlong": "conversations that are too long, left out: {:,}",
        "truncated": "conversations that were truncated: {:,}",
        "rough": "long conversations cut inside a word, where the ids may differ: {:,}",
    }
    notes = [text.format(counts[name]) for name, text in texts.items() if counts[name]]
    return [*lines, *([("notes", "; ".join(notes))] if notes else [])], values


COMMAND = Command(TokenizeCommand, run, saved=SavedPlanOptions)

"""brim check: look at every file before a long run."""

from typing import Annotated, Any

import typer

from brim.cli.flags import (
    BidsFlags,
    ChoosingFlags,
    LiveFlags,
    ReadingFlags,
    ShowingFlags,
    SourceArgument,
    StoringFlags,
    WatchingFlags,
    all_true,
    read,
    split_names,
)
from brim.cli.show import emit, followed, wrapped

HELP = """Look at every file before a long run, or at a dataset that is published.

Every file exists, can be read, is data and not a pointer, is not empty, and fits the format. The headers of
NIfTI files, images, PDFs and gzip streams are right: of a sample, or with --all of every file, and then gzip
streams are read to their last byte. Of a dataset (hf://, s3://, or a folder that was built, by brim or not): schema,
counts that a recipe expects, lists that go together, headers of a sample or with --deep of all. Writes nothing.
Exits 3 if anything is wrong, and names the files.

[bold]Examples[/bold]

  brim check scans/
  brim check scans.csv --files t1w:nifti --all
  brim check ds004884/ --bids-validator --list
  brim check s3://openneuro.org/ds004884 --recipe arc --anonymous
  brim check hf://datasets/me/arc --recipe arc
"""

_SHOWN = 3


def check(
    source: SourceArgument,
    reading: ReadingFlags,
    bids: BidsFlags,
    choosing: ChoosingFlags,
    storing: StoringFlags,
    showing: ShowingFlags,
    watching: WatchingFlags,
    live: LiveFlags,
    sample_size: Annotated[
        int, typer.Option("--sample-size", metavar="N", min=0, help="Headers to look at in each file column.")
    ] = 10,
    everything: Annotated[
        bool, typer.Option("--all", "--deep", help="Every header, and every gzip stream to its last byte.")
    ] = False,
    every_file: Annotated[bool, typer.Option("--list", help="Name every offending file, not three a check.")] = False,
    validator: Annotated[
        bool, typer.Option("--bids-validator", help="Run the official BIDS validator too (bids-validator-deno).")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            metavar="SHARE",
            help="How far counts may be from what the recipe expects. (default: the recipe's, else 0.1)",
        ),
    ] = None,
) -> None:
    from brim.jobs.check_dataset import check_dataset, is_published, refuse_for_sources
    from brim.jobs.check_files import bids_validator
    from brim.jobs.check_files import check as check_table

    columns = split_names(choosing.columns)
    where = all_true(choosing.where)
    steps = [("where", {"expression": where})] if where is not None else []
    steps += [("columns", {"names": list(columns)})] if columns else []  # type: ignore[dict-item]
    if not steps and is_published(source, storing.source.endpoint, storing.anonymous, bids.recipe):
        refuse_for_sources(_given(reading, bids, validator))
        with followed(showing, watching, live) as progress:
            found = check_dataset(
                source,
                recipe=bids.recipe,
                sample_size=sample_size,
                deep=everything,
                tolerance=tolerance,
                from_config=reading.from_config,
                from_split=reading.from_split,
                endpoint_url=storing.source.endpoint,
                anonymous=storing.anonymous,
                progress=progress,
            )
        show(found, showing.json, every_file)
        return
    with followed(showing, watching, live) as progress:
        table = read(source, reading, bids, storing, lenient=True, tolerance=tolerance, steps=tuple(steps))
        for warning in table.warnings:
            progress.note(warning)
        report = check_table(
            table,
            sample_size=sample_size,
            everything=everything,
            allow_empty=reading.allow_empty,
            strict=reading.strict,
            extra=bids_validator(source) if validator else [],
            oversize=reading.oversize,  # type: ignore[arg-type]  # checked there
            progress=progress,
        )
    show(report, showing.json, every_file)


def _given(reading: ReadingFlags, bids: BidsFlags, validator: bool) -> list[str]:
    """The flags that are for sources and were given."""
    groups = (reading, bids)
    given = [name for flags in groups for name, value in vars(flags).items() if value != getattr(type(flags)(), name)]
    given = [name.replace("_", "-") for name in given if name not in ("recipe", "strict", "from_config", "from_split")]
    return given + (["bids-validator"] if validator else [])


def show(report: Any, as_json: bool, every_file: bool) -> None:
    """Print a report; DamageFound (exit 3) if anything in it failed."""
    from brim.errors import DamageFound

    if as_json:
        for item in report.checks:
            emit("check", status=item.status, **{name: getattr(item, name) for name in item.__slots__})
        emit(
            "checked",
            ok=report.ok,
            checks=len(report.checks),
            failed=[item.name for item in report.failed],
            proved=report.proved,
            unproved=report.unproved,
        )
    else:
        _print(report.checks, every_file)
        print(wrapped(f"proved: {', '.join(report.proved) or 'nothing'}", 8))
        print(wrapped(f"not proved: {', '.join(report.unproved) or 'nothing was left out'}", 12))
    if not report.ok:
        findings = [_finding(item) for item in report.failed]
        raise DamageFound(
            f"{len(findings)} of {len(report.checks)} checks failed: {', '.join(findings)}.",
            hint="" if every_file else "Run it again with --list to see every file.",
            findings=findings,
        )


def _finding(item: Any) -> str:
    return f"{item.name} ({len(item.failed):,})" if item.failed else item.name


def _print(checks: list[Any], every_file: bool) -> None:
    counts = [
        f"{len(item.failed):,} of {item.counted:,}" if item.failed else f"{item.counted:,}" if item.counted else ""
        for item in checks
    ]
    names = max(len(item.name) for item in checks)
    width = max(map(len, counts))
    for item, count in zip(checks, counts, strict=True):
        files = _files(item)
        shown = ""
        if files and not every_file:
            more = f" and {len(files) - _SHOWN:,} more" if len(files) > _SHOWN else ""
            shown = ", ".join(files[:_SHOWN]) + more
        text = " | ".join(part for part in (item.detail, shown) if part)
        line = f"{item.status:>4}  {item.name:<{names}}  {count:>{width}}  {text}".rstrip()
        print(wrapped(line, 6))
        if every_file:
            for file in files:
                print(f"      {file}")


def _files(item: Any) -> list[str]:
    """The offending files, with what is wrong with each where that is known."""
    if not item.faults:
        return list(item.failed)
    return [f"{path} ({fault})" for path, fault in zip(item.failed, item.faults, strict=True)]

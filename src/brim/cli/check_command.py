"""brim check: check every file before a long run, or a published dataset."""

from typing import Annotated, Any

from brim.cli.command import Command
from brim.cli.print_output import emit, show_progress, waiting_for, wrapped
from brim.errors import VerificationError
from brim.options.check_options import CheckOptions
from brim.options.declare import Common
from brim.options.groups import ShowOptions
from brim.records import dataclass

_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class CheckCommand(ShowOptions, CheckOptions):
    """`brim check SOURCE`.

    Examples:
        brim check scans.csv --files t1w:nifti --all
        brim check ds004884/ --bids-validator --list
        brim check hf://datasets/me/arc --recipe arc

    For a source, checks that every file exists, can be read, contains data instead of a Git LFS or git-annex
    pointer, is not empty, and fits the format. The headers of NIfTI files, images, PDFs and gzip streams are
    checked in a sample of the files. With --all, they are checked in every file, and gzip streams are read to the
    end.

    For a dataset (a folder, hf:// or s3://, written by brim or by another program), checks the schema, the counts
    that a recipe expects, the lengths of lists that belong together, and the headers of a sample of the files
    (--all: of all files). `brim verify` compares the bytes.

    Nothing is written. Exits with 3 if anything is wrong, and names the files.
    """

    every_file: Annotated[bool, Common("Name every file that fails, not only three per check.", flags=("--list",))] = (
        False
    )


def run(options: CheckCommand) -> None:
    from brim.api.check_api import check_source

    with show_progress(options) as progress, waiting_for(str(options.source)):
        report = check_source(options, progress)
    show(report, options.json, options.every_file)


def show(report: Any, as_json: bool, every_file: bool) -> None:
    """Print a report; raise VerificationError (exit 3) if a check failed."""
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
        print(wrapped(f"checked: {', '.join(report.proved) or 'nothing'}", 9))
        print(wrapped(f"not checked: {', '.join(report.unproved) or 'nothing was left out'}", 13))
    if not report.ok:
        findings = [_finding(item) for item in report.failed]
        raise VerificationError(
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
            suffix = f" and {len(files) - _SHOWN:,} more" if len(files) > _SHOWN else ""
            shown = ", ".join(files[:_SHOWN]) + suffix
        text = " | ".join(part for part in (item.detail, shown) if part)
        line = f"{item.status:>4}  {item.name:<{names}}  {count:>{width}}  {text}".rstrip()
        print(wrapped(line, 6))
        if every_file:
            for file in files:
                print(f"      {file}")


def _files(item: Any) -> list[str]:
    """Name the files that failed, each with its fault if the fault is known."""
    if not item.faults:
        return list(item.failed)
    return [f"{path} ({fault})" for path, fault in zip(item.failed, item.faults, strict=True)]


COMMAND = Command(CheckCommand, run)

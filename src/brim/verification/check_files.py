"""Check every file of a source before a long run.

Every file is checked by `stat` and its first bytes. Headers are checked for a sample, or for every file, and then gzip
streams are read to their last byte too. Nothing is written or changed. Not covered: the expectations of a recipe, which
callers pass as checks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field, replace
from functools import partial
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import InputError, MissingDependencyError, StoppedError
from brim.file_set import Ints
from brim.formats.file_headers import PROBED_NAMES, header_kind, probe_gzip, probe_header
from brim.formats.source_reader import open_file
from brim.memory.limit import effective_limit, usable_cores
from brim.options.check_options import CheckOptions
from brim.options.groups import CheckFileOptions
from brim.plans.file_checks import REASONS, check_files, check_no_local_paths, todo
from brim.progress import Progress
from brim.records import dataclass
from brim.sources.file_table import FileTable, Finding, Reason, Refused, flat_numbers, no_rows_error
from brim.wording import Described, worded

_ABSENT: tuple[Reason, ...] = ("missing", "folder", "special", "unreadable", "url", "name", "twin")
_REQUESTS = 16  # at a time, to a bucket
_PROBED_KINDS = ("nifti", "image", "pdf")
_ANATOMICAL = (
    "T1w|T2w|FLAIR|PDw|PD|PDT2|T2star|T2starw|inplaneT1|inplaneT2|inplanePD|angio|UNIT1|MP2RAGE|MPM|MTS|MTR|"
    "MEGRE|MESE|VFA|IRT1|FLASH|T1map|T2map|T2starmap|R1map|R2map|R2starmap|PDmap|ct|ncct|cta"
)
_DERIVED = r"_(mask|dseg|probseg|msk|roi|defacemask)\.nii(\.gz)?$"


@dataclass(frozen=True, slots=True)
class Check:
    """A check and its result. `failed` are all failing files, `faults` their faults if these differ. A `skipped` check
    has no result. A `note` is information, not a failure; `sampled` means that only a sample was checked."""

    name: str
    ok: bool
    counted: int
    failed: list[str] = field(default_factory=list)
    detail: str = ""
    faults: list[str] = field(default_factory=list)
    skipped: bool = False
    note: bool = False
    sampled: bool = False

    @property
    def status(self) -> str:
        """ok, FAIL, skip or note."""
        return "FAIL" if not self.ok else "skip" if self.skipped else "note" if self.note else "ok"


@dataclass(frozen=True, slots=True, repr=False)
class CheckReport(Described):
    """The results of all checks."""

    checks: list[Check]

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The results as text lines, with the first failing files."""
        lines = []
        for check in self.checks:
            shown = "; ".join(filter(None, [check.detail, ", ".join(check.failed[:5])]))
            lines.append((check.status, f"{check.name}: {check.counted:,}{f' ({shown})' if shown else ''}"))
        return lines

    @property
    def ok(self) -> bool:
        """Whether all checks passed."""
        return all(check.ok for check in self.checks)

    @property
    def failed(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if not check.ok]

    @property
    def proved(self) -> list[str]:
        """The names of passed checks that covered everything."""
        return [check.name for check in self.checks if check.status == "ok" and not check.sampled]

    @property
    def unproved(self) -> list[str]:
        """The names of checks that were skipped or covered a sample."""
        skipped = [f"{check.name} (skipped)" for check in self.checks if check.status == "skip"]
        sampled = [f"{check.name} (of a sample)" for check in self.checks if check.status == "ok" and check.sampled]
        return skipped + sampled


def check_table(
    table: FileTable, options: CheckOptions, progress: Progress, extra: Sequence[Check] = ()
) -> CheckReport:
    """Check the files of a source: all of them by `stat` and their first bytes, a sample or all by their headers.

    Files that `oversize="skip"` leaves out of a build are not a fault. `extra` checks are added to the report.
    """
    max_cell_bytes = None if options.oversize == "skip" else options.max_cell_bytes
    if table.recipe.get("steps") and not len(table):
        raise no_rows_error(table, "check")
    at_home = _check_local_paths(table)
    looked = check_files(table, CheckFileOptions(allow_empty=options.allow_empty), max_cell_bytes)
    refused = [*looked.refused, *(Refused("annex", path) for path in looked.absent)]
    total = len(table.files)
    links = sum(r.reason == "annex" for r in table.refused)  # broken links of git-annex are not among the files
    checks = [
        _refusals("exists and can be read", refused, _ABSENT, total + len(table.refused)),
        _refusals("is data, not a pointer", refused, ("annex", "lfs"), total + links),
    ]
    if not options.allow_empty:
        checks.append(_refusals("is not empty", refused, ("empty",), total))
    if max_cell_bytes is not None:
        checks.append(_refusals("fits the format", refused, ("oversize",), total))
    checks += _check_rows(table)
    checks += [finding_check(finding) for finding in table.expected]
    checks += _check_unmatched(table, options.strict)
    if at_home.counted:
        checks.append(at_home)
    # An oversized file can be read; the other refused files cannot.
    unfit = {r.path for r in refused if r.reason != "oversize"}
    sample_size = None if options.everything or options.deep else options.sample_size
    checks += _check_headers(table, unfit, sample_size, progress)
    checks += [*options.extra, *extra]
    reminder = anatomical_reminder(table)
    return CheckReport([*checks, reminder] if reminder.counted else checks)


def anatomical_reminder(table: FileTable) -> Check:
    """Count the images that may show a face. Always ok, since brim does not detect faces."""
    paths = table.files.paths
    name = rf"(?i)_({_ANATOMICAL})\.nii(\.gz)?$|(^|/)anat/[^/]*\.nii(\.gz)?$"
    match = pc.and_not(pc.match_substring_regex(paths, name), pc.match_substring_regex(paths, "(?i)" + _DERIVED))
    mask = np.array(match, bool)
    for column, about in table.columns.items():
        if about.kind == "nifti" and re.fullmatch(f"(?i:{_ANATOMICAL})", column):
            mask[flat_numbers(table.rows.column(column))] = True
    count = int(mask.sum())
    detail = "brim cannot tell whether faces were removed from anatomical images: make sure that they were"
    return Check("faces (a reminder)", True, count, detail=detail if count else "no anatomical images", note=True)


def finding_check(finding: Finding) -> Check:
    """Convert an expectation of a recipe to a check."""
    return Check(finding.name, finding.ok, 0, detail=finding.detail, skipped=finding.skipped)


def _check_rows(table: FileTable) -> list[Check]:
    """Check the faults of rows: several files for one cell, missing partners, unknown names."""
    kinds = dict.fromkeys(fault.check for fault in table.faults)
    checks = []
    for kind in kinds:
        faults = {fault.path: fault.what for fault in table.faults if fault.check == kind}
        details = [text.removeprefix(f"{path} ") for path, text in faults.items()]
        checks.append(Check(kind, False, len(table.files), list(faults), faults=details))
    if table.aligned_with:
        misaligned = table.misaligned()
        detail = "; ".join(misaligned[:3]) or ", ".join(
            f"{name} aligned with {base}" for name, base in table.aligned_with.items()
        )
        checks.append(Check("lists go together", not misaligned, len(table), detail=detail))
    return checks


def _check_unmatched(table: FileTable, strict: bool) -> list[Check]:
    """Check files that match no column: a note, or with `strict` a failure if there is data among them."""
    files = table.unmatched
    if files is None:
        detail = "not looked at: only the first rows were read, or the source cannot tell"
        return [Check("files that no column takes", True, 0, detail=detail, skipped=True)]
    failed = bool(files.count("data")) and (strict or files.is_error)
    name, detail = "every file has a column", "; ".join(files.lines())
    if not files.count():
        return [Check(name, True, len(table.files))]
    return [Check(name, not failed, files.count(), detail=f"{detail}. {files.hint}" if failed else detail, note=True)]


def _check_local_paths(table: FileTable) -> Check:
    """Check that the metadata has no absolute paths of this machine."""
    name, count = "metadata names no path of this machine", len(table.rows.column_names) - len(table.columns)
    try:
        check_no_local_paths(table)
    except InputError as error:
        return Check(name, False, count, detail=str(error))
    return Check(name, True, count)


def _refusals(name: str, refused: Sequence[Refused], reasons: Sequence[Reason], counted: int) -> Check:
    matching = list(dict.fromkeys(r for r in refused if r.reason in reasons))
    counts = Counter(r.reason for r in matching)
    detail = worded(
        "; ".join(
            f"{count:,} × {REASONS[reason].singular}. {todo(reason, [r.path for r in matching if r.reason == reason])}"
            for reason, count in counts.most_common()
        )
    )
    return Check(name, not matching, counted, [r.path for r in matching], detail)


def _check_headers(table: FileTable, unfit: set[str], sample_size: int | None, progress: Progress) -> list[Check]:
    """Check the headers, one check per type; without a sample size those of all files, and gzip streams."""
    kinds, of_all = _choose_files(table, unfit, sample_size)
    headers_of = {number: header_kind(table.files.path(number), kind) for number, kind in kinds.items()}
    headers: dict[int, str] = {}
    streams: dict[int, str] = {}
    missing: list[MissingDependencyError] = []
    zipped = [n for n in kinds if sample_size is None and table.files.path(n).lower().endswith(".gz")]
    whole = set(zipped)

    def inspect(number: int, advance: Callable[[int], None]) -> None:
        path, kind = table.files.full_path(number), kinds[number]
        if table.files.ranges is not None:  # the name of the value, not of the shard that contains it
            path = table.files.path(number)
        try:
            fault = probe_header(path, kind, partial(open_file, table.files, number))
        except MissingDependencyError as error:
            missing.append(error)
            fault, kind = None, "file"  # the stream can be read all the same
        if fault is not None:
            headers[number] = fault
        elif (
            number in whole
            and (fault := probe_gzip(path, advance, kind, partial(open_file, table.files, number, whole=True)))
            is not None
        ):
            streams[number] = fault

    if zipped:
        progress.start("check", int(table.files.sizes[zipped].sum()), 0, effective_limit().bytes)
    try:
        # For objects, most of the time is spent waiting, unless they are read completely.
        is_waiting = table.files.bucket is not None and not zipped
        _in_threads(inspect, kinds, progress, _REQUESTS if is_waiting else usable_cores())
    finally:
        progress.finish()
    checks = []
    for name in ("NIfTI", "image", "PDF", "gzip"):
        numbers = [n for n, check in headers_of.items() if check == name]
        if of_all[name] and not numbers:
            detail = f"none of {of_all[name]:,} looked at"
            checks.append(Check(f"{name} headers", True, 0, detail=detail, skipped=True))
        elif numbers:
            sampled = f"{len(numbers):,} of {of_all[name]:,} looked at; --all looks at every file"
            detail = sampled if len(numbers) < of_all[name] else ""
            if missing and name == "NIfTI":
                skipped = f"not looked at. {missing[0]}"
                checks.append(Check("NIfTI headers", True, 0, detail=skipped, skipped=True))
                continue
            check = _faulty(f"{name} headers", table, numbers, headers, detail)
            checks.append(replace(check, sampled=bool(detail)))
    if zipped:
        checks.append(_faulty("gzip, to the last byte", table, [n for n in zipped if n not in headers], streams))
    return checks


def _faulty(name: str, table: FileTable, numbers: list[int], faults: dict[int, str], detail: str = "") -> Check:
    wrong = [n for n in numbers if n in faults]
    return Check(
        name, not wrong, len(numbers), [table.files.path(n) for n in wrong], detail, [faults[n] for n in wrong]
    )


def _choose_files(table: FileTable, unfit: set[str], sample_size: int | None) -> tuple[dict[int, str], Counter[str]]:
    """Choose files for header checks: return file number → kind of its column, and the number of files per type."""
    kinds: dict[int, str] = {}
    of_all: Counter[str] = Counter()
    is_counted = np.zeros(len(table.files), bool)
    for name, column in table.columns.items():
        numbers = _candidates(table, flat_numbers(table.rows.column(name)), column.kind, unfit)
        fresh = np.unique(numbers[~is_counted[numbers]])
        is_counted[fresh] = True
        of_all.update(header_kind(table.files.path(n), column.kind) or "" for n in fresh.tolist())
        if sample_size is not None and len(numbers) > sample_size:
            numbers = numbers[np.linspace(0, len(numbers) - 1, sample_size).round().astype(np.int64)]
        for number in numbers.tolist():
            kinds.setdefault(number, column.kind)
    return kinds, of_all


def _candidates(table: FileTable, numbers: Ints, kind: str, unfit: set[str]) -> Ints:
    """Return the files whose headers can be checked."""
    paths = table.files.paths.take(pa.array(numbers))
    mask = table.files.sizes[numbers] > 0
    if kind not in _PROBED_KINDS:
        mask &= np.array(pc.match_substring_regex(paths, PROBED_NAMES), bool)
    if unfit:
        mask &= ~np.array(pc.is_in(paths, pa.array(list(unfit), paths.type)), bool)
    if table.files.bundles:
        mask &= ~np.isin(numbers, list(table.files.bundles))
    return numbers[mask]


def _in_threads(
    inspect: Callable[[int, Callable[[int], None]], None], numbers: Iterable[int], progress: Progress, threads: int
) -> None:
    """Inspect each file in threads: zlib releases Python's lock."""
    waiting, lock, stop = iter(numbers), threading.Lock(), threading.Event()

    def advance(size: int) -> None:
        if stop.is_set():
            raise StoppedError("Stopped.")
        progress.advance(size)

    def work() -> None:
        while not stop.is_set():
            with lock:
                number = next(waiting, None)
            if number is None:
                return
            inspect(number, advance)

    with ThreadPoolExecutor(threads) as pool:
        try:
            for future in [pool.submit(work) for _ in range(threads)]:
                future.result()
        finally:
            stop.set()  # after Ctrl-C or an error, stop the other threads


_PROGRAM = "bids-validator-deno"
_LIST = '"issues":['
_READ = 1 << 20
_MOST_FILES = 100_000  # files listed; the codes of all are counted


def bids_validator(folder: str | os.PathLike[str]) -> list[Check]:
    """Run the BIDS validator on a folder. Its errors fail the check, its warnings are notes."""
    own_program = os.path.join(os.path.dirname(sys.executable), _PROGRAM)
    program = own_program if os.path.isfile(own_program) else shutil.which(_PROGRAM)
    if program is None:
        raise MissingDependencyError(
            "The BIDS validator is not installed.", hint=f"Install it with: pip install {_PROGRAM}", extra=_PROGRAM
        )
    if not os.path.isdir(folder):
        raise InputError(
            f"{os.fspath(folder)!r} is not a folder, and --bids-validator can only be used with a BIDS folder."
        )
    command = [program, "--format", "json", "--no-color", os.path.abspath(folder)]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace") as process,
    ):
        assert process.stdout is not None
        try:
            return _sum_issues(_ValidatorOutput(process.stdout))
        except (ValueError, KeyError) as error:
            process.kill()
            code = process.wait()
            errors.seek(0)
            lines = errors.read().split("\n")
            raise InputError(
                f"The BIDS validator could not run: {lines[0].strip() or f'exit code {code}'}.",
                hint=f"Run it yourself to see its output: {_PROGRAM} {os.fspath(folder)}",
            ) from error


class _ValidatorOutput:
    """The validator's JSON, read one issue at a time: a large dataset may have a million."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.files = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        decoder = json.JSONDecoder()
        text = ""
        while _LIST not in text:
            text += self._read()
        text = text.partition(_LIST)[2]
        while not text.startswith("]"):
            try:
                issue, end = decoder.raw_decode(text)
            except json.JSONDecodeError:
                text += self._read()
                continue
            yield issue
            text = text[end:].lstrip(",") or self._read().lstrip(",")
        text += self._stream.read()
        total = re.search(r'"totalFiles":\s*(\d+)', text)
        self.files = int(total[1]) if total else 0

    def _read(self) -> str:
        piece = self._stream.read(_READ)
        if not piece:
            raise ValueError("the answer ends early")
        return piece


def _sum_issues(answer: _ValidatorOutput) -> list[Check]:
    codes_by_file: dict[str, dict[str, dict[str, None]]] = {"error": {}, "warning": {}}  # file → its distinct codes
    codes: dict[str, Counter[str]] = {"error": Counter(), "warning": Counter()}
    for issue in answer:
        severity = issue["severity"]
        if severity in codes_by_file:
            file_path = (issue.get("location") or next(iter(issue.get("affects") or ()), "")).lstrip(
                "/"
            ) or "(the dataset)"
            codes[severity][issue["code"]] += 1
            if file_path in codes_by_file[severity] or len(codes_by_file[severity]) < _MOST_FILES:
                codes_by_file[severity].setdefault(file_path, {})[issue["code"]] = None
    checks = []
    for severity, name in (("error", "BIDS validator"), ("warning", "BIDS validator, warnings")):
        total = codes[severity].total()
        common = ", ".join(f"{code} {count:,}" for code, count in codes[severity].most_common(3))
        detail = f"{total:,} {severity}s" + (f" ({common})" if common else "")
        failed = sorted(codes_by_file[severity])
        faults = [", ".join(codes_by_file[severity][path]) for path in failed]
        is_note = severity == "warning"
        if total or not is_note:
            checks.append(Check(name, is_note or not total, answer.files, failed, detail, faults, note=is_note))
    return checks

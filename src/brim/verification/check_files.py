"""Look at every file of a source before a long run, and say what would ruin it.

What `stat` and the first bytes tell is looked at for every file. Headers are looked at for a sample, or for
every file, and then gzip streams are read to their last byte too. Nothing is written or changed. What a
recipe expects of the source is not known here: such checks are handed in.
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
from brim.sources.file_table import FileTable, Finding, Reason, Refused, flat_numbers, nothing_chosen
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
    """One thing that was looked at. `failed` names all offending files, `faults` what is wrong with each of
    them, where that differs from file to file. What was `skipped` is not known to be right: nobody looked. A `note`
    is worth knowing and neither right nor wrong; `sampled` says that not all were looked at."""

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
    """All that was looked at."""

    checks: list[Check]

    @property
    def lines(self) -> list[tuple[str, str]]:
        """What was found, for people; of files, the first few."""
        lines = []
        for check in self.checks:
            shown = "; ".join(filter(None, [check.detail, ", ".join(check.failed[:5])]))
            lines.append((check.status, f"{check.name}: {check.counted:,}{f' ({shown})' if shown else ''}"))
        return lines

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]

    @property
    def proved(self) -> list[str]:
        """What was looked at in full and is right."""
        return [check.name for check in self.checks if check.status == "ok" and not check.sampled]

    @property
    def unproved(self) -> list[str]:
        """What nobody looked at, or only in part."""
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
        raise nothing_chosen(table, "check")
    at_home = _names_no_place(table)
    looked = check_files(table, CheckFileOptions(allow_empty=options.allow_empty), max_cell_bytes)
    refused = [*looked.refused, *(Refused("annex", path) for path in looked.absent)]
    total = len(table.files)
    links = sum(r.reason == "annex" for r in table.refused)  # of git-annex, which lead nowhere: not among the files
    checks = [
        _refusals("exists and can be read", refused, _ABSENT, total + len(table.refused)),
        _refusals("is data, not a pointer", refused, ("annex", "lfs"), total + links),
    ]
    if not options.allow_empty:
        checks.append(_refusals("is not empty", refused, ("empty",), total))
    if max_cell_bytes is not None:
        checks.append(_refusals("fits the format", refused, ("oversize",), total))
    checks += _rows_are_whole(table)
    checks += [finding_check(finding) for finding in table.expected]
    checks += _left(table, options.strict)
    if at_home.counted:
        checks.append(at_home)
    # An oversized file is whole as far as anybody knows; the others have nothing to look into.
    unfit = {r.path for r in refused if r.reason != "oversize"}
    sample_size = None if options.everything or options.deep else options.sample_size
    checks += _look_inside(table, unfit, sample_size, progress)
    checks += [*options.extra, *extra]
    reminder = anatomical_reminder(table)
    return CheckReport([*checks, reminder] if reminder.counted else checks)


def anatomical_reminder(table: FileTable) -> Check:
    """Counts the images that may show a face. Always ok: whether one was removed is not brim's to see."""
    paths = table.files.paths
    name = rf"(?i)_({_ANATOMICAL})\.nii(\.gz)?$|(^|/)anat/[^/]*\.nii(\.gz)?$"
    found = pc.and_not(pc.match_substring_regex(paths, name), pc.match_substring_regex(paths, "(?i)" + _DERIVED))
    mask = np.array(found, bool)
    for column, about in table.columns.items():
        if about.kind == "nifti" and re.fullmatch(f"(?i:{_ANATOMICAL})", column):
            mask[flat_numbers(table.rows.column(column))] = True
    count = int(mask.sum())
    detail = "brim cannot tell whether faces were removed from anatomical images: make sure that they were"
    return Check("faces (a reminder)", True, count, detail=detail if count else "no anatomical images", note=True)


def finding_check(finding: Finding) -> Check:
    """What a recipe expects, as a check."""
    return Check(finding.name, finding.ok, 0, detail=finding.detail, skipped=finding.skipped)


def _rows_are_whole(table: FileTable) -> list[Check]:
    """What breaks rows: several files for one, partners that are missing, names that say what nobody knows."""
    kinds = dict.fromkeys(fault.check for fault in table.faults)
    checks = []
    for kind in kinds:
        faults = {fault.path: fault.what for fault in table.faults if fault.check == kind}
        told = [what.removeprefix(f"{path} ") for path, what in faults.items()]
        checks.append(Check(kind, False, len(table.files), list(faults), faults=told))
    if table.aligned_with:
        crooked = table.misaligned()
        detail = "; ".join(crooked[:3]) or ", ".join(
            f"{name} aligned with {of}" for name, of in table.aligned_with.items()
        )
        checks.append(Check("lists go together", not crooked, len(table), detail=detail))
    return checks


def _left(table: FileTable, strict: bool) -> list[Check]:
    """Files that no column takes: a note, or where someone is strict a failure if there is data among them."""
    left = table.unmatched
    if left is None:
        detail = "not looked at: only the first rows were read, or the source cannot tell"
        return [Check("files that no column takes", True, 0, detail=detail, skipped=True)]
    failed = bool(left.count("data")) and (strict or left.is_error)
    name, detail = "every file has a column", "; ".join(left.lines())
    if not left.count():
        return [Check(name, True, len(table.files))]
    return [Check(name, not failed, left.count(), detail=f"{detail}. {left.hint}" if failed else detail, note=True)]


def _names_no_place(table: FileTable) -> Check:
    """Whether the metadata gives away where things lie on this machine."""
    name, count = "metadata names no path of this machine", len(table.rows.column_names) - len(table.columns)
    try:
        check_no_local_paths(table)
    except InputError as error:
        return Check(name, False, count, detail=str(error))
    return Check(name, True, count)


def _refusals(name: str, refused: Sequence[Refused], reasons: Sequence[Reason], counted: int) -> Check:
    found = list(dict.fromkeys(r for r in refused if r.reason in reasons))
    counts = Counter(r.reason for r in found)
    detail = worded(
        "; ".join(
            f"{count:,} × {REASONS[reason].singular}. {todo(reason, [r.path for r in found if r.reason == reason])}"
            for reason, count in counts.most_common()
        )
    )
    return Check(name, not found, counted, [r.path for r in found], detail)


def _look_inside(table: FileTable, unfit: set[str], sample_size: int | None, progress: Progress) -> list[Check]:
    """Headers, a line for each type of file; with no sample size those of all files, and gzip streams whole."""
    kinds, of_all = _chosen(table, unfit, sample_size)
    looks = {number: header_kind(table.files.path(number), kind) for number, kind in kinds.items()}
    headers: dict[int, str] = {}
    streams: dict[int, str] = {}
    lacking: list[MissingDependencyError] = []
    zipped = [n for n in kinds if sample_size is None and table.files.path(n).lower().endswith(".gz")]
    whole = set(zipped)

    def look(number: int, advance: Callable[[int], None]) -> None:
        path, kind = table.files.full_path(number), kinds[number]
        if table.files.ranges is not None:  # what it is called, not what holds it
            path = table.files.path(number)
        try:
            fault = probe_header(path, kind, partial(open_file, table.files, number))
        except MissingDependencyError as error:
            lacking.append(error)
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
        # Of objects, most of the time is spent on waiting for answers, unless they are read whole.
        waits = table.files.bucket is not None and not zipped
        _in_threads(look, kinds, progress, _REQUESTS if waits else usable_cores())
    finally:
        progress.finish()
    checks = []
    for name in ("NIfTI", "image", "PDF", "gzip"):
        numbers = [n for n, found in looks.items() if found == name]
        if of_all[name] and not numbers:
            detail = f"none of {of_all[name]:,} looked at"
            checks.append(Check(f"{name} headers", True, 0, detail=detail, skipped=True))
        elif numbers:
            sampled = f"{len(numbers):,} of {of_all[name]:,} looked at; --all looks at every file"
            detail = sampled if len(numbers) < of_all[name] else ""
            if lacking and name == "NIfTI":
                skipped = f"not looked at. {lacking[0]}"
                checks.append(Check("NIfTI headers", True, 0, detail=skipped, skipped=True))
                continue
            found = _faulty(f"{name} headers", table, numbers, headers, detail)
            checks.append(replace(found, sampled=bool(detail)))
    if zipped:
        checks.append(_faulty("gzip, to the last byte", table, [n for n in zipped if n not in headers], streams))
    return checks


def _faulty(name: str, table: FileTable, numbers: list[int], faults: dict[int, str], detail: str = "") -> Check:
    wrong = [n for n in numbers if n in faults]
    return Check(
        name, not wrong, len(numbers), [table.files.path(n) for n in wrong], detail, [faults[n] for n in wrong]
    )


def _chosen(table: FileTable, unfit: set[str], sample_size: int | None) -> tuple[dict[int, str], Counter[str]]:
    """File number → kind of its column, of the files to look into; and how many there are of each type."""
    kinds: dict[int, str] = {}
    of_all: Counter[str] = Counter()
    seen = np.zeros(len(table.files), bool)
    for name, column in table.columns.items():
        numbers = _candidates(table, flat_numbers(table.rows.column(name)), column.kind, unfit)
        fresh = np.unique(numbers[~seen[numbers]])
        seen[fresh] = True
        of_all.update(header_kind(table.files.path(n), column.kind) or "" for n in fresh.tolist())
        if sample_size is not None and len(numbers) > sample_size:
            numbers = numbers[np.linspace(0, len(numbers) - 1, sample_size).round().astype(np.int64)]
        for number in numbers.tolist():
            kinds.setdefault(number, column.kind)
    return kinds, of_all


def _candidates(table: FileTable, numbers: Ints, kind: str, unfit: set[str]) -> Ints:
    """Those of the files that can be looked into."""
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
    look: Callable[[int, Callable[[int], None]], None], numbers: Iterable[int], progress: Progress, threads: int
) -> None:
    """Look at each file, on all cores: zlib works outside of Python's lock."""
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
            look(number, advance)

    with ThreadPoolExecutor(threads) as pool:
        try:
            for future in [pool.submit(work) for _ in range(threads)]:
                future.result()
        finally:
            stop.set()  # Ctrl-C, or a library that is missing: the other threads need not go on


_PROGRAM = "bids-validator-deno"
_LIST = '"issues":['
_READ = 1 << 20
_MOST_FILES = 100_000  # that are named; the codes of all are counted


def bids_validator(folder: str | os.PathLike[str]) -> list[Check]:
    """What the validator says of a folder, by file. Its errors fail the check, its warnings are notes."""
    beside = os.path.join(os.path.dirname(sys.executable), _PROGRAM)
    program = beside if os.path.isfile(beside) else shutil.which(_PROGRAM)
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
        tempfile.TemporaryFile("w+", errors="replace") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, errors="replace") as process,
    ):
        assert process.stdout is not None
        try:
            return _summed(_Answer(process.stdout))
        except (ValueError, KeyError) as error:
            process.kill()
            code = process.wait()
            said.seek(0)
            lines = said.read().split("\n")
            raise InputError(
                f"The BIDS validator could not run: {lines[0].strip() or f'exit code {code}'}.",
                hint=f"Run it yourself to see its output: {_PROGRAM} {os.fspath(folder)}",
            ) from error


class _Answer:
    """The validator's JSON, read an issue at a time: a large dataset has a million of them."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.files = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        decoder = json.JSONDecoder()
        text = ""
        while _LIST not in text:
            text += self._more()
        text = text.partition(_LIST)[2]
        while not text.startswith("]"):
            try:
                issue, end = decoder.raw_decode(text)
            except json.JSONDecodeError:
                text += self._more()
                continue
            yield issue
            text = text[end:].lstrip(",") or self._more().lstrip(",")
        text += self._stream.read()
        total = re.search(r'"totalFiles":\s*(\d+)', text)
        self.files = int(total[1]) if total else 0

    def _more(self) -> str:
        piece = self._stream.read(_READ)
        if not piece:
            raise ValueError("the answer ends early")
        return piece


def _summed(answer: _Answer) -> list[Check]:
    found: dict[str, dict[str, dict[str, None]]] = {"error": {}, "warning": {}}  # file → its codes, each once
    codes: dict[str, Counter[str]] = {"error": Counter(), "warning": Counter()}
    for issue in answer:
        severity = issue["severity"]
        if severity in found:
            place = (issue.get("location") or next(iter(issue.get("affects") or ()), "")).lstrip("/") or "(the dataset)"
            codes[severity][issue["code"]] += 1
            if place in found[severity] or len(found[severity]) < _MOST_FILES:
                found[severity].setdefault(place, {})[issue["code"]] = None
    checks = []
    for severity, name in (("error", "BIDS validator"), ("warning", "BIDS validator, warnings")):
        total = codes[severity].total()
        common = ", ".join(f"{code} {count:,}" for code, count in codes[severity].most_common(3))
        detail = f"{total:,} {severity}s" + (f" ({common})" if common else "")
        failed = sorted(found[severity])
        faults = [", ".join(found[severity][path]) for path in failed]
        is_note = severity == "warning"
        if total or not is_note:
            checks.append(Check(name, is_note or not total, answer.files, failed, detail, faults, note=is_note))
    return checks

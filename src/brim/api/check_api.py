"""verify, unpack, check and info: what a dataset contains, and whether it is right."""

from brim.api.recorded_run import shown
from brim.api.source_api import opened_table, source_options
from brim.options.build_options import ReadFilesOptions
from brim.options.check_options import CheckOptions, InfoOptions, UnpackOptions, VerifyOptions
from brim.options.declare import takes
from brim.options.groups import FilterOptions
from brim.progress import Progress
from brim.sources.open_source import read_source
from brim.storage.location import Access
from brim.verification import dataset_info
from brim.verification import unpack as unpack_job
from brim.verification import verify as verify_job
from brim.verification.check_dataset import check_dataset, is_published
from brim.verification.check_files import CheckReport, bids_validator, check_table
from brim.verification.dataset_info import DatasetInfo
from brim.verification.unpack import UnpackResult
from brim.verification.verify import VerifyResult


@takes(VerifyOptions)
def verify(options: VerifyOptions) -> VerifyResult:
    """Compare a dataset with its checksums, and with its source if there is one.

    A local dataset is read again. On the Hub, the sizes and SHA-256 that it lists are compared with the manifest, and
    the footers are read; in an object store, sizes and ETags. `deep` reads everything back. With a source, every source
    file is compared byte by byte with what the shards contain (remote: by the SHA-256 that its shards must have).

    Damaged shards are recorded in the ledger, so that the command that built them writes exactly those again.

    Returns:
        The verified shards, rows and files, and what could not be verified; print it.

    Raises:
        VerificationError: Something is damaged, missing or not part of the dataset; `findings` lists it.
        InputError: The destination contains no dataset.

    Examples:
        >>> brim.verify("published", "photos", progress=False).files_compared
        2
    """
    return verify_job.verify(options, shown(options.progress))


@takes(UnpackOptions)
def unpack(options: UnpackOptions) -> UnpackResult:
    """Write the original files of a dataset, or of chosen rows, back to a folder.

    Existing files with the same content are left alone, so that an interrupted run can be repeated. With `where` or
    `columns`, only these files are written, and nothing else is read from a remote dataset.

    Returns:
        How many files were written; print it.

    Raises:
        VerificationError: A shard is damaged or missing.
        InputError: Two files have the same path, or a path leads out of the folder.

    Examples:
        >>> brim.unpack("published", "files", progress=False).files
        2
    """
    return unpack_job.unpack(options, shown(options.progress))


@takes(CheckOptions)
def check(options: CheckOptions) -> CheckReport:
    """Check the files of a source before a build, or a published dataset. Nothing is written.

    Returns:
        The report: `ok`, and `checks` with the faults of each file. Nothing is raised for a failed check.

    Raises:
        SourceError: The source cannot be read as rows.
        InputError: An option cannot be used with this source.

    Examples:
        >>> brim.check("photos", progress=False).ok
        True
    """
    return check_source(options, shown(options.progress))


@takes(InfoOptions)
def info(options: InfoOptions) -> DatasetInfo:
    """Describe a dataset: rows, splits, columns with their types and sizes, shards, and whether it is complete.

    Footers, the card and the manifest are read, of a local or remote dataset, written by brim or not.

    Returns:
        The description; print it.

    Raises:
        InputError: The address contains no dataset.

    Examples:
        >>> brim.info("published").rows
        2
    """
    return dataset_info.info(options)


def check_source(options: CheckOptions, progress: Progress) -> CheckReport:
    """Check a source or a published dataset; of a dataset of which rows or columns are chosen, the chosen files."""
    source, table = options.source, opened_table(options, ReadFilesOptions, FilterOptions)
    if table is not None:
        return check_table(table, options, progress)
    steps = [("where", {"expression": options.where})] if options.where is not None else []
    steps += [("columns", {"names": list(options.columns)})] if options.columns else []  # type: ignore[dict-item]
    access = Access(options.source_endpoint_url or options.endpoint_url, options.anonymous)
    if not steps and is_published(source, access, options.recipe):
        return check_dataset(options, progress)
    reading = source_options(options, lenient=True, tolerance=options.tolerance, steps=tuple(steps))
    table = read_source(source, reading)
    for warning in table.warnings:
        progress.note(warning)
    return check_table(table, options, progress, bids_validator(source) if options.bids_validator else ())

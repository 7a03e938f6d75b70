"""brim verify: compare a dataset with its checksums, or with its source."""

from brim.cli.command import Command
from brim.cli.print_output import emit, print_lines, show_progress
from brim.options.check_options import VerifyOptions
from brim.options.groups import ShowOptions
from brim.records import dataclass
from brim.sizes import format_size, plural


@dataclass(frozen=True, kw_only=True)
class VerifyCommand(ShowOptions, VerifyOptions):
    """`brim verify DATASET [SOURCE]`.

    Examples:
        brim verify out/
        brim verify out/ scans/ --repair
        brim verify hf://datasets/me/arc ds004884/

    Reads every shard of a local dataset again: size, SHA-256 against the receipts, Parquet footers and row counts,
    and the card against the shards. With SOURCE, compares every source file byte by byte with its copy in the
    shards. All configs and splits are verified, or one of them (--from-config, --from-split). Exits with 3 and
    names the files that are damaged, missing, unfinished or not part of the dataset.

    Damaged shards are recorded in the ledger: the command that built them writes exactly those again. --repair
    writes them at once, also without a ledger.

    For a dataset on the Hub, only Parquet footers are downloaded. The sizes and SHA-256 that the Hub lists are
    compared with the manifest, and those of SOURCE with the SHA-256 that its shards must have. In an object store,
    sizes and ETags are compared instead of SHA-256. --deep downloads and compares all bytes.
    """


def run(options: VerifyCommand) -> None:
    from brim.verification.verify import verify

    with show_progress(options) as progress:
        result = verify(options, progress)
    if options.json:
        emit("verified", **vars(result))
        return
    total = f"{plural(result.shards, 'shard')}, {plural(result.rows, 'row')}, {format_size(result.bytes)}"
    lines = [("complete", total)]
    if len(result.subsets) > 1 or set(result.subsets.values()) - {"whole"}:
        lines += [(name, state) for name, state in result.subsets.items()]
    if result.files_compared:
        lines.append(("source", f"{result.files_compared:,} files are inside, byte for byte"))
    if result.repaired:
        lines.append(("repaired", plural(result.repaired, "shard")))
    print_lines([*lines, *(("not verified", text) for text in result.unproved)])


COMMAND = Command(VerifyCommand, run)

"""brim unpack: write the original files of a dataset back to a folder."""

from brim.cli.command import Command
from brim.cli.print_output import emit, print_lines, show_progress
from brim.options.check_options import UnpackOptions
from brim.options.groups import ShowOptions
from brim.records import dataclass
from brim.sizes import format_size


@dataclass(frozen=True, kw_only=True)
class UnpackCommand(ShowOptions, UnpackOptions):
    """`brim unpack DATASET FOLDER`.

    Examples:
        brim unpack out/ files/
        brim unpack hf://datasets/me/arc files/
        brim unpack s3://lab/arc files/ --where 'subject_id == "sub-M2230"'

    Writes exact copies of the files under their relative paths; files of a remote dataset are written while they
    download. Existing files with the same content are left alone, so that an interrupted run can be repeated. A
    path that leads out of the folder is refused. With --where or --columns, only these files are written, and
    nothing else is downloaded.
    """


def run(options: UnpackCommand) -> None:
    from brim.verification.unpack import unpack

    with show_progress(options) as progress:
        result = unpack(options, progress)
    if options.json:
        emit("unpacked", **vars(result))
        return
    existing = f", {result.already_there:,} existed" if result.already_there else ""
    lines = [("unpacked", f"{result.files:,} files, {format_size(result.bytes)}{existing}")]
    lines.append(("destination", str(options.out)))
    if result.unproved:
        lines.append(("not verified", f"{result.unproved:,} shard(s) without a receipt to compare with"))
    print_lines(lines)


COMMAND = Command(UnpackCommand, run)

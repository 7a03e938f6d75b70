"""brim verify: prove what is at a destination."""

from typing import Annotated

import typer

from brim.cli.flags import BUILT, FromFlags, KeepingFlags, LiveFlags, ShowingFlags, StoringFlags, WatchingFlags
from brim.cli.show import emit, followed, print_lines
from brim.sizes import format_size, plural

HELP = """Prove that what is at DEST is whole.

Reads every shard again: size, SHA-256 against the receipts, Parquet footers and row counts, and the card
against the shards. With SOURCE, compares every source file byte by byte with what is inside the shards.
Every config and split that the card or a manifest names is looked at, or one of them (--from-config, --from-split).
Exits 3 and names whatever is damaged, missing, unfinished or too much. Damaged shards are recorded in the ledger: the
command that built them writes exactly those again. --repair writes them at once, also without a ledger.

On the Hub nothing is downloaded but footers: the sizes and SHA-256 that it lists are compared with the
manifest, and SOURCE by the SHA-256 that its shards must have. --deep reads everything back.
In a bucket, sizes and ETags take the place of SHA-256.

[bold]Examples[/bold]

  brim verify out/
  brim verify out/ scans/
  brim verify out/ scans/ --repair
  brim verify hf://datasets/me/arc ds004884/
  brim verify s3://lab/scans scans/
"""


def verify(
    dest: Annotated[
        str,
        typer.Argument(metavar="DEST", help=BUILT),
    ],
    reading: FromFlags,
    keeping: KeepingFlags,
    storing: StoringFlags,
    showing: ShowingFlags,
    watching: WatchingFlags,
    live: LiveFlags,
    source: Annotated[str | None, typer.Argument(metavar="SOURCE", help="What it was built from.")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="On the Hub or in a bucket: read everything back.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Write damaged shards of a folder again, from SOURCE.")
    ] = False,
    root: Annotated[str | None, typer.Option(metavar="DIR", help="Where a table's relative paths start.")] = None,
) -> None:
    import brim

    with followed(showing, watching, live) as progress:
        result = brim.verify(
            dest, source, deep=deep, repair=repair, **vars(reading), state=keeping.state, root=root, **vars(storing),
            progress=progress,
        )  # fmt: skip
    if showing.json:
        emit("verified", **vars(result))
        return
    lines = [("whole", f"{plural(result.shards, 'shard')}, {plural(result.rows, 'row')}, {format_size(result.bytes)}")]
    if len(result.subsets) > 1 or set(result.subsets.values()) - {"whole"}:
        lines += [(name, words) for name, words in result.subsets.items()]
    if result.files_compared:
        lines.append(("source", f"{result.files_compared:,} files are inside, byte for byte"))
    if result.repaired:
        lines.append(("repaired", plural(result.repaired, "shard")))
    lines += [("not proved", what) for what in result.unproved]
    print_lines(lines)

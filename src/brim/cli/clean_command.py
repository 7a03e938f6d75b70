"""brim clean: what is cached, and room for more."""

from typing import Annotated

import typer

from brim.cli.flags import ShowingFlags
from brim.cli.show import emit
from brim.sizes import format_size

HELP = """List what `brim.map`, `brim.tokenize` and `brim.embed` have cached; with --remove, remove it.

Results of calls without a destination are kept so that the same call is answered at once, and an interrupted one goes
on. A cache that a running job uses is never removed. A dataset that is open in a program stays readable until it is
closed. With BRIM_CACHE_MAX=50GB in the environment, what was not used for longest goes by itself, unless it is open.

[bold]Examples[/bold]

  brim clean
  brim clean --remove --older-than 30
  brim clean --remove --unfinished
"""


def clean(
    showing: ShowingFlags,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what is listed.")] = False,
    older_than: Annotated[
        float, typer.Option("--older-than", metavar="DAYS", help="Only those not used for so many days.")
    ] = 0.0,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Only jobs that were not finished.")] = False,
    cache_dir: Annotated[
        str | None,
        typer.Option("--cache-dir", metavar="DIR", help="Where the caches are. (default: BRIM_CACHE, or the user's)"),
    ] = None,
) -> None:
    import brim
    from brim.jobs.caches import cache_home, cache_max

    home = cache_home(cache_dir)
    chosen = brim.clean(remove=remove, older_than=older_than, unfinished=unfinished, cache_dir=home)
    freed = sum(cached.bytes for cached in chosen if cached.removed)
    busy = sum(remove and not cached.removed for cached in chosen)
    for cached in chosen:
        if showing.json:
            facts = {name: getattr(cached, name) for name in cached.__slots__}
            emit("cache", **facts, age_days=round(cached.age_days, 2))
            continue
        state = "done" if cached.done else "unfinished"
        print(
            f"{format_size(cached.bytes):>9}  {cached.age_days:5.1f} days  {state:10}  {cached.rows:>12,} rows  "
            f"{cached.what} of {cached.source}{'  removed' if cached.removed else ''}"
        )
    if showing.json:
        return
    total = format_size(sum(cached.bytes for cached in chosen))
    if not chosen:
        print(f"Nothing is cached in {home}.")
    elif remove:
        print(f"{format_size(freed)} freed{f', {busy} in use and kept' if busy else ''}.")
    else:
        most = cache_max()
        cap = f", of {format_size(most)} at most (BRIM_CACHE_MAX)" if most is not None else ""
        print(f"{total} in {len(chosen)} caches in {home}{cap}. `brim clean --remove` removes them.")

"""brim clean: list or remove cached results."""

from brim.cli.command import Command
from brim.cli.print_output import emit
from brim.options.cache_options import CleanOptions
from brim.options.groups import JsonOptions
from brim.records import dataclass
from brim.sizes import format_size


@dataclass(frozen=True, kw_only=True)
class CleanCommand(JsonOptions, CleanOptions):
    """`brim clean`.

    Examples:
        brim clean
        brim clean --remove --older-than 30
        brim clean --remove --unfinished

    Results of brim.map, brim.tokenize and brim.embed without a destination are cached: the same call returns at
    once, and an interrupted one resumes. A cache that a running job uses is never removed. A dataset that is open
    in a program stays readable until it is closed. With BRIM_CACHE_MAX=50GB in the environment, the least recently
    used caches are removed automatically, unless they are open.
    """


def run(options: CleanCommand) -> None:
    from brim.api.cache_api import clean
    from brim.jobs.cache_entries import cache_home, cache_max

    home = cache_home(options.cache_dir)
    caches = clean(**options.values(CleanOptions))
    freed = sum(cached.bytes for cached in caches if cached.removed)
    busy = sum(options.remove and not cached.removed for cached in caches)
    for cached in caches:
        if options.json:
            facts = {name: getattr(cached, name) for name in cached.__slots__}
            emit("cache", **facts, age_days=round(cached.age_days, 2))
            continue
        state = "done" if cached.done else "unfinished"
        print(
            f"{format_size(cached.bytes):>9}  {cached.age_days:5.1f} days  {state:10}  {cached.rows:>12,} rows  "
            f"{cached.what} of {cached.source}{'  removed' if cached.removed else ''}"
        )
    if options.json:
        return
    total = format_size(sum(cached.bytes for cached in caches))
    if not caches:
        print(f"Nothing is cached in {home}.")
    elif options.remove:
        print(f"{format_size(freed)} freed{f', {busy} in use and kept' if busy else ''}.")
    else:
        max_bytes = cache_max()
        cap = f", of {format_size(max_bytes)} at most (BRIM_CACHE_MAX)" if max_bytes is not None else ""
        print(f"{total} in {len(caches)} caches in {home}{cap}. `brim clean --remove` removes them.")


COMMAND = Command(CleanCommand, run)

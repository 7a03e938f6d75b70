"""caches and clean: results that map, tokenize and embed keep for calls without a destination."""

from dataclasses import replace

from brim.jobs.cache_entries import CacheEntry, cache_home, list_caches, remove_cache
from brim.options.cache_options import CachesOptions, CleanOptions
from brim.options.declare import takes


@takes(CachesOptions)
def caches(options: CachesOptions) -> list[CacheEntry]:
    """List the cached results of map, tokenize and embed, the least recently used first.

    Returns:
        The caches.

    Raises:
        InputError: The cache folder cannot be read.

    Examples:
        >>> brim.caches(cache_dir="empty")
        []
    """
    return list_caches(cache_home(options.cache_dir))


@takes(CleanOptions)
def clean(options: CleanOptions) -> list[CacheEntry]:
    """List cached results; with `remove`, remove them too.

    A cache that a running job uses is kept, and its `removed` is False. A dataset that is open stays readable until it
    is closed.

    Returns:
        The caches that were chosen.

    Raises:
        InputError: The cache folder cannot be read.

    Examples:
        >>> brim.clean(remove=True, older_than=30, cache_dir="empty")
        []
    """
    matching = [
        cache
        for cache in list_caches(cache_home(options.cache_dir))
        if cache.age_days >= options.older_than and not (options.unfinished and cache.done)
    ]
    return [replace(cache, removed=options.remove and remove_cache(cache)) for cache in matching]

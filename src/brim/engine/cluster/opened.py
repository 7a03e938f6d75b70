"""The executor that was asked for, for as long as a job runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from brim.engine.cluster.checks import Sight
from brim.engine.cluster.connect import connected
from brim.engine.cluster.executor import INTERPRETER_BYTES, RayExecutor
from brim.engine.destination import Destination
from brim.engine.executor import Executor
from brim.engine.scaling import Scaling
from brim.objects.address import ObjectAddress
from brim.plans.forecast import HUB_BYTES, OBJECTS_BYTES
from brim.sinks.hub.address import Address
from brim.sinks.hub.options import HubOptions
from brim.sinks.hub.xet import BASE_BYTES, LANE_BYTES


def carrying_bytes(destination: Destination | None, hub: HubOptions) -> int:
    """What sending a shard takes beside making it."""
    if isinstance(destination, ObjectAddress):
        return OBJECTS_BYTES
    if not isinstance(destination, Address):
        return 0
    return HUB_BYTES + (BASE_BYTES + LANE_BYTES if hub.via == "xet" else 0)


@contextmanager
def opened(
    scaling: Scaling, sight: Callable[[], Sight], shard_bytes: int, limit_bytes: int, workers: int | None
) -> Iterator[Executor | None]:
    """None: the threads of this process. `shard_bytes` is what one shard takes beside the interpreter."""
    if scaling.engine == "local":
        yield None
        return
    with connected(scaling.address) as cluster:
        yield RayExecutor(cluster, sight(), INTERPRETER_BYTES + shard_bytes, limit_bytes, workers)

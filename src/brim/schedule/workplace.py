"""Where a computed job is done: on this machine, or by a cluster that is connected for as long as the job runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from brim.buckets.bucket_address import BucketAddress
from brim.plans.describe_plan import HUB_BYTES, OBJECTS_BYTES, WORKER_BYTES, sending_bytes
from brim.schedule.processes import ProcessBackend
from brim.schedule.ray_cluster import Cluster, Sight, connected
from brim.schedule.ray_tasks import INTERPRETER_BYTES, RayBringing, RayUnits
from brim.schedule.scheduler import Scaling
from brim.schedule.unit_work import BackendOf
from brim.stores.destination import Destination
from brim.stores.hub_options import HubAddress, HubOptions
from brim.stores.hub_upload import BASE_BYTES, LANE_BYTES
from brim.stores.store import Carrier


@dataclass(frozen=True, slots=True)
class Workplace:
    """`cluster` is None on this machine."""

    cluster: Cluster | None = None

    def units(self, carrier: Carrier | None = None) -> BackendOf:
        """Who does the job's units. Nodes try `carrier` first, if they bring what becomes of them."""
        return ProcessBackend if self.cluster is None else functools.partial(RayUnits, self.cluster, carrier)

    def executor(
        self, folder: Path, destination: Destination, hub: HubOptions, limit_bytes: int, workers: int | None
    ) -> RayBringing | None:
        """What brings the shards that were made in `folder` to their destination."""
        if self.cluster is None:
            return None
        need = INTERPRETER_BYTES + WORKER_BYTES + carrying_bytes(destination, hub)
        need += sending_bytes(0) if isinstance(destination, BucketAddress) else 0
        return RayBringing(self.cluster, Sight(paths=(str(folder.absolute()),)), need, limit_bytes, workers)


@contextmanager
def workplace(scaling: Scaling) -> Iterator[Workplace]:
    if scaling.engine == "local":
        yield Workplace()
        return
    with connected(scaling.address) as cluster:
        yield Workplace(cluster)


def carrying_bytes(destination: Destination | None, hub: HubOptions) -> int:
    """What sending a shard takes beside making it."""
    if isinstance(destination, BucketAddress):
        return OBJECTS_BYTES
    if not isinstance(destination, HubAddress):
        return 0
    return HUB_BYTES + (BASE_BYTES + LANE_BYTES if hub.via == "xet" else 0)


@contextmanager
def opened(
    scaling: Scaling, sight: Callable[[], Sight], shard_bytes: int, limit_bytes: int, workers: int | None
) -> Iterator[RayBringing | None]:
    """None: the threads of this process. `shard_bytes` is what one shard takes beside the interpreter."""
    if scaling.engine == "local":
        yield None
        return
    with connected(scaling.address) as cluster:
        yield RayBringing(cluster, sight(), INTERPRETER_BYTES + shard_bytes, limit_bytes, workers)

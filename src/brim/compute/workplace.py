"""Where a computed job is done: on this machine, or by a cluster that is connected for as long as the job runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from brim.compute.cluster import ClusterComputation
from brim.compute.computation import Computation
from brim.compute.executor import Maker
from brim.engine.cluster.checks import Sight
from brim.engine.cluster.connect import Cluster, connected
from brim.engine.cluster.executor import INTERPRETER_BYTES, RayExecutor
from brim.engine.cluster.opened import carrying_bytes
from brim.engine.destination import Destination
from brim.engine.executor import Executor
from brim.engine.scaling import Scaling
from brim.objects.address import ObjectAddress
from brim.plans.forecast import WORKER_BYTES, sending_bytes
from brim.sinks.hub.options import HubOptions
from brim.sinks.sink import Carrier


@dataclass(frozen=True, slots=True)
class Workplace:
    """`cluster` is None on this machine."""

    cluster: Cluster | None = None

    def compute(self, carrier: Carrier | None = None) -> Maker:
        """What makes the executor of the job's units. Nodes try `carrier` first, if they bring what becomes of them."""
        return Computation if self.cluster is None else functools.partial(ClusterComputation, self.cluster, carrier)

    def executor(
        self, folder: Path, destination: Destination, hub: HubOptions, limit_bytes: int, workers: int | None
    ) -> Executor | None:
        """What brings the shards that were made in `folder` to their destination."""
        if self.cluster is None:
            return None
        need = INTERPRETER_BYTES + WORKER_BYTES + carrying_bytes(destination, hub)
        need += sending_bytes(0) if isinstance(destination, ObjectAddress) else 0
        return RayExecutor(self.cluster, Sight(paths=(str(folder.absolute()),)), need, limit_bytes, workers)


@contextmanager
def workplace(scaling: Scaling) -> Iterator[Workplace]:
    if scaling.engine == "local":
        yield Workplace()
        return
    with connected(scaling.address) as cluster:
        yield Workplace(cluster)

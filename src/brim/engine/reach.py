"""Whether shards can be brought to a destination, found out before hours of computing and not after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from brim.engine.destination import Destination
from brim.engine.stop import Stop
from brim.objects.address import ObjectAddress
from brim.objects.loop import interrupted_by
from brim.progress import Progress, told_if_slow
from brim.sinks.hub.address import Address
from brim.sinks.hub.carrier import HubCarrier
from brim.sinks.hub.client import HubClient
from brim.sinks.hub.options import HubOptions
from brim.sinks.hub.session import explained, hub_session
from brim.sinks.objects.carrier import ObjectCarrier
from brim.sinks.sink import Carrier


@contextmanager
def waited_for(bucket: ObjectAddress, progress: Progress, stop: Stop) -> Iterator[None]:
    """A bucket that takes long to answer: it is said, and a stop is heard."""
    with told_if_slow(progress.note, f"still waiting for {bucket}"), interrupted_by(stop.check):
        yield


def reachable(destination: Destination, hub: HubOptions, progress: Progress, stop: Stop) -> Carrier | None:
    """What brings shards there, for other machines to try too. None for a folder, and a repository yet to be made."""
    if isinstance(destination, ObjectAddress):
        bucket = ObjectCarrier(destination)
        with waited_for(destination, progress, stop):
            bucket.check()
        return bucket
    if not isinstance(destination, Address):
        return None
    with hub_session(progress.note, stop.check), explained(destination.repo, begun=False):
        client = HubClient(destination, hub.token)
        token = client.need_token()
        if client.visibility() is None:
            return None
        client.need_write()
        return HubCarrier(destination, client.api.endpoint, token)

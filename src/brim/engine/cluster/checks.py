"""Before the first task, on every node: the same brim, a source that can be read, a destination that can be reached.

What is wrong is said with the node's name, minutes before a task would fail there.
"""

from __future__ import annotations

import os
import pickle
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from brim.engine.cluster.connect import Cluster, Node
from brim.errors import BrimError, DestinationError, InputError, SourceChanged, SourceError
from brim.fileset import FileSet
from brim.formats.reading import open_source
from brim.objects.address import Access, ObjectAddress, is_object_address, parse_object_address
from brim.objects.listing import list_objects, stat_objects
from brim.sinks.sink import Carrier

_ANSWER_S = 60.0
_SAMPLE = 5
_SHARED = "Keep it on a disk that every node sees under the same path."


@dataclass(frozen=True, slots=True)
class Sight:
    """What a node has to see: some source files, paths that must exist, and where output goes."""

    files: FileSet | None = None
    paths: tuple[str, ...] = ()
    carrier: Carrier | None = None
    mark: str = ""  # a file in the folder of units
    access: Access = field(default_factory=Access)  # to the bucket that `paths` are in

    def check(self) -> None:
        """On a node; a BrimError says what it does not see."""
        if self.files is not None and self.files.bucket is None:
            for number in range(len(self.files)):
                _open(self.files, number)
        elif self.files is not None and self.files.bucket is not None:
            _see(self.files.bucket, [self.files.path(number) for number in range(len(self.files))])
        for path in self.paths:
            if is_object_address(path):
                _see(parse_object_address(path, self.access), [])
            elif not os.access(path, os.R_OK):
                raise SourceError(
                    f"The source {path!r} is not there, or may not be read.",
                    hint=_SHARED,
                )
        if self.mark and not os.path.exists(self.mark):
            raise DestinationError(
                f"The folder {os.path.dirname(self.mark)!r} is not the one that the driver writes to.",
                hint="Choose a destination, or a --state folder, on a disk that every node shares.",
            )
        if self.carrier is not None:
            self.carrier.check()


def _open(files: FileSet, number: int) -> None:
    try:
        os.close(open_source(files, number))
    except SourceChanged as error:
        what = "is not there, may not be read, or is not what the driver sees"
        raise SourceError(f"The source file {files.full_path(number)!r} {what}.", hint=_SHARED) from error


def _see(bucket: ObjectAddress, names: list[str]) -> None:
    """Whether these objects can be read from here; without any, whether the place can be listed."""
    if not names:
        next(list_objects(bucket), None)
    for name, stat in zip(names, stat_objects(bucket, names), strict=True):
        if stat is None:
            raise SourceError(f"{bucket}/{name} is not there.", hint="Do all nodes reach the same store?")


def sample_of(files: FileSet) -> FileSet:
    """A few of the files that will be opened."""
    on_disk = files.on_disk
    real = np.setdiff1d(np.arange(len(on_disk), dtype=np.int64), np.array(list(on_disk.bundles), np.int64))
    if not len(real):
        return on_disk.take(real)
    return on_disk.take(np.unique(real[np.linspace(0, len(real) - 1, _SAMPLE).astype(np.int64)])).anywhere()


def check_nodes(cluster: Cluster, nodes: Sequence[Node], sight: Sight) -> None:
    """Raises the first thing that is wrong, with the name of the node where it is."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray = cluster.ray
    probe = ray.remote(_probe())
    payload = pickle.dumps(sight)
    asked = {
        probe.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
        ).remote(payload): node
        for node in nodes
    }
    ready, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
    if silent:
        raise InputError(
            f"The Ray node {asked[silent[0]].name} does not answer within {_ANSWER_S:.0f} s.",
            hint="Look at it with `ray status`, or take it out of the cluster.",
        )
    for ref in ready:
        _need(ray, ref, asked[ref])


def _need(ray: Any, ref: Any, node: Node) -> None:
    try:
        there, answer = ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise InputError(f"The Ray node {node.name} cannot run brim: {error.cause}.") from error
    except ray.exceptions.RayError:
        return  # the node has gone since; nothing will run there
    here = versions()
    for name, version in here.items():
        if there.get(name) != version:
            found = there.get(name) or "none"
            raise InputError(
                f"The Ray node {node.name} has {found} as {name}, and this machine has {version}.",
                hint=f"Install the same on every node: pip install 'brim[ray]=={here['brim']}'."
                + (f" (There: {there['error']})" if there.get("error") else ""),
            )
    failure = pickle.loads(answer)
    if isinstance(failure, BrimError):
        raise type(failure)(f"On the Ray node {node.name}: {failure.words[0]}", hint=failure.words[1], **failure.facts)


def versions() -> dict[str, str]:
    import pyarrow

    import brim

    python = ".".join(platform.python_version_tuple()[:2])
    return {"brim": brim.__version__, "pyarrow": pyarrow.__version__, "Python": python}


def _probe() -> Callable[[bytes], tuple[dict[str, str], bytes]]:
    """A function inside of another travels by value: it runs where there is no brim, or another one."""

    def probe(payload: bytes) -> tuple[dict[str, str], bytes]:
        import pickle
        import platform

        there = {"Python": ".".join(platform.python_version_tuple()[:2])}
        try:
            import pyarrow

            import brim

            there |= {"brim": brim.__version__, "pyarrow": pyarrow.__version__}
            from brim.errors import BrimError

            sight = pickle.loads(payload)
        except (ImportError, AttributeError) as error:
            return {**there, "error": f"{type(error).__name__}: {error}"}, b"N."
        try:
            sight.check()
        except BrimError as error:
            return there, pickle.dumps(error)
        return there, pickle.dumps(None)

    return probe

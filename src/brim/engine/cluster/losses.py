"""Ray's errors as what they mean for the work: lost, out of memory, or the task's own."""

from __future__ import annotations

from typing import Any, Literal

from brim.errors import BrimError, SinkFailed

Loss = Literal["lost", "memory"]
# The task did nothing wrong: its worker or its node went away, or what it was given did.
_LOST = (
    "WorkerCrashedError",
    "NodeDiedError",
    "ActorDiedError",
    "ActorUnavailableError",
    "ObjectLostError",
    "LocalRayletDiedError",
    "TaskUnschedulableError",
    "RpcError",
)


def loss_of(ray: Any, error: BaseException) -> Loss:
    """How a task was lost. What it raised itself is raised here: brim's errors as they are."""
    exceptions = ray.exceptions
    memory: list[type[BaseException]] = [MemoryError]
    if hasattr(exceptions, "OutOfMemoryError"):
        memory.append(exceptions.OutOfMemoryError)
    cause = getattr(error, "cause", None) if isinstance(error, exceptions.RayTaskError) else None
    if isinstance(error, tuple(memory)) or isinstance(cause, tuple(memory)):
        return "memory"
    if isinstance(cause, BrimError):
        raise cause from error
    lost = tuple(getattr(exceptions, name) for name in _LOST if hasattr(exceptions, name))
    if cause is None and isinstance(error, lost):
        return "lost"
    if cause is not None and not isinstance(cause, OSError):
        raise cause from error  # a bug, here or in what the task calls
    said = str(cause or error).strip().split("\n")[0]
    raise SinkFailed(
        f"A task failed on a node of the cluster: {said.rstrip('.')}.",
        hint="Look at the cluster with `ray status`, then run the same command to continue.",
    ) from error

"""Whose a cgroup is, from its path: a container, a pod, a batch job, a login session, a service."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

OwnerKind = Literal["pod", "docker", "ecs", "slurm", "lxc", "vm", "session", "service", "group"]


@dataclass(frozen=True, slots=True)
class Owner:
    kind: OwnerKind
    text: str
    shared: bool = False  # it holds more than one container, job or session


_POD = re.compile(r"[/-]pod([0-9a-z][\w-]*)")
_HEX = re.compile(r"([0-9a-f]{12,64})")


def owner_of(group: str) -> Owner:
    """The owner of a group whose limit was hit."""
    last = group.rstrip("/").rsplit("/", 1)[-1]
    if "kubepods" in group:
        pod = _POD.search(group)
        if pod is None:
            return Owner("pod", "all pods of this node (its pool for pods, not one pod's limit)", shared=True)
        tail = group[pod.end() :].removeprefix(".slice").strip("/")
        name = pod[1].replace("_", "-")
        return Owner("pod", f"a container of the Kubernetes pod {name}" if tail else f"the whole Kubernetes pod {name}")
    if match := re.search(r"/slurm[^/]*?(?:/.*)?/job_(\d+)(?:/step_(\w+))?", group):
        return Owner("slurm", f"Slurm job {match[1]}" + (f", step {match[2]}" if match[2] else ""))
    if "/ecs/" in group:
        return Owner("ecs", "a container or task of Amazon ECS")
    if "docker" in group or "libpod" in group or "cri-containerd" in group or "buildkit" in group:
        ident = _HEX.search(last)
        return Owner("docker", f"the container {ident[1][:12]}" if ident else "a container", shared=ident is None)
    if match := re.search(r"/(?:lxc(?:\.payload)?|LXC)[./]?([\w-]+)", group):
        return Owner("lxc", f"the LXC container {match[1]}")
    if match := re.search(r"/(?:qemu|machine)\.slice/([^/]+)", group):
        return Owner("vm", f"the virtual machine or container {match[1]}")
    if match := re.search(r"/user-(\d+)\.slice(?:/user@\d+\.service)?(/.*)?$", group):
        unit = (match[2] or "").rstrip("/").rsplit("/", 1)[-1]
        shown = f"{unit} of user {match[1]}" if unit else f"everything that user {match[1]} runs"
        return Owner("session", shown, shared=not unit)
    if last.endswith((".service", ".scope", ".slice")):
        return Owner("service", f"the systemd unit {last}", shared=last.endswith(".slice"))
    return Owner("group", f"the cgroup {group}")


def same_group(one: str, other: str) -> bool:
    """Whether two paths may name one group: inside a container, paths lose their beginning."""
    one, other = one.rstrip("/"), other.rstrip("/")
    return bool(one and other) and (one == other or one.endswith(other) or other.endswith(one))

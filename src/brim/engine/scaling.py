"""Where the work is done: on this machine, or on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from brim.choices import one_of
from brim.errors import InputError

Engine = Literal["local", "ray"]


@dataclass(frozen=True, slots=True)
class Scaling:
    """`address` is that of a running Ray: HOST:PORT, or auto for the one that this machine is part of."""

    engine: Engine = "local"
    address: str | None = None

    def __post_init__(self) -> None:
        one_of("engine", self.engine, get_args(Engine))
        if self.address is not None and self.engine != "ray":
            raise InputError("--address is for --engine=ray.", hint="Add --engine=ray, or leave --address out.")
        if self.address in (None, "auto"):
            return
        host, _, port = str(self.address).rpartition(":")
        if "://" in str(self.address) or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InputError(
                f"--address takes auto or HOST:PORT, not {self.address!r}.",
                hint="`ray start --head` prints it; auto takes the cluster that this machine is part of.",
            )

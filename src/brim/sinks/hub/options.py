"""How to publish on the Hub, apart from what and where."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, get_args

from brim.choices import one_of
from brim.errors import InputError

Via = Literal["auto", "lfs", "xet"]
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_CONFIG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class HubOptions:
    """How to publish, apart from where. `split` alone is replaced if it is given, else the whole config."""

    config: str = "default"
    split: str | None = None
    data_dir: str | None = None
    message: str | None = None
    description: str | None = None
    public: bool = False
    direct: bool = False
    via: Via = "auto"
    create_pull: bool = False
    replace: bool = False  # files that brim did not write go too; the repository's history keeps them
    set_default: bool = False
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        one_of("via", self.via, get_args(Via))
        if not _CONFIG.fullmatch(self.config) or self.config in ("data", "all"):
            raise InputError(f"{self.config!r} is not the name of a config.", hint="Use letters, digits, _ and -.")
        if self.data_dir is not None and not _FOLDER.fullmatch(self.data_dir):
            raise InputError(f"{self.data_dir!r} is not a folder for shards.", hint="Use a plain name, like data.")
        if self.direct and self.create_pull:
            raise InputError("Choose one of --create-pr (a pull request) and --direct.")

    @property
    def folder(self) -> str:
        """Where the shards of the config are, as `datasets` has it."""
        return self.data_dir or ("data" if self.config == "default" else self.config)

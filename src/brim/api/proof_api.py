"""check, verify and unpack as functions of Python: those of the jobs, with a bar for whoever waits."""

from __future__ import annotations

import os
from collections.abc import Sequence

from brim.api.recorded_run import shown
from brim.choices import switches
from brim.formats.parquet_shard import MAX_CELL_BYTES
from brim.jobs import check_dataset as check_dataset_job
from brim.jobs import unpack as unpack_job
from brim.jobs import verify as verify_job
from brim.jobs.check_files import Check, CheckReport
from brim.jobs.unpack import Unpacked
from brim.jobs.verify import Verified
from brim.plans.file_checks import Oversize
from brim.progress import Progress
from brim.sources.file_table import FileTable
from brim.sources.selection import Selection

Place = str | os.PathLike[str]


def verify(
    destination: Place,
    source: Place | FileTable | Selection | None = None,
    *,
    deep: bool = False,
    repair: bool = False,
    from_config: str | None = None,
    from_split: str | None = None,
    state: Place | None = None,
    root: Place | None = None,
    endpoint_url: str | None = None,
    source_endpoint_url: str | None = None,
    anonymous: bool = False,
    progress: Progress | bool | None = None,
) -> Verified:
    switches(deep=deep, repair=repair, anonymous=anonymous)
    return verify_job.verify(
        destination, source, deep=deep, repair=repair, from_config=from_config, from_split=from_split, state=state,
        root=root, endpoint_url=endpoint_url, source_endpoint_url=source_endpoint_url, anonymous=anonymous,
        progress=shown(progress),
    )  # fmt: skip


def unpack(
    destination: Place | Selection | FileTable,
    out: Place,
    *,
    where: str | None = None,
    columns: str | Sequence[str] = (),
    from_config: str | None = None,
    from_split: str | None = None,
    state: Place | None = None,
    endpoint_url: str | None = None,
    anonymous: bool = False,
    progress: Progress | bool | None = None,
) -> Unpacked:
    return unpack_job.unpack(
        destination, out, where=where, columns=columns, from_config=from_config, from_split=from_split, state=state,
        endpoint_url=endpoint_url, anonymous=anonymous, progress=shown(progress),
    )  # fmt: skip


def check(
    source: Place | FileTable | Selection,
    *,
    recipe: Place | None = None,
    sample_size: int = 10,
    everything: bool = False,
    deep: bool = False,
    max_cell_bytes: int | None = MAX_CELL_BYTES,
    oversize: Oversize = "error",
    allow_empty: bool = False,
    strict: bool = False,
    tolerance: float | None = None,
    extra: Sequence[Check] = (),
    from_config: str | None = None,
    from_split: str | None = None,
    state: Place | None = None,
    endpoint_url: str | None = None,
    anonymous: bool = False,
    progress: Progress | bool | None = None,
) -> CheckReport:
    switches(everything=everything, deep=deep, allow_empty=allow_empty, strict=strict)
    return check_dataset_job.check(
        source, recipe=recipe, sample_size=sample_size, everything=everything, deep=deep,
        max_cell_bytes=max_cell_bytes, oversize=oversize, allow_empty=allow_empty, strict=strict, tolerance=tolerance,
        extra=extra, from_config=from_config, from_split=from_split, state=state, endpoint_url=endpoint_url,
        anonymous=anonymous, progress=shown(progress),
    )  # fmt: skip


for _own, _job in ((verify, verify_job.verify), (unpack, unpack_job.unpack), (check, check_dataset_job.check)):
    _own.__doc__ = _job.__doc__

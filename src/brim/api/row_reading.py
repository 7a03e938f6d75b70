"""How the functions that compute take their rows: the options of a call as those of the reader."""

from __future__ import annotations

from typing import Any

from brim.compute.rows.row_files import RowOptions
from brim.compute.steps.function_digest import iterator_digest
from brim.options.groups import ComputedJobOptions, InputOptions
from brim.storage.location import Access

LEAST_TOKEN_UNIT_BYTES = 4 << 20  # encoding is slow: small units keep all cores busy to the end


def row_options(
    options: ComputedJobOptions, source: Any = None, name: str | None = None, **internal: Any
) -> RowOptions:
    """Take from the options of a function how its rows are read. With a `name`, the code of an iterator counts too."""
    return RowOptions(
        **options.values(InputOptions),
        name=name,
        code=None if name is None else iterator_digest(source),
        access=source_access(options),
        leave_out_unreadable=options.on_error != "stop",
        **internal,
    )


def source_access(options: ComputedJobOptions) -> Access:
    return Access(options.source_endpoint_url or options.endpoint_url, options.anonymous)

"""The only module that uses private names of torch; `tests/project/test_private_names.py` lists them."""

from __future__ import annotations

from typing import Any

from brim.errors import InputError


def refuse_collation(batch_type: type) -> None:
    """Make every DataLoader raise InputError if it would collate batches that are already finished.

    torch has no public way to register a type. Unregistered, finished batches would be nested without an error.
    """
    try:
        from torch.utils.data._utils.collate import default_collate_fn_map
    except ImportError:
        return
    default_collate_fn_map[batch_type] = _refuse


def _refuse(batch: Any, *, collate_fn_map: Any = None) -> Any:
    raise InputError(
        "The batches of a brim.Loader are finished, and cannot be put in batches again.",
        hint="Use DataLoader(loader.torch(), batch_size=None).",
    )

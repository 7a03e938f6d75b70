"""The one place that touches what ray keeps private; `tests/project/test_private_names.py` lists the names.

They are conveniences: Ray finds its cluster without brim, later, and prints more than it should.
"""

from __future__ import annotations

from typing import Any


def address_here(ray: Any) -> str:
    """Return the address of the cluster that `auto` means; "" if this version of Ray finds it in another way.

    ConnectionError or ValueError: no cluster runs on this machine.
    """
    try:
        return str(ray._private.services.get_ray_address_from_environment("auto", None) or "")
    except (AttributeError, TypeError):
        return ""


def be_quiet(ray: Any) -> None:
    """Ray's driver prints what raylets report to stdout, which is for results. What matters becomes brim's errors."""
    worker = ray._private.worker
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None

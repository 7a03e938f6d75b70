"""The commands that load and verify what a job has written."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from brim.jobs.spec import Spec
from brim.state.ledger import Receipt
from brim.storage.location import is_object_address

_READERS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}  # with which `datasets` reads an object store


def next_steps(spec: Spec, receipts: Sequence[Receipt]) -> tuple[tuple[str, str], ...]:
    """Return labels and commands for a finished job: how to load the result, and how to verify it."""
    destination, endpoint = str(spec.layout.destination), spec.how.access.endpoint
    suffix = Path(receipts[0].name).suffix if receipts else ""
    if spec.layout.apart:
        return () if is_object_address(destination) else (("load", load_vectors(destination)),)
    words = ["brim", "verify", destination]
    words += ["--state-dir", str(spec.how.state_dir)] if spec.how.state_dir else []
    words += ["--endpoint-url", endpoint] if endpoint and is_object_address(destination) else []
    verify = ("verify with", shlex.join(words))
    splits = {receipt.split for receipt in receipts}
    if suffix in (".parquet", ".arrow"):
        load = load_dataset(destination, spec.how.hub.config, splits, endpoint, suffix.removeprefix("."))
        return ("load", load), verify
    tokens = next((receipt.name for receipt in receipts if receipt.name.endswith(".bin")), None)
    if tokens is None or "://" in destination:
        return (verify,)
    head = Path(destination) / Path(tokens).with_suffix(".json")
    dtype = f"json.load(open({str(head)!r}))['dtype']"
    return ("load", f"numpy.memmap({str(Path(destination) / tokens)!r}, {dtype}, 'r')"), verify


def load_vectors(path: str) -> str:
    """Return the Python expression that opens a file of vectors without loading it."""
    if path.endswith(".parquet"):
        return f"datasets.load_dataset('parquet', data_files={path!r})"
    return f"brim.open_tensors({path!r})"


def load_dataset(
    destination: str, config: str, splits: Iterable[str], endpoint: str | None = None, format: str = "parquet"
) -> str:
    """Return the Python expression that loads a dataset.

    It works where the environment names the keys and the object store as it does for brim.
    """
    if is_object_address(destination):
        scheme = destination.partition("://")[0]
        files = {split: f"{destination.rstrip('/')}/data/{split}-*.{format}" for split in sorted(set(splits))}
        # adlfs takes another endpoint only from a connection string, which the environment has.
        has_endpoint = endpoint and scheme in ("s3", "gs")
        storage = f", storage_options={{'endpoint_url': {endpoint!r}}}" if has_endpoint else ""
        needs = f"  # pip install {_READERS[scheme]}" if scheme in _READERS else ""  # Hub buckets need nothing
        return f"datasets.load_dataset({format!r}, data_files={files!r}{storage}){needs}"
    path, _, revision = destination.removeprefix("hf://datasets/").partition("@")
    if not destination.startswith("hf://"):
        return f"datasets.load_dataset({destination!r})"
    words = [repr(path.rstrip("/")), *([] if config == "default" else [repr(config)])]
    return f"datasets.load_dataset({', '.join([*words, *([f'revision={revision!r}'] if revision else [])])})"

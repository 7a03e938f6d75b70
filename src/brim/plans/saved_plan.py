"""Save a plan to a file, so that many machines use it without reading the source again.

The file has Arrow streams, a JSON header, and a SHA-256 of both. Its rows and files are memory-mapped when it is
loaded. It contains absolute paths, so only its owner may read it and it is never published.
docs/reference/file-formats.md describes its content.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import InputError, SourceError
from brim.file_set import Bundle, FileSet, Ints
from brim.options.groups import ShardOptions
from brim.plans.cut_shards import Shard, Shards
from brim.plans.plan import FORMAT_VERSION, Plan
from brim.records import dataclass
from brim.safe_names import stays_below
from brim.sources.file_table import FileColumn, FileTable, Split, flat_numbers
from brim.state.atomic_files import reason, rename
from brim.storage.location import Access, Location, parse_location

_SHARD_FACTS = ("folder", "extension", "splits", "counts")
_SHARD_COLUMNS = ("starts", "stops", "file_bytes", "value_bytes")
PLAN_MAGIC, _VERSION = b"BRIMPLAN", 1
_START = struct.Struct("<8sI")
_END = struct.Struct("<QQ")  # offset and size of the header; the SHA-256 and the magic follow
_TAIL_BYTES = 32 + len(PLAN_MAGIC)
_ALIGN = 64  # as Arrow aligns its buffers


@dataclass(frozen=True, slots=True)
class Saved:
    """A loaded plan with the data saved with it. `bytes` is the size of the file."""

    plan: Plan
    job: Mapping[str, Any]
    versions: Mapping[str, str]
    bytes: int


def save_plan(path: Path, plan: Plan, job: Mapping[str, Any], versions: Mapping[str, str]) -> None:
    """Write a plan and the JSON value `job` to a file, atomically."""
    if plan.table.files.ranges is not None:
        raise InputError(
            "A dataset of `datasets` is in the memory of this process, so its plan cannot be saved.",
            hint="Save the dataset to files first, or build it here.",
        )
    with _plan_file(path) as (file, temporary):
        _write(file, plan, job, versions)
        file.flush()
        reloaded = _read(temporary, trusting=False).plan
        if reloaded.fingerprint != plan.fingerprint:
            raise InputError(
                "The table has types that change when they are written to a file.",
                hint="Leave such columns out with --drop, or build on one machine without --save.",
            )


def load_plan(path: Path) -> Saved:
    """Load a plan without reading its source; raise InputError if the file is not a complete plan."""
    return _read(path, trusting=True)


@contextmanager
def understood(path: Path, versions: Mapping[str, str]) -> Iterator[None]:
    """Convert errors from a complete but unknown plan to an InputError that names the version of brim."""
    try:
        yield
    except (KeyError, TypeError) as error:
        problem = f"was made by brim {versions['brim']} and has entries that this version does not know"
        raise _not_a_plan(path, problem) from error


def relocate_plan(plan: Plan, root: str, shards: Sequence[Shard]) -> tuple[Plan, int]:
    """Move the source of a plan to `root`, to read `shards`; return also the number of files with other dates.

    Files must have the same relative paths and sizes. Dates and inodes are those of the new files.
    """
    files = plan.table.files
    mtimes, inodes = files.mtimes_ns.copy(), files.inodes.copy()
    new_files = dataclasses.replace(files, root=root, mtimes_ns=mtimes, inodes=inodes)
    changes = 0
    for number in _numbers_of(plan.table, shards).tolist():
        try:
            now = os.stat(new_files.full_path(number))
        except OSError as error:
            raise SourceError(
                f"The source file {files.path(number)!r} is not in {root!r}: {reason(error)}.",
                hint="Name the folder of the source on this machine with --root=DIR.",
            ) from error
        if now.st_size != files.sizes[number]:
            raise new_files.changed(number, f"was {files.sizes[number]} bytes when planned and is {now.st_size} there")
        changes += now.st_mtime_ns != int(mtimes[number])
        mtimes[number], inodes[number] = now.st_mtime_ns, now.st_ino & 0x7FFF_FFFF_FFFF_FFFF
    return _with_facts(dataclasses.replace(plan, table=plan.table.replace(files=new_files)), plan.facts), changes


def _numbers_of(table: FileTable, shards: Sequence[Shard]) -> Ints:
    """Return the numbers of the files on disk of shards."""
    numbers_of_columns = [np.zeros(0, np.int64)]
    for shard in shards:
        rows = table.rows.slice(shard.start, shard.rows)
        numbers_of_columns += [flat_numbers(rows.column(name)) for name in table.columns]
    numbers = np.unique(np.concatenate(numbers_of_columns))
    bundles = [number for number in numbers.tolist() if number in table.files.bundles]
    inside = [n for number in bundles for n in table.files.bundles[number].numbers]
    return np.unique(np.concatenate([np.setdiff1d(numbers, bundles), np.array(inside, np.int64)]))


def _with_facts(plan: Plan, facts: dict[str, Any]) -> Plan:
    """Set a plan's known facts, so that they are not computed again from all rows."""
    vars(plan)["facts"] = facts
    return plan


@contextmanager
def _plan_file(path: Path) -> Iterator[tuple[BufferedRandom, Path]]:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w+b") as file:
                yield file, temporary
                os.fsync(file.fileno())
            rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(
            f"The plan cannot be written to {str(path)!r}: {reason(error)}.", hint="Name a file in another folder."
        ) from error


def _write(file: BufferedRandom, plan: Plan, job: Mapping[str, Any], versions: Mapping[str, str]) -> None:
    file.write(_START.pack(PLAN_MAGIC, _VERSION))
    sections: dict[str, tuple[int, int]] = {}
    for name, table in _sections(plan).items():
        file.write(bytes(-file.tell() % _ALIGN))
        start = file.tell()
        with pa.ipc.new_stream(pa.PythonFile(file, "w"), table.schema) as stream:
            stream.write_table(table)
        sections[name] = (start, file.tell() - start)
    table, bucket = plan.table, plan.table.files.bucket
    header = {
        "sections": sections,
        "fingerprint": plan.fingerprint,
        "facts": plan.facts,
        "shards": {name: getattr(plan.shards, name) for name in _SHARD_FACTS},
        "format": plan.format,
        "cut": plan.cut.fingerprint_inputs(),
        "why": plan.why,
        "root": table.files.root,
        # The address and the access; credentials are the machine's own.
        "bucket": None if bucket is None else {"address": str(bucket), **dataclasses.asdict(bucket.access)},
        "columns": {name: dataclasses.asdict(column) for name, column in table.columns.items()},
        "features": table.features,
        "splits": [[split.name, split.start, split.stop] for split in table.splits],
        "recipe": table.recipe,
        "about": table.about,
        "warnings": table.notes(),
        "left_out": table.left_out,
        "verbatim": table.verbatim,
        "job": job,
        "versions": versions,
    }
    body = json.dumps(header).encode()
    start = file.tell()
    file.write(body + _END.pack(start, len(body)))
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").digest()
    file.seek(0, os.SEEK_END)
    file.write(digest + PLAN_MAGIC)


def _sections(plan: Plan) -> dict[str, pa.Table]:
    """Return the parts of a plan that are stored as Arrow tables."""
    files = plan.table.files
    numbers = list(files.bundles)
    bundles = [files.bundles[number] for number in numbers]
    return {
        "rows": plan.table.rows,
        "files": pa.table(
            {"path": files.paths, "size": files.sizes, "mtime_ns": files.mtimes_ns, "inode": files.inodes}
            | ({} if files.etags is None else {"etag": files.etags})
        ),
        "bundles": pa.table(
            {
                "number": pa.array(numbers, pa.int64()),
                "names": pa.array([list(b.names) for b in bundles], pa.large_list(pa.string())),
                "numbers": pa.array([list(b.numbers) for b in bundles], pa.large_list(pa.int64())),
            }
        ),
        "shards": pa.table({name: getattr(plan.shards, name) for name in _SHARD_COLUMNS}),
    }


def _read(path: Path, *, trusting: bool) -> Saved:
    """Map the file. Unless `trusting`, the plan's facts are computed from its rows."""
    whole = _mapped(path)
    view = memoryview(whole)
    if bytes(view[: len(PLAN_MAGIC)]) != PLAN_MAGIC:
        raise _not_a_plan(path, "is not a plan that brim saved")
    end = len(view) - _TAIL_BYTES
    if end < _START.size + _END.size or bytes(view[-len(PLAN_MAGIC) :]) != PLAN_MAGIC:
        raise _not_a_plan(path, "is cut off")
    version = _START.unpack_from(view)[1]
    if version != _VERSION:
        raise _not_a_plan(path, f"has the format {version} of another version of brim, and this one reads {_VERSION}")
    if hashlib.sha256(view[:end]).digest() != bytes(view[end : end + 32]):
        raise _not_a_plan(path, "is damaged")
    start, length = _END.unpack_from(view, end - _END.size)
    header: dict[str, Any] = json.loads(bytes(view[start : start + length]))
    if header["facts"]["format"] != f"{header['format']} {FORMAT_VERSION}":
        raise _not_a_plan(path, "was made by a version of brim that writes other shards")
    with understood(path, header["versions"]):
        sections = {name: whole.slice(*span) for name, span in header["sections"].items()}
        plan = _plan_of(header, {name: pa.ipc.open_stream(data).read_all() for name, data in sections.items()})
    if foreign := _path_that_leaves(plan):
        raise _not_a_plan(path, f"names {foreign!r}, which would leave its folder")
    if trusting:
        plan = _with_facts(plan, header["facts"])
        if plan.fingerprint != header["fingerprint"]:
            raise _not_a_plan(path, "contradicts itself")
    return Saved(plan, header["job"], header["versions"], len(view))


def _path_that_leaves(plan: Plan) -> str | None:
    """Return a path in a plan that would leave the folder of its source or destination, or None."""
    paths = plan.table.files.paths
    doubtful = paths.filter(pc.match_substring_regex(paths, r"^/|\.\.|\x00|^[./]*$"))
    inside = (name for bundle in plan.table.files.bundles.values() for name in bundle.names)
    shards = (f"{plan.shards.folder}/{split}" for split in plan.shards.splits)
    return next((name for name in (*doubtful.to_pylist(), *inside, *shards) if not stays_below(name)), None)


def _mapped(path: Path) -> pa.Buffer:
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
                return pa.py_buffer(b"")
        with pa.memory_map(str(path)) as mapped:
            return mapped.read_buffer()
    except OSError as error:
        hint = "Save one with brim plan SOURCE DEST --save PLAN."
        raise InputError(f"The plan {str(path)!r} cannot be read: {reason(error)}.", hint=hint) from error


def _plan_of(header: dict[str, Any], sections: dict[str, pa.Table]) -> Plan:
    rows, files, bundles, shards = (sections[name] for name in ("rows", "files", "bundles", "shards"))
    bucket: Location | None = None
    if (facts := header["bucket"]) is not None:
        bucket = parse_location(facts["address"], Access(facts["endpoint"], facts["anonymous"]))
    file_set = FileSet(
        header["root"],
        _single_chunk(files.column("path")),
        sizes=_single_chunk(files.column("size")).to_numpy(),
        mtimes_ns=_single_chunk(files.column("mtime_ns")).to_numpy(),
        inodes=_single_chunk(files.column("inode")).to_numpy(),
        bundles={
            number: Bundle(tuple(names), tuple(numbers))
            for number, names, numbers in zip(*(column.to_pylist() for column in bundles.columns), strict=True)
        },
        bucket=bucket,
        etags=_single_chunk(files.column("etag")) if "etag" in files.column_names else None,
    )
    table = FileTable(
        rows,
        {name: FileColumn(**column) for name, column in header["columns"].items()},
        file_set,
        header["features"],
        tuple(Split(*split) for split in header["splits"]),
        warnings=tuple(header["warnings"]),
        left_out=tuple(header["left_out"]),
        recipe=header["recipe"],
        about=header["about"],
        verbatim=header["verbatim"],
        borrowed=frozenset(rows.column_names),
    )
    facts = header["shards"]
    plan_shards = Shards(
        facts["folder"],
        facts["extension"],
        tuple(facts["splits"]),
        tuple(facts["counts"]),
        *(_single_chunk(shards.column(name)).to_numpy() for name in _SHARD_COLUMNS),
    )
    return Plan(table, plan_shards, header["format"], ShardOptions.from_record(header["cut"]), header["why"])


def _single_chunk(column: pa.ChunkedArray) -> pa.Array:
    """Return the only chunk of a column."""
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def _not_a_plan(path: Path, problem: str) -> InputError:
    return InputError(f"{str(path)!r} {problem}.", hint="Save the plan again with brim plan SOURCE DEST --save PLAN.")

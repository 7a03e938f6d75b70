"""Rows through a step: map, tokenize and embed, to a destination or to brim's cache.

Each verb has a function that makes its job, which the command line runs too, and one that runs it. What is drop-in for
`Dataset.map` is in map_api.

The rows of an embedding job are those of any computed job, or a folder of images.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np
import pyarrow as pa

from brim.api.job_options import (
    EmbedGiven,
    EmbedKeywords,
    MapGiven,
    TokenizeGiven,
    TokenizeKeywords,
    many,
    refuse_without_place,
    spelled_out,
)
from brim.api.recorded_run import recorded_run, shown
from brim.buckets.bucket_address import is_bucket_address, is_web_address, parse_bucket_address
from brim.buckets.listing import list_objects
from brim.choices import whole
from brim.errors import InputError
from brim.extras import need_extra
from brim.jobs.caches import cache_home, cache_key, open_cache, open_dataset, trim_caches
from brim.jobs.file_layout import FileLayout
from brim.jobs.job import Computed, Job
from brim.jobs.spec import (
    DatasetLayout,
    How,
    computed_facts,
    computed_spec,
    dataset_spec,
    heard_while_reading,
    vector_file_spec,
)
from brim.outputs.output import Output, RowsOutput
from brim.outputs.rows_file import read_schema
from brim.outputs.token_output import WHOLE, FinishOptions, TokenOutput, parse_split
from brim.outputs.vector_output import SUFFIXES, VectorOutput, rows_path
from brim.plans.fingerprint import digest_ints, digest_json, digest_table
from brim.progress import Progress
from brim.rows.open_rows import open_rows
from brim.rows.row_files import WILD, split_name
from brim.rows.row_options import RowOptions
from brim.rows.unit import RowSource
from brim.schedule.work_failures import users_own
from brim.schedule.worker_process import caller_bytes, kept_workers, start_spare
from brim.sources.file_table import FileTable
from brim.sources.open_source import read_source
from brim.sources.source_options import SourceOptions
from brim.steps.embed_options import EmbedOptions, ModelOptions
from brim.steps.embed_step import EmbedStep
from brim.steps.fast_encoder import choose
from brim.steps.map_options import MapOptions
from brim.steps.map_step import MapStep
from brim.steps.models import is_factory, model_name
from brim.steps.row_features import import_datasets
from brim.steps.step import Step
from brim.steps.step_process import make_step
from brim.steps.tokenize_step import TokenizeOptions, TokenizeStep, settle_dtype
from brim.steps.tokenizers import LoadedTokenizer, TokenizerFile, find_tokenizer
from brim.tensors.tensor_reader import ShardedRows, open_tensors

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

Place = str | os.PathLike[str]
ModelWord = Place | Callable[..., Any]  # a name, a folder, or a factory
Array = np.ndarray[Any, Any]
_UNIT_BYTES = 4 << 20  # encoding is slow: small units keep all cores busy to the end
_DATASET, _VECTORS = "dataset", "vectors.safetensors"


class Vectors(Mapping[str, "Array | ShardedRows"]):
    """What a model gave: an array for each of its outputs, mapped from `path` and not loaded.

    Types that NumPy lacks (bfloat16) are float32. Kept columns are in the Parquet file `kept`. `computed` is what the
    call did, which is nothing if it was all there.
    """

    def __init__(self, path: Path, computed: Computed) -> None:
        self.path, self.computed = path, computed
        self.kept: Path | None = rows_path(path) if rows_path(path).exists() else None
        self._arrays: dict[str, Array | ShardedRows] = open_tensors(path)

    def __getitem__(self, name: str) -> Array | ShardedRows:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def rows(self) -> int:
        return self.computed.built.rows

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}: {array.shape} {array.dtype}" for name, array in self.items())
        return f"<Vectors {shown} at {self.path}>"


def map_job(
    source: Any,
    function: Callable[..., Any] | str | None,
    destination: Place,
    options: MapOptions,
    given: MapGiven,
    *,
    held_bytes: int,
    name: str | None = None,
) -> Job:
    """A function over rows, to a destination. One that is named, "MODULE:FUNCTION", is loaded by workers alone."""
    how = given.how(held_bytes)
    with heard_while_reading(destination, how):
        output = RowsOutput(given.format, given.rows_per_shard, given.split)
        step = make_step(function, options) if isinstance(function, str) else MapStep(function, options)
        rows = open_rows(source, given.row_options(source, name))
        options.check(rows.schema)
        return Job(dataset_spec("map", rows, step, output, destination, how))


def tokenize_job(
    source: Any,
    tokenizer: Any,
    destination: Place | None,
    column: str,
    given: TokenizeGiven,
    *,
    note: Callable[[str], None],
    held_bytes: int,
    name: str | None = None,
    cache_dir: Place | None = None,
) -> tuple[Job, TokenizeStep]:
    """A column of text as token ids. Without a destination, to the cache as Arrow files."""
    keep = many(given.keep)
    if keep and (given.pack is not None or given.format == "bin"):
        raise InputError(
            "--keep needs rows that are documents, and those of --pack and bin are not.", hint="Leave out one of them."
        )
    if destination is None:
        refuse_without_place(given, "format")
        given = replace(given, format="arrow")
    how = given.how(held_bytes)
    with heard_while_reading(destination, how):
        return _tokenize_job(source, tokenizer, destination, column, given, how, keep, note, name, cache_dir)


def _tokenize_job(
    source: Any,
    tokenizer: Any,
    destination: Place | None,
    column: str,
    given: TokenizeGiven,
    how: How,
    keep: tuple[str, ...],
    note: Callable[[str], None],
    name: str | None,
    cache_dir: Place | None,
) -> tuple[Job, TokenizeStep]:
    found = find_tokenizer(tokenizer)
    loaded = LoadedTokenizer(found.read(), found.name)
    dtype = settle_dtype(given.dtype, given.format, loaded.vocab_size)
    eos = _document_end(given, found, loaded, note)
    options = TokenizeOptions(
        column=column,
        eos=eos,
        add_special_tokens=given.pack is None if given.special_tokens is None else given.special_tokens,
        max_length=given.max_length,
        keep=keep,
        dtype=dtype,
        long_documents=given.long_documents,
        long_chars=given.long_chars,
    )
    step = TokenizeStep(found, options, fast=choose(given.encoder, found.read()))
    step.check(loaded)
    if found.note:
        note(found.note)
    if loaded.switched_off:
        note(f"the tokenizer has its own {' and '.join(loaded.switched_off)}; switched off for this job")
    header = {
        "vocab_size": loaded.vocab_size,
        "eos": None if eos is None else loaded.id_of(eos),
        "tokenizer_sha256": found.sha256,
        "created_by": "brim",
    }
    del loaded
    finish = FinishOptions(
        format=given.format,
        dtype=dtype,
        pack=given.pack,
        pack_tail=given.pack_tail,
        splits=WHOLE if given.split is None else parse_split(given.split),
        shuffle=given.shuffle is not None,
        seed=0 if given.shuffle is None else whole("shuffle", given.shuffle),
        rows_per_shard=given.rows_per_shard,
        header=tuple(header.items()),
    )
    rows = open_rows(source, given.row_options(source, name, as_text=(column,), least_unit_bytes=_UNIT_BYTES))
    step.output_schema(rows.schema)
    output = TokenOutput(finish, found.name, eos)
    if destination is not None:
        return Job(dataset_spec("tokenize", rows, step, output, destination, how)), step
    folder = _cache("tokenize", rows, step, output, how, cache_dir, f"tokens of {column}")
    layout = DatasetLayout(folder / _DATASET, folder, waits=True)
    return Job(computed_spec("tokenize", rows, step, output, layout, how)), step


def _document_end(
    given: TokenizeGiven, found: TokenizerFile, loaded: LoadedTokenizer, note: Callable[[str], None]
) -> str | None:
    """The token that ends every document. Packed documents have one unless the caller declines: else a model that is
    trained on the rows sees the end of one document as the beginning of the next."""
    if given.no_eos and given.eos is not None:
        raise InputError("--eos and --no-eos exclude each other.", hint="Leave out one of them.")
    if given.no_eos or given.eos is not None or given.pack is None:
        return given.eos
    if found.eos is not None and loaded.has(found.eos):
        note(f"every document ends with {found.eos!r}, the eos_token of {found.eos_from} (--no-eos: without)")
        return found.eos
    if given.special_tokens and any(loaded.frame()):
        return None  # what the tokenizer puts around each document separates them
    raise InputError(
        f"--pack joins documents, and the tokenizer {found.name} does not say which token ends one.",
        hint="Name it: --eos TOKEN. Or join documents without one: --no-eos.",
    )


def embed_job(
    source: Any,
    model: ModelWord,
    destination: Place | None,
    column: str | None,
    image: str | None,
    given: EmbedGiven,
    *,
    held_bytes: int,
    cache_dir: Place | None = None,
) -> Job:
    """Texts and images as vectors: to one file if the destination's name ends like one, else to shards.

    Without a destination, to a file in the cache.
    """
    to = None if destination is None else os.fspath(destination)
    as_file = to is None or (not is_web_address(to) and Path(to).suffix in SUFFIXES)
    if to is None:
        refuse_without_place(given, "split")
    elif as_file and given.split != "train":
        raise InputError("--split is for shards, and DEST is a file.", hint="Leave --split out.")
    name = model_name(model)
    how = given.how(held_bytes)
    with heard_while_reading(to, how, as_file=as_file):
        return _embed_job(source, name, to, column, image, given, how, cache_dir, as_file=as_file)


def _embed_job(
    source: Any,
    model: str,
    to: str | None,
    column: str | None,
    image: str | None,
    given: EmbedGiven,
    how: How,
    cache_dir: Place | None,
    *,
    as_file: bool,
) -> Job:
    loading = ModelOptions(
        device=given.device,
        dtype=given.dtype,
        pooling=given.pooling,
        projection=given.projection,
        max_tokens=given.max_tokens,
        prompt=given.prompt,
        revision=given.revision,
        arguments=tuple((given.argument or {}).items()),
    )
    options = EmbedOptions(
        model=model,
        column=column,
        image=image,
        keep=many(given.keep),
        batch_size=given.batch_size,
        normalize=given.normalize,
        nan=given.nan,
        empty=given.empty,
        keep_bfloat16=to is not None and to.endswith(".safetensors"),
        image_access=given.source_access,
        names=tuple((given.name or {}).items()),
        loading=loading,
    )
    if not is_factory(model):
        need_extra("embed", "A model by its name or folder needs torch and transformers.", "torch", "transformers")
    rows, root = _embed_rows(source, image, given.row_options())
    step = EmbedStep(replace(options, image_root=root))
    step.check(rows.schema)
    if to is None:
        output = VectorOutput(_VECTORS, step.batch_rows or 1000)
        folder = _cache("embed", rows, step, output, how, cache_dir, f"vectors by {model}")
        return Job(computed_spec("embed", rows, step, output, FileLayout(folder / _VECTORS, folder, waits=True), how))
    if as_file:
        return Job(vector_file_spec(rows, step, to, how))
    return Job(dataset_spec("embed", rows, step, RowsOutput("parquet", None, given.split), to, how))


def _embed_rows(source: Any, image: str | None, options: RowOptions) -> tuple[RowSource, str | None]:
    """Rows, and where relative paths of images begin: with rows that are in memory, where this process works."""
    if isinstance(source, str | os.PathLike):
        return _open_embedded(os.fspath(source), image, options)
    return open_rows(source, options), None if image is None else os.getcwd()


def _cache(
    verb: str, rows: RowSource, step: Step, output: Output, how: How, cache_dir: Place | None, what: str
) -> Path:
    """The folder of this job in the cache, known again by all that decides its result."""
    facts = cache_key(computed_facts(verb, rows, step, output, how.on_error))
    name = f"{verb}-{digest_json(facts)[:24]}"
    trim_caches(cache_home(cache_dir))
    return open_cache(cache_home(cache_dir), name, {"what": what, "source": rows.name})


@overload
def tokenize(
    source: Any,
    tokenizer: Any,
    *,
    destination: Place,
    column: str = ...,
    name: str | None = ...,
    progress: Progress | bool | None = ...,
    report: Place | None = ...,
    **options: Unpack[TokenizeKeywords],
) -> Computed: ...
@overload
def tokenize(
    source: Any,
    tokenizer: Any,
    *,
    destination: None = ...,
    column: str = ...,
    name: str | None = ...,
    cache_dir: Place | None = ...,
    progress: Progress | bool | None = ...,
    report: Place | None = ...,
    **options: Unpack[TokenizeKeywords],
) -> Dataset | DatasetDict: ...
@spelled_out(TokenizeGiven)
def tokenize(
    source: Any,
    tokenizer: Any,
    *,
    destination: Place | None = None,
    column: str = "text",
    name: str | None = None,
    cache_dir: Place | None = None,
    progress: Progress | bool | None = None,
    report: Place | None = None,
    **options: Unpack[TokenizeKeywords],
) -> Any:
    """Turn a column of text into token ids, on all cores, within `memory`.

    `source` is what `map` takes; `tokenizer` a tokenizer.json, a folder with one, a name on the Hub, or a tokenizer of
    `tokenizers` or `transformers`. To a destination (a folder, hf://datasets/ORG/NAME, s3://BUCKET/PREFIX) it is what
    `brim tokenize` does. Without one, the ids are a Dataset (with `split`, a DatasetDict) that is mapped from
    `cache_dir`, and found there when the same is asked for again. An iterator is known again by
    `name`, together with the code that makes it.
    """
    watched, given = shown(progress), TokenizeGiven(**options)
    start_worker(TokenizeStep, given.engine, given.workers)
    job, _ = tokenize_job(
        source,
        tokenizer,
        destination,
        column,
        given,
        note=watched.note,
        held_bytes=caller_bytes(),
        name=name,
        cache_dir=cache_dir,
    )
    computed = run_job(job, watched, report)
    return computed if destination is not None else _opened(job)


@overload
def embed(
    source: Any,
    model: ModelWord,
    *,
    destination: Place,
    column: str | None = ...,
    image: str | None = ...,
    progress: Progress | bool | None = ...,
    report: Place | None = ...,
    **options: Unpack[EmbedKeywords],
) -> Computed: ...
@overload
def embed(
    source: Any,
    model: ModelWord,
    *,
    destination: None = ...,
    column: str | None = ...,
    image: str | None = ...,
    cache_dir: Place | None = ...,
    progress: Progress | bool | None = ...,
    report: Place | None = ...,
    **options: Unpack[EmbedKeywords],
) -> Vectors: ...
@spelled_out(EmbedGiven)
def embed(
    source: Any,
    model: ModelWord,
    *,
    destination: Place | None = None,
    column: str | None = None,
    image: str | None = None,
    cache_dir: Place | None = None,
    progress: Progress | bool | None = None,
    report: Place | None = None,
    **options: Unpack[EmbedKeywords],
) -> Computed | Vectors:
    """Put the texts of `column`, the images of `image`, or both through a model, without ever holding their vectors.

    `source` is what `map` takes, or a folder of images; `model` a name or a folder of sentence-transformers or
    transformers, or "MODULE:FACTORY" of yours (or that function itself) with `argument` for it. The destination is a
    file (.safetensors, .npy, .parquet), or a folder, hf://datasets/ORG/NAME or s3://BUCKET/PREFIX for Parquet shards.
    Without one, the vectors are mapped from a file in `cache_dir`, and found there when the same is asked for again.
    """
    given = EmbedGiven(**options)
    watched = shown(progress)
    start_worker(EmbedStep, given.engine, given.workers)
    held_bytes = caller_bytes()
    job = embed_job(source, model, destination, column, image, given, held_bytes=held_bytes, cache_dir=cache_dir)
    computed = run_job(job, watched, report)
    if destination is not None:
        return computed
    assert isinstance(job.spec.layout, FileLayout)
    assert isinstance(job.spec.layout.destination, Path)
    return Vectors(job.spec.layout.destination, computed)


def start_worker(step: type[Step], engine: str, workers: int | None) -> None:
    """One that loads what it needs while the source is looked at, or until the next call."""
    if engine == "local" and (workers is None or isinstance(workers, int)):  # or it will be refused
        start_spare(step.__module__, workers or (1 if step is EmbedStep else None))


def run_job(job: Job, progress: Progress, report: Place | None) -> Computed:
    """With a worker that is ready for the next call, if this one needed any."""
    with kept_workers(), recorded_run(progress, report, job.limit) as watched, users_own():
        computed = job.run(watched)
    if computed.outcome.workers and job.spec.step is not None:
        start_worker(type(job.spec.step), job.spec.how.scaling.engine, job.spec.how.workers)
    return computed


def _opened(job: Job) -> Any:
    """The Dataset of a job to the cache; of several splits, a DatasetDict."""
    assert isinstance(job.spec.output, TokenOutput)
    assert isinstance(job.spec.layout.destination, Path)
    data = job.spec.layout.destination / "data"

    def one(split: str) -> Any:
        files = sorted(data.glob(f"{split}-*.arrow"))
        return open_dataset(files, read_schema(files[0], "arrow"), f"{job.spec.fingerprint}/{split}")

    splits = job.spec.output.options.splits
    if splits == WHOLE:
        return one(WHOLE[0].name)
    return import_datasets("several splits").DatasetDict({split.name: one(split.name) for split in splits})


_BLOCK_ROWS = 10_000
_LOOK_NAMES = 10_000


def _open_embedded(source: str, image: str | None, options: RowOptions) -> tuple[RowSource, str | None]:
    """The rows, and where relative paths of images begin."""
    if is_bucket_address(source):
        return _open_bucket(source, image, options)
    path = Path(source)
    if image is None or not path.is_dir() or _holds_rows(path):
        root = path if path.is_dir() else path.parent
        return open_rows(source, options), os.path.abspath(root) if image is not None else None
    return _open_images(source, image, SourceOptions(limit=options.limit), path.name, options)


def _open_bucket(source: str, image: str | None, options: RowOptions) -> tuple[RowSource, str | None]:
    """As for a folder. Whether a bucket holds rows or images is told from its first names."""
    address = parse_bucket_address(source, options.access)
    folder, _, name = address.prefix.rpartition("/")
    if image is None or split_name(name)[0] is not None or WILD.search(address.prefix):
        root = replace(address, prefix=folder)
    elif any(map(_is_of_rows, (found for found, _ in islice(list_objects(address), _LOOK_NAMES)))):
        root = address
    else:
        reading = SourceOptions(limit=options.limit, access=options.access)
        return _open_images(source, image, reading, name or address.bucket, options)
    return open_rows(source, options), str(root) if image is not None else None


def _open_images(
    source: str, image: str, reading: SourceOptions, name: str, options: RowOptions
) -> tuple[RowSource, str | None]:
    table = read_source(source, reading)
    if image not in table.columns:
        named = ", ".join(table.columns) or "none"
        raise InputError(
            f"The folder {source!r} gives no column of images {image!r}.", hint=f"Its columns of files: {named}."
        )
    rows = open_rows(lambda: _tables_of_files(table), replace(options, name=name, limit=None))
    # An iterator is known by its name alone: a folder by what its files are called and how large they are.
    content = [digest_ints(table.files.sizes), *(digest_table(block) for block in _tables_of_files(table))]
    rows.facts = rows.facts | {"content": digest_json(content)}
    rows.files = table.files
    return rows, table.files.root if table.files.bucket is None else str(table.files.bucket)


def _holds_rows(folder: Path) -> bool:
    """Whether a folder has files of rows; tables that describe the files beside them do not count."""
    return any(_is_of_rows(name) for _, _, names in os.walk(folder) for name in names)


def _is_of_rows(path: str) -> bool:
    name = path.rpartition("/")[2]
    return not name.startswith(("metadata.", "README")) and split_name(name)[0] not in (None, "text")


def _tables_of_files(table: FileTable) -> Iterator[pa.Table]:
    """The rows with the paths of their files, which are relative to the root."""
    for start in range(0, len(table), _BLOCK_ROWS):
        rows = table.rows.slice(start, _BLOCK_ROWS)
        for name in table.columns:
            numbers = rows.column(name)
            if not pa.types.is_integer(numbers.type):
                continue  # lists of files: not for a model that takes one
            paths = [table.files.paths.take(chunk).cast(pa.string()) for chunk in numbers.chunks]
            rows = rows.set_column(rows.schema.get_field_index(name), name, pa.chunked_array(paths, pa.string()))
        yield rows.replace_schema_metadata(None)

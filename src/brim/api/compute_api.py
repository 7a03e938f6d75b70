"""Process rows with map, tokenize and embed, to a destination or to brim's cache.

Each command has a function that makes its job, which the command line uses too, and a function that runs it. The
replacement for `Dataset.map` is in map_api.

The source of an embedding job is rows, as for other jobs, or a folder of images.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from brim.api.chat_plan import chat_plan
from brim.api.overloads import refuse_without_destination, with_optional_destination
from brim.api.recorded_run import recorded_run, shown
from brim.api.row_reading import LEAST_TOKEN_UNIT_BYTES, row_options, source_access
from brim.compute.outputs.output import RowsOutput
from brim.compute.outputs.rows_file import read_schema
from brim.compute.outputs.token_output import FinishOptions, TokenOutput, token_splits
from brim.compute.outputs.vector_output import SUFFIXES, VectorOutput, rows_path
from brim.compute.rows.open_rows import open_rows
from brim.compute.rows.row_files import WILD, RowOptions, split_name
from brim.compute.rows.unit import RowSource
from brim.compute.steps.embed_step import EmbedStep, EmbedStepOptions
from brim.compute.steps.embedding_models import is_factory, model_name
from brim.compute.steps.gigatoken_encoder import choose
from brim.compute.steps.map_options import MapStepOptions
from brim.compute.steps.map_step import MapStep
from brim.compute.steps.row_features import import_datasets
from brim.compute.steps.step import Step
from brim.compute.steps.step_process import make_step
from brim.compute.steps.tokenize_step import TokenizeStep, TokenizeStepOptions, choose_dtype
from brim.compute.steps.tokenizers import LoadedTokenizer, TokenizerFile, find_tokenizer
from brim.errors import InputError
from brim.execution.failures import raising_user_errors
from brim.execution.worker_process import caller_bytes, keeping_worker, start_warm_worker
from brim.extras import need_extra
from brim.jobs.cache_entries import cache_home, cache_key, open_cache, open_dataset, trim_caches
from brim.jobs.destination_paths import dataset_paths, file_paths
from brim.jobs.job import Job
from brim.jobs.preflight import (
    ComputePlan,
    JobSettings,
    check_file_suffix,
    job_settings,
    stopping_while_reading,
)
from brim.jobs.results import MapResult
from brim.options.compute_options import (
    EmbedToCacheOptions,
    EmbedToDestinationOptions,
    MapFunctionOptions,
    MapToDestinationOptions,
    ModelOptions,
    TextOptions,
    TokenFileOptions,
    TokenizeOptions,
    TokenizeToCacheOptions,
    TokenizeToDestinationOptions,
    VectorOptions,
)
from brim.options.declare import takes, warn_deprecated
from brim.plans.fingerprint import digest_ints, digest_json, digest_table
from brim.progress import Progress
from brim.sources.file_table import FileTable
from brim.sources.open_source import read_source
from brim.sources.source_options import SourceOptions
from brim.storage.destination_address import parse_destination
from brim.storage.listing import list_files
from brim.storage.location import folder_location, is_dataset_address, is_object_address, parse_location
from brim.tensors.tensor_reader import ShardedTensor, open_tensors

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

PathLike = str | os.PathLike[str]
Array = np.ndarray[Any, Any]
_DATASET, _VECTORS = "dataset", "vectors.safetensors"


class Vectors(Mapping[str, "Array | ShardedTensor"]):
    """The vectors of a model: an array for each of its outputs, memory-mapped from `path`.

    Types that NumPy does not have (bfloat16) become float32. Kept columns are in the Parquet file `kept`. `computed` is
    the result of the job, with no computed rows if all vectors were in the cache.
    """

    def __init__(self, path: Path, computed: MapResult) -> None:
        self.path, self.computed = path, computed
        self.kept: Path | None = rows_path(path) if rows_path(path).exists() else None
        self._arrays: dict[str, Array | ShardedTensor] = open_tensors(path)

    def __getitem__(self, name: str) -> Array | ShardedTensor:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def rows(self) -> int:
        """The number of vectors."""
        return self.computed.rows

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}: {array.shape} {array.dtype}" for name, array in self.items())
        return f"<Vectors {shown} at {self.path}>"


def map_job(
    options: MapToDestinationOptions, *, held_bytes: int, dataset_format: Mapping[str, Any] | None = None
) -> Job:
    """Make the job that maps rows to a destination. A function that is named by a text is loaded by workers only."""
    settings = job_settings(JobSettings, options, held_bytes=held_bytes)
    with stopping_while_reading(options.destination, settings):
        output = RowsOutput(options.format, options.rows_per_shard, options.split)
        mapping = MapStepOptions(**options.values(MapFunctionOptions), **(dataset_format or {}))
        function = options.function
        step = make_step(function, mapping) if isinstance(function, str) else MapStep(function, mapping)
        rows = open_rows(options.dataset, row_options(options, options.dataset, options.name))
        mapping.check(rows.schema)
        return _dataset_job(ComputePlan("map", rows, step, output, settings.on_error), options.destination, settings)


def tokenize_job(
    options: TokenizeToDestinationOptions | TokenizeToCacheOptions, *, note: Callable[[str], None], held_bytes: int
) -> Job:
    """Make the job that turns a column of text into token ids. Without a destination: to the cache, as Arrow files."""
    if options.destination is None:
        refuse_without_destination(options, "format")
        options = replace(options, format="arrow")
    settings = job_settings(JobSettings, options, held_bytes=held_bytes)
    with stopping_while_reading(options.destination, settings):
        plan = (chat_plan if options.chat else _text_plan)(options, settings, note)
        if options.destination is not None:
            return _dataset_job(plan, options.destination, settings)
        folder = _cache(plan, options.cache_dir, "tokens of chats" if options.chat else f"tokens of {options.column}")
        location = folder_location(folder / _DATASET)
        return Job(plan, dataset_paths(location, folder, settings.hub, waits_for_lock=True), settings)


def _text_plan(options: TokenizeOptions, settings: JobSettings, note: Callable[[str], None]) -> ComputePlan:
    """Plan the job that turns a column of text into token ids."""
    file = find_tokenizer(options.tokenizer)
    loaded = LoadedTokenizer(file.read(), file.name)
    dtype = choose_dtype(options.dtype, options.format, loaded.vocab_size)
    eos = _document_end(options, file, loaded, note)
    special = options.pack is None if options.special_tokens is None else options.special_tokens
    texts = {**options.values(TextOptions), "eos": eos}
    step = TokenizeStep(
        file,
        TokenizeStepOptions(**texts, add_special_tokens=special, dtype=dtype),
        fast=choose(options.encoder, file.read()),
    )
    step.check(loaded)
    if file.note:
        note(file.note)
    if loaded.switched_off:
        note(f"the tokenizer has its own {' and '.join(loaded.switched_off)}; switched off for this job")
    header = {
        "vocab_size": loaded.vocab_size,
        "eos": None if eos is None else loaded.id_of(eos),
        "tokenizer_sha256": file.sha256,
        "created_by": "brim",
    }
    del loaded
    files = {**options.values(TokenFileOptions), "dtype": dtype}
    finish = FinishOptions(**files, splits=token_splits(options), header=tuple(header.items()))
    reading = row_options(
        options, options.source, options.name, as_text=(options.column,), least_unit_bytes=LEAST_TOKEN_UNIT_BYTES
    )
    rows = open_rows(options.source, reading)
    step.output_schema(rows.schema)
    output = TokenOutput(finish, file.name, eos)
    return ComputePlan("tokenize", rows, step, output, settings.on_error)


def _document_end(
    options: TokenizeOptions, file: TokenizerFile, loaded: LoadedTokenizer, note: Callable[[str], None]
) -> str | None:
    """Return the token that ends every document.

    Packed documents have one unless the caller declines: without it, a model that is trained on the rows sees the end
    of one document as the beginning of the next.
    """
    if options.no_eos or options.eos is not None or options.pack is None:
        return options.eos
    if file.eos is not None and loaded.has_token(file.eos):
        note(f"every document ends with {file.eos!r}, the eos_token of {file.eos_from} (--no-eos: without)")
        return file.eos
    if options.special_tokens and any(loaded.frame()):
        return None  # the special tokens of the tokenizer separate the documents
    raise InputError(
        f"--pack joins documents, and the tokenizer {file.name} does not define an end-of-document token.",
        hint="Name it: --eos TOKEN. Or join documents without one: --no-eos.",
    )


def embed_job(options: EmbedToDestinationOptions | EmbedToCacheOptions, *, held_bytes: int) -> Job:
    """Make the job that embeds texts and images.

    If the destination has the suffix of a vector file, the result is one file; otherwise it is a dataset of shards.
    Without a destination, the vectors go to a file in the cache.
    """
    to = None if options.destination is None else os.fspath(options.destination)
    as_file = to is None or (not is_dataset_address(to) and Path(to).suffix in SUFFIXES)
    if to is None:
        refuse_without_destination(options, "split")
    elif as_file and options.split != "train":
        raise InputError("--split can only be used with shards, and DEST is a file.", hint="Leave --split out.")
    model = model_name(options.model)
    settings = job_settings(JobSettings, options, held_bytes=held_bytes)
    with stopping_while_reading(to, settings, as_file=as_file):
        embedding = EmbedStepOptions(
            model,
            **options.values(VectorOptions),
            keep_bfloat16=to is not None and to.endswith(".safetensors"),
            image_access=source_access(options),
            loading=options.only(ModelOptions),
        )
        if not is_factory(model):
            need_extra("embed", "A model by its name or folder needs torch and transformers.", "torch", "transformers")
        rows, root = _open_embed_source(options.source, options.image, row_options(options))
        step = EmbedStep(replace(embedding, image_root=root))
        step.check(rows.schema)
        if not as_file:
            assert to is not None
            check_file_suffix(to)
            shards = RowsOutput("parquet", None, options.split)
            return _dataset_job(ComputePlan("embed", rows, step, shards, settings.on_error), to, settings)
        if to is not None:
            paths = file_paths(to, settings.state_dir, settings.access)
            output = VectorOutput(paths.file_names[0], step.batch_rows or 1000)
            return Job(ComputePlan("embed", rows, step, output, settings.on_error), paths, settings)
        output = VectorOutput(_VECTORS, step.batch_rows or 1000)
        plan = ComputePlan("embed", rows, step, output, settings.on_error)
        folder = _cache(plan, options.cache_dir, f"vectors by {model}")
        paths = file_paths(folder / _VECTORS, folder, settings.access, waits_for_lock=True)
        return Job(plan, paths, settings)


def _dataset_job(plan: ComputePlan, destination: PathLike, settings: JobSettings) -> Job:
    location = parse_destination(destination, settings.access)
    return Job(plan, dataset_paths(location, settings.state_dir, settings.hub), settings)


def _cache(plan: ComputePlan, cache_dir: PathLike | None, label: str) -> Path:
    """Return the folder of this job in the cache; its name is a digest of all inputs that affect the result."""
    name = f"{plan.command}-{digest_json(cache_key(plan.facts))[:24]}"
    trim_caches(cache_home(cache_dir))
    return open_cache(cache_home(cache_dir), name, {"what": label, "source": plan.source.name})


@takes(TokenizeToDestinationOptions, "tokenize")
def _tokenize(options: TokenizeToDestinationOptions) -> MapResult:
    return _run_tokenize(options)[1]


@takes(TokenizeToCacheOptions, "tokenize")
def _tokenize_to_cache(options: TokenizeToCacheOptions) -> Dataset | DatasetDict:
    """Turn a column of text into token ids, on all cores, within a memory limit.

    With a destination, `brim.tokenize` does what `brim tokenize` does. Without one, the ids are mapped from the cache,
    where a later call with the same arguments finds them.

    Returns:
        A `brim.MapResult` with a destination. Without one a Dataset; with `split_into` a DatasetDict.

    Raises:
        InputError: A column or an option is wrong.
        MemoryLimitError: The work does not fit the limit.

    Examples:
        >>> brim.tokenize("corpus.jsonl", "tokenizer.json", destination="tokens", progress=False).counts["documents"]
        3
        >>> brim.tokenize("corpus.jsonl", "tokenizer.json", progress=False).column_names
        ['input_ids']
    """
    job, _ = _run_tokenize(options)
    return _open_cached(job)


tokenize = with_optional_destination("tokenize", _tokenize, _tokenize_to_cache)


def _run_tokenize(options: TokenizeToDestinationOptions | TokenizeToCacheOptions) -> tuple[Job, MapResult]:
    if options.deprecated_shares is not None:
        option, old, new = options.deprecated_shares
        warn_deprecated(f"{option}={old!r} is now split_into={new!r}.")
    progress = shown(options.progress)
    start_worker(TokenizeStep, options.engine, options.workers)
    job = tokenize_job(options, note=progress.note, held_bytes=caller_bytes())
    return job, run_job(job, progress, options.report)


@takes(EmbedToDestinationOptions, "embed")
def _embed(options: EmbedToDestinationOptions) -> MapResult:
    return _run_embed(options)[1]


@takes(EmbedToCacheOptions, "embed")
def _embed_to_cache(options: EmbedToCacheOptions) -> Vectors:
    """Compute embeddings of texts, images or both with a model, without loading all vectors.

    With a destination, `brim.embed` does what `brim embed` does. Without one, the vectors are mapped from a file in the
    cache, where a later call with the same arguments finds them.

    Returns:
        A `brim.MapResult` with a destination, without one a `brim.Vectors`.

    Raises:
        InputError: A column, the model or an option is wrong.
        MemoryLimitError: The model does not fit the limit.

    Examples:
        >>> vectors = brim.embed("corpus.jsonl", "steps.py:model", column="text", progress=False)
        >>> vectors["embedding"].shape
        (3, 4)
    """
    job, result = _run_embed(options)
    return Vectors(job.paths.location.path, result)


embed = with_optional_destination("embed", _embed, _embed_to_cache)


def _run_embed(options: EmbedToDestinationOptions | EmbedToCacheOptions) -> tuple[Job, MapResult]:
    progress = shown(options.progress)
    start_worker(EmbedStep, options.engine, options.workers)
    job = embed_job(options, held_bytes=caller_bytes())
    return job, run_job(job, progress, options.report)


def start_worker(step: type[Step], engine: str, workers: int | None) -> None:
    """Start a worker early, so that it imports its modules while the source is opened or before the next call."""
    if engine == "local":
        start_warm_worker(step.__module__, workers or (1 if step is EmbedStep else None))


def run_job(job: Job, progress: Progress, report: PathLike | None) -> MapResult:
    """Run a job; if it used workers, start one for the next call."""
    with keeping_worker(), recorded_run(progress, report, job.limit) as watched, raising_user_errors():
        computed = job.run(watched)
    assert isinstance(computed, MapResult)
    if computed.stats.workers and isinstance(job.plan, ComputePlan):
        start_worker(type(job.plan.step), job.settings.engine, job.settings.workers)
    return computed


def _open_cached(job: Job) -> Any:
    """Return the cached result of a job: a Dataset, or a DatasetDict for several splits."""
    assert isinstance(job.plan, ComputePlan)
    assert isinstance(job.plan.output, TokenOutput)
    data = job.paths.location.path / "data"

    def open_split(split: str) -> Any:
        files = sorted(data.glob(f"{split}-*.arrow"))
        return open_dataset(files, read_schema(files[0], "arrow"), f"{job.plan.fingerprint}/{split}")

    splits = job.plan.output.options.splits
    if len(splits) == 1:
        return open_split(splits[0].name)
    return import_datasets("several splits").DatasetDict({split.name: open_split(split.name) for split in splits})


_BLOCK_ROWS = 10_000
_LOOK_NAMES = 10_000


def _open_embed_source(source: Any, image: str | None, options: RowOptions) -> tuple[RowSource, str | None]:
    """Return the rows and the root of relative image paths, which is the working folder for rows in memory.

    With a column of images, a folder without files of rows is a folder of images. The first names of a bucket decide
    between rows and images.
    """
    if not isinstance(source, str | os.PathLike):
        return open_rows(source, options), None if image is None else os.getcwd()
    source = os.fspath(source)
    if is_object_address(source):
        location = parse_location(source, options.access)
        name, root = location.prefix.rpartition("/")[2], location
        if image is None or split_name(name)[0] is not None or WILD.search(location.prefix):
            root = location.parent
        elif not any(_is_of_rows(key) for key, _ in islice(list_files(location), _LOOK_NAMES)):
            reading = SourceOptions(limit=options.limit, access=options.access)
            return _open_images(source, image, reading, name or location.container, options)
        return open_rows(source, options), None if image is None else str(root)
    path = Path(source)
    if image is None or not path.is_dir() or _has_rows(path):
        folder = os.path.abspath(path if path.is_dir() else path.parent)
        return open_rows(source, options), None if image is None else folder
    return _open_images(source, image, SourceOptions(limit=options.limit), path.name, options)


def _open_images(
    source: str, image: str, reading: SourceOptions, name: str, options: RowOptions
) -> tuple[RowSource, str | None]:
    table = read_source(source, reading)
    if image not in table.columns:
        names = ", ".join(table.columns) or "none"
        raise InputError(
            f"The folder {source!r} has no column of images {image!r}.", hint=f"Its columns of files are: {names}."
        )
    rows = open_rows(lambda: _tables_of_files(table), replace(options, name=name, limit=None))
    # An iterator is identified by its name alone, a folder by the names and sizes of its files.
    content = [digest_ints(table.files.sizes), *(digest_table(block) for block in _tables_of_files(table))]
    rows.facts = rows.facts | {"content": digest_json(content)}
    rows.files = table.files
    return rows, table.files.root


def _has_rows(folder: Path) -> bool:
    """Return whether a folder has files of rows; tables that describe other files in the folder do not count."""
    return any(_is_of_rows(name) for _, _, names in os.walk(folder) for name in names)


def _is_of_rows(path: str) -> bool:
    name = path.rpartition("/")[2]
    return not name.startswith(("metadata.", "README")) and split_name(name)[0] not in (None, "text")


def _tables_of_files(table: FileTable) -> Iterator[pa.Table]:
    """Yield the rows with the paths of their files, relative to the root."""
    for start in range(0, len(table), _BLOCK_ROWS):
        rows = table.rows.slice(start, _BLOCK_ROWS)
        for name in table.columns:
            numbers = rows.column(name)
            if not pa.types.is_integer(numbers.type):
                continue  # a list of files: a model takes one file per row
            paths = [table.files.paths.take(chunk).cast(pa.string()) for chunk in numbers.chunks]
            rows = rows.set_column(rows.schema.get_field_index(name), name, pa.chunked_array(paths, pa.string()))
        yield rows.replace_schema_metadata(None)

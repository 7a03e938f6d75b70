"""brim forecast: will it fit, with the arithmetic; a command for each shape of work."""

from typing import Annotated, Any

import typer

from brim.cli.flags import BidsFlags, Many, ReadingFlags, ShowingFlags, flat, help_text, read
from brim.cli.show import emit, print_lines
from brim.records import dataclass

HELP = """Will it fit, with the arithmetic.

Adds up what a pattern of work holds at its peak, as ranges where something is uncertain, and compares it with the
limit: LOW below 70 %, MODERATE up to 90 %, HIGH above. Nothing is run and nothing is read whole. Exits 0 whatever
the verdict; 2 if the forecast cannot be made.

[bold]Examples[/bold]

  brim forecast concat --rows 2857545 --dims 768 --dims 1024 --memory 64GB
  brim forecast embed-files scans/
  brim forecast map --row-bytes 200KB --workers 8
  brim forecast pid 4242 --adds 19GB
  brim forecast sampled --point 1/32=1.2GB --point 1/8=3.4GB
"""

EMBED_FILES = """Files read into a table and then written as Parquet, shard by shard.

With SOURCE, the shards are those that `datasets` would make, by the true size of the files.

  brim forecast embed-files scans/ --memory 32GB
  brim forecast embed-files --shard-bytes 3.6GB --largest-file 300MB --workers 4
"""

MAP = """`datasets.map`, or tokenising: batches in, batches out.

  brim forecast map --row-bytes 200KB --batch-size 1000 --workers 8
  brim forecast map --row-bytes 5KB --output-bytes 40KB --per-worker 500MB
"""

CONCAT = """Batches of vectors appended to lists and joined at the end: everything is held twice.

  brim forecast concat --rows 2857545 --dims 768 --dims 1024 --dtype float32
"""

PID = """A process that runs: what it holds, what its next step adds, what others hold.

  brim forecast pid 4242 --adds 19GB
  brim forecast pid 4242 --rows 2857545 --dims 768 --dims 1024
"""

SAMPLED = """A command that was run on parts of its data, extrapolated to all of it.

  brim run --fraction 1/32 --log a.jsonl -- python job.py …
  brim run --fraction 1/8 --log b.jsonl -- python job.py …
  brim forecast sampled a.jsonl b.jsonl --memory 64GB
"""


@dataclass(frozen=True)
class Against:
    """What a forecast is compared with."""

    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="The limit, like 64GB. (default: what is available)")
    ] = None


_BASE = typer.Option("--base", metavar="SIZE", help="What the process holds besides (model, libraries).")
_WORKERS = typer.Option("--workers", metavar="N", help="Processes at a time.")


def _show(shape: Any, showing: ShowingFlags, against: Against, **numbers: Any) -> None:
    """Make and print it; options that were not given keep the library's defaults."""
    from brim.api.forecast_api import forecast

    given = {name: value for name, value in numbers.items() if value is not None}
    made = forecast(shape, memory=against.memory, **given)
    if showing.json:
        emit("forecast", **made.facts)
    else:
        print_lines(made.lines)


def embed_files(
    against: Against,
    showing: ShowingFlags,
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="A folder, BIDS dataset or table, in place of numbers.")
    ] = None,
    files: Annotated[
        Many, typer.Option("--files", metavar="COLUMN[:TYPE]", help="SOURCE's file columns. May be repeated.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="How SOURCE becomes rows.")] = None,
    num_shards: Annotated[
        int | None, typer.Option(metavar="N", help="Shards that SOURCE is cut into. (default: as `datasets` does)")
    ] = None,
    shard_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help="The largest shard.")] = None,
    largest_file: Annotated[str | None, typer.Option(metavar="SIZE", help="The largest file.")] = None,
    row_group: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What is encoded at a time. (default: the shard)")
    ] = None,
    workers: Annotated[int, _WORKERS] = 1,
    base: Annotated[str | None, _BASE] = None,
) -> None:
    table = None if source is None else read(source, ReadingFlags(files=files), BidsFlags(recipe=recipe))
    sizes = {"shard_bytes": shard_bytes, "largest_file": largest_file, "row_group": row_group, "base": base}
    _show("embed-files", showing, against, source=table, num_shards=num_shards, workers=workers, **sizes)


def map_rows(
    against: Against,
    showing: ShowingFlags,
    row_bytes: Annotated[str, typer.Option(metavar="SIZE", help="A row of the input; better a long one.")],
    output_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="A row of the output. (default: as the input)")
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="ROWS", help="As in `datasets`.")] = 1000,
    writer_batch_size: Annotated[int, typer.Option(metavar="ROWS", help="As in `datasets`.")] = 1000,
    workers: Annotated[int, _WORKERS] = 1,
    per_worker: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What the function itself holds, in each worker.")
    ] = None,
    factor: Annotated[
        float | None, typer.Option(metavar="X", help="Bytes in memory for each byte of a batch, if you measured it.")
    ] = None,
    base: Annotated[str | None, _BASE] = None,
) -> None:
    sizes = {"row_bytes": row_bytes, "output_bytes": output_bytes, "per_worker": per_worker, "base": base}
    counts = {"batch_size": batch_size, "writer_batch_size": writer_batch_size, "workers": workers}
    _show("map", showing, against, factor=factor, **sizes, **counts)


def concat(
    against: Against,
    showing: ShowingFlags,
    rows: Annotated[int, typer.Option(metavar="N", help="How many vectors.")],
    dims: Annotated[list[int], typer.Option(metavar="N", help="How long a vector is; repeat it for several arrays.")],
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="float32, float16, bfloat16, …")] = "float32",
    copies: Annotated[int, typer.Option(metavar="N", help="How often it is held at the end.")] = 2,
    base: Annotated[str | None, _BASE] = None,
) -> None:
    _show("concat", showing, against, rows=rows, dims=dims, dtype=dtype, copies=copies, base=base)


def pid(
    against: Against,
    showing: ShowingFlags,
    pid: Annotated[int, typer.Argument(metavar="PID", help="The process; what it started counts too.")],
    adds: Annotated[str | None, typer.Option(metavar="SIZE", help="What its next step adds.")] = None,
    rows: Annotated[
        int | None, typer.Option(metavar="N", help="It joins so many vectors next, in place of --adds.")
    ] = None,
    dims: Annotated[
        list[int] | None, typer.Option(metavar="N", help="How long a vector is; repeat it for several arrays.")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="float32, float16, bfloat16, …")] = "float32",
) -> None:
    _show("pid", showing, against, pid=pid, adds=adds, rows=rows, dims=dims or None, dtype=dtype)


def sampled(
    against: Against,
    showing: ShowingFlags,
    logs: Annotated[
        list[str] | None, typer.Argument(metavar="LOG…", help="Logs of brim run --fraction F --log LOG.")
    ] = None,
    point: Annotated[
        Many, typer.Option("--point", metavar="F=SIZE", help="A fraction and its peak, like 1/32=1.2GB. Repeatable.")
    ] = None,
    at: Annotated[str, typer.Option(metavar="F", help="The fraction to forecast; 2 is twice the data.")] = "1",
) -> None:
    _show("sampled", showing, against, logs=logs or (), points=point or (), at=at)


app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
for _name, _verb, _help in (
    ("embed-files", embed_files, EMBED_FILES),
    ("map", map_rows, MAP),
    ("concat", concat, CONCAT),
    ("pid", pid, PID),
    ("sampled", sampled, SAMPLED),
):
    app.command(_name, help=help_text(_help))(flat(_verb))

"""What the verbs that compute share: reading rows, running the job, and saying what came of it."""

from collections.abc import Sequence
from typing import Any

from brim.cli.flags import ComputingFlags, LiveFlags, ShowingFlags, WatchingFlags, split_names
from brim.cli.show import count, emit, followed, memory_held, print_lines
from brim.sizes import format_size


def words_of(*groups: Any) -> dict[str, Any]:
    """What a job is told in Python. A page about it is made here, where the command is known."""
    words = {name: value for group in groups for name, value in vars(group).items()}
    words.pop("report")
    return words | {"columns": split_names(words["columns"])}


def run_job(
    job: Any, computing: ComputingFlags, showing: ShowingFlags, watching: WatchingFlags, live: LiveFlags
) -> tuple[Any, Any]:
    """Run it under the progress that fits, and with a page about it if asked for."""
    about: dict[str, Any] = {"limit": job.limit, "report": computing.report, "stop_file": job.stop_file}
    with followed(showing, watching, live, **about) as progress:
        return job.run(progress), progress


def tell(computed: Any, progress: Any, job: Any, showing: ShowingFlags, more: Sequence[tuple[str, str]] = ()) -> None:
    """What was done."""
    built, outcome = computed.built, computed.outcome
    peak = max(outcome.peak_bytes, getattr(progress, "peak_bytes", 0))
    units = len(outcome.receipts)
    if showing.json:
        facts = {name: getattr(built, name) for name in built.__slots__}
        counted = {
            "units": units,
            "computed": outcome.computed,
            "retries": outcome.retries,
            "bad_rows": outcome.bad_rows,
            "peak_bytes": peak,
            **({"encoders": outcome.encoders} if outcome.encoders else {}),
            **computed.counts,
        }
        emit("done", **(facts | counted), quarantine=computed.quarantine)
        return
    lines = [("done", f"{built.destination}{f' ({built.visibility})' if built.visibility else ''}")]
    lines.append(("holds", f"{built.rows:,} rows, {format_size(built.bytes)} in {count(built.shards, 'shard')}"))
    lines += more
    if units:
        kept = units - outcome.computed
        again = f", {outcome.retries} tried again" if outcome.retries else ""
        done = f"{outcome.computed:,} done{f', {kept:,} kept' if kept else ''}{again}"
        lines.append(("units", f"{done}, {count(outcome.workers, 'worker')}"))
    else:
        lines.append(("units", "nothing to do: it was all there"))
    if outcome.bad_rows:
        where = f", kept in {computed.quarantine}" if computed.quarantine else ""
        lines.append(("left out", f"{outcome.bad_rows:,} rows that failed{where}"))
    if built.proved:
        lines.append(("proved", built.proved))
    lines += memory_held(progress, job.limit.bytes, outcome.peak_bytes)
    print_lines(lines)

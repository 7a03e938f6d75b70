"""What the verbs that compute share: reading rows, running the job, and saying what came of it."""

import sys
from collections.abc import Sequence
from typing import Any

from brim.cli.flags import (
    ComputingFlags,
    KeepingFlags,
    LiveFlags,
    PublishingFlags,
    RowFlags,
    RunningFlags,
    ScalingFlags,
    ShowingFlags,
    StoringFlags,
    WatchingFlags,
    split_names,
)
from brim.cli.show import count, emit, memory_held, page_path, print_lines, progress_for
from brim.sizes import format_size, parse_size


def row_options(rows: RowFlags, storing: StoringFlags, columns: tuple[str, ...] | None = None) -> Any:
    from brim.rows.row_options import RowOptions

    return RowOptions(
        format=rows.input_format,
        text=rows.text,  # type: ignore[arg-type]
        columns=columns or split_names(rows.columns) or None,
        config=rows.from_config,
        where=rows.where,
        delimiter=rows.delimiter,
        limit=rows.limit,
        split=rows.from_split,
        unit_bytes=None if rows.unit_size is None else parse_size(rows.unit_size),
        access=storing.source,
    )


def job_options(
    running: RunningFlags,
    scaling: ScalingFlags,
    computing: ComputingFlags,
    keeping: KeepingFlags,
    publishing: PublishingFlags,
    storing: StoringFlags,
) -> Any:
    from brim.jobs.spec import How
    from brim.schedule.scheduler import Scaling as Engine
    from brim.stores.hub_options import HubOptions

    return How(
        memory=running.memory,
        workers=running.workers,
        on_error=computing.on_error,  # type: ignore[arg-type]
        fresh=computing.fresh,
        keep_done=computing.keep_done,
        state=keeping.state,
        stop_file=computing.stop_file,
        access=storing.dest,
        hub=HubOptions(
            config=publishing.config,
            message=publishing.commit_message,
            public=publishing.public,
            direct=publishing.direct,
            via=publishing.via,  # type: ignore[arg-type]
        ),
        scaling=Engine(scaling.engine, scaling.address),  # type: ignore[arg-type]
    )


def run_job(
    job: Any, computing: ComputingFlags, showing: ShowingFlags, watching: WatchingFlags, live: LiveFlags
) -> tuple[Any, Any]:
    """Run it under the progress that fits, and with a page about it if asked for."""
    from brim.redact import redact_command
    from brim.report.recording import recorded

    page = None if computing.report is None else page_path(computing.report)
    command = redact_command(["brim", *sys.argv[1:]])
    shown = progress_for(showing.json, watching.quiet)
    with recorded(shown, page, command, job.limit, {}, live_port=live.port, open_page=live.open_page) as progress:
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

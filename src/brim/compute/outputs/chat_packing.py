"""Pack conversations into rows of at most N tokens: best fit, decreasing, within windows of 10,000 conversations.

A conversation is never split. Windows are cut by number alone, so the rows depend on the conversations and their order
only. The conversations of a row, and the rows of a window, are in the order of the input: the longest ones do not come
first. A window is written to a scratch file and mapped, so that it takes no memory of the job.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.compute.outputs.token_files import ShardWriter, TokenShard
from brim.compute.outputs.token_packing import SEQ_LENGTHS, SPLIT
from brim.compute.steps.chat_masks import IGNORED_LABEL
from brim.compute.steps.chat_step import ATTENTION, LABELS, LENGTH, MASKS
from brim.compute.steps.tokenize_step import IDS

WINDOW = 10_000  # conversations
POSITIONS = "position_ids"
_ROWS_AT_ONCE = 256


def packed_schema(schema: pa.Schema, position_ids: bool) -> pa.Schema:
    """Return the columns of packed rows for the columns of conversations."""
    fields = [pa.field(SEQ_LENGTHS, pa.list_(pa.int32()))]
    fields += [pa.field(POSITIONS, pa.list_(pa.int32()))] * position_ids
    return pa.schema([*schema, *fields])


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return which of these lengths share a row of `room`, as lists of their numbers, in the order of the input.

    Examples:
        >>> best_fit([5, 3, 4, 2, 6], 8)
        [[0, 1], [2], [3, 4]]
    """
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []  # what is left in a row, and its number; ascending
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = lengths[number]
        place = bisect_left(space, (length, -1))
        if place < len(space):
            left, row = space.pop(place)
            rows[row].append(number)
        else:
            left, row = room, len(rows)
            rows.append([number])
        insort(space, (left - length, row))
    return sorted(sorted(row) for row in rows)


class PackedChats:
    """The way of one split's conversations into packed rows of shards."""

    def __init__(self, writer: ShardWriter, room: int, schema: pa.Schema, scratch: Path) -> None:
        self._writer, self._room, self._schema, self._scratch = writer, room, schema, scratch
        self._sink: pa.NativeFile | None = None
        self._stream: Any = None
        self._lengths: list[int] = []

    def write(self, batch: pa.RecordBatch) -> None:
        batch = batch.select([name for name in batch.schema.names if name in self._schema.names and name != SPLIT])
        while batch.num_rows:
            part = batch.slice(0, WINDOW - len(self._lengths))
            batch = batch.slice(part.num_rows)
            if self._stream is None:
                self._sink = pa.OSFile(str(self._scratch), "wb")
                self._stream = pa.ipc.new_file(self._sink, part.schema)
            self._stream.write_batch(part)
            self._lengths += part.column(LENGTH).to_pylist()
            if len(self._lengths) == WINDOW:
                self._end_window()

    def finish(self) -> tuple[list[TokenShard], int]:
        self._end_window()
        return self._writer.finish(), 0

    def abandon(self) -> None:
        if self._sink is not None:
            self._sink.close()
        self._writer.abandon()

    def _end_window(self) -> None:
        """Write the rows of the window, and begin another one."""
        if self._stream is None:
            return
        assert self._sink is not None
        self._stream.close()
        self._sink.close()
        with pa.memory_map(str(self._scratch)) as file:
            stream = pa.ipc.open_file(file)
            batches = [stream.get_batch(number) for number in range(stream.num_record_batches)]
            rows = best_fit(self._lengths, self._room)
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                self._writer.write(self._packed(batches, rows[start : start + _ROWS_AT_ONCE]))
            del batches, stream
        self._scratch.unlink()
        self._stream = self._sink = None
        self._lengths = []

    def _packed(self, batches: list[pa.RecordBatch], rows: list[list[int]]) -> pa.RecordBatch:
        """Return packed rows as they are written."""
        # Conversations are sliced one by one: Table.take would copy the whole window each time.
        ends_of_batches = list(accumulate(batch.num_rows for batch in batches))
        slices = []
        for number in chain.from_iterable(rows):
            place = bisect_right(ends_of_batches, number)
            slices.append(batches[place].slice(number - ends_of_batches[place] + batches[place].num_rows, 1))
        chosen = pa.Table.from_batches(slices).combine_chunks()
        lengths = chosen.column(LENGTH).to_numpy()
        ends = np.cumsum(lengths)
        counts = np.cumsum([len(row) for row in rows])
        edges = _int32(np.concatenate([[0], ends[counts - 1]]))
        starts = ends - lengths  # of conversations

        def lists(values: Any) -> pa.Array:
            return pa.ListArray.from_arrays(edges, values)

        columns = {}
        for name in (IDS, LABELS, MASKS, ATTENTION):
            if name in chosen.column_names:
                values = chosen.column(name).combine_chunks()
                values = (values.chunk(0) if isinstance(values, pa.ChunkedArray) else values).flatten()
                if name in (LABELS, MASKS):
                    # The token before is of another conversation, so the first one is not to be predicted.
                    changed = values.to_numpy().copy()
                    changed[starts] = IGNORED_LABEL if name == LABELS else 0
                    values = pa.array(changed, values.type)
                columns[name] = lists(values)
        columns[LENGTH] = pa.array(np.diff(np.concatenate([[0], ends[counts - 1]])).astype(np.int32))
        places = _int32(np.concatenate([[0], counts]))
        columns[SEQ_LENGTHS] = pa.ListArray.from_arrays(places, pa.array(lengths.astype(np.int32)))
        if POSITIONS in self._schema.names:
            positions = np.arange(int(ends[-1])) - np.repeat(starts, lengths)
            columns[POSITIONS] = lists(_int32(positions))
        return pa.RecordBatch.from_arrays([columns[name] for name in self._schema.names], schema=self._schema)


def _int32(values: npt.NDArray[Any]) -> pa.Array:
    return pa.array(values.astype(np.int32))

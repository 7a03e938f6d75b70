"""Read remote row groups in a process of their own, for processes that were forked.

The clients of object stores run threads that a fork does not copy, so that a forked worker of a DataLoader, the default
on Linux, would wait for ever. It starts this process, which writes tables to its output as an Arrow stream, and then
a pickled error or None. Workers that were spawned read by themselves.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pyarrow as pa

from brim.errors import InputError
from brim.loader.epoch_order import EpochOrder
from brim.loader.parquet_groups import RowGroups
from brim.loader.row_batches import stretches_of
from brim.loader.row_group_reader import RowGroupReader
from brim.loader.row_shares import Range


class ReaderProcess:
    """A process that reads what is needed for ranges of an order. It ends when this one does."""

    def __init__(self, groups: RowGroups, order: EpochOrder, ranges: Sequence[Range], ahead_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "brim.loader.reader_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        pickle.dump((groups, order, list(ranges), ahead_bytes), self._process.stdin)
        self._process.stdin.flush()  # left open: its end tells the process that this one has ended

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows in order; raise the error of the process."""
        assert self._process.stdout is not None
        error: object = InputError(
            "The process that reads remote files was killed.", hint="Resume from the last state."
        )
        try:
            with pa.ipc.open_stream(pa.PythonFile(self._process.stdout, "r")) as stream:
                for batch in stream:
                    yield pa.Table.from_batches([batch])
                error = pickle.load(self._process.stdout)
        except (OSError, EOFError, ValueError, pa.ArrowException, pickle.UnpicklingError):
            pass  # it was cut off
        if isinstance(error, BaseException):
            raise error

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what it did not read any more
                    pass


def main() -> None:
    """Read what the standard input asks for, and write it to the standard output."""
    groups, order, ranges, ahead_bytes = pickle.load(sys.stdin.buffer)
    error: BaseException | None = None
    out = sys.stdout.buffer
    with pa.ipc.new_stream(pa.PythonFile(out, "w"), groups.schema.remove_metadata()) as stream:
        try:
            for table in RowGroupReader(groups, ahead_bytes).tables(stretches_of(order, ranges)):
                stream.write_table(table)
        except BrokenPipeError:
            return
        except Exception as failure:  # noqa: BLE001  raised by the process that asked
            error = failure
    pickle.dump(error, out)
    out.flush()


if __name__ == "__main__":
    main()

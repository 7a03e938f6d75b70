"""Record how far an unfinished tensor file is safe on disk: one checksummed line per checkpoint.

A line has the number of rows and, for each stream of bytes, its end and the CRC-32 of the bytes added since the
previous line. Lines are only appended; damaged rows are revoked by another line. The lock on this file allows one
writer at a time and is released when its process dies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from brim.records import dataclass
from brim.state.record_log import RecordLog

RECEIPTS = "receipts.jsonl"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`rows` rows are on disk; `blocks` has the end of each stream and the checksum of its newest part."""

    rows: int
    blocks: dict[str, tuple[int, int]]


class CheckpointLog:
    """The lines of one unfinished file. `job` describes the request, `moves` the renames that finish it."""

    def __init__(self, folder: Path) -> None:
        self.job: dict[str, Any] | None = None
        self.checkpoints: list[Checkpoint] = []
        self.moves: dict[str, Any] | None = None
        self._log = RecordLog(folder / RECEIPTS, 0o666)
        try:
            name = folder.name
            self._log.lock(repr(str(folder)), f"{name.removesuffix('.partial')} is being written by another writer.")
            for record in self._log.replay():
                self._apply(record)
            self._log.sync()
        except BaseException:
            self.close()
            raise

    @property
    def is_empty(self) -> bool:
        """Return whether starting over loses nothing."""
        return self.job is None or (self.rows == 0 and self.moves is None)

    @property
    def rows(self) -> int:
        return self.checkpoints[-1].rows if self.checkpoints else 0

    def clear(self) -> None:
        self._log.clear()
        self.job, self.checkpoints, self.moves = None, [], None

    def begin(self, job: dict[str, Any]) -> None:
        self._append({"type": "job", "job": job})

    def add(self, checkpoint: Checkpoint) -> None:
        self._append({"type": "rows", "rows": checkpoint.rows, "blocks": checkpoint.blocks})

    def take_back(self, rows: int) -> None:
        """Revoke all rows after the first `rows`."""
        self._append({"type": "back", "rows": rows})

    def finish(self, moves: dict[str, Any]) -> None:
        self._append({"type": "finish", "moves": moves})

    def close(self) -> None:
        self._log.close()

    def _append(self, record: dict[str, Any]) -> None:
        self._log.append(record)
        self._apply(json.loads(json.dumps(record)))

    def _apply(self, record: dict[str, Any]) -> None:
        match record:
            case {"type": "job", "job": dict(job)}:
                self.job = job
            case {"type": "rows", "rows": int(rows), "blocks": dict(blocks)}:
                self.checkpoints.append(Checkpoint(rows, {name: (end, crc) for name, (end, crc) in blocks.items()}))
            case {"type": "back", "rows": int(rows)}:
                while self.checkpoints and self.checkpoints[-1].rows > rows:
                    self.checkpoints.pop()
            case {"type": "finish", "moves": dict(moves)}:
                self.moves = moves

"""What a tokenising job ends in, for the engine: shards of ids, counted, with a card that says how to read them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from brim.compute.finish import Finished, Units, card_of
from brim.compute.made import Made
from brim.compute.setup import Writing
from brim.compute.tokens.finish import FinishOptions, TokenCounts, finish_tokens
from brim.engine.hashing import sha256_of
from brim.errors import DoesNotFit
from brim.formats.card import CardFacts
from brim.progress import Advance
from brim.sizes import format_size

_COPIES = 6  # of a packed row: held, joined, its group, encoded and compressed
_READ_BIN = """import json
import numpy as np

head = json.load(open("{folder}/{split}.json"))
tokens = np.memmap("{folder}/{split}.bin", dtype=head["dtype"], mode="r")
starts = np.load("{folder}/{split}.idx.npy", mmap_mode="r")
first = tokens[starts[0] : starts[1]]"""


@dataclass(frozen=True, slots=True)
class TokenFinisher:
    """Split, shuffle, pack, write. `tokenizer` is its name, for the card."""

    options: FinishOptions
    tokenizer: str

    @property
    def writing(self) -> Writing:
        return Writing("arrow", 10_000, 8 << 20)

    @property
    def facts(self) -> dict[str, Any]:
        return {**asdict(self.options), "splits": [asdict(split) for split in self.options.splits], "header": None}

    def check_room(self, limit_bytes: int) -> None:
        """A packed row is in memory as a whole, several times while it is written."""
        if self.options.pack is None or self.options.format == "bin":
            return
        need = _COPIES * 4 * self.options.pack * len(self.options.splits)
        if need > limit_bytes // 2:
            raise DoesNotFit(
                f"Rows of {self.options.pack:,} tokens are too long for a limit of {format_size(limit_bytes)}.",
                hint=f"Give --memory={-(-2 * need // 10**6)}MB, a smaller --pack, or --format=bin, which has no rows.",
                limit_bytes=limit_bytes,
                need_bytes=2 * need,
            )

    def finish(self, units: Units, shards: str, advance: Advance) -> Finished:
        paths = [units.folder / receipt.name for receipt in units.receipts if receipt.rows]
        folder = units.folder / "made"
        rows = sum(receipt.rows for receipt in units.receipts)
        each = sum(receipt.size for receipt in units.receipts) / max(rows, 1)
        done = finish_tokens(
            paths, folder, self.options, units.limit_bytes, lambda count: advance(round(count * each)), units.schema
        )
        made = {}
        for one in done.made:
            size, sha256 = one.path.stat().st_size, sha256_of(one.path, lambda _: advance(0))
            made[f"{shards}/{Path(one.name).name}"] = Made(one.path, one.split, one.rows, size, sha256)
        card = self._card(done.schema, done.counts, shards)
        return Finished(made, card, asdict(done.counts))

    def _card(self, schema: pa.Schema, counts: TokenCounts, shards: str) -> CardFacts:
        card = card_of(schema, f".{self.options.format}")
        if self.options.format == "bin":
            code = _READ_BIN.format(folder=shards, split=self.options.splits[0].name)
            card = replace(card, code=code, columns=[("tokens", self.options.dtype)])
        return replace(card, notes=self._notes(counts))

    def _notes(self, counts: TokenCounts) -> list[str]:
        notes = [f"{counts.documents:,} documents, {counts.tokens:,} tokens", f"tokenizer: {Path(self.tokenizer).name}"]
        if self.options.pack is not None:
            notes.append(f"packed in rows of {self.options.pack:,} tokens")
        if self.options.shuffle:
            notes.append(f"shuffled with the seed {self.options.seed}")
        return notes

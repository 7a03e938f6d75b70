"""Row groups that were encoded apart, as one Parquet file: the bytes that one writer gives for all of them.

Nothing in a row group depends on where it lies but the offsets in the footer. So each can be encoded by itself, by
whoever has time, as a small file; their bodies are put after each other and one footer is written for all.
"""

from __future__ import annotations

from brim.formats import thrift
from brim.formats.thrift import LIST, STRUCT, Struct

MAGIC = b"PAR1"
_ROWS, _GROUPS = 3, 4  # of the footer
_COLUMNS, _GROUP_OFFSET, _ORDINAL = 1, 5, 7  # of a row group
_CHUNK_OFFSET, _CHUNK_META = 2, 3  # of a column chunk
_PAGE_OFFSETS = (9, 10, 11)  # of its metadata: data, index, dictionary


class JoinedFooter:
    """The footer of a file to which row groups are added. The file begins with MAGIC."""

    def __init__(self) -> None:
        self._footer: Struct | None = None
        self._groups: list[Struct] = []
        self._rows = 0

    def add(self, encoded: memoryview, at: int) -> memoryview:
        """What is to be written at `at` of the small file `encoded`."""
        length = int.from_bytes(encoded[-8:-4], "little")
        end = len(encoded) - 8 - length
        footer, _ = thrift.decode(encoded, end)
        for group in footer[_GROUPS][1].items:
            self._groups.append(_moved(group, at - len(MAGIC), len(self._groups)))
        self._rows += footer[_ROWS][1]
        self._footer = footer
        return encoded[len(MAGIC) : end]

    def end(self) -> bytes:
        """What comes after the last row group."""
        assert self._footer is not None, "a file has one row group at least, if need be an empty one"
        footer = self._footer
        footer[_GROUPS] = (LIST, thrift.List(STRUCT, self._groups))
        footer[_ROWS] = (footer[_ROWS][0], self._rows)
        data = thrift.encode(footer)
        return data + len(data).to_bytes(4, "little") + MAGIC


def _moved(group: Struct, by: int, number: int) -> Struct:
    for chunk in group[_COLUMNS][1].items:
        _move(chunk[_CHUNK_META][1], _PAGE_OFFSETS, by)
        _move(chunk, (_CHUNK_OFFSET,), by)
    _move(group, (_GROUP_OFFSET,), by)
    if _ORDINAL in group:
        group[_ORDINAL] = (group[_ORDINAL][0], number)
    return group


def _move(fields: Struct, names: tuple[int, ...], by: int) -> None:
    """What is not there is 0: the pages of an empty column, and the metadata that old writers put behind a chunk."""
    for name in names:
        if name in fields and fields[name][1]:
            fields[name] = (fields[name][0], fields[name][1] + by)

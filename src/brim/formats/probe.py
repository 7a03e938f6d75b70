"""Look into one file: is its header what its name says, and is a gzip stream whole?

Each look returns None where all is well, or a few words that say what is wrong. Headers are read and
nothing behind them, so a look costs the same for a file of any size. Whether pixels or voxels make sense
is not judged. An image is judged by its content, as decoders do it: a JPEG named `.png` is fine.
"""

from __future__ import annotations

import logging
import math
import os
import re
import struct
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, Literal

from brim.errors import SourceChanged
from brim.extras import missing
from brim.state.durable import open_regular, reason

Opened = Callable[[], AbstractContextManager[Any]]  # opens a file, as a context
Look = Literal["NIfTI", "image", "PDF", "gzip"]

# The names of files that can be looked into, as a pattern that Arrow understands as well.
PROBED_NAMES = r"(?i)\.(nii|gz|png|jpe?g|jpe|jfif|gif|webp|tiff?|bmp|pdf)$"
_IMAGE_NAME = re.compile(r"(?i)\.(png|jpe?g|jpe|jfif|gif|webp|tiff?|bmp)$")
_GZIP_MAGIC = b"\x1f\x8b"
_READ_BYTES = 256 * 1024
_INFLATED_BYTES = 1024 * 1024
_NIFTI_HEADER_BYTES = 540  # of NIfTI-2, the larger one
_ENDS_EARLY = "ends early"
_NOT_GZIP = "is not gzip"
_ZLIB_WORDS = {
    "incorrect data check": "has a wrong checksum (CRC): its content is damaged",
    "incorrect length check": "has a wrong length at the end of its gzip stream",
}

_log = logging.getLogger(__name__)
_log.propagate = False  # nibabel's small complaints are no damage
_log.addHandler(logging.NullHandler())


class _Damage(Exception):
    """Says what is wrong; never leaves this module."""


def look_of(path: str, kind: str) -> Look | None:
    """What a file can be looked at as, by the kind of its column and then by its name."""
    name = path.lower()
    if kind == "nifti" or name.endswith((".nii", ".nii.gz")):
        return None if name.endswith((".bz2", ".xz", ".zst")) else "NIfTI"
    if kind == "image" or _IMAGE_NAME.search(name):
        return "image"
    if kind == "pdf" or name.endswith(".pdf"):
        return "PDF"
    return "gzip" if name.endswith(".gz") else None


def probe_header(path: str, kind: str = "file", opened: Opened | None = None) -> str | None:
    """What is wrong with the beginning of a file, or None. `opened` opens it, if it is no local file."""
    look = look_of(path, kind)
    return None if look is None else _fault(opened or _local(path), lambda file: _LOOKS[look](file, path.lower()))


def probe_gzip(
    path: str,
    advance: Callable[[int], None],
    kind: str = "file",
    opened: Opened | None = None,
) -> str | None:
    """What is wrong with a gzip stream, read to its last byte, or None. `advance` is told of the bytes read.

    Of a NIfTI image, the length that its header promises is compared too.
    """

    def look(file: BinaryIO) -> None:
        length = _inflate_all(file, advance)
        if look_of(path, kind) == "NIfTI":
            file.seek(0)
            try:
                header = _nifti_header(_inflate_head(file))
            except _Damage:
                return  # a matter of the header, which has its own look
            _check_nifti_length(header, length)

    return _fault(opened or _local(path), look)


def shape_of(file: Any, path: str, kind: str) -> tuple[int, ...] | None:
    """The dimensions that a file's header tells: of a NIfTI image its axes, of a picture width and height. None if it
    tells none, or is not what its name says."""
    look, head = look_of(path, kind), file.read(len(_GZIP_MAGIC))
    file.seek(0)
    try:
        if look == "NIfTI":
            data = _inflate_head(file) if head == _GZIP_MAGIC else file.read(_NIFTI_HEADER_BYTES)
            return _nifti_shape(data)
        if look == "image":
            start = file.read(32)
            measure = next((measure for magic, measure in _IMAGES if re.match(magic, start, re.DOTALL)), None)
            return None if measure is None else measure(file, start)
    except (_Damage, struct.error, IndexError, OSError):
        pass
    return None


def _nifti_shape(head: bytes) -> tuple[int, ...] | None:
    """From either version's header, in either order of bytes."""
    for order in "<>":
        (size,) = struct.unpack_from(f"{order}i", head)
        if size in (348, 540):
            place = (f"{order}8h", 40) if size == 348 else (f"{order}8q", 16)
            count, *axes = struct.unpack_from(place[0], head, place[1])
            return tuple(axes[:count]) if 1 <= count <= 7 else None
    return None


def _local(path: str) -> Callable[[], BinaryIO]:
    return lambda: open(open_regular(path), "rb")


def _size(file: BinaryIO) -> int:
    at = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(at)
    return size


def _fault(opened: Opened, look: Callable[[BinaryIO], object]) -> str | None:
    try:
        with opened() as file:
            look(file)
    except _Damage as damage:
        return str(damage)
    except OSError as error:
        return f"cannot be read ({reason(error)})"
    except SourceChanged:
        return "is not the object that was listed, or is gone"
    return None


def _inflate_all(file: BinaryIO, advance: Callable[[int], None]) -> int:
    """The inflated length of all members. zlib compares each member's checksum and length."""
    left, read, length = b"", 0, 0
    member, members, begun = zlib.decompressobj(wbits=31), 0, False
    while block := file.read(_READ_BYTES):
        read += len(block)
        advance(len(block))
        left += block
        while left:
            if not begun:
                # Zeros behind a member are padding, which every reader passes over.
                left = left.lstrip(b"\0") if members else left
                if len(left) < len(_GZIP_MAGIC):
                    break
                if not left.startswith(_GZIP_MAGIC):
                    raise _not_a_member(members, _size(file) - read + len(left))
                begun = True
            length += _inflate(member, left, read)
            left = member.unused_data
            if member.eof:
                member, members, begun = zlib.decompressobj(wbits=31), members + 1, False
    if begun:
        raise _Damage(f"is cut off: {length:,} bytes inflated, and the gzip stream does not end")
    if left or not members:
        raise _not_a_member(members, len(left))
    return length


def _not_a_member(members: int, size: int) -> _Damage:
    return _Damage(f"has {size:,} byte(s) behind the end of the gzip stream" if members else _NOT_GZIP)


def _inflate(member: Any, data: bytes, at: int) -> int:
    """Inflate all of `data`, a piece at a time, and keep nothing of it but the length."""
    length = 0
    try:
        while True:
            size = len(member.decompress(data, _INFLATED_BYTES))
            length, data = length + size, member.unconsumed_tail
            if member.eof or (not data and size < _INFLATED_BYTES):
                return length
    except zlib.error as error:
        what = str(error).rpartition(": ")[2]
        raise _Damage(_ZLIB_WORDS.get(what, f"is damaged before byte {at:,}: {what}")) from error


def _inflate_head(file: BinaryIO) -> bytes:
    """The first inflated bytes of a gzip stream, enough for a header."""
    if file.read(len(_GZIP_MAGIC)) != _GZIP_MAGIC:
        raise _Damage(_NOT_GZIP)
    file.seek(0)
    head, member = b"", zlib.decompressobj(wbits=31)
    while len(head) < _NIFTI_HEADER_BYTES and not member.eof and (block := file.read(4096)):
        try:
            head += member.decompress(block, _NIFTI_HEADER_BYTES)
        except zlib.error as error:
            raise _Damage("is damaged at the beginning of its gzip stream") from error
    if not member.eof and len(head) < _NIFTI_HEADER_BYTES:
        raise _Damage(_ENDS_EARLY)
    return head


def _look_at_nifti(file: BinaryIO, name: str) -> None:
    if name.endswith(".gz"):
        _nifti_header(_inflate_head(file))
        return
    head = file.read(_NIFTI_HEADER_BYTES)
    if head.startswith(_GZIP_MAGIC):
        raise _Damage("is gzip, but its name does not end in .gz")
    _check_nifti_length(_nifti_header(head), _size(file))


def _nifti_header(head: bytes) -> Any:
    """The header that nibabel makes of the first bytes."""
    try:
        from nibabel import Nifti1Header, Nifti2Header
        from nibabel.spatialimages import HeaderDataError
    except ImportError as error:
        raise missing("neuro", "Looking into NIfTI files needs nibabel.", "nibabel") from error
    kinds: tuple[Any, ...] = (Nifti1Header, Nifti2Header)  # Any: nibabel's functions carry no types
    kind = next((kind for kind in kinds if kind.may_contain_header(head)), None)
    if kind is None:
        raise _Damage(_ENDS_EARLY if len(head) < Nifti1Header.sizeof_hdr else "is not NIfTI")
    try:
        header = kind(head[: kind.sizeof_hdr], check=False)
        header.check_fix(logger=_log, error_level=40)
        header.get_data_dtype()
        shape = header.get_data_shape()
    except (HeaderDataError, ValueError, OverflowError) as error:
        raise _Damage(f"has a broken NIfTI header ({str(error).splitlines()[0]})") from error
    if bytes(header["magic"])[:2] == b"ni":
        raise _Damage("is a NIfTI header without its image, which lies in another file")
    if not shape or min(shape) < 1:
        raise _Damage(f"has impossible dimensions {tuple(map(int, shape))}")
    return header


def _check_nifti_length(header: Any, length: int) -> None:
    values = math.prod(map(int, header.get_data_shape()))
    offset = float(header["vox_offset"])
    if not math.isfinite(offset) or offset < 0:
        raise _Damage("has an impossible place of its data in the NIfTI header")
    promised = int(header.get_data_offset()) + values * header.get_data_dtype().itemsize
    if length < promised:
        raise _Damage(f"holds too little data: {length:,} of the {promised:,} bytes its NIfTI header promises")


def _look_at_pdf(file: BinaryIO, name: str) -> None:
    if b"%PDF-" not in file.read(1024):
        raise _Damage("is not a PDF")


def _look_at_image(file: BinaryIO, name: str) -> None:
    head = file.read(32)
    for magic, look in _IMAGES:
        if re.match(magic, head, re.DOTALL):
            if look is not None:
                try:
                    width, height = look(file, head)
                except (struct.error, IndexError) as error:
                    raise _Damage(_ENDS_EARLY) from error
                if not width or not height:
                    raise _Damage(f"has impossible dimensions {width} × {height}")
            return
    if _IMAGE_NAME.search(name):
        raise _Damage("is not an image")


def _png(file: BinaryIO, head: bytes) -> tuple[int, int]:
    size = _size(file)
    file.seek(8)
    length, kind, data = struct.unpack(">I4s13s", file.read(21))
    (checksum,) = struct.unpack(">I", file.read(4))
    if length != 13 or kind != b"IHDR" or zlib.crc32(kind + data) != checksum:
        raise _Damage("has a broken PNG header")
    while kind != b"IEND":
        length, kind = struct.unpack(">I4s", file.read(8))
        if not kind.isalpha():
            raise _Damage("has a broken PNG chunk")
        if file.seek(length + 4, os.SEEK_CUR) > size:
            raise _Damage(_ENDS_EARLY)
    return struct.unpack(">II", data[:8])


def _jpeg(file: BinaryIO, head: bytes) -> tuple[int, int]:
    file.seek(2)
    while True:
        stray = 0  # bytes between segments, which decoders pass over as well
        while file.read(1)[0] != 0xFF:
            if (stray := stray + 1) > _READ_BYTES:
                raise _Damage("has no JPEG frame header")
        while (marker := file.read(1)[0]) == 0xFF:
            pass
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            _, _, height, width = struct.unpack(">HBHH", file.read(7))
            return width, height
        if marker in (0xD9, 0xDA):
            raise _Damage("has no JPEG frame header")
        if marker and marker != 0x01 and not 0xD0 <= marker <= 0xD8:
            file.seek(struct.unpack(">H", file.read(2))[0] - 2, os.SEEK_CUR)


def _bmp(file: BinaryIO, head: bytes) -> tuple[int, int]:
    old = struct.unpack_from("<I", head, 14) == (12,)
    return struct.unpack_from("<HH" if old else "<ii", head, 18)


def _webp(file: BinaryIO, head: bytes) -> tuple[int, int]:
    if struct.unpack_from("<I", head, 4)[0] + 8 > _size(file):
        raise _Damage(_ENDS_EARLY)
    if head[12:16] != b"VP8 ":
        return 1, 1  # the other kinds store a dimension less one: it cannot be zero
    width, height = struct.unpack_from("<HH", head, 26)
    return width & 0x3FFF, height & 0x3FFF


def _tiff(file: BinaryIO, head: bytes) -> tuple[int, int]:
    order = "<" if head[:2] == b"II" else ">"
    big = struct.unpack_from(order + "H", head, 2) == (43,)
    (start,) = struct.unpack_from(order + ("Q" if big else "I"), head, 8 if big else 4)
    entry = struct.Struct(order + ("HHQ8s" if big else "HHI4s"))
    file.seek(min(start, _size(file)))
    (count,) = struct.unpack(order + ("Q" if big else "H"), file.read(8 if big else 2))
    found = {256: 0, 257: 0}
    for _ in range(min(count, 1 << 16)):
        tag, kind, _, value = entry.unpack(file.read(entry.size))
        if tag in found and kind in (3, 4, 16):
            (found[tag],) = struct.unpack_from(order + {3: "H", 4: "I", 16: "Q"}[kind], value)
    return found[256], found[257]


_IMAGES: tuple[tuple[bytes, Callable[[BinaryIO, bytes], tuple[int, int]] | None], ...] = (
    (rb"\x89PNG\r\n\x1a\n", _png),
    (rb"\xff\xd8\xff", _jpeg),
    (rb"GIF8[79]a", lambda file, head: struct.unpack_from("<HH", head, 6)),
    (rb"RIFF....WEBP", _webp),
    (rb"II[*+]\0|MM\0[*+]", _tiff),
    (rb"BM", _bmp),
    (rb"....ftyp|\0\0\0\x0cjP  |\xff\x4f\xff\x51|\0\0\x01\0|P[1-7]\s|DDS |icns|qoif", None),  # known, not looked into
)

_LOOKS: dict[Look, Callable[[BinaryIO, str], object]] = {
    "NIfTI": _look_at_nifti,
    "image": _look_at_image,
    "PDF": _look_at_pdf,
    "gzip": lambda file, name: _inflate_head(file),
}

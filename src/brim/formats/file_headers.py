"""Check one file: does its header match its name, and is its gzip stream complete?

Each check returns None for a good file, or a few words about the problem. Only headers are read, so a check costs the
same for a file of any size. Pixels and voxels are not checked. Images are recognized by their content, as decoders do
it: a JPEG named `.png` is fine.
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

from brim.errors import SourceChangedError
from brim.extras import missing
from brim.state.atomic_files import open_regular, reason

OpenFile = Callable[[], AbstractContextManager[Any]]  # opens a file, as a context manager
HeaderKind = Literal["NIfTI", "image", "PDF", "gzip"]

# The names of files that can be checked, as a pattern that Arrow understands too.
PROBED_NAMES = r"(?i)\.(nii|gz|png|jpe?g|jpe|jfif|gif|webp|tiff?|bmp|pdf)$"
_IMAGE_NAME = re.compile(r"(?i)\.(png|jpe?g|jpe|jfif|gif|webp|tiff?|bmp)$")
_GZIP_MAGIC = b"\x1f\x8b"
_READ_BYTES = 256 * 1024
_INFLATED_BYTES = 1024 * 1024
_NIFTI_HEADER_BYTES = 540  # of NIfTI-2, the larger one
_ENDS_EARLY = "ends early"
_NOT_GZIP = "is not gzip"
_ZLIB_PROBLEMS = {
    "incorrect data check": "has a wrong checksum (CRC): its content is damaged",
    "incorrect length check": "has a wrong length at the end of its gzip stream",
}

_log = logging.getLogger(__name__)
_log.propagate = False  # nibabel's warnings are not damage
_log.addHandler(logging.NullHandler())


class _Damage(Exception):
    """A problem of a file, in words; never leaves this module."""


def header_kind(path: str, kind: str) -> HeaderKind | None:
    """Return how to check a file, by the kind of its column and then by its name."""
    name = path.lower()
    if kind == "nifti" or name.endswith((".nii", ".nii.gz")):
        return None if name.endswith((".bz2", ".xz", ".zst")) else "NIfTI"
    if kind == "image" or _IMAGE_NAME.search(name):
        return "image"
    if kind == "pdf" or name.endswith(".pdf"):
        return "PDF"
    return "gzip" if name.endswith(".gz") else None


def probe_header(path: str, kind: str = "file", opened: OpenFile | None = None) -> str | None:
    """Return the problem at the start of a file, or None. `opened` opens it if it is not a local file."""
    checked = header_kind(path, kind)
    return None if checked is None else _problem(path, opened, lambda file: _CHECKS[checked](file, path.lower()))


def probe_gzip(
    path: str,
    advance: Callable[[int], None],
    kind: str = "file",
    opened: OpenFile | None = None,
) -> str | None:
    """Return the problem of a gzip stream, read to its last byte, or None. `advance` gets the bytes read.

    The length of a NIfTI image is compared with its header too.
    """

    def check(file: BinaryIO) -> None:
        length = _inflate_all(file, advance)
        if header_kind(path, kind) == "NIfTI":
            file.seek(0)
            try:
                header = _nifti_header(_inflate_head(file))
            except _Damage:
                return  # `probe_header` reports it
            _check_nifti_length(header, length)

    return _problem(path, opened, check)


def _problem(path: str, opened: OpenFile | None, check: Callable[[BinaryIO], object]) -> str | None:
    """Run a check on a file; return its problem, or None."""
    try:
        with opened() if opened is not None else open(open_regular(path), "rb") as file:
            check(file)
    except _Damage as damage:
        return str(damage)
    except OSError as error:
        return f"cannot be read ({reason(error)})"
    except SourceChangedError:
        return "was replaced or removed after it was listed"
    return None


def shape_of(file: Any, path: str, kind: str) -> tuple[int, ...] | None:
    """Return the dimensions in a file's header: the axes of a NIfTI image, the width and height of a picture.

    None if the header has none, or does not match the name.
    """
    checked, head = header_kind(path, kind), file.read(len(_GZIP_MAGIC))
    file.seek(0)
    try:
        if checked == "NIfTI":
            data = _inflate_head(file) if head == _GZIP_MAGIC else file.read(_NIFTI_HEADER_BYTES)
            for order in "<>":
                (size,) = struct.unpack_from(f"{order}i", data)
                if size in (348, 540):  # the header of NIfTI-1 or NIfTI-2
                    layout, offset = (f"{order}8h", 40) if size == 348 else (f"{order}8q", 16)
                    count, *axes = struct.unpack_from(layout, data, offset)
                    return tuple(axes[:count]) if 1 <= count <= 7 else None
        if checked == "image":
            start = file.read(32)
            measure = next((measure for magic, measure in _IMAGES if re.match(magic, start, re.DOTALL)), None)
            return None if measure is None else measure(file, start)
    except (_Damage, struct.error, IndexError, OSError):
        pass
    return None


def _size(file: BinaryIO) -> int:
    position = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(position)
    return size


def _inflate_all(file: BinaryIO, advance: Callable[[int], None]) -> int:
    """Return the inflated length of all members. zlib compares the checksum and length of each member."""
    remaining, read, length = b"", 0, 0
    member, members, is_inside = zlib.decompressobj(wbits=31), 0, False
    while block := file.read(_READ_BYTES):
        read += len(block)
        advance(len(block))
        remaining += block
        while remaining:
            if not is_inside:
                # Zeros after a member are padding, which every reader skips.
                remaining = remaining.lstrip(b"\0") if members else remaining
                if len(remaining) < len(_GZIP_MAGIC):
                    break
                if not remaining.startswith(_GZIP_MAGIC):
                    raise _not_a_member(members, _size(file) - read + len(remaining))
                is_inside = True
            length += _inflate(member, remaining, read)
            remaining = member.unused_data
            if member.eof:
                member, members, is_inside = zlib.decompressobj(wbits=31), members + 1, False
    if is_inside:
        raise _Damage(f"is cut off: {length:,} bytes inflated, and the gzip stream does not end")
    if remaining or not members:
        raise _not_a_member(members, len(remaining))
    return length


def _not_a_member(members: int, size: int) -> _Damage:
    return _Damage(f"has {size:,} byte(s) behind the end of the gzip stream" if members else _NOT_GZIP)


def _inflate(member: Any, data: bytes, position: int) -> int:
    """Inflate all of `data` in parts of 1 MB; return only the length."""
    length = 0
    try:
        while True:
            size = len(member.decompress(data, _INFLATED_BYTES))
            length, data = length + size, member.unconsumed_tail
            if member.eof or (not data and size < _INFLATED_BYTES):
                return length
    except zlib.error as error:
        problem = str(error).rpartition(": ")[2]
        raise _Damage(_ZLIB_PROBLEMS.get(problem, f"is damaged before byte {position:,}: {problem}")) from error


def _inflate_head(file: BinaryIO) -> bytes:
    """Return the first inflated bytes of a gzip stream, enough for a header."""
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


def _check_nifti(file: BinaryIO, name: str) -> None:
    if name.endswith(".gz"):
        _nifti_header(_inflate_head(file))
        return
    head = file.read(_NIFTI_HEADER_BYTES)
    if head.startswith(_GZIP_MAGIC):
        raise _Damage("is gzip, but its name does not end in .gz")
    _check_nifti_length(_nifti_header(head), _size(file))


def _nifti_header(head: bytes) -> Any:
    """Parse the header with nibabel."""
    try:
        from nibabel import Nifti1Header, Nifti2Header
        from nibabel.spatialimages import HeaderDataError
    except ImportError as error:
        raise missing("neuro", "Looking into NIfTI files needs nibabel.", "nibabel") from error
    kinds: tuple[Any, ...] = (Nifti1Header, Nifti2Header)  # Any: nibabel has no types
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


def _check_pdf(file: BinaryIO, name: str) -> None:
    if b"%PDF-" not in file.read(1024):
        raise _Damage("is not a PDF")


def _check_image(file: BinaryIO, name: str) -> None:
    head = file.read(32)
    for magic, measure in _IMAGES:
        if re.match(magic, head, re.DOTALL):
            if measure is not None:
                try:
                    width, height = measure(file, head)
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
        stray = 0  # bytes between segments, which decoders skip too
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
        return 1, 1  # the other kinds store dimensions minus one, which cannot be zero
    width, height = struct.unpack_from("<HH", head, 26)
    return width & 0x3FFF, height & 0x3FFF


def _tiff(file: BinaryIO, head: bytes) -> tuple[int, int]:
    order = "<" if head[:2] == b"II" else ">"
    big = struct.unpack_from(order + "H", head, 2) == (43,)
    (start,) = struct.unpack_from(order + ("Q" if big else "I"), head, 8 if big else 4)
    entry = struct.Struct(order + ("HHQ8s" if big else "HHI4s"))
    file.seek(min(start, _size(file)))
    (count,) = struct.unpack(order + ("Q" if big else "H"), file.read(8 if big else 2))
    dimensions = {256: 0, 257: 0}  # tags of width and height
    for _ in range(min(count, 1 << 16)):
        tag, kind, _, value = entry.unpack(file.read(entry.size))
        if tag in dimensions and kind in (3, 4, 16):
            (dimensions[tag],) = struct.unpack_from(order + {3: "H", 4: "I", 16: "Q"}[kind], value)
    return dimensions[256], dimensions[257]


_IMAGES: tuple[tuple[bytes, Callable[[BinaryIO, bytes], tuple[int, int]] | None], ...] = (
    (rb"\x89PNG\r\n\x1a\n", _png),
    (rb"\xff\xd8\xff", _jpeg),
    (rb"GIF8[79]a", lambda file, head: struct.unpack_from("<HH", head, 6)),
    (rb"RIFF....WEBP", _webp),
    (rb"II[*+]\0|MM\0[*+]", _tiff),
    (rb"BM", _bmp),
    (rb"....ftyp|\0\0\0\x0cjP  |\xff\x4f\xff\x51|\0\0\x01\0|P[1-7]\s|DDS |icns|qoif", None),  # known, not checked
)

_CHECKS: dict[HeaderKind, Callable[[BinaryIO, str], object]] = {
    "NIfTI": _check_nifti,
    "image": _check_image,
    "PDF": _check_pdf,
    "gzip": lambda file, name: _inflate_head(file),
}

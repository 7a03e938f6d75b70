"""Checks of file headers and gzip streams: undamaged files pass, and each kind of damage has its own message."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from brim.errors import MissingDependencyError
from brim.formats.file_headers import header_kind, probe_gzip, probe_header
from tests.conftest import random_bytes

Write = Callable[[str, bytes], str]


def nifti(shape: tuple[int, ...] = (6, 5, 4), dtype: str = "int16", kind: type = nib.Nifti1Image) -> bytes:
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    return kind(values, np.eye(4)).to_bytes()  # type: ignore[no-any-return, attr-defined]


def picture(form: str, size: tuple[int, int] = (40, 30), **options: object) -> bytes:
    out = io.BytesIO()
    pixels = np.frombuffer(random_bytes(size[0] * size[1] * 3), np.uint8).reshape(size[1], size[0], 3)
    Image.fromarray(pixels).save(out, form, **options)
    return out.getvalue()


def whole(path: str) -> str | None:
    return probe_gzip(path, lambda size: None)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return make


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
def test_good_nifti(write: Write, dtype: str, kind: type) -> None:
    """Files written by nibabel pass, plain and compressed, in three and four dimensions."""
    for shape in [(3, 3, 3), (7, 2, 3, 5)]:
        data = nifti(shape, dtype, kind)
        assert probe_header(write("a.nii", data), "nifti") is None
        path = write("a.nii.gz", gzip.compress(data, mtime=0))
        assert (probe_header(path, "nifti"), whole(path)) == (None, None)


def test_big_endian_nifti(write: Write) -> None:
    """NIfTI files of either byte order pass."""
    image = nib.Nifti1Image(np.ones((4, 4, 4), ">i2"), np.eye(4), nib.Nifti1Header(endianness=">"))
    assert probe_header(write("a.nii", image.to_bytes())) is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.nii.gz", b"this is a text", "is not gzip"),
        ("a.nii.gz", nifti(), "is not gzip"),
        ("a.nii.gz", gzip.compress(b"some text, long enough to be a header " * 40, mtime=0), "is not NIfTI"),
        ("a.nii.gz", gzip.compress(b"short", mtime=0), "ends early"),
        ("a.nii.gz", gzip.compress(nifti(), mtime=0)[:20], "ends early"),
        ("a.nii", gzip.compress(nifti(), mtime=0), "is gzip, but its name does not end in .gz"),
        ("a.nii", nifti()[:100], "ends early"),
        ("a.nii", b"no brain in here, only words " * 40, "is not NIfTI"),
        ("a.nii", nifti()[:-1], "holds too little data: 591 of the 592 bytes"),
        ("a.nii", nifti()[:70] + b"\xff\x7f" + nifti()[72:], "broken NIfTI header"),  # an unknown datatype
        ("a.nii", nifti()[:42] + b"\0\0" + nifti()[44:], "impossible dimensions (0, 5, 4)"),
        ("a.nii", nifti()[:344] + b"ni1\0" + nifti()[348:], "without its image"),
    ],
)
def test_bad_nifti(write: Write, name: str, content: bytes, message: str) -> None:
    """Each kind of damaged header has its own message."""
    assert message in (probe_header(write(name, content), "nifti") or "")


def test_nifti_with_too_little_data(write: Write) -> None:
    """A compressed image that is shorter than its header states is damaged. A longer one is not."""
    path = write("a.nii.gz", gzip.compress(nifti((20, 20, 20))[:-500]))
    assert probe_header(path, "nifti") is None
    assert "holds too little data: 15,852 of the 16,352 bytes" in (whole(path) or "")
    assert whole(write("a.nii.gz", gzip.compress(nifti() + bytes(10)))) is None


def test_without_nibabel(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIfTI files without nibabel: the error states what to install."""
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*nibabel"):
        probe_header(write("a.nii", nifti()), "nifti")


@pytest.mark.parametrize(
    "form", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "ICO", "JPEG2000", "TGA", "PCX", "DDS"]
)
@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"progressive": True, "quality": 10, "big_tiff": True}])
def test_good_images(write: Write, form: str, options: dict[str, object]) -> None:
    """Images written by Pillow pass in a column of images."""
    content = picture(form, **options)
    assert probe_header(write(f"a.{form.lower()}", content), "image") is None


def test_images_go_by_content(write: Write) -> None:
    """Images are identified by content: a JPEG named .png passes, and a text named .png does not."""
    assert probe_header(write("a.png", picture("JPEG"))) is None
    assert probe_header(write("a.png", b"<html>404 not found</html>")) == "is not an image"
    assert probe_header(write("a.svg", b"<svg/>"), "image") is None  # an unknown format is not checked


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.png", picture("PNG")[:10], "ends early"),
        ("a.png", picture("PNG")[:-6], "ends early"),
        ("a.png", picture("PNG")[:-200], "ends early"),
        ("a.png", picture("PNG")[:17] + b"\x09" + picture("PNG")[18:], "broken PNG header"),
        ("a.jpg", picture("JPEG")[:30], "ends early"),
        ("a.jpg", b"\xff\xd8\xff\xd9", "no JPEG frame header"),
        ("a.jpg", b"\xff\xd8\xff\xe0" + bytes(1_000_000), "no JPEG frame header"),
        ("a.gif", b"GIF89a\0\0\x05\0" + bytes(20), "impossible dimensions 0 × 5"),
        ("a.gif", b"GIF89a\x01", "ends early"),
        ("a.webp", picture("WEBP")[:-20], "ends early"),
        ("a.tif", picture("TIFF")[:6], "ends early"),
        ("a.tif", b"II*\0\x08\0\0\0" + bytes(20), "impossible dimensions 0 × 0"),
        ("a.bmp", picture("BMP")[:18] + bytes(4) + picture("BMP")[22:], "impossible dimensions 0 × 30"),
        ("a.pdf", b"<html>", "is not a PDF"),
        ("a.json.gz", b"{}", "is not gzip"),
    ],
)
def test_bad_headers(write: Write, name: str, content: bytes, message: str) -> None:
    """Each kind of damaged header has its own message."""
    assert message in (probe_header(write(name, content)) or "")


def test_what_is_looked_into() -> None:
    """The type of the column determines which header is checked, and otherwise the name of the file."""
    assert (
        header_kind("a.NII.GZ", "file")
        == header_kind("scan", "nifti")
        == header_kind("x.dscalar.nii", "file")
        == "NIfTI"
    )
    assert header_kind("a.nii.bz2", "nifti") is None
    assert header_kind("a.JPG", "file") == header_kind("a", "image") == "image"
    assert header_kind("events.tsv.gz", "file") == "gzip"
    assert header_kind("a.wav", "audio") is None
    assert probe_header("/nowhere/a.wav", "audio") is None


def test_unreadable(tmp_path: Path) -> None:
    """A missing file is reported as a problem instead of raising an error."""
    assert probe_header(str(tmp_path / "a.png")) == "cannot be read (No such file or directory)"
    assert whole(str(tmp_path / "a.gz")) == "cannot be read (No such file or directory)"


def test_good_gzip(write: Write) -> None:
    """Gzip streams with one, several or empty members and zero padding pass, and every byte is reported as progress."""
    first = gzip.compress(random_bytes(700_000), mtime=0)
    for content in [
        first,
        first + gzip.compress(b"", mtime=0) + first,
        gzip.compress(b"", mtime=0),
        first + bytes(600_000),
        first * 2 + b"\0",
    ]:
        observed: list[int] = []
        assert probe_gzip(write("a.gz", content), observed.append) is None
        assert sum(observed) == len(content)


def test_members_across_blocks(write: Write) -> None:
    """Members may start and end anywhere within the blocks that are read, as in the output of bgzip."""
    content = b"".join(gzip.compress(random_bytes(500 + 11 * i, i), mtime=0) for i in range(600))
    assert len(content) > 512 * 1024
    assert whole(write("a.gz", content)) is None
    assert "cut off" in (whole(write("a.gz", content[:-3])) or "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not gzip"),
        (b"\x1f", "is not gzip"),
        (b"hello", "is not gzip"),
        (bytes(100), "is not gzip"),
        (gzip.compress(random_bytes(5000), mtime=0)[:-1], "cut off"),
        (gzip.compress(random_bytes(5000), mtime=0)[:-9], "cut off"),
        (gzip.compress(random_bytes(5000), mtime=0)[:2000], "cut off"),
        (gzip.compress(b"x", mtime=0) + b"g", "has 1 byte(s) behind the end"),
        (gzip.compress(b"x", mtime=0) + b"garbage", "has 7 byte(s) behind the end"),
        (gzip.compress(b"x", mtime=0) + bytes(5) + b"garbage" + bytes(300_000), "has 300,007 byte(s) behind the end"),
        (gzip.compress(b"x", mtime=0) + gzip.compress(b"y", mtime=0)[:-5], "cut off"),
        (gzip.compress(b"abc" * 9, mtime=0)[:-8] + bytes(4) + (27).to_bytes(4, "little"), "wrong checksum (CRC)"),
        (gzip.compress(b"abc", mtime=0)[:-4] + bytes(4), "wrong length"),
    ],
)
def test_bad_gzip(write: Write, content: bytes, message: str) -> None:
    """Each kind of damage to a gzip stream has its own message."""
    assert message in (whole(write("a.gz", content)) or "")


@given(position=st.integers(10, 1_000_000), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, position: int, bit: int) -> None:
    """A flipped bit after the gzip header is detected unless the content stays the same."""
    original = b"brain " * 300 + random_bytes(1000, 3)
    content = bytearray(gzip.compress(original, mtime=0))
    content[10 + position % (len(content) - 10)] ^= 1 << bit
    path = tmp_path_factory.mktemp("flip") / "a.gz"
    path.write_bytes(content)
    assert whole(str(path)) is not None or gzip.decompress(content) == original


@given(cut=st.integers(0, 100_000))
def test_any_cut_is_found(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """A truncated gzip stream is always detected."""
    content = gzip.compress(bytes(100_000) + random_bytes(3000, 4))
    path = tmp_path_factory.mktemp("cut") / "a.gz"
    path.write_bytes(content[: cut % len(content)])
    assert whole(str(path)) is not None


def test_memory_stays_flat(tmp_path: Path) -> None:
    """Checking 300 MB of zeros in 300 kB of gzip reads to the last byte and needs only a few megabytes."""
    packer = zlib.compressobj(9, wbits=31)
    with open(tmp_path / "zeros.gz", "wb") as file:
        for _ in range(300):
            file.write(packer.compress(bytes(1_000_000)))
        file.write(packer.flush())
    code = (
        "import resource, sys; from brim.formats.file_headers import probe_gzip\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); fault = probe_gzip(sys.argv[1], lambda size: None); print(fault, peak() - before)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "zeros.gz"], capture_output=True, text=True, check=True
    )
    fault, grown_kib = result.stdout.split()
    assert fault == "None"
    assert int(grown_kib) < 10_000

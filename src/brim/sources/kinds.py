"""What a file is, judged by its name: the kinds of files that `datasets` can decode, and plain files."""

from __future__ import annotations

from brim.errors import InputError

_EXTENSIONS = {
    "nifti": ".nii .nii.gz",
    "image": ".png .jpg .jpeg .jpe .jfif .jp2 .gif .bmp .dib .webp .tif .tiff .avif .heic .ico .ppm .pgm "
    ".pbm .pnm .tga .pcx .dds .icns .jpx .j2k",
    "audio": ".wav .mp3 .flac .ogg .oga .opus .m4a .aac .aif .aiff .aifc .au .caf .w64 .rf64 .snd .mp2",
    "video": ".mp4 .m4v .mov .mkv .webm .avi .mpg .mpeg .wmv .flv .ogv .3gp .ts .m2ts",
    "pdf": ".pdf",
    "mesh": ".glb .gltf .ply .stl",
}
_KIND_OF = {extension: kind for kind, names in _EXTENSIONS.items() for extension in names.split()}

KINDS = (*_EXTENSIONS, "file")

# Files that usually go along with the data and are not the data.
_COMPANIONS = frozenset(
    ".md .txt .rst .json .jsonl .csv .tsv .yaml .yml .toml .xml .html .htm .log .bval .bvec .cff .bib".split()  # noqa: SIM905
)
_COMPANION_NAMES = frozenset(["license", "licence", "readme", "changes", "changelog", "authors", "copying"])

# `datasets` 5.2 counts these as their path strings when it decides how many shards to write.
SIZED_BY_PATH = frozenset(["nifti", "pdf", "mesh"])


def kind_of(path: str) -> str:
    """The kind of a file by its extension; "file" where nothing decodes it."""
    return _KIND_OF.get(extension_of(path), "file")


def extension_of(path: str) -> str:
    """The lower-case extension, with a dot; two parts for compressed files (".nii.gz")."""
    name = path.rsplit("/", 1)[-1].lower()
    stem, dot, last = name.rpartition(".")
    if not dot or not stem:
        return ""
    if last in ("gz", "bz2", "xz", "zst") and "." in stem.lstrip("."):
        return "." + stem.rpartition(".")[2] + "." + last
    return "." + last


def is_companion(path: str) -> bool:
    extension = extension_of(path)
    name = path.rsplit("/", 1)[-1].lower()
    return extension in _COMPANIONS or (not extension and name in _COMPANION_NAMES)


def feature_of(kind: str) -> dict[str, object]:
    """The `datasets` feature of a file column, as its JSON has it."""
    if kind == "file":
        return {
            "bytes": {"dtype": "binary", "_type": "Value"},
            "path": {"dtype": "string", "_type": "Value"},
        }
    return {"_type": kind.capitalize()}


def parse_kind(text: str) -> str:
    kind = text.strip().lower()
    if kind not in KINDS:
        raise InputError(f"{text!r} is not a type of file.", hint=f"Use one of: {', '.join(KINDS)}.")
    return kind

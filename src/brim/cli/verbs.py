"""The verbs, what each does in a line, and the help that lists them: shown without loading a parser or any verb."""

from __future__ import annotations

from collections.abc import Iterator

ABOUT = """Datasets bigger than memory, built under a memory limit that you set.

brim packages files into shards without holding them: a shard is a recipe of what lies where. So a 300 GB
dataset takes as much memory as a small one, a killed run continues where it was, and what was written is
proved. `brim help VERB` has examples, `brim doctor` says what is here and what is missing.
"""

# In the order of the help. Each is the module of its name, which is imported when it is wanted, and begins its own
# help with these words.
VERBS = {
    "plan": "Show what would be built, how big it is, and whether it fits.",
    "check": "Look at every file before a long run, or at a dataset that is published.",
    "info": "What a dataset is: rows, splits, columns, bytes, shards, whole or not.",
    "build": "Package files into shards at DEST: a folder, hf://datasets/ORG/NAME, or s3://BUCKET/PREFIX.",
    "select": "Filter, sort, shuffle, split, join or re-shard what is a dataset already, without holding it.",
    "verify": "Prove that what is at DEST is whole.",
    "unpack": "Write the original files back, byte for byte, under their relative paths.",
    "map": "Apply a function to every row (or batch) of SOURCE, and write the results to DEST.",
    "tokenize": "Turn a column of text into token ids, on all cores, within a memory limit.",
    "embed": "Put rows through an embedding model and write their vectors, without ever holding them.",
    "clean": "List what `brim.map`, `brim.tokenize` and `brim.embed` have cached; with --remove, remove it.",
    "recipes": "The built-in recipes, and what they expect.",
    "run": "Run any command under watch.",
    "watch": "Watch something that runs already.",
    "why": "Why did it die? Find out-of-memory kills and explain them.",
    "forecast": "Will it fit, with the arithmetic.",
    "lab": "See for yourself how common patterns use memory, beside brim's.",
    "report": "The page about a run, made from its log.",
    "doctor": "Say what is here and what is missing: versions, optional libraries, the Hub's token, the memory limit.",
}
HELP_VERB = "Show how a verb is used: `brim help build` is `brim build --help`."
_OPTIONS = {
    "--version, -V": "Show the version.",
    "--debug": "Show tracebacks (anywhere on the line).",
    "--install-completion": "Install completion for the current shell.",
    "--show-completion": "Show completion for the current shell, to copy it or customize the installation.",
    "-h, --help": "Show this message and exit.",
}
_WIDEST = 100


def version_line() -> str:
    from brim import __version__

    return f"brim {__version__}"


def help_lines(width: int) -> Iterator[str]:
    width = max(min(width, _WIDEST), 40)
    yield "Usage: brim [OPTIONS] COMMAND [ARGS]..."
    for paragraph in ABOUT.strip().split("\n\n"):
        yield ""
        yield from _wrapped(paragraph, "  ", width)
    for title, entries in (("Options", _OPTIONS), ("Commands", VERBS | {"help": HELP_VERB})):
        yield ""
        yield f"{title}:"
        indent = 4 + max(map(len, entries))
        for name, text in entries.items():
            first, *others = _wrapped(text, " " * indent, width)
            yield f"  {name}".ljust(indent) + first[indent:]
            yield from others


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    lines = [indent]
    for word in text.split():
        if len(lines[-1]) > len(indent) and len(lines[-1]) + 1 + len(word) > width:
            lines.append(indent)
        lines[-1] += word if len(lines[-1]) == len(indent) else f" {word}"
    return lines

"""The list of commands and the page that `brim` and `brim --help` print, without loading the parser or a command."""

from brim import __version__

GROUPS = {
    "Build": {
        "plan": "Show what would be built, how large it is and whether it fits.",
        "build": "Package files into shards in a folder, on the Hub or in a bucket.",
        "select": "Filter, sort, shuffle, split or concatenate published datasets.",
    },
    "Transform": {
        "map": "Apply a function to every row and write the results to DEST.",
        "tokenize": "Turn a column of text into token ids.",
        "embed": "Compute embeddings of texts and images with a model.",
    },
    "Check": {
        "check": "Check every file before a long run, or a published dataset.",
        "info": "Show rows, splits, columns, size and shards of a dataset.",
        "verify": "Compare a dataset with its checksums, or with its source.",
        "unpack": "Write the original files of a dataset back to a folder.",
    },
    "Monitor": {
        "run": "Run any command under a memory limit and record its memory.",
        "watch": "Watch a process that is already running.",
        "why": "Explain why a process was killed.",
        "forecast": "Estimate whether a job fits into memory.",
        "report": "Write the HTML page about a run from its log.",
        "lab": "Measure how common patterns use memory.",
    },
    "Setup": {
        "recipes": "List the built-in recipes.",
        "clean": "List or remove cached results of brim.map, tokenize and embed.",
        "doctor": "Show versions, optional libraries, credentials and limits.",
        "help": "Show the help of a command.",
    },
}
COMMANDS = {name: summary for commands in GROUPS.values() for name, summary in commands.items()}

# Names that people try, and the command that does it.
SYNONYMS = {
    "concat": "brim select SOURCE DEST --concat SOURCE",
    "convert": "brim map SOURCE DEST",
    "dedup": "brim select SOURCE DEST --distinct COLUMN",
    "download": "brim unpack hf://datasets/ORG/NAME FOLDER",
    "extract": "brim unpack DATASET FOLDER",
    "filter": "brim select SOURCE DEST --where 'age > 40'",
    "merge": "brim select SOURCE DEST --concat SOURCE",
    "pack": "brim build SOURCE DEST",
    "publish": "brim build SOURCE hf://datasets/ORG/NAME",
    "push": "brim build SOURCE hf://datasets/ORG/NAME",
    "shard": "brim build SOURCE DEST --shard-size 500MB",
    "shuffle": "brim select SOURCE DEST --shuffle 0",
    "sort": "brim select SOURCE DEST --sort-by COLUMN",
    "split": "brim select SOURCE DEST --split-into train=0.9,test=0.1",
    "upload": "brim build SOURCE hf://datasets/ORG/NAME",
}

_PAGE = """\
Usage: brim COMMAND [ARGUMENTS] [OPTIONS]

Build, transform and publish datasets larger than memory, under a memory limit.

Examples:
  brim build photos/ out/ --memory 1GB
  brim tokenize corpus.jsonl tokens/ --tokenizer gpt2 --memory 2GB
  brim run --memory 40GB -- python train.py
"""
_OPTIONS = {
    "-h, --help": "Show this page, or the help of a command.",
    "-V, --version": "Show the version.",
    "--debug": "Show tracebacks (anywhere on the command line).",
    "--show-completion": "Print the completion script of this shell.",
    "--install-completion": "Add completion to the start-up file of this shell.",
}
_DOCS = "https://brim.example/docs"


def static_page(arguments: list[str]) -> str | None:
    """Return the list of commands or the version, if the arguments ask for one of them."""
    if not arguments or arguments[0] in ("--help", "-h", "--help-all"):
        sections = [_PAGE]
        for title, rows in {**GROUPS, "Options": _OPTIONS}.items():
            width = max(len(name) for name in (rows if title == "Options" else COMMANDS))
            sections += [f"{title}:", *(f"  {name:<{width}}  {text}" for name, text in rows.items()), ""]
        return "\n".join([*sections, f"brim COMMAND --help shows examples and options. Docs: {_DOCS}"])
    if arguments[0] in ("--version", "-V"):
        return f"brim {__version__}"
    return None

"""datatrove's tokenizer step, two tasks at a time: `SOURCE TOKENIZER FOLDER`. Part of tokens_fast.py.

The source is cut into two files first, because a task reads whole files; that is in its time, and is a copy of 40 MB.
"""

from __future__ import annotations

import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer


def main() -> None:
    source, tokenizer, folder = sys.argv[1:4]
    data = Path(source).read_bytes()
    middle = data.index(b"\n", len(data) // 2) + 1
    halves = Path(folder, "halves")
    halves.mkdir(parents=True)
    for number, half in enumerate((data[:middle], data[middle:])):
        (halves / f"{number}.jsonl").write_bytes(half)
    del data
    LocalPipelineExecutor(
        [
            JsonlReader(str(halves)),
            DocumentTokenizer(
                f"{folder}/tokens", tokenizer_name_or_path=tokenizer, eos_token=None, shuffle_documents=False
            ),
        ],
        tasks=2,
        workers=2,
        logging_dir=f"{folder}/logs",
    ).run()
    if not list(Path(folder, "tokens").glob("*.ds")):
        raise SystemExit("datatrove wrote no tokens")


if __name__ == "__main__":
    main()

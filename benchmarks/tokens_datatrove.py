"""Run datatrove's tokenizer step with two tasks: `SOURCE TOKENIZER FOLDER`. Part of tokens_fast.py.

A task reads whole files, so the source is first cut into two files. This copy of 40 MB is included in the time.
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

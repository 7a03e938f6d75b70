"""Worker of package.py: package a folder of NIfTI files with `datasets`, shard by shard.

`embed` does to every shard what `Dataset.push_to_hub` of datasets 5.2 does before it uploads it. `loop` is
the loop that many scripts use: through pandas, embed, write. Neither hashes nor syncs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow.parquet as pq
from datasets import Dataset, Nifti, disable_progress_bars
from datasets.table import embed_table_storage

BATCH_ROWS = 1000  # the default of `map`; every shard of this benchmark has one row


def embed_like_push_to_hub(shard: Dataset, target: Path) -> None:
    embedded = shard.with_format("arrow").map(
        embed_table_storage, batched=True, batch_size=BATCH_ROWS, keep_in_memory=True
    )
    embedded.with_format(None).to_parquet(target, batch_size=BATCH_ROWS)


def copied_loop(shard: Dataset, target: Path) -> None:
    repeated = Dataset.from_pandas(shard.to_pandas(), features=shard.features, preserve_index=False)
    pq.write_table(embed_table_storage(repeated.data.table), target)


WAYS = {"embed": embed_like_push_to_hub, "loop": copied_loop}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--num-shards", type=int, required=True)
    arguments = parser.parse_args()
    disable_progress_bars()
    arguments.output.mkdir(parents=True)
    paths = sorted(str(path) for path in arguments.source.iterdir())
    dataset = Dataset.from_dict({"nifti": paths}).cast_column("nifti", Nifti())
    for index in range(arguments.num_shards):
        shard = dataset.shard(arguments.num_shards, index, contiguous=True)
        WAYS[arguments.way](shard, arguments.output / f"train-{index:05d}-of-{arguments.num_shards:05d}.parquet")


if __name__ == "__main__":
    main()

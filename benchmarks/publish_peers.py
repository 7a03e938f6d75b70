"""Worker of publish.py: publish a folder of NIfTI files to the Hub without brim.

`push_to_hub` is `Dataset.push_to_hub`. `loop` is the loop that many scripts use when that takes
too much memory: through pandas, embed, write to a buffer, `upload_file`, one commit per shard.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import pyarrow.parquet as pq
from datasets import Dataset, Nifti, disable_progress_bars
from datasets.table import embed_table_storage
from huggingface_hub import HfApi


def push_to_hub(dataset: Dataset, repo: str, shards: int) -> None:
    dataset.push_to_hub(repo, num_shards=shards)


def loop(dataset: Dataset, repo: str, shards: int) -> None:
    api = HfApi()
    api.create_repo(repo, repo_type="dataset", exist_ok=True)
    for index in range(shards):
        shard = dataset.shard(shards, index, contiguous=True)
        repeated = Dataset.from_pandas(shard.to_pandas(), features=shard.features, preserve_index=False)
        buffer = io.BytesIO()
        pq.write_table(embed_table_storage(repeated.data.table), buffer)
        name = f"data/train-{index:05d}-of-{shards:05d}.parquet"
        api.upload_file(path_or_fileobj=buffer.getvalue(), path_in_repo=name, repo_id=repo, repo_type="dataset")


WAYS = {"push_to_hub": push_to_hub, "loop": loop}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("source", type=Path)
    parser.add_argument("repo")
    parser.add_argument("--num-shards", type=int, required=True)
    arguments = parser.parse_args()
    disable_progress_bars()
    paths = sorted(str(path) for path in arguments.source.iterdir())
    dataset = Dataset.from_dict({"nifti": paths}).cast_column("nifti", Nifti())
    WAYS[arguments.way](dataset, arguments.repo, arguments.num_shards)


if __name__ == "__main__":
    main()

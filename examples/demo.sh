#!/bin/sh
# The whole of `make demo`: plan, build, verify and read the sample data. $1 is where brim is installed.
set -eu
bin=$1
options="--files t1w:nifti --files sagittal:image --files coronal:image --rows-per-shard 2"

echo "== brim plan: what would be built"
"$bin/brim" plan examples/sample/scans.csv $options
echo
echo "== brim build: package the files of examples/sample/scans.csv into demo/dataset"
"$bin/brim" build examples/sample/scans.csv ./demo/dataset $options
echo
echo "== brim verify: compare every byte with the source"
"$bin/brim" verify ./demo/dataset examples/sample/scans.csv
echo
echo "== read it back with pyarrow"
"$bin/python" - <<'PYTHON'
import pyarrow.parquet as pq

table = pq.read_table("demo/dataset/data")
for row in table.to_pylist():
    print(row["subject"], row["age"], row["t1w"]["path"], len(row["t1w"]["bytes"]), "bytes")
PYTHON
echo
echo "Made: demo/dataset, 4 rows in 2 Parquet shards with a card. Load it with"
echo
echo "    from datasets import load_dataset              # pip install datasets nibabel pillow"
echo "    dataset = load_dataset(\"demo/dataset\", split=\"train\")"
echo "    dataset[0][\"t1w\"].get_fdata().shape            # a decoded NIfTI volume"
echo
echo "or the files back with: $bin/brim unpack ./demo/dataset demo/files"

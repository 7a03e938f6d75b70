"""Checked by mypy, never run: what the public interface promises about types."""

import numpy as np
import pyarrow as pa

import brim
from brim.jobs.build_job import Build
from brim.jobs.dataset_info import DatasetInfo
from brim.jobs.job import Built
from brim.sources.file_table import FileTable

files: FileTable = brim.files("folder", include=["*.png"], label_from="parent", limit=10)
table: FileTable = brim.table(pa.table({"image": ["a.png"]}), files={"image": "image"}, root="folder")
plan: Build = brim.plan(table, "out", shard_size="1GB", memory="2GB", update=True)
text: str = str(plan)
built: Built = plan.run()
again: Built = brim.build("folder", "out", workers=2)
bids: FileTable = brim.bids("ds004884", recipe="arc", subjects="M2001", sidecars="none")
far: FileTable = brim.files("s3://bucket/photos", endpoint_url="https://s3.example.org", anonymous=True)
ok: bool = brim.check(bids, everything=True).ok
rows: int = brim.verify("out", files).rows
count: int = brim.unpack("out", "back").files
need: int = brim.forecast("concat", rows=1000, dims=[768, 1024], memory="64GB").high_bytes
with brim.TensorWriter("emb.safetensors", rows=10, text=(768, "float32"), resume=True) as writer:
    writer.append(text=np.zeros((10, 768), np.float32))
    written: int = writer.rows_done
brim.save_file({"text": [np.zeros((10, 768), np.float32)]}, "emb.safetensors", metadata={"by": "me"})
vectors: object = brim.open_tensors("emb.safetensors", "torch")["text"]
code: int = brim.BrimError("message").exit_code
found: DatasetInfo = brim.info("out", head=2)

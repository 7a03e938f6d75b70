"""The types that the public interface promises, checked by mypy and never run."""

import numpy as np
import pyarrow as pa

import brim
from brim import BuildPlan, BuildResult, DatasetInfo, FileTable

files: FileTable = brim.files("folder", include=["*.png"], label_from="parent", limit=10)
table: FileTable = brim.table(pa.table({"image": ["a.png"]}), files={"image": "image"}, root="folder")
plan: BuildPlan = brim.plan(table, "out", shard_size="1GB", memory="2GB", update=True)
text: str = str(plan)
built: BuildResult = plan.run()
again: BuildResult = brim.build("folder", "out", workers=2)
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
read: BuildPlan = brim.plan("folder", "out", files="image", label_from="parent", recipe="arc", engine="ray")
saved: brim.SavedBuild = brim.open_plan("a.plan", root="folder", workers=2)
part: brim.PartResult = saved.part("3/100")
published: BuildResult = saved.finish()
missing: list[int] = saved.status.missing_parts
chosen: BuildResult = brim.select("out", "some", where="age > 40", columns="age", shard_size="1GB")
tokens: brim.MapResult = brim.tokenize("a.jsonl", "gpt2", destination="tokens", pack=2048, stop=brim.Stop())
file: brim.MapResult = brim.embed("a.jsonl", "model", destination="v.npy", column="text", name={"text": "v"})
vectors_of: brim.Vectors = brim.embed("a.jsonl", "model", column="text", normalize=True)
again_mapped: brim.MapResult = brim.map("a.jsonl", None, destination="out", state_dir="s", upload_with="lfs")
mapped: brim.MapResult = brim.map("a.jsonl", "module:function", destination="out", rows_per_shard=10)
filtered = brim.filter("a.jsonl", len, batched=True, progress=False).cleanup_cache_files()
documents: int = tokens.counts["documents"]
kept: list[brim.CacheEntry] = brim.clean(remove=True, older_than=30)
titles: list[str] = [recipe.title for recipe in brim.recipes()]
reasons: brim.WhyReport = brim.why()
try:
    brim.build("folder", "out", unknown=1)  # type: ignore[call-arg]
    brim.build("folder", "out", upload_with="ftp")  # type: ignore[arg-type]
    brim.tokenize("a.jsonl", "gpt2", destination="out", packed=1)  # type: ignore[call-overload]
    brim.map("a.jsonl", len, False, False, 3)  # type: ignore[call-overload]
except brim.PlanMismatchError as changed:
    hint: str = changed.hint

"""A user's program, checked by mypy --strict --disallow-any-expr and by pyright in strict mode, and never run.

It calls every public function and uses the results; none of them has the type Any.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import brim


def package(folder: str) -> int:
    plan = brim.plan(folder, "out", memory="2GB", shard_size="500MB")
    plan.save("a.plan")
    built = brim.build(folder, "out", memory="2GB")
    verified = brim.verify("out", folder)
    unpacked = brim.unpack("out", "files")
    report = brim.check(folder)
    about = brim.info("out")
    names = [column.name for column in about.columns] + [split.split for split in about.splits]
    return built.rows + verified.shards + unpacked.files + len(str(plan)) + len(str(report)) + about.rows + len(names)


def in_parts() -> list[int]:
    saved = brim.open_plan("a.plan", workers=2)
    done = saved.part("1/3")
    return [done.shards, saved.finish().rows, *saved.status.missing_parts]


def computed_in_parts() -> int:
    brim.save_job("a.job", "tokenize", "texts.jsonl", "gpt2", "tokens")
    job = brim.open_job("a.job")
    job.part("1/3")
    return job.finish().rows


def sources() -> int:
    files = brim.files("photos", include=["*.jpg"], label_from="parent")
    scans = brim.bids("ds004884", recipe="arc")
    listed = brim.table("photos.csv", files=["image"])
    titles = [recipe.title for recipe in brim.recipes()]
    return len(files) + len(scans) + len(listed) + len(titles)


def choose() -> brim.Selection:
    brim.select("out", "part", where="age > 40")
    return brim.dataset("out").where("age > 40").shuffle(1)


def compute() -> int:
    mapped = brim.map("rows.jsonl", "steps:clean", destination="clean")
    tokens = brim.tokenize("rows.jsonl", "gpt2", destination="tokens", pack=2048)
    vectors = brim.embed("rows.jsonl", "model", destination="v.npy", column="text")
    cached = brim.embed("rows.jsonl", "model", column="text")
    return mapped.rows + tokens.counts["documents"] + vectors.bad_rows + len(cached)


def tensors(batch: npt.NDArray[np.float32]) -> int:
    with brim.TensorWriter("emb.safetensors", rows=10, text=(768, "float32")) as writer:
        writer.append(text=batch)
        done = writer.rows_done
    named: dict[str, npt.NDArray[np.float32]] = {"text": batch}
    brim.save_file(named, "emb.safetensors")
    return done + len(brim.open_tensors("emb.safetensors"))


class Rows:
    """Stand-in for datasets.Dataset, which has no types: functions return the type that they receive."""


def reordered(rows: Rows) -> Rows:
    rows = brim.shuffle(rows, seed=1)
    rows = brim.sort(rows, "age")
    return brim.flatten_indices(brim.concatenate_datasets([rows, rows]))


def watched() -> None:
    with brim.watch(memory="2GB") as meter:
        meter.mark("after loading")
    brim.release()


def tidy() -> int:
    return sum(cached.bytes for cached in [*brim.caches(), *brim.clean(remove=True, older_than=30)])


def explain() -> str:
    why = brim.why()
    dims: list[int] = [768]
    forecast = brim.forecast("concat", rows=1000, dims=dims)
    return f"{why}{forecast}"


def stopped() -> str:
    stop = brim.Stop()
    stop.request()
    try:
        brim.build("photos", "out", stop=stop)
    except brim.StoppedError as error:
        return error.hint
    return ""

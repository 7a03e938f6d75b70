"""A user's program, checked by mypy --strict --disallow-any-expr and never run: no Any comes out of brim."""

from __future__ import annotations

import brim


def package(folder: str) -> int:
    plan = brim.plan(folder, "out", memory="2GB", shard_size="500MB")
    built = brim.build(folder, "out", memory="2GB")
    verified = brim.verify("out", folder)
    unpacked = brim.unpack("out", "files")
    report = brim.check(folder)
    about = brim.info("out")
    return built.rows + verified.shards + unpacked.files + len(str(plan)) + len(str(report)) + about.rows


def choose() -> brim.Selection:
    return brim.dataset("out").where("age > 40").shuffle(1)


def explain() -> str:
    why = brim.why()
    dims: list[int] = [768]
    forecast = brim.forecast("concat", rows=1000, dims=dims)
    return f"{why}{forecast}"

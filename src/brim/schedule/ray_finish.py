"""The end of a computed job in a Ray worker: units are joined, packed and cut on a node, not by the driver.

Where nodes share no disk, units come from a bucket to a folder of the node, and what is made of them goes back there.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from brim.buckets.bucket_address import BucketAddress
from brim.errors import BrimError
from brim.outputs.output import Finished, MadeShard, Output, Units
from brim.records import dataclass
from brim.schedule.ray_gauges import Telling, private_folder
from brim.stores.unit_objects import fetch_unit, send_file

_MADE = "made"


@dataclass(frozen=True, slots=True)
class Ending:
    """All units of a job, as the driver names them; `at` is the bucket that their files are in, if they are in one."""

    output: Output
    units: Units
    shards: str
    at: BucketAddress | None = None


def finish_there(run: str, name: str, ending: Ending) -> Finished | BrimError:
    """The task. An error of brim's is an answer: it arrives as what it is."""
    telling = Telling(run, name)
    try:
        if ending.at is None:
            return ending.output.finish(ending.units, ending.shards, telling.sent)
        return _by_way_of(ending.at, ending, run, telling)
    except BrimError as error:
        return error


def _by_way_of(at: BucketAddress, ending: Ending, run: str, telling: Telling) -> Finished:
    scratch = private_folder(run)
    try:
        here = replace(ending.units, folder=scratch, work=scratch / _MADE)
        here.work.mkdir()
        for receipt in here.receipts:
            fetch_unit(at, receipt.name, scratch)
            telling.sent(0)
        finished = ending.output.finish(here, ending.shards, telling.sent)
        made = {
            name: _sent(at, one, number, ending.units.folder)
            for number, (name, one) in enumerate(finished.made.items())
        }
        return replace(finished, made=made)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sent(at: BucketAddress, one: MadeShard, number: int, folder: Path) -> MadeShard:
    """A file that was made, in the bucket; under the name that it will have in the driver's folder."""
    name = f"{_MADE}/{number:08d}{one.path.suffix}"
    send_file(at, one.path, name)
    return replace(one, path=folder / name)

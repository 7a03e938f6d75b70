"""Two hundred damaged Parquet files: an error, or what pyarrow reads; no hang, and no memory beyond their bytes."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from tests.integration.test_parquet_source import sample_table

ROOT = Path(__file__).parents[2]
FILES, SEED = 200, 1
SPARE_BYTES = 64 << 20
_LOOK = """
import random, re, sys
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq
from brim.errors import BrimError
from brim.sources.open_dataset import open_dataset
from tests.integration.test_parquet_source import rows_of

pa.set_memory_pool(pa.system_memory_pool())

def resident():
    status = Path("/proc/self/status").read_text()
    return [int(re.search(rf"{name}:\\s+(\\d+)", status)[1]) * 1024 for name in ("VmRSS", "VmHWM")]

folder, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rng, kinds, read = random.Random(seed), sorted(folder.glob("*.parquet")), 0
rows_of(open_dataset(kinds[0]).table())  # what is loaded once
for number in range(count):
    whole = rng.choice(kinds).read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    broken = bytearray(whole)
    for _ in range(rng.randrange(1, 5)):
        low = len(whole) - footer if number % 2 else 0
        broken[rng.randrange(low, len(whole))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    if number % 20 == 7:
        del broken[rng.randrange(len(broken)) :]
    damaged = folder / "damaged"
    damaged.write_bytes(broken)
    damaged = damaged.rename(folder / f"{number}.damaged.parquet")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident()[0]
    some = None if number % 3 else sorted(rng.sample(range(9), rng.randrange(1, 9)))
    try:
        rows = open_dataset(damaged)
        found = rows_of((rows if some is None else rows.take(some)).table())
    except BrimError:
        found = None
    more = resident()[1] - before
    assert more <= len(broken) + int(sys.argv[4]), (number, more)
    if found is not None:
        try:
            expected = pq.read_table(damaged, use_threads=False).to_pylist()
        except (pa.ArrowException, OSError, ValueError):
            expected = found
        if some is not None and expected is not found:
            expected = [expected[row] for row in some]
        assert found == expected, number
        read += 1
    damaged.unlink()
print(read)
"""


def test_damaged_files(tmp_path: Path) -> None:
    """Footers and pages with wrong bytes, files that are cut: whatever their numbers say, little memory is taken."""
    import pyarrow.parquet as pq

    rng = random.Random(SEED)
    for codec in ("none", "snappy", "zstd", "gzip", "lz4"):
        for version in ("1.0", "2.0"):
            options = {"compression": codec, "data_page_version": version, "write_page_index": rng.random() < 0.5}
            pq.write_table(sample_table(SEED, 9), tmp_path / f"{codec}-{version}.parquet", **options)
    command = [sys.executable, "-c", _LOOK, str(tmp_path), str(FILES), str(SEED), str(SPARE_BYTES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 10 < int(done.stdout) < FILES  # some damage is not noticed by pyarrow either, and gives its values

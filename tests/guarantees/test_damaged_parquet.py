"""Two hundred damaged Parquet files: an error or the values that pyarrow reads, no hang and bounded memory."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from brim.formats import thrift
from tests.conftest import write_files
from tests.forked import brim
from tests.sources.test_parquet_source import sample_table

ROOT = Path(__file__).parents[2]
FILES, SEED, DAMAGES = 200, 1, 119
SPARE_BYTES = 64 << 20
_LOOK = """
import random, re, sys
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq
from brim.errors import BrimError
from brim.sources.open_source import open_dataset
from tests.sources.test_parquet_source import rows_of

pa.set_memory_pool(pa.system_memory_pool())

def resident():
    status = Path("/proc/self/status").read_text()
    return [int(re.search(rf"{name}:\\s+(\\d+)", status)[1]) * 1024 for name in ("VmRSS", "VmHWM")]

folder, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rng, kinds, read = random.Random(seed), sorted(folder.glob("*.parquet")), 0
rows_of(open_dataset(kinds[0]).table())  # modules that are loaded once
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
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
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
    """Truncated files and wrong bytes in footers and pages never make brim allocate much memory."""
    import pyarrow.parquet as pq

    rng = random.Random(SEED)
    for codec in ("none", "snappy", "zstd", "gzip", "lz4"):
        for version in ("1.0", "2.0"):
            options = {"compression": codec, "data_page_version": version, "write_page_index": rng.random() < 0.5}
            pq.write_table(sample_table(SEED, 9), tmp_path / f"{codec}-{version}.parquet", **options)
    command = [sys.executable, "-c", _LOOK, str(tmp_path), str(FILES), str(SEED), str(SPARE_BYTES)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert 10 < int(result.stdout) < FILES  # pyarrow does not detect some of the damage either, and returns values


_COMMANDS = """
import random, sys
from pathlib import Path
import brim
from brim.errors import BrimError

folder, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
shard = next((folder / "data").iterdir())
whole, rng, found = shard.read_bytes(), random.Random(seed), 0
footer = int.from_bytes(whole[-8:-4], "little") + 8
for number in range(count):
    broken = bytearray(whole)
    if number:
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(whole) - footer, len(whole))
            broken[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    else:
        broken[-footer:-8] = bytes(footer - 8)
    shard.write_bytes(bytes(broken))
    assert isinstance(brim.info(folder, head=2).rows, int)
    assert isinstance(brim.check(folder, progress=False).ok, bool)
    try:
        brim.verify(folder, progress=False)
    except BrimError:
        found += 1
print(found)
"""


@pytest.mark.long
@pytest.mark.parametrize("writer", ["brim", "pyarrow"])
def test_info_check_and_verify_report_damaged_footers(writer: str, tmp_path: Path) -> None:
    """Without a ledger, 119 random damages raise only errors of brim, and pyarrow does not crash the process."""
    import pyarrow.parquet as pq

    out = tmp_path / "out"
    if writer == "brim":
        source = write_files(tmp_path / "source", {f"{n}.bin": bytes([n]) * 100 for n in range(9)})
        brim("build", source, out)
        shutil.rmtree(out / ".brim")
    else:
        (out / "data").mkdir(parents=True)
        pq.write_table(sample_table(SEED, 9), out / "data" / "train-00000-of-00001.parquet", write_page_index=True)
        (out / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: data/*.parquet\n---\n")
    command = [sys.executable, "-c", _COMMANDS, str(out), str(DAMAGES), str(SEED)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout) > DAMAGES // 2


@pytest.mark.parametrize("command", ["info", "check", "verify"])
@pytest.mark.parametrize("harm", ["zeros", "offset", "no end", "a byte outside UTF-8"])
def test_commands_name_the_file_whose_footer_is_damaged(harm: str, command: str, tmp_path: Path) -> None:
    source, out = write_files(tmp_path / "source", {"a.bin": b"a" * 500}), tmp_path / "out"
    brim("build", source, out)
    shutil.rmtree(out / ".brim")
    (shard,) = (out / "data").iterdir()
    data = bytearray(shard.read_bytes())
    length = int.from_bytes(data[-8:-4], "little")
    if harm == "zeros":
        data[-8 - length : -8] = bytes(length)
    elif harm == "no end":
        data[-1] = 0
    else:
        footer = thrift.decode(bytes(data[-8 - length : -8]))[0]
        if harm == "offset":
            meta = footer[4][1].items[0][1][1].items[0][3][1]
            meta[9] = (meta[9][0], 1 << 50)
        else:
            footer[2][1].items[1][4] = (footer[2][1].items[1][4][0], b"\xff\xfe")
        new = thrift.encode(footer)
        data[-8 - length : -8] = new
        data[-8:-4] = len(new).to_bytes(4, "little")
    shard.write_bytes(bytes(data))
    result = brim(command, out, check=0 if command == "info" else 3)
    assert "bug" not in result.stderr
    assert shard.name in result.stdout + result.stderr

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.memory.cgroup import Cgroup
from brim.memory.limit import Limit
from brim.memory.meter import machine_now, meminfo, pressure
from brim.memory.sampler import LONGEST_S, SHORTEST_S, Gpus, Pace
from brim.monitor.watching.launch import StopLevels, WatchConfig, WatchTarget

GB = 10**9


def test_far_from_the_line_a_second() -> None:
    """With 30 GB left and steady memory, the interval is one second after some time."""
    pace = Pace()
    pace.pause_s(0.0, 10 * GB, 40 * GB, 0.0005)
    assert pace.pause_s(20.0, 10 * GB, 40 * GB, 0.0005) == LONGEST_S


def test_the_start_and_what_moves_are_seen() -> None:
    """Sampling is frequent for a new command and for one whose memory changes, however far the threshold is."""
    pace = Pace()
    assert pace.pause_s(0.0, 0, 400 * GB, 0.0005) == SHORTEST_S
    assert pace.pause_s(1.0, 1_000_000, 400 * GB, 0.0005) == 0.1
    assert pace.pause_s(30.0, 1_000_000, 400 * GB, 0.0005) == LONGEST_S
    assert pace.pause_s(31.0, 1 * GB, 400 * GB, 0.0005) <= 0.1


def test_near_the_line_twenty_milliseconds() -> None:
    """With 10 MB left the interval is the minimum."""
    assert Pace().pause_s(0.0, 290_000_000, 300_000_000, 0.0005) == SHORTEST_S


def test_at_rest_sampling_costs_half_a_percent() -> None:
    """After five seconds of steady memory, a sample that takes 1 ms is taken five times per second."""
    pace = Pace()
    pauses = [pace.pause_s(index, 290_000_000, 300_000_000, 0.001) for index in range(10)]
    assert pauses[-1] == pytest.approx(0.2)


@given(st.integers(0, 10**12), st.integers(1, 10**12), st.floats(0, 10), st.floats(0, 100))
def test_pauses_keep_their_bounds(used: int, limit: int, cost_s: float, at: float) -> None:
    """The interval is between 20 ms and one second for all inputs."""
    pace = Pace()
    for step in range(3):
        assert SHORTEST_S <= pace.pause_s(at + step, used * step, limit, cost_s) <= LONGEST_S


def test_watch_config_survives_json() -> None:
    """A watcher receives the configuration that was sent."""
    target = WatchTarget("match", pattern="train.py", command=("a", "b"))
    group = Cgroup(Path("/sys/fs/cgroup/x"), 2, True)
    config = WatchConfig(target, "log", Limit(5, "why"), levels=StopLevels(stop="off"), group=group)
    assert WatchConfig.from_json(config.to_json()) == config


def test_the_machine_on_an_old_kernel(tmp_path: Path) -> None:
    """If /proc has no pressure, swap or shared memory, the other values are still read."""
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 400 kB\nHugePages_Total: 0\n")
    machine = machine_now(tmp_path)
    assert (machine.used_bytes, machine.psi_some_avg10, machine.swap_bytes) == (600 * 1024, None, None)
    assert meminfo(tmp_path / "nothing") == {}


def test_pressure(tmp_path: Path) -> None:
    """Pressure is the fraction of the last ten seconds in which a task waited."""
    (tmp_path / "memory").write_text("some avg10=12.50 avg60=1.00 avg300=0.00 total=5\nfull avg10=0.00 …\n")
    assert pressure(tmp_path / "memory") == 12.5


NVML = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)(long)(i + 1); return 0; }
int nvmlDeviceGetMemoryInfo(void *d, unsigned long long *m) { m[0] = 80; m[1] = 50; m[2] = 30 * (long)d; return 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler to stand in for NVIDIA's library")
def test_gpu_memory_through_a_library_of_the_same_shape(tmp_path: Path) -> None:
    """Used and total memory of each device are read through a fake library; the real one was not tested on a GPU."""
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    actual = Gpus(str(library)).read()
    assert [(gpu.index, gpu.used_bytes, gpu.total_bytes) for gpu in actual] == [(0, 30, 80), (1, 60, 80)]
    assert Gpus("no-such-library.so").read() == []

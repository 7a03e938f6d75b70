"""The cases of `brim why`: one log per format, the public sample that it follows, and the expected finding.

`python -m tests.why_cases` prints the table. The logs are in tests/fixtures/oom/formats, names and numbers changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from brim.monitor.oom.kills import Kill
from brim.monitor.oom.why import WhyReport, why
from brim.records import dataclass
from brim.sizes import format_size

FORMATS = Path(__file__).parent / "fixtures" / "oom" / "formats"
GITHUB = "https://github.com/"


@dataclass(frozen=True, slots=True)
class Case:
    """A log, the address of a public sample, and the expected "killer, confidence, victim, memory" of each kill."""

    format: str
    log: str
    sample: str
    expected: tuple[str, ...]

    def report(self) -> WhyReport:
        return why(logs=[FORMATS / f"{self.log}.log"])


def described(kill: Kill) -> str:
    """Return the comparable facts of a kill in one line."""
    victim = kill.name or ""
    if kill.pid is not None:
        victim += f" {kill.pid}"
    if kill.unit:
        victim += f" in {kill.unit}"
    bound = kill.bound
    sizes = {
        "used": kill.sizes.held_bytes or bound.usage_bytes,
        "limit": bound.bytes,
        "requested": bound.requested_bytes,
    }
    memory = " ".join(f"{name} {format_size(size)}" for name, size in sizes.items() if size)
    effect = "" if kill.effect == "killed" else f" {kill.effect}"
    return ", ".join(filter(None, [f"{kill.killer}{effect}", kill.sure, victim.strip(), memory]))


CASES = [
    Case(
        "earlyoom of 2018",
        "earlyoom_2018",
        f"{GITHUB}rfjakob/earlyoom/issues/88",
        ("earlyoom asked to end, certain, python3 6021, used 5.05 GB",),
    ),
    Case(
        "earlyoom, then the kernel",
        "earlyoom_then_kernel",
        f"{GITHUB}rfjakob/earlyoom/issues/121",
        ("kernel, certain, python3 31207, used 10.0 GB",),
    ),
    Case(
        "nohang",
        "nohang",
        f"{GITHUB}hakavlad/nohang/issues/85",
        ("nohang asked to end, certain, python3 27714, used 18.7 GB",),
    ),
    Case(
        "oomd (Meta)",
        "meta_oomd",
        f"{GITHUB}facebookincubator/oomd/issues/122",
        ("oomd, certain, in session-7.scope, used 6.33 GB",),
    ),
    Case(
        "kubelet: CgroupOOM, SystemOOM",
        "kubelet_events",
        f"{GITHUB}kubernetes/kubernetes/pull/100487",
        ("kernel, certain, python 510511", "kernel, certain, java 5211"),
    ),
    Case(
        "Flux",
        "flux",
        f"{GITHUB}flux-framework/flux-core/pull/6289",
        ("batch system, likely, used 3.70 GB",),
    ),
    Case(
        "pod: fragment of JSON",
        "pod_fragment",
        f"{GITHUB}kubernetes/kubernetes/issues/53669",
        ("container runtime, likely",),
    ),
    Case(
        "kubectl describe pod",
        "pod_described",
        f"{GITHUB}kubernetes/kubernetes/issues/10861",
        ("container runtime, likely, in pod trainer-hra99, container trainer, limit 17.2 GB",),
    ),
    Case(
        "docker events as JSON",
        "docker_events_json",
        f"{GITHUB}moby/moby/issues/18470",
        ("container runtime, likely, in container 46eb96d6c134",),
    ),
    Case(
        "docker inspect",
        "docker_inspect",
        f"{GITHUB}moby/moby/issues/15621",
        ("container runtime, possible, in container trainer, limit 8.59 GB",),
    ),
    Case(
        "macOS: memorystatus, low swap",
        "macos_memorystatus",
        f"{GITHUB}zhuowei/worthdoingbadly.com/blob/master/_posts/2021-06-07-macappsios.md",
        (
            "macos, certain, python3 915, used 2.39 GB",
            "macos, certain, Python 69771, used 24.8 GB",
            "macos, certain, mongod 29671, used 5.37 GB",
        ),
    ),
    Case(
        "macOS: jetsam report",
        "macos_jetsam",
        f"{GITHUB}jundot/omlx/issues/702",
        ("macos, certain, Python 44120, used 63.9 GB",),
    ),
    Case("Colab", "colab", f"{GITHUB}googlecolab/colabtools/issues/2332", ("unknown, likely, the Colab session",)),
    Case(
        "Jupyter: kernel died",
        "jupyter",
        f"{GITHUB}jupyterlab/jupyterlab/issues/4415",
        ("unknown, possible, the notebook kernel",),
    ),
    Case(
        "JAX: RESOURCE_EXHAUSTED",
        "jax",
        f"{GITHUB}google-deepmind/alphafold/issues/1023",
        ("gpu refused, certain, requested 7.52 GB",),
    ),
    Case(
        "HTCondor",
        "htcondor",
        f"{GITHUB}galaxyproject/tpv-shared-database/issues/30",
        ("batch system, certain, in job 4411902.000, used 17.1 GB limit 17.2 GB",),
    ),
    Case(
        "Grid Engine",  # the text of the message in its source; no public log was found
        "grid_engine",
        "",
        ("batch system, certain, in job 3192235.1, used 21.5 GB limit 17.2 GB",),
    ),
    Case(
        "leaked semaphores, [Process killed], uploading",
        "leaked_semaphores_process_killed",
        f"{GITHUB}The-Obstacle-Is-The-Way/arc-aphasia-bids/blob/main/docs/how-to/fix-upload-crashes.md",
        ("unknown, likely, python",),
    ),
    Case(
        "leaked semaphores, [Process killed]",
        "leaked_semaphores_no_bar",
        f"{GITHUB}huggingface/datasets/issues/7894",
        ("unknown, likely, python",),
    ),
    Case(
        "journalctl -p warning",
        "journal_warnings",
        f"{GITHUB}systemd/systemd/issues/36529",
        ("kernel, certain, python 88121 in train.service, used 63.6 GB",),
    ),
    Case(
        "Ray: driver and task",
        "ray_driver_and_task",
        f"{GITHUB}ray-project/ray/pull/30312",
        ("ray, certain, embed 11362 in node 10.0.0.5, used 11.2 GB limit 27.4 GB",),
    ),
    Case("LSF and exit code", "lsf", f"{GITHUB}jsh58/Genrich/issues/53", ("batch system, certain",)),
    Case(
        "sacct and slurmstepd",
        "sacct",
        f"{GITHUB}marbl/canu/issues/2279",
        ("slurm, likely, in job 4471, used 17.1 GB limit 17.2 GB",),
    ),
    Case(
        "CUDA out of memory",
        "cuda",
        f"{GITHUB}pytorch/pytorch/issues/16417",
        ("gpu refused, certain, used 24.3 GB limit 25.4 GB requested 2.68 GB",),
    ),
    Case(
        "YARN",
        "yarn",
        f"{GITHUB}yahoo/TensorFlowOnSpark/issues/134",
        ("batch system, certain, used 7.20 GB limit 4.20 GB",),
    ),
    Case(
        "kernel: a small victim",
        "small_victim",
        f"{GITHUB}moby/moby/issues/15621",
        ("kernel, certain, python3 4310, used 4.42 MB",),
    ),
    Case(
        "torchrun",
        "torchrun",
        f"{GITHUB}hpcaitech/ColossalAI/issues/3514",
        ("unknown, possible, python 4413",),
    ),
    Case("loky", "loky", f"{GITHUB}joblib/joblib/issues/812", ("unknown, possible",)),
]


def main() -> None:
    """Print a Markdown table of all cases."""
    rows = ["| format | found | kills | confidence, victim and memory | suggestion |", "|---|---|---|---|---|"]
    failed = 0
    for case in CASES:
        kills = case.report().kills
        facts = tuple(map(described, kills))
        failed += facts != case.expected
        result = "yes" if facts == case.expected else f"NO, expected {case.expected}"
        advice = kills[-1].advice if kills else ""
        rows.append(f"| {case.format} | {result} | {len(kills)} | {'; '.join(facts)} | {advice} |")
    sys.stdout.write("\n".join(rows) + "\n")
    sys.exit(f"{failed} of {len(CASES)} cases differ" if failed else None)


if __name__ == "__main__":
    main()

"""Every case of `tests.why_cases` gives the expected kill, and text that only quotes kills is never certain."""

from __future__ import annotations

import marshal
from pathlib import Path

import pytest

from brim.monitor.oom import explain
from brim.monitor.oom.why import why
from tests.why_cases import CASES, FORMATS, Case, described


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.log)
def test_case_gives_each_kill_once_with_its_facts(case: Case) -> None:
    report = case.report()
    assert tuple(map(described, report.kills)) == case.expected
    assert max(map(len, str(report).splitlines())) <= 80


def test_every_format_fixture_has_a_case() -> None:
    assert {case.log for case in CASES} == {path.stem for path in FORMATS.glob("*.log")}


def kill_of(log: str) -> tuple[str, str]:
    (kill,) = why(logs=[FORMATS / f"{log}.log"]).kills
    return explain.headline(kill), kill.advice


def test_leaked_semaphores_are_explained_and_name_brim_build() -> None:
    for log in ("leaked_semaphores_process_killed", "leaked_semaphores_no_bar"):
        headline, advice = kill_of(log)
        assert "likely for lack of memory" in headline
        assert "brim build SOURCE DEST" in advice


def test_small_victim_gives_no_limit_computed_from_its_size() -> None:
    headline, advice = kill_of("small_victim")
    assert "the machine was out of memory" in headline
    assert "--memory" not in advice


def test_suggestion_without_a_known_limit_has_no_dangling_amount() -> None:
    advices = [kill.advice for case in CASES for kill in case.report().kills]
    assert not [advice for advice in advices if advice.endswith(("to more.", "more than."))]


def test_time_host_and_names_come_from_the_record() -> None:
    (described_pod,) = why(logs=[FORMATS / "pod_described.log"]).kills
    assert described_pod.when is not None
    assert described_pod.when.isoformat() == "2025-07-07T12:54:33-07:00"
    (yarn,) = why(logs=[FORMATS / "yarn.log"]).kills
    assert yarn.host == "node12.example.org"
    (batch,) = why(logs=[FORMATS / "htcondor.log"]).kills
    assert explain.headline(batch).startswith("HTCondor killed")


QUOTATIONS = [
    "12:Out of memory: Killed process 1234 (foo) is what you see",
    "OOMKilled? check kubectl describe pod and raise the limit",
    "The worker was Killed by the operator yesterday.",
    "        except MemoryError:",
    '    raise RuntimeError("CUDA out of memory")',
    '    assert "Killed process 12 (x) total-vm:9kB" in text',
    "// Out of memory: Killed process 12 (python) total-vm:9kB, anon-rss:5kB",
    'log := "Killed process 9823, UID 0, (FlowCon.fresher) total-vm:3098244kB, anon-rss:1157280kB, file-rss:36kB"',
    "Then look for `Out of memory: Killed process 99 (java) total-vm:9kB, anon-rss:5kB` in dmesg",
    "If the pool is too large you will usually see exit code 137",
    "memorystatus: killing_idle_process pid 386 [wallpaperd] (idle-exit 0)",
    "oomd[1]: [BaseKillPlugin.cpp:141] Killed 0: 1377(ssh-agent)[E1] 1401(tmux)[E1]",
    "nohang[3]:   Send SIGTERM to tail: 1",
]


@pytest.mark.parametrize("line", QUOTATIONS)
def test_quotation_in_prose_or_source_code_is_no_finding(line: str, tmp_path: Path) -> None:
    log = tmp_path / "chat"
    log.write_text(f"{line}\n")
    assert why(logs=[log]).kills == ()


@pytest.mark.parametrize("name", ["README.md", "README", "oom_test.go", "guide.rst", "piped"])
def test_document_that_contains_a_log_gives_no_certain_finding(name: str, tmp_path: Path) -> None:
    line = 'Feb 20 10:59:34 h earlyoom[1]: sending SIGTERM to process 7 uid 1000 "tail": oom_score 156, VmRSS 4962 MiB'
    path = tmp_path / name
    path.write_text(f"# How it looks\n\n```\n{line}\nKilled process 5 (x) total-vm:9kB, anon-rss:5kB\n```\n")
    report = why(logs=[path])
    assert {kill.sure for kill in report.kills} == {"possible"}
    assert "document or source code" in str(report)


def test_compiled_program_with_a_kill_line_gives_no_certain_finding(tmp_path: Path) -> None:
    text = "Feb 20 10:59:34 h kernel: Out of memory: Killed process 5 (x) total-vm:9kB, anon-rss:5kB"
    path = tmp_path / "quoting"
    path.write_bytes(marshal.dumps(compile(f"def a(b):\n    return b, {text!r}\n", "quoting", "exec")))
    assert {kill.sure for kill in why(logs=[path]).kills} == {"possible"}


def test_log_with_zeros_of_a_power_failure_is_not_taken_for_a_program(tmp_path: Path) -> None:
    path = tmp_path / "kern"
    line = b"Feb 20 10:59:34 h kernel: Out of memory: Killed process 5 (x) total-vm:9kB, anon-rss:5kB\n"
    path.write_bytes(b"Feb 20 10:58:00 h kernel: x\n" + bytes(600) + line)
    (kill,) = why(logs=[path]).kills
    assert (kill.pid, kill.sure) == (5, "certain")


def test_job_output_with_comment_lines_is_not_taken_for_a_document(tmp_path: Path) -> None:
    log = tmp_path / "slurm-191.out"
    log.write_text(
        "# Starting on node7\n# modules: cuda\nimport took 3 s\n"
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch. Some of your processes may be killed.\n"
    )
    (kill,) = why(logs=[log]).kills
    assert (kill.killer, kill.sure) == ("slurm", "likely")

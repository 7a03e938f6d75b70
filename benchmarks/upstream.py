"""Run the tests of `datasets` for map, filter and push_to_hub with brim in their place: `make bench-upstream`.

    python benchmarks/upstream.py CHECKOUT [--only map,filter,stream,push_to_hub] [-k EXPRESSION]
        [--json FILE] [--baseline FILE]

CHECKOUT is a clone of github.com/huggingface/datasets at the installed version, or near it. Nothing of it is
copied: its tests run in the checkout, first unchanged and then with brim's functions in place of the methods
that they call. Only tests that pass unchanged count. Tests that inspect cache files, mocks or private names of the
original count separately. A test that differs is printed with its reason in docs/reference/map.md, if it has one.

push_to_hub is called with private=False if a test does not set it, and the files of .brim/ are removed from the
listings of tests: these two differences are known, and would hide all others.

Needs the packages that the tests import: `pip install absl-py decorator httpx joblib requests`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tables import Part, at_least, machine, print_goals, print_machine, print_part, progress

HERE = Path(__file__).resolve().parent
REASONS = HERE.parent / "docs/reference/map.md"
FILES = ("test_arrow_dataset", "test_dataset_dict", "test_iterable_dataset", "test_fingerprint", "test_load")
FILES += ("test_fingerprint_tokenizer_stability", "test_search", "test_table", "test_upstream_hub")
USER, TOKEN = "__DUMMY_DATASETS_USER__", "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"  # that the tests know
GOAL_PERCENT = 95
GROUPS = {
    "map": ("Dataset.map", "DatasetDict.map"),
    "filter": ("Dataset.filter", "DatasetDict.filter"),
    "stream": (
        "IterableDataset.map",
        "IterableDataset.filter",
        "IterableDatasetDict.map",
        "IterableDatasetDict.filter",
    ),
    "push_to_hub": tuple(
        f"{kind}.push_to_hub" for kind in ("Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict")
    ),
}
Results = dict[str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default=",".join(GROUPS))
    parser.add_argument("-k", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--baseline", type=Path, help="a --json of before: the tests as they are do not run again")
    arguments = parser.parse_args()
    if not (arguments.checkout / "tests" / "test_arrow_dataset.py").is_file():
        sys.exit(f"{arguments.checkout} is no checkout of datasets: it has no tests/test_arrow_dataset.py.")
    expected = arguments.only.split(",")
    if unknown := set(expected) - set(GROUPS):
        sys.exit(f"--only takes {', '.join(GROUPS)}, not {', '.join(sorted(unknown))}.")
    with tempfile.TemporaryDirectory(prefix="upstream-") as folder:
        if arguments.baseline:
            original = json.loads(arguments.baseline.read_text())["original"]
        else:
            original = run(arguments.checkout, Path(folder), "original", expected, arguments.k)
        replaced = run(arguments.checkout, Path(folder), "brim", expected, arguments.k)
    parts = {name: compare(name, original, replaced, reasons()) for name in expected}
    for part in parts.values():
        print_part(part)
    print_goals(parts)
    facts = machine(HERE, ["datasets", "pyarrow", "huggingface_hub"])
    print_machine(facts)
    if arguments.json:
        records = {"machine": facts, "parts": {name: asdict(part) for name, part in parts.items()}}
        arguments.json.write_text(json.dumps({**records, "original": original, "brim": replaced}, indent=1))


def run(checkout: Path, folder: Path, method: str, expected: list[str], expression: str) -> Results:
    """Return the outcome of each test, and the methods that it called."""
    progress(f"the tests of {checkout.name}, {method}")
    out = folder / f"{method}.json"
    names = [name for name in FILES if name != "test_upstream_hub" or "push_to_hub" in expected]
    files = [f"tests/{name}.py" for name in names if (checkout / "tests" / f"{name}.py").is_file()]
    if expected == ["push_to_hub"]:
        files = ["tests/test_upstream_hub.py"]
    hub_command = [sys.executable, str(HERE / "hub_server.py"), str(folder / f"hub-{method}"), "--keep"]
    hub_command += ["--user", f"{USER}={TOKEN}"]
    with subprocess.Popen(hub_command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as hub:
        assert hub.stdout is not None
        endpoint = hub.stdout.readline().strip()
        environment = os.environ | {
            "BRIM_UPSTREAM": method,
            "BRIM_UPSTREAM_HUB": endpoint,
            "BRIM_UPSTREAM_OUT": str(out),
            "BRIM_CACHE": str(folder / "cache"),
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(folder / f"home-{method}"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "XDG_STATE_HOME": str(folder / "state"),
            "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "upstream_plugin"]
        command += [
            "--continue-on-collection-errors",
            "-p",
            "no:cacheprovider",
            *(["-k", expression] if expression else []),
            *files,
        ]
        result = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        assert hub.stdin is not None
        hub.stdin.close()
    if not out.exists():
        sys.exit(f"pytest did not run: {result.stdout[-2000:]}{result.stderr[-2000:]}")
    if log := os.environ.get("BRIM_UPSTREAM_LOG"):
        Path(f"{log}.{method}").write_text(result.stdout + result.stderr)
    actual: Results = json.loads(out.read_text())
    return actual


def compare(group: str, original: Results, replaced: Results, known_values: dict[str, str]) -> Part:
    counted = {
        test: observed
        for test, observed in original.items()
        if observed["outcome"] == "passed" and set(observed.get("called", ())) & set(GROUPS[group])
    }
    part = Part(f"datasets' own tests of {group}", ("test", "looks inside", "reason"))
    passed = {test for test in counted if replaced.get(test, {}).get("outcome") == "passed"}
    outside = {test for test, recorded in counted.items() if not recorded["inside"]}
    for test in sorted(counted.keys() - passed):
        why = replaced.get(test, {}).get("why", "").splitlines()
        name = plain(test)
        report = known_values.get(name) or f"**NO REASON IS GIVEN**: {why[0][:200] if why else 'it did not run'}"
        inside = ", ".join(counted[test]["inside"])
        part.rows.append((f"`{test.split('::', 1)[-1]}`", inside, report.replace("|", "\\|")))
    percent = 100 * len(passed & outside) / max(len(outside), 1)
    part.notes.append(
        f"{len(passed)} of {len(counted)} pass; {len(passed & outside)} of {len(outside)} of those that "
        "look into no cache file, mock or private name."
    )
    if group in ("map", "filter"):
        part.goals.append(at_least("of those that do not look inside, passed", percent, GOAL_PERCENT, " %"))
    unnamed = sum(plain(test) not in known_values for test in counted.keys() - passed)
    part.goals.append(
        at_least(
            "of those that differ, with a reason", len(counted) - len(passed) - unnamed, len(counted) - len(passed), ""
        )
    )
    return part


def plain(test: str) -> str:
    """Return the name of a test without its class and parameters."""
    return re.sub(r"(_in_memory|_on_disk)?(\[.*\])?$", "", test.rpartition("::")[2])


def reasons() -> dict[str, str]:
    """Return the reasons for differences from the table in docs/reference/map.md: | `test_name` | reason |."""
    actual = re.findall(r"^\| ((?:`test_\w+`(?:, )?)+) \| (.+?) \|$", REASONS.read_text(), re.MULTILINE)
    return {name: why for names, why in actual for name in re.findall(r"`(test_\w+)`", names)}


if __name__ == "__main__":
    main()

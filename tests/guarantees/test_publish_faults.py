"""Faults between brim and the Hub while a dataset is published."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import random_bytes, write_files
from tests.hub import TestHub
from tests.publishing import DEST, REPO, Listing, Machine, built, shards

EACH = ("--rows-per-shard", "1")
SIZE = 200_000
LARGE = 3_000_000  # uploaded in parts
FILE_COUNT = 120  # more shards than one commit takes


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[TestHub]:
    with TestHub(tmp_path / "hub", multipart_bytes=2 << 20, part_bytes=1 << 20) as hub:
        hub.create(REPO)
        yield hub


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create five files that are uploaded in one PUT each, and one that is uploaded in three parts."""
    contents = {f"f{i}.bin": random_bytes(SIZE, i) for i in range(5)} | {"large.bin": random_bytes(LARGE, 9)}
    return write_files(tmp_path_factory.mktemp("faults") / "source", contents)


@pytest.fixture(scope="module")
def expected(source: Path) -> Listing:
    return built(source, source.parent / "out", *EACH)


@pytest.fixture(scope="module")
def large_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    contents = {f"f{i:03d}.bin": random_bytes(500 + i, i) for i in range(FILE_COUNT)}
    return write_files(tmp_path_factory.mktemp("faults") / "many", contents)


@pytest.mark.parametrize(
    ("status", "routes"),
    [
        (500, ["info", "put", "commit"]),
        (502, ["tree", "verify", "validate-yaml"]),
        (503, ["auth-check", "part", "preupload"]),
        (504, ["discussions", "batch", "complete"]),
        (408, ["put", "commit"]),
    ],
)
def test_answers_that_pass(
    hub: TestHub, machine: Machine, source: Path, expected: Listing, status: int, routes: list[str]
) -> None:
    """A server error on any request is retried, and at most the data of that request is sent twice."""
    faults = [hub.faults.add(route, status=status) for route in routes]
    machine.publish(source, *EACH)
    assert [fault.fired for fault in faults] == [1] * len(routes)
    assert shards(hub) == expected
    assert len(hub.history(REPO)) == 2
    assert hub.counters.bytes_repeated <= (1 << 20) + 2000


def test_rate_limit(hub: TestHub, machine: Machine, source: Path, expected: Listing) -> None:
    """After 429 on any request, brim waits as long as Retry-After requires and informs the user."""
    faults = [hub.faults.add(route, status=429, retry_after=2) for route in ("info", "put", "commit")]
    start = time.monotonic()
    result = machine.publish(source, *EACH)
    assert time.monotonic() - start > 7
    assert [fault.fired for fault in faults] == [1, 1, 1]
    assert shards(hub) == expected
    assert "Rate limited. Waiting 3" in result.stderr
    assert result.stderr.count("429; trying again in 2 s") == 2


@pytest.mark.parametrize("route", ["info", "batch", "commit"])
def test_stop_while_the_rate_limit_is_waited_for(hub: TestHub, machine: Machine, source: Path, route: str) -> None:
    """A stop ends a long wait that the Hub requested, and the next run resumes."""
    fault = hub.faults.add(route, times=None, status=429, retry_after=600)
    process = machine.start(source, *EACH)
    for _ in range(200):
        if fault.fired:
            break
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 6


UNEXPECTED = "The Hub answered with something else than it should"


@pytest.mark.parametrize(
    ("route", "status", "body"),
    [
        ("info", 200, '{"other": 1}'),
        ("info", 200, "<html>log in</html>"),
        ("tree", 200, '{"other": 1}'),
        ("discussions", 200, "[]"),
        ("batch", 200, "null"),
        ("part", 200, "{}"),
        ("preupload", 200, '"text"'),
        ("validate-yaml", 200, "null"),
        ("commit", 204, ""),
        ("commit", 200, "[]"),
        ("create", 409, "{}"),
        ("create", 200, ""),
    ],
)
def test_answer_that_no_hub_gives_ends_with_exit_code_5(
    hub: TestHub, machine: Machine, source: Path, expected: Listing, route: str, status: int, body: str
) -> None:
    """A response of a proxy or a login page is reported with exit code 5.

    The next run publishes the remaining files.
    """
    if route == "create":
        hub.repos.delete("datasets", REPO)
    fault = hub.faults.add(route, times=None, action="answer", status=status, said=body)
    assert UNEXPECTED in machine.publish(source, *EACH, check=5).stderr
    assert fault.fired
    hub.faults.clear()
    machine.publish(source, *EACH)
    assert shards(hub) == expected


@pytest.mark.parametrize(("route", "status"), [("commit", 204), ("commit", 200), ("create", 409), ("create", 200)])
def test_unreadable_answer_to_work_that_was_done_is_a_lost_answer(
    hub: TestHub, machine: Machine, source: Path, expected: Listing, route: str, status: int
) -> None:
    if route == "create":
        hub.repos.delete("datasets", REPO)
    fault = hub.faults.add(route, action="garble", status=status)
    machine.publish(source, *EACH)
    assert fault.fired
    assert shards(hub) == expected
    assert len(hub.history(REPO)) == 2


@pytest.mark.parametrize("command", ["verify", "info", "check", "select"])
@pytest.mark.parametrize(("route", "body"), [("info", '{"other": 1}'), ("tree", "null"), ("tree", "[1]")])
def test_reading_an_answer_that_no_hub_gives_is_an_error(
    hub: TestHub, machine: Machine, source: Path, tmp_path: Path, command: str, route: str, body: str
) -> None:
    machine.publish(source, *EACH)
    hub.faults.add(route, times=None, action="answer", status=200, said=body)
    to = [str(tmp_path / "out")] if command == "select" else []
    result = machine.run(command, DEST, *to)
    assert result.returncode == 5, result.stderr
    assert UNEXPECTED in result.stderr or "does not answer as such a store does" in result.stderr


@pytest.mark.slow
def test_server_that_stays_down(hub: TestHub, machine: Machine, source: Path, expected: Listing) -> None:
    """After the last retry the exit code is 5 and the error recommends a rerun, which uploads the remaining files."""
    hub.faults.add("put", nth=4, times=None, action="cut")
    result = machine.publish(source, *EACH, "--workers", "1", check=5)
    assert re.search(r"The connection to the Hub( \(127\.0\.0\.1:\d+\))? failed: Server disconnected", result.stderr)
    assert "Run the same command to continue; uploads that finished are kept." in result.stderr
    assert not shards(hub)
    sent = hub.counters.bytes_by_oid.copy()
    hub.faults.clear()
    machine.publish(source, *EACH)
    assert shards(hub) == expected
    assert all(hub.counters.bytes_by_oid[oid] == sent[oid] for _, oid in list(expected.values())[:3])


def test_connection_cut(hub: TestHub, machine: Machine, source: Path, expected: Listing) -> None:
    """A connection that is cut inside a PUT or a part costs only the data of that PUT or part."""
    fault = hub.faults.add("put", nth=2, action="cut", after_bytes=150_000)
    part = hub.faults.add("part", nth=2, action="cut", after_bytes=700_000)
    machine.publish(source, *EACH)
    assert (fault.fired, part.fired) == (1, 1)
    assert shards(hub) == expected
    assert hub.counters.bytes_repeated == 850_000


@pytest.mark.slow
def test_stalled_connection(hub: TestHub, machine: Machine, source: Path, expected: Listing) -> None:
    """A request without progress is aborted after the stall time and retried."""
    faults = [
        hub.faults.add("put", nth=2, action="stall", after_bytes=100_000, seconds=60),
        hub.faults.add("part", nth=2, action="stall", after_bytes=500_000, seconds=60),
        hub.faults.add("batch", nth=3, action="stall", seconds=60),
        hub.faults.add("commit", action="stall", seconds=60),
        hub.faults.add("tree", nth=2, action="stall", seconds=60),
        hub.faults.add("info", nth=2, action="stall", seconds=60),
        hub.faults.add("discussions", action="stall", seconds=60),
    ]
    start = time.monotonic()
    Machine(hub, machine.folder, more={"BRIM_STALL_SECONDS": "1"}).publish(source, *EACH)
    assert time.monotonic() - start < 45
    assert [fault.fired for fault in faults] == [1] * 7
    assert shards(hub) == expected
    assert len(hub.history(REPO)) == 2
    assert hub.counters.bytes_repeated <= 600_000 + (1 << 18)


def test_expired_url(hub: TestHub, machine: Machine, source: Path, expected: Listing) -> None:
    """An expired pre-signed URL is replaced; other shards are not uploaded again."""
    fault = hub.faults.add("put", nth=2, status=403)
    part = hub.faults.add("part", nth=2, status=403)
    machine.publish(source, *EACH)
    assert (fault.fired, part.fired) == (1, 1)
    assert shards(hub) == expected
    assert hub.counters.bytes_repeated <= SIZE + 2000 + (2 << 20)


def test_urls_that_expire_in_the_middle(hub: TestHub, machine: Machine, source: Path, expected: Listing) -> None:
    """A part that takes longer than the URLs are valid ends that try; the next one has new URLs."""
    hub.url_lifetime_s = 2
    stall = hub.faults.add("part", nth=1, action="stall", after_bytes=100, seconds=3)
    machine.publish(source, *EACH)
    assert stall.fired == 1
    assert shards(hub) == expected
    assert hub.counters.requests["part"] == 2 + 3
    assert hub.counters.bytes_repeated <= 2 << 20


def test_storage_that_refuses(hub: TestHub, machine: Machine, source: Path) -> None:
    """Storage that also refuses new URLs is not reported as a token without permission, and is not retried forever."""
    rule = hub.faults.add("put", times=None, status=403, code="AccessDenied")
    result = machine.publish(source, *EACH, "--workers", "1", check=2)
    assert "The Hub's storage refuses uploads to ada/data (403: AccessDenied), with new addresses too" in result.stderr
    assert "token" not in result.stderr
    assert "same command" not in result.stderr
    assert rule.fired == 2


@pytest.mark.parametrize(
    ("route", "fault", "arguments"),
    [
        ("put", {"status": 400, "code": "EntityTooLarge"}, "(400: EntityTooLarge)"),
        ("put", {"status": 403, "code": "RequestTimeTooSkewed"}, "Set this machine's clock."),
        ("batch", {"status": 402, "said": "Pay first"}, "The Hub has no room for more in ada/data (402: Pay first"),
        ("batch", {"status": 403, "said": "Private repository storage limit reached"}, "no room for more"),
        ("batch", {"status": 413, "said": "too large"}, "The Hub refuses the request for ada/data (413: too large)"),
        ("batch", {"status": 404, "code": "RepoNotFound"}, "There is no dataset ada/data on the Hub"),
        ("batch", {"status": 404}, "does not know what it was asked for ada/data"),
        ("commit", {"status": 422, "said": "bad card"}, "(422: bad card)"),
    ],
)
def test_refusals_for_good(
    hub: TestHub, machine: Machine, tmp_path: Path, route: str, fault: Any, arguments: str
) -> None:
    """A permanent refusal exits with code 2 and states the fix.

    Host and error code decide, not only the status (tests/state/test_retry.py covers transient failures).
    """
    source = write_files(tmp_path / "one", {"f.bin": random_bytes(3000, 1)})
    hub.faults.add(route, times=None, **fault)
    result = machine.publish(source, check=2)
    assert arguments in result.stderr
    assert "same command" not in result.stderr


def test_codes_of_storage_that_pass(hub: TestHub, machine: Machine, source: Path, expected: Listing) -> None:
    """RequestTimeout has status 400 and is transient: the shard is uploaded again."""
    rule = hub.faults.add("put", nth=2, status=400, code="RequestTimeout")
    machine.publish(source, *EACH)
    assert rule.fired == 1
    assert shards(hub) == expected


def test_login_lost_in_the_middle(
    hub: TestHub, machine: Machine, many_files: Callable[..., Path], tmp_path: Path
) -> None:
    """401 ends the run with exit code 2 and states the fix; the rerun resumes and uploads nothing twice."""
    source = many_files(12, 50_000)
    expected = built(source, tmp_path / "out", *EACH)
    hub.faults.add("batch", nth=7, times=None, status=401)
    result = machine.publish(source, *EACH, "--workers", "2", check=2)
    assert "does not accept the token (401); nothing that was sent is lost" in result.stderr
    assert "hf auth login" in result.stderr
    assert hub.counters.requests["put"] == 6
    hub.faults.clear()
    machine.publish(source, *EACH)
    assert shards(hub) == expected
    assert hub.counters.bytes_repeated <= 2 * 53_000
    assert hub.counters.bytes_received - hub.counters.bytes_repeated == sum(size for size, _ in expected.values())


def test_read_only_token(hub: TestHub, source: Path, tmp_path: Path) -> None:
    """A token without write access is reported before the first byte is uploaded."""
    result = Machine(hub, tmp_path / "machine", "hf_read").publish(source, check=2)
    assert "The token has no right to write to ada/data (403" in result.stderr
    assert hub.counters.puts == hub.counters.commits == hub.counters.requests["batch"] == 0


@pytest.mark.parametrize("times", [1, 3])
def test_someone_else_commits(hub: TestHub, machine: Machine, source: Path, expected: Listing, times: int) -> None:
    """After 412 because of another user's commit, that file survives, and the next try commits without a new upload."""
    rule = hub.faults.add("commit", action="conflict", times=times)
    machine.publish(source, *EACH)
    assert rule.fired == times
    assert shards(hub) == expected
    assert "someone-else.txt" in hub.files(REPO)
    assert hub.history(REPO) == ["Publish with brim", *["someone else's commit"] * times, "initial commit"]
    assert hub.counters.bytes_repeated == 0


def test_someone_else_commits_to_the_pull_request_and_to_main(
    hub: TestHub, machine: Machine, large_source: Path
) -> None:
    """Commits of other users to the pull request and to main survive its merge."""
    hub.faults.add("commit", action="conflict", path="refs/pr/1")
    hub.faults.add("merge", action="conflict")
    machine.publish(large_source, *EACH)
    assert len(shards(hub)) == FILE_COUNT
    assert "someone-else.txt" in hub.files(REPO)
    assert hub.counters.bytes_repeated == 0


def test_lost_answer_to_a_commit(hub: TestHub, machine: Machine, source: Path, expected: Listing) -> None:
    """A commit with a lost response is looked up and not made a second time."""
    rule = hub.faults.add("commit", action="lose")
    machine.publish(source, *EACH)
    assert rule.fired == 1
    assert shards(hub) == expected
    assert hub.history(REPO) == ["Publish with brim", "initial commit"]
    assert hub.counters.commits == 1


@pytest.mark.long
def test_lost_answers_to_a_pull_request(hub: TestHub, machine: Machine, large_source: Path, tmp_path: Path) -> None:
    """If responses to opening, filling, marking and merging a pull request are lost, each step is still done once."""
    routes = ("discussion-create", "commit", "discussion", "status", "merge")
    rules = [hub.faults.add(route, action="lose") for route in routes]
    rules.append(hub.faults.add("commit", nth=3, action="lose"))
    machine.publish(large_source, *EACH)
    assert [rule.fired for rule in rules] == [1] * 6
    assert shards(hub) == built(large_source, tmp_path / "out", *EACH)
    (pull,) = hub.repos.get("datasets", REPO).discussions.values()
    messages = [event["data"]["status"] for event in pull.events if event["type"] == "status-change"]
    assert messages == ["open", "merged"]
    assert re.fullmatch(r"120 rows in 120 shards \[brim \w{16}\] \(#1\)", hub.history(REPO)[0])
    assert len(hub.history(REPO)) == 2
    assert hub.counters.commits == 3
    assert hub.counters.bytes_repeated == 0


def test_server_restarts(hub: TestHub, machine: Machine, source: Path, expected: Listing) -> None:
    """A server restart in the middle of a part does not end the run and costs only the data in flight."""
    hub.faults.add("part", nth=2, action="stall", after_bytes=100_000, seconds=30)
    process = machine.start(source, *EACH)
    while hub.counters.requests["part"] < 2:
        time.sleep(0.02)
    hub.restart(pause_s=1.5)
    assert process.wait() == 0
    assert shards(hub) == expected
    assert hub.counters.bytes_repeated <= (1 << 20) + 3 * SIZE


@pytest.mark.parametrize("status", [401, 403, 500])
def test_xet_fails(tmp_path: Path, source: Path, status: int) -> None:
    """A failure in Xet's own storage is an error of the destination and not a bug in brim."""
    with TestHub(tmp_path / "hub", xet=True) as hub:
        machine = Machine(hub, tmp_path / "machine", more={"HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "1"})
        rule = hub.faults.add("xorb", times=None, status=status)
        result = machine.publish(source, *EACH, "--upload-with", "xet", check=None)
        assert rule.fired
        assert result.returncode == (5 if status == 500 else 2)
        assert re.search(
            rf"Sending data/train-\S+ by Xet failed: .*\b{status}\b.*, domain: http://[\d.:]+\.\n", result.stderr
        )
        assert "--upload-with lfs" in result.stderr

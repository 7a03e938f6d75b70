"""The stop file: refused if it exists before a job starts, obeyed if it appears later."""

from __future__ import annotations

from pathlib import Path

import pytest

from brim.errors import InputError, StoppedError
from brim.jobs.preflight import JobSettings
from brim.state.stop import stoppable, stopping_at_once


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "stop"


def test_one_that_comes_while_a_source_is_read_is_obeyed(file: Path) -> None:
    """A stop file that appears while a source is read stops the job, and the job removes the file.

    Validating the options again at the same time does not refuse the file.
    """

    def read() -> None:
        with stopping_at_once(file):
            file.touch()
            JobSettings(stop_file=str(file))

    with pytest.raises(StoppedError, match="the stop file stop"):
        read()
    assert not file.exists()
    with stoppable(file) as stop:
        stop.check(now=True)


def test_one_that_comes_before_the_run_has_begun_is_obeyed(file: Path) -> None:
    with stopping_at_once(file):
        pass
    file.touch()
    with pytest.raises(StoppedError, match="the stop file stop"), stoppable(file) as stop:
        stop.check()
    assert not file.exists()


@pytest.mark.parametrize("ends", [None, ValueError])
def test_one_that_lies_there_is_refused_once_a_run_was_made_or_refused(
    file: Path, ends: type[Exception] | None
) -> None:
    """A stop file that appears between two jobs is refused by the second one, even if the first job failed."""
    if ends is None:
        with stopping_at_once(file):
            pass
        with stoppable(file):
            pass
    else:
        with pytest.raises(ends), stopping_at_once(file):
            raise ends
    file.touch()
    for refuses in (stoppable, stopping_at_once):
        with pytest.raises(InputError, match="already exists"), refuses(file):
            raise AssertionError("it was let in")
    assert file.exists()

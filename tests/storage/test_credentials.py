"""Which S3 credentials, endpoints and regions are used, and errors for unusable ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from brim.errors import InputError
from brim.storage.credentials import authorities, aws_endpoint, find_profile, find_region, known_keys
from brim.storage.location import Access
from brim.storage.storage import patience_s


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()


def _write(tmp_path: Path, config: str = "", credentials: str = "") -> None:
    (tmp_path / ".aws" / "config").write_text(config)
    (tmp_path / ".aws" / "credentials").write_text(credentials)


def test_environment_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in environment variables override those of a profile, whose region and endpoint are still used."""
    keys = "aws_access_key_id = file\naws_secret_access_key = f\n"
    _write(tmp_path, "[default]\nregion = eu-west-1\nendpoint_url = https://s3.example.org/\n", f"[default]\n{keys}")
    profile = find_profile()
    assert profile is not None
    assert known_keys(profile) == profile.keys
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "e")
    actual = known_keys(find_profile())
    assert actual is not None
    assert actual.access == "environment"
    assert (find_region(), aws_endpoint(Access())) == ("eu-west-1", "https://s3.example.org")


@pytest.mark.parametrize("says", ["role_arn = arn:x", "sso_start_url = https://x", "credential_process = x"])
def test_keys_elsewhere(tmp_path: Path, says: str) -> None:
    """A profile with a role, single sign-on or a credential process uses this provider, also as the default profile."""
    _write(tmp_path, f"[default]\n{says}\n")
    profile = find_profile()
    assert profile is not None
    assert profile.has_provider
    assert profile.keys is None


def test_nothing_but_a_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile without credentials uses the role of the machine."""
    _write(tmp_path, "[profile lab]\nregion = eu-west-1\n")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    profile = find_profile()
    assert profile is not None
    assert not profile.has_provider
    assert known_keys(profile) is None


@pytest.mark.parametrize(
    "message",
    ["localhost:9000", "localhost", "ftp://x", "http://", "http://[", "http://a:99999", "http://a b", "http://a?x=1"],
)
def test_no_endpoint(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    """An invalid endpoint is refused for every setting, because obstore would abort the process."""
    with pytest.raises(InputError, match="endpoint_url= takes an address"):
        Access(message)
    monkeypatch.setenv("AWS_ENDPOINT_URL", message)
    with pytest.raises(InputError, match="AWS_ENDPOINT_URL takes an address"):
        aws_endpoint(Access())


def test_password_in_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint with a password is refused without printing it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://me:secret@s3.example.org")
    with pytest.raises(InputError, match="AWS_ENDPOINT_URL_S3 holds a name or a password") as caught:
        aws_endpoint(Access())
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("message", ["http://127.0.0.1:9000", "https://a-b.example.org/some/path/", "http://[::1]:80"])
def test_endpoint(message: str) -> None:
    assert aws_endpoint(Access(message)) == message.rstrip("/")


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"AWS_ACCESS_KEY_ID": "a"}, "AWS_SECRET_ACCESS_KEY is not"),
        ({"AWS_SECRET_ACCESS_KEY": "s3cret"}, "AWS_ACCESS_KEY_ID is not"),
        ({"AWS_ACCESS_KEY_ID": "a\n", "AWS_SECRET_ACCESS_KEY": "s3cret"}, "line break"),
        ({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s3cret\r"}, "line break"),
        ({"AWS_REGION": "us east\n"}, "Unknown region"),
        ({"AWS_CA_BUNDLE": os.devnull}, "holds no certificates"),
        ({"BRIM_STALL_SECONDS": "-1"}, "above zero"),
        ({"BRIM_STALL_SECONDS": "nan"}, "above zero"),
    ],
)
def test_unusable_environment(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], says: str) -> None:
    """Invalid credentials, regions, certificates and time limits are refused without printing a secret."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=says) as caught:
        (find_region(), patience_s(), authorities(), known_keys(find_profile()))
    assert "s3cret" not in str(caught.value)

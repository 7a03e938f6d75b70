"""Secrets are removed from printed and stored text; all other text stays readable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.redact import redact, redact_command


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("python x.py --token hf_abcDEF123456 --epochs 3", "python x.py --token *** --epochs 3"),
        ("python x.py --hub-token=abc --epochs 3", "python x.py --hub-token=*** --epochs 3"),
        ("--password=hunter2 run", "--password=*** run"),
        ("--password hunter2 run", "--password *** run"),
        ("API_KEY=abc123 python x.py", "API_KEY=*** python x.py"),
        ("AWS_SECRET_ACCESS_KEY='ab cd' x", "AWS_SECRET_ACCESS_KEY=*** x"),
        ("aws AKIAIOSFODNN7EXAMPLE x", "aws *** x"),
        ("curl -H 'Authorization: Bearer abc.def' u", "curl -H 'Authorization: Bearer ***' u"),
        ("https://me:pa@ss@host/x?y=1", "https://***@host/x?y=1"),
        ("postgres://u:p@db/x", "postgres://***@db/x"),
        ("s3 https://b/x?X-Amz-Signature=abcdef&z=1", "s3 https://b/x?X-Amz-Signature=***&z=1"),
        ('{"api_key": "abc"}', '{"api_key": ***}'),
        ("WANDB_API_KEY: abc", "WANDB_API_KEY: ***"),
        ("hf_abcdefghijkl", "***"),
        ("MYSQL_PWD=a DB_PASS=b x", "MYSQL_PWD=*** DB_PASS=*** x"),
        ("x --pass a --auth=b --pwd c", "x --pass *** --auth=*** --pwd ***"),
        ("git clone https://abc123@host/x.git", "git clone https://***@host/x.git"),
        ("curl -H 'Cookie: a=b; c=d' u", "curl -H 'Cookie: ***' u"),
        ("ghp_abcdefghijklmnopqrst0123", "***"),
    ],
)
def test_secrets(text: str, shown: str) -> None:
    """The value is hidden, and the name of the option stays."""
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "python train.py --max_new_tokens 128 --num-tokens=5 --tokenizer gpt2",
        "brim tokenize in out --tokenizer bert-base-uncased",
        "Memory cgroup out of memory: Killed process 24601 (python3) total-vm:26892kB, anon-rss:17156kB",
        "the token was read from a file",
        "https://huggingface.co/datasets/me/arc",
        "oom-kill:constraint=CONSTRAINT_NONE,task=python,pid=1540763,uid=31417",
        "earlyoom[1]: sending SIGTERM to process 796 uid 1001",
        "a password is needed",
    ],
)
def test_plain_texts_stay(text: str) -> None:
    """Text without secrets is unchanged."""
    assert redact(text) == text


def test_commands() -> None:
    """An option and its value may be two arguments."""
    assert redact_command(["x", "--token", "abc", "--n", "3", "--key=1"]) == [
        "x",
        "--token",
        "***",
        "--n",
        "3",
        "--key=1",
    ]
    assert redact_command(["x", "--api-key", "-v"]) == ["x", "--api-key", "-v"]


@given(st.text())
def test_twice_is_once(text: str) -> None:
    """Redacting text twice gives the same result as once."""
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize("text", ["PWD=/home/me", "--pass-through x", "--bypass x", "git@host:x", "ssh://git@host/x"])
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    """Folders, other options and plain user names are not redacted."""
    assert redact(text) == text


def test_secrets_in_arguments() -> None:
    """A value with spaces is hidden completely, and so is the password after a user name."""
    assert redact_command(["x", "--token=two words", "-u", "me:pw"]) == ["x", "--token=***", "-u", "me:***"]

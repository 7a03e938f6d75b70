"""Messages name options as keywords in Python and as flags in the terminal."""

import subprocess
import sys
from typing import Any

import pytest

import brim
from brim.errors import InputError, named
from brim.options.declare import declared_options
from brim.wording import worded


@pytest.mark.parametrize(
    ("text", "in_python"),
    [
        ("--workers takes a number.", "workers= takes a number."),
        ("Use --on-error=skip, or --fresh.", "Use on_error='skip', or fresh=True."),
        ("Try --batch-size=8.", "Try batch_size=8."),
        ("Leave --no-bidsignore out", "Leave bidsignore=False out"),
        ("Try brim plan SOURCE --save PLAN. Or --drop=x.", "Try brim plan SOURCE --save PLAN. Or drop='x'."),
        ("Type `ray start --head`; then --address.", "Type `ray start --head`; then address=."),
        ("The file '--odd' exists.", "The file '--odd' exists."),
        ("a--b", "a--b"),
    ],
)  # fmt: skip
def test_python_reads_keywords(text: str, in_python: str) -> None:
    """In Python a message names keywords; commands to type and quoted text are unchanged."""
    assert worded(text) == in_python


def test_the_terminal_reads_flags() -> None:
    """In the terminal a message names flags, with their values after a space."""
    code = (
        "from brim.wording import use_terminal_names; use_terminal_names(); from brim.errors import InputError, named\n"
        "try:\n with named({'workers': 'num-proc'}): raise InputError('--workers, --on-error=skip.', hint='--fresh')\n"
        "except InputError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "--workers, --on-error skip. --fresh"


def test_a_function_has_its_own_names() -> None:
    """A function with other parameter names uses these in its errors."""
    with pytest.raises(InputError) as caught, named({"workers": "num-proc", "public": "private=False"}):
        raise InputError("--workers=0 is wrong.", hint="Leave --public out.")
    assert str(caught.value) == "num_proc=0 is wrong. Leave private=False out."


def test_every_switch_is_known() -> None:
    """A switch appears as the keyword value that turns it on, for every function that takes options."""
    functions = [value for name in brim.__all__ if hasattr(value := getattr(brim, name), "options")]
    assert len(functions) > 15
    for function in functions:
        for item in declared_options(function.options).values():
            if item.is_switch and item.option.cli:
                assert worded(f"Use {item.spelling}.") == f"Use {item.name}={not item.default}."
    assert worded("Use --deep, --all, --no-bidsignore.") == "Use deep=True, everything=True, bidsignore=False."


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (lambda path: brim.plan(path, path + "-out", workers=0), "workers= takes"),
        (lambda path: brim.map(path + "/rows.jsonl", len, num_proc=-1), "num_proc= takes"),
        (lambda path: brim.push_to_hub(None, "me/x", num_proc=0), "num_proc= takes"),
        (lambda path: brim.push_to_hub(None, "me/x", num_shards=0), "num_shards= takes"),
    ],
)
def test_no_flag_is_named_in_python(tmp_path: Any, call: Any, arguments: str) -> None:
    """The error for a number that is too small names the parameter."""
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(InputError, match=arguments) as caught:
        call(str(tmp_path))
    assert "--" not in str(caught.value)

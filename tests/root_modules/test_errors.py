import inspect
import pickle

import pytest

import brim
from brim import errors

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.BrimError)]


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_survive_pickling(kind: type[errors.BrimError]) -> None:
    """An error that is pickled between processes keeps its message, hint and facts."""
    error = kind("It broke.", hint="Fix it.", path="a/b", size=3)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.message, copy.hint, copy.facts) == ("It broke.", "Fix it.", {"path": "a/b", "size": 3})
    assert str(copy) == "It broke. Fix it."


@pytest.mark.parametrize("kind", CLASSES)
def test_the_tree_in_the_docstring_is_complete(kind: type[errors.BrimError]) -> None:
    """The docstring of the module lists every error class."""
    assert kind.__name__ in (errors.__doc__ or "")


def test_exit_codes() -> None:
    """Exit codes equal the documented ones."""
    codes = {kind.__name__: kind.exit_code for kind in CLASSES}
    assert codes["InputError"] == codes["SourceChangedError"] == codes["PlanMismatchError"] == 2
    assert (
        codes["VerificationError"],
        codes["MemoryLimitError"],
        codes["DestinationUnavailableError"],
        codes["StoppedError"],
    ) == (3, 4, 5, 6)


def test_errors_of_an_earlier_name_are_the_same_classes() -> None:
    """`except brim.DoesNotFit` of an earlier script works with a warning; --json keeps the earlier name."""
    for old, new in errors.RENAMED.items():
        with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
            assert getattr(errors, old) is getattr(errors, new)
        assert getattr(errors, new).json_name == old
    with pytest.raises(AttributeError):
        errors.NoSuchError  # noqa: B018


def test_public_names_of_an_earlier_version_still_work() -> None:
    with pytest.warns(DeprecationWarning, match=r"brim\.Built is now brim\.BuildResult"):
        assert brim.Built is brim.BuildResult  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match=r"brim\.DoesNotFit is now brim\.MemoryLimitError"):
        assert brim.DoesNotFit is errors.MemoryLimitError  # type: ignore[attr-defined]
    assert "Built" not in dir(brim)

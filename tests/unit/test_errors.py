import inspect
import pickle

import pytest

from brim import errors

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.BrimError)]


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_survive_pickling(kind: type[errors.BrimError]) -> None:
    """An error that crosses a process keeps its message, hint and facts."""
    error = kind("It broke.", hint="Mend it.", path="a/b", size=3)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.message, copy.hint, copy.facts) == ("It broke.", "Mend it.", {"path": "a/b", "size": 3})
    assert str(copy) == "It broke. Mend it."


@pytest.mark.parametrize("kind", CLASSES)
def test_the_tree_in_the_docstring_is_complete(kind: type[errors.BrimError]) -> None:
    """Every error stands in the module's drawing."""
    assert kind.__name__ in (errors.__doc__ or "")


def test_exit_codes() -> None:
    """Exit codes are those of the documentation."""
    codes = {kind.__name__: kind.exit_code for kind in CLASSES}
    assert codes["InputError"] == codes["SourceChanged"] == codes["PlanChanged"] == 2
    assert (codes["DamageFound"], codes["DoesNotFit"], codes["SinkFailed"], codes["Stopped"]) == (3, 4, 5, 6)

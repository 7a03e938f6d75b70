"""The listing of a bucket is walked like a folder: the same names in the same order as on disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from brim.sources.folder_tree import Folder, LocalTree, Tree, Walk
from brim.sources.remote_tree import ObjectTree
from brim.storage.location import parse_location
from brim.storage.storage import FileInfo
from tests.conftest import write_files

ADDRESS = parse_location("s3://bucket/top")
NAMES = st.sampled_from(
    ["a", "b", "a-b", "a.b", "é", "z z", ".h", ".brim", "__MACOSX", "sub-1", "ses-2", "~", "A", "a!"]
)
PATHS = st.lists(st.lists(NAMES, min_size=1, max_size=4).map("/".join), min_size=1, max_size=25)


def tree_of(*paths: str, size: int = 3) -> ObjectTree:
    return ObjectTree.of(ADDRESS, [(path, FileInfo(size, f'"{path}"')) for path in paths])


def walked(tree: Tree) -> tuple[list[str], list[str]]:
    walk = Walk(tree)
    return [path for path, _ in walk], walk.outputs


@given(PATHS)
@example(["a/1", "a-b/1", "a.b", "a!/1"])
def test_a_bucket_is_walked_as_a_folder_is(paths: list[str]) -> None:
    """Names are sorted within their folder. Hidden files and outputs of brim are skipped, as on disk."""
    subset: list[str] = []
    for path in paths:  # on disk, a file and a folder cannot have the same name
        if not any(path == t or path.startswith(f"{t}/") or t.startswith(f"{path}/") for t in subset):
            subset.append(path)
    with tempfile.TemporaryDirectory() as folder:
        local = LocalTree(str(write_files(Path(folder), dict.fromkeys(subset, b"abc"))))
        objects = tree_of(*sorted(subset))
        assert walked(objects) == walked(local)
        assert sorted(objects.walk("")) == sorted((top, sorted(f), sorted(n)) for top, f, n in local.walk(""))
        for path in {*subset, *(os.path.dirname(path) for path in subset), "nothing", "a/nothing"}:
            for question in ("exists", "is_folder", "is_file"):
                assert getattr(objects, question)(path) == getattr(local, question)(path), (question, path)
            if objects.is_folder(path):
                assert sorted(objects.names(path)) == sorted(local.names(path))
                assert walked(objects.below(path)) == walked(local.below(path))


def test_what_is_not_there_is_an_error_of_the_system() -> None:
    """A missing object raises the same operating system errors as a missing file."""
    tree = tree_of("a/b")
    with pytest.raises(FileNotFoundError):
        tree.names("c")
    with pytest.raises(NotADirectoryError):
        tree.names("a/b")
    with pytest.raises(FileNotFoundError):
        tree.size("a/c")
    with pytest.raises(IsADirectoryError):
        tree.size("a")


@pytest.mark.parametrize("path", ["a/b", "./a/b", "a//b", "a/../a/b", "x/../a/b"])
def test_spellings_of_a_path(path: str) -> None:
    """Different spellings of a path in a table refer to the same file."""
    assert tree_of("a/b").find(path) == FileInfo(3, '"a/b"')
    assert tree_of("a/b").canonical_path(path) == "a/b"


@pytest.mark.parametrize("path", ["../a/b", "/a/b", "..", "a\0b"])
def test_nothing_lies_outside(path: str) -> None:
    """No path leads out of the prefix."""
    assert tree_of("a/b").find(path) == "missing"


def test_an_object_with_the_name_of_a_folder_is_refused() -> None:
    """An object with the name of a folder is refused, because a local folder cannot hold both."""
    tree = tree_of("a", "a/b", "c")
    assert tree.find("a") == Folder(is_file_too=True)
    walk = Walk(tree)
    assert [path for path, _ in walk] == ["a/b", "c"]
    assert [(r.reason, r.path) for r in walk.refused] == [("twin", "a")]


def test_one_name_listed_twice_is_one_file() -> None:
    """If an object and a folder marker have the same name, the object with content is the file."""
    tree = ObjectTree.of(ADDRESS, [("a", FileInfo(0, '"mark"')), ("a", FileInfo(7, '"file"'))])
    assert tree.find("a") == FileInfo(7, '"file"')
    assert len(tree) == 1

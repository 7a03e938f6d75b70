"""Recipes: generated copies of ARC and ISLES24, whole and damaged, and recipes with mistakes in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import brim
from brim.cli.flags import ShowingFlags
from brim.cli.recipes_command import recipes as show_recipes
from brim.errors import FilesRefused, InputError, MissingExtra, SourceError
from brim.sources.file_table import FileTable
from brim.sources.recipe import builtin_recipes, expectation_findings, load_recipe, parse_recipe
from brim.sources.recipe_rows import recipe_source
from brim.sources.source_options import SourceOptions
from tests.conftest import random_bytes, write_files
from tests.generators import Layout
from tests.generators.arc import APPARENT_BYTES, PUBLISHED, SESSIONS, make_arc
from tests.generators.isles24 import make_isles24, write_sheet

SMALL = """
name = "small"
rows = "sub-*"
key = ["subject_id"]

[[columns]]
name = "scan"
pattern = "{subject_id}/{subject_id}_scan*.png"
type = "image"

[[columns]]
name = "notes"
pattern = "{subject_id}/notes.txt"
type = "text"
"""
PEOPLE = """
[[tables]]
pattern = "people.csv"
key = { subject_id = "who" }

[tables.columns]
age = { name = "age", type = "int64" }
left = { name = "left_handed", type = "bool" }
"""


def read(layout: Layout | Path, name: str, **options: Any) -> FileTable:
    root = layout.root if isinstance(layout, Layout) else layout
    return recipe_source(str(root), load_recipe(name), SourceOptions(**options))


def found_rows(table: FileTable) -> list[dict[str, Any]]:
    """The rows with file numbers turned into paths again."""
    rows = table.rows.to_pylist()
    for row in rows:
        for name in table.columns:
            cell = row[name]
            if isinstance(cell, list):
                row[name] = [table.files.path(number) for number in cell]
            elif cell is not None:
                row[name] = table.files.path(cell)
    return rows


def failed(table: FileTable, layout: Layout, name: str, tolerance: float | None = None) -> dict[str, str]:
    findings = expectation_findings(table, load_recipe(name), str(layout.root), tolerance)
    return {finding.name: finding.detail for finding in findings if not finding.ok}


def small_people(root: Path, people: str, recipe: str = SMALL + PEOPLE) -> FileTable:
    write_files(root, {"sub-1/sub-1_scan.png": b"png", "people.csv": people.encode()})
    return recipe_source(str(root), parse_recipe(recipe), SourceOptions())


@pytest.fixture
def arc(tmp_path: Path) -> Layout:
    return make_arc(tmp_path / "arc")


def test_arc_rows(arc: Layout) -> None:
    """Every session is a row with the files and values that the generator gave it, in order, and no other."""
    table = read(arc, "arc")
    assert found_rows(table) == arc.rows
    assert table.rows.column_names == list(arc.rows[0])
    assert {name: str(table.rows.schema.field(name).type) for name in ("age_at_stroke", "wab_aq", "sex")} == {
        "age_at_stroke": "float",
        "wab_aq": "float",
        "sex": "string",
    }
    assert {name for name, column in table.columns.items() if column.is_list} == {"bold", "dwi", "sbref"}
    assert {column.kind for column in table.columns.values()} == {"nifti"}
    assert sorted(table.files.paths.to_pylist()) == sorted(arc.contents)
    assert not table.refused


def test_order_is_natural(arc: Layout) -> None:
    """Run 2 comes before run 10, and day 9 before day 11."""
    rows = found_rows(read(arc, "arc"))
    runs = next(row["bold"] for row in rows if len(row["bold"]) > 1)
    assert ["run-2_" in path for path in runs] == [True, False]
    days = [int(row["session_id"][4:]) for row in rows if row["subject_id"] == rows[0]["subject_id"]]
    assert days == sorted(days)
    assert min(days) < 10 < max(days)


def test_arc_warnings(arc: Layout) -> None:
    """Subjects listed without a folder, or present without being listed, and files of no row are told."""
    arc.write("derivatives/lesion_masks/sub-M2001/ses-77/anat/sub-M2001_ses-77_desc-lesion_mask.nii.gz")
    unlisted, absent, stray = (
        "are not listed in participants.tsv",
        "1 row(s) of participants.tsv have no folder, for example sub-M9999",
        "1 file(s) look like 'lesion' and belong to no row: derivatives/lesion_masks/sub-M2001/ses-77/",
    )
    warnings = "\n".join(read(arc, "arc").warnings)
    assert all(said in warnings for said in (unlisted, absent, stray)), warnings


def test_isles24_rows(tmp_path: Path) -> None:
    """Every subject is a row with its images, and what its spreadsheets say."""
    layout = make_isles24(tmp_path / "isles")
    table = read(layout, "isles24")
    assert found_rows(table) == layout.rows
    assert sorted(table.files.paths.to_pylist()) == sorted(layout.contents)
    assert not table.refused
    assert not table.warnings


def test_published_numbers_hold(tmp_path: Path) -> None:
    """A whole copy of ISLES24 has all that its recipe expects."""
    layout = make_isles24(tmp_path / "isles", subjects=149)
    table = read(layout, "isles24")
    assert failed(table, layout, "isles24", tolerance=0.0) == {}
    assert layout.count("lvo_mask") == 100


def test_wrong_counts_are_named(arc: Layout) -> None:
    """A copy that is too small fails every number, each with what is there and what was expected."""
    problems = failed(read(arc, "arc"), arc, "arc")
    assert list(problems) == ["rows", "distinct subject_id", *(f"rows with {name}" for name in PUBLISHED)]
    assert problems["rows"] == "24; expected 902, 812 to 992 with a tolerance of 0.1"
    assert problems["rows with lesion"].startswith(f"{arc.count('lesion')}; expected 228 to 230")


def test_numbers_of_a_part_are_not_compared(arc: Layout) -> None:
    """A pilot is not measured by the numbers of the whole, and the report says so."""
    findings = expectation_findings(read(arc, "arc", limit=3), load_recipe("arc"), str(arc.root), None)
    assert findings[-1].detail == "not compared: the source was read with --limit"
    assert all(finding.ok for finding in findings)


def test_full_arc_whole_and_damaged(tmp_path: Path) -> None:
    """All 902 sessions, 273 GB apparent, are read, checked and planned in 20 s and 300 MB; then damage is found."""
    arc = make_arc(tmp_path / "arc", sessions=SESSIONS, sparse_sizes=True)
    assert arc.total_bytes == APPARENT_BYTES
    assert {name: arc.count(name) for name in PUBLISHED} == PUBLISHED
    code = (
        "import sys, json, threading, time\n"
        "from brim.memory.meter import process_bytes\n"
        "import os\n"
        "peak, done = [0], threading.Event()\n"
        "def sample():\n"
        "    while not done.wait(0.005): peak[0] = max(peak[0], process_bytes(os.getpid()))\n"
        "thread = threading.Thread(target=sample); thread.start(); start = time.monotonic()\n"
        "import brim\n"
        "from brim.sources.recipe import load_recipe, expectation_findings\n"
        "from brim.sources.recipe_rows import recipe_source\n"
        "from brim.sources.source_options import SourceOptions\n"
        "recipe = load_recipe('arc'); table = recipe_source(sys.argv[1], recipe, SourceOptions())\n"
        "bad = [f.name for f in expectation_findings(table, recipe, sys.argv[1], 0.0) if not f.ok]\n"
        "plan = str(brim.plan(table))\n"
        "seconds = time.monotonic() - start; done.set(); thread.join()\n"
        "print(json.dumps({'seconds': seconds, 'peak': peak[0], 'rows': len(table), 'bad': bad, 'plan': plan,\n"
        "    'bytes': int(table.files.sizes.sum()), 'files': len(table.files)}))\n"
    )
    command = [sys.executable, "-c", code, str(arc.root)]
    seen = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert seen["seconds"] < 20
    assert seen["peak"] < 300_000_000
    assert (seen["rows"], seen["files"], seen["bytes"]) == (902, len(arc.contents), APPARENT_BYTES)
    assert seen["bad"] == []
    assert "273 GB" in seen["plan"]

    for path in [row["lesion"] for row in arc.rows if row["lesion"]][:30]:
        (arc.root / path).unlink()
    (arc.root / "participants.json").unlink()
    problems = failed(read(arc, "arc"), arc, "arc")
    assert problems["file participants.json"] == "is missing"
    assert problems["rows with lesion"].startswith("198; expected 228 to 230")
    assert len(problems) == 2


def test_two_files_where_one_is_expected(arc: Layout) -> None:
    """Two T1w images of a session are an error that names the row, both files and the ways out."""
    row = next(row for row in arc.rows if row["t1w"])
    second = arc.write(row["t1w"].replace("_T1w", "_run-2_T1w"))
    with pytest.raises(SourceError) as caught:
        read(arc, "arc")
    words = [row["t1w"], second, f"subject_id={row['subject_id']} session_id={row['session_id']}"]
    assert all(word in caught.value.message for word in words)
    assert "list = true" in caught.value.hint
    assert caught.value.facts["cells"][0]["paths"] == sorted([row["t1w"], second])
    table = read(arc, "arc", exclude=("*run-2_T1w*",))
    assert found_rows(table) == arc.rows


def test_damaged_files_are_refused_by_name(arc: Layout, tmp_path: Path) -> None:
    """Empty files, annex links and annex pointers are refused by name before anything is written."""
    images = [row["t1w"] for row in arc.rows if row["t1w"]]
    empty, link, pointer = images[0], images[1], next(row["bold"][0] for row in arc.rows if row["bold"])
    (arc.root / empty).write_bytes(b"")
    (arc.root / link).unlink()
    (arc.root / link).symlink_to("../../../.git/annex/objects/aa/bb/MD5E-s1--1.nii.gz/MD5E-s1--1.nii.gz")
    (arc.root / pointer).write_text("/annex/objects/MD5E-s123--0123456789abcdef.nii.gz\n")
    table = read(arc, "arc")
    with pytest.raises(FilesRefused) as caught:
        brim.build(table, tmp_path / "out")
    problems = {(p["reason"], p["path"]) for p in caught.value.facts["problems"]}
    assert problems == {("empty", empty), ("annex", link), ("annex", pointer)}
    assert "datalad get" in caught.value.message
    assert not (tmp_path / "out" / "data").exists()


def test_an_unfetched_clone_still_has_its_counts(arc: Layout) -> None:
    """Annex links whose content is elsewhere count as there, so that only the fetch is asked for."""
    for path in arc.contents:
        (arc.root / path).unlink()
        (arc.root / path).symlink_to("../.git/annex/objects/x/y/z")
    table = read(arc, "arc")
    findings = expectation_findings(table, load_recipe("arc"), str(arc.root), None)
    counts = {f.name.removeprefix("rows with "): int(f.detail.split(";")[0]) for f in findings if "with" in f.name}
    assert counts == {name: arc.count(name) for name in PUBLISHED}
    assert {r.path for r in table.refused} == set(arc.contents)
    assert {r.reason for r in table.refused} == {"annex"}


@pytest.mark.parametrize("damage", ["missing", "annex", "empty"])
def test_participants_that_cannot_be_read(arc: Layout, tmp_path: Path, damage: str) -> None:
    """A participants.tsv that is absent, unfetched or empty is found, named, and stops the build."""
    participants = arc.root / "participants.tsv"
    participants.unlink()
    if damage == "annex":
        participants.symlink_to(".git/annex/objects/x/y/z")
    elif damage == "empty":
        participants.touch()
    table = read(arc, "arc")
    assert [(r.reason, r.path) for r in table.refused] == [(damage, "participants.tsv")]
    assert table.rows.column("wab_aq").null_count == len(table)
    assert "file participants.tsv" in failed(table, arc, "arc")
    with pytest.raises(FilesRefused, match=r"participants\.tsv"):
        brim.build(table, tmp_path / "out")


def test_selection(arc: Layout) -> None:
    """include and exclude choose files, rows left without files go, limit counts what is left, split names it."""
    first = arc.rows[0]["subject_id"]
    table = read(arc, "arc", exclude=(f"{first}/*", "derivatives/*"), limit=4, split="test")
    rows = [row | {"lesion": None} for row in arc.rows if row["subject_id"] != first]
    assert found_rows(table) == [row for row in rows if row["t1w"] or row["bold"] or row["dwi"]][:4]
    assert [(s.name, s.start, s.stop) for s in table.splits] == [("test", 0, 4)]
    only = read(arc, "arc", include=("*_FLAIR.nii.gz",))
    assert len(only) == arc.count("flair") == only.file_count()
    with pytest.raises(SourceError, match="No row"):
        read(arc, "arc", include=("nothing",))
    with pytest.raises(InputError, match="--drop"):
        read(arc, "arc", drop=("sex",))


def test_round_trip(arc: Layout, tmp_path: Path) -> None:
    """What is built holds every file byte for byte under its path, and every value."""
    brim.build(read(arc, "arc"), tmp_path / "out", num_shards=3)
    rows = [row for shard in sorted((tmp_path / "out").rglob("*.parquet")) for row in pq.read_table(shard).to_pylist()]
    assert len(rows) == len(arc.rows)
    seen = {}
    for row, wanted in zip(rows, arc.rows, strict=True):
        for name, cell in wanted.items():
            if name not in PUBLISHED:
                assert row[name] == cell
                continue
            files = row[name] if isinstance(cell, list) else [row[name]] if row[name] else []
            assert [file["path"] for file in files] == (cell if isinstance(cell, list) else [cell] if cell else [])
            seen.update({file["path"]: file["bytes"] for file in files})
    assert seen == arc.contents


def test_texts_and_literal_placeholders(tmp_path: Path) -> None:
    """A text column is the file's content as it is, null where there is none; an ordinary column for readers."""
    files = {"sub-2/sub-2_scan.png": b"b", "sub-10/sub-10_scan.png": b"c", "sub-10/other_scan.png": b"no"}
    write_files(tmp_path, files | {"sub-2/notes.txt": "línea\r\n".encode(), "sub-3.txt": b"not a folder"})
    table = recipe_source(str(tmp_path), parse_recipe(SMALL), SourceOptions())
    assert found_rows(table) == [
        {"subject_id": "sub-2", "scan": "sub-2/sub-2_scan.png", "notes": "línea\r\n"},
        {"subject_id": "sub-10", "scan": "sub-10/sub-10_scan.png", "notes": None},
    ]
    assert list(table.columns) == ["scan"]
    assert table.features is not None
    assert table.features["notes"] == {"dtype": "string", "_type": "Value"}
    write_files(tmp_path, {"sub-10/notes.txt": b"\xff\xfe"})
    with pytest.raises(SourceError, match=r"'sub-10/notes\.txt' is not UTF-8"):
        recipe_source(str(tmp_path), parse_recipe(SMALL), SourceOptions())
    (tmp_path / "sub-10/notes.txt").write_text("/annex/objects/MD5E-s5--abc.txt\n")
    table = recipe_source(str(tmp_path), parse_recipe(SMALL), SourceOptions())
    assert [(r.reason, r.path) for r in table.refused] == [("annex", "sub-10/notes.txt")]


@pytest.mark.parametrize(
    ("people", "words"),
    [
        ("who,age,left\nsub-1,old,1\n", ["'people.csv', row 2", "age is 'old'", "not a number"]),
        ("who,age,left\nsub-1,7.5,1\n", ["row 2", "'7.5'", "whole number"]),
        ("who,age,left\nsub-1,99999999999999999999,1\n", ["whole number of 64 bits"]),
        ("who,age,left\nsub-1,nan,1\n", ["'nan'", "not a number"]),
        ("who,age,left\nsub-1,7,maybe\n", ["left is 'maybe'", "true or false"]),
        ("who,age\nsub-1,7\n", ["has no column 'left'", "who, age"]),
        ("who,age,left\nsub-1,7,1\n\nsub-1,8,1\n", ["lists sub-1 twice: rows 2 and 4"]),
    ],
)
def test_bad_tables(tmp_path: Path, people: str, words: list[str]) -> None:
    """A table's mistake is an error that names the file, the row and the value."""
    with pytest.raises(SourceError) as caught:
        small_people(tmp_path, people)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("line", "values"),
    [("7,yes", (7, True)), ("7.0,FALSE", (7, False)), ("N/A,", (None, None)), ("+7", (7, None)), ("007,0", (7, False))],
)
def test_good_values(tmp_path: Path, line: str, values: tuple[object, object]) -> None:
    """Values are read in their type; n/a, nothing and a line that ends early are null."""
    row = small_people(tmp_path, f"\ufeffwho,AGE ,left\r\nsub-1,{line}\r\n").rows.to_pylist()[0]
    assert (row["age"], row["left_handed"]) == values


def test_bad_spreadsheets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spreadsheet with a wrong value, a second row or no openpyxl to read it is named; an empty one refused."""
    layout = make_isles24(tmp_path / "isles", subjects=2)
    path = "train/phenotype/sub-stroke0002/ses-02/sub-stroke0002_ses-02_outcome.xlsx"
    write_sheet(layout.root / path, {"mRS 3 months": "dead"})
    with pytest.raises(SourceError, match=r"stroke0002_ses-02_outcome\.xlsx', row 2: mRS 3 months is 'dead'"):
        read(layout, "isles24")
    write_sheet(layout.root / path, {"mRS 3 months": 1}, {"mRS 3 months": 2})
    with pytest.raises(SourceError, match="should have a single row and has more: rows 2 and 3"):
        read(layout, "isles24")
    (layout.root / path).write_bytes(random_bytes(2000))
    with pytest.raises(SourceError, match=r"outcome\.xlsx' cannot be read: File is not a zip file"):
        read(layout, "isles24")
    (layout.root / path).write_bytes(b"")
    assert [(r.reason, r.path) for r in read(layout, "isles24").refused] == [("empty", path)]
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(MissingExtra) as caught:
        read(layout, "isles24")
    assert "pip install 'brim[neuro]'" in caught.value.hint


def test_wrong_folders(tmp_path: Path) -> None:
    """A folder without the recipe's root, or without a row, is an error that says what was looked for."""
    write_files(tmp_path, {"something/else.txt": b"x"})
    with pytest.raises(SourceError, match="reads the folder 'train'"):
        read(tmp_path, "isles24")
    with pytest.raises(SourceError, match=r"no folder matches sub-\*/ses-\*"):
        read(tmp_path, "arc")


def test_unreadable_folder(arc: Layout) -> None:
    """A folder that cannot be listed, here a link to itself, is refused by name."""
    row = next(row for row in arc.rows if not row["bold"])
    folder = f"{row['subject_id']}/{row['session_id']}/func"
    (arc.root / folder).symlink_to("func")
    assert [(r.reason, r.path) for r in read(arc, "arc").refused] == [("unreadable", folder + "/")]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('key = ["subject_id"]', 'key = ["subject_id"', ["not valid TOML", "line"]),
        ('type = "image"', 'typ = "image"', ["columns[0]", "unknown key 'typ'", "name, pattern, type, list"]),
        ('type = "image"', 'type = "picture"', ["columns[0]: type must be one of nifti, image", "'picture'"]),
        ('type = "image"', 'type = "image"\nlist = "yes"', ["list must be true or false"]),
        ('type = "image"\n', "", ["columns[0]: type is missing"]),
        ("{subject_id}/notes", "{subject}/notes", ["columns[1]: pattern", "{subject} stands for nothing"]),
        ("{subject_id}/notes", "{subject_id/notes", ["a brace stands for nothing"]),
        ("{subject_id}/notes", "../{subject_id}/notes", ["must be a relative path"]),
        ("{subject_id}/notes", "**/notes", ["only * and ?"]),
        ('rows = "sub-*"', 'rows = "sub-*/ses-*"', ["2 part(s) with a *, but key names 1"]),
        ('rows = "sub-*"', "rows = 3", ["rows must be a list of texts, not 3"]),
        ('name = "notes"', 'name = "scan"', ["two columns are named 'scan'"]),
        ('type = "image"', 'type = "text"', ["no column of files"]),
        ("people.csv", "people.ods", ["tables[0]: pattern must end in .csv"]),
        ('key = { subject_id = "who" }', "", ["tables[0]", "key does not say how to join"]),
        ('{ subject_id = "who" }', '{ person = "who" }', ["tables[0]: key: unknown key 'person'"]),
        ('"int64"', '"int"', ["columns.age: type must be one of int64, float32"]),
        ("[expect]", "[expect]\nrow = 1", ["expect: unknown key 'row'"]),
        ("[expect]", "[expect]\nrows = [3, 1]", ["rows must be a number or [lowest, highest]"]),
        ("[expect]", "[expect]\ntolerance = 10", ["tolerance must be a number from 0"]),
        ("[expect]", "[expect.counts]\nscam = 1", ["expect.counts: unknown key 'scam'", "scan, notes, age"]),
    ],
)
def test_mistakes_in_recipes(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    """A recipe with a mistake is an error that names the place and what is allowed there."""
    whole = SMALL + PEOPLE + "[expect]\n"
    assert parse_recipe(whole).name == "small"
    assert old in whole
    path = tmp_path / "mine.toml"
    path.write_text(whole.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        load_recipe(str(path))
    assert "mine.toml" in caught.value.message
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_unknown_recipes(tmp_path: Path) -> None:
    """An unknown name lists the built-in recipes; an absent file is said to be absent."""
    with pytest.raises(InputError, match=r"no recipe 'ark'.*arc, isles24"):
        load_recipe("ark")
    with pytest.raises(InputError, match="No such file"):
        load_recipe(str(tmp_path / "absent.toml"))
    assert [recipe.name for recipe in builtin_recipes()] == ["arc", "isles24"]


def test_the_verb_lists_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """`brim recipes` tells what each recipe takes and expects; with a name it prints the recipe itself."""
    show_recipes(ShowingFlags())
    said = capsys.readouterr().out
    words = ["OpenNeuro ds004884", "bold (list)", "participants.tsv", "lesion 228 to 230", "not verified", "isles24"]
    assert all(word in said for word in words), said
    show_recipes(ShowingFlags(), "isles24")
    assert parse_recipe(capsys.readouterr().out) == load_recipe("isles24")
    show_recipes(ShowingFlags(json=True))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["event"], line["name"], line["expect"]["rows"]) for line in lines] == [
        ("recipe", "arc", [902, 902]),
        ("recipe", "isles24", [149, 149]),
    ]


def test_documented_recipe_works(tmp_path: Path) -> None:
    """The recipe of docs/recipes.md is whole and reads the folder drawn beside it."""
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    recipe = parse_recipe(page.split("```toml\n")[1].split("```")[0])
    scans = {f"scans/p{i}/p{i}_{kind}.png": b"x" for i in (1, 2) for kind in ("front", "side-1", "side-2")}
    people = "patient,Age,Smoker\np1,61,yes\np2,n/a,no\n"
    write_files(tmp_path, scans | {"scans/p1/report.txt": b"fine", "scans/people.csv": people.encode()})
    table = recipe_source(str(tmp_path), recipe, SourceOptions())
    rows = found_rows(table)
    assert [row["age"] for row in rows] == [61, None]
    assert rows[0]["side"] == ["scans/p1/p1_side-1.png", "scans/p1/p1_side-2.png"]
    assert [row["report"] for row in rows] == ["fine", None]
    assert all(finding.ok for finding in expectation_findings(table, recipe, str(tmp_path), None))

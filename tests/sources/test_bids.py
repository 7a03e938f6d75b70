"""BIDS datasets are read into the rows and columns that their files define."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import datasets
import nibabel
import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.conftest import tree_digest, write_files
from tests.forked import brim
from tests.generators import bids


def build(tmp_path: Path, shape: str, *options: str) -> tuple[Path, list[dict[str, Any]], str]:
    """Build and verify a generated dataset; return its source, the rows and the standard error."""
    source = write_files(tmp_path / "source", bids.SHAPES[shape]())
    out = tmp_path / "out"
    result = brim("build", source, out, *options)
    brim("verify", out, source)
    return source, pq.read_table(out / "data").to_pylist(), result.stderr


def test_rows_are_sessions(tmp_path: Path) -> None:
    """Each session folder is a row, in order of the folders. The session is null for subjects without sessions."""
    _, rows, _ = build(tmp_path, "sessions")
    keys = [(row["subject_id"], row["session_id"]) for row in rows]
    assert keys == [("sub-01", "ses-a"), ("sub-01", "ses-b"), ("sub-02", None)]
    assert rows[2]["bold"] == []
    assert rows[2]["dwi"] is None


def test_files_are_those_on_disk(tmp_path: Path) -> None:
    """Every image is in the row of its folder with all its bytes. Lists are sorted by entities: run-2 before run-10."""
    source, rows, _ = build(tmp_path, "sessions")
    for row in rows:
        folder = source / row["subject_id"] / (row["session_id"] or "")
        runs = [re.search(r"run-(\d+)", cell["path"])[1] for cell in row["bold"]]  # type: ignore[index]
        assert runs == ([] if row["session_id"] is None else ["1", "2", "10"])
        assert [entity["run"] for entity in row["bold_entities"]] == runs
        assert all(entity["task"] == "rest" for entity in row["bold_entities"])
        for cell in [row["t1w"], *row["bold"], *([row["dwi"]] if row["dwi"] else [])]:
            assert cell["bytes"] == (source / cell["path"]).read_bytes()
            assert (source / cell["path"]).is_relative_to(folder)
    packaged = {cell["path"] for row in rows for cell in [row["t1w"], *row["bold"], row["dwi"]] if cell}
    on_disk = {str(path.relative_to(source)) for path in source.rglob("sub-*/**/*.nii.gz")}
    assert packaged == on_disk


def test_participants_and_sessions_are_joined(tmp_path: Path) -> None:
    """Values of participants and sessions are joined: typed numbers, null for n/a, text for numbers with leading zeros.

    BOM and CRLF make no difference.
    """
    _, rows, output = build(tmp_path, "sessions")
    assert [row["age"] for row in rows] == [34, 34, None]
    assert [row["site"] for row in rows] == ["007", "007", "008"]
    assert [row["score"] for row in rows] == [1.5, 1.5, 2.0]
    assert [row["dose"] for row in rows] == [1, 2, None]
    assert "1 of participants.tsv have no folder, for example sub-99" in output


def test_scans_are_joined_per_file(tmp_path: Path) -> None:
    """Values of scans.tsv are joined to their file, without the date of acquisition."""
    _, rows, _ = build(tmp_path, "sessions")
    assert [row["t1w_scans"] for row in rows] == [{"quality": 3}, {"quality": 4}, {"quality": None}]
    assert "bold_scans" not in rows[0]


def test_sidecars_follow_the_inheritance_principle(tmp_path: Path) -> None:
    """JSON, gradients and events apply to all images below their folder, and the nearest file wins.

    Private keys are left out.
    """
    _, rows, output = build(tmp_path, "sessions")
    first, second, tenth = (json.loads(text) for text in rows[0]["bold_json"])
    assert first == tenth == {"RepetitionTime": 2.0, "TaskName": "rest"}
    assert second == {"RepetitionTime": 3.0, "TaskName": "rest", "EchoTime": 0.03}
    assert rows[0]["bold_events"] == ["onset\tduration\n0\t1\n"] * 2 + ["onset\tduration\n9\t9\n"]
    assert rows[1]["dwi_bval"] == "0 1000\n"
    assert rows[1]["dwi_bvec"].splitlines() == ["0 1", "0 0", "0 0"]
    assert "private fields were left out" in output
    for row in rows:
        assert not re.search(r"InstitutionName|PatientName|AcquisitionDateTime", json.dumps(row, default=repr))
        assert "acq_time" not in row


def test_sidecars_full_and_none(tmp_path: Path) -> None:
    """`--sidecars full` keeps every field, and `--sidecars none` leaves out the parallel columns."""
    _, rows, output = build(tmp_path, "sessions", "--sidecars", "full")
    assert json.loads(rows[0]["bold_json"][1])["PatientName"] == "Jo"
    assert rows[0]["acq_time"] == "2020-01-01"
    assert rows[0]["t1w_scans"]["acq_time"].startswith("2020")
    assert "private" not in output
    (tmp_path / "second").mkdir()
    _, rows, _ = build(tmp_path / "second", "sessions", "--sidecars", "none")
    assert not [name for name in rows[0] if name.endswith(("_json", "_events", "_bval"))]


def test_rows_by_subject_and_by_file(tmp_path: Path) -> None:
    """`--rows subject` puts all sessions of a subject into one row, and `--rows file` has one file per row."""
    source, rows, _ = build(tmp_path, "sessions", "--rows", "subject")
    assert [row["subject_id"] for row in rows] == ["sub-01", "sub-02"]
    assert [cell["path"].split("/")[1] for cell in rows[0]["t1w"]] == ["ses-a", "ses-b"]
    assert len(rows[0]["bold"]) == 6
    (tmp_path / "second").mkdir()
    _, rows, _ = build(tmp_path / "second", "sessions", "--rows", "file")
    assert len(rows) == len(list(source.rglob("sub-*/**/*.nii.gz")))
    assert {row["suffix"] for row in rows} == {"T1w", "bold", "dwi"}
    assert all(row["file"]["path"].startswith(row["subject_id"]) for row in rows)
    assert [row["file_entities"]["run"] for row in rows if row["suffix"] == "bold"] == ["1", "2", "10"] * 2


def test_recordings_of_several_files_and_folders(tmp_path: Path) -> None:
    """Files of a recording become columns by extension. A folder is packed as a reproducible tar, which unpacks."""
    source, rows, output = build(tmp_path, "eeg")
    assert {"eeg_eeg", "eeg_vhdr", "eeg_vmrk", "meg", "channels", "coordsystem"} <= set(rows[0])
    assert rows[0]["eeg_vhdr"]["bytes"] == b"sub-1/eeg/sub-1_task-x_eeg.vhdr"
    assert rows[0]["eeg_vhdr_events"] == "onset\n1\n"
    assert json.loads(rows[0]["eeg_eeg_json"]) == {"SamplingFrequency": 250}
    assert rows[1]["channels"] == "name\nCz\n"
    assert rows[1]["meg"]["path"] == "sub-2/meg/sub-2_task-x_meg.ds/"
    with tarfile.open(fileobj=io.BytesIO(rows[1]["meg"]["bytes"])) as archive:
        names = sorted(archive.getnames())
        assert names == [".hidden", "BadChannels", "hz.ds/params.dsc", "sub-2.meg4"]
        assert archive.getmember("sub-2.meg4").mtime == 0
    assert "_photo" in output
    assert "_headshape" in output
    assert "photo" not in rows[0]
    brim("unpack", tmp_path / "out", tmp_path / "back")
    back, existing = tree_digest(tmp_path / "back"), tree_digest(source)
    assert back.items() <= existing.items()
    assert {p for p in existing if "meg.ds" in p or ("_eeg." in p and not p.endswith(".json"))} == set(back)


def test_a_suffix_in_two_datatypes_and_cifti(tmp_path: Path) -> None:
    """Column names include the datatype where the suffix alone is ambiguous.

    CIFTI files have the plain file type, and .nii and .nii.gz share a column.
    """
    _, rows, output = build(tmp_path, "two_datatypes")
    features = datasets.load_dataset(str(tmp_path / "out"), split="train").features
    assert {"fmap_m0scan", "perf_m0scan", "bold_nifti", "bold_dtseries_nii"} <= set(features)
    assert features["bold_nifti"] == datasets.Nifti()
    assert "bytes" in features["bold_dtseries_nii"]
    entities = [(e["echo"], e["part"]) for e in rows[0]["megre_entities"]]
    assert entities == [("1", "mag"), ("1", "phase"), ("2", "mag")]
    assert "notes.txt" in output


def test_what_lies_aside(tmp_path: Path) -> None:
    """.bidsignore is applied, derivatives are included only on request, and files that are left out are reported."""
    _, rows, output = build(tmp_path, "aside")
    assert rows[0]["t1w"]["path"] == "sub-1/anat/sub-1_T1w.nii.gz"
    for text in ("sourcedata/", "code/", "stimuli/", "derivatives/masks", "phenotype/", ".bidsignore"):
        assert text in output
    (tmp_path / "second").mkdir()
    options = ["--derivatives", "all", "--phenotype", "--no-bidsignore"]
    _, rows, _ = build(tmp_path / "second", "aside", *options)
    assert rows[0]["masks_mask"]["path"].startswith("derivatives/masks/")
    assert rows[0]["described_mask"]["path"].startswith("derivatives/described/")
    assert len(rows[0]["t1w"]) == 2
    assert rows[0]["iq_score"] == 120
    source = tmp_path / "second" / "source"
    assert "no folder derivatives/nope" in brim("plan", source, "--derivatives", "nope", check=2).stderr


def test_selection(tmp_path: Path) -> None:
    """--subjects, --sessions, --suffixes and --limit select rows and columns. Prefixes like sub- are optional."""
    source = write_files(tmp_path / "source", bids.sessions())

    def facts(*options: str) -> dict[str, Any]:
        return json.loads(brim("plan", source, "--json", *options).stdout)

    assert facts("--subjects", "02")["rows"] == 1
    assert facts("--subjects", "sub-01", "--sessions", "b")["rows"] == 1
    assert list(facts("--suffixes", "t1w")["columns"]) == ["t1w"]
    assert facts("--limit", "2")["rows"] == 2
    assert "names sub-77" in brim("plan", source, "--subjects", "77", "--subjects", "01", check=2).stderr
    assert "no file has" in brim("plan", source, "--suffixes", "bodl", check=2).stderr


def test_a_pilot_and_the_whole_agree(tmp_path: Path) -> None:
    """A saved recipe fixes the columns and which of them are lists, so a subset has the schema of the whole dataset."""
    source = write_files(tmp_path / "source", bids.sessions())
    recipe = tmp_path / "columns.toml"
    brim("plan", source, "--save-recipe", recipe)
    brim("build", source, tmp_path / "pilot", "--subjects", "02", "--recipe", recipe)
    brim("build", source, tmp_path / "whole", "--recipe", recipe)
    brim("build", source, tmp_path / "plain")
    pilot, whole = (pq.read_schema(next((tmp_path / n / "data").iterdir())) for n in ("pilot", "whole"))
    assert pilot.equals(whole)
    assert tree_digest(tmp_path / "whole" / "data") == tree_digest(tmp_path / "plain" / "data")
    brim("verify", tmp_path / "whole", source)
    write_files(source, {"sub-02/anat/sub-02_run-2_T1w.nii.gz": b"second"})
    failed = brim("build", source, tmp_path / "more", "--recipe", recipe, check=2).stderr
    assert "sub-02_T1w.nii.gz" in failed
    assert "sub-02_run-2_T1w.nii.gz" in failed


def test_no_subjects_is_an_error(tmp_path: Path) -> None:
    """An atlas without subjects is refused with a suggestion for packaging it as files."""
    source = write_files(tmp_path / "atlas", bids.base() | bids.files("tpl-MNI/tpl-MNI_dseg.nii.gz"))
    assert "no subjects" in brim("build", source, tmp_path / "out", check=2).stderr
    brim("build", source, tmp_path / "out", "--recipe", "files")


@pytest.mark.parametrize("damage", ["lfs", "annex link", "empty", "broken json", "broken tsv"])
def test_damage_in_a_dataset(tmp_path: Path, damage: str) -> None:
    """Pointers and empty images are refused by name. A broken sidecar is reported without stopping the build."""
    source = write_files(tmp_path / "source", bids.sessions())
    victim = source / "sub-02/anat/sub-02_T1w.nii.gz"
    code, says = 2, "sub-02_T1w.nii.gz"
    if damage == "lfs":
        victim.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    elif damage == "annex link":
        victim.unlink()
        victim.symlink_to("../../.git/annex/objects/aa/bb/MD5E-s1--x.nii.gz")
    elif damage == "empty":
        victim.write_bytes(b"")
    elif damage == "broken json":
        (source / "task-rest_bold.json").write_bytes(b"{nope")
        code, says = 0, "task-rest_bold.json"
    else:
        (source / "participants.tsv").write_bytes(b"participant_id\tage\nsub-01\t1\t2\t3\n")
        says = "participants.tsv line 2"
    assert says in brim("build", source, tmp_path / "out", check=code).stderr


def test_round_trip_with_datasets(tmp_path: Path) -> None:
    """load_dataset decodes the same images as nibabel, and the card contains the credits."""
    source, _, _ = build(tmp_path, "sessions")
    loaded = datasets.load_dataset(str(tmp_path / "out"), split="train")
    image = nibabel.load(source / "sub-01/ses-b/func/sub-01_ses-b_task-rest_run-10_bold.nii.gz")
    assert np.array_equal(loaded[1]["bold"][2].get_fdata(), image.get_fdata())
    card = (tmp_path / "out" / "README.md").read_text()
    for text in ("A study of brims", "Ada L.; Charles B.", "license: cc0-1.0", "doi:10.0/brim", "Cite us.", "A grant"):
        assert text in card
    assert "Age in years" in card
    brim("unpack", tmp_path / "out", tmp_path / "back")
    images = {name: digest for name, digest in tree_digest(source).items() if name.endswith(".nii.gz")}
    assert tree_digest(tmp_path / "back") == images


def small(tmp_path: Path, extra: dict[str, bytes]) -> Path:
    """Create a dataset of two subjects with one image each and the specified extra files."""
    tree = bids.base() | bids.files("sub-01/anat/sub-01_T1w.nii.gz", "sub-02/anat/sub-02_T1w.nii.gz")
    return write_files(tmp_path / "small", tree | extra)


def rows_of(source: Path, out: Path, *options: str) -> list[dict[str, Any]]:
    brim("build", source, out, *options)
    brim("verify", out, source)
    return pq.read_table(out / "data").to_pylist()


def test_a_folder_that_only_looks_like_bids(tmp_path: Path) -> None:
    """A single folder named sub-* does not make a BIDS dataset, and a dataset with only empty subjects is an error."""
    plain = write_files(tmp_path / "plain", {"sub-marine/a.jpg": b"a", "cars/b.jpg": b"b", "c.jpg": b"c"})
    assert len(rows_of(plain, tmp_path / "out")) == 3
    empty = write_files(tmp_path / "empty", bids.base())
    (empty / "sub-01" / "anat").mkdir(parents=True)
    assert "BIDS name" in brim("build", empty, tmp_path / "none", check=2).stderr


def test_tables_with_mistakes(tmp_path: Path) -> None:
    """Duplicate columns and pointers in participants.tsv are errors. Long numbers stay text, and names distinct."""
    source = small(tmp_path, {"participants.tsv": b"participant_id\tage\tage\nsub-01\t1\t2\n"})
    assert "two columns named 'age'" in brim("plan", source, check=2).stderr
    (source / "participants.tsv").write_text(
        "participant_id\tid\tt1w\tparticipant_t1w\nsub-01\t99999999999999999999\t1\t2\n"
    )
    row = rows_of(source, tmp_path / "out")[0]
    assert row["id"] == "99999999999999999999"
    assert {row["participant_t1w"], row["participant_participant_t1w"]} == {1, 2}
    (source / "participants.tsv").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull" in brim("plan", source, check=2).stderr
    (source / "participants.tsv").unlink()
    (source / "participants.tsv").symlink_to(".git/annex/objects/x/y/z.tsv")
    assert "participants.tsv" in brim("plan", source, check=2).stderr


def test_derivatives_without_sessions_have_a_row(tmp_path: Path) -> None:
    """Derivatives of several sessions are in a separate row, with the sidecars of their pipeline."""
    tree = bids.base() | bids.files(
        "sub-01/ses-1/anat/sub-01_ses-1_T1w.nii.gz",
        "derivatives/fp/sub-01/anat/sub-01_desc-preproc_T1w.nii.gz",
        "derivatives/fp/sub-01/ses-1/func/sub-01_ses-1_task-a_bold.nii.gz",
        "derivatives/sub-01/anat/sub-01_mask.nii.gz",
    )
    tree |= {"task-a_bold.json": b'{"Raw": 1}', "derivatives/fp/task-a_bold.json": b'{"SkullStripped": true}'}
    rows = rows_of(write_files(tmp_path / "source", tree), tmp_path / "out", "--derivatives", "fp")
    assert [row["session_id"] for row in rows] == [None, "ses-1"]
    assert rows[0]["fp_t1w"]["path"].startswith("derivatives/fp/")
    assert json.loads(rows[1]["fp_bold_json"]) == {"SkullStripped": True}
    assert "derivatives_mask" not in rows[0]


def test_privacy_in_every_way_of_reading(tmp_path: Path) -> None:
    """Private columns are left out with every option, also in phenotype tables.

    The column `candidate` is not private, although its name contains `date`.
    """
    source = small(
        tmp_path,
        {
            "phenotype/demo.tsv": b"participant_id\tPatientName\tdate_of_birth\tcandidate\nsub-01\tJo\t1990\tyes\n",
            "sub-01/sub-01_scans.tsv": b"filename\tacq_time\n./anat/sub-01_T1w.nii.gz\t2020-01-01\n",
        },
    )
    for number, options in enumerate(([], ["--sidecars", "none"])):
        row = rows_of(source, tmp_path / f"out{number}", "--phenotype", *options)[0]
        assert row["demo_candidate"] == "yes"
        assert not re.search(r"Jo|1990|2020-01-01", json.dumps(row, default=repr))


def test_events_without_a_recording_are_kept(tmp_path: Path) -> None:
    """Events without an image and tables above the datatypes get separate columns."""
    source = small(
        tmp_path,
        {
            "sub-01/func/sub-01_task-a_bold.nii.gz": b"bold",
            "sub-01/func/sub-01_task-a_events.tsv": b"a",
            "sub-01/beh/sub-01_task-b_events.tsv": b"b",
            "sub-01/sub-01_channels.tsv": b"c",
        },
    )
    row = rows_of(source, tmp_path / "out")[0]
    assert row["bold_events"] == "a"
    assert row["events"] == "b"
    assert row["channels"] == "c"
    write_files(source, {f"sub-01/func/sub-01_task-a_run-{i}_channels.tsv": str(i).encode() for i in (2, 10)})
    row = rows_of(source, tmp_path / "both")[0]
    assert row["top_channels"] == "c"
    assert row["func_channels"] == ["2", "10"]


def test_rows_by_file_and_by_subject_keep_what_they_know(tmp_path: Path) -> None:
    """`--rows subject` keeps the session of each file as an entity.

    `--rows file` keeps the values of scans and sessions, and can be saved as a recipe.
    """
    source = write_files(tmp_path / "source", bids.sessions())
    by_subject = rows_of(source, tmp_path / "subject", "--rows", "subject")
    assert [entity["ses"] for entity in by_subject[0]["t1w_entities"]] == ["a", "b"]
    recipe = tmp_path / "file.toml"
    brim("plan", source, "--rows", "file", "--save-recipe", recipe)
    by_file = rows_of(source, tmp_path / "file", "--recipe", str(recipe))
    first = next(row for row in by_file if row["suffix"] == "T1w")
    assert (first["file_scans"]["quality"], first["dose"]) == (3, 1)
    pilot = rows_of(source, tmp_path / "pilot", "--recipe", str(recipe), "--subjects", "02")
    assert pilot[0].keys() == by_file[0].keys()


def test_bidsignore_of_subjects_links_and_root_files(tmp_path: Path) -> None:
    """Files in .bidsignore create no rows, cause no errors and are not used as sidecars."""
    source = small(tmp_path, {".bidsignore": b"sub-02/\n*_CT.nii.gz\nT1w.json\n", "T1w.json": b'{"Bad": 1}'})
    (source / "sub-01/anat/sub-01_CT.nii.gz").symlink_to("../../.git/annex/objects/x/y/z.nii.gz")
    rows = rows_of(source, tmp_path / "out")
    assert [row["subject_id"] for row in rows] == ["sub-01"]
    assert "t1w_json" not in rows[0]


@pytest.mark.parametrize("content", [b'{"a": "\\ud800"}', b'{"a": NaN}', b"[" * 2000, b"[1]", b""])
def test_odd_sidecars(tmp_path: Path, content: bytes) -> None:
    """A sidecar with invalid JSON does not stop the build, and the published value is valid JSON or null."""
    source = small(tmp_path, {"sub-01/anat/sub-01_T1w.json": content})
    row = rows_of(source, tmp_path / "out")[0]
    text = row.get("t1w_json")
    assert text is None or json.loads(text, parse_constant=lambda _: pytest.fail("not JSON")) is not None


def test_odd_names_and_empty_recordings(tmp_path: Path) -> None:
    """Subjects with digits of other scripts are packaged, and empty recording folders are reported by name."""
    source = small(tmp_path, {"sub-\u00b2/anat/sub-\u00b2_T1w.nii.gz": b"x"})
    assert len(rows_of(source, tmp_path / "out")) == 3
    (source / "sub-01/meg/sub-01_task-a_meg.ds").mkdir(parents=True)
    assert "meg.ds" in brim("plan", source, check=2).stderr


@pytest.mark.parametrize(
    "change", [('kind = "nifti"', 'kind = "blah"'), ('name = "t1w"', 'name = "subject_id"'), ('"int64"', '"x"')]
)
def test_saved_columns_with_mistakes(tmp_path: Path, change: tuple[str, str]) -> None:
    """A saved recipe with invalid edits is refused."""
    source = small(tmp_path, {"participants.tsv": b"participant_id\tage\nsub-01\t1\n"})
    recipe = tmp_path / "r.toml"
    brim("plan", source, "--save-recipe", recipe)
    assert change[0] in recipe.read_text()
    recipe.write_text(recipe.read_text().replace(*change))
    assert "is not valid" in brim("plan", source, "--recipe", recipe, check=2).stderr
    brim("plan", source, "--save-recipe", tmp_path / "no" / "folder.toml", check=2)


def test_check_names_everything(tmp_path: Path) -> None:
    """`brim check` finds all problems at once: two files where one is expected, and an empty file."""
    source = write_files(
        tmp_path / "source",
        {
            "sub-1/ses-1/anat/sub-1_ses-1_T1w.nii.gz": b"a",
            "sub-1/ses-1/anat/sub-1_ses-1_run-2_T1w.nii.gz": b"b",
            "sub-1/ses-2/anat/sub-1_ses-2_T2w.nii.gz": b"",
            "participants.tsv": b"participant_id\tsex\tage_at_stroke\twab_aq\twab_type\nsub-1\tF\t1\t2\tx\n",
        },
    )
    output = brim("check", source, "--recipe", "arc", check=3).stdout
    assert "run-2_T1w.nii.gz" in output
    assert "ses-2_T2w.nii.gz" in output
    brim("check", source, "--recipe", "arc", "--tolerance", "nan", check=2)


def test_python_reads_bids(tmp_path: Path) -> None:
    """`brim.bids` and `brim.check` do the same as the commands."""
    import brim as api

    table = api.bids(small(tmp_path, {}), subjects="01")
    assert table.rows.column("subject_id").to_pylist() == ["sub-01"]
    assert not api.check(table).ok

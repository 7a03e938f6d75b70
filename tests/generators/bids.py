"""Small BIDS datasets of every layout, as a mapping of path to content. Each file's content is its own path."""

from __future__ import annotations

import gzip
import json

import nibabel
import numpy as np

Tree = dict[str, bytes]
DESCRIPTION = {
    "Name": "A study of brims",
    "BIDSVersion": "1.9.0",
    "Authors": ["Ada L.", "Charles B."],
    "License": "CC0",
    "DatasetDOI": "doi:10.0/brim",
    "HowToAcknowledge": "Cite us.",
    "Funding": ["A grant"],
}


def base(**more: object) -> Tree:
    return {"dataset_description.json": json.dumps({**DESCRIPTION, **more}).encode(), "README": b"About."}


def files(*paths: str) -> Tree:
    return {path: path.encode() for path in paths}


def nifti(seed: int) -> bytes:
    volume = np.random.default_rng(seed).integers(0, 99, (3, 4, 5)).astype(np.int16)
    return gzip.compress(nibabel.Nifti1Image(volume, np.eye(4)).to_bytes(), mtime=0)


def sessions() -> Tree:
    """Two subjects, one with two sessions and one without, real images, tables, inherited sidecars."""
    tree = base()
    tree["participants.tsv"] = (
        "\ufeffparticipant_id\tage\tsite\tscore\r\nsub-01\t34\t007\t1.5\r\nsub-02\tn/a\t008\t2\r\nsub-99\t3\t1\t1\r\n".encode()
    )
    tree["participants.json"] = json.dumps({"age": {"Description": "Age in years"}}).encode()
    tree["task-rest_bold.json"] = json.dumps(
        {"RepetitionTime": 2.0, "InstitutionName": "X", "TaskName": "rest"}
    ).encode()
    tree["dwi.bval"] = b"0 1000\n"
    tree["dwi.bvec"] = b"0 1\n0 0\n0 0\n"
    tree["task-rest_events.tsv"] = b"onset\tduration\n0\t1\n"
    for number, key in enumerate(("sub-01/ses-a", "sub-01/ses-b")):
        sub, ses = key.split("/")
        stem = f"{sub}_{ses}"
        tree[f"{key}/anat/{stem}_T1w.nii.gz"] = nifti(number)
        for run in ("1", "2", "10"):
            tree[f"{key}/func/{stem}_task-rest_run-{run}_bold.nii.gz"] = nifti(10 * number + int(run))
        tree[f"{key}/dwi/{stem}_dwi.nii.gz"] = nifti(50 + number)
        tree[f"{key}/{stem}_scans.tsv"] = (
            f"filename\tacq_time\tquality\nanat/{stem}_T1w.nii.gz\t2020-01-01T00:00:00\t{number + 3}\n".encode()
        )
    tree["sub-01/ses-a/func/sub-01_ses-a_task-rest_run-2_bold.json"] = json.dumps(
        {"RepetitionTime": 3.0, "PatientName": "Jo", "AcquisitionDateTime": "2020", "EchoTime": 0.03}
    ).encode()
    tree["sub-01/ses-a/func/sub-01_ses-a_task-rest_run-10_events.tsv"] = b"onset\tduration\n9\t9\n"
    tree["sub-01/sub-01_sessions.tsv"] = b"session_id\tdose\tacq_time\nses-a\t1\t2020-01-01\nses-b\t2\t2020-02-02\n"
    tree["sub-02/anat/sub-02_T1w.nii.gz"] = nifti(7)
    return tree


def eeg() -> Tree:
    """A recording of three files, a folder recording, photos and head shapes."""
    tree = base() | {"participants.tsv": b"participant_id\nsub-1\nsub-2\n"}
    for sub in ("sub-1", "sub-2"):
        stem = f"{sub}/eeg/{sub}_task-x"
        tree |= files(f"{stem}_eeg.eeg", f"{stem}_eeg.vhdr", f"{stem}_eeg.vmrk", f"{sub}/eeg/{sub}_photo.jpg")
        tree[f"{stem}_eeg.json"] = b'{"SamplingFrequency": 250, "DeviceSerialNumber": "4711"}'
        tree[f"{stem}_events.tsv"] = b"onset\n1\n"
        tree[f"{stem}_channels.tsv"] = b"name\nCz\n"
        tree[f"{sub}/eeg/{sub}_coordsystem.json"] = b'{"EEGCoordinateUnits": "mm"}'
        folder = f"{sub}/meg/{sub}_task-x_meg.ds"
        tree |= files(f"{folder}/{sub}.meg4", f"{folder}/hz.ds/params.dsc", f"{folder}/.hidden")
        tree[f"{folder}/BadChannels"] = b""
        tree |= files(f"{sub}/meg/{sub}_headshape.pos")
    return tree


def two_datatypes() -> Tree:
    """m0scan in two datatypes, CIFTI next to NIfTI, multi-echo parts, names with odd case."""
    return base() | files(
        "sub-1/perf/sub-1_m0scan.nii.gz",
        "sub-1/fmap/sub-1_m0scan.nii.gz",
        "sub-1/func/sub-1_task-a_bold.nii.gz",
        "sub-1/func/sub-1_task-a_bold.dtseries.nii",
        "sub-1/anat/sub-1_echo-2_part-mag_MEGRE.nii",
        "sub-1/anat/sub-1_echo-1_part-phase_MEGRE.nii.gz",
        "sub-1/anat/sub-1_echo-1_part-mag_MEGRE.nii.gz",
        "sub-1/anat/notes.txt",
    )


def aside() -> Tree:
    """Derivatives with and without a description, .bidsignore, sourcedata, code, stimuli, phenotype."""
    tree = base() | files(
        "sub-1/anat/sub-1_T1w.nii.gz",
        "sub-1/anat/sub-1_acq-bad_T1w.nii.gz",
        "sourcedata/sub-1/raw.dcm",
        "code/run.py",
        "stimuli/a.png",
        "derivatives/masks/sub-1/anat/sub-1_desc-lesion_mask.nii.gz",
        "derivatives/described/sub-1/anat/sub-1_desc-brain_mask.nii.gz",
    )
    tree[".bidsignore"] = b"# quality\n*_acq-bad_*\n"
    tree["derivatives/described/dataset_description.json"] = b'{"Name": "d", "BIDSVersion": "1.9.0"}'
    tree["phenotype/iq.tsv"] = b"participant_id\tscore\nsub-1\t120\n"
    return tree


SHAPES = {"sessions": sessions, "eeg": eeg, "two_datatypes": two_datatypes, "aside": aside}

"""Every encoder gives the ids of the reference, and a wrong encoder is detected."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brim.compute.steps.gigatoken_encoder import FastEncoder, FastKind, ProvedEncoder, choose, doubtful, kind_of
from brim.compute.steps.step import BadRow, RestartUnit, RowBatch
from brim.compute.steps.tokenize_step import IDS, TokenizeStep, TokenizeStepOptions
from brim.compute.steps.tokenizers import Encoded, LoadedTokenizer, find_tokenizer, generation, reference_name
from brim.errors import InputError, MissingDependencyError
from brim.memory.meter import process_bytes
from brim.options.compute_options import EncoderOptions
from tests.conftest import brim
from tests.generators.code_points import differing as differing_points
from tests.generators.texts import fuzz_texts
from tests.generators.tokenizers import BYTE_LEVEL, KINDS, METASPACE, SPECIALS, made_tokenizers, prose

pytest.importorskip("tokenizers")
FAST = tuple(kind for kind in (*BYTE_LEVEL, *METASPACE) if kind != "digits")
FUZZ = 4_000
SCHEMA = pa.schema([("text", pa.string())])


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made_tokenizers(tmp_path_factory.mktemp("tokenizers"))


def proved(path: Path) -> tuple[ProvedEncoder, LoadedTokenizer]:
    pytest.importorskip("gigatoken")
    data = path.read_bytes()
    kind = kind_of(data)
    assert kind is not None
    reference = loaded(path)
    return ProvedEncoder(FastEncoder(data), reference, kind), reference


def loaded(path: Path) -> LoadedTokenizer:
    try:
        return LoadedTokenizer(path.read_bytes(), path.name)
    except InputError as error:  # 1.x does not support a prefix space
        pytest.skip(error.message)


def differing(ours: Encoded, theirs: Encoded, texts: pa.Array) -> list[str]:
    return [text for row, text in enumerate(texts.to_pylist()) if not np.array_equal(ours[row], theirs[row])]


@pytest.mark.parametrize("kind", FAST)
def test_fuzz_texts_have_the_same_ids(tokenizer_files: dict[str, Path], kind: str) -> None:
    """For texts with all kinds of characters, the fast encoder is used and gives the same ids."""
    compare_fuzz(tokenizer_files[kind], FUZZ)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAST)
def test_many_fuzz_texts_have_the_same_ids(tokenizer_files: dict[str, Path], kind: str) -> None:
    compare_fuzz(tokenizer_files[kind], 10 * FUZZ)


def compare_fuzz(path: Path, count: int) -> None:
    encoder, reference = proved(path)
    texts = pa.array([text for text in fuzz_texts(count, SPECIALS) if text])
    assert len(texts) > 0.9 * count
    actual = [encoder.encode(texts.slice(index, 300)) for index in range(0, len(texts), 300)]
    expected = [reference.encode(texts.slice(position, 300)) for position in range(0, len(texts), 300)]
    for at, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert differing(ours, theirs, texts.slice(at * 300, 300)) == []
    assert (encoder.differed, encoder.encoder.split()[0]) == ("", "gigatoken")


@pytest.mark.parametrize("kind", FAST)
def test_any_text_has_the_same_ids(tokenizer_files: dict[str, Path], kind: str) -> None:
    """Texts that hypothesis generates, including marks and special tokens, have the same ids."""
    encoder, reference = proved(tokenizer_files[kind])
    marks = st.characters(categories=["Mn", "Mc", "Me"])
    segments = st.one_of(st.text(min_size=1), marks, st.sampled_from([*SPECIALS, "\r\n", "'s", " ", "▁"]))

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(segments, min_size=1, max_size=12).map("".join))
    def same(text: str) -> None:
        texts = pa.array([text])
        assert encoder.encode(texts).values.tolist() == reference.encode(texts).values.tolist()

    same()
    assert encoder.differed == ""


@pytest.mark.parametrize("kind", ["bpe", "llama3", "metaspace"])
def test_a_word_of_megabytes(tokenizer_files: dict[str, Path], kind: str) -> None:
    """A text of 4 MB without a space has the ids of the reference."""
    pytest.importorskip("gigatoken")
    text = "splitswordsnumbers" * (4_000_000 // 18)
    ids = [run(tokenizer_files[kind], [text], fast)[0] for fast in (True, False)]
    assert len(ids[0]) > 100_000
    assert ids[0] == ids[1]


def run(path: Path, texts: list[str | None], fast: bool, **options: Any) -> list[list[int]]:
    loaded(path)
    kind = kind_of(path.read_bytes()) if fast else None
    step = TokenizeStep(find_tokenizer(path), TokenizeStepOptions(**options), fast=kind)
    step.open(SCHEMA)
    table = pa.table({"text": texts}, schema=SCHEMA)
    rows: list[list[int]] = pa.concat_tables(step.apply(RowBatch(table, 0, None), False))[IDS].to_pylist()
    assert step.encoder.split()[0] == ("gigatoken" if fast else "tokenizers")
    return rows


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize(
    "options",
    [{}, {"add_special_tokens": False}, {"max_length": 9}, {"eos": "</s>"}, {"eos": "[CLS]", "max_length": 7}],
)
def test_options_mean_the_same_for_every_encoder(
    tokenizer_files: dict[str, Path], kind: str, options: dict[str, Any]
) -> None:
    """Special tokens, truncation, end tokens, and split long documents are the same for every encoder."""
    pytest.importorskip("gigatoken")
    texts = [prose(40), None, "", "a", prose(3000), " ", prose(20, 3), *SPECIALS]
    ids = [run(tokenizer_files[kind], texts, fast, long_chars=4000, **options) for fast in (True, False)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("kind", KINDS)
def test_only_kinds_that_were_tried_are_fast(tokenizer_files: dict[str, Path], kind: str) -> None:
    """WordPiece, Unigram, untested pre-tokenizers and unusual settings use the reference."""
    assert (kind_of(tokenizer_files[kind].read_bytes()) is not None) == (kind in FAST)
    content = json.loads(tokenizer_files[kind].read_bytes())
    content["normalizer"] = {"type": "NFKD"}
    assert kind_of(json.dumps(content).encode()) is None


class Wrong:
    """An encoder that is only wrong for a single word."""

    encoder = "wrong 1.0"

    def __init__(self, reference: LoadedTokenizer, value: str) -> None:
        self._reference, self._word = reference, value

    def encode(self, texts: pa.Array) -> Encoded:
        return Encoded.from_parts(
            [
                ids[::-1] if self._word in text else ids
                for ids, text in zip(self._reference.ids(texts.to_pylist()), texts.to_pylist(), strict=True)
            ]
        )


def test_a_wrong_encoder_is_caught_at_once(tokenizer_files: dict[str, Path]) -> None:
    """A wrong encoder is detected by the fixed texts, by the first texts of the data, or by the later samples."""
    reference = loaded(tokenizer_files["bpe"])
    assert "Straße" in ProvedEncoder(Wrong(reference, "Straße"), reference, FastKind(False, ())).differed
    encoder = ProvedEncoder(Wrong(reference, "zebra"), reference, FastKind(False, ()))
    with pytest.raises(RestartUnit):
        encoder.encode(pa.array(["a b", "the zebra"]))
    assert "wrong 1.0" in encoder.differed
    assert "the zebra" in encoder.differed
    assert encoder.encode(pa.array(["the zebra"])).values.tolist() == reference.ids(["the zebra"])[0].tolist()
    late = ProvedEncoder(Wrong(reference, "zebra"), reference, FastKind(False, ()))
    late.encode(pa.array(["a b"] * 500))
    with pytest.raises(RestartUnit):
        late.encode(pa.array(["the zebra"]))  # number 500
    unseen = ProvedEncoder(Wrong(reference, "zebra"), reference, FastKind(False, ()))
    unseen.encode(pa.array(["a b"] * 501))
    unseen.encode(pa.array(["the zebra"]))  # number 501 is in no sample: samples cannot prove each text
    assert unseen.differed == ""


def test_texts_in_doubt_go_to_the_reference(tokenizer_files: dict[str, Path]) -> None:
    """Sequences of marks, and code points that differ between Unicode tables, go to the reference encoder."""
    reference = loaded(tokenizer_files["qwen"])
    observed: list[str] = []

    class Told(Wrong):
        def encode(self, texts: pa.Array) -> Encoded:
            observed.extend(texts.to_pylist())
            return super().encode(texts)

    encoder = ProvedEncoder(Told(reference, "\0no"), reference, FastKind(True, ()))
    texts = ["plain", "é e\u0301", "a\u0323\u0301", "x\u1df6", "日本", "\U00011935\U00011930"]
    observed.clear()
    actual = encoder.encode(pa.array(texts))
    assert observed == ["plain", "é e\u0301", "日本"]
    assert [actual[row].tolist() for row in range(len(texts))] == [ids.tolist() for ids in reference.ids(texts)]


def with_added(path: Path, folder: Path, added: list[tuple[str, dict[str, bool]]]) -> Path:
    """Copy a tokenizer and add tokens after its vocabulary."""
    record = json.loads(path.read_bytes())
    vocab = record["model"]["vocab"]
    first = 1 + max([*vocab.values(), *(token["id"] for token in record["added_tokens"])])
    flags = {"special": False, "single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    for number, (content, changed) in enumerate(added, first):
        record["added_tokens"].append({"id": vocab.get(content, number), "content": content, **flags, **changed})
    created = folder / f"added-{path.name}"
    created.write_text(json.dumps(record))
    return created


RAW = {"normalized": False}
ADDED: dict[str, list[tuple[str, dict[str, bool]]]] = {
    "words": [("façade", {}), ("Genève", {}), ("cafe", {})],
    "raw words": [("façade", RAW), ("Genève", RAW), ("cafe", RAW)],
    "decomposed words": [(unicodedata.normalize("NFD", "façade"), {}), (unicodedata.normalize("NFD", "Genève"), RAW)],
    "ASCII that NFC makes": [("K9", {}), (";", RAW), (">", RAW)],
    "one inside another": [("zqx", RAW), ("zqxv", {})],
    "one inside another of its kind": [("zqx", {}), ("zqxv", {}), ("qxvu", {})],
    "overlapping": [("xab", {}), ("abc", RAW)],
    "white space": [("  ", {}), ("\n\n", {}), ("two words", {})],
    "stripping": [("façade", {"lstrip": True}), ("cafe", RAW | {"rstrip": True})],
    "stripping next to white space": [("  ", {}), ("<m>", RAW | {"lstrip": True, "rstrip": True})],
    "stripping next to white space of its kind": [("  ", RAW), ("<m>", RAW | {"lstrip": True, "rstrip": True})],
    "a leading space": [(" x", {}), ("a ", RAW)],
}
SEGMENTS = [
    *("façade", "Genève", "cafe", "cafe\u0301", "\u0301", " ", "  ", "\u3000", "\xa0", "\n", "\n\n", "zqx", "zqxv"),
    *(
        "qxvu",
        "v",
        "xab",
        "abc",
        "c",
        "x",
        "two words",
        "K9",
        "\u212a9",
        "\u037e",
        ";",
        ">",
        ">\u0338",
        "<m>",
        "a",
        "1",
    ),
    *("日", unicodedata.normalize("NFD", "façade"), unicodedata.normalize("NFD", "Genève"), SPECIALS[1]),
]


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("kind", FAST)
def test_added_tokens_have_the_ids_of_the_reference(
    tokenizer_files: dict[str, Path], tmp_path: Path, kind: str, added: str
) -> None:
    """In composed, decomposed and plain texts, an accepted tokenizer with added tokens gives the same ids."""
    pytest.importorskip("gigatoken")
    path = with_added(tokenizer_files[kind], tmp_path, ADDED[added])
    if kind_of(path.read_bytes()) is None:
        return  # the reference encodes these
    encoder, reference = proved(path)
    draw = random.Random(f"{kind} {added}")
    texts = pa.array(["".join(draw.choices(SEGMENTS, k=draw.randrange(1, 7))) for _ in range(1500)])
    ours = Encoded.from_parts([encoder.encode(texts.slice(row, 1)).values for row in range(len(texts))])
    assert differing(ours, reference.encode(texts), texts) == []
    assert (encoder.differed, encoder.encoder.split()[0]) == ("", "gigatoken")


@pytest.mark.parametrize("kind", FAST)
def test_tokenizers_with_ordinary_added_tokens_stay_fast(
    tokenizer_files: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    added = [(f"<|reserved_{number}|>", RAW) for number in range(300)] + [
        ("<think>", {}),
        ("mask me", {"lstrip": True}),
    ]
    assert kind_of(with_added(tokenizer_files[kind], tmp_path, added).read_bytes()) is not None


def test_decomposed_accents_in_rows_that_no_sample_sees(tokenizer_files: dict[str, Path], tmp_path: Path) -> None:
    """Three of 2,000 rows are decomposed and contain added tokens, and none of them is in the compared samples."""
    path = with_added(tokenizer_files["qwen"], tmp_path, [("façade", {}), ("Genève", {})])
    encoder, reference = proved(path)
    rows = [f"Une façade à Genève {number}" for number in range(2000)]
    for row in (333, 777, 1234):
        rows[row] = unicodedata.normalize("NFD", rows[row])
    texts = pa.array(rows)
    for part in (texts.slice(index, 500) for index in range(0, 2000, 500)):
        assert differing(encoder.encode(part), reference.encode(part), part) == []
    assert encoder.encoder.split()[0] == "gigatoken"


def test_an_added_token_after_the_first_fifty_is_probed(tokenizer_files: dict[str, Path], tmp_path: Path) -> None:
    """A fast encoder that is wrong about the last of 300 added tokens is detected before the first text."""
    path = with_added(tokenizer_files["bpe"], tmp_path, [(f"<|{number}|>", RAW) for number in range(300)])
    reference, kind = loaded(path), kind_of(path.read_bytes())
    assert kind is not None
    assert "<|299|>" in ProvedEncoder(Wrong(reference, "<|299|>"), reference, kind).differed


def test_one_added_token_inside_another_in_a_row_that_no_sample_sees(
    tokenizer_files: dict[str, Path], tmp_path: Path
) -> None:
    """60 reserved tokens come before the two, so the tokenizer uses the reference from the start."""
    reserved = [(f"<|{number}|>", RAW) for number in range(60)]
    path = with_added(tokenizer_files["bpe"], tmp_path, [*reserved, ("zqx", RAW), ("zqxv", {})])
    assert kind_of(path.read_bytes()) is None


def test_composed_texts_stay_with_the_fast_encoder(tokenizer_files: dict[str, Path], tmp_path: Path) -> None:
    """A text goes to the reference only if NFC could change an added token in it."""
    path = with_added(tokenizer_files["qwen"], tmp_path, [("façade", {}), ("<|im_end|>", RAW)])
    encoder, _ = proved(path)
    texts = ["Une façade à Genève", "e\u0301te\u0301", "क\u093cलम", "한국어", "<|im_end|>é", "a <|im_end|>\u0338"]
    texts += [unicodedata.normalize("NFD", texts[0])]
    assert encoder._is_sure(pa.array(texts)).tolist() == [True] * 5 + [False] * 2


@pytest.fixture
def partial(tokenizer_files: dict[str, Path], tmp_path: Path) -> Path:
    """Train byte-level BPE whose vocabulary has few of the 256 bytes, as without an initial alphabet."""
    content = json.loads(tokenizer_files["bpe"].read_bytes())
    remaining = [
        token for token in content["model"]["vocab"] if token in SPECIALS or token in "splitwordsandnumbers012345Ġ"
    ]
    content["model"]["vocab"] = {token: number for number, token in enumerate(remaining)}
    content["model"]["merges"] = []
    path = tmp_path / "partial.json"
    path.write_text(json.dumps(content))
    return path


def test_auto_uses_the_reference_where_the_fast_encoder_cannot_load(partial: Path, tmp_path: Path) -> None:
    """The job runs with the reference and states the reason; --encoder fast is refused. The bytes equal those of
    --encoder reference."""
    pytest.importorskip("gigatoken")
    loaded(partial)
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": f"words and numbers {n}"}) + "\n" for n in range(300)))
    created = {}
    for encoder in ("auto", "fast", "reference"):
        arguments = ["tokenize", source, tmp_path / encoder, "--tokenizer", partial, "--encoder", encoder, "--json"]
        created[encoder] = brim(*arguments, "--memory", "1GB", check=2 if encoder == "fast" else 0)
    events = [json.loads(line) for line in created["auto"].stdout.splitlines()]
    reasons = [
        event["text"] for event in events if event["event"] == "note" and "cannot load the tokenizer" in event["text"]
    ]
    assert len(reasons) == 1
    assert "no single-byte vocab entry" in reasons[0]
    assert list(events[-1]["encoders"]) == [reference_name()]
    refused = json.loads(created["fast"].stdout.splitlines()[-1])
    assert "cannot load the tokenizer" in refused["message"]
    assert ".rs" not in refused["message"]
    assert "--encoder reference" in refused["hint"]
    files = [next((tmp_path / encoder / "data").iterdir()) for encoder in ("auto", "reference")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_text_that_is_not_utf8_is_refused(tokenizer_files: dict[str, Path]) -> None:
    """With every encoder, the error names the row; gigatoken alone would crash."""
    step = TokenizeStep(find_tokenizer(tokenizer_files["gpt4"]))
    step.open(SCHEMA)
    bad = pa.array([b"good", b"\xed\xa0\x80 lone surrogate"]).view(pa.string())
    with pytest.raises(BadRow) as caught:
        list(step.apply(RowBatch(pa.table({"text": bad}), 0, None), False))
    assert caught.value.row == 1
    assert "not UTF-8" in str(caught.value.__cause__)


def test_choices(tokenizer_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """`reference` does not look up the fast encoder; `fast` states why it is not available."""
    data = tokenizer_files["bpe"].read_bytes()
    assert choose("reference", data) is None
    with pytest.raises(InputError, match=r"encoder.* takes auto, reference or fast"):
        EncoderOptions(encoder="quick")  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose("auto", data) is None
    with pytest.raises(MissingDependencyError, match="not installed"):
        choose("fast", data)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(InputError, match="not known to give the same ids"):
        choose("fast", tokenizer_files["wordpiece"].read_bytes())


def test_the_generation_is_a_fact_from_1_on(tokenizer_files: dict[str, Path]) -> None:
    """Jobs of earlier versions do not have this fact, and resume with tokenizers 0.2x."""
    facts = TokenizeStep(find_tokenizer(tokenizer_files["bpe"])).facts
    assert facts.get("tokenizers_generation", 0) == generation()
    assert ("tokenizers_generation" in facts) == (generation() == 1)


_FAKE = """
import json, tokenizers
class Tokenizer:
    @classmethod
    def from_json(cls, data):
        made = cls()
        made._raw = tokenizers.Tokenizer.from_str(json.dumps(json.loads(data)))
        return made
    @property
    def backend(self):
        return self
    def encode(self, data):
        import numpy as np
        ids = self._raw.encode(data.decode(), add_special_tokens=False).ids
        return np.array(ids[::-1] if b"zebra" in data else ids, np.uint32)
"""


@pytest.mark.skipif(generation() == 1, reason="the fake one is made of 0.2x")
def test_a_job_leaves_a_wrong_encoder(tokenizer_files: dict[str, Path], tmp_path: Path) -> None:
    """In a real job, the reference repeats the unit, the text is reported, and the bytes are the reference's."""
    fake = tmp_path / "fake"
    (fake / "gigatoken").mkdir(parents=True)
    (fake / "gigatoken" / "__init__.py").write_text(_FAKE)
    (fake / "gigatoken-9.9.dist-info").mkdir()
    (fake / "gigatoken-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: gigatoken\nVersion: 9.9\n")
    source = tmp_path / "texts.jsonl"
    texts = [prose(30, number) for number in range(4000)]
    texts[3000] = texts[3500] = "the zebra of numbers"
    texts[150] = f"zebra {texts[150]}"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    records = {}
    for encoder in ("fast", "reference"):
        result = subprocess.run(
            [
                *(sys.executable, "-m", "brim", "tokenize", str(source), str(tmp_path / encoder), "--json"),
                *(
                    "--tokenizer",
                    str(tokenizer_files["bpe"]),
                    "--encoder",
                    encoder,
                    "--memory",
                    "1GB",
                    "--workers",
                    "1",
                ),
            ],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(fake), os.environ.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
            check=True,
        )
        records[encoder] = [json.loads(line) for line in result.stdout.splitlines()]
    notes = [item["text"] for item in records["fast"] if item["event"] == "note"]
    assert notes[0] == "encoder: gigatoken 9.9"
    assert "zebra" in notes[1]
    assert list(records["fast"][-1]["encoders"]) == list(records["reference"][-1]["encoders"])
    files = [next((tmp_path / encoder / "data").iterdir()) for encoder in records]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["bpe", "qwen"])
def test_the_table_of_code_points_is_complete(tokenizer_files: dict[str, Path], kind: str) -> None:
    """Every code point of the first two planes on which the encoders differ is in the table; without NFC none
    differs."""
    pytest.importorskip("gigatoken")
    loaded(tokenizer_files[kind])
    every = [point for point in range(0, 0x20000, 1 if kind == "qwen" else 5) if not 0xD800 <= point < 0xE000]
    actual = np.array(differing_points(tokenizer_files[kind].read_bytes(), iter(every)), np.uint32)
    assert len(actual) == (0 if kind == "bpe" or generation() else 157)
    assert len(doubtful(np.repeat(actual, 2))) == 2 * len(actual)


def test_words_that_never_come_again_do_not_fill_the_memory(tokenizer_files: dict[str, Path]) -> None:
    """gigatoken caches every word: 22 MB of new words would take 200 MB. It is reloaded, and the ids stay the same."""
    pytest.importorskip("gigatoken")
    encoder, maximum = FastEncoder(tokenizer_files["bpe"].read_bytes()), 0
    draw = np.random.default_rng(3)
    first = process_bytes(os.getpid())
    for _ in range(22):
        letters = draw.integers(97, 123, 1_000_000, np.uint8)
        letters[::10] = 32
        texts = pa.array([letters.tobytes().decode()[index : index + 4000] for index in range(0, 1_000_000, 4000)])
        actual = encoder.encode(texts)
        maximum = max(maximum, process_bytes(os.getpid()) - first)
    assert actual.values.tolist() == loaded(tokenizer_files["bpe"]).encode(texts).values.tolist()
    assert maximum < 130 << 20


@pytest.mark.parametrize("row", [b'{"text": "a\\ud83d"}', b'{"text": "a", "text": "b"}', b'{"text": "a"}\n{"text": 5}'])
def test_json_is_not_parsed_by_what_reads_other_values(row: bytes) -> None:
    """polars accepts JSON that pyarrow refuses, so brim does not parse with polars."""
    polars = pytest.importorskip("polars")
    with pytest.raises(pa.ArrowInvalid):
        pyarrow.json.read_json(pa.BufferReader(row))
    assert polars.read_ndjson(row).height

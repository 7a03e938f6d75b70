"""Tokenizing gives the ids of the tokenizers library, document by document."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from brim.compute.outputs.token_output import FinishOptions, finish_tokens
from brim.compute.outputs.token_packing import SEQ_LENGTHS
from brim.compute.steps.step import BadRow, RowBatch
from brim.compute.steps.tokenize_step import (
    CUT,
    IDS,
    NOTE,
    NULL,
    PLAIN,
    ROUGH,
    TokenizeStep,
    TokenizeStepOptions,
    cut_text,
)
from brim.compute.steps.tokenizers import LoadedTokenizer, find_tokenizer, generation
from brim.errors import InputError, SourceChangedError
from tests.generators.tokenizers import SPECIALS, made_tokenizers, prose

tokenizers = pytest.importorskip("tokenizers")
OLD = pytest.mark.skipif(generation() == 1, reason="tokenizers 1.x makes and changes no tokenizers")
KINDS = ("wordpiece", "bpe", *(() if generation() == 1 else ("prefixed",)), "unigram", "llama")
SCHEMA = pa.schema([("text", pa.string()), ("name", pa.string())])
TEXTS = [prose(40, seed) for seed in range(30)] + ["", " ", "\n\n", "🙂" * 50, "a" * 300, " leading", "trailing  "]


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made_tokenizers(tmp_path_factory.mktemp("tokenizers"))


def opened(path: Path, **options: Any) -> TokenizeStep:
    """Return the step as a worker receives it."""
    step = TokenizeStep(find_tokenizer(path), TokenizeStepOptions(**options))
    step = pickle.loads(pickle.dumps(step))
    step.open(SCHEMA)
    return step


def run(step: TokenizeStep, texts: list[str | None], small: bool = False) -> tuple[list[list[int]], list[int]]:
    table = pa.table({"text": texts, "name": [str(n) for n in range(len(texts))]}, schema=SCHEMA)
    combined = pa.concat_tables(step.apply(RowBatch(table, 0, None), small))
    assert combined.schema == step.output_schema(SCHEMA)
    return combined[IDS].to_pylist(), combined[NOTE].to_pylist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", [True, False])
def test_ids_are_those_of_encode(tokenizer_files: dict[str, Path], kind: str, special: bool) -> None:
    """Each document has the ids that encode gives for it alone, also in small steps; only empty texts have none."""
    raw = tokenizers.Tokenizer.from_file(str(tokenizer_files[kind]))
    step = opened(tokenizer_files[kind], add_special_tokens=special)
    expected = [raw.encode(text, add_special_tokens=special).ids if text else [] for text in TEXTS]
    assert run(step, [*TEXTS])[0] == expected
    assert run(step, [*TEXTS], small=True)[0] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_long_prose_is_cut_without_a_trace(tokenizer_files: dict[str, Path], kind: str) -> None:
    """A long document that is encoded in chunks has the ids of the whole, including special tokens."""
    text = prose(6000)
    raw = tokenizers.Tokenizer.from_file(str(tokenizer_files[kind]))
    ids, notes = run(opened(tokenizer_files[kind], long_chars=5000), ["short", text, "short"])
    assert notes == [PLAIN, CUT, PLAIN]
    assert ids == [raw.encode(each).ids for each in ("short", text, "short")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"eos": "</s>"}, {"add_special_tokens": False}, {"max_length": 50}])
def test_a_long_document_by_itself_has_the_ids_of_one_among_others(
    tokenizer_files: dict[str, Path], kind: str, options: dict[str, Any]
) -> None:
    """A document of more than 256 KB is encoded without copying its ids, and has its special tokens."""
    text = prose(45_000)
    assert len(text) > 1 << 18
    single = run(opened(tokenizer_files[kind], long_chars=5000, **options), [text])
    step = opened(tokenizer_files[kind], long_chars=5000, **options)
    step.threads = 100  # a hundred times this size is encoded at once
    among = run(step, ["short", text, ""])
    assert single[0] == among[0][1:2]
    assert single[1] == [CUT]
    if not options:
        raw = tokenizers.Tokenizer.from_file(str(tokenizer_files[kind]))
        assert single[0] == [raw.encode(text).ids]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_end_where_characters_do(tokenizer_files: dict[str, Path], kind: str) -> None:
    """Characters of one to four bytes are never split: the chunks are the text, except for spaces at cuts."""
    draw = random.Random(kind)
    text = "".join(draw.choice("aé你🙂 \n") for _ in range(20_000))
    loaded = LoadedTokenizer(tokenizer_files[kind].read_bytes(), kind)
    parts = [segment for segment, _ in cut_text(loaded, memoryview(text.encode()), 1000)]
    assert max(map(len, parts)) <= 1000
    position = 0
    for part in parts:
        position += text[position] == " " and not text.startswith(part, position)
        assert text.startswith(part, position)
        position += len(part)
    assert position == len(text)


def test_long_text_without_spaces(tokenizer_files: dict[str, Path]) -> None:
    """BPE finds the ends of tokens; if even this fails, the document is counted as cut approximately."""
    draw = random.Random(1)
    text = "".join(draw.choice("splitswordsnumbers你好🙂") for _ in range(30_000))
    raw = tokenizers.Tokenizer.from_file(str(tokenizer_files["bpe"]))
    ids, notes = run(opened(tokenizer_files["bpe"], long_chars=4000), [text])
    assert (ids, notes) == ([raw.encode(text).ids], [CUT])
    step = opened(tokenizer_files["wordpiece"], long_chars=4000)
    ids, notes = run(step, ["acgt" * 3000])
    assert notes == [ROUGH]
    assert ids == [[1, 0, 0, 0, 2]]  # a word of more than 100 characters is [UNK], once in each of three chunks


@OLD
def test_pieces_are_the_text() -> None:
    """For any chunk size no character is lost, except a space where the tokenizer adds one."""
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    text = prose(5000)
    parts = [
        segment
        for segment, _ in cut_text(LoadedTokenizer(raw.to_str().encode(), "empty"), memoryview(text.encode()), 3000)
    ]
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 3000


@OLD
@pytest.mark.parametrize("splitter", ["ByteLevel", "Whitespace", "Metaspace"])
@pytest.mark.parametrize("sides", [{}, {"right": False}, {"left": False}])
def test_long_texts_that_a_strip_normalizer_changes_at_cuts_are_counted_as_rough(
    tokenizer_files: dict[str, Path], splitter: str, sides: dict[str, bool]
) -> None:
    """A document whose ids differ from those of the whole text is never counted as cut exactly."""
    raw = tokenizers.Tokenizer.from_file(str(tokenizer_files["bpe"]))
    raw.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFKC(), tokenizers.normalizers.Strip(**sides)]
    )
    raw.pre_tokenizer = getattr(tokenizers.pre_tokenizers, splitter)()
    texts = ["café " * 4000, prose(4000), f"  {prose(3000)}  ", "a\n\n b  " * 3000]
    step = TokenizeStep(find_tokenizer(raw), TokenizeStepOptions(long_chars=5000))
    step.open(SCHEMA)
    ids, notes = run(step, [*texts])
    for text, match, note in zip(texts, ids, notes, strict=True):
        assert note in (CUT, ROUGH)
        assert note == ROUGH or match == raw.encode(text).ids


def test_refused_by_row(tokenizer_files: dict[str, Path]) -> None:
    """Long documents can be refused; the error names the row."""
    step = opened(tokenizer_files["bpe"], long_chars=1000, long_documents="refuse")
    with pytest.raises(BadRow) as caught:
        run(step, ["a", None, "word " * 300])
    assert caught.value.row == 2
    assert "1,500 characters" in str(caught.value.__cause__)


def test_null_and_empty(tokenizer_files: dict[str, Path]) -> None:
    """Null and empty texts are documents without tokens, and null is recorded."""
    assert run(opened(tokenizer_files["wordpiece"], eos="[SEP]"), [None, "", None]) == (
        [[], [], []],
        [NULL, PLAIN, NULL],
    )


def test_eos_ends_every_document_once(tokenizer_files: dict[str, Path]) -> None:
    """The end token is appended unless the tokenizer adds it."""
    bpe = tokenizers.Tokenizer.from_file(str(tokenizer_files["bpe"]))
    assert run(opened(tokenizer_files["bpe"], eos="</s>"), ["a b"])[0] == [
        [*bpe.encode("a b").ids, SPECIALS.index("</s>")]
    ]
    unigram = tokenizers.Tokenizer.from_file(str(tokenizer_files["unigram"]))
    assert run(opened(tokenizer_files["unigram"], eos="</s>"), ["a b"])[0] == [unigram.encode("a b").ids]
    with pytest.raises(InputError, match="no token '<s>'") as caught:
        opened(tokenizer_files["bpe"], eos="<s>")
    assert "'</s>'" in caught.value.hint


@pytest.mark.parametrize("kind", KINDS)
def test_max_length(tokenizer_files: dict[str, Path], kind: str) -> None:
    """The maximum length includes special tokens, and long documents are truncated like others."""
    raw = tokenizers.Tokenizer.from_file(str(tokenizer_files[kind]))
    if generation() == 1:
        raw.truncation = tokenizers.Truncation(19)
    else:
        raw.enable_truncation(19)
    step = opened(tokenizer_files[kind], max_length=20, eos="[CLS]", long_chars=2000)
    texts = [prose(3), prose(100), prose(3000)]
    ids, _ = run(step, [*texts, texts[0]])
    assert ids == [[*raw.encode(text).ids, SPECIALS.index("[CLS]")] for text in [*texts, texts[0]]]
    assert [len(each) for each in ids[1:3]] == [20, 20]


@OLD
def test_truncation_and_padding_of_the_file_are_off(tokenizer_files: dict[str, Path], tmp_path: Path) -> None:
    """A tokenizer.json that pads to 128 does not change the output, and a note reports it."""
    raw = tokenizers.Tokenizer.from_file(str(tokenizer_files["wordpiece"]))
    whole = raw.encode(prose(300)).ids
    raw.enable_truncation(8)
    raw.enable_padding(length=8)
    raw.save(str(tmp_path / "tokenizer.json"))
    step = opened(tmp_path)
    raw.no_truncation()
    raw.no_padding()
    assert run(step, [prose(300), "a"])[0] == [whole, raw.encode("a").ids]
    assert step.check().switched_off == ("truncation", "padding")


@OLD
@pytest.mark.parametrize("special", [True, False])
def test_ids_are_never_a_matter_of_chance(tokenizer_files: dict[str, Path], tmp_path: Path, special: bool) -> None:
    """A tokenizer that skips some merges randomly is refused; one that skips all or none is accepted."""
    raw = tokenizers.Tokenizer.from_file(str(tokenizer_files["bpe"]))
    for dropout, refused in ((0.0, False), (0.1, True), (1.0, False)):
        raw.model.dropout = dropout
        raw.save(str(tmp_path / "tokenizer.json"))
        if refused:
            with pytest.raises(InputError, match=r"by chance \(dropout 0.1\)"):
                opened(tmp_path, add_special_tokens=special)
        else:
            expected = [raw.encode(text, add_special_tokens=special).ids for text in ("the words", "of")]
            assert run(opened(tmp_path, add_special_tokens=special), ["the words", "of"])[0] == expected


def test_kept_columns_and_types(tokenizer_files: dict[str, Path]) -> None:
    """Kept columns are next to the ids, which have the requested type."""
    step = opened(tokenizer_files["bpe"], keep_columns=("name",), dtype="uint16")
    table = pa.table({"text": ["a", "b"], "name": ["x", None]}, schema=SCHEMA)
    result = pa.concat_tables(step.apply(RowBatch(table, 0, None), False))
    assert result["name"].to_pylist() == ["x", None]
    assert result.schema.field(IDS).type == pa.list_(pa.uint16())
    assert step.columns == ("text", "name")


def test_what_is_wrong_is_said(
    tokenizer_files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing and wrong columns, files that are not tokenizers, and names that cannot be downloaded are clear
    errors."""
    with pytest.raises(InputError, match="no column 'txt'") as caught:
        opened(tokenizer_files["bpe"], column="txt")
    assert "'text'" in caught.value.hint
    step = TokenizeStep(find_tokenizer(tokenizer_files["bpe"]))
    with pytest.raises(InputError, match="not text but int64"):
        step.open(pa.schema([("text", pa.int64())]))
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(InputError, match="not a tokenizer"):
        TokenizeStep(find_tokenizer(tmp_path / "no.json")).check()
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        find_tokenizer(tmp_path)
    with pytest.raises(InputError, match=r"The tokenizer file .* does not exist"):
        find_tokenizer(tmp_path / "missing.json")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="cannot be reached"):
        find_tokenizer("no-such-org/no-such-name")


def test_a_tokenizer_that_changes_is_noticed(tokenizer_files: dict[str, Path], tmp_path: Path) -> None:
    """The fingerprint depends on its content, not on its location; a worker refuses other content."""
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    for path in (first, second):
        path.write_bytes(tokenizer_files["bpe"].read_bytes())
    steps = [TokenizeStep(find_tokenizer(path)) for path in (first, second)]
    assert steps[0].facts == steps[1].facts
    assert str(tmp_path) not in repr(steps[0].facts)
    first.write_bytes(tokenizer_files["unigram"].read_bytes())
    with pytest.raises(SourceChangedError):
        steps[0].open(SCHEMA)
    assert TokenizeStep(find_tokenizer(first)).facts != steps[1].facts


def test_an_object_travels_as_bytes(tokenizer_files: dict[str, Path]) -> None:
    """A tokenizer created in Python needs no file."""
    raw = tokenizers.Tokenizer.from_file(str(tokenizer_files["unigram"]))
    step = pickle.loads(pickle.dumps(TokenizeStep(find_tokenizer(raw))))
    step.open(SCHEMA)
    assert run(step, ["a b"])[0] == [raw.encode("a b").ids]


@pytest.mark.parametrize("pack", [None, 8])
def test_datasets_reads_what_is_made(tokenizer_files: dict[str, Path], tmp_path: Path, pack: int | None) -> None:
    """`datasets` reads the same rows from Parquet and Arrow shards, packed or not."""
    datasets = pytest.importorskip("datasets")
    step = opened(tokenizer_files["bpe"])
    table = pa.table({"text": TEXTS, "name": TEXTS}, schema=SCHEMA)
    unit = tmp_path / "unit.arrow"
    with pa.OSFile(str(unit), "wb") as file, pa.ipc.new_stream(file, step.output_schema(SCHEMA)) as writer:
        for each in step.apply(RowBatch(table, 0, None), False):
            writer.write_table(each)
    rows = run(step, [*TEXTS])[0]
    if pack is not None:
        flat = [token for row in rows for token in row]
        rows = [flat[index : index + pack] for index in range(0, len(flat) - pack + 1, pack)]
    for format in ("parquet", "arrow"):
        options = FinishOptions(format=format, pack=pack)
        result = finish_tokens([unit], tmp_path / format, options, 100_000_000, lambda count: None)
        read = datasets.load_dataset(
            format, data_files=str(result.shards[0].path), split="train", cache_dir=str(tmp_path / "cache" / format)
        )
        ids = datasets.List(datasets.Value("int32"))
        assert read.features == ({IDS: ids} if pack is None else {IDS: ids, SEQ_LENGTHS: ids})
        assert read[IDS][:] == rows
    assert datasets.Dataset.from_file(str(result.shards[0].path))[IDS][:] == rows

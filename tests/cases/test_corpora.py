"""Cases of corpora and tokenizers: O-44 to O-49."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from hetero_megatron.data.batch import pack
from hetero_megatron.data.documents import Documents
from hetero_megatron.data.indexed import IndexedDocuments, IndexedWriter
from hetero_megatron.data.line_files import LineFiles
from hetero_megatron.data.prepare import prepare
from hetero_megatron.data.records import Policy
from hetero_megatron.data.rows import PackedRows
from hetero_megatron.data.sources import CorpusSettings, SourceSettings, open_sources
from hetero_megatron.data.tokenizer import ByteTokenizer
from hetero_megatron.data.tokenizer_files import open_tokenizer
from hetero_megatron.errors import DataError, RecipeError
from hetero_megatron.recipe import load_recipe
from hetero_megatron.runtime.batch import IGNORE, PAD
from tests.data.tokenizers_made_here import word_folder

VOCAB = 96


def opened(
    path: Path, policy: Policy = "stop", tokenizer: str = "byte", vocab_size: int = 257, key: str = "text"
) -> tuple[Documents, list[str]]:
    """The documents of a file, and what was said."""
    said: list[str] = []
    settings = CorpusSettings((SourceSettings((str(path),), text_key=key),), tokenizer, policy)
    [source] = open_sources(settings, vocab_size, path.parent / "cache", said.append)
    documents = source.documents
    assert isinstance(documents, IndexedDocuments)
    return documents, said


def decoded(documents: Documents) -> list[str]:
    tokens = [documents.tokens(index) for index in range(len(documents.lengths))]
    return [ByteTokenizer().decode(ids).decode() for ids in tokens]


def jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def of_texts(path: Path, texts: list[str]) -> Path:
    return jsonl(path, [{"text": text} for text in texts])


@pytest.mark.parametrize(
    "texts", [["", "a", "   ", "", "bc"], ["a", "   ", "bc", "", ""], ["", "", "a", "   ", "bc"]]
)
def test_o44_empty_documents_are_left_out_and_counted_wherever_they_stand(
    tmp_path: Path, texts: list[str]
) -> None:
    """White space is text: it becomes tokens."""
    documents, said = opened(of_texts(tmp_path / "c.jsonl", texts))
    assert decoded(documents) == ["a", "   ", "bc"]
    assert "3 documents, 9 tokens; left out: 2 empty" in said[-1]


def test_o44_text_that_becomes_no_token_is_left_out_too(tmp_path: Path) -> None:
    tokenizer = str(word_folder(tmp_path / "t", 10))
    documents, said = opened(
        of_texts(tmp_path / "c.jsonl", ["", "w3", "   ", "", "w4 w5"]), tokenizer=tokenizer
    )
    assert [documents.tokens(index).tolist() for index in range(2)] == [[3, 2], [4, 5, 2]]
    assert "2 documents, 5 tokens; left out: 3 empty" in said[-1]


def test_o44_nothing_but_empty_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"c\.jsonl has no document with text: .* left out: 3 empty"):
        opened(of_texts(tmp_path / "c.jsonl", ["", "", ""]))
    (tmp_path / "e.jsonl").touch()
    with pytest.raises(DataError, match=r"e\.jsonl has no document with text: 0 documents, 0 tokens"):
        opened(tmp_path / "e.jsonl")


def test_o45_the_end_token_counts_in_the_stored_lengths(tmp_path: Path) -> None:
    texts = ["w10 w11 w12", "w20", "w30 w31 w32 w33"]
    tokenizer = open_tokenizer(str(word_folder(tmp_path / "t", 50)))
    reader = LineFiles((str(of_texts(tmp_path / "c.jsonl", texts)),), "json")
    prepare(reader, tokenizer, tmp_path / "out")
    documents = IndexedDocuments(tmp_path / "out")
    assert documents.lengths.tolist() == [4, 2, 5]
    assert [documents.tokens(index).tolist() for index in range(3)] == [
        [10, 11, 12, 2],
        [20, 2],
        [30, 31, 32, 33, 2],
    ]
    assert documents.lengths.sum() == len(np.fromfile(tmp_path / "out.bin", "<u2")) == 11
    assert np.frombuffer((tmp_path / "out.idx").read_bytes(), "<i4", 3, offset=34).tolist() == [4, 2, 5]


def test_o46_a_byte_that_is_not_utf8_is_refused_by_file_and_line_or_counted(tmp_path: Path) -> None:
    lines = [b'{"text": "line %d"}\n' % number for number in range(1, 6)]
    lines[2] = b'{"text": "li\xff\xfene 3"}\n'
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"".join(lines))
    with pytest.raises(
        DataError, match=r"c\.jsonl line 3 is not UTF-8: byte 13 of it is FF .*skip .*replace"
    ):
        opened(path)
    documents, said = opened(path, "skip")
    assert decoded(documents) == ["line 1", "line 2", "line 4", "line 5"]
    assert "4 documents, 28 tokens; left out: 1 bad" in said[-1]
    documents, said = opened(path, "replace")
    assert decoded(documents) == ["line 1", "line 2", "li\ufffd\ufffdne 3", "line 4", "line 5"]
    assert "1 with invalid characters replaced" in said[-1]


def test_o46_files_in_another_encoding_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "u.jsonl").write_bytes('{"text": "a"}\n'.encode("utf-16"))
    (tmp_path / "z.jsonl").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    for policy in ("stop", "skip", "replace"):
        with pytest.raises(DataError, match=r"u\.jsonl is UTF-16 text .* convert it to UTF-8"):
            opened(tmp_path / "u.jsonl", policy)
        with pytest.raises(DataError, match=r"z\.jsonl is a gzip file"):
            opened(tmp_path / "z.jsonl", policy)


def test_o46_odd_but_valid_characters_survive(tmp_path: Path) -> None:
    texts = ["🐈\u200d⬛ and NUL \x00 and \ufeff", "\u2028\x85\x1c", "\U0010ffff"]
    raw = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    (tmp_path / "raw.jsonl").write_text(raw, encoding="utf-8", newline="\n")
    for path in (of_texts(tmp_path / "c.jsonl", texts), tmp_path / "raw.jsonl"):
        assert decoded(opened(path)[0]) == texts


def test_o47_the_end_token_is_a_target_and_what_is_filled_up_is_none(tmp_path: Path) -> None:
    """The tokenizer has no pad token, and none is looked for: what fills up is a segment of its own."""
    tokenizer = str(word_folder(tmp_path / "t", VOCAB))
    texts = ["w10 w11 w12", "w20", "w30 w31 w32 w33"]
    documents, _ = opened(of_texts(tmp_path / "c.jsonl", texts), tokenizer=tokenizer, vocab_size=VOCAB)
    rows = PackedRows(documents, seed=1, seq_length=11)
    batch = pack(rows.sample(0), multiple=8)
    assert len(batch.tokens_T) == 16
    assert (batch.targets_T == 2).sum() == len(texts)
    assert batch.tokens_T[11:].tolist() == [PAD] * 5
    assert batch.targets_T[11:].tolist() == [IGNORE] * 5
    assert batch.tokens_T.min() >= 0


def test_o47_a_list_of_end_tokens_is_taken_by_its_first_and_none_is_refused(tmp_path: Path) -> None:
    listed = open_tokenizer(str(word_folder(tmp_path / "listed", 10, eos=[2, 7])))
    assert listed.encode("w3").tolist() == [3, 2]
    without = word_folder(tmp_path / "without", 10, eos=None)
    with pytest.raises(DataError, match=r'has no end token \(eos\).* write \{"eos_token": "</s>"\}, .* into'):
        open_tokenizer(str(without))


RECIPE = """
model: {{preset: llama_tiny, num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, vocab_size: {vocab}}}
strategy: {{dp: 1, tp: {tp}, pp: 1, micro_batches: 1, micro_batch_size: 1}}
data: {{sources: [{{path: {source}}}], tokenizer: {tokenizer}}}
training: {{train_iters: 1, global_batch_size: 1, seq_length: 4, lr: 1e-3}}
output: {folder}
"""


def refusal(tmp_path: Path, tp: int, source: Path, tokenizer: str = "byte") -> str:
    """Why a recipe does not come to its first process; empty if it does."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        RECIPE.format(vocab=VOCAB, tp=tp, source=source, tokenizer=tokenizer, folder=tmp_path / f"run{tp}")
    )
    try:
        load_recipe(path).open_sources(lambda text: None)
    except RecipeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ours", [False, True])
def test_o48_ids_outside_the_vocabulary_are_refused_alike_at_every_tensor_parallel_degree(
    tmp_path: Path, ours: bool
) -> None:
    for largest in (95, 96, 150):
        prefix = tmp_path / f"c{largest}"
        if ours:
            tokenizer = open_tokenizer(str(word_folder(tmp_path / "t", largest + 1)))
            reader = LineFiles(
                (str(of_texts(tmp_path / f"{largest}.jsonl", ["w3", f"w4 w{largest}"])),), "json"
            )
            prepare(reader, tokenizer, prefix)
        else:
            writer = IndexedWriter(prefix, VOCAB)
            writer.add([3, 2])
            writer.add([4, largest, 2])
            writer.finish()
        found = {refusal(tmp_path, tp, prefix) for tp in (1, 2)}
        assert len(found) == 1, found
        [message] = found
        if largest < VOCAB:
            assert message == ""
        else:
            assert f"token id {largest} in document 1 (" in message
            assert "is outside the model's vocabulary: vocab_size is 96" in message


def test_o48_a_tokenizer_may_be_smaller_than_the_model_and_not_larger(tmp_path: Path) -> None:
    source = of_texts(tmp_path / "c.jsonl", ["w3 w4"])
    for tp in (1, 2):
        assert refusal(tmp_path, tp, source, str(word_folder(tmp_path / "90", 90))) == ""
        message = refusal(tmp_path, tp, source, str(word_folder(tmp_path / "97", 97)))
        assert "data.tokenizer: tokenizer " in message
        assert "has ids up to 96, so it needs model.vocab_size 97 or more, and the model's is 96" in message


ROWS = [
    ({"text": None, "id": 1}, r'column "text" \(text_key\) is null; the columns of this row: text, id'),
    ({"text": 5}, r'column "text" \(text_key\) is a number \(5\); the columns of this row: text'),
    ({"body": "x"}, r'there is no column "text" \(text_key\); the columns of this row: body'),
    ({"text": ["a"]}, r"column \"text\" \(text_key\) is a list \(\['a'\]\); the columns of this row: text"),
]


@pytest.mark.parametrize(("row", "message"), ROWS)
def test_o49_a_row_without_text_is_refused_by_line_column_and_columns(
    tmp_path: Path, row: dict[str, object], message: str
) -> None:
    path = jsonl(tmp_path / "c.jsonl", [{"text": "good"}, row])
    with pytest.raises(DataError, match=r"c\.jsonl line 2: " + message):
        opened(path)


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_o49_rows_without_text_are_left_out_and_counted_if_asked(tmp_path: Path, policy: Policy) -> None:
    path = jsonl(tmp_path / "c.jsonl", [*(row for row, _ in ROWS), {"text": "good"}])
    documents, said = opened(path, policy)
    assert decoded(documents) == ["good"]
    assert "1 documents, 5 tokens; left out: 4 bad (the first: " in said[-1]
    assert "c.jsonl line 1: column" in said[-1]


@pytest.mark.parametrize("policy", ["stop", "skip", "replace"])
def test_o49_a_wrong_column_name_lists_the_columns_found(tmp_path: Path, policy: Policy) -> None:
    path = jsonl(tmp_path / "c.jsonl", [{"text": "a", "url": "u"}] * 3)
    with pytest.raises(
        DataError, match=r'there is no column "content" \(text_key\); .* of this row: text, url'
    ):
        opened(path, policy, key="content")

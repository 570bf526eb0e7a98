"""Tokenizers from files: ids as their libraries give them, one end token, no silent cut."""

import json
import sys
from pathlib import Path

import pytest

from hetero_megatron.data.tokenizer import ByteTokenizer
from hetero_megatron.data.tokenizer_files import JsonTokenizer, open_tokenizer
from hetero_megatron.errors import DataError
from tests.data.tokenizers_made_here import bpe_folder, sentencepiece_model, word_folder


def test_byte_is_the_byte_tokenizer() -> None:
    assert isinstance(open_tokenizer("byte"), ByteTokenizer)


@pytest.mark.parametrize("inside", ["", "tokenizer.json"])
def test_a_folder_or_its_file_gives_the_ids_of_the_text_and_the_end_token(
    tmp_path: Path, inside: str
) -> None:
    from tokenizers import Tokenizer

    folder = bpe_folder(tmp_path, start=True)
    tokenizer = open_tokenizer(str(folder / inside))
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "the cat 🐈 sat\x00 on"
    end = library.token_to_id("</s>")
    assert tokenizer.encode(text).tolist() == [*library.encode(text, add_special_tokens=False).ids, end]
    assert tokenizer.encode(text.encode()).tolist() == tokenizer.encode(text).tolist()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.end_of_document == end
    assert tokenizer.vocab_size == library.get_vocab_size()
    assert tokenizer.encode("").tolist() == [end]


def test_truncation_and_padding_that_the_file_asks_for_cut_and_fill_nothing(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = bpe_folder(tmp_path)
    whole = open_tokenizer(str(folder)).encode("the cat sat on the mat").tolist()
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(2)
    library.enable_padding(length=50)
    library.save(str(folder / "tokenizer.json"))
    assert open_tokenizer(str(folder)).encode("the cat sat on the mat").tolist() == whole


def test_the_vocabulary_reaches_to_the_largest_id_of_added_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = bpe_folder(tmp_path)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(["<|im_start|>"])
    library.save(str(folder / "tokenizer.json"))
    assert open_tokenizer(str(folder)).vocab_size == library.token_to_id("<|im_start|>") + 1


@pytest.mark.parametrize(
    ("file", "content", "end"),
    [
        ("tokenizer_config.json", {"eos_token": "w7"}, 7),
        ("tokenizer_config.json", {"eos_token": {"content": "w7", "lstrip": False}}, 7),
        ("special_tokens_map.json", {"eos_token": "w7"}, 7),
        ("generation_config.json", {"eos_token_id": 7}, 7),
        ("generation_config.json", {"eos_token_id": [7, 2]}, 7),
        ("config.json", {"eos_token_id": 7}, 7),
    ],
)
def test_the_end_token_is_found_beside_the_tokenizer(
    tmp_path: Path, file: str, content: dict[str, object], end: int
) -> None:
    folder = word_folder(tmp_path, 10, eos=None)
    (folder / file).write_text(json.dumps(content))
    assert open_tokenizer(str(folder)).encode("w3").tolist() == [3, end]


def test_the_tokenizers_own_end_token_goes_before_what_generation_stops_at(tmp_path: Path) -> None:
    folder = word_folder(tmp_path, 10, eos=[5, 6])
    (folder / "tokenizer_config.json").write_text('{"eos_token": "w7"}')
    assert open_tokenizer(str(folder)).end_of_document == 7


def test_equal_content_has_an_equal_fingerprint_and_another_end_token_another_one(tmp_path: Path) -> None:
    first = open_tokenizer(str(word_folder(tmp_path / "a", 10)))
    assert open_tokenizer(str(word_folder(tmp_path / "b", 10))).fingerprint == first.fingerprint
    assert open_tokenizer(str(word_folder(tmp_path / "b", 10, eos=7))).fingerprint != first.fingerprint


def test_a_sentencepiece_model_gives_its_ids_and_the_end_token(tmp_path: Path) -> None:
    import sentencepiece

    path = sentencepiece_model(tmp_path / "tokenizer.model")
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    for name in (str(path), str(tmp_path)):
        tokenizer = open_tokenizer(name)
        text = "the cat 🐈 sat"
        assert tokenizer.encode(text).tolist() == [*library.encode(text), library.eos_id()]
        assert tokenizer.decode(tokenizer.encode(text.encode())) == text
        assert tokenizer.vocab_size == library.get_piece_size()


def test_a_sentencepiece_model_without_an_end_token_is_refused(tmp_path: Path) -> None:
    path = sentencepiece_model(tmp_path / "t.model", eos_id=-1)
    with pytest.raises(
        DataError, match=r"t\.model has no end token \(eos\): .* train the model with --eos_id"
    ):
        open_tokenizer(str(path))


def test_an_end_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = word_folder(tmp_path, 10, eos=10)
    with pytest.raises(
        DataError, match=r"generation_config\.json says eos_token_id 10, but .* has ids 0 to 9 only"
    ):
        open_tokenizer(str(folder))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(
        DataError, match=r"tokenizer_config\.json names the eos_token '<end>', which .* does not have"
    ):
        open_tokenizer(str(folder))


def test_damaged_settings_are_refused_by_name(tmp_path: Path) -> None:
    folder = word_folder(tmp_path, 10)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not JSON"):
        open_tokenizer(str(folder))


def test_what_is_no_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="tokenizer gpt2 does not exist; a tokenizer is byte, a tokenizer.json or a"
    ):
        open_tokenizer("gpt2")
    with pytest.raises(DataError, match="the folder has neither tokenizer.json nor tokenizer.model"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "merges.txt").touch()
    with pytest.raises(DataError, match=r"merges\.txt is neither a \.json nor a \.model file"):
        open_tokenizer(str(tmp_path / "merges.txt"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer .*tokenizer\.json cannot be read: "):
        open_tokenizer(str(tmp_path))
    (tmp_path / "t.model").write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"t\.model cannot be read as a SentencePiece model"):
        open_tokenizer(str(tmp_path / "t.model"))
    with pytest.raises(DataError, match=r"gone\.json cannot be read: No such file"):
        JsonTokenizer("gone", tmp_path / "gone.json")


@pytest.mark.parametrize(
    ("package", "file"), [("tokenizers", "tokenizer.json"), ("sentencepiece", "t.model")]
)
def test_a_library_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, file: str
) -> None:
    (tmp_path / file).touch()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"needs the package {package}: pip install {package}"):
        open_tokenizer(str(tmp_path / file))

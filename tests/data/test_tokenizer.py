"""Bytes as tokens."""

from hetero_megatron.data.tokenizer import END_OF_DOCUMENT, ByteTokenizer


def test_every_byte_is_its_own_token_and_256_ends_the_document() -> None:
    document = bytes(range(256))
    tokens = ByteTokenizer().encode(document)
    assert tokens.tolist() == [*range(256), END_OF_DOCUMENT]
    assert ByteTokenizer().decode(tokens) == document
    assert ByteTokenizer().vocab_size == 257


def test_the_length_is_known_from_the_size_alone() -> None:
    for document in (b"", b"x", "ß☃".encode()):
        assert len(ByteTokenizer().encode(document)) == ByteTokenizer().length(len(document))

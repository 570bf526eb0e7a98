"""Small tokenizers, trained in place."""

import io
import json
from pathlib import Path

TEXTS = [
    "the cat sat on the mat",
    "a dog and a cat",
    "mats and hats and dogs",
    "0123456789",
    "the end of the text",
]


def bpe_folder(folder: Path, entries: int = 300, eos: str | None = "</s>", start: bool = False) -> Path:
    """A Hugging Face folder with a byte-level BPE tokenizer of so many entries; `start` adds a start token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    folder.mkdir(parents=True, exist_ok=True)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
        min_frequency=1,
    )
    made.train_from_iterator(TEXTS, trainer)
    if start:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    made.save(str(folder / "tokenizer.json"))
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder


def word_folder(folder: Path, entries: int, eos: int | list[int] | None = 2) -> Path:
    """A folder with a tokenizer of words: id n is `wn`, but <s> 1 and </s> 2; the end token by generation_config."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    words = {f"w{number}": number for number in range(entries) if number not in (1, 2)} | {
        "<s>": 1,
        "</s>": 2,
    }
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    if eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder


def sentencepiece_model(path: Path, eos_id: int = 2) -> Path:
    """A SentencePiece .model file, with bytes for what it does not know."""
    import sentencepiece

    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 4),
        model_writer=content,
        vocab_size=310,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        eos_id=eos_id,
        minloglevel=2,
    )
    path.write_bytes(content.getvalue())
    return path

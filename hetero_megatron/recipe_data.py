"""What the `data` section of a recipe means for `data/`: sources, tokenizer, and whether they fit the model."""

from pathlib import Path

from hetero_megatron.data.sources import CorpusSettings, SourceSettings, check_vocabulary
from hetero_megatron.data.tokenizer import VOCAB_SIZE
from hetero_megatron.data.tokenizer_files import open_tokenizer
from hetero_megatron.errors import HeteroError, RecipeError
from hetero_megatron.recipe_sections import DataSection


def refuse_no_folder(name: str, section: DataSection) -> None:
    """Refuse a `folder` that is none; `name` is the section's.

    Raises:
        RecipeError: saying what is there, and how a file of documents is named.
    """
    if section.folder is None or Path(section.folder).is_dir():
        return
    there = "is a file" if Path(section.folder).exists() else "does not exist"
    raise RecipeError(
        f"{name}.folder: {section.folder} {there}; a folder has a document in each file, and files of many documents "
        f"are sources: {name}: {{sources: [{{path: {section.folder}}}]}}"
    )


def corpus_settings(section: DataSection) -> CorpusSettings:
    """The sources and the tokenizer: a folder, a list of files, a list of sources, or the standard library."""
    if section.sources is not None:
        sources = tuple(
            SourceSettings(
                (each.path,),
                each.format,
                each.weight,
                each.suffixes,
                each.text_key,
                each.split,
                each.config,
                each.stream,
            )
            for each in section.sources
        )
    elif section.folder is not None:
        sources = (SourceSettings((section.folder,), "files", suffixes=section.suffixes),)
    elif section.files is not None:
        sources = (SourceSettings(section.files, "files"),)
    else:
        sources = (SourceSettings(),)
    return CorpusSettings(sources, section.tokenizer, section.bad_documents)


def check_tokens(name: str, section: DataSection, vocab_size: int) -> None:
    """Refuse text whose tokens do not fit the model's vocabulary; `name` is the section's.

    No corpus is opened, and a tokenizer that is not on this machine is refused only when it is needed.

    Raises:
        RecipeError: the tokenizer has more entries than the model, or cannot be used.
    """
    if all(source.tokenized for source in corpus_settings(section).sources):
        return
    if section.tokenizer == "byte":
        if vocab_size < VOCAB_SIZE:
            raise RecipeError(f"model.vocab_size: {vocab_size} is too small; byte tokens need {VOCAB_SIZE}")
    elif Path(section.tokenizer).exists():
        try:
            check_vocabulary(open_tokenizer(section.tokenizer), vocab_size)
        except HeteroError as error:
            raise RecipeError(f"{name}.tokenizer: {error}") from error

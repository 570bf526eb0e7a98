"""`data prepare`: the corpora of a recipe into its cache, or files into a .bin/.idx pair of their own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast, get_args

from hetero_megatron.data.formats import Format, open_reader
from hetero_megatron.data.indexed import IndexedDocuments
from hetero_megatron.data.prepare import prepare
from hetero_megatron.data.records import Policy
from hetero_megatron.data.tokenizer_files import open_tokenizer
from hetero_megatron.errors import RecipeError
from hetero_megatron.preparing import preparing_bar
from hetero_megatron.recipe import Recipe
from hetero_megatron.recipe_data import corpus_settings


def of_recipe(recipe: Recipe, workers: int | None) -> None:
    """Everything that the recipe's run would turn into tokens.

    Raises:
        RecipeError: a corpus or the tokenizer cannot be used.
    """
    sections = [(recipe.data, False)]
    if recipe.evaluation is not None:
        sections.append((recipe.evaluation.data, True))
    for section, held_out in sections:
        with recipe.named(), _goes_on():
            sources = recipe.open_sources(_say, preparing_bar, held_out, workers)
        for settings, source in zip(corpus_settings(section).sources, sources, strict=True):
            if not isinstance(source.documents, IndexedDocuments):
                _say(f"{settings.told}: read as it is, nothing to prepare")


def of_paths(
    paths: tuple[str, ...],
    output: str,
    *,
    tokenizer: str,
    kind: str,
    text_key: str,
    split: str,
    bad_documents: str,
    workers: int | None,
    overwrite: bool,
) -> None:
    """All documents of the paths, in their order, as one pair.

    Raises:
        RecipeError: an option has a value that is not known.
        DataError: a path or the tokenizer cannot be used, or the files cannot be written.
    """
    _one_of("--format", kind, get_args(Format))
    _one_of("--bad-documents", bad_documents, get_args(Policy))
    encoder = open_tokenizer(tokenizer)
    reader = open_reader(paths, cast(Format, kind), text_key=text_key, split=split)
    with _goes_on(), preparing_bar(f"{paths[0]} to tokens of {tokenizer}") as progress:
        made = prepare(
            reader,
            encoder,
            output,
            cast(Policy, bad_documents),
            workers=workers,
            overwrite=overwrite,
            say=_say,
            progress=progress,
        )
    _say(
        f"{output}.bin and .idx: {made.counts}; ids up to {made.largest}, for model.vocab_size {encoder.vocab_size}"
    )


@contextmanager
def _goes_on() -> Iterator[None]:
    """Say what an interrupt leaves."""
    try:
        yield
    except KeyboardInterrupt:
        _say("interrupted; finished parts are kept, and the same command goes on from them")
        raise


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise RecipeError(f"{option}: {value} is not known; one of {', '.join(known)}")


def _say(text: str) -> None:
    print(text, file=sys.stderr)

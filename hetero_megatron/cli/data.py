"""`hetero-megatron data`: text becomes tokens ahead of a run, and how long the documents are."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hetero_megatron.cli.options import AsJson, Overrides, RecipeFile, Settings, recipe_of
from hetero_megatron.errors import RecipeError

app = typer.Typer(
    help="Prepare corpora, and look at them.", no_args_is_help=True, pretty_exceptions_enable=False
)

Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Processes; left out, as many as there are cores.")
]
RECIPE_SUFFIXES = (".yaml", ".yml")


@app.command()
def prepare(
    what: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE [KEY=VALUE]... | PATH...", help="A recipe, or files of text."),
    ],
    settings: Settings = None,
    output: Annotated[
        str | None,
        typer.Option("--output", metavar="PREFIX", help="Of the files to write: PREFIX.bin, .idx."),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help="byte, a tokenizer.json, its folder, or a .model file.")
    ] = "byte",
    format: Annotated[
        str, typer.Option("--format", help="auto, files, json, parquet, text, saved or hub.")
    ] = "auto",
    text_key: Annotated[str, typer.Option("--text-key", help="The key or column of the text.")] = "text",
    split: Annotated[str, typer.Option("--split", help="Of a saved dataset or one of the hub.")] = "train",
    bad_documents: Annotated[
        str, typer.Option("--bad-documents", help="stop, skip or replace what is no valid text.")
    ] = "stop",
    workers: Workers = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what stands at PREFIX.")] = False,
) -> None:
    """Turn text into tokens: the corpora of a recipe into its cache, or files into Megatron's PREFIX.bin and .idx.

    Stopped at any moment, the same command goes on; the result is the same for any number of workers.
    """
    from hetero_megatron.cli import data_prepare as command

    if what[0].endswith(RECIPE_SUFFIXES):
        if output is not None:
            raise RecipeError(
                "a recipe's corpora go into its cache; drop --output, or name files instead of a recipe"
            )
        command.of_recipe(recipe_of(Path(what[0]), what[1:], settings), workers)
        return
    if output is None:
        raise RecipeError(
            f"--output PREFIX is missing: where {what[0]} goes as tokens (or give a .yaml recipe)"
        )
    if settings:
        raise RecipeError("--set changes a recipe, and there is none")
    command.of_paths(
        tuple(what),
        output,
        tokenizer=tokenizer,
        kind=format,
        text_key=text_key,
        split=split,
        bad_documents=bad_documents,
        workers=workers,
        overwrite=overwrite,
    )


@app.command()
def stats(
    recipe: RecipeFile,
    overrides: Overrides = None,
    settings: Settings = None,
    as_json: AsJson = False,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw a histogram into a file as well.")
    ] = None,
    workers: Workers = None,
) -> None:
    """Show how many documents and tokens a recipe's corpora have, and how long the documents are."""
    checked = recipe_of(recipe, overrides, settings)
    from hetero_megatron.cli import data_stats as command
    from hetero_megatron.preparing import preparing_bar

    with checked.named():
        sources = checked.open_sources(_to_stderr, preparing_bar, workers=workers)
    found = command.statistics(checked, sources)
    if png is not None:
        command.draw(found, png)
    if as_json:
        print(json.dumps(command.as_json(found), indent=2))
    else:
        command.print_tables(found)
        if png is not None:
            print(f"histogram: {png}")


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)

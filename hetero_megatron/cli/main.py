"""`hetero-megatron`: reads arguments and recipes, and calls what does the work.

Commands import what they run when they run, so that `--help` and a misspelt recipe answer at once.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from hetero_megatron.cli.data import app as data
from hetero_megatron.cli.errors import reported
from hetero_megatron.cli.options import AsJson, Overrides, RecipeFile, Settings, recipe_of
from hetero_megatron.errors import RecipeError

app = typer.Typer(
    name="hetero-megatron",
    help="Llama training under heterogeneous parallel strategies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(data, name="data")
convert = typer.Typer(help="Turn Hugging Face folders into run folders, and back.", no_args_is_help=True)
app.add_typer(convert, name="convert")


@app.command()
def pretrain(
    recipe: RecipeFile,
    overrides: Overrides = None,
    settings: Settings = None,
    elastic: Annotated[
        bool,
        typer.Option("--elastic", help="Go on with the others when ranks are lost (recipe section elastic)."),
    ] = False,
    node_rank: Annotated[
        int,
        typer.Option(
            "--node-rank", metavar="N", help="Of an elastic run on several nodes: which of them this is."
        ),
    ] = 0,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", metavar="HOST:PORT", help="Where its node 0 listens.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Write what every rank does in logging.trace_steps, for ui.perfetto.dev.",
        ),
    ] = None,
    nodes_present: Annotated[
        int | None,
        typer.Option(
            "--nodes-present", metavar="K", help="How many nodes it begins with; the others come later."
        ),
    ] = None,
) -> None:
    """Train: start the local ranks (or join torchrun's) and write metrics into the run folder.

    A run that was stopped or killed goes on from its newest checkpoint.
    SIGTERM, or Ctrl-C once, ends it after its step, saved, with exit code 0;
    1 is a failure while training, 2 a refusal before it.
    """
    traced = [] if trace is None else [f"logging.trace={json.dumps(str(trace))}"]
    checked = recipe_of(recipe, overrides, [*(settings or ()), *traced])
    from hetero_megatron import train
    from hetero_megatron.elastic import Place

    place = Place(node_rank, endpoint, nodes_present) if elastic else None
    raise typer.Exit(train.start(train.prepare(checked), os.environ, place))


@app.command()
def explain(
    recipe: RecipeFile,
    overrides: Overrides = None,
    settings: Settings = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Only what this rank does.")] = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Print the time grid of a step as well.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Print what every rank's device has to hold as well.")
    ] = False,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Write the annotation plan, as JSON, to a file."),
    ] = None,
    schedule_csv: Annotated[
        Path | None,
        typer.Option(
            "--schedule-csv",
            metavar="FILE",
            help="Write the order of forwards and backwards to a file, which strategy.schedule can name.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a strategy means: pipelines, groups, and the communication of every Reshard."""
    checked = recipe_of(recipe, overrides, settings)
    from hetero_megatron.cli import explain as command

    command.run(
        checked,
        rank=rank,
        as_json=as_json,
        schedule=schedule,
        plan=plan,
        schedule_csv=schedule_csv,
        memory=memory,
    )


@app.command()
def simulate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    settings: Settings = None,
    as_json: AsJson = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write a trace that ui.perfetto.dev opens."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw the timeline of every stage.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="Times that `profile` has measured."),
    ] = None,
    beside: Annotated[
        Path | None,
        typer.Option(
            "--beside", metavar="TRACE", help="Compare with steps that `pretrain --trace` has recorded."
        ),
    ] = None,
) -> None:
    """Predict a step: its time, where each rank's time and memory go, and how far it is from the bound."""
    checked = recipe_of(recipe, overrides, settings)
    from hetero_megatron.cli import simulate as command

    command.run(checked, as_json=as_json, trace=trace, png=png, profile=profile, beside=beside)


@app.command()
def profile(
    recipe: RecipeFile,
    overrides: Overrides = None,
    settings: Settings = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where the profile is written.")
    ] = None,
    tp: Annotated[str, typer.Option("--tp", help="Degrees of tensor parallelism, such as 1,2.")] = "",
    cp: Annotated[str, typer.Option("--cp", help="Degrees of context parallelism.")] = "",
    tokens: Annotated[str, typer.Option("--tokens", help="Tokens of a micro-batch, such as 2048,4096.")] = "",
    lengths: Annotated[str, typer.Option("--lengths", help="Lengths of documents.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is repeated.")] = 5,
    copies: Annotated[
        int,
        typer.Option(
            min=0,
            help="Stages that compute side by side, as cores do that share a machine; 0 for the recipe's ranks.",
        ),
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure the units of a model and the links on this machine, for `simulate` and the planner."""
    checked = recipe_of(recipe, overrides, settings)
    from hetero_megatron.cli import profile as command

    command.run(checked, output, as_json, tp, cp, tokens, lengths, rounds, copies)


@app.command()
def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    settings: Settings = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Write the strategy section, as YAML, to a file."
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say where time goes, and why other plans lost.")
    ] = False,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw the plan into a picture file.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="Measured times, as `profile` writes them."),
    ] = None,
    after_loss: Annotated[
        str,
        typer.Option("--after-loss", metavar="RANKS", help="Plan on after these ranks died: 31, or 28-31,3."),
    ] = "",
    after_join: Annotated[
        str,
        typer.Option("--after-join", metavar="KIND:COUNT", help="Plan on with a new node: h20:8, or more."),
    ] = "",
    zero: Annotated[
        int | None,
        typer.Option("--zero", min=0, max=1, help="Only with this; left out, whichever is faster."),
    ] = None,
    pipelines: Annotated[
        int | None, typer.Option("--pipelines", min=1, help="Only with so many pipelines.")
    ] = None,
    solver: Annotated[
        str,
        typer.Option(
            "--solver", help="Who confirms the plan: highs, cbc, none, or the path of a CBC program."
        ),
    ] = "highs",
    minlp: Annotated[
        bool, typer.Option("--minlp", help="Let SCIP propose pipelines and stages too, for up to 8 devices.")
    ] = False,
    lengths: Annotated[
        str,
        typer.Option(
            "--lengths",
            metavar="FILE",
            help="A set of strategies for documents of these lengths: an .npz or .npy file, numbers as text, or `data`.",
        ),
    ] = "",
    most: Annotated[
        int, typer.Option("--most", min=1, help="With --lengths: at most so many strategies.")
    ] = 4,
    as_json: AsJson = False,
) -> None:
    """Choose a strategy for a recipe's model, cluster and batch, and say how good it is; a given one is compared."""
    lost = tuple(sorted(_lost_ranks(after_loss, "--after-loss")))
    checked = recipe_of(recipe, overrides, settings)
    if lengths:
        from hetero_megatron.cli import plan_lengths

        plan_lengths.run(checked, plan_lengths.Options(lengths, output, as_json, png, profile, most))
        return
    from hetero_megatron.cli import plan as command

    options = command.Options(
        output, explain, as_json, png, profile, lost, after_join, zero, pipelines, solver, minlp
    )
    command.run(checked, options)


@app.command()
def plot(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="The folder of a run.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The picture, such as run.png.")
    ],
) -> None:
    """Draw a run's document lengths, the strategy that took each step, and the step times."""
    from hetero_megatron.cli import plot as command

    command.run(folder, output)


@app.command()
def switch(
    before: Annotated[Path, typer.Argument(metavar="FROM", help="The recipe that runs now.")],
    after: Annotated[Path, typer.Argument(metavar="TO", help="The recipe that runs next.")],
    lost: Annotated[
        str, typer.Option("--lost", metavar="RANKS", help="Ranks that died: 31, or 28-31,3.")
    ] = "",
    bytes_per_parameter: Annotated[
        int, typer.Option(min=1, help="Parameter and optimizer state: 12 for FP32 with two Adam moments.")
    ] = 12,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A change of both recipes; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what each rank would send to change from one strategy to another, without training."""
    first, second = (recipe_of(path, None, settings) for path in (before, after))
    ranks = _lost_ranks(lost)
    from hetero_megatron.cli import switch as command

    command.run(first, second, lost=ranks, bytes_per_parameter=bytes_per_parameter, as_json=as_json)


def _lost_ranks(text: str, option: str = "--lost") -> frozenset[int]:
    """The ranks of `--lost` or another option."""
    from hetero_megatron.recipe_text import number_list

    try:
        return frozenset(number_list(text)) if text else frozenset()
    except RecipeError as error:
        raise RecipeError(f"{option}: {error}") from error


@convert.command("hf-to-run")
def hf_to_run(
    source: Annotated[Path, typer.Argument(metavar="HF_FOLDER", help="With config.json and safetensors.")],
    run: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Gets a checkpoint of iteration 0.")],
) -> None:
    """Make a run's first checkpoint from Hugging Face weights; checkpoint.load or resume then starts from it."""
    from hetero_megatron.cli import convert as command

    command.hf_to_run(source, run)


@convert.command("run-to-hf")
def run_to_hf(
    run: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="A run's folder, or one checkpoint.")],
    target: Annotated[Path, typer.Argument(metavar="HF_FOLDER", help="Gets the model; must not have one.")],
    iteration: Annotated[
        int | None, typer.Option("--iteration", help="Which checkpoint; left out, the newest.")
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16"] | None,
        typer.Option("--dtype", help="Left out: that of the Hugging Face folder the run came from, or fp32."),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Bytes of a file: 5GB, 500MB, 2GiB.")
    ] = "5GB",
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="FOLDER", help="Whose tokenizer files are copied."),
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face folder that transformers loads."""
    from hetero_megatron.cli import convert as command

    size = command.shard_bytes(max_shard_size)
    command.run_to_hf(run, target, iteration, dtype, size, tokenizer)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point `hetero-megatron`; ends the process with the exit code."""
    with reported():
        app(args=None if arguments is None else list(arguments), prog_name="hetero-megatron")


if __name__ == "__main__":
    main()

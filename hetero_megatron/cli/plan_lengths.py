"""`hetero-megatron plan --lengths`: a set of strategies for documents of mixed lengths (paper A.1 c, Tables 15, 16)."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from hetero_megatron.data.documents import Stream
from hetero_megatron.errors import RecipeError
from hetero_megatron.length_strategies import length_costs
from hetero_megatron.planner.chooser import Choice, StepChooser
from hetero_megatron.planner.layouts import Layouts
from hetero_megatron.planner.length_sample import Lengths, LengthSample
from hetero_megatron.planner.mixed import MixedPlan, plan_mixed
from hetero_megatron.planner.mixed_floor import floor_seconds
from hetero_megatron.planner.mixed_others import VARLEN, Other, others
from hetero_megatron.planner.mixed_picture import draw_mixed, short
from hetero_megatron.profile_file import profiles_of
from hetero_megatron.recipe import Recipe
from hetero_megatron.strategy_yaml import strategies_section, strategies_yaml

CORPUS = "data"
"""In the place of a file: the recipe's own documents."""
STEPS, SEED = 40, 77


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says beside the recipe."""

    lengths: str
    output: Path | None = None
    as_json: bool = False
    png: Path | None = None
    profile: Path | None = None
    most: int = 4


@dataclass(frozen=True, slots=True)
class Found:
    """A plan, and what it does with sample steps of its own beside what others do with them."""

    plan: MixedPlan
    sample: LengthSample
    choices: tuple[Choice, ...]
    others: tuple[Other, ...]
    floor: float

    @property
    def homogeneous(self) -> Other | None:
        """The best homogeneous strategy, with variable-length attention."""
        return next((each for each in self.others if each.name == VARLEN), None)

    @property
    def mean(self) -> float:
        """The mean step, switches included."""
        return float(np.mean([each.total_seconds for each in self.choices]))


def run(recipe: Recipe, options: Options) -> None:
    """Plan, print, and write what was asked for.

    Raises:
        HeteroError: nothing fits, or a file cannot be read or written.
    """
    with recipe.named():
        lengths = read_lengths(options.lengths, recipe)
        costs = length_costs(recipe, profiles_of(recipe, options.profile))
        tokens = recipe.training.global_batch_size * recipe.training.seq_length
        plan = plan_mixed(costs, lengths, tokens, options.most)
        sample = LengthSample.draw(lengths, costs.seq_length, tokens, STEPS, SEED)
        chooser = StepChooser(plan.named, costs)
        choices = chooser.choose_many([step.tolist() for step in sample.steps])
        layouts = Layouts(costs, costs.seq_length)
        floor = float(np.mean(floor_seconds(layouts, sample.steps)))
        found = Found(plan, sample, choices, others(layouts, sample.steps), floor)
    if options.output is not None:
        comment = (
            f"made by `hetero-megatron plan --lengths`: {found.mean:.4g} s a mean step predicted, switches included; "
            f"floor {floor:.4g} s"
        )
        write(strategies_yaml(plan.named, comment), options.output)
    if options.png is not None:
        lines = [("floor", floor)]
        if found.homogeneous is not None:
            lines.append(("homogeneous", found.homogeneous.seconds))
        titles = [str(each) for each in plan.strategies]
        draw_mixed(sample, plan.named, choices, lines, options.png, titles)
    if options.as_json:
        print(json.dumps(as_json(found)))
    else:
        _print(found, costs.warnings)


def read_lengths(source: str, recipe: Recipe) -> Lengths:
    """Lengths in tokens: `lengths` of an .npz file, an .npy file, a text file with one per line, or the recipe's data.

    Raises:
        RecipeError: the file cannot be read, or holds no lengths; or the data is a stream.
    """
    if source == CORPUS:
        found = []
        for each in recipe.open_sources(lambda _: None):
            if isinstance(each.documents, Stream):
                raise RecipeError(
                    "--lengths data: the lengths of a stream's documents are not known; prepare the data "
                    "(hetero-megatron data prepare), or give a file of lengths"
                )
            found.append(np.asarray(each.documents.lengths, dtype=np.int64))
        lengths = np.concatenate(found)
        return lengths[lengths > 0]
    path = Path(source)
    try:
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                if "lengths" not in arrays:
                    raise RecipeError(
                        f"--lengths: {path} has arrays {sorted(arrays)}, and none named lengths"
                    )
                values = np.asarray(arrays["lengths"])
        elif path.suffix == ".npy":
            values = np.load(path)
        else:
            values = np.array(
                [int(line) for line in path.read_text(encoding="utf-8").split()], dtype=np.int64
            )
    except OSError as error:
        raise RecipeError(f"--lengths: {path}: {error.strerror or error}") from error
    except (ValueError, BadZipFile) as error:
        raise RecipeError(f"--lengths: {path} holds no whole numbers: {error}") from error
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise RecipeError(
            f"--lengths: {path} holds {values.dtype} of {values.ndim} dimensions; lengths are a row of whole numbers"
        )
    return values.astype(np.int64)


def as_json(found: Found) -> dict[str, object]:
    """All numbers of a plan."""
    counts = Counter(each.strategy for each in found.choices)
    best = found.homogeneous
    return {
        "step_seconds": found.mean,
        "floor_seconds": found.floor,
        "plan_seconds": found.plan.plan_seconds,
        "switches": sum(each.switch_seconds > 0 for each in found.choices),
        "homogeneous": None if best is None else {"step_seconds": best.seconds, "layout": best.told},
        "baselines": {
            each.name: {
                "step_seconds": each.seconds,
                "gain": each.seconds / found.mean - 1,
                "strategy": each.told,
                "limits": each.limits,
            }
            for each in found.others
        },
        "strategies": [
            {
                "pipelines": str(each),
                "steps": counts[number],
                "mean_seconds": _mean(found.choices, number),
                **section,
            }
            for number, (each, section) in enumerate(
                zip(found.plan.strategies, strategies_section(found.plan.named), strict=True)
            )
        ],
        "steps": [
            {
                "longest": longest,
                "strategy": found.plan.named[each.strategy].name,
                "seconds": each.candidate.seconds,
                "switch_seconds": each.switch_seconds,
                "imbalance": each.report.imbalance,
            }
            for longest, each in zip(found.sample.longest, found.choices, strict=True)
        ],
    }


def _mean(choices: Sequence[Choice], number: int) -> float | None:
    own = [each.candidate.seconds for each in choices if each.strategy == number]
    return float(np.mean(own)) if own else None


def _print(found: Found, warnings: Sequence[str] | dict[str, None]) -> None:
    console = Console(highlight=False)
    context = found.sample.context
    console.print(
        f"{len(found.plan.strategies)} strategies for documents of up to {short(context)} tokens, "
        f"{found.sample.tokens_per_step:,} tokens a step; planned in {found.plan.plan_seconds:.1f} s",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("strategy", style="bold")
    table.add_column("longest document", justify="right")
    table.add_column("pipelines", overflow="fold")
    table.add_column("micro-batch", justify="right")
    table.add_column("steps", justify="right")
    table.add_column("mean step", justify="right")
    for number, each in enumerate(found.plan.strategies):
        sizes = dict.fromkeys(short(p.tokens(context)) for p in each.named.strategy.pipelines)
        mean = _mean(found.choices, number)
        table.add_row(
            each.named.name,
            short(each.named.max_length or context),
            "\n".join(str(each).split(", ")),
            "\n".join(sizes),
            str(sum(choice.strategy == number for choice in found.choices)),
            "" if mean is None else f"{mean:.3g} s",
        )
    console.print(table)
    switches = sum(each.switch_seconds > 0 for each in found.choices)
    console.print(
        f"predicted mean step: [bold]{found.mean:.4g} s[/bold] over {len(found.choices)} sample steps with {switches} "
        f"switches; the floor without bubbles, rests and exchanges is {found.floor:.4g} s, "
        f"and the mean step {100 * (found.mean / found.floor - 1):.1f}% above it",
        soft_wrap=True,
    )
    for other in found.others:
        console.print(
            f"{other.name}: {other.seconds:.4g} s, our gain {100 * (other.seconds / found.mean - 1):.1f}%; {other.told}. "
            f"{other.limits}",
            soft_wrap=True,
        )
    for text in warnings:
        console.print(f"warning: {text}", style="yellow", soft_wrap=True)


def write(text: str, path: Path) -> None:
    """Write the strategies' file.

    Raises:
        RecipeError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"-o: {path} cannot be written: {error.strerror}") from error

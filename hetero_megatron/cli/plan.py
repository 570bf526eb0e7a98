"""`hetero-megatron plan`: the strategy that the planner chooses for a recipe, and how good it is (paper A.1, Table 9)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hetero_megatron.cluster import Cluster, Device, ranges_text
from hetero_megatron.errors import HeteroError, RecipeError
from hetero_megatron.planner.baselines import LIMITS, baselines
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.plan import Plan, make_plan
from hetero_megatron.planner.plan_picture import draw_plan
from hetero_megatron.planner.problem import Choices
from hetero_megatron.planner.realize import Priced
from hetero_megatron.planner.reasons import bubble, why_slower
from hetero_megatron.planner.replan import Replan, replan
from hetero_megatron.planner.solver import Solver
from hetero_megatron.planner.survival import fragile, survives
from hetero_megatron.profile_file import profiles_of
from hetero_megatron.recipe import Recipe
from hetero_megatron.recipe_plan import costs_of, problem_of
from hetero_megatron.report import short_strategy, strategy_table
from hetero_megatron.strategy import Stage, Strategy
from hetero_megatron.strategy_yaml import strategy_section, strategy_yaml

GIB = 2**30
# H800 yellow, as in the paper's Table 9.
STYLES = ("yellow", "cyan", "green", "magenta", "blue", "red")
MOST_LOST_PAIRS = 64
"""Ranks up to which double losses are looked at one by one."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says beside the recipe."""

    output: Path | None = None
    explain: bool = False
    as_json: bool = False
    png: Path | None = None
    profile: Path | None = None
    lost: tuple[int, ...] = ()
    joined: str = ""
    zero: int | None = None
    pipelines: int | None = None
    solver: str = "highs"
    minlp: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """The recipe's own strategy under the same cost model."""

    strategy: Strategy
    seconds: float
    memory_bytes: Mapping[int, int]
    fits: bool


def run(recipe: Recipe, options: Options) -> None:
    """Plan, print, and write what was asked for.

    Raises:
        HeteroError: nothing fits, or a file cannot be read or written.
    """
    with recipe.named():
        profiles = profiles_of(recipe, options.profile)
        choices = Choices(
            zero=(0, 1) if options.zero is None else (options.zero,),
            pipelines=() if options.pipelines is None else (options.pipelines,),
        )
        problem = problem_of(recipe, choices)
        costs = costs_of(recipe, problem, profiles)
        plan = make_plan(problem, costs, Solver(options.solver), minlp=options.minlp)
        plan.strategy.check(problem.config.facts, problem.cluster.ranks)
        others = baselines(problem, costs, plan.homogeneous)
        given = _given(recipe, costs, problem.cluster)
        joined = new_nodes(options.joined, problem.cluster)
        after = replan(plan, options.lost, joined) if options.lost or joined else None
    chosen = plan.best if after is None else after.best
    if options.output is not None:
        comment = f"made by `hetero-megatron plan`: {chosen.seconds:.4g} s a step predicted, bound {plan.bound_seconds:.4g} s"
        _write(strategy_yaml(chosen.strategy, comment), options.output, "-o")
    if options.png is not None:
        draw_plan(
            chosen, after.cluster if after else problem.cluster, after.costs if after else costs, options.png
        )
    if options.as_json:
        print(json.dumps(as_json(plan, others, given, after)))
    else:
        _print(plan, others, given, after, costs, options.explain)


def new_nodes(text: str, cluster: Cluster) -> tuple[Device, ...]:
    """Devices of the nodes in `h20:8` or `h20:8,h800:4`, with the next ranks and nodes.

    Raises:
        RecipeError: the text is no such list.
        ClusterError: the cluster has no devices of that kind.
    """
    devices: list[Device] = []
    rank = max(cluster.ranks) + 1
    node = max(device.node for device in cluster.devices) + 1
    for number, part in enumerate(filter(None, text.split(","))):
        kind, _, count = part.strip().partition(":")
        if not count.isdigit() or not int(count):
            raise RecipeError(f"--after-join: {part!r} is no node; write a kind and a count, such as h20:8")
        devices += [Device(rank + len(devices) + n, kind, node + number) for n in range(int(count))]
    return tuple(devices)


def _given(recipe: Recipe, costs: Costs, cluster: Cluster) -> Given | None:
    """The recipe's strategy if it has one that fits this model and cluster."""
    if recipe.strategy.auto:
        return None
    try:
        strategy = recipe.make_strategy()
        strategy.check(recipe.make_config().facts, cluster.ranks)
    except HeteroError:
        return None
    memory = costs.memory(strategy)
    fits = all(need <= cluster.kind(rank).memory_bytes for rank, need in memory.items())
    return Given(strategy, costs.step(strategy).seconds, memory, fits)


def _write(text: str, path: Path, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{option}: {path} cannot be written: {error.strerror}") from error


def as_json(
    plan: Plan, others: Mapping[str, Priced | None], given: Given | None, after: Replan | None
) -> dict[str, object]:
    """All numbers of a plan."""
    found: dict[str, object] = {
        "step_seconds": plan.best.seconds,
        "bound_seconds": plan.bound_seconds,
        "gap": plan.gap,
        "plan_seconds": plan.seconds,
        "method": plan.method,
        "optimal": plan.optimal,
        "notes": list(plan.notes),
        "strategy": strategy_section(plan.strategy),
        "memory_bytes": {str(rank): need for rank, need in sorted(plan.best.memory_bytes.items())},
        "homogeneous": _compared(plan.homogeneous, plan.best),
        "baselines": {name: _limited(name, each, plan.best) for name, each in others.items()},
        "runner_up": _compared(plan.runner_up, plan.best),
        "given": None
        if given is None
        else {
            "step_seconds": given.seconds,
            "gain": given.seconds / plan.best.seconds - 1,
            "fits": given.fits,
            "strategy": strategy_section(given.strategy),
        },
        "survives": _survival(plan.strategy, plan.problem.config.num_layers),
    }
    if after is not None:
        found["after_change"] = {
            "lost": list(after.lost),
            "joined": list(after.joined),
            "step_seconds": after.best.seconds,
            "plan_seconds": after.seconds,
            "strategy": strategy_section(after.best.strategy),
            "moved_bytes": after.moved_bytes,
            "switch_seconds": after.switch_seconds,
            "lost_states": [list(each) for each in after.lost_states],
            "notes": list(after.notes),
            "memory_bytes": {str(rank): need for rank, need in sorted(after.best.memory_bytes.items())},
        }
    return found


def _compared(other: Priced | None, best: Priced) -> dict[str, object] | None:
    if other is None:
        return None
    return {
        "step_seconds": other.seconds,
        "gain": other.seconds / best.seconds - 1,
        "strategy": strategy_section(other.strategy),
    }


def _limited(name: str, other: Priced | None, best: Priced) -> dict[str, object]:
    """Another system's plan with what it cannot do; numbers are None where none fits."""
    compared = _compared(other, best) or dict.fromkeys(("step_seconds", "gain", "strategy"))
    return {**compared, "limits": LIMITS[name]}


def _survival(strategy: Strategy, layers: int) -> dict[str, object]:
    """Which losses leave all data in survivors; pairs as the fatal ones."""
    return {
        "single": [rank for rank in strategy.ranks if survives(strategy, layers, (rank,))],
        "fatal_pairs": [list(pair) for pair in fragile(strategy, layers)]
        if len(strategy.ranks) <= MOST_LOST_PAIRS
        else None,
    }


def _print(
    plan: Plan,
    others: Mapping[str, Priced | None],
    given: Given | None,
    after: Replan | None,
    costs: Costs,
    explain: bool,
) -> None:
    console = Console(highlight=False)
    cluster = plan.problem.cluster
    styles = kind_styles(cluster)

    def colour(stage: Stage) -> str:
        return styles[cluster.kind(stage.ranks[0]).name]

    console.print(Text.assemble(*_legend(cluster, styles)))
    console.print(strategy_table(plan.strategy, colour))
    _say(console, _headline(plan))
    console.print(_comparison(plan, others, given))
    for name in others:
        _say(console, f"{name}: {LIMITS[name]}")
    console.print(_memory(plan.best, cluster))
    for warning in costs.warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    for note in plan.notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True)
    _say(console, _loss_text(plan.strategy, plan.problem.config.num_layers))
    if explain:
        _explain(console, plan, others)
    if after is not None:
        now = after.cluster
        console.print(
            strategy_table(after.best.strategy, lambda stage: styles[now.kind(stage.ranks[0]).name])
        )
        _say(console, _after_text(after))


def kind_styles(cluster: Cluster) -> dict[str, str]:
    """A colour for each kind of device, in the cluster's order."""
    return {kind.name: STYLES[n % len(STYLES)] for n, kind in enumerate(cluster.kinds)}


def _legend(cluster: Cluster, styles: Mapping[str, str]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for kind, style in styles.items():
        count = sum(device.kind == kind for device in cluster.devices)
        found.append((f"{count} {kind}   ", f"bold {style}"))
    return found


def _headline(plan: Plan) -> str:
    return (
        f"step {plan.best.seconds:.4g} s predicted; bound {plan.bound_seconds:.4g} s "
        f"(all work over the speed of all devices), gap {100 * plan.gap:.1f}%; "
        f"bubble {100 * bubble(plan.best):.1f}%; planned in {plan.seconds:.2f} s by {plan.method}"
    )


def _comparison(plan: Plan, others: Mapping[str, Priced | None], given: Given | None) -> Table:
    table = Table(title="against others, same cost model", title_justify="left")
    table.add_column("plan")
    table.add_column("strategy", overflow="fold")
    table.add_column("step s", justify="right")
    table.add_column("our gain", justify="right")
    best = plan.best.seconds
    table.add_row("planned", _short(plan.strategy), f"{best:.4g}", "-", style="bold")
    for name, each in others.items():
        if each is None:
            table.add_row(name, "none fits", "-", "-")
        else:
            table.add_row(
                name, _short(each.strategy), f"{each.seconds:.4g}", f"{100 * (each.seconds / best - 1):.1f}%"
            )
    if given is not None:
        longer = f"{100 * (given.seconds / best - 1):.1f}%"
        table.add_row(
            "given",
            _short(given.strategy),
            f"{given.seconds:.4g}",
            longer if given.fits else f"{longer}, does not fit",
        )
    return table


def _short(strategy: Strategy) -> str:
    """Equal pipelines once, with their number."""
    counts: dict[str, int] = {}
    for name in short_strategy(strategy).split("+"):
        counts[name] = counts.get(name, 0) + 1
    return " + ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())


def _memory(best: Priced, cluster: Cluster) -> Table:
    table = Table(title="memory per rank, GiB", title_justify="left")
    for name in ("ranks", "need", "device"):
        table.add_column(name, justify="left" if name == "ranks" else "right")
    rows: dict[tuple[str, str], list[int]] = {}
    for rank, need in sorted(best.memory_bytes.items()):
        kind = cluster.kind(rank)
        rows.setdefault((f"{need / GIB:.3g}", f"{kind.name} {kind.memory_bytes / GIB:.3g}"), []).append(rank)
    for (told, device), ranks in rows.items():
        table.add_row(ranges_text(ranks), told, device)
    return table


def _loss_text(strategy: Strategy, layers: int) -> str:
    single = [rank for rank in strategy.ranks if survives(strategy, layers, (rank,))]
    if not single:
        why = "ZeRO-1 keeps states once" if strategy.zero else "there is one copy of each layer"
        return f"losing any rank loses training state ({why}): a checkpoint is needed then"
    if len(single) < len(strategy.ranks):
        return f"losing one of ranks {ranges_text(single)} leaves all state in survivors; losing another does not"
    if len(strategy.ranks) > MOST_LOST_PAIRS:
        return "losing any one rank leaves all state in survivors"
    pairs = fragile(strategy, layers)
    total = len(strategy.ranks) * (len(strategy.ranks) - 1) // 2
    return f"losing any one rank leaves all state in survivors, and so do {total - len(pairs)} of {total} losses of two"


def _after_text(after: Replan) -> str:
    moved = f"{after.moved_bytes / GIB:.3g} GiB move in about {after.switch_seconds:.3g} s"
    notes = "".join(f"; {note}" for note in after.notes)
    changes = [
        f"{what} {ranges_text(ranks)}"
        for what, ranks in (("losing", after.lost), ("joining", after.joined))
        if ranks
    ]
    return (
        f"after {' and '.join(changes)}: step {after.best.seconds:.4g} s, {moved}; "
        f"planned in {after.seconds:.3f} s{notes}"
    )


def _explain(console: Console, plan: Plan, others: Mapping[str, Priced | None]) -> None:
    estimate = plan.best.estimate
    for number, (pipeline, seconds, busy) in enumerate(
        zip(plan.strategy.pipelines, estimate.pipeline_seconds, estimate.busy, strict=True)
    ):
        each = ", ".join(f"{own / max(1, pipeline.micro_batches):.3g}" for own in busy)
        _say(console, f"pipeline {number}: {seconds:.4g} s; seconds of one micro-batch by stage: {each}")
    _say(
        console, f"after the last backward: {estimate.tail_seconds:.3g} s of gradients, update and agreement"
    )
    if plan.runner_up is not None:
        told = why_slower(plan.runner_up, plan.best)
        _say(console, f"runner-up {_short(plan.runner_up.strategy)}: {told}")
    for name, other in others.items():
        if other is not None:
            _say(console, f"{name}: {why_slower(other, plan.best)}")


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=not console.is_terminal)


__all__: Sequence[str] = ["Options", "as_json", "run"]

"""`hetero-megatron switch`: a dry run of a change of strategy (paper §7, Table 4)."""

import dataclasses
import json
from collections.abc import Mapping
from fractions import Fraction
from typing import get_args

from rich.console import Console
from rich.table import Table

from hetero_megatron.annotation import AnnotationPlan
from hetero_megatron.cluster import Cluster
from hetero_megatron.comm import Algorithm
from hetero_megatron.errors import RecipeError
from hetero_megatron.graph.nodes import Graph
from hetero_megatron.graph.trace import trace
from hetero_megatron.layout import annotate
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama
from hetero_megatron.recipe import Recipe
from hetero_megatron.report import rank_text
from hetero_megatron.switch_plan import SwitchPlan, parameters_between, plan_switch

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
NOTES: Mapping[str, str] = {
    "naive": "smallest living owner sends",
    "unfused": "heuristics, tensor by tensor",
    "fused": "heuristics, all tensors in one table",
}


def run(before: Recipe, after: Recipe, lost: frozenset[int], bytes_per_parameter: int, as_json: bool) -> None:
    """Print the bytes that each rank sends over each class of link, for the three BSR algorithms.

    Raises:
        RecipeError: the recipes describe different models, or `lost` names ranks that the new strategy uses.
        ReshardError: part of a tensor has no living owner.
    """
    plan = make_switch(before, after, lost, bytes_per_parameter)
    if as_json:
        print(json.dumps(_as_json(plan, bytes_per_parameter)))
    else:
        _print(plan, bytes_per_parameter)


def make_switch(before: Recipe, after: Recipe, lost: frozenset[int], bytes_per_parameter: int) -> SwitchPlan:
    """The SwitchPlan between two recipes of one model."""
    config = before.make_config()
    if config != after.make_config():
        raise RecipeError(
            f"FROM and TO are different models ({_difference(config, after.make_config())}): "
            "a switch changes the strategy, not the model"
        )
    cluster = _wider(before.make_cluster(), after.make_cluster())
    _check_lost(lost, after, cluster)
    graph = trace(Llama(config))
    shapes = {name: graph.parameter_shape(name) for name in graph.parameters}
    parameters = parameters_between(shapes, _plan(graph, before), _plan(graph, after))
    return plan_switch(parameters, cluster, lost, bytes_per_parameter)


def _difference(before: LlamaConfig, after: LlamaConfig) -> str:
    pairs = zip(dataclasses.asdict(before).items(), dataclasses.asdict(after).values(), strict=True)
    return ", ".join(f"{name} {old} and {new}" for (name, old), new in pairs if old != new)


def _check_lost(lost: frozenset[int], after: Recipe, cluster: Cluster) -> None:
    for rank in sorted(lost - set(cluster.ranks)):
        raise RecipeError(f"--lost: rank {rank} is not in the cluster (ranks {rank_text(cluster.ranks)})")
    used = lost & set(after.make_strategy().ranks)
    if used:
        with after.named():
            raise RecipeError(
                f"rank {min(used)} is lost, but the new strategy uses it; list it under strategy.idle_ranks"
            )


def _wider(before: Cluster, after: Cluster) -> Cluster:
    """The cluster with more devices, after a check that it continues the other one."""
    small, wide = sorted((before, after), key=lambda cluster: len(cluster.devices))
    for device in small.devices:
        if wide.device(device.rank) != device:
            kinds = (before.device(device.rank).kind, after.device(device.rank).kind)
            raise RecipeError(
                f"rank {device.rank} is another device in FROM ({kinds[0]}) than in TO ({kinds[1]}); "
                "describe the same cluster in both"
            )
    return wide


def _plan(graph: Graph, recipe: Recipe) -> AnnotationPlan:
    return annotate(
        recipe.make_strategy(), recipe.make_config().facts, graph.parameters, graph.reshards, graph.inputs
    )


def _plain(sent: int | Fraction) -> int | float:
    return int(sent) if Fraction(sent).denominator == 1 else float(sent)


def _as_json(plan: SwitchPlan, bytes_per_parameter: int) -> dict[str, object]:
    links = _links(plan)
    sent = {
        algorithm: {
            str(rank): {link: _plain(by_link.get(link, 0)) for link in links}
            for rank, by_link in sorted(plan.bytes_sent(algorithm).items())
        }
        for algorithm in ALGORITHMS
    }
    return {"bytes_sent": sent, "bytes_per_parameter": bytes_per_parameter, "lost": sorted(plan.lost)}


def _links(plan: SwitchPlan) -> tuple[str, ...]:
    """Link classes of the cluster, those inside a node first."""
    return tuple(
        dict.fromkeys([*(kind.link.name for kind in plan.cluster.kinds), plan.cluster.inter_node.name])
    )


def _print(plan: SwitchPlan, bytes_per_parameter: int) -> None:
    sent = {algorithm: plan.bytes_sent(algorithm) for algorithm in ALGORITHMS}
    used = {link for by_rank in sent.values() for by_link in by_rank.values() for link in by_link}
    links = [link for link in _links(plan) if link in used]
    if not links:
        print("nothing has to be sent: every rank already holds what it needs")
        return
    title = f"GB (1e9 bytes) that each rank sends, {bytes_per_parameter} bytes per parameter"
    table = Table(title=title, title_justify="left", caption="a rank that is not listed sends nothing")
    table.add_column("rank", justify="right")
    for algorithm in ALGORITHMS:
        for link in links:
            table.add_column(f"{algorithm}\n{link}", justify="right")
    for rank in sorted({rank for by_rank in sent.values() for rank in by_rank}):
        table.add_row(
            str(rank), *(_gb(sent[a].get(rank, {}).get(link, 0)) for a in ALGORITHMS for link in links)
        )
    table.add_section()
    totals = [sum(by.get(link, 0) for by in sent[a].values()) for a in ALGORITHMS for link in links]
    table.add_row("sum", *map(_gb, totals))
    largest = [
        max((by.get(link, 0) for by in sent[a].values()), default=0) for a in ALGORITHMS for link in links
    ]
    table.add_row("max", *map(_gb, largest))
    console = Console(soft_wrap=True)
    console.print(table)
    for algorithm in ALGORITHMS:
        messages = len(plan.scheme(algorithm).messages())
        console.print(
            f"{algorithm:8} {NOTES[algorithm]}; {messages} messages, one per rank pair", highlight=False
        )


def _gb(sent: int | Fraction) -> str:
    return f"{float(sent) / 1e9:.3f}" if sent else "-"

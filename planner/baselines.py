"""How other systems would plan the same problem, under the same cost model: each with its documented limits (paper §9).

Each is a planner of its own (`homogeneous`, `hexiscale`, `oobleck`), or for lengths `hotspa`; they plan within those
systems' limits and are timed as everything else is here. Their cost models and fudge factors are not rebuilt.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.hexiscale import hexiscale
from hetero_megatron.planner.homogeneous import homogeneous
from hetero_megatron.planner.oobleck import oobleck
from hetero_megatron.planner.problem import Problem
from hetero_megatron.planner.realize import Priced

MEGATRON, HEXISCALE, OOBLECK, HOTSPA = "homogeneous", "hexiscale", "oobleck", "hotspa"
LIMITS: Mapping[str, str] = MappingProxyType(
    {
        MEGATRON: "as Megatron plans: pipelines, stages and TP alike, layers evenly, one micro-batch size",
        HEXISCALE: "as HexiScale plans, layers and batches by memory or tuned by speed: GPipe, all devices, whole "
        "activations broadcast between stages, no ZeRO, no CP",
        OOBLECK: "as Oobleck plans: templates of whole nodes that it takes for alike, at least two pipelines for one "
        "failure, 1F1B, no ZeRO, no CP",
        HOTSPA: "as HotSPa plans: one homogeneous DP, TP, PP strategy per interval of lengths, no CP; rows of one "
        "length are one interval",
    }
)
"""What each of them cannot do, in a line."""


def baselines(problem: Problem, costs: Costs, even: Priced | None = None) -> dict[str, Priced | None]:
    """The best plan of each kind, None where none fits; `even` is the homogeneous one if it is known already."""
    even = even or homogeneous(problem, costs)
    return {
        MEGATRON: even,
        HEXISCALE: hexiscale(problem, costs),
        OOBLECK: oobleck(problem, costs),
        HOTSPA: hotspa_rows(problem, costs, even),
    }


def hotspa_rows(problem: Problem, costs: Costs, even: Priced | None) -> Priced | None:
    """HotSPa on rows of one length: the homogeneous strategy without context parallelism."""
    if problem.parts == (1,):
        return even
    return homogeneous(replace(problem, choices=replace(problem.choices, context_parallel=(1,))), costs)

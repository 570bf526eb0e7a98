"""What a change of plan moves, fast and about right: the exact plan is `switch_plan`'s (paper §7, Table 5).

A rank needs the weights (and states) of its layers' share; what it held before it need not get. All that is missing
comes from ranks that have it; the slowest receiver, or the average sender, sets the time.
"""

from dataclasses import dataclass

from hetero_megatron.cluster import Cluster
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.rates import bytes_per_second
from hetero_megatron.strategy import Stage, Strategy

STATE_BYTES = 12
"""FP32 master weight and two moments of a parameter; the BF16 copy and gradients are made anew."""

Shares = dict[int, tuple[dict[int, None], float, float]]
"""Per rank: its layers, and which share of each, from and to."""


@dataclass(frozen=True, slots=True)
class Movement:
    """Bytes that ranks receive, and the seconds that it takes about."""

    bytes: int
    seconds: float


def movement(before: Strategy, after: Strategy, cluster: Cluster, costs: Costs) -> Movement:
    """From one strategy to another; under ZeRO-1 each replica moves its part of the states only."""
    old, new = _shares(before), _shares(after)
    weights = costs.work.layer_parameters
    replicas = max(1, sum(len(p.stages[0].parts) for p in after.pipelines)) if after.zero else 1
    received: dict[int, float] = {}
    for rank, (layers, first, end) in new.items():
        missing = 0.0
        had, had_first, had_end = old.get(rank, ({}, 0.0, 0.0))
        kept = max(0.0, min(end, had_end) - max(first, had_first))
        for layer in layers:
            missing += (end - first) - (kept if layer in had else 0.0)
        if missing > 1e-12:
            received[rank] = missing * weights * STATE_BYTES / replicas
    if not received:
        return Movement(0, 0.0)
    rate = bytes_per_second(cluster.inter_node)
    senders = max(1, len(old.keys() & set(cluster.ranks)))
    slowest = max(max(received.values()), sum(received.values()) / senders)
    return Movement(int(sum(received.values())), slowest / rate)


def _shares(strategy: Strategy) -> Shares:
    found: Shares = {}
    for pipeline in strategy.pipelines:
        for stage in pipeline.stages:
            layers = dict.fromkeys(stage.layer_numbers)
            for part in stage.parts:
                for place, rank in enumerate(part):
                    found[rank] = (layers, place / len(part), (place + 1) / len(part))
    return found


def overlap(stage: Stage, first: int, end: int) -> int:
    """How many layers of [first, end) a stage holds."""
    return sum(first <= layer < end for layer in stage.layer_numbers)

"""Why no plan fits: what is needed, what there is, and what would help (shared case: a plan that breaks its own limits)."""

from hetero_megatron.models.config import count_parameters
from hetero_megatron.planner.prices import Prices, Where
from hetero_megatron.planner.problem import Block, Problem

FP32 = 4


def why_infeasible(problem: Problem, prices: Prices) -> str:
    """A sentence with the least bytes that the model needs on this cluster and the bytes that it has.

    The least: states once, cut over all devices, before any activation.
    """
    needed, held = least_bytes(problem, prices), int(sum(room(problem, prices).values()))
    layers = most_layers(problem, prices)
    start = (
        f"no plan fits: parameters, gradients and optimizer states of one copy of the model need at least {needed} bytes, "
        f"and {len(problem.cluster.devices)} devices have {held}"
    )
    if needed <= held:
        start = (
            f"no plan fits: with activations and a whole copy of the model, the devices hold {layers} of "
            f"{problem.config.num_layers} layers at once (states need {needed} bytes, devices have {held})"
        )
    if not problem.supply.count:
        start = "no plan fits: the cluster has no device"
    return (
        f"{start}; add devices, shorten seq_length ({problem.seq_length}), allow recompute full and zero 1, or take a "
        "smaller model"
    )


def room(problem: Problem, prices: Prices) -> dict[int, float]:
    """Bytes that a plan may fill, by rank."""
    return {device.rank: prices.room(device.kind) for device in problem.cluster.devices}


def least_bytes(problem: Problem, prices: Prices) -> int:
    """Bytes of one copy's states: parameters, FP32 gradients, two moments, and master weights where they differ."""
    item = prices.costs.item
    per_parameter = item + FP32 + 2 * FP32 + (FP32 if item != FP32 else 0)
    return count_parameters(problem.config) * per_parameter


def most_layers(problem: Problem, prices: Prices) -> int:
    """Layers that all devices together hold at most, each by itself with one micro-batch of the smallest size."""
    found = 0
    for device in problem.cluster.devices:
        block = Block(device.kind, 1)
        best = 0
        for recompute in ("none", *problem.choices.recompute):
            where = Where(block, False, False, 1, problem.rows[0], 1, 0)
            best = max(best, prices.load(where, 1, 0, recompute).most(problem.config.num_layers))
        found += best
    return found

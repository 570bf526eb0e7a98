"""Small random planning problems: up to 8 devices of 2 kinds, up to 12 layers."""

import random

from hetero_megatron.cluster import Cluster, Device, DeviceKind, Link
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.planner.cost import Costs
from hetero_megatron.planner.problem import Choices, Problem


def small_problem(seed: int) -> Problem:
    """Up to 8 devices of up to 2 kinds, up to 12 layers; devices differ in speed, memory and links."""
    draw = random.Random(seed)
    kinds = []
    for name in draw.sample(["h800", "h20", "a100-80", "v100-32"], draw.choice([1, 2, 2, 2])):
        flops = draw.choice([50e12, 150e12, 400e12, 1000e12])
        memory = draw.choice([80, 200, 400, 4000]) * 2**20
        kinds.append(DeviceKind(name, memory, flops, Link("nvlink", draw.choice([50.0, 400.0]))))
    budget = draw.choice([2, 3, 4, 5, 6, 7, 8, 8])
    devices: list[Device] = []
    node = 0
    while len(devices) < budget:
        size = min(draw.choice([1, 2, 3, 4, 4]), budget - len(devices))
        kind = kinds[node % len(kinds)]
        devices += [Device(len(devices) + n, kind.name, node) for n in range(size)]
        node += 1
    heads = draw.choice([2, 4, 4])
    config = LlamaConfig(
        num_layers=draw.randint(2, 12),
        hidden_size=128 * draw.choice([1, 4, 8]),
        ffn_hidden_size=1024,
        num_attention_heads=heads,
        num_query_groups=draw.choice([1, heads]),
        vocab_size=512,
    )
    batch = draw.choice([2, 3, 4, 6, 8])
    choices = Choices(
        micro_batch_sizes=draw.choice([(1,), (1, 2)]), zero=draw.choice([(0,), (1,), (0, 1)]), recompute=()
    )
    cluster = Cluster(tuple(devices), tuple(kinds), Link("ib", draw.choice([2.0, 50.0])))
    return Problem(config, cluster, batch, draw.choice([256, 1024]), choices)


def small_costs(problem: Problem) -> Costs:
    """The cost model of a small problem."""
    return Costs(problem.config, problem.cluster, seq_length=problem.seq_length)

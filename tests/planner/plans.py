"""Small plans that tests of costs and simulation share."""

from functools import lru_cache

from hetero_megatron.cluster import Cluster
from hetero_megatron.graph.nodes import Graph
from hetero_megatron.graph.trace import trace
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama
from hetero_megatron.planner.cost import Costs
from hetero_megatron.program import Program
from hetero_megatron.strategy import Pipeline, Recompute, Stage, Strategy

CONFIG = LlamaConfig(
    num_layers=8,
    hidden_size=1024,
    ffn_hidden_size=2816,
    num_attention_heads=16,
    num_query_groups=4,
    vocab_size=32000,
)
SEQUENCE = 1024
CLUSTER = Cluster.of_nodes({"h800": 1, "h20": 1})


def two_stages(micro_batches: int, tp: int, first: int, cut: int) -> Pipeline:
    """A pipeline of two stages of `tp` ranks from rank `first` on; layers [0, cut) and [cut, 8)."""
    ranks = tuple(range(first, first + 2 * tp))
    return Pipeline(micro_batches, 1, (Stage(ranks[:tp], (0, cut - 1)), Stage(ranks[tp:], (cut, 7))))


PLANS: dict[str, Strategy] = {
    "one rank": Strategy((Pipeline(2, 2, (Stage((0,), (0, 7)),)),)),
    "two stages": Strategy((two_stages(6, 2, 0, 3),)),
    "gpipe": Strategy((two_stages(6, 2, 0, 3),), schedule="gpipe"),
    "unequal": Strategy((two_stages(5, 4, 0, 5), two_stages(3, 2, 8, 4))),
    "zero": Strategy((two_stages(4, 2, 0, 4), two_stages(4, 2, 8, 4)), zero=1),
    "unequal zero": Strategy((two_stages(5, 4, 0, 5), two_stages(3, 1, 8, 2)), zero=1),
    "plain tp": Strategy((two_stages(4, 2, 0, 4), two_stages(4, 2, 8, 4)), sequence_parallel=False),
    "context": Strategy(
        (Pipeline(3, 1, (Stage((0, 1, 2, 3), (0, 3), 2, 2), Stage((8, 9, 10, 11), (4, 7), 2, 2))),)
    ),
    "unequal context": Strategy(
        (Pipeline(3, 1, (Stage((0, 1, 2), (0, 3), (2, 1), 2), Stage((8, 9, 10), (4, 7), (2, 1), 2))),)
    ),
    "interleaved": Strategy(
        (Pipeline(4, 1, (Stage((0, 1), ((0, 1), (4, 5)), 2), Stage((8, 9), ((2, 3), (6, 7)), 2))),),
        schedule="interleaved",
    ),
    "recompute": Strategy(
        (
            Pipeline(
                4,
                1,
                (
                    Stage(
                        (0, 1), (0, 3), recompute=(Recompute("full", (0, 1)), Recompute("selective", (2, 2)))
                    ),
                    Stage((8, 9), (4, 7), recompute=(Recompute("selective"),)),
                ),
            ),
        )
    ),
    "short micro-batches": Strategy(
        (Pipeline(4, 2, (Stage((0, 1), (0, 3)), Stage((8, 9), (4, 7))), max_tokens=1500),)
    ),
    "offload": Strategy(
        (Pipeline(4, 1, (Stage((0, 1), (0, 3), offload=True), Stage((8, 9), (4, 7)))),),
        offload_optimizer=True,
    ),
}


@lru_cache(maxsize=4)
def graph(config: LlamaConfig = CONFIG) -> Graph:
    return trace(Llama(config))


def idle(plan: Strategy, cluster: Cluster) -> Strategy:
    """The plan with all other ranks of the cluster named idle."""
    return Strategy(
        plan.pipelines,
        plan.zero,
        plan.schedule,
        plan.sequence_parallel,
        tuple(rank for rank in cluster.ranks if rank not in plan.ranks),
        plan.context_parallel,
        plan.offload_optimizer,
    )


def program(name: str, config: LlamaConfig = CONFIG, cluster: Cluster = CLUSTER) -> Program:
    return Program.build(graph(config), idle(PLANS[name], cluster), config.facts, cluster)


def costs(
    name: str, precision: str = "bf16", config: LlamaConfig = CONFIG, cluster: Cluster = CLUSTER
) -> Costs:
    plan = PLANS[name]
    return Costs(config, cluster, None, SEQUENCE, precision, plan.sequence_parallel, plan.context_parallel)

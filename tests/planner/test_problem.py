"""What may be a stage, and whether there are devices for it."""

import random
from itertools import product

import pytest

from hetero_megatron.cluster import Cluster, Device, DeviceKind, Link
from hetero_megatron.errors import PlannerError
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.presets import PRESETS
from hetero_megatron.planner.placement import PIPELINE, REPLICA, place
from hetero_megatron.planner.problem import Block, Choices, Problem, Supply, allows

KINDS = tuple(DeviceKind(name, 2**34, 1e14, Link("nvlink", 400.0)) for name in ("h800", "h20"))


def cluster(*nodes: tuple[str, int]) -> Cluster:
    """Nodes of (kind, devices)."""
    devices: list[Device] = []
    for node, (kind, count) in enumerate(nodes):
        devices += [Device(len(devices) + n, kind, node) for n in range(count)]
    return Cluster(tuple(devices), KINDS)


def config(heads: int, groups: int) -> LlamaConfig:
    return LlamaConfig(
        num_layers=4,
        hidden_size=16 * heads,
        ffn_hidden_size=64,
        num_attention_heads=heads,
        num_query_groups=groups,
        vocab_size=64,
    )


def test_degrees_are_what_heads_and_nodes_allow() -> None:
    eight = cluster(("h800", 8))
    assert Problem(PRESETS["llama_32b"], eight, 4, 4096).degrees == (1, 2, 4, 8, 16)
    assert Problem(config(12, 4), eight, 4, 128).degrees == (1, 2, 4), "8 does not divide 12 heads"
    assert Problem(config(12, 12), cluster(("h800", 6)), 4, 128).degrees == (1, 2, 3, 4, 6)
    assert Problem(config(4, 4), eight, 4, 128, Choices(tensor_parallel=(1, 2))).degrees == (1, 2)
    assert not allows(config(12, 4), 3), "4 kv heads go neither into 3 nor 3 into 4"


def test_a_block_wider_than_a_node_takes_whole_nodes() -> None:
    problem = Problem(PRESETS["llama_32b"], cluster(("h20", 8), ("h20", 8), ("h20", 7)), 4, 4096)
    spread = [block for block in problem.blocks["h20"] if block.spread]
    assert spread == [Block("h20", 16, 1, True)]
    assert problem.supply.room("h20", 16) == 1
    assert problem.supply.room("h20", 4) == 5
    ranks = place(problem.cluster, [(spread[0], Block("h20", 4))])
    assert ranks is not None
    assert ranks[0, 0] == tuple(range(16))
    assert ranks[0, 1] == (16, 17, 18, 19)


def test_long_rows_may_be_shared_by_context_parallel_parts() -> None:
    eight = cluster(("h800", 8))
    assert Problem(PRESETS["llama_32b"], eight, 4, 4096).parts == (1,)
    assert Problem(PRESETS["llama_32b"], eight, 4, 32768).parts == (1, 2, 4, 8)


@pytest.mark.parametrize("seed", range(40))
def test_what_supply_says_it_holds_can_be_placed_and_nothing_else(seed: int) -> None:
    draw = random.Random(seed)
    nodes = [(draw.choice(["h800", "h20"]), draw.randint(1, 8)) for _ in range(draw.randint(1, 4))]
    made = cluster(*nodes)
    supply = Supply.of(made)
    blocks = tuple(
        Block(draw.choice(sorted(supply.count)), draw.choice([1, 2, 4, 8])) for _ in range(draw.randint(1, 6))
    )
    possible = all(b.ranks <= supply.largest[b.kind] for b in blocks) and _fits(made, blocks)
    if any(b.ranks > supply.largest[b.kind] for b in blocks):
        return
    assert supply.holds(blocks) == possible
    for together in (PIPELINE, REPLICA):
        ranks = place(made, [blocks], together=together)
        assert (ranks is not None) == possible
        if ranks is not None:
            used = [rank for own in ranks.values() for rank in own]
            assert len(set(used)) == len(used)
            for (_, s), own in ranks.items():
                assert {(made.device(r).kind, made.node_of(r)) for r in own} == {
                    (blocks[s].kind, made.node_of(own[0]))
                }


def _fits(made: Cluster, blocks: tuple[Block, ...]) -> bool:
    """Some assignment of blocks to nodes has room, by trying all."""
    free: dict[int, int] = {}
    kinds: dict[int, str] = {}
    for device in made.devices:
        free[device.node] = free.get(device.node, 0) + 1
        kinds[device.node] = device.kind
    for nodes in product(free, repeat=len(blocks)):
        left = dict(free)
        for node, block in zip(nodes, blocks, strict=True):
            left[node] -= block.ranks
        if min(left.values()) >= 0 and all(kinds[n] == b.kind for n, b in zip(nodes, blocks, strict=True)):
            return True
    return False


def test_neighbours_of_a_pipeline_are_put_into_one_node_and_kept_stages_stay() -> None:
    made = cluster(("h20", 8), ("h20", 8))
    four = Block("h20", 4)
    ranks = place(made, [(four, four), (four, four)])
    assert ranks == {
        (0, 0): (0, 1, 2, 3),
        (0, 1): (4, 5, 6, 7),
        (1, 0): (8, 9, 10, 11),
        (1, 1): (12, 13, 14, 15),
    }
    ranks = place(made, [(four, four), (four, four)], together=REPLICA)
    assert ranks is not None
    assert made.node_of(ranks[0, 0][0]) == made.node_of(ranks[1, 0][0])
    ranks = place(made, [(four, four)], {(0, 1): (8, 9, 10, 11)})
    assert ranks == {(0, 1): (8, 9, 10, 11), (0, 0): (12, 13, 14, 15)}
    assert place(made, [(four,) * 5]) is None
    assert place(made, [(Block("h20", 16, 1, True), four)]) is None


def test_problems_without_an_answer_are_refused() -> None:
    one = cluster(("h20", 1))
    with pytest.raises(PlannerError, match="0 sequences a step: there is nothing to deal out"):
        Problem(config(4, 4), one, 0, 128)
    with pytest.raises(
        PlannerError, match="no tensor-parallel degree is left: 4 attention heads and 4 kv heads"
    ):
        Problem(config(4, 4), one, 1, 128, Choices(tensor_parallel=(3,)))
    with pytest.raises(PlannerError, match=r"3 sequences is no multiple of a micro-batch size in \[2\]"):
        _ = Problem(config(4, 4), one, 3, 128, Choices(micro_batch_sizes=(2,))).rows

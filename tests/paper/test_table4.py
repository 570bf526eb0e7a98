"""Table 4: what every rank sends in the switch C1 -> C2 of Llama 32B after rank 31 is lost (paper §7, §10.3).

Sizes as the table was printed: 'MB' is bytes / 2**30 * 1000, 6 bytes per parameter with its Adam moments,
vocabulary 30,592. The table's last rows add up only so.
"""

import pytest

from hetero_megatron.annotation import Annotation, DeviceGroup, DistributedStates
from hetero_megatron.cluster import Cluster
from hetero_megatron.comm import Algorithm
from hetero_megatron.comm.relay import bytes_by_link, relay, seconds
from hetero_megatron.switch_plan import Parameter, SwitchPlan, plan_switch
from hetero_megatron.switch_rounds import plan_rounds

HIDDEN, FFN, VOCAB, LAYERS = 6656, 17920, 30592, 60
COLUMN, ROW, NORM = 0, 1, -1

Stages = list[tuple[range, range]]
"""Per stage: ranks, layers."""

FIRST: Stages = [
    (range(0, 4), range(0, 15)),
    (range(4, 8), range(15, 30)),
    (range(8, 12), range(30, 45)),
    (range(12, 16), range(45, 60)),
]
C1 = [
    FIRST,
    [
        (range(16, 20), range(0, 15)),
        (range(20, 24), range(15, 30)),
        (range(24, 28), range(30, 45)),
        (range(28, 32), range(45, 60)),
    ],
]
C2 = [
    FIRST,
    [
        (range(16, 20), range(0, 16)),
        (range(20, 24), range(16, 32)),
        (range(24, 28), range(32, 48)),
        (range(28, 30), range(48, 56)),
        (range(30, 31), range(56, 60)),
    ],
]
LAYER: dict[str, tuple[tuple[int, ...], int]] = {
    "attention_norm": ((HIDDEN,), NORM),
    "wq": ((HIDDEN, HIDDEN), COLUMN),
    "wk": ((HIDDEN, HIDDEN), COLUMN),
    "wv": ((HIDDEN, HIDDEN), COLUMN),
    "wo": ((HIDDEN, HIDDEN), ROW),
    "mlp_norm": ((HIDDEN,), NORM),
    "gate": ((FFN, HIDDEN), COLUMN),
    "up": ((FFN, HIDDEN), COLUMN),
    "down": ((HIDDEN, FFN), ROW),
}
# Rank: (NVLink, InfiniBand), in the table's MB; ranks that are not listed send nothing.
NAIVE = {
    **{4: (0, 748), 5: (0, 747), 6: (0, 747), 7: (0, 747)},
    **{8: (0, 1495), 9: (0, 1495), 10: (0, 1495), 11: (0, 1495)},
    **{12: (0, 5517), 13: (0, 11496), 14: (0, 8222), 15: (0, 11496)},
}
FUSED = {
    **{8: (0, 747), 9: (0, 747), 10: (0, 747), 11: (0, 747), 15: (0, 11496)},
    **{20: (748, 0), 21: (748, 0), 22: (748, 0), 23: (748, 0)},
    **{24: (0, 748), 25: (0, 748), 26: (0, 748), 27: (0, 748)},
    **{28: (5517, 0), 29: (11496, 0), 30: (8222, 0)},
}


def annotation(pipelines: list[Stages], layer: int, dim: int) -> Annotation:
    """One subgroup per pipeline: the stage that holds `layer`, split on `dim` over its ranks."""
    holders = [ranks for stages in pipelines for ranks, layers in stages if layer in layers]
    return Annotation(
        tuple(DeviceGroup(tuple(ranks)) for ranks in holders),
        tuple(DistributedStates.of({dim: len(ranks)}) for ranks in holders),
    )


def parameters() -> list[Parameter]:
    """Every weight of the model in definition order."""
    weights: list[tuple[str, tuple[int, ...], int, int]] = [("embedding", (VOCAB, HIDDEN), COLUMN, 0)]
    weights += [
        (f"layers.{layer}.{name}", shape, dim, layer)
        for layer in range(LAYERS)
        for name, (shape, dim) in LAYER.items()
    ]
    weights += [("final_norm", (HIDDEN,), NORM, LAYERS - 1), ("head", (VOCAB, HIDDEN), COLUMN, LAYERS - 1)]
    return [
        (name, shape, annotation(C1, layer, dim), annotation(C2, layer, dim))
        for name, shape, dim, layer in weights
    ]


@pytest.fixture(scope="module")
def switch() -> SwitchPlan:
    return plan_switch(parameters(), Cluster.of_nodes({"h20": 4}), frozenset({31}), bytes_per_parameter=6)


def table(switch: SwitchPlan, algorithm: Algorithm) -> dict[int, tuple[int, int]]:
    """(NVLink, InfiniBand) by rank in the table's MB."""
    sent = switch.bytes_sent(algorithm)
    return {
        rank: (
            round(sent[rank].get("nvlink", 0) / 2**30 * 1000),
            round(sent[rank].get("ib", 0) / 2**30 * 1000),
        )
        for rank in sorted(sent)
    }


def test_without_heuristics_every_cell_is_the_papers(switch: SwitchPlan) -> None:
    assert table(switch, "naive") == NAIVE


def test_fused_every_cell_is_the_papers(switch: SwitchPlan) -> None:
    assert table(switch, "fused") == FUSED


def test_balancing_inside_each_tensor_alone_leaves_one_node_idle(switch: SwitchPlan) -> None:
    unfused = table(switch, "unfused")
    assert {rank: unfused.get(rank) for rank in (8, 9, 10, 11, 24, 25, 26, 27)} == {
        **dict.fromkeys((8, 9, 10, 11), (0, 1495)),
        **dict.fromkeys((24, 25, 26, 27), None),
    }
    assert {rank: cell for rank, cell in unfused.items() if rank not in range(8, 12)} == {
        rank: cell for rank, cell in FUSED.items() if rank not in (*range(8, 12), *range(24, 28))
    }


def test_all_algorithms_move_the_same_volume_and_one_message_per_pair(switch: SwitchPlan) -> None:
    totals = {
        sum(sum(by.values()) for by in switch.bytes_sent(name).values())
        for name in ("naive", "unfused", "fused")
    }
    assert len(totals) == 1
    assert round(totals.pop() / 2**30 * 1000) == 45701
    messages, transfers = switch.scheme("fused").messages(), switch.scheme("fused").transfers
    assert messages.keys() == {(transfer.src, transfer.dst) for transfer in transfers}
    assert sum(map(len, messages.values())) == len(transfers) > 10 * len(messages)
    assert not any(31 in pair for pair in messages)


def test_all_cards_of_a_node_share_what_its_one_owner_has_to_send(switch: SwitchPlan) -> None:
    """Rank 15 alone owns what rank 31 has lost; its node has eight cards, and so has the one that needs it."""
    scheme, cluster = switch.scheme("fused"), switch.cluster
    routes = relay(scheme, cluster, range(31))
    assert routes is not None
    sent = bytes_by_link(scheme, cluster, routes)
    units = {rank: round(by.get("ib", 0) / 2**30 * 1000) for rank, by in sent.items()}
    share = (11496 + 4 * 747) / 8
    for rank in range(8, 16):
        assert units[rank] == pytest.approx(share, rel=0.06)
    assert sum(units[rank] for rank in range(8, 16)) == pytest.approx(14484, abs=8)
    # Ranks 24 to 27 send as much as each other; seven cards of their node share it.
    for rank in range(24, 31):
        assert units[rank] == pytest.approx(4 * 748 / 7, rel=0.06)
    assert sum(by.get("ib", 0) for by in sent.values()) == sum(
        by.get("ib", 0) for by in scheme.bytes_sent(cluster).values()
    )
    before, after = seconds(scheme, cluster), seconds(scheme, cluster, routes)
    print(before, after)
    assert before == pytest.approx(11496 / 1000 * 2**30 / 50e9, rel=1e-3)
    assert after < before / 3


def test_detours_carry_every_slice_from_one_holder_to_the_next(switch: SwitchPlan) -> None:
    scheme = switch.scheme("fused")
    routes = relay(scheme, switch.cluster, range(31))
    for limit in (1 << 40, 1 << 30):
        held = {(number, each.src) for number, each in enumerate(scheme.transfers)}
        for part in plan_rounds(scheme, limit, routes):
            for wave in part.waves:
                for (sender, _), numbers in wave.items():
                    assert all((number, sender) in held for number in numbers)
                held |= {(number, to) for (_, to), numbers in wave.items() for number in numbers}
        assert all((number, each.dst) in held for number, each in enumerate(scheme.transfers))

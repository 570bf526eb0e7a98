"""Routes over neighbours: every slice arrives, and a node's cards share what one of its ranks has to send."""

import pytest

from hetero_megatron.annotation import Annotation
from hetero_megatron.cluster import Cluster, Device, DeviceKind, Link
from hetero_megatron.comm import BsrScheme, BsrTensor, schedule_transfers
from hetero_megatron.comm.relay import bytes_by_link, hops, relay, seconds, straight

NODES = Cluster.of_nodes({"h20": 2}, per_node=4)


def scheme(src: Annotation, dst: Annotation, cluster: Cluster = NODES, count: int = 16) -> BsrScheme:
    tensors = [BsrTensor(f"t{number}", (1000,), 4, src, dst) for number in range(count)]
    return schedule_transfers(tensors, cluster)


ONE_TO_ONE = scheme(Annotation.on((3,)), Annotation.on((5,)))


def test_all_cards_of_both_nodes_carry_what_one_rank_sends_to_one() -> None:
    routes = relay(ONE_TO_ONE, NODES, range(8))
    assert routes is not None
    assert bytes_by_link(ONE_TO_ONE, NODES) == {3: {"ib": 64_000}}
    sent = bytes_by_link(ONE_TO_ONE, NODES, routes)
    assert {rank: by["ib"] for rank, by in sent.items() if "ib" in by} == dict.fromkeys(range(4), 16_000)
    assert sent[3] == {"ib": 16_000, "nvlink": 48_000}
    taken = [route[2] for route in routes]
    assert {rank: taken.count(rank) for rank in taken} == dict.fromkeys((4, 5, 6, 7), 4)
    for route, transfer in zip(routes, ONE_TO_ONE.transfers, strict=True):
        assert (route[0], route[-1]) == (transfer.src, transfer.dst)
        assert [wave for wave, _, _ in hops(route)].count(1) == 1
    assert seconds(ONE_TO_ONE, NODES) == pytest.approx(64_000 / 50e9)
    # Over NVLink 900 there, over four cards across, over NVLink again.
    expected = 48_000 / 900e9 + 16_000 / 50e9 + 48_000 / 900e9
    assert seconds(ONE_TO_ONE, NODES, routes) == pytest.approx(expected)


def test_balanced_traffic_goes_straight() -> None:
    spread = scheme(Annotation.on((0, 1, 2, 3), {0: 4}), Annotation.on((4, 5, 6, 7), {0: 4}))
    assert relay(spread, NODES, range(8)) is None


def test_ranks_that_take_no_part_carry_nothing() -> None:
    routes = relay(ONE_TO_ONE, NODES, (2, 3, 5, 6))
    assert routes is not None
    assert {rank for route in routes for rank in route} == {2, 3, 5, 6}
    # The receiver's one card takes everything in: another sender would not make it faster.
    assert relay(ONE_TO_ONE, NODES, (2, 3, 5)) is None


def test_inside_a_node_and_over_slow_neighbours_there_is_no_detour() -> None:
    near = scheme(Annotation.on((0,)), Annotation.on((1,)))
    assert relay(near, NODES, range(8)) is None
    assert (
        relay(
            scheme(Annotation.on((0,)), Annotation.on((1,)), Cluster.local_cpu(4)),
            Cluster.local_cpu(4),
            range(4),
        )
        is None
    )
    pcie = DeviceKind("pcie", 1, 1.0, Link("pcie", 25.0))
    slow = Cluster(tuple(Device(rank, "pcie", rank // 4) for rank in range(8)), (pcie,), Link("ib", 50.0))
    assert relay(ONE_TO_ONE, slow, range(8)) is None


def test_straight_routes_have_two_ends() -> None:
    assert set(straight(ONE_TO_ONE)) == {(3, 3, 5, 5)}

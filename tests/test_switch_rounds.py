"""Messages of a switch: one per pair and wave, rounds of bounded size, every transfer once."""

from hetero_megatron.annotation import Annotation
from hetero_megatron.cluster import Cluster
from hetero_megatron.comm import BsrScheme
from hetero_megatron.comm.relay import bytes_by_link, straight
from hetero_megatron.switch_plan import plan_switch
from hetero_megatron.switch_rounds import plan_rounds

WHOLE, HALVES = Annotation.on((0,)), Annotation.on((1, 2), {0: 2})
CLUSTER = Cluster.of_nodes({"h20": 2}, per_node=2)


def scheme() -> BsrScheme:
    """Two tensors of 32 and 8 bytes with their moments, from rank 0 to ranks 1 and 2."""
    return plan_switch([("a", (8,), WHOLE, HALVES), ("b", (2,), WHOLE, HALVES)], CLUSTER).scheme()


def test_what_fits_travels_in_one_round_with_one_message_per_pair() -> None:
    moved = scheme()
    (only,) = plan_rounds(moved, 1 << 20)
    assert (only.tensors, only.copies) == ((0, 6), ())
    assert only.waves == ({(0, 1): (0, 2, 4, 6, 8, 10), (0, 2): (1, 3, 5, 7, 9, 11)},)
    assert {pair: len(parts) for pair, parts in moved.messages().items()} == {(0, 1): 6, (0, 2): 6}


def test_rounds_keep_every_rank_below_the_limit_and_a_large_tensor_travels_alone() -> None:
    rounds = plan_rounds(scheme(), 40)
    # Rank 0 sends a and b with 40 bytes, then the means (b first), then the variances.
    assert [each.tensors for each in rounds] == [(0, 2), (2, 4), (4, 6)]
    rounds = plan_rounds(scheme(), 8)
    assert [each.tensors for each in rounds] == [(at, at + 1) for at in range(6)]
    numbers = [
        number for each in rounds for wave in each.waves for parts in wave.values() for number in parts
    ]
    assert sorted(numbers) == list(range(12))


def test_copies_stay_in_the_round_of_their_tensor_and_nothing_to_send_needs_no_wave() -> None:
    moved = plan_switch([("a", (8,), WHOLE, WHOLE)], CLUSTER).scheme()
    (only,) = plan_rounds(moved, 8)
    assert (only.copies, only.waves) == ((0, 1, 2), ())


def test_a_transfer_on_a_detour_travels_in_two_waves_and_counts_on_every_link() -> None:
    moved = scheme()
    routes = [
        (0, 1, 2, 2) if each.dst == 2 else route
        for each, route in zip(moved.transfers, straight(moved), strict=True)
    ]
    (only,) = plan_rounds(moved, 1 << 20, routes)
    assert only.waves == (
        {(0, 1): (1, 3, 5, 7, 9, 11)},
        {(0, 1): (0, 2, 4, 6, 8, 10), (1, 2): (1, 3, 5, 7, 9, 11)},
    )
    assert bytes_by_link(moved, CLUSTER) == {0: {"nvlink": 60, "ib": 60}} == moved.bytes_sent(CLUSTER) | {}
    assert bytes_by_link(moved, CLUSTER, routes) == {0: {"nvlink": 120}, 1: {"ib": 60}}

"""BSR: the table, the choice of senders, lost ranks, one message per pair (paper §5.3, Figure 11; §7)."""

import re
from fractions import Fraction

import pytest

from hetero_megatron.annotation import FULL, Annotation, DeviceGroup, DistributedStates
from hetero_megatron.cluster import Cluster, Device, DeviceKind, Link
from hetero_megatron.comm import BsrTensor, bsr_table, schedule_transfers
from hetero_megatron.errors import ReshardError

NODES = Cluster.of_nodes({"h20": 3})


def duplicate(*ranks: int) -> Annotation:
    return Annotation.on(ranks, {-1: len(ranks)})


def tensor(
    src: Annotation, dst: Annotation, name: str = "w", rows: int = 4, itemsize: int | Fraction = 2
) -> BsrTensor:
    return BsrTensor(name, (rows, 3), itemsize, src, dst)


def pairs(
    *tensors: BsrTensor, cluster: Cluster | None = NODES, **options: object
) -> list[tuple[int, int, int]]:
    """(tensor, src, dst) of every transfer."""
    scheme = schedule_transfers(tensors, cluster, **options)  # type: ignore[arg-type]  # forwarded as they are
    return [(one.tensor, one.src, one.dst) for one in scheme.transfers]


def test_the_table_lists_finest_slices_with_owners_and_needers_in_union_order() -> None:
    src = Annotation(
        (DeviceGroup((3, 1)), DeviceGroup((2,))), (DistributedStates.of({0: 2}), DistributedStates())
    )
    dst = Annotation.on((5, 4), {0: 2})
    assert [(row.region, row.owners, row.needers) for row in bsr_table(src, dst)] == [
        (FULL.cut(0, 0, 2), (3, 2), (5,)),
        (FULL.cut(0, 1, 2), (1, 2), (4,)),
    ]


def test_slices_are_cut_only_where_a_side_cuts_in_row_major_order() -> None:
    table = bsr_table(Annotation.on((0, 1), {0: 2}), Annotation.on((2, 3, 4), {0: 3}))
    assert [row.region.span(0) for row in table] == [
        (Fraction(0), Fraction(1, 3)),
        (Fraction(1, 3), Fraction(1, 2)),
        (Fraction(1, 2), Fraction(2, 3)),
        (Fraction(2, 3), Fraction(1)),
    ]
    grid = bsr_table(Annotation.on((0, 1), {0: 2}), Annotation.on((0, 1), {1: 2}))
    assert [(row.owners, row.needers) for row in grid] == [
        ((0,), (0,)),
        ((0,), (1,)),
        ((1,), (0,)),
        ((1,), (1,)),
    ]


def test_a_partial_side_has_no_table() -> None:
    with pytest.raises(
        ReshardError, match=re.escape("BSR moves whole values, but (0, 1){partial: 2} is Partial")
    ):
        bsr_table(Annotation.on((0, 1), {-2: 2}), Annotation.on((0,)))


def test_an_owner_keeps_its_slice() -> None:
    scheme = schedule_transfers([tensor(duplicate(0, 1), Annotation.on((1, 2), {0: 2}))], NODES)
    assert [(one.rank, one.region) for one in scheme.copies] == [(1, FULL.cut(0, 0, 2))]
    assert [(one.src, one.dst) for one in scheme.transfers] == [(0, 2)]


def test_the_faster_link_wins_then_the_less_loaded_sender_then_the_earlier_owner() -> None:
    near, far = tensor(duplicate(1, 9), duplicate(8)), tensor(duplicate(1, 2), duplicate(8))
    assert pairs(near, far, far, far) == [(0, 9, 8), (1, 1, 8), (2, 2, 8), (3, 1, 8)]
    assert pairs(far, tensor(duplicate(2, 1), duplicate(8))) == [(0, 1, 8), (1, 2, 8)]
    assert pairs(tensor(duplicate(2, 1), duplicate(8))) == [(0, 2, 8)]


def test_load_is_counted_in_bytes_and_per_link_class() -> None:
    big, small = (
        tensor(duplicate(1, 2), duplicate(8), rows=10),
        tensor(duplicate(1, 2), duplicate(8), itemsize=1),
    )
    assert [src for _, src, _ in pairs(big, *[small] * 6)] == [1, 2, 2, 2, 2, 2, 1]
    inside = tensor(duplicate(1, 2), duplicate(3))
    assert pairs(tensor(duplicate(1, 2), duplicate(8)), inside, inside) == [(0, 1, 8), (1, 1, 3), (2, 2, 3)]


def test_without_balance_the_smallest_owner_sends_even_over_the_slow_link() -> None:
    near = tensor(duplicate(9, 1), duplicate(8, 9))
    assert pairs(near, near, algorithm="naive") == [(0, 1, 8), (1, 1, 8)]


def test_unfused_forgets_the_load_with_every_tensor() -> None:
    far = tensor(duplicate(1, 2), duplicate(8))
    assert pairs(far, far, algorithm="unfused") == [(0, 1, 8), (1, 1, 8)]


def test_without_a_cluster_all_links_are_equal() -> None:
    assert pairs(
        tensor(duplicate(1, 9), duplicate(8)), tensor(duplicate(1, 9), duplicate(8)), cluster=None
    ) == [
        (0, 1, 8),
        (1, 9, 8),
    ]


@pytest.mark.parametrize(("between", "senders"), [(400.0, [4, 4, 4]), (100.0, [1, 4, 1])])
def test_a_node_with_slow_links_is_not_preferred(between: float, senders: list[int]) -> None:
    slow = DeviceKind("slow", 1, 1.0, Link("pcie", 100.0))
    cluster = Cluster(
        tuple(Device(rank, "slow", rank // 3) for rank in range(6)), (slow,), Link("ib", between)
    )
    assert [
        src for _, src, _ in pairs(*[tensor(duplicate(1, 4), duplicate(0))] * 3, cluster=cluster)
    ] == senders


def test_lost_ranks_neither_send_nor_receive() -> None:
    moved = tensor(duplicate(1, 2), duplicate(8, 9, 1))
    assert pairs(moved, lost=frozenset({1, 9}), algorithm="naive") == [(0, 2, 8)]


def test_a_slice_that_no_living_rank_owns_is_refused_by_name() -> None:
    moved = tensor(Annotation.on((0, 1), {0: 2}), duplicate(2, 3), name="layers.3.wo.weight")
    message = "layers.3.wo.weight: [dim 0: 1/2..1] is needed by rank 2, but every owner (1,) is lost"
    with pytest.raises(ReshardError, match=re.escape(message)):
        schedule_transfers([moved], NODES, lost=frozenset({1}))
    assert pairs(moved, lost=frozenset({1, 2, 3})) == []


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ReshardError, match="BSR algorithm 'greedy' is unknown; known: naive, unfused, fused"):
        pairs(tensor(duplicate(0), duplicate(1)), algorithm="greedy")


def test_one_message_per_device_pair_holds_all_tensors_in_order() -> None:
    first, second = tensor(duplicate(0), duplicate(8, 9)), tensor(Annotation.on((0, 1), {0: 2}), duplicate(8))
    scheme = schedule_transfers([first, second], NODES)
    assert scheme.messages() == {
        (0, 8): ((0, FULL), (1, FULL.cut(0, 0, 2))),
        (0, 9): ((0, FULL),),
        (1, 8): ((1, FULL.cut(0, 1, 2)),),
    }
    assert scheme.bytes_sent(NODES) == {0: {"ib": 24 + 24 + 12}, 1: {"ib": 12}}


def test_empty_slices_are_not_sent_and_neighbours_are_sent_as_one() -> None:
    thin = BsrTensor("thin", (1,), 4, Annotation.on((0, 1), {0: 2}), duplicate(8))
    assert pairs(thin) == [(0, 0, 8)]
    halves = tensor(
        duplicate(0),
        Annotation(
            (DeviceGroup((8,)), DeviceGroup((9, 10))), (DistributedStates(), DistributedStates.of({0: 2}))
        ),
    )
    assert [(one.dst, one.region) for one in schedule_transfers([halves], NODES).transfers] == [
        (8, FULL),
        (9, FULL.cut(0, 0, 2)),
        (10, FULL.cut(0, 1, 2)),
    ]

"""Figure 7 of the paper: which operator every change of layout becomes (paper §5)."""

import re

import pytest

from hetero_megatron.annotation import FULL, Annotation, DeviceGroup, DistributedStates
from hetero_megatron.cluster import Cluster
from hetero_megatron.comm import Collective, Copy, Transfer, resolve
from hetero_megatron.errors import ReshardError

Parts = dict[int, int]


def union(hdim: int, *subgroups: tuple[tuple[int, ...], Parts]) -> Annotation:
    """Subgroups as (ranks, parts)."""
    return Annotation(
        tuple(DeviceGroup(ranks) for ranks, _ in subgroups),
        tuple(DistributedStates.of(parts) for _, parts in subgroups),
        hdim,
    )


def on(*ranks: int, **parts: int) -> Annotation:
    """One subgroup; `dup`, `sum`, `d0`, `d1` name the dims."""
    dims = {"dup": -1, "sum": -2, "d0": 0, "d1": 1}
    return Annotation.on(ranks, {dims[name]: count for name, count in parts.items()})


Q, P4, P2 = (0, 1, 2, 3), (4, 5, 6, 7), (4, 5)

BOTTOM = [
    ("Identity", on(0, 1, d0=2), on(0, 1, d0=2)),
    ("SR", on(0, 1, d0=2), on(2, 3, d0=2)),
    ("SR", on(0, 1, d0=2), on(1, 0, d0=2)),
    ("AR", on(0, 1, sum=2), on(0, 1, dup=2)),
    ("AR", on(*Q, sum=2, d0=2), on(*Q, dup=2, d0=2)),
    ("AR", on(*Q, sum=2, dup=2), on(*Q, dup=4)),
    ("RS", on(0, 1, sum=2), on(0, 1, d0=2)),
    ("RS", on(*Q, d0=2, sum=2), on(*Q, d0=2, d1=2)),
    ("RS", on(*Q, d0=2, sum=2), on(*Q, d0=4)),
    ("RS", on(*Q, dup=2, sum=2), on(*Q, dup=2, d0=2)),
    ("AG", on(0, 1, d1=2), on(0, 1, dup=2)),
    ("AG", on(*Q, d0=4), on(*Q, d0=2, dup=2)),
    ("AG", on(*Q, d0=2, dup=2), on(*Q, dup=4)),
    ("AG", on(0, 1, d0=2), on(1, 0, dup=2)),
    ("Split", on(0, 1, dup=2), on(0, 1, d0=2)),
    ("Split", on(*Q, dup=4), on(2, 1, d0=2)),
    ("BSR", on(0, 1, d0=2), on(0, 1, d1=2)),
    ("BSR", on(*Q, d0=2, dup=2), on(*Q, dup=2, d0=2)),
    ("BSR", on(*Q, d0=4), on(4, 5, d0=2)),
    ("BSR", on(0, 1, 2, d0=3), on(0, 1, d0=2)),
    # Reduce first, then move.
    ("RS+SR", on(*Q, sum=4), on(*P4, d0=4)),
    ("AR+SR", on(*Q, sum=4), on(*P4, dup=4)),
    ("RS+BSR", on(*Q, sum=4), on(4, 5, d0=2)),
    ("RS+AG", on(*Q, sum=4), on(*Q, d0=2, dup=2)),
    ("RS+BSR", on(*Q, sum=2, d0=2), on(*Q, d1=4)),
    ("AR+BSR", on(*Q, sum=4), on(4)),
    ("AR", on(*Q, sum=4), on(2)),
]

TP4_TP2 = ((Q, {0: 4}), (P2, {0: 2}))
TP4_TP4 = ((Q, {0: 4}), (P4, {0: 4}))

TOP = [
    ("SplitAR", union(-2, *TP4_TP2), union(-1, *TP4_TP2)),
    ("SplitRS", union(-2, *TP4_TP2), union(1, *TP4_TP2)),
    ("SplitAG", union(1, *TP4_TP2), union(-1, *TP4_TP2)),
    # Subgroups that are alike pay nothing: the plain collectives.
    ("AR", union(-2, *TP4_TP4), union(-1, *TP4_TP4)),
    ("RS", union(-2, *TP4_TP4), union(1, *TP4_TP4)),
    ("AG", union(1, *TP4_TP4), union(-1, *TP4_TP4)),
    # The bottom tier first (Figure 10).
    ("AR+SplitAR", union(-2, (Q, {-2: 4}), (P2, {-2: 2})), union(-1, (Q, {-1: 4}), (P2, {-1: 2}))),
    ("RS+SplitAR", union(-2, (Q, {-2: 4}), (P2, {-2: 2})), union(-1, *TP4_TP2)),
    ("RS+SplitRS", union(-2, (Q, {-2: 4}), (P2, {-2: 2})), union(1, *TP4_TP2)),
    ("Split+SplitAR", union(-2, (Q, {-1: 4}), (P2, {-1: 2})), union(-1, *TP4_TP2)),
    ("AG+SplitAG", union(1, *TP4_TP2), union(-1, (Q, {-1: 4}), (P2, {-1: 2}))),
    ("AR+SplitAR|SplitAR", union(-2, (Q, {-2: 4}), ((4,), {})), union(-1, (Q, {-1: 4}), ((4,), {}))),
    ("AR+AR", union(-2, (Q, {-2: 4}), (P4, {-2: 4})), union(-1, (Q, {-1: 4}), (P4, {-1: 4}))),
    ("SplitAR+AG", union(-2, *TP4_TP2), union(-1, (Q, {-1: 4}), (P2, {-1: 2}))),
    # A subgroup that splits the top-tier dim itself: reduce, then cut or send.
    ("SplitAR+BSR", union(-2, *TP4_TP2), union(0, *TP4_TP2)),
    ("BSR", union(0, *TP4_TP2), union(-1, *TP4_TP2)),
    ("SplitRS+Split", union(-2, (Q, {-1: 4}), (P2, {-1: 2})), union(0, (Q, {0: 4}), (P2, {0: 2}))),
    # Subgroups decide for themselves.
    ("RS|Identity", union(0, (Q, {-2: 4}), ((4,), {})), union(0, (Q, {0: 4}), ((4,), {}))),
    ("Identity|BSR", union(0, *TP4_TP4), union(0, (Q, {0: 4}), ((8, 9), {0: 2}))),
    ("SR", union(0, *TP4_TP4), union(0, ((8, 9, 10, 11), {0: 4}), ((12, 13, 14, 15), {0: 4}))),
    # Other hsize or other groups.
    ("BSR", union(0, *TP4_TP2), on(8, 9, d0=2)),
    ("RS+BSR", union(0, (Q, {-2: 4}), (P2, {-2: 2})), on(8, 9, d1=2)),
    ("(AR|Identity)+SplitAR+BSR", union(-2, (Q, {-2: 4}), ((4,), {})), on(8)),
    ("SplitAR+SR", union(-2, *TP4_TP2), union(-1, ((8, 9, 10, 11), {0: 4}), ((12, 13), {0: 2}))),
    ("SplitRS+SR", union(-2, *TP4_TP2), union(1, ((8, 9, 10, 11), {0: 4}), ((12, 13), {0: 2}))),
    # Every rank already holds what it needs, whatever the annotations are called.
    ("Identity", union(0, ((0,), {}), ((1,), {})), on(0, 1, d0=2)),
    ("Split", union(-1, ((0,), {}), ((1,), {})), union(0, ((0,), {}), ((1,), {}))),
    ("Identity", union(-1, ((0,), {}), ((1,), {})), union(-1, ((1,), {}), ((0,), {}))),
]


@pytest.mark.parametrize(("label", "src", "dst"), BOTTOM + TOP, ids=str)
def test_the_operator_is_the_one_of_figure_7(label: str, src: Annotation, dst: Annotation) -> None:
    plan = resolve(src, dst)
    assert plan.label == label
    assert len(plan.operators) == dst.hsize


def test_nothing_to_do_has_no_stages_and_a_reduction_has_one_collective_in_place() -> None:
    assert resolve(on(0, 1, d0=2), on(0, 1, d0=2)).stages == ()
    (stage,) = resolve(on(0, 1, sum=2), on(0, 1, dup=2)).stages
    assert stage.in_place
    assert stage.steps == (Collective("all_reduce", (0, 1), FULL),)


def test_pieces_of_a_reduce_scatter_follow_the_coord_of_the_moved_factor() -> None:
    (stage,) = resolve(on(3, 1, 2, 0, sum=2, d1=2), on(3, 1, 2, 0, d0=2, d1=2)).stages
    assert stage.steps == (
        Collective("reduce_scatter", (3, 2), FULL.cut(1, 0, 2), 0),
        Collective("reduce_scatter", (1, 0), FULL.cut(1, 1, 2), 0),
    )


def test_bottom_collectives_stay_inside_the_top_tiers_cut() -> None:
    (stage,) = resolve(union(0, *TP4_TP4), union(0, (Q, {-1: 4}), (P4, {-1: 4}))).stages
    assert stage.steps == (
        Collective("all_gather", Q, FULL.cut(0, 0, 2), 0),
        Collective("all_gather", P4, FULL.cut(0, 1, 2), 0),
    )


def test_send_receive_sends_index_to_index_and_keeps_what_a_rank_holds() -> None:
    (stage,) = resolve(on(0, 1, d0=2), on(2, 1, d0=2)).stages
    assert stage.steps == (Transfer(0, 2, FULL.cut(0, 0, 2)), Copy(1, FULL.cut(0, 1, 2)))


def test_a_shared_partial_stays_while_the_rest_changes() -> None:
    assert resolve(on(*Q, sum=2, d0=2), on(*Q, sum=2, dup=2)).label == "AG"
    assert (
        resolve(union(-2, (Q, {-2: 4}), (P4, {0: 4})), union(-2, (Q, {-1: 4}), (P4, {0: 4}))).label
        == "AR|Identity"
    )


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (on(0, 1, dup=2), on(0, 1, sum=2)),
        (on(0, 1, sum=2), on(2, 3, sum=2)),
        (on(*Q, sum=4), on(*Q, sum=2, dup=2)),
        (on(*Q, sum=2, d0=2), on(*Q, d0=2, sum=2)),
        (union(-1, *TP4_TP4), union(-2, *TP4_TP4)),
        (union(-2, (Q, {0: 4}), (P4, {0: 4})), union(-2, (Q, {1: 4}), (P4, {1: 4}))),
        (on(0, 1, dup=2), union(-2, ((0,), {}), ((1,), {}))),
    ],
)
def test_a_partial_destination_is_refused_unless_the_same_partial_stays(
    src: Annotation, dst: Annotation
) -> None:
    with pytest.raises(
        ReshardError, match=re.escape(f"cannot reshard {src} to {dst}: the destination is Partial")
    ):
        resolve(src, dst)


def test_resolution_prefers_senders_in_the_receivers_node() -> None:
    cluster = Cluster.of_nodes({"h20": 2})
    src = union(-1, ((0, 1), {0: 2}), ((8, 9), {0: 2}))
    dst = on(10, d0=1)
    assert {
        step.src for step in resolve(src, dst, cluster).stages[0].steps if isinstance(step, Transfer)
    } == {8, 9}


def test_equal_questions_share_one_plan() -> None:
    assert resolve(on(0, 1, sum=2), on(0, 1, dup=2)) is resolve(on(0, 1, sum=2), on(0, 1, dup=2))


def test_steps_stay_linear_in_the_number_of_pipelines() -> None:
    def plans(hsize: int, parts: Parts, hdim: int, first: int = 0) -> Annotation:
        return union(hdim, *((tuple(range(first + 8 * i, first + 8 * i + 8)), parts) for i in range(hsize)))

    sync = resolve(plans(128, {0: 8}, -2), plans(128, {0: 8}, -1))
    assert (sync.label, len(sync.stages), len(sync.stages[0].steps)) == ("AR", 1, 8)
    sent = resolve(plans(128, {-2: 8}, 0), plans(128, {0: 8}, 0, first=1024))
    assert (sent.label, [len(stage.steps) for stage in sent.stages]) == ("RS+SR", [128, 1024])

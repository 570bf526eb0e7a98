"""Cluster: devices, nodes, links and their changes (paper §5.3, Table 7)."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from hetero_megatron.cluster import INFINIBAND, KINDS, Cluster, Device, Link
from hetero_megatron.device_specs import SPECS
from hetero_megatron.errors import ClusterError


def test_nodes_of_eight_are_counted_in_the_order_of_the_mapping() -> None:
    cluster = Cluster.of_nodes({"h800": 2, "h20": 4})
    assert cluster.ranks == tuple(range(48))
    assert [cluster.kind(rank).name for rank in (0, 15, 16, 47)] == ["h800", "h800", "h20", "h20"]
    assert [cluster.node_of(rank) for rank in (0, 7, 8, 16, 47)] == [0, 0, 1, 2, 5]


def test_links_inside_a_node_are_the_kinds_own_and_between_nodes_the_clusters() -> None:
    cluster = Cluster.of_nodes({"h800": 1, "h20": 2})
    assert (cluster.link(0, 7).name, cluster.link(0, 7).gb_per_s) == ("nvlink", 400.0)
    assert cluster.link(8, 9).gb_per_s == 900.0
    assert cluster.link(7, 8) == cluster.link(15, 16) == INFINIBAND


def test_ranks_leave_and_join_without_changing_the_old_cluster() -> None:
    cluster = Cluster.of_nodes({"h20": 1})
    smaller = cluster.without([7, 3])
    assert smaller.ranks == (0, 1, 2, 4, 5, 6)
    assert smaller.join([Device(40, "h20", 9)]).node_of(40) == 9
    assert cluster.ranks == tuple(range(8))


def test_equal_clusters_are_one_key() -> None:
    assert len({Cluster.local_cpu(3), Cluster.local_cpu(3), Cluster.local_cpu(2)}) == 2
    assert Cluster.local_cpu(3).link(0, 2).name == "loopback"


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Link("slow", 0.0), "link 'slow': 0.0 GB/s; a bandwidth is positive"),
    (
        lambda: Cluster((Device(0, "cpu", 0), Device(0, "cpu", 1)), (KINDS["cpu"],)),
        "rank 0 is listed twice (nodes 0, 1)",
    ),
    (
        lambda: Cluster((Device(0, "h20", 0),), (KINDS["cpu"],)),
        "rank 0 is a 'h20'; the cluster knows ['cpu']",
    ),
    (lambda: Cluster((), ()), "a cluster needs at least one device"),
    (
        lambda: Cluster.of_nodes({"v100": 1}),
        "device kind 'v100' is unknown; known: ['a100-40', 'a100-80', 'a800', ",
    ),
    (lambda: Cluster.local_cpu(4).without([2]).device(2), "rank 2 is not in the cluster (ranks 0-1, 3)"),
    (lambda: Cluster.local_cpu(4).without([4]), "rank 4 is not in the cluster (ranks 0-3)"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_contradictions_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(message)):
        make()


def test_nodes_of_two_kinds_may_have_a_link_of_their_own() -> None:
    slow = Link("ethernet", 0.1, shared=True)
    plain = Cluster.of_nodes({"h800": 1, "h20": 2})
    mixed = replace(plain, between=(("h20", "h800", slow),))
    assert mixed.link(0, 8) == mixed.link(8, 0) == slow
    assert mixed.link(8, 16) == plain.inter_node
    assert mixed.link(0, 1) == plain.link(0, 1)
    assert mixed.without([0]).join([Device(0, "h800", 0)]).link(0, 8) == slow
    assert mixed != plain
    with pytest.raises(
        ClusterError, match=r"link 'ethernet' is between nodes of 'h20' and 'tpu'; the cluster knows"
    ):
        replace(plain, between=(("h20", "tpu", slow),))


def test_listed_kinds_have_the_figures_of_their_specifications() -> None:
    h20 = KINDS["h20"]
    assert (h20.memory_bytes, h20.flops, h20.link) == (97871 * 2**20, 148e12, Link("nvlink", 900.0))
    assert {spec.name for spec in SPECS} == set(KINDS)

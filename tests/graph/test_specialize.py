"""Every rank gets its own executable graph (paper §6.2, Figure 12)."""

import time

import pytest

from hetero_megatron.annotation import Annotation, DeviceGroup, DistributedStates
from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import GraphError
from hetero_megatron.graph import (
    AnnotatedGraph,
    Graph,
    Kind,
    Node,
    Signature,
    boundary_reshards,
    deduce,
    reshard_plans,
    specialize,
)
from tests.graph import tiny

# Pipeline 0: TP 2 then TP 2; pipeline 1: TP 2, then TP 1 (BSR between).
PIPELINES = ((((0, 1), 1), ((2, 3), 1)), (((4, 5), 1), ((6,), 1)))


def annotated(pipelines: tuple[tiny.Pipeline, ...] = PIPELINES, layers: int = 2) -> AnnotatedGraph:
    graph = tiny.graph(layers)
    return deduce(graph, tiny.plan_for(graph, pipelines))


def test_a_rank_keeps_only_the_operators_that_it_holds() -> None:
    first, last = (specialize(annotated(), rank) for rank in (0, 3))
    names = [node.name for node in first.chunks[0].nodes]
    assert names[:2] == ["embedding", "embedding_out"]
    assert not [name for name in names if name.startswith("layers.1.")]
    assert [node.name for node in last.chunks[0].nodes][-1] == "loss"
    assert all(node.kind is not Kind.LEAF for node in (*first.chunks[0].nodes, *last.chunks[0].nodes))


def test_reshards_between_groups_cut_the_chunks() -> None:
    sender, receiver = (specialize(annotated(), rank).chunks for rank in (4, 6))
    assert [(chunk.inputs, chunk.outputs) for chunk in sender] == [((), ("layers.1.entry",))]
    assert [(chunk.inputs, chunk.outputs) for chunk in receiver] == [(("layers.1.entry",), ())]


def test_pruned_to_the_receiving_side_a_reshard_remains() -> None:
    """Figure 12: of everything before Y', GPU 6 keeps only Reshard 2, as a receive."""
    executable = specialize(annotated(), 6)
    (boundary,) = [each for each in executable.reshards if each.name == "layers.1.entry"]
    assert boundary.forward is not None
    assert boundary.forward.label == "SR|BSR"
    assert boundary.backward is not None
    assert boundary.backward.label == "SR|BSR"


def test_reshards_inside_a_group_are_nodes_of_the_chunk_and_identities_have_no_plan() -> None:
    executable = specialize(annotated(), 0)
    plans = {each.name: each.forward and each.forward.label for each in executable.reshards}
    assert plans["layers.0.entry"] is None
    assert plans["layers.0.attention_in"] == "AG"
    assert "layers.0.attention_in" in [node.name for node in executable.chunks[0].nodes]


def test_only_boundary_plans_are_listed_for_the_pipelines() -> None:
    assert [plan.label for plan in boundary_reshards(annotated())] == ["SR|BSR"]
    assert len(reshard_plans(annotated())) == len(annotated().graph.reshards)


def test_pre_and_post_name_the_local_parameters() -> None:
    executable = specialize(annotated(), 6)
    names = [each.name for each in executable.post]
    assert names == [each.name for each in executable.pre]
    assert "layers.1.wq.weight" in names
    assert "layers.0.wq.weight" not in names
    assert all(each.forward is None for each in executable.pre)
    labels = {each.name: each.forward and each.forward.label for each in executable.post}
    assert labels["layers.1.wq.weight"] == "SplitAR"
    alone = specialize(annotated(((((0, 1), 2),),)), 0)
    assert {each.name: each.forward for each in alone.post}["layers.0.wq.weight"] is None


def test_states_split_across_pipelines_are_gathered_before_and_scattered_after() -> None:
    graph = tiny.graph(1)
    plan = tiny.plan_for(graph, ((((0,), 1),), (((1,), 1),)))
    name = "layers.0.wq.weight"
    plan[f"{name}@state"] = plan[name].replace(hdim=0)
    executable = specialize(deduce(graph, plan), 1)
    pre, post = (
        {each.name: each.forward for each in side}[name] for side in (executable.pre, executable.post)
    )
    assert pre is not None
    assert pre.label in ("SplitAG", "AG")
    assert post is not None
    assert post.label in ("SplitRS", "RS")


def test_local_edges_carry_their_reduction() -> None:
    graph = annotated(((((0, 1, 2, 3), 1), ((4,), 1)),))
    edges = {(edge.consumer, edge.operand): edge.backward.label for edge in specialize(graph, 0).edges}
    assert edges["layers.0.attention", 1] == "AR"
    assert specialize(graph, 4).edges == ()


def test_constraints_are_those_of_the_rank() -> None:
    assert [each.divisor for each in specialize(annotated(), 0).constraints] == [2]
    assert specialize(annotated(), 6).constraints == ()


def test_a_rank_that_comes_back_later_has_two_chunks() -> None:
    """Interleaved stages: ranks 0, 1, 0, 1."""
    graph = tiny.graph(4)
    plan = tiny.plan_for(graph, ((((0,), 1), ((1,), 3)),))
    moved = tiny.plan_for(graph, ((((1,), 1), ((0,), 3)),))
    plan |= {name: moved[name] for name in plan if name.startswith(("layers.2.",))}
    chunks = specialize(deduce(graph, plan), 0).chunks
    assert [(chunk.inputs, chunk.outputs) for chunk in chunks] == [
        ((), ("layers.1.entry",)),
        (("layers.2.entry",), ("layers.3.entry",)),
    ]
    assert [len(specialize(deduce(graph, plan), 1).chunks)] == [2]


def test_a_rank_without_work_is_refused() -> None:
    with pytest.raises(GraphError, match="rank 9 holds no part of the graph"):
        specialize(annotated(), 9)


def test_a_value_that_skips_a_stage_without_reshard_is_refused() -> None:
    leaf = Node("x", Kind.LEAF, shape=(4,), role="parameter")
    copy, double = Signature.parse("a -> a", linear=True), Signature.parse("a, a -> a", additive=True)
    graph = Graph(
        (
            leaf,
            Node("y", Kind.COMPUTE, ("x",), copy, (4,)),
            Node("there", Kind.RESHARD, ("y",), shape=(4,)),
            Node("back", Kind.RESHARD, ("there",), shape=(4,)),
            Node("z", Kind.COMPUTE, ("y", "back"), double, (4,)),
        ),
        "z",
    )
    here, there = Annotation.on((0,)), Annotation.on((1,))
    annotated = deduce(graph, {"x": here, "there": there, "back": here})
    with pytest.raises(
        GraphError, match="z is in chunk 1, but its operand y is made in chunk 0 and does not pass a Reshard"
    ):
        specialize(annotated, 0)


def test_ranks_joined_by_collectives_stay_in_one_chunk() -> None:
    """{0} and {1} hold addends and become {0, 1} by an all-reduce: one stage, as ranks 0 and 3 in Figure 21."""
    copy, total = Signature.parse("a -> a", linear=True), Signature.parse("a b -> a", linear=True)
    graph = Graph(
        (
            Node("x", Kind.LEAF, shape=(4, 2), role="parameter"),
            Node("sum", Kind.COMPUTE, ("x",), total, (4,)),
            Node("joined", Kind.RESHARD, ("sum",), shape=(4,)),
            Node("y", Kind.COMPUTE, ("joined",), copy, (4,)),
        ),
        "y",
    )
    columns = Annotation((DeviceGroup((0,)), DeviceGroup((1,))), (DistributedStates(),) * 2, 1)
    annotated = deduce(graph, {"x": columns, "joined": Annotation.on((0, 1), {-1: 2})})
    assert annotated.values["sum"].hdim == -2
    (chunk,) = specialize(annotated, 1).chunks
    assert [node.name for node in chunk.nodes] == ["sum", "joined", "y"]
    assert boundary_reshards(annotated) == ()


def test_planning_is_fast() -> None:
    """60 layers on 31 ranks in well under the 1.5 s that a restart can afford."""
    began = time.perf_counter()
    pipelines = (
        tuple((tuple(range(4 * s, 4 * s + 4)), 15) for s in range(4)),
        (*((tuple(range(16 + 4 * s, 20 + 4 * s)), 16) for s in range(3)), ((28, 29), 8), ((30,), 4)),
    )
    graph = annotated(pipelines, layers=60)
    cluster = Cluster.local_cpu(31)
    executables = [specialize(graph, rank, cluster) for rank in range(31)]
    assert sum(len(chunk.nodes) for chunk in executables[30].chunks) > 4 * 15
    assert time.perf_counter() - began < 5

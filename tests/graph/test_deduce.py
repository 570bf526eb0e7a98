"""Every value and every gradient gets its annotation (paper §6.1)."""

import pytest
from torch import Tensor, nn

from hetero_megatron.annotation import Annotation, DeviceGroup, DistributedStates
from hetero_megatron.errors import GraphError
from hetero_megatron.graph import Constraint, Symbol, deduce, reshard_plans, without_partial
from hetero_megatron.graph.trace import trace
from tests.graph import tiny

HETERO = ((((0, 1), 1), ((2, 3), 1)), (((4,), 2),))


def on(tp: int, **parts: int) -> Annotation:
    """`on(2, split0=2)`, `on(2, copies=2)`, `on(2, partial=2)`."""
    dims = {"copies": -1, "partial": -2, "split0": 0, "split1": 1}
    return Annotation.on(range(tp), {dims[name]: count for name, count in parts.items()})


def test_sequence_parallel_reshards_gather_forward_and_scatter_backward() -> None:
    graph = tiny.graph(1)
    annotated = deduce(graph, tiny.plan_for(graph, ((((0, 1), 1),),)))
    labels = {r.name: tuple(p and p.label for p in (r.forward, r.backward)) for r in reshard_plans(annotated)}
    assert labels["layers.0.attention_in"] == ("AG", "RS")
    assert labels["layers.0.attention_out"] == ("RS", "AG")
    assert labels["layers.0.entry"] == (None, None)
    assert annotated.values["layers.0.wo"] == on(2, partial=2)
    assert annotated.gradients["layers.0.attention_in"] == on(2, partial=2)
    assert annotated.gradients["layers.0.attention_norm.weight"] == on(2, partial=2)
    assert not annotated.edge_gradients


def test_without_sequence_parallel_reshards_reduce_once_each_way() -> None:
    graph = tiny.graph(1)
    annotated = deduce(graph, tiny.plan_for(graph, ((((0, 1), 1),),), sequence_parallel=False))
    labels = {r.name: tuple(p and p.label for p in (r.forward, r.backward)) for r in reshard_plans(annotated)}
    assert labels["layers.0.attention_in"] == (None, "AR")
    assert labels["layers.0.attention_out"] == ("AR", None)
    assert annotated.gradients["layers.0.attention_norm.weight"] == on(2, copies=2)


def test_parameters_of_two_pipelines_have_gradients_that_are_partial_across_them() -> None:
    graph = tiny.graph(2)
    annotated = deduce(graph, tiny.plan_for(graph, HETERO))
    weight = annotated.gradients["layers.0.wq.weight"]
    assert weight.hdim == -2
    assert weight.states == (DistributedStates(((0, 2),)), DistributedStates())
    assert annotated.values["loss"].hdim == -2
    assert "tokens" not in annotated.gradients


def test_copied_kv_heads_reduce_their_gradient_on_the_edge_into_attention() -> None:
    graph = tiny.graph(1)
    annotated = deduce(graph, tiny.plan_for(graph, ((((0, 1, 2, 3), 1),),)))
    key = annotated.edge_gradients["layers.0.attention", 1]
    assert key.states == (DistributedStates(((1, 2), (-2, 2))),)
    assert annotated.gradients["layers.0.wk"].states == (DistributedStates(((1, 2), (-1, 2))),)
    assert annotated.edge_plans()["layers.0.attention", 1].label == "AR"
    assert annotated.gradients["layers.0.wk.weight"].states == (DistributedStates(((0, 2), (-1, 2))),)


def test_consumers_that_disagree_are_reduced_on_their_own_edges() -> None:
    """With copied kv heads q's input gradient is Partial over 4 ranks, k's and v's over 2."""
    graph = tiny.graph(1)
    annotated = deduce(graph, tiny.plan_for(graph, ((((0, 1, 2, 3), 1),),)))
    edges = {edge: gradient.states[0].order for edge, gradient in annotated.edge_gradients.items()}
    assert edges["layers.0.wq", 0] == ((-2, 4),)
    assert edges["layers.0.wk", 0] == ((-2, 2), (-1, 2))
    assert annotated.gradients["layers.0.attention_in"].states[0].order == ((-1, 4),)


def test_an_edge_without_reshard_reduces_a_partial_gradient() -> None:
    class NoReshard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm, self.head = tiny.Embedding(9, 4), tiny.RMSNorm(4), tiny.Linear(9, 4)
            self.loss = tiny.CrossEntropy()

        def forward(self, tokens_T: Tensor, targets_T: Tensor) -> Tensor:
            loss: Tensor = self.loss(self.head(self.norm(self.embedding(tokens_T))), targets_T)
            return loss

    whole = on(2, copies=2)
    plan = dict.fromkeys(("tokens", "targets", "embedding.weight", "norm.weight"), whole)
    annotated = deduce(trace(NoReshard()), {**plan, "head.weight": on(2, split0=2)})
    assert annotated.edge_gradients == {("head", 0): on(2, partial=2)}
    assert annotated.gradients["norm"] == whole


def test_optimizer_states_live_where_the_plan_says() -> None:
    graph = tiny.graph(1)
    plan = tiny.plan_for(graph, ((((0, 1), 1),), (((2, 3), 1),)))
    name = "layers.0.wq.weight"
    state = plan[name].replace(hdim=1)
    annotated = deduce(graph, {**plan, f"{name}@state": state})
    assert annotated.states[name] == state
    assert annotated.states["head.weight"] == plan["head.weight"]
    assert annotated.post_plans()[name].dst == state
    assert annotated.post_plans()[name].src.hdim == -2
    assert annotated.pre_plans()[name].src == state


def test_token_splits_become_constraints_of_the_ranks_they_concern() -> None:
    graph = tiny.graph(2)
    annotated = deduce(graph, tiny.plan_for(graph, HETERO))
    assert annotated.constraints() == (Constraint("T", 2, "embedding_out"),)
    assert annotated.constraints(4) == ()
    annotated.check({"T": 16})
    annotated.check({"T": 15}, rank=4)
    with pytest.raises(
        GraphError, match="T is 15, but must divide by 2: embedding_out is cut into 2 equal parts"
    ):
        annotated.check({"T": 15})


def test_known_sizes_are_checked_when_planned() -> None:
    graph = tiny.graph(2)
    with pytest.raises(GraphError, match="T is 15, but must divide by 2"):
        deduce(graph, tiny.plan_for(graph, HETERO), {"T": 15})
    deduce(graph, tiny.plan_for(graph, HETERO), {"S": 15})


def test_local_shapes_follow_the_annotation() -> None:
    graph = tiny.graph(2)
    annotated = deduce(graph, tiny.plan_for(graph, HETERO))
    assert annotated.local_shape("layers.0.gate", 1) == (Symbol("T"), 24)
    assert annotated.local_shape("layers.0.mlp_out", 1) == (Symbol("T", 2), 32)
    assert annotated.local_shape("layers.0.gate", 4) == (Symbol("T"), 48)


def test_layers_repeat_without_being_deduced_again() -> None:
    graph = tiny.graph(8)
    annotated = deduce(graph, tiny.plan_for(graph, ((((0, 1), 8),),)))
    assert annotated.values["layers.0.wq"] is annotated.values["layers.7.wq"]


def test_a_mismatch_names_node_operands_annotations_and_rule() -> None:
    graph = tiny.graph(1)
    plan = tiny.plan_for(graph, ((((0, 1), 1),),))
    plan["layers.0.attention_in"] = on(2, split0=2)
    with pytest.raises(
        GraphError,
        match=r"layers\.0\.wq: operands are split on different factors \['o', 't'\] .* \(rule 't i, o i -> t o'; "
        r"operand 0 layers\.0\.attention_in is \(0, 1\)\{0: 2\}; operand 1 layers\.0\.wq\.weight is \(0, 1\)\{0: 2\}; "
        r"annotate the leaf or put a Reshard before it\)",
    ):
        deduce(graph, plan)


def test_a_missing_reshard_between_groups_is_named() -> None:
    graph = tiny.graph(1)
    plan = tiny.plan_for(graph, ((((0, 1), 1),),))
    plan["layers.0.wq.weight"] = Annotation.on((2, 3), {0: 2})
    with pytest.raises(
        GraphError, match=r"layers\.0\.wq: operand 1 lives on other device groups .* a Reshard is missing"
    ):
        deduce(graph, plan)


def test_kv_heads_that_do_not_split_are_named() -> None:
    graph = tiny.graph(1)
    plan = tiny.plan_for(graph, ((((0, 1, 2, 3), 1),),))
    plan |= {f"layers.0.{name}.weight": Annotation.on(range(4), {0: 4}) for name in ("wk", "wv")}
    with pytest.raises(
        GraphError, match=r"layers\.0\.attention: 2 kv heads \(num_query_groups\) cannot be split over TP 4"
    ):
        deduce(graph, plan)


def test_a_plan_that_misses_a_name_is_refused() -> None:
    graph = tiny.graph(1)
    plan = tiny.plan_for(graph, ((((0,), 1),),))
    del plan["layers.0.wo.weight"]
    with pytest.raises(GraphError, match=r"the annotation plan says nothing about 'layers\.0\.wo\.weight'"):
        deduce(graph, plan)


def test_a_plan_with_an_unknown_name_is_refused() -> None:
    graph = tiny.graph(1)
    plan = tiny.plan_for(graph, ((((0,), 1),),))
    plan["layers.0.wo.weigth"] = Annotation.on((0,))
    with pytest.raises(
        GraphError, match=r"no leaf or Reshard of the graph; did you mean 'layers\.0\.wo\.weight'"
    ):
        deduce(graph, plan)


def test_a_partial_leaf_is_refused() -> None:
    graph = tiny.graph(1)
    plan = tiny.plan_for(graph, ((((0, 1), 1),),))
    plan["head.weight@state"] = on(2, partial=2)
    with pytest.raises(
        GraphError,
        match=r"head\.weight@state is a leaf, whose values are whole, but its annotation .* is Partial",
    ):
        deduce(graph, plan)


def test_an_annotation_that_cuts_a_dim_too_many_is_refused() -> None:
    graph = tiny.graph(1)
    plan = tiny.plan_for(graph, ((((0, 1), 1),),))
    plan["layers.0.attention_norm.weight"] = on(2, split1=2)
    with pytest.raises(
        GraphError, match=r"layers\.0\.attention_norm\.weight has 1 dims, but its annotation .* cuts dim 1"
    ):
        deduce(graph, plan)


def test_partial_and_copies_apart_cannot_be_reduced_in_place() -> None:
    with pytest.raises(GraphError, match="have Partial and Duplicate apart; list them next to each other"):
        without_partial(Annotation.on(range(8), {-1: 2, 0: 2, -2: 2}))
    group = DeviceGroup((0, 1, 2, 3))
    together = Annotation((group,), (DistributedStates(((-1, 2), (-2, 2))),))
    assert without_partial(together) == Annotation.on(range(4), {-1: 4})

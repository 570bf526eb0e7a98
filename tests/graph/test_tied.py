"""A parameter that nodes on several subgroups use (paper §4.2, §6.1)."""

import pytest
from torch import Tensor, nn

from hetero_megatron.annotation import Annotation, DeviceGroup, DistributedStates
from hetero_megatron.errors import GraphError
from hetero_megatron.graph import AnnotatedGraph, deduce, specialize
from hetero_megatron.graph.trace import trace
from tests.graph import tiny

NAME = "embedding.weight"
SUBGROUPS = {(0, 1): {0: 2}, (2,): {}, (3,): {}}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.embedding_out = tiny.Embedding(50, 32), tiny.Reshard()
        self.entry, self.norm, self.head = tiny.Reshard(), tiny.RMSNorm(32), tiny.Linear(50, 32)
        self.head.weight = self.embedding.weight
        self.loss = tiny.CrossEntropy()

    def forward(self, tokens_T: Tensor, targets_T: Tensor) -> Tensor:
        x_TD = self.entry(self.embedding_out(self.embedding(tokens_T)))
        loss: Tensor = self.loss(self.head(self.norm(x_TD)), targets_T)
        return loss


GRAPH = trace(Tied())


def union(*groups: tuple[int, ...], hdim: int = -1, whole: bool = False) -> Annotation:
    states = tuple(
        DistributedStates.of({-1: len(group)} if whole else SUBGROUPS.get(group, {})) for group in groups
    )
    return Annotation(tuple(map(DeviceGroup, groups)), states, hdim if len(groups) > 1 else -1)


def plan(first: Annotation, last: Annotation, weight: Annotation) -> dict[str, Annotation]:
    """Tokens and embedding on `first`, norm and head on `last`."""
    norm = last.replace(hdim=-1)
    return {
        "tokens": first,
        "embedding_out": first,
        NAME: weight,
        "entry": last,
        "norm.weight": norm,
        "targets": last,
    }


def het4(weight: Annotation) -> AnnotatedGraph:
    """P0: R0-1/TP2 > R2/TP1; P1: R3/TP1."""
    first = union((0, 1), (3,), hdim=0, whole=True)
    return deduce(GRAPH, plan(first, union((2,), (3,), hdim=0, whole=True), weight))


def test_every_node_sees_the_subgroups_of_its_other_operands_and_the_gradient_is_a_sum_over_all() -> None:
    annotated = het4(union((0, 1), (2,), (3,)))
    assert annotated.values["embedding"].groups == (DeviceGroup((0, 1)), DeviceGroup((3,)))
    assert annotated.values["head"].groups == (DeviceGroup((2,)), DeviceGroup((3,)))
    assert annotated.values[NAME] == union((0, 1), (2,), (3,))
    assert annotated.gradients[NAME] == union((0, 1), (2,), (3,), hdim=-2)
    assert annotated.post_plans()[NAME].label == "SplitAR"
    for rank in range(4):
        assert [bound.name for bound in specialize(annotated, rank).post][:1] == [NAME]


def test_one_pipeline_adds_its_first_and_its_last_stage() -> None:
    annotated = deduce(GRAPH, plan(union((2,)), union((3,)), union((2,), (3,))))
    assert (annotated.values["embedding"], annotated.values["head"]) == (union((2,)), union((3,)))
    assert annotated.gradients[NAME] == union((2,), (3,), hdim=-2)


def test_the_order_of_the_subgroups_is_free() -> None:
    annotated = het4(union((3,), (2,), (0, 1)))
    assert annotated.gradients[NAME] == union((3,), (2,), (0, 1), hdim=-2)


def test_one_stage_adds_both_uses_inside_the_rank() -> None:
    whole = union((0, 1), whole=True)
    annotated = deduce(GRAPH, plan(whole, whole, union((0, 1))))
    assert annotated.gradients[NAME] == union((0, 1))
    assert annotated.post_plans()[NAME].label == "Identity"


def test_a_weight_that_lacks_a_stage_names_both() -> None:
    with pytest.raises(
        GraphError,
        match=r"head: operand norm is <\(2\)\{\} \| \(3\)\{\}, hdim 0>, but the shared parameter embedding\.weight is "
        r"<\(0, 1\)\{0: 2\} \| \(3\)\{\}, hdim -1> and has no subgroup \(2\)",
    ):
        het4(union((0, 1), (3,)))


def test_a_subgroup_on_which_no_consumer_runs_is_refused() -> None:
    with pytest.raises(
        GraphError,
        match=r"embedding\.weight is .*, but none of its consumers \(embedding, head\) runs on \(4\)",
    ):
        het4(union((0, 1), (2,), (3,), (4,)))


def test_a_weight_cut_across_its_subgroups_cannot_be_restricted() -> None:
    with pytest.raises(
        GraphError,
        match=r"embedding: the shared parameter embedding\.weight is .*, hdim 0>, cut across its subgroups, of which "
        "embedding has only some; with hdim -1",
    ):
        deduce(GRAPH, plan(union((2,)), union((3,)), union((2,), (3,), hdim=0)))


def test_uses_on_one_subgroup_that_cannot_be_added_are_refused() -> None:
    """The embedding's tokens are split, which makes its gradient Partial; the head's are whole."""
    first, last = Annotation.on((0, 1), {0: 2}), union((0, 1), whole=True)
    with pytest.raises(
        GraphError,
        match=r"the gradient of embedding\.weight on \(0, 1\) is \{partial: 2\} from embedding and \{duplicate: 2\} "
        "from head: they cannot be added before they are reduced",
    ):
        deduce(GRAPH, plan(first, last, last))


def test_a_gradient_that_several_subgroups_repeat_is_not_summed() -> None:
    """Tokens that are copied to both pipelines: each makes the whole gradient of the embedding."""
    first, last = union((0,), (1,)), union((2,), (3,), hdim=0)
    with pytest.raises(
        GraphError,
        match=r"the gradient of embedding\.weight from embedding is <\(0\)\{\} \| \(1\)\{\}, hdim -1>: every "
        "subgroup makes all of it",
    ):
        deduce(GRAPH, plan(first, last, union((0,), (1,), (2,), (3,))))

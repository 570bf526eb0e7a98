"""SwitchPlan: what a switch moves (paper §7)."""

import re
from dataclasses import replace
from fractions import Fraction

import pytest

from hetero_megatron.annotation import Annotation
from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import ReshardError
from hetero_megatron.models.llama import Llama
from hetero_megatron.switch_plan import parameters_between, plan_switch, switch_between
from tests.distributed.training import T0, build, het3, het4, stage, strategy

HALVES, WHOLE = Annotation.on((0, 1), {0: 2}), Annotation.on((0, 1), {-1: 2})
SHAPES = {"a": (8, 4), "b": (2,)}


def test_every_parameter_moves_with_both_moments_there_and_back() -> None:
    plan = plan_switch([("a", (8, 4), HALVES, WHOLE), ("b", (2,), HALVES, WHOLE)], Cluster.local_cpu(2))
    assert [tensor.name for tensor in plan.tensors] == [
        "a",
        "b",
        "b@mean",
        "a@mean",
        "b@variance",
        "a@variance",
    ]
    assert {tensor.itemsize for tensor in plan.tensors} == {4}
    assert plan.bytes_sent() == {0: {"loopback": 17 * 12}, 1: {"loopback": 17 * 12}}
    assert plan.scheme("naive") is plan.scheme("naive")


def test_a_third_of_the_bytes_may_be_a_fraction() -> None:
    plan = plan_switch([("a", (8, 4), HALVES, WHOLE)], Cluster.local_cpu(2), bytes_per_parameter=8)
    assert plan.tensors[0].itemsize == Fraction(8, 3)
    assert plan.bytes_sent("naive") == {0: {"loopback": 128}, 1: {"loopback": 128}}


def test_unchanged_layouts_move_nothing() -> None:
    assert plan_switch([("a", (8, 4), HALVES, HALVES)], Cluster.local_cpu(2)).bytes_sent() == {}


def test_parameters_are_read_off_two_plans_in_the_order_of_the_shapes() -> None:
    before, after = {"b": HALVES, "a": HALVES, "out": WHOLE}, {"a": WHOLE, "b": WHOLE}
    assert parameters_between(SHAPES, before, after) == (
        ("a", (8, 4), HALVES, WHOLE),
        ("b", (2,), HALVES, WHOLE),
    )


@pytest.mark.parametrize(
    ("before", "after", "which"), [({}, {"a": WHOLE}, "before"), ({"a": WHOLE}, {}, "after")]
)
def test_a_parameter_that_a_plan_forgets_is_refused(
    before: dict[str, Annotation], after: dict[str, Annotation], which: str
) -> None:
    with pytest.raises(
        ReshardError, match=re.escape(f"parameter 'a' has no annotation in the plan {which} the switch")
    ):
        parameters_between({"a": (8, 4)}, before, after)


PP2 = strategy((1, 1, [stage("0", "0-1"), stage("1", "2-3")]))


def test_programs_move_what_their_optimizer_states_say() -> None:
    before, after = build(Llama(T0), het4()), build(Llama(T0), het4(zero=1))
    plan = switch_between(before, after)
    names = before.annotated.graph.parameters
    assert [tensor.name for tensor in plan.tensors[: len(names)]] == list(names)
    assert len(plan.tensors) == 3 * len(names)
    for tensor in plan.tensors:
        name = tensor.name.partition("@")[0]
        assert (tensor.src, tensor.dst) == (before.annotated.states[name], after.annotated.states[name])
    assert plan.owners == (0, 1, 2, 3)
    # ZeRO-1 keeps less of what everybody has: nothing travels.
    assert plan.bytes_sent() == {}
    weights = switch_between(after, before, moments=False)
    assert len(weights.tensors) == len(names)
    assert {tensor.itemsize for tensor in weights.tensors} == {4}


def test_ranks_that_only_one_program_knows_are_part_of_the_cluster() -> None:
    small, wide = build(Llama(T0), strategy((1, 1, [stage("0", "0-3")]))), build(Llama(T0), PP2)
    for before, after in ((small, wide), (wide, small)):
        assert switch_between(before, after).cluster.ranks == (0, 1)


def test_a_slice_without_a_living_owner_is_refused_with_its_layers() -> None:
    before, after = build(Llama(T0), PP2), build(Llama(T0), strategy((1, 1, [stage("0", "0-3")])))
    text = (
        "layers 2-3 (18 parameters), final_norm.weight, head.weight: slices that only lost ranks owned (lost: 1); "
        "load them from a checkpoint"
    )
    with pytest.raises(ReshardError, match=re.escape(text)):
        switch_between(before, after, lost=frozenset({1}))


def test_a_lost_rank_cannot_be_used_again() -> None:
    before, after = build(Llama(T0), PP2), build(Llama(T0), PP2)
    with pytest.raises(ReshardError, match="rank 1 is lost, but the new strategy uses it"):
        switch_between(before, after, lost=frozenset({1}))


def test_a_replica_survives_the_loss_of_the_other() -> None:
    plan = switch_between(build(Llama(T0), het4()), build(Llama(T0), het3()), lost=frozenset({3}))
    assert plan.unowned == ()
    assert plan.owners == (0, 1, 2)
    assert plan.bytes_sent() == {}


def test_programs_of_two_models_are_refused() -> None:
    wider = replace(T0, vocab_size=97)
    with pytest.raises(
        ReshardError,
        match="the programs are of different models: they differ in embedding.weight; a switch changes",
    ):
        switch_between(build(Llama(T0), PP2), build(Llama(wider), PP2))

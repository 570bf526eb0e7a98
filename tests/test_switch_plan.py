"""SwitchPlan: what a switch moves (paper §7)."""

import re
from fractions import Fraction

import pytest

from hetero_megatron.annotation import Annotation
from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import ReshardError
from hetero_megatron.switch_plan import parameters_between, plan_switch

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

"""Flat buffers: buckets by gradient plan, FP32 accumulation, and who counts a shard."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from hetero_megatron.annotation import Annotation, DeviceGroup, DistributedStates
from hetero_megatron.comm import resolve
from hetero_megatron.comm.steps import CommPlan
from hetero_megatron.runtime.state import State, is_counted, lay_out
from tests.distributed.training import T0, Llama, build, het4, stage, strategy
from tests.runtime.flat import SHAPES, state_of

CPU = torch.device("cpu")


def union(*states: dict[int, int], hdim: int = -1) -> Annotation:
    """Subgroups on consecutive ranks."""
    groups, first = [], 0
    for each in map(DistributedStates.of, states):
        groups.append(DeviceGroup(tuple(range(first, first + each.degree))))
        first += each.degree
    return Annotation(tuple(groups), tuple(map(DistributedStates.of, states)), hdim)


@pytest.mark.parametrize(
    ("annotation", "counted"),
    [
        (union({0: 2}), (0, 1)),
        (union({-1: 2}), (0,)),
        (union({0: 2, -1: 2}), (0, 2)),
        (union({-1: 2, 0: 2}), (0, 1)),
        (union({0: 2}, {}), (0, 1)),
        (union({}, {0: 2}), (0,)),
        (union({-1: 4}, {0: 2}), (0,)),
        (union({0: 2}, {}, hdim=0), (0, 1, 2)),
        (union({-1: 2}, {-1: 2}, hdim=0), (0, 2)),
        (union({1: 2}, {-1: 2}, hdim=0), (0, 1, 2)),
    ],
    ids=str,
)
def test_copies_inside_and_across_subgroups_are_counted_by_their_first_holder(
    annotation: Annotation, counted: tuple[int, ...]
) -> None:
    assert tuple(rank for rank in annotation.ranks if is_counted(annotation, rank)) == counted
    assert not is_counted(annotation, 99)


@pytest.mark.parametrize("zero_dim", [-1, 0, 1])
def test_every_element_is_counted_exactly_once(zero_dim: int) -> None:
    parts = [{}, {0: 2}, {1: 2}, {-1: 2}, {0: 2, -1: 2}, {-1: 2, 1: 2}]
    for first, second in product(parts, parts):
        annotation = union(first, second, hdim=zero_dim)
        count = np.zeros((8, 8), dtype=int)
        for rank in annotation.ranks:
            if is_counted(annotation, rank):
                count[tuple(slice(lo, hi) for lo, hi in annotation.region(rank).bounds((8, 8)))] += 1
        assert (count == 1).all(), f"{annotation}: {Counter(count.flatten().tolist())}"


def test_the_counted_elements_of_a_strategy_are_the_parameters_of_the_model() -> None:
    for plan in (
        het4(),
        strategy((1, 1, [stage("0-3", "0-3")])),
        strategy((2, 1, [stage("0", "0-1"), stage("1-2", "2-3")])),
    ):
        program = build(Llama(T0), plan)
        graph = program.annotated.graph
        parameters = [
            (n, graph.parameter_shape(n), program.plan[n], program.posts[n]) for n in graph.parameters
        ]
        counted = sum(
            slot.elements
            for rank in plan.ranks
            for bucket in lay_out(
                rank, [each for each in parameters if each[2].subgroup_of(rank) is not None]
            )
            for slot in bucket.slots
            if slot.counted
        )
        assert counted == 43_296


def three_plans() -> tuple[list[tuple[str, tuple[int, ...], Annotation, CommPlan]], CommPlan, CommPlan]:
    rows, copies = Annotation.on((0, 1), {0: 2}), Annotation.on((0, 1), {-1: 2})
    keep, add = resolve(rows, rows), resolve(Annotation.on((0, 1), {-2: 2}), copies)
    parameters = [
        ("a.weight", (4, 3), rows, keep),
        ("norm.weight", (5,), copies, add),
        ("b.weight", (2, 6), rows, keep),
        ("norm2.weight", (3,), copies, add),
    ]
    return parameters, keep, add


def test_a_bucket_is_one_run_of_the_buffers_per_gradient_plan() -> None:
    parameters, keep, add = three_plans()
    first, second = lay_out(1, parameters)
    assert (first.plan, second.plan) == (keep, add)
    assert [slot.name for slot in first.slots] == ["a.weight", "b.weight"]
    assert [slot.name for slot in second.slots] == ["norm.weight", "norm2.weight"]
    assert [slot.shape for slot in first.slots] == [(2, 3), (1, 6)]
    assert first.slots[0].bounds == ((2, 4), (0, 3))
    assert [slot.offset for bucket in (first, second) for slot in bucket.slots] == [0, 6, 12, 17]
    assert (first.span, second.span) == (slice(0, 12), slice(12, 20))


def test_shards_are_views_that_tile_the_buffers() -> None:
    parameters, _, _ = three_plans()
    state = State(lay_out(0, parameters), torch.float32, CPU)
    state.initialise(lambda slot: torch.full(slot.shape, float(slot.offset + 1)))
    assert state.master.tolist() == [1.0] * 6 + [7.0] * 6 + [13.0] * 5 + [18.0] * 3
    assert state.parameters["b.weight"].data_ptr() == state.master[6:].data_ptr()


def test_attached_shards_take_the_place_of_the_modules_parameters() -> None:
    state = state_of()
    modules = {name.rsplit(".", 1)[0]: nn.Linear(1, 1, bias=False, device="meta") for name in SHAPES}
    state.attach(modules)
    for name, shape in SHAPES.items():
        weight = modules[name.rsplit(".", 1)[0]].weight
        assert weight is state.parameters[name]
        assert (tuple(weight.shape), weight.device) == (shape, CPU)


def test_fp32_gradients_land_in_the_flat_buffer_without_a_copy() -> None:
    state = state_of()
    weight = state.parameters["a.weight"]
    for factor in (1.0, 10.0):
        (weight * factor).sum().backward()
    assert weight.grad is not None
    assert weight.grad.data_ptr() == state.gradient.data_ptr()
    assert state.gradient.tolist() == [11.0] * 12 + [0.0] * 17
    state.zero_gradient()
    assert not state.gradient.any()
    (weight * 2.0).sum().backward()
    assert state.gradient.tolist() == [2.0] * 12 + [0.0] * 17, "the view survives from step to step"


def test_bf16_gradients_are_added_up_in_fp32() -> None:
    """In BF16, 256 + 1 is 256: 256 small micro-batches after a large one would leave no trace."""
    state = state_of(dtype=torch.bfloat16)
    weight = state.parameters["a.weight"]
    assert weight.dtype is torch.bfloat16
    for factor in (256.0, *[1.0] * 256):
        (weight * factor).sum().backward()
        assert weight.grad is None, "no second gradient buffer"
    assert state.gradient.dtype is torch.float32
    assert state.gradient.tolist() == [512.0] * 12 + [0.0] * 17


def test_bf16_weights_are_rounded_master_weights_and_refreshed_from_them() -> None:
    state = state_of(dtype=torch.bfloat16)
    assert torch.equal(state.compute, state.master.bfloat16())
    assert not torch.equal(state.compute.float(), state.master)
    state.master.fill_(1 + 2**-10)
    state.refresh()
    assert state.parameters["norm.weight"].tolist() == [1.0] * 5
    assert state.master[0] == 1 + 2**-10, "the master weights keep what BF16 loses"


def test_fp32_weights_and_their_master_are_one_buffer() -> None:
    state = state_of()
    assert state.compute is state.master

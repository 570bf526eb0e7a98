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
from hetero_megatron.runtime.state import Placement, Slots, State, is_counted, lay_out, span
from tests.distributed.training import T0, Llama, build, het4, stage, strategy
from tests.runtime.flat import SHAPES, refresh, state_of

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
        het4(zero=1),
        strategy((1, 1, [stage("0-3", "0-3")])),
        strategy((2, 1, [stage("0", "0-1"), stage("1-2", "2-3")])),
    ):
        program = build(Llama(T0), plan)
        graph, states = program.annotated.graph, program.annotated.states
        parameters = [
            Placement(
                n, graph.parameter_shape(n), program.plan[n], states[n], program.posts[n], program.pres[n]
            )
            for n in graph.parameters
        ]
        counted = sum(
            slot.elements
            for rank in plan.ranks
            for bucket in lay_out(
                rank, [each for each in parameters if each.parameter.subgroup_of(rank) is not None]
            )
            for slot in bucket.states
            if slot.counted
        )
        assert counted == 43_296


def three_plans() -> tuple[list[Placement], CommPlan, CommPlan]:
    rows, copies = Annotation.on((0, 1), {0: 2}), Annotation.on((0, 1), {-1: 2})
    keep, add = resolve(rows, rows), resolve(Annotation.on((0, 1), {-2: 2}), copies)
    parameters = [
        Placement("a.weight", (4, 3), rows, rows, keep, keep),
        Placement("norm.weight", (5,), copies, copies, add, keep),
        Placement("b.weight", (2, 6), rows, rows, keep, keep),
        Placement("norm2.weight", (3,), copies, copies, add, keep),
    ]
    return parameters, keep, add


def names(slots: Slots) -> list[str]:
    return [slot.name for slot in slots]


def test_a_bucket_is_one_run_of_the_buffers_per_gradient_plan() -> None:
    parameters, keep, add = three_plans()
    first, second = lay_out(1, parameters)
    assert (first.post, second.post) == (keep, add)
    assert names(first.states) == names(first.parameters) == ["a.weight", "b.weight"]
    assert names(second.states) == ["norm.weight", "norm2.weight"]
    assert [slot.shape for slot in first.states] == [(2, 3), (1, 6)]
    assert first.states[0].bounds == ((2, 4), (0, 3))
    assert [slot.offset for bucket in (first, second) for slot in bucket.states] == [0, 6, 12, 17]
    assert (span(first.states), span(second.states)) == (slice(0, 12), slice(12, 20))


def test_buckets_are_cut_by_the_size_of_the_full_tensors_alike_on_every_rank() -> None:
    parameters, _, _ = three_plans()
    for rank in (0, 1):
        cut = lay_out(rank, parameters, bucket_elements=5)
        assert [names(bucket.states) for bucket in cut] == [
            ["a.weight"],
            ["norm.weight"],
            ["b.weight"],
            ["norm2.weight"],
        ]


def zero_1(rank: int, dtype: torch.dtype = torch.float32) -> State:
    """Copies on ranks 0 and 1, states cut in rows: five rows are three and two."""
    copies, rows = Annotation.on((0, 1), {-1: 2}), Annotation.on((0, 1), {0: 2})
    post, pre = resolve(Annotation.on((0, 1), {-2: 2}), rows), resolve(rows, copies)
    return State(
        lay_out(rank, [Placement("norm.weight", (5,), copies, rows, post, pre)]), dtype, torch.device("cpu")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_zero_1_states_hold_a_part_and_parameters_all(dtype: torch.dtype) -> None:
    states = [zero_1(rank, dtype) for rank in (0, 1)]
    assert [state.master.numel() for state in states] == [3, 2]
    assert [state.moments["exp_avg"].numel() for state in states] == [3, 2]
    for state in states:
        assert state.is_apart
        assert state.accumulated is not state.gradient
        assert (state.compute.numel(), state.compute.dtype) == (5, dtype)
        assert (state.accumulated.numel(), state.accumulated.dtype) == (5, torch.float32)
        assert state.counted.tolist() == [1.0]


def test_states_in_host_memory_are_apart_from_the_parameters() -> None:
    parameters, _, _ = three_plans()
    state = State(lay_out(0, parameters), torch.float32, CPU, offload=True)
    assert state.is_apart
    assert state.compute is not state.master
    assert state.master.device == CPU


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
    refresh(state)
    assert state.parameters["norm.weight"].tolist() == [1.0] * 5
    assert state.master[0] == 1 + 2**-10, "the master weights keep what BF16 loses"


def test_fp32_weights_and_their_master_are_one_buffer() -> None:
    state = state_of()
    assert state.compute is state.master

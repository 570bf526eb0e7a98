"""Pipelines read off the Reshards (paper A.2, Figure 21, Tables of C.3)."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from hetero_megatron.annotation import DUPLICATE, FULL, PARTIAL, Annotation, DeviceGroup, DistributedStates
from hetero_megatron.comm.resolve import resolve
from hetero_megatron.comm.steps import CommPlan, Stage, Transfer
from hetero_megatron.errors import ScheduleError
from hetero_megatron.pipeline.construct import Pipelines, check_against, construct, position


def union(groups: Sequence[tuple[int, ...]], dim: int, hdim: int = 0) -> Annotation:
    """Every group splits (or copies, or sums) along `dim`; the groups hold successive tokens."""
    states = tuple(DistributedStates.of({dim: len(group)}) for group in groups)
    return Annotation(tuple(map(DeviceGroup, groups)), states, hdim if len(groups) > 1 else DUPLICATE)


def reshards(
    pipelines: Pipelines, layers: Sequence[Sequence[int]], sequence_parallel: bool = True
) -> list[CommPlan]:
    """The Reshards of a Megatron-like model: `layers[p][s]` layers on stage s of pipeline p."""
    owners = [
        [stage for stage, count in zip(pipeline, counts, strict=True) for _ in range(count)]
        for pipeline, counts in zip(pipelines, layers, strict=True)
    ]
    between = 0 if sequence_parallel else DUPLICATE
    plans, at = [], union([owner[0] for owner in owners], between)
    for layer in range(len(owners[0])):
        groups = [owner[layer] for owner in owners]
        entry, inner, outer = (union(groups, dim) for dim in (between, DUPLICATE, PARTIAL))
        for _ in range(2):  # attention, then the MLP
            plans += [resolve(at, entry), resolve(entry, inner), resolve(outer, entry)]
            at = entry
    return plans


def ranks_of(pipelines: Pipelines) -> list[int]:
    return [rank for pipeline in pipelines for stage in pipeline for rank in stage]


def test_figure_21_merges_collectives_and_appends_receivers() -> None:
    """Ranks 0 and 3 reduce, 1 sends to 5 and 6, the pair 2 and 4 does nothing."""
    src = Annotation(
        (DeviceGroup((0, 3)), DeviceGroup((1,)), DeviceGroup((2, 4))),
        (DistributedStates.of({PARTIAL: 2}), DistributedStates(), DistributedStates.of({0: 2})),
        0,
    )
    dst = Annotation(
        (DeviceGroup((0, 3)), DeviceGroup((5, 6)), DeviceGroup((2, 4))),
        (DistributedStates.of({0: 2}),) * 3,
        0,
    )
    assert construct([resolve(src, dst)], range(7)) == (((0, 3),), ((1,), (5, 6)), ((2, 4),))


C2: Pipelines = (
    (tuple(range(4)), tuple(range(4, 8)), tuple(range(8, 12)), tuple(range(12, 16))),
    (tuple(range(16, 20)), tuple(range(20, 24)), tuple(range(24, 28)), (28, 29), (30,)),
)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_31_rank_strategy_of_the_paper_is_found(sequence_parallel: bool) -> None:
    plans = reshards(C2, [(15, 15, 15, 15), (16, 16, 16, 8, 4)], sequence_parallel)
    found = construct(plans, range(31))
    assert found == C2
    check_against(found, C2)
    assert position(found, 30) == (1, 4)


@pytest.mark.parametrize("seed", range(25))
def test_random_strategies_are_found(seed: int) -> None:
    chooser = random.Random(seed)
    ranks = list(range(24))
    chooser.shuffle(ranks)
    wanted, layers = [], []
    for _ in range(chooser.randint(1, 3)):
        stages = [
            tuple(ranks.pop() for _ in range(chooser.choice((1, 2, 2)))) for _ in range(chooser.randint(1, 4))
        ]
        wanted.append(tuple(stages))
        cuts = sorted(chooser.sample(range(1, 6), len(stages) - 1))
        layers.append([b - a for a, b in zip([0, *cuts], [*cuts, 6], strict=True)])
    pipelines = tuple(wanted)
    found = construct(reshards(pipelines, layers, chooser.random() < 0.5), ranks_of(pipelines))
    check_against(found, pipelines)
    assert found == pipelines


def test_without_tensor_parallelism_no_collective_is_needed() -> None:
    pipelines = (((0,), (1,), (2,)), ((3,), (4,), (5,)))
    assert construct(reshards(pipelines, [(1, 1, 1), (1, 1, 1)]), range(6)) == pipelines


def test_ranks_that_no_reshard_names_stay_alone_and_come_last() -> None:
    assert construct([], [4, 2]) == (((4,),), ((2,),))
    assert construct([resolve(Annotation.on((3,)), Annotation.on((1,)))], range(4)) == (
        ((3,), (1,)),
        ((0,),),
        ((2,),),
    )


def test_moving_rows_inside_a_group_makes_no_stage() -> None:
    plan = resolve(Annotation.on((0, 1), {0: 2}), Annotation.on((0, 1), {1: 2}))
    assert any(isinstance(step, Transfer) for stage in plan.stages for step in stage.steps)
    assert construct([plan], range(2)) == (((0, 1),),)


def test_moving_rows_between_subgroups_that_stay_merges_them() -> None:
    """Context parallelism by subgroups: both halves of the tokens must run together."""
    src, dst = union([(0, 1), (2,)], 0, 0), union([(0, 1), (2,)], 1, 1)
    assert construct([resolve(src, dst)], range(3)) == (((0, 1, 2),),)


def test_two_senders_of_one_receiving_group_become_one_stage() -> None:
    plan = resolve(union([(0,), (1,)], 0), Annotation.on((2, 3), {0: 2}))
    assert construct([plan], range(4)) == (((0, 1), (2, 3)),)


def test_a_rank_without_predecessor_joins_a_later_stage() -> None:
    plans = [
        resolve(Annotation.on((0,)), Annotation.on((1,))),
        resolve(Annotation.on((2, 1), {PARTIAL: 2}), Annotation.on((2, 1), {0: 2})),
    ]
    assert construct(plans, range(3)) == (((0,), (1, 2)),)


def test_going_back_to_the_first_stage_starts_the_next_chunk() -> None:
    stages = [Annotation.on(group, {0: 2}) for group in ((0, 1), (2, 3), (4, 5))]
    order = [*stages, *stages]
    plans = [resolve(a, b) for a, b in pairwise(order)]
    assert construct(plans, range(6)) == (((0, 1), (2, 3), (4, 5)),)


def test_a_reshard_that_skips_a_stage_is_refused() -> None:
    single = [Annotation.on((rank,)) for rank in range(3)]
    plans = [resolve(single[a], single[b]) for a, b in ((0, 1), (1, 2), (0, 2))]
    with pytest.raises(
        ScheduleError, match=r"Reshard 2 \(SR\) puts ranks 0 and 2 on successive stages, but .* 0 and 2 of"
    ):
        construct(plans, range(3))


def test_a_collective_over_two_stages_is_refused() -> None:
    plans = [
        resolve(Annotation.on((0,)), Annotation.on((1,))),
        resolve(Annotation.on((0, 1), {PARTIAL: 2}), Annotation.on((0, 1), {DUPLICATE: 2})),
    ]
    with pytest.raises(
        ScheduleError,
        match=r"Reshard 1 \(AR\) puts ranks 0 and 1 on one stage, but earlier .* stages 0 and 1",
    ):
        construct(plans, range(2))


def test_an_unknown_rank_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"Reshard 0 \(SR\) names rank 7, which is not among the 2 ranks"):
        construct([resolve(Annotation.on((0,)), Annotation.on((7,)))], range(2))


def test_only_named_attributes_of_a_plan_are_read() -> None:
    src, dst = Annotation.on((0,)), Annotation.on((1,))
    assert construct([CommPlan(src, dst, (Stage(dst, (Transfer(0, 1, FULL),)),), ("SR",))], range(2)) == (
        ((0,), (1,)),
    )


def test_a_difference_is_named_with_pipeline_stage_and_both_rank_lists() -> None:
    wanted = (((0, 1), (2, 3)), ((4, 5),))
    check_against((((4, 5),), ((1, 0), (3, 2))), wanted)
    with pytest.raises(
        ScheduleError, match=r"pipeline 0 stage 1: the Reshards put ranks \(2,\) there, expected \(2, 3\)"
    ):
        check_against((((0, 1), (2,)), ((4, 5),)), wanted)
    with pytest.raises(
        ScheduleError, match=r"pipeline 0 stage 2: the Reshards put ranks \(6,\) there, expected \(\)"
    ):
        check_against((((0, 1), (2, 3), (6,)), ((4, 5),)), wanted)
    with pytest.raises(
        ScheduleError, match=r"pipeline 1 stage 0: the Reshards put ranks \(\) there, expected \(4, 5\)"
    ):
        check_against((((0, 1), (2, 3)),), wanted)
    with pytest.raises(ScheduleError, match=r"make a pipeline \(\(6,\),\), but rank 6 is expected in none"):
        check_against((((0, 1), (2, 3)), ((4, 5),), ((6,),)), wanted)


def test_a_rank_outside_all_pipelines_has_no_position() -> None:
    with pytest.raises(ScheduleError, match=r"rank 9 is in no pipeline of \(\(\(0,\),\),\)"):
        position((((0,),),), 9)

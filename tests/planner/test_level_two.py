"""Layers per stage and micro-batches per pipeline: the own search, the ILP and plain enumeration agree."""

import random
from collections.abc import Sequence
from itertools import product
from math import inf

import pytest

from hetero_megatron.errors import PlannerError
from hetero_megatron.planner.level_two import (
    PipelineLoad,
    StageLoad,
    check_layers,
    check_micro_batches,
    closed_form,
    deal_micro_batches,
    split_layers,
)
from hetero_megatron.planner.level_two_ilp import deal_micro_batches_ilp, split_layers_ilp
from hetero_megatron.planner.solver import NoAnswer, Solver

HIGHS = Solver("highs")


def stages_of(draw: random.Random, total: int) -> list[StageLoad]:
    found = []
    for _ in range(draw.randint(1, 4)):
        seconds, size = draw.choice([1.0, 2.0, 3.5, 0.2 + 3 * draw.random()]), draw.choice([1.0, 2.0, 3.0])
        again = draw.choice([0.0, seconds * 1.33])
        room = draw.choice([inf, 1.5 * total * size * draw.random()])
        fixed = draw.choice([0.0, 0.5, 2.0])
        found.append(StageLoad(fixed, seconds, size, room, again, 0.4 * size if again else 0.0))
    return found


def enumerated(total: int, stages: Sequence[StageLoad], micro_batches: int) -> float | None:
    values = [
        closed_form(stages, layers, micro_batches)
        for layers in product(range(1, total + 1), repeat=len(stages))
        if sum(layers) == total and all(n <= s.most(total) for n, s in zip(layers, stages, strict=True))
    ]
    return min(values, default=None)


@pytest.mark.parametrize("seed", range(60))
def test_layers_by_search_and_by_ilp_are_as_good_as_enumeration(seed: int) -> None:
    draw = random.Random(seed)
    total, micro_batches = draw.randint(4, 11), draw.randint(1, 12)
    stages = stages_of(draw, total)
    best = enumerated(total, stages, micro_batches)
    own = split_layers(total, stages, micro_batches)
    try:
        solved = split_layers_ilp(total, stages, micro_batches, HIGHS)
    except NoAnswer:
        solved = None
    if best is None:
        assert own is solved is None
        return
    assert own is not None
    assert solved is not None
    assert closed_form(stages, own, micro_batches) == pytest.approx(best, rel=1e-9)
    assert closed_form(stages, solved, micro_batches) == pytest.approx(best, rel=1e-6)
    quick = split_layers(total, stages, micro_batches, quick=True)
    assert quick is not None
    check_layers(total, stages, quick)


@pytest.mark.parametrize("seed", range(30))
def test_micro_batches_by_search_and_by_ilp_are_as_good_as_enumeration(seed: int) -> None:
    draw = random.Random(seed)
    total = draw.randint(1, 14)
    loads = []
    for _ in range(draw.randint(1, 4)):
        each = 0.1 + 2 * draw.random()
        loads.append(PipelineLoad(each * draw.choice([1, 2, 4]), each))

    def slowest(counts: Sequence[int]) -> float:
        return max(load.seconds(n) for load, n in zip(loads, counts, strict=True))

    best = min(slowest(c) for c in product(range(total + 1), repeat=len(loads)) if sum(c) == total)
    assert slowest(deal_micro_batches(total, loads)) == pytest.approx(best, rel=1e-9)
    assert slowest(deal_micro_batches_ilp(total, loads, HIGHS)) == pytest.approx(best, rel=1e-6)


def test_64_sequences_over_3_equal_pipelines_are_22_21_21() -> None:
    assert sorted(deal_micro_batches(64, [PipelineLoad(1.0, 1.0)] * 3)) == [21, 21, 22]
    assert sorted(deal_micro_batches_ilp(64, [PipelineLoad(1.0, 1.0)] * 3, HIGHS)) == [21, 21, 22]


def test_64_sequences_over_speeds_of_33_to_31_are_33_and_31() -> None:
    loads = [PipelineLoad(31.0, 31.0), PipelineLoad(33.0, 33.0)]
    assert deal_micro_batches(64, loads) == (33, 31)
    assert deal_micro_batches_ilp(64, loads, HIGHS) == (33, 31)


def test_2_sequences_leave_one_of_3_pipelines_without_work() -> None:
    assert sorted(deal_micro_batches(2, [PipelineLoad(1.0, 1.0)] * 3)) == [0, 1, 1]


@pytest.mark.parametrize("deal", [deal_micro_batches, lambda n, p: deal_micro_batches_ilp(n, p, HIGHS)])
def test_nothing_to_deal_and_nobody_to_deal_to_are_refused(deal) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PlannerError, match="no pipeline to deal micro-batches to; a plan needs a device"):
        deal(4, [])
    with pytest.raises(PlannerError, match="0 sequences to deal out; global_batch_size is 1 or more"):
        deal(0, [PipelineLoad(1.0, 1.0)])


def test_7_layers_on_2_devices_of_3_each_have_no_split() -> None:
    stages = [StageLoad(0.0, 1.0, 1.0, 3.0)] * 2
    assert split_layers(7, stages, 4) is None
    with pytest.raises(NoAnswer):
        split_layers_ilp(7, stages, 4, HIGHS)


def test_memory_that_is_gone_before_the_first_layer_has_no_split() -> None:
    stages = [StageLoad(0.0, 1.0, 1.0, -1.0), StageLoad(0.0, 1.0)]
    assert split_layers(7, stages, 4) is None
    with pytest.raises(NoAnswer):
        split_layers_ilp(7, stages, 4, HIGHS)


def test_the_paper_split_follows_from_a_speed_ratio_of_38_to_11() -> None:
    h20, h800 = StageLoad(0.0, 38.0), StageLoad(0.0, 11.0)
    assert split_layers(60, [h20, h20, h800], 16) == (11, 11, 38)


def test_every_answer_is_checked_with_plain_arithmetic() -> None:
    stages = [StageLoad(0.0, 1.0, 1.0, 3.0)] * 2
    check_layers(5, stages, (3, 2))
    with pytest.raises(PlannerError, match="every stage needs a whole number of layers, 1 or more"):
        check_layers(5, stages, (2.5, 2.5))  # type: ignore[arg-type]  # what a solver may give
    with pytest.raises(PlannerError, match=r"layers \[3, 1\] are 4 together, the model has 5"):
        check_layers(5, stages, (3, 1))
    with pytest.raises(PlannerError, match="stage 0 has 4 layers, and its memory takes 3"):
        check_layers(5, stages, (4, 1))
    check_micro_batches(4, (4, 0))
    with pytest.raises(PlannerError, match="every pipeline needs a whole number, 0 or more"):
        check_micro_batches(4, (5, -1))
    with pytest.raises(PlannerError, match=r"micro-batches \[2, 1\] are 3 together, a step has 4"):
        check_micro_batches(4, (2, 1))


def test_recomputed_layers_are_as_few_as_memory_asks_for() -> None:
    stage = StageLoad(1.0, 2.0, layer_bytes=10.0, room_bytes=60.0, again=3.0, again_bytes=2.0)
    assert [stage.recomputed(n) for n in (6, 7, 8)] == [0, 2, 3]
    assert stage.seconds(8) == 1.0 + 5 * 2.0 + 3 * 3.0
    assert stage.most(100) == 30

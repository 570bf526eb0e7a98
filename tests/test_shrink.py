"""The strategy for those who are left: nothing moves that need not, a step keeps its rows, nobody is forgotten."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from hetero_megatron.errors import StrategyError
from hetero_megatron.shrink import shrink
from hetero_megatron.strategy import Recompute, Stage, Strategy
from tests.distributed.training import T0, stage, strategy

FACTS = T0.facts
HET4 = strategy((3, 1, [stage("0-1", "0-2"), stage("2", "3")]), (1, 1, [stage("3", "0-3")]))


def test_who_has_all_ranks_keeps_the_strategy() -> None:
    assert shrink(HET4, FACTS, (0, 1, 2, 3)) == HET4


def test_a_stage_that_loses_a_rank_takes_the_widest_degree_that_fits() -> None:
    found = shrink(HET4, FACTS, (0, 2, 3))
    assert found.pipelines[0].stages == (stage("0", "0-2"), stage("2", "3"))
    wide = strategy((4, 1, [stage("0-3", "0-3")]))
    left = shrink(wide, FACTS, (0, 1, 3))
    assert left.pipelines[0].stages[0].ranks == (0, 1)
    assert left.idle_ranks == (3,)


def test_a_stage_without_ranks_gives_its_layers_to_its_neighbours() -> None:
    deep = strategy((4, 1, [stage("0", "0"), stage("1", "1-2"), stage("2", "3")]))
    found = shrink(deep, FACTS, (0, 2))
    assert found.pipelines[0].stages == (stage("0", "0-1"), stage("2", "2-3"))
    assert shrink(deep, FACTS, (2,)).pipelines[0].stages == (stage("2", "0-3"),)
    assert shrink(deep, FACTS, (0,)).pipelines[0].stages == (stage("0", "0-3"),)


def test_the_rows_of_a_lost_pipeline_go_to_the_others() -> None:
    found = shrink(HET4, FACTS, (0, 1, 2))
    assert [(p.micro_batches, p.micro_batch_size) for p in found.pipelines] == [(4, 1)]
    odd = strategy((2, 2, [stage("0", "0-3")]), (1, 1, [stage("1", "0-3")]))
    assert shrink(odd, FACTS, (0,)).rows_per_step == 5


def test_an_interleaved_schedule_becomes_a_plain_one() -> None:
    found = shrink(
        strategy((4, 1, [stage("0", "0,2"), stage("1", "1,3")]), schedule="interleaved"), FACTS, (1,)
    )
    assert found.schedule == "1f1b"
    assert found.pipelines[0].stages == (stage("1", "0-3"),)


def test_context_parallel_parts_become_one() -> None:
    found = shrink(strategy((4, 1, [stage("0-1", "0-1", cp=2), stage("2-3", "2-3", cp=2)])), FACTS, (0, 1, 3))
    assert [own.context_parallel_size for own in found.pipelines[0].stages] == [1, 1]
    assert [own.ranks for own in found.pipelines[0].stages] == [(0, 1), (3,)]


def test_what_is_recomputed_stays_so() -> None:
    own = replace(stage("0-1", "0-3"), recompute=(Recompute("full", (0, 1)),))
    found = shrink(strategy((4, 1, [own])), FACTS, (1,))
    assert found.pipelines[0].stages[0].recompute == (Recompute("full"),)


def test_without_any_rank_there_is_no_strategy() -> None:
    with pytest.raises(StrategyError, match=r"of the strategy's ranks 0-3 none is left; there are 7"):
        shrink(HET4, FACTS, (7,))


PLANS = (
    HET4,
    strategy((2, 2, [stage("0", "0"), stage("1-2", "1-2"), stage("3", "3")]), (3, 1, [stage("4", "0-3")])),
    strategy(
        (4, 1, [stage("0", "0,2"), stage("1", "1,3")]),
        (2, 1, [stage("2", "0,2"), stage("3", "1,3")]),
        schedule="interleaved",
    ),
    strategy((2, 1, [Stage((0, 1, 2), (0, 3), (2, 1))]), (2, 1, [stage("3-4", "0-3")])),
)


@given(plan=draw.sampled_from(PLANS), data=draw.data())
def test_whoever_is_left_the_strategy_holds_and_a_step_keeps_its_rows(
    plan: Strategy, data: draw.DataObject
) -> None:
    left = data.draw(draw.sets(draw.sampled_from(plan.ranks), min_size=1))
    found = shrink(plan, FACTS, left)
    found.check(FACTS, left)
    assert found.rows_per_step == plan.rows_per_step

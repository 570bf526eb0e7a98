"""The reduction keeps what makes a strategy itself: ranks, degrees, stages, and who has more than whom."""

from itertools import combinations

import pytest

from hetero_megatron.strategy import Pipeline, Strategy
from tests.paper.files import NAMES, written
from tests.paper.reduced import Reduced, reduce


def both(name: str) -> tuple[Strategy, Reduced]:
    recipe = written(name)
    return recipe.make_strategy(), reduce(recipe)


def first_layers(pipeline: Pipeline) -> list[int]:
    return [first for stage in pipeline.stages for first, _ in stage.chunks]


@pytest.mark.parametrize("name", NAMES)
def test_ranks_degrees_and_options_stay(name: str) -> None:
    whole, reduced = both(name)
    small = reduced.strategy
    for attribute in ("zero", "schedule", "sequence_parallel", "idle_ranks", "context_parallel"):
        assert getattr(small, attribute) == getattr(whole, attribute)
    assert len(small.pipelines) == len(whole.pipelines)
    for one, other in zip(small.pipelines, whole.pipelines, strict=True):
        assert [stage.parts for stage in one.stages] == [stage.parts for stage in other.stages]
        for a, b in zip(one.stages, other.stages, strict=True):
            kinds = {b.recompute_of(layer) for layer in b.layer_numbers}
            assert {a.recompute_of(layer) for layer in a.layer_numbers} == kinds


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_keeps_a_layer_and_every_pipeline_all_of_them(name: str) -> None:
    _, reduced = both(name)
    for pipeline in reduced.strategy.pipelines:
        assert all(stage.layer_numbers for stage in pipeline.stages)
        found = [layer for stage in pipeline.stages for layer in stage.layer_numbers]
        assert found == list(range(reduced.config.num_layers))
    assert reduced.config.num_layers <= 12


@pytest.mark.parametrize("name", NAMES)
def test_borders_are_equal_where_they_were_and_different_where_they_were(name: str) -> None:
    whole, reduced = both(name)
    old = [first for pipeline in whole.pipelines for first in first_layers(pipeline)]
    new = [first for pipeline in reduced.strategy.pipelines for first in first_layers(pipeline)]
    for (a, b), (c, d) in zip(combinations(old, 2), combinations(new, 2), strict=True):
        assert (a < b, a > b) == (c < d, c > d)


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_stay_unequal_in_the_same_order(name: str) -> None:
    whole, reduced = both(name)
    old = [pipeline.micro_batches for pipeline in whole.pipelines]
    new = [pipeline.micro_batches for pipeline in reduced.strategy.pipelines]
    for (a, b), (c, d) in zip(combinations(old, 2), combinations(new, 2), strict=True):
        assert (a < b, a > b) == (c < d, c > d)
    assert 1 <= min(new) <= max(new) <= 3
    assert sum(new) <= reduced.rows <= reduced.strategy.rows_per_step
    steps = reduced.steps(2)
    assert [len(step) for step in steps] == [reduced.rows] * 2
    assert all(8 <= len(document) <= 16 for step in steps for document in step)


def test_33_and_31_micro_batches_become_3_and_2_and_h800_stages_stay_the_deepest() -> None:
    c6 = reduce(written("c6")).strategy
    assert [pipeline.micro_batches for pipeline in c6.pipelines] == [3, 2]
    depths = [[len(stage.layer_numbers) for stage in pipeline.stages] for pipeline in c6.pipelines]
    assert depths == [[1, 1, 1, 2, 3], [1, 1, 1, 3, 1, 1]]


def test_the_70b_model_keeps_fewer_kv_heads_than_heads() -> None:
    config = reduce(written("table9_70b_16h800_16h20")).config
    assert (config.num_attention_heads, config.num_query_groups) == (16, 8)


def test_ulysses_gets_a_head_for_every_rank_that_shares_a_sequence() -> None:
    assert reduce(written("deepspeed_table13_32k")).config.num_attention_heads == 8

"""Which program an elastic run goes on with."""

import pytest

from hetero_megatron.graph.trace import trace
from hetero_megatron.models.llama import Llama
from hetero_megatron.next_program import NextProgram
from hetero_megatron.recipe import load_recipe


@pytest.fixture(scope="module")
def recipe():
    return load_recipe(
        "recipes/paper/c1.yaml", ["elastic.plans=[recipes/paper/c2.yaml, recipes/paper/c3.yaml]"]
    )


@pytest.fixture(scope="module")
def following(recipe):
    config = recipe.make_config()
    return NextProgram(recipe, config, trace(Llama(config)))


@pytest.mark.parametrize(("count", "name"), [(32, "c1"), (31, "c2"), (24, "c3")])
def test_a_prepared_plan_takes_over_when_exactly_its_ranks_are_there(following, count, name):
    expected = load_recipe(f"recipes/paper/{name}.yaml").make_strategy().pipelines
    assert following.strategy(None, tuple(range(count)))[0].pipelines == expected


def test_other_ranks_take_the_written_strategy_without_those_that_are_gone(following):
    found, told = following.strategy(None, tuple(rank for rank in range(32) if rank != 5))
    assert set(found.ranks) <= set(range(32)) - {5}
    assert len(found.pipelines) >= 2
    assert told.startswith("planned: ")


def test_the_program_knows_only_the_devices_that_are_there(recipe, following):
    program = following.program(following.strategy(None, tuple(range(31)))[0], tuple(range(31)))
    assert program.cluster.ranks == tuple(range(31))

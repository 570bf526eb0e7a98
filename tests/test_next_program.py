"""Which program an elastic run goes on with."""

import pytest
import torch

from hetero_megatron.graph.trace import trace
from hetero_megatron.models.llama import Llama
from hetero_megatron.next_program import NextProgram
from hetero_megatron.recipe import load_recipe
from hetero_megatron.shrink import shrink


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


def test_other_ranks_take_what_the_planner_makes_of_them(following):
    found, told = following.strategy(None, tuple(rank for rank in range(32) if rank != 5))
    assert set(found.ranks) <= set(range(32)) - {5}
    assert len(found.pipelines) >= 2
    assert told.startswith("planned: ")


def test_the_program_knows_only_the_devices_that_are_there(recipe, following):
    program = following.program(following.strategy(None, tuple(range(31)))[0], tuple(range(31)))
    assert program.cluster.ranks == tuple(range(31))


@pytest.fixture(scope="module")
def small():
    """Four CPU ranks: one pipeline of two stages, one of one rank."""
    return load_recipe("recipes/quickstart.yaml")


def made(recipe):
    config = recipe.make_config()
    return NextProgram(recipe, config, trace(Llama(config)))


def test_the_planner_keeps_the_batch_and_what_the_strategy_has_decided_for_good(small):
    following = made(small)
    base = following.program(small.make_strategy(), (0, 1, 2, 3))
    for lost in range(4):
        ranks = tuple(rank for rank in range(4) if rank != lost)
        found, told = following.strategy(base, ranks)
        assert told.startswith("planned: ")
        assert set(found.ranks) | set(found.idle_ranks) == set(ranks)
        assert found.rows_per_step == small.training.global_batch_size
        assert found.sequence_parallel == small.make_strategy().sequence_parallel
        assert found == following.strategy(base, ranks)[0], "whoever plans finds the same"
        following.program(found, ranks)


def test_a_second_loss_is_planned_from_where_the_first_has_led(small):
    following = made(small)
    base = following.program(small.make_strategy(), (0, 1, 2, 3))
    first, _ = following.strategy(base, (0, 1, 2))
    second, told = following.strategy(following.program(first, (0, 1, 2)), (1,))
    assert second.ranks == (1,)
    assert told.startswith("planned: ")


def test_lost_layers_do_not_keep_the_planner_from_planning(small):
    """They come from copies or a checkpoint."""
    following = made(small)
    base = following.program(small.make_strategy(), (0, 1, 2, 3))
    found, told = following.strategy(base, (0, 1))
    assert told.startswith("planned: ")
    assert found.ranks == (0, 1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("elastic.replan=keep", "the strategy without the lost ranks (elastic.replan is keep)"),
        # What a CPU rank is taken to have is less than what these weights need.
        ("model.vocab_size=60000000", "the strategy without the lost ranks (no plan fits: "),
    ],
)
def test_without_a_plan_the_strategy_is_kept_and_the_reason_told(change, told):
    recipe = load_recipe("recipes/quickstart.yaml", [change])
    with torch.device("meta"):
        model = Llama(recipe.make_config())
    following = NextProgram(recipe, recipe.make_config(), trace(model))
    found, said = following.strategy(None, (1, 2, 3))
    assert said.startswith(told), said
    assert found == shrink(recipe.make_strategy(), recipe.make_config().facts, (1, 2, 3))


def test_a_defect_of_the_planner_ends_no_run(small, monkeypatch):
    following = made(small)

    def broken(*_, **__):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("hetero_megatron.next_program.replan", broken)
    found, told = following.strategy(None, (1, 2, 3))
    assert told == "the strategy without the lost ranks (ZeroDivisionError: division by zero)"
    assert found == shrink(small.make_strategy(), small.make_config().facts, (1, 2, 3))

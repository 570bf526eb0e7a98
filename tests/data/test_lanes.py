"""What dispatch knows of a strategy's pipelines."""

from dataclasses import replace
from pathlib import Path

import pytest

from hetero_megatron.data.lanes import Lane, lanes_of
from hetero_megatron.errors import RecipeError, StrategyError
from hetero_megatron.memory import tokens_of
from hetero_megatron.models.llama import Llama
from hetero_megatron.recipe import load_recipe
from tests.distributed.training import T0, build, het4


def test_a_pipeline_takes_work_by_what_its_micro_batches_hold() -> None:
    plan = het4((3, 2), (2, 1))
    assert lanes_of(build(Llama(T0), plan), 16) == (Lane(3, 32, 6.0, 2), Lane(2, 16, 2.0, 1))
    short = replace(plan.pipelines[0], max_tokens=9)
    program = build(Llama(T0), replace(plan, pipelines=(short, plan.pipelines[1])))
    assert lanes_of(program, 16) == (Lane(3, 10, 27 / 16, 2), Lane(2, 16, 2.0, 1))
    assert [tokens_of(program, rank, 16) for rank in (0, 2, 3)] == [10, 10, 16]


def test_a_micro_batch_holds_at_least_a_token() -> None:
    plan = het4()
    with pytest.raises(
        StrategyError, match="pipeline 0: max_tokens is 0; a micro-batch holds 1 token or more"
    ):
        build(
            Llama(T0), replace(plan, pipelines=(replace(plan.pipelines[0], max_tokens=0), plan.pipelines[1]))
        )


DOCUMENTS = """
model: {preset: llama_tiny, num_layers: 4}
strategy:
  pipelines:
  - {micro_batches: 3, stages: [{ranks: 0-1, layers: 0-2}, {ranks: 2, layers: 3}]}
  - {micro_batches: 1, stages: [{ranks: 3, layers: 0-3}]}
data: {packing: documents}
training: {train_iters: 50, global_batch_size: 4, seq_length: 2048, lr: 3e-3}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "documents.yaml").write_text(DOCUMENTS)
    return tmp_path / "documents.yaml"


def test_whole_rows_are_refused_where_a_micro_batch_holds_fewer_tokens(recipe: Path) -> None:
    change = "strategy.pipelines.0.max_tokens=512"
    assert load_recipe(recipe, [change]).make_strategy().pipelines[0].tokens(2048) == 512
    with pytest.raises(
        RecipeError,
        match=r"pipelines\[0\]\.max_tokens: 512 is less than micro_batch_size 1 x seq_length 2048 = 2048",
    ):
        load_recipe(recipe, [change, "data.packing=rows"])


def test_held_out_rows_are_refused_alike_and_by_their_own_section(recipe: Path) -> None:
    change = "strategy.pipelines.0.max_tokens=512"
    with pytest.raises(
        RecipeError, match=r"and evaluation\.data\.packing rows makes whole rows; use packing"
    ):
        load_recipe(recipe, [change, "evaluation={data: {}}"])

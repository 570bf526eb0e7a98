"""A strategy survives the way into a recipe and back."""

from pathlib import Path

import pytest

from hetero_megatron.recipe import load_recipe
from hetero_megatron.strategy import Pipeline, Recompute, Stage, Strategy
from hetero_megatron.strategy_yaml import spans, strategy_yaml

HEAD = "model: {preset: llama_tiny, num_layers: 8}\ncluster: {h20: {nodes: 2}}\n"
TAIL = "training: {train_iters: 1, global_batch_size: 8, seq_length: 64, lr: 0.1}\n"
ALL = tuple(range(16))


def idle(*used: int) -> tuple[int, ...]:
    return tuple(rank for rank in ALL if rank not in used)


STRATEGIES = {
    "uneven": Strategy(
        (
            Pipeline(3, 2, (Stage((0, 1), (0, 4), 2), Stage((2,), (5, 7), 1))),
            Pipeline(2, 1, (Stage((4, 3), (0, 7), 2, recompute=(Recompute("full", (0, 2)),)),)),
        ),
        zero=1,
        idle_ranks=idle(0, 1, 2, 3, 4),
    ),
    "context": Strategy(
        (Pipeline(4, 2, (Stage((0, 1, 2, 3), (0, 7), 2, 2, (Recompute("selective"),), True),)),),
        context_parallel="ulysses",
        idle_ranks=idle(0, 1, 2, 3),
    ),
    "gpipe": Strategy(
        (Pipeline(8, 1, (Stage((0,), (0, 3), 1), Stage((1,), (4, 7), 1))),),
        schedule="gpipe",
        sequence_parallel=False,
        offload_optimizer=True,
        idle_ranks=idle(0, 1),
    ),
    "parts of different degree": Strategy(
        (Pipeline(8, 1, (Stage((0, 1, 2), (0, 7), (2, 1), 2),)),), idle_ranks=idle(0, 1, 2)
    ),
    "interleaved": Strategy(
        (Pipeline(8, 1, (Stage((0,), ((0, 1), (4, 5)), 1), Stage((1,), ((2, 3), (6, 7)), 1))),),
        schedule="interleaved",
        idle_ranks=idle(0, 1),
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(HEAD + strategy_yaml(STRATEGIES[name], "two\nlines") + TAIL, encoding="utf-8")
    assert "# two\n# lines\n" in path.read_text(encoding="utf-8")
    assert load_recipe(path).make_strategy() == STRATEGIES[name]


def test_numbers_are_written_as_spans_in_their_order() -> None:
    assert spans((0, 1, 2)) == "0-2"
    assert spans((5,)) == 5
    assert spans((4, 0, 1)) == [4, "0-1"]

"""The recipes of `recipes/paper` say what the paper's tables print (Tables 6, 8-16)."""

import re
from collections import Counter

import pytest

from hetero_megatron.strategy import Strategy
from tests.paper.files import FOLDER, NAMES, ready, written
from tests.paper.tables import COUNTS_NOT_PRINTED, DEEPSPEED, IDLE, INTERVALS, MEGATRON, PRINTED, Degrees

ALL_DEGREES = {**MEGATRON, **DEEPSPEED, **INTERVALS}
TOKENS_PER_STEP = 200_000
# Micro-batches and tokens of a row; the counts are ours, because the paper prints none.
MIXED_LENGTH = {
    "table15_a": ([2, 1, 1, 1, 1], 32768),
    "table15_b": ([3, 3, 3, 3], 16384),
    "table16_a": ([3, 3, 3, 3], 16384),
    "table16_b": ([12, 12, 12, 12], 4096),
}


def spelled(strategy: Strategy, counts: bool) -> tuple[tuple[str, str], ...]:
    """Pipelines as Table 9 prints them."""
    found = []
    for pipeline in strategy.pipelines:
        cells = []
        for stage in pipeline.stages:
            first, last = stage.ranks[0], stage.ranks[-1]
            assert stage.ranks == tuple(range(first, last + 1))
            ranks = f"R{first}-{last}" if last > first else f"R{first}"
            assert stage.tensor_parallel_sizes == (len(stage.ranks),), "a cell is a tensor-parallel group"
            cells.append(f"{ranks}:L{stage.layer_numbers[0]}-{stage.layer_numbers[-1]}")
        head = f"{pipeline.micro_batches} x bs{pipeline.micro_batch_size}" if counts else COUNTS_NOT_PRINTED
        found.append((head, " ".join(cells)))
    return tuple(found)


def working(name: str) -> str:
    """`16 H800, 24 H20`: the devices that a recipe puts to work."""
    recipe = written(name)
    cluster = recipe.make_cluster()
    kinds = Counter(cluster.kind(rank).name.upper() for rank in recipe.make_strategy().ranks)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), reverse=True))


def test_there_is_a_recipe_for_every_strategy_that_the_paper_prints_and_no_other() -> None:
    assert set(NAMES) == {*PRINTED, *ALL_DEGREES}


@pytest.mark.parametrize("name", PRINTED)
def test_pipelines_are_those_of_the_table(name: str) -> None:
    recipe, printed = written(name), PRINTED[name]
    strategy = recipe.make_strategy()
    counts = name not in MIXED_LENGTH
    assert spelled(strategy, counts) == printed.pipelines
    assert (recipe.model.preset, strategy.zero) == (printed.model, printed.zero)
    assert strategy.schedule == "1f1b"
    assert working(name) == printed.devices
    assert strategy.idle_ranks == IDLE.get(name, ())


@pytest.mark.parametrize("name", ALL_DEGREES)
def test_homogeneous_strategies_have_the_degrees_of_the_table(name: str) -> None:
    recipe, row = written(name), ALL_DEGREES[name]
    strategy = recipe.make_strategy()
    cp = row.degree("CP") * row.degree("SP")
    assert len(strategy.pipelines) == row.degree("DP")
    for pipeline in strategy.pipelines:
        assert pipeline.micro_batch_size == row.micro_batch_size
        assert len(pipeline.stages) == row.degree("PP")
        for stage in pipeline.stages:
            assert stage.tensor_parallel_sizes == (row.degree("TP"),) * cp
            assert len(stage.ranks) == row.degree("TP") * cp
    assert strategy.ranks == tuple(range(len(recipe.make_cluster().devices))), "all devices, from rank 0 on"
    assert strategy.idle_ranks == ()
    assert strategy.zero == 1
    assert working(name) == row.devices
    assert recipe.model.preset == row.model
    check_batch(name, row)


def check_batch(name: str, row: Degrees) -> None:
    training, strategy = written(name).training, written(name).make_strategy()
    assert (training.global_batch_size, training.seq_length) == (row.sequences, row.seq_length)
    counts = [pipeline.micro_batches for pipeline in strategy.pipelines]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) <= row.sequences <= strategy.rows_per_step
    if strategy.rows_per_step > row.sequences:
        assert row.sequences % (len(counts) * row.micro_batch_size), "only where rows do not divide"


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_rows_share_heads_and_recompute_all_layers(name: str) -> None:
    strategy = written(name).make_strategy()
    assert strategy.context_parallel == "ulysses"
    assert "AC" in DEEPSPEED[name].text
    for pipeline in strategy.pipelines:
        for stage in pipeline.stages:
            assert {stage.recompute_of(layer) for layer in stage.layer_numbers} == {"full"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in DEEPSPEED])
def test_only_deepspeed_rows_recompute(name: str) -> None:
    strategy = written(name).make_strategy()
    assert strategy.context_parallel == "ring"
    assert not any(stage.recompute for pipeline in strategy.pipelines for stage in pipeline.stages)


@pytest.mark.parametrize("name", MIXED_LENGTH)
def test_a_step_of_mixed_lengths_has_about_200_000_tokens(name: str) -> None:
    recipe = written(name)
    counts, seq_length = MIXED_LENGTH[name]
    assert [pipeline.micro_batches for pipeline in recipe.make_strategy().pipelines] == counts
    assert recipe.training.seq_length == seq_length
    assert recipe.training.global_batch_size == sum(counts)
    tokens = sum(counts) * seq_length
    assert TOKENS_PER_STEP - seq_length < tokens <= TOKENS_PER_STEP, "one more row would be too many"


@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_table_6(name: str) -> None:
    recipe = written(name)
    t = recipe.training
    assert (t.precision, t.optimizer, t.lr, t.lr_decay_style, t.lr_warmup_iters) == (
        "bf16",
        "adam",
        1e-4,
        "constant",
        0,
    )
    assert (t.weight_decay, t.adam_beta1, t.adam_beta2, t.adam_eps, t.clip_grad) == (
        0,
        0.9,
        0.999,
        1e-8,
        None,
    )
    if not re.search("table1[3456]", name):
        assert (t.global_batch_size, t.seq_length) == (64, 4096)


@pytest.mark.parametrize("name", NAMES)
def test_model_sizes_are_those_of_table_6(name: str) -> None:
    config = written(name).make_config()
    found = (
        config.num_layers,
        config.hidden_size,
        config.ffn_hidden_size,
        config.num_attention_heads,
        config.num_query_groups,
        config.vocab_size,
    )
    # The paper gives the 70B model's depth; its other sizes are those of Llama 2 70B.
    wanted = {
        "llama_32b": (60, 6656, 17920, 64, 64, 50304),
        "llama_70b": (80, 8192, 28672, 64, 8, 32000),
    }
    assert found == wanted[written(name).model.preset]


@pytest.mark.parametrize("name", NAMES)
def test_the_mixed_cluster_is_table_7s(name: str) -> None:
    cluster = written(name).make_cluster()
    kinds = [cluster.kind(rank).name for rank in cluster.ranks]
    assert kinds == sorted(kinds, reverse=True), "H800 before H20"
    assert len(cluster.ranks) % 8 == 0
    assert kinds.count("h800") <= 16
    assert kinds.count("h20") <= 32


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_loads(name: str) -> None:
    strategy = ready(name).make_strategy()
    assert strategy.ranks


@pytest.mark.parametrize("name", NAMES)
def test_the_file_says_which_table_it_is_and_writes_to_its_own_folder(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    table = re.search(r"table(\d+)", name)
    assert text.startswith("# Paper Table " + (table[1] if table else "1"))
    assert written(name).output.folder == f"runs/{name}"

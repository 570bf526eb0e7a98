"""Which runs of nodes are computed again."""

from collections.abc import Callable

import pytest

from hetero_megatron.graph.nodes import Node
from hetero_megatron.models.llama import Llama
from hetero_megatron.recompute import external_values, recomputed_runs
from tests.distributed.training import T0, build, stage, strategy


def nodes(rank: int = 1) -> tuple[Node, ...]:
    """Layers 2 and 3 and the head, on the second of two stages."""
    program = build(Llama(T0), strategy((1, 1, [stage("0", "0-1"), stage("1", "2-3")])))
    (chunk,) = program.executable(rank).chunks
    return chunk.nodes


def runs(recompute_of: Callable[[int], str], rank: int = 1) -> list[tuple[str, str, tuple[str, ...]]]:
    """First and last node, and what enters, of each run."""
    own = nodes(rank)
    return [
        (own[run.first].name, own[run.end - 1].name, external_values(own, run))
        for run in recomputed_runs(own, recompute_of)
    ]


def test_a_full_run_is_a_layer_behind_its_entry_and_keeps_the_residual_stream() -> None:
    first, second = runs(lambda layer: "full")
    assert first == ("layers.2.attention_norm", "add_5", ("layers.2.entry", "segments"))
    assert second == ("layers.3.attention_norm", "add_7", ("layers.3.entry", "segments"))
    assert [name for name, _, _ in runs(lambda layer: "full", rank=0)] == [
        "layers.0.attention_norm",
        "layers.1.attention_norm",
    ]


def test_selective_runs_are_the_core_attention_and_the_gate_with_the_products_behind_them() -> None:
    found = runs(lambda layer: "selective" if layer == 2 else "none")
    assert found == [
        (
            "layers.2.rope",
            "layers.2.wo",
            ("layers.2.wq", "segments", "layers.2.wk", "layers.2.wv"),
        ),
        ("layers.2.swiglu", "layers.2.down", ("layers.2.gate", "layers.2.up")),
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_computed_again_unless_it_is_asked_for(rank: int) -> None:
    assert runs(lambda layer: "none", rank) == []


def test_layers_may_differ() -> None:
    found = runs(lambda layer: {2: "full", 3: "selective"}[layer])
    assert [first for first, _, _ in found] == ["layers.2.attention_norm", "layers.3.rope", "layers.3.swiglu"]

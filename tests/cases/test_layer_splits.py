"""How layers are split into stages: none is lost, edge stages may hold none, and names keep global numbers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hetero_megatron.errors import StrategyError
from hetero_megatron.models.llama import Llama
from hetero_megatron.runtime.world import World
from tests.cases.stages import one_rank_stages
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    ADAM,
    T0,
    assert_parity,
    build,
    reference,
    sequences,
    stage,
    start,
    strategy,
    train,
)

D0 = sequences(24)
STEPS = [D0[0:6], D0[6:12], D0[12:18]]


# Layers lost when they do not divide by the stages (O-01).


def test_seven_layers_on_three_stages_are_all_trained() -> None:
    seven = replace(T0, num_layers=7)
    plan = strategy((3, 2, one_rank_stages("0-2", "3-4", "5-6")))
    assert [layer for each in plan.pipelines[0].stages for layer in each.layer_numbers] == list(range(7))
    found = train(plan, STEPS, seven)
    assert sum(tensors["parameter"].numel() for tensors in found.tensors.values()) == 71_136
    assert_parity(found, reference(STEPS, seven))


# A stage without layers (O-04).

EDGES = {
    "embedding alone and head alone": one_rank_stages("", "0-3", ""),
    "embedding alone": one_rank_stages("", "0-1", "2-3"),
    "head alone": one_rank_stages("0-1", "2-3", ""),
}


@pytest.mark.parametrize("name", EDGES)
def test_a_first_or_last_stage_may_hold_no_layer(name: str) -> None:
    plan = strategy((3, 2, EDGES[name]))
    assert None in [each.layers for each in plan.pipelines[0].stages]
    assert_parity(train(plan, STEPS), reference(STEPS))


def test_an_edge_stage_without_layers_may_have_another_degree() -> None:
    plan = strategy((3, 2, [stage("0-1", None), stage("2", "0-3"), stage("3-4", None)]))
    assert_parity(train(plan, STEPS), reference(STEPS))


def test_an_empty_stage_between_others_is_refused_before_any_process() -> None:
    plan = strategy((3, 2, one_rank_stages("0-1", "", "2-3")))
    with pytest.raises(StrategyError, match="pipeline 0 stage 1 is an empty stage between others"):
        build(Llama(T0), plan)


# Local layer numbers leak into exported names (O-05).


def test_the_weights_of_a_layer_carry_its_global_number() -> None:
    model = Llama(T0)
    program = build(model, strategy((1, 1, [stage("0", "0"), stage("1-2", "1-2"), stage("3", "3")])))

    def work(world: World) -> dict[str, Tensor]:
        session = start(model, program, world, ADAM, torch.float32, 7)
        with torch.no_grad():
            for number, layer in enumerate(model.layers):
                for norm in (layer.attention_norm, layer.mlp_norm):
                    norm.weight.fill_(number + 1)  # on the meta device where the layer is another rank's
        return {name: kinds["parameter"] for name, kinds in session.shards().items() if "_norm." in name}

    found = run_ranks(range(4), work, 30)
    norms = ("attention_norm", "mlp_norm")
    named = {f"layers.{layer}.{norm}.weight": layer + 1.0 for layer in range(4) for norm in norms}
    seen: dict[str, list[int]] = {}
    for rank, weights in found.items():
        for name, weight in weights.items():
            seen.setdefault(name, []).append(rank)
            if name != "final_norm.weight":
                assert weight.tolist() == [named[name]] * 32, f"{name} on rank {rank}"
    assert seen.keys() == {*named, "final_norm.weight"}
    assert {name: ranks for name, ranks in seen.items() if "attention" in name} == {
        "layers.0.attention_norm.weight": [0],
        "layers.1.attention_norm.weight": [1, 2],
        "layers.2.attention_norm.weight": [1, 2],
        "layers.3.attention_norm.weight": [3],
    }

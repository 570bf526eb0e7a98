"""Models of Hugging Face transformers, loaded slice by slice, train under a strategy as transformers trains them.

All models share the processes of one layout: starting ranks is what takes time.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hetero_megatron.data.dispatch import deal
from hetero_megatron.models.hf_config import read_hf_config
from hetero_megatron.models.hf_names import hf_name
from hetero_megatron.models.hf_weights import HfWeights, hf_initial
from hetero_megatron.models.llama import Llama
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.world import World
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    Outcome,
    assemble,
    assert_parity,
    build,
    micro_batch,
    sequences,
    stage,
    strategy,
)
from tests.models import hf_models

SGD = OptimizerSettings(name="sgd", lr=0.1, train_iters=100)
STEPS = [sequences(12)[at : at + 4] for at in (0, 4, 8)]
LAYOUTS = {
    "one rank": strategy((2, 2, [stage("0", "0-1")])),
    "TP2": strategy((2, 2, [stage("0-1", "0-1")])),
    "TP4": strategy((2, 2, [stage("0-3", "0-1")])),
    "HET4": strategy((3, 1, [stage("0-1", "0"), stage("2", "1")]), (1, 1, [stage("3", "0-1")]), zero=1),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    return {
        name: hf_models.save(name, root / str(number), max_shard_size="30KB")
        for number, name in enumerate(hf_models.MODELS)
    }


@pytest.fixture(scope="module")
def wanted() -> Mapping[str, Outcome]:
    return {name: trained_by_transformers(name) for name in hf_models.MODELS}


def trained_by_transformers(name: str) -> Outcome:
    """Three steps of SGD on the mean loss of all targets."""
    model = hf_models.build(name)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=SGD.lr)
    outcome = Outcome()
    for documents in STEPS:
        optimizer.zero_grad()
        ids = torch.tensor(documents)
        loss = F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        gradients = {key: p.grad.clone() for key, p in parameters.items()}
        outcome.losses.append(loss.item())
        outcome.norms.append(torch.cat([g.flatten() for g in gradients.values()]).double().norm().item())
        optimizer.step()
    outcome.tensors = {
        key: {"parameter": p.detach().clone(), "gradient": gradients[key]} for key, p in parameters.items()
    }
    return outcome


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_from_the_files_are_those_of_transformers(
    layout: str, folders: Mapping[str, Path], wanted: Mapping[str, Outcome]
) -> None:
    plan = LAYOUTS[layout]
    configs = {name: read_hf_config(folder) for name, folder in folders.items()}
    models = {name: Llama(config) for name, config in configs.items()}
    programs = {name: build(model, plan) for name, model in models.items()}
    initials = {name: hf_initial(HfWeights.open(folder, configs[name])) for name, folder in folders.items()}

    def work(world: World) -> Any:
        return {name: one(world, name) for name in folders}

    def one(world: World, name: str) -> Any:
        program = programs[name]
        modules = dict(models[name].named_modules())
        session = Session(program, world, modules, initials[name], SGD)
        gradients: dict[str, torch.Tensor] = {}
        session.gradient_hook = lambda slot, gradient, divisor: gradients.update(
            {slot.name: gradient / divisor}
        )
        number, _ = program.pipeline_of(world.rank)
        shares = [(p.micro_batches, p.micro_batch_size) for p in plan.pipelines]
        results = []
        for documents in STEPS:
            rows = deal(len(documents), shares)[number]
            multiple = program.token_multiple(number)
            results.append(session.step([micro_batch([documents[r] for r in row], multiple) for row in rows]))
        shards = session.shards()
        for key, gradient in gradients.items():
            shards[key]["gradient"] = gradient
        return [(result.loss, result.grad_norm) for result in results], shards

    found = run_ranks(plan.ranks, work)
    for name, program in programs.items():
        ranks = {rank: each[name] for rank, each in found.items()}
        steps = ranks[0][0]
        assert all(each == steps for each, _ in ranks.values()), f"{name}: ranks report different losses"
        tensors = assemble(program, {rank: shards for rank, (_, shards) in ranks.items()})
        outcome = Outcome([loss for loss, _ in steps], [norm for _, norm in steps])
        outcome.tensors = {hf_name(key): each for key, each in tensors.items()}
        assert_parity(outcome, wanted[name])

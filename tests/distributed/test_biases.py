"""Biases of every product: split with the outputs, or added once behind the sum (case O-76)."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import build_single_device
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.strategy import Strategy
from tests.distributed.training import T0, assert_parity, het4, reference, sequences, stage, strategy, train

BIASED = replace(T0, qkv_bias=True, attention_out_bias=True, mlp_bias=True)
STEPS = [sequences(24)[at : at + 4] for at in (0, 4, 8)]
SGD = OptimizerSettings(name="sgd", lr=0.1, weight_decay=0.1, train_iters=100)

LAYOUTS: dict[str, tuple[LlamaConfig, Strategy]] = {
    "TP2, odd widths": (replace(BIASED, ffn_hidden_size=63), strategy((2, 2, [stage("0-1", "0-3")]))),
    "two kv heads on four ranks, no sequence parallelism": (
        replace(T0, qkv_bias=True),
        strategy((2, 2, [stage("0-3", "0-3")]), sequence_parallel=False),
    ),
    "HET4": (BIASED, het4()),
    "HET4 with ZeRO-1": (BIASED, het4(zero=1)),
}


def with_biases(config: LlamaConfig) -> dict[str, Tensor]:
    """First values with biases that are not zero."""
    generator = torch.Generator().manual_seed(3)
    model = build_single_device(config, 7)
    return {
        name: 0.3 * torch.randn(p.shape, generator=generator) if name.endswith("bias") else p.detach()
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_three_steps_with_biases_equal_one_device(name: str) -> None:
    config, plan = LAYOUTS[name]
    weights = with_biases(config)
    found = train(plan, STEPS, config, SGD, weights=weights)
    assert "layers.3.wk_bias.bias" in found.tensors
    assert_parity(found, reference(STEPS, config, SGD, weights=weights))

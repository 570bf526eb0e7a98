"""What weight decay touches, in every layout (Megatron's rule: all but one-dimensional parameters)."""

import torch
from torch import Tensor

from hetero_megatron.models.llama import build_single_device
from hetero_megatron.runtime.optimizer import OptimizerSettings
from hetero_megatron.runtime.session import Session
from hetero_megatron.runtime.state import ParameterSlot
from tests.distributed.training import T0, alter_gradients, het4, sequences, train


def test_matrices_and_the_embedding_are_decayed_and_norms_are_not() -> None:
    settings = OptimizerSettings(name="sgd", lr=0.5, weight_decay=0.1)

    def clear(slot: ParameterSlot, gradient: Tensor, divisor: float) -> None:
        gradient.zero_()

    def without_gradient(session: Session) -> None:
        alter_gradients(session, clear)

    found = train(het4(), [sequences(4)], settings=settings, prepare=without_gradient)
    before = dict(build_single_device(T0, 7).named_parameters())
    assert found.tensors.keys() == before.keys()
    spared = {name for name in before if "norm" in name}
    assert {name for name, parameter in before.items() if parameter.dim() == 1} == spared
    assert "embedding.weight" not in spared
    for name, parameter in before.items():
        wanted = parameter.detach() * (1.0 if name in spared else 1 - 0.5 * 0.1)
        torch.testing.assert_close(
            found.tensors[name]["parameter"], wanted, msg=lambda m, n=name: f"{n}: {m}"
        )

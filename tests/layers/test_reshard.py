"""A Reshard does nothing until a Session gives it an exchange."""

import torch

from hetero_megatron.layers import Reshard


def test_an_unbound_reshard_returns_its_argument_itself() -> None:
    x = torch.ones(2)
    assert Reshard()(x) is x


def test_a_bound_reshard_calls_its_exchange() -> None:
    reshard = Reshard()
    reshard.exchange = lambda x: x * 3
    assert reshard.is_reshard
    assert torch.equal(reshard(torch.ones(2)), torch.full((2,), 3.0))

"""SwiGLU against the formula."""

import torch

from hetero_megatron.layers import SwiGLU


def test_swiglu_is_gate_times_sigmoid_times_up() -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(5, 8), torch.randn(5, 8)
    torch.testing.assert_close(SwiGLU()(gate, up), gate * torch.sigmoid(gate) * up)
    assert SwiGLU().initial() == {}

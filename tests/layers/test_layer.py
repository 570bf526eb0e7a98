"""A layer is whole until it is bound."""

from hetero_megatron.layers import RMSNorm, SwiGLU
from hetero_megatron.runtime.binding import Binding


def test_bind_stores_the_binding_of_one_layer_only() -> None:
    bound, other = RMSNorm(8, 1e-5), RMSNorm(8, 1e-5)
    binding = Binding("final_norm", {"weight": ((0, 8),)}, {"weight": (8,)})
    bound.bind(binding)
    assert bound.binding is binding
    assert other.binding is None
    assert SwiGLU().binding is None

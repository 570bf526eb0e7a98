"""What every leaf of a model declares: its factor signature, its first values, its place (paper §5.2)."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from hetero_megatron.graph.signature import Signature
from hetero_megatron.layers.initial import Initial
from hetero_megatron.runtime.binding import Binding


class Layer(nn.Module):
    """A leaf of the traced model: real single-device mathematics that reads local sizes off its tensors.

    Attributes:
        signature: how a split of an operand or parameter passes to the result.
        binding: the layer's place in a strategy; None in one process, where everything is whole.
    """

    signature: ClassVar[Signature]
    binding: Binding | None = None

    def bind(self, binding: Binding) -> None:
        """Learn the local part; called once, after local shards have replaced the parameters."""
        self.binding = binding

    def kernel(self, op: str, own: Callable[..., Any]) -> Callable[..., Any]:
        """The kernel that the run has chosen for `op`; `own`, of plain torch, where nothing was chosen."""
        return own if self.binding is None else self.binding.kernels.get(op, own)

    def initial(self) -> dict[str, Initial]:
        """How each parameter starts."""
        return {}

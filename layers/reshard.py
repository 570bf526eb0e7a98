"""The place in a model where an activation changes its layout (paper §4)."""

from collections.abc import Callable

from torch import Tensor, nn


class Reshard(nn.Module):
    """Identity in one process; under a strategy, the communication between two annotations.

    Attributes:
        exchange: what the Session puts in: forward and gradient communication as one differentiable function.
    """

    is_reshard = True
    exchange: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """`x` in the destination layout."""
        return x if self.exchange is None else self.exchange(x)

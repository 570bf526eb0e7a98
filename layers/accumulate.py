"""Where a layer may add the gradient of a parameter itself, without a temporary of the parameter's size."""

from collections.abc import Callable

from torch import Tensor

Later = Callable[[Callable[[], object]], None]
"""Takes what is to be done by the end of the backward pass."""


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The buffer that autograd would add to; None where autograd must do it.

    That is where there is no buffer yet, and where someone waits for the gradient: hooks run for what autograd adds.
    """
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        return None
    return parameter.grad

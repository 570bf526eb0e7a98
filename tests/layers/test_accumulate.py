"""A bound layer adds its weight's gradient to the buffer that is there, now or later, unless someone waits for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetero_megatron.layers import Embedding, Linear
from hetero_megatron.layers.accumulate import gradient_of
from hetero_megatron.layers.layer import Layer
from hetero_megatron.runtime.binding import Binding

TASKS = list[Callable[[], object]]


def bound(layer: Layer, weight: Tensor, tasks: TASKS | None) -> nn.Parameter:
    parameter = nn.Parameter(weight.clone())
    layer.weight = parameter
    bounds = {"weight": tuple((0, size) for size in weight.shape)}
    later = tasks.append if tasks is not None else None
    layer.bind(Binding("layer", bounds, {"weight": tuple(weight.shape)}, later=later))
    return parameter


def case(kind: str) -> tuple[Layer, Tensor, Tensor]:
    torch.manual_seed(0)
    if kind == "linear":
        return Linear(6, 4, 0.1), torch.randn(4, 6), torch.randn(5, 6)
    return Embedding(7, 3, 0.1), torch.randn(7, 3), torch.tensor([1, 4, 1, 6])


def expected(kind: str, weight: Tensor, x: Tensor) -> Tensor:
    parameter = nn.Parameter(weight.clone())
    y = nn.functional.linear(x, parameter) if kind == "linear" else nn.functional.embedding(x, parameter)
    (y**2).sum().backward()
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_gradients_of_several_backward_passes_add_up_in_the_buffer(kind: str) -> None:
    layer, weight, x = case(kind)
    parameter = bound(layer, weight, None)
    buffer = parameter.grad = torch.ones_like(weight)
    for _ in range(2):
        (layer(x) ** 2).sum().backward()
    assert parameter.grad is buffer
    torch.testing.assert_close(buffer, 1.0 + 2 * expected(kind, weight, x))


@pytest.mark.parametrize("kind", ["linear", "embedding"])
@pytest.mark.parametrize("has_buffer", [False, True])
def test_without_a_buffer_or_with_a_hook_autograd_adds(kind: str, has_buffer: bool) -> None:
    layer, weight, x = case(kind)
    parameter, tasks, seen = bound(layer, weight, []), [], []
    if has_buffer:
        parameter.grad = torch.zeros_like(weight)
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    (layer(x) ** 2).sum().backward()
    assert not tasks
    torch.testing.assert_close(parameter.grad, expected(kind, weight, x))
    assert len(seen) == has_buffer


def test_the_gradient_of_the_input_comes_at_once_and_that_of_the_weight_when_the_task_runs() -> None:
    layer, weight, x = case("linear")
    tasks: TASKS = []
    parameter = bound(layer, weight, tasks)
    parameter.grad = torch.zeros_like(weight)
    x.requires_grad_()
    (layer(x) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * (x @ weight.T).detach() @ weight)
    assert not parameter.grad.any()
    with torch.no_grad():
        tasks.pop()()
    assert not tasks
    torch.testing.assert_close(parameter.grad, expected("linear", weight, x.detach()))


def test_a_removed_hook_no_longer_keeps_a_layer_from_adding() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    hook = parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert gradient_of(parameter) is None
    hook.remove()
    assert gradient_of(parameter) is parameter.grad


def test_a_half_precision_input_does_not_meet_a_buffer_of_another_type() -> None:
    layer, weight, x = case("linear")
    found: Any = bound(layer, weight.bfloat16(), None)
    (layer(x.bfloat16()).float() ** 2).sum().backward()
    assert found.grad.dtype is torch.bfloat16

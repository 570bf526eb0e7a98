"""The loss sum against torch's own, whole and with the vocabulary split over ranks that run as threads."""

import math
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_megatron.errors import LayerError
from hetero_megatron.layers import CrossEntropy
from hetero_megatron.runtime.batch import IGNORE
from hetero_megatron.runtime.binding import Binding

T, V = 11, 97
Result = tuple[Tensor, Tensor]


def _case(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(T, V, generator=generator) * scale).to(dtype)
    targets = torch.randint(V, (T,), generator=generator)
    targets[2], targets[5], targets[6] = IGNORE, 0, V - 1
    return logits, targets


def _run(loss: CrossEntropy, logits: Tensor, targets: Tensor, weight: float = 1.0) -> Result:
    leaf = logits.detach().clone().requires_grad_()
    value = loss(leaf, targets)
    (value * weight).backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def _torch(logits: Tensor, targets: Tensor, weight: float = 1.0) -> Result:
    leaf = logits.float().clone().requires_grad_()
    value = F.cross_entropy(leaf, targets, ignore_index=IGNORE, reduction="sum")
    (value * weight).backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def _all_reduce(ranks: int) -> Callable[[int], Callable[[Tensor, str], Tensor]]:
    """An all-reduce between threads: everybody writes, waits, reads, waits."""
    barrier, slots = threading.Barrier(ranks), [torch.empty(0)] * ranks

    def of_rank(rank: int) -> Callable[[Tensor, str], Tensor]:
        def reduce(tensor: Tensor, op: str) -> Tensor:
            slots[rank] = tensor.clone()
            barrier.wait(20)
            stacked = torch.stack(slots)
            barrier.wait(20)
            return tensor.copy_(stacked.amax(0) if op == "max" else stacked.sum(0))

        return reduce

    return of_rank


def _split(logits: Tensor, targets: Tensor, edges: tuple[int, ...], weight: float = 1.0) -> list[Result]:
    """Loss and gradient of every rank; rank i has the ids [edges[i], edges[i + 1])."""
    ranks = len(edges) - 1
    of_rank, results = _all_reduce(ranks), [None] * ranks

    def work(rank: int) -> None:
        lo, hi = edges[rank], edges[rank + 1]
        loss = CrossEntropy()
        bounds, shapes = {"logits": ((0, T), (lo, hi))}, {"logits": (T, V)}
        loss.bind(Binding("loss", bounds, shapes, {"v": of_rank(rank)}))
        results[rank] = _run(loss, logits[:, lo:hi], targets, weight)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [result for result in results if result is not None]


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1000.0])
def test_the_sum_and_its_gradient_are_those_of_torch(scale: float) -> None:
    logits, targets = _case(scale)
    value, gradient = _run(CrossEntropy(), logits, targets, weight=0.25)
    right, right_gradient = _torch(logits, targets, weight=0.25)
    torch.testing.assert_close(value, right, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, right_gradient, rtol=1e-5, atol=1e-7)
    assert value.dtype is torch.float32
    assert value.shape == ()


def test_equal_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    value, _ = _run(CrossEntropy(), torch.zeros(4, 96), torch.tensor([0, 95, 3, 3]))
    assert value.item() / 4 == pytest.approx(math.log(96), abs=1e-6)


@pytest.mark.parametrize("edges", [(0, 97), (0, 49, 97), (0, 1, 60, 97)])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1000.0])
def test_every_rank_of_a_split_vocabulary_has_the_whole_loss_and_its_own_gradient(
    edges: tuple[int, ...], scale: float
) -> None:
    logits, targets = _case(scale)
    right, right_gradient = _torch(logits, targets, weight=0.25)
    results = _split(logits, targets, edges, weight=0.25)
    assert len(results) == len(edges) - 1
    for value, _ in results:
        torch.testing.assert_close(value, right, rtol=1e-6, atol=1e-6)
        assert torch.equal(value, results[0][0])
    gradient = torch.cat([part for _, part in results], 1)
    torch.testing.assert_close(gradient, right_gradient, rtol=1e-5, atol=1e-7)


def test_without_a_valid_target_loss_and_gradient_are_zero() -> None:
    logits, _ = _case()
    nothing = torch.full((T,), IGNORE)
    for value, gradient in (_run(CrossEntropy(), logits, nothing), *_split(logits, nothing, (0, 49, 97))):
        assert value.item() == 0.0
        assert not gradient.any()
    value, gradient = _run(CrossEntropy(), logits[:0], nothing[:0])
    assert value.item() == 0.0
    assert gradient.shape == (0, V)


def test_bf16_logits_give_an_fp32_sum_and_a_bf16_gradient() -> None:
    logits, targets = _case(dtype=torch.bfloat16)
    right, right_gradient = _torch(logits, targets)
    for value, gradient in (_run(CrossEntropy(), logits, targets), _split(logits, targets, (0, V))[0]):
        torch.testing.assert_close(value, right, rtol=1e-6, atol=1e-6)
        assert value.dtype is torch.float32
        assert gradient.dtype is torch.bfloat16
        torch.testing.assert_close(gradient, right_gradient.bfloat16(), rtol=1e-2, atol=1e-6)


def test_losses_of_single_tokens_add_up_whatever_the_grouping() -> None:
    logits, targets = _case()
    single = sum(_run(CrossEntropy(), logits[i : i + 1], targets[i : i + 1])[0] for i in range(T))
    torch.testing.assert_close(_run(CrossEntropy(), logits, targets)[0], single)


def test_the_logits_are_left_alone() -> None:
    logits, targets = _case()
    leaf = logits.clone().requires_grad_()
    CrossEntropy()(leaf, targets).backward()
    assert torch.equal(leaf, logits)


def test_shapes_that_disagree_and_targets_beyond_the_vocabulary_are_refused() -> None:
    logits, targets = _case()
    with pytest.raises(LayerError, match=r"logits of 11 tokens, targets of shape \(10,\)"):
        CrossEntropy()(logits, targets[1:])
    with pytest.raises(LayerError, match="target id 97 is not in the vocabulary, which has ids 0-96"):
        CrossEntropy()(logits, targets.clamp(min=97))
    loss = CrossEntropy()
    loss.bind(Binding("loss", {"logits": ((0, T), (49, 97))}, {"logits": (T, V)}))
    with pytest.raises(LayerError, match=r"97 logits per token, this rank has ids \[49, 97\)"):
        loss(logits, targets)

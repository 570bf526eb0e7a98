"""Adam with decoupled weight decay, SGD, and the learning rate by absolute step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_megatron.runtime.state import State, view


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Optimizer and learning-rate schedule; `clip_grad` None or 0 switches clipping off.

    Weight decay is decoupled and spares one-dimensional parameters (norm weights).
    """

    name: str = "adam"
    lr: float = 1e-3
    min_lr: float = 0.0
    lr_decay_style: str = "constant"
    lr_warmup_iters: int = 0
    train_iters: int = 1
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float | None = None


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """The rate of step `step` (from 1): linear warm-up, then constant or cosine down to `min_lr` at `train_iters`.

    >>> s = OptimizerSettings(lr=1e-3, min_lr=1e-4, lr_decay_style="cosine", lr_warmup_iters=4, train_iters=20)
    >>> f"{learning_rate(s, 10):.4e}"
    '7.2221e-04'
    """
    if settings.lr_warmup_iters and step < settings.lr_warmup_iters:
        return settings.lr * step / settings.lr_warmup_iters
    if settings.lr_decay_style == "constant":
        return settings.lr
    span = max(1, settings.train_iters - settings.lr_warmup_iters)
    done = min(1.0, (step - settings.lr_warmup_iters) / span)
    return settings.min_lr + 0.5 * (settings.lr - settings.min_lr) * (1 + math.cos(math.pi * done))


def clip_factor(norm: float, clip_grad: float | None) -> float:
    """What gradients of global `norm` are multiplied by; the stabiliser is added once, to the global norm."""
    return min(1.0, clip_grad / (norm + 1e-6)) if clip_grad else 1.0


def update(state: State, settings: OptimizerSettings, lr: float, divisor: float) -> None:
    """One step of the master weights from `state.gradient / divisor`; the gradient buffer is left undefined."""
    state.step += 1
    UPDATES[settings.name](state, settings, lr, divisor)


def _adam(state: State, settings: OptimizerSettings, lr: float, divisor: float) -> None:
    device = state.device
    step = torch.tensor(float(state.step), device=device)
    scale, found = torch.tensor(divisor, device=device), torch.zeros((), device=device)
    first, second = state.moments["exp_avg"], state.moments["exp_avg_sq"]
    for decay, slots in _decay_groups(state, settings.weight_decay):
        if not slots:
            continue
        torch._fused_adamw_(
            [state.master[span] for span in slots],
            [state.gradient[span] for span in slots],
            [first[span] for span in slots],
            [second[span] for span in slots],
            [],
            [step] * len(slots),
            lr=lr,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=decay,
            eps=settings.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=found,
        )


def _sgd(state: State, settings: OptimizerSettings, lr: float, divisor: float) -> None:
    for decay, spans in _decay_groups(state, settings.weight_decay):
        for span in spans:
            if decay:
                state.master[span].mul_(1 - lr * decay)
            state.master[span].add_(state.gradient[span], alpha=-lr / divisor)


UPDATES: Mapping[str, Callable[[State, OptimizerSettings, float, float], None]] = {"adam": _adam, "sgd": _sgd}


def _decay_groups(state: State, weight_decay: float) -> tuple[tuple[float, list[slice]], ...]:
    """Runs of the flat buffers by weight decay; without decay all of it is one run."""
    if not weight_decay:
        return ((0.0, [slice(0, state.master.numel())] if state.master.numel() else []),)
    spans: dict[bool, list[slice]] = {True: [], False: []}
    for slot in state.slots:
        spans[len(slot.full_shape) > 1].append(slice(slot.offset, slot.offset + slot.elements))
    return (weight_decay, spans[True]), (0.0, spans[False])


def squared_norm(state: State) -> Tensor:
    """Sum of squares of the gradient elements that this rank counts, FP64.

    Not finite when any local element is not: copies that another rank counts weigh 0, and 0 x inf is nan.
    """
    if not state.slots:
        return torch.zeros((), dtype=torch.float64, device=state.device)
    parts = [view(state.gradient, slot) for slot in state.slots]
    norms = torch.stack(torch._foreach_norm(parts)).double()
    return (norms * norms * state.counted).sum()

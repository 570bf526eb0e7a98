"""Adam with decoupled weight decay, SGD, and their settings."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, get_type_hints

import torch
from torch import Tensor, nn

from hetero_megatron.errors import RuntimeFailure
from hetero_megatron.runtime.state import State, view

VECTOR = 16
"""FP32 elements of the widest CPU vector, and of the cache lines at which torch divides an update among threads."""


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Optimizer and learning-rate schedule; `clip_grad` None or 0 switches clipping off.

    Weight decay is decoupled and spares one-dimensional parameters (norm weights and biases), as Megatron does; the
    embedding is decayed. The names of the schedule are Megatron's, too; `lr_decay_iters` None means `train_iters`.
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
    lr_decay_iters: int | None = None
    lr_wsd_decay_iters: int | None = None
    lr_wsd_decay_style: str = "exponential"

    @property
    def decay_end(self) -> int:
        """The iteration at which the rate reaches `min_lr`."""
        return self.lr_decay_iters or self.train_iters

    def to_json(self) -> dict[str, str | int | float | None]:
        """The settings as a checkpoint keeps them."""
        return asdict(self)

    @staticmethod
    def from_json(saved: Mapping[str, object]) -> "OptimizerSettings":
        """The settings behind `to_json`; what is left out has its default.

        Raises:
            RuntimeFailure: a name is unknown, or a value is of another type.
        """
        hints = get_type_hints(OptimizerSettings)
        for name, value in saved.items():
            if name not in hints:
                raise RuntimeFailure(
                    f"saved optimizer settings: {name!r} is unknown; known: {', '.join(hints)}"
                )
            kind = float | int if hints[name] is float else hints[name]
            if isinstance(value, bool) or not isinstance(value, kind):
                raise RuntimeFailure(
                    f"saved optimizer settings: {name} is {value!r}, where {_type_name(kind)} is right"
                )
        return OptimizerSettings(**saved)  # type: ignore[arg-type]  # each was checked against its field


def _type_name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def clip_factor(norm: float, clip_grad: float | None) -> float:
    """What gradients of global `norm` are multiplied by; the stabiliser is added once, to the global norm."""
    return min(1.0, clip_grad / (norm + 1e-6)) if clip_grad else 1.0


class AdamKernel(Protocol):
    """One Adam update in place over lists of flat FP32 tensors, from `gradients / divisor`; gradients end undefined.

    Weight decay is decoupled, eps is added to the root, and both moments are corrected by the absolute `step`.
    """

    def __call__(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        *,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        divisor: float,
    ) -> None:
        """Update; the lists are not empty."""


def fused_adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    divisor: float,
) -> None:
    """The AdamKernel of torch; on a CPU, too, an element's result does not depend on its place in its tensor."""
    device = parameters[0].device
    lists = (parameters, gradients, exp_avgs, exp_avg_sqs)
    cuts = [_whole_vectors(each) if device.type == "cpu" else (list(each), []) for each in lists]
    values, slopes, means, variances = ([*wholes, *(padded for _, padded in rests)] for wholes, rests in cuts)
    torch._fused_adamw_(
        values,
        slopes,
        means,
        variances,
        [],
        [torch.tensor(float(step), device=device)] * len(values),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=torch.tensor(divisor, device=device),
        found_inf=torch.zeros((), device=device),
    )
    for _, rests in cuts:
        for rest, padded in rests:
            rest.copy_(padded[: rest.numel()])


def _whole_vectors(flats: Sequence[Tensor]) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """The whole vectors of each tensor, and what is left behind them with a copy padded to a vector.

    torch rounds elements behind the last whole vector otherwise. Copies of an element on other ranks, whose
    tensors have other lengths, would slowly part.
    """
    wholes, rests = [], []
    for flat in flats:
        whole, rest = flat.split([flat.numel() - flat.numel() % VECTOR, flat.numel() % VECTOR])
        wholes.append(whole)
        if rest.numel():
            rests.append((rest, nn.functional.pad(rest, (0, VECTOR - rest.numel()))))
    return wholes, rests


def update(
    state: State, settings: OptimizerSettings, lr: float, divisor: float, adam: AdamKernel = fused_adamw
) -> None:
    """One step of the master weights from `state.gradient / divisor`; the gradient buffer is left undefined."""
    state.step += 1
    if settings.name == "sgd":
        _sgd(state, settings, lr, divisor)
    else:
        _adam(state, settings, lr, divisor, adam)


def _adam(state: State, settings: OptimizerSettings, lr: float, divisor: float, adam: AdamKernel) -> None:
    flats = (state.master, state.gradient, state.moments["exp_avg"], state.moments["exp_avg_sq"])
    for decay, spans in _decay_groups(state, settings.weight_decay):
        if spans:
            adam(
                *([flat[span] for span in spans] for flat in flats),
                step=state.step,
                lr=lr,
                beta1=settings.beta1,
                beta2=settings.beta2,
                eps=settings.eps,
                weight_decay=decay,
                divisor=divisor,
            )


def _sgd(state: State, settings: OptimizerSettings, lr: float, divisor: float) -> None:
    for decay, spans in _decay_groups(state, settings.weight_decay):
        for span in spans:
            if decay:
                state.master[span].mul_(1 - lr * decay)
            state.master[span].add_(state.gradient[span], alpha=-lr / divisor)


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

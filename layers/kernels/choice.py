"""Which kernel a run uses for each operator: the first that fits, or the one that is asked for (DESIGN 2)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetero_megatron.errors import LayerError
from hetero_megatron.layers.kernels import apex, cross_entropy, flash_attn, torch_attention, torch_kernels
from hetero_megatron.layers.kernels import transformer_engine as te
from hetero_megatron.layers.kernels.kernel import Choice, Facts, Kernel

AUTO = "auto"
# In order of preference for each operator.
KERNELS = (
    flash_attn.ATTENTION,
    te.ATTENTION,
    torch_attention.VARLEN,
    torch_attention.BY_DOCUMENT,
    te.RMS_NORM,
    apex.RMS_NORM,
    torch_kernels.RMS_NORM,
    cross_entropy.CROSS_ENTROPY,
    te.ADAM,
    apex.ADAM,
    torch_kernels.ADAM,
)


def choose(
    op: str,
    wanted: str,
    device_type: str,
    dtype: torch.dtype,
    facts: Facts,
    kernels: Sequence[Kernel] = KERNELS,
) -> Choice:
    """The first kernel for `op` that fits, or the one called `wanted`.

    Raises:
        LayerError: `wanted` is not known or cannot run here, or nothing fits; with the reasons.
    """
    known = [kernel for kernel in kernels if kernel.op == op]
    passed_over: list[tuple[str, str]] = []
    for kernel in known:
        if wanted in (AUTO, kernel.name):
            reason = kernel.unfit(device_type, dtype, facts)
            if reason is None:
                return Choice(kernel, tuple(passed_over))
            passed_over.append((kernel.name, reason))
    if not passed_over:
        names = ", ".join([AUTO, *(kernel.name for kernel in known)])
        raise LayerError(f"kernels.{op}: there is no {wanted!r}; known: {names}")
    reasons = "; ".join(f"{name} cannot run here: it {reason}" for name, reason in passed_over)
    raise LayerError(f"kernels.{op}: {reasons}")


@dataclass(frozen=True, slots=True)
class Kernels:
    """The choices of one run, in the order in which they are printed; nothing is loaded yet.

    `adam` is None where the optimizer is another one.
    """

    attention: Choice
    rms_norm: Choice
    cross_entropy: Choice
    adam: Choice | None

    @property
    def choices(self) -> tuple[Choice, ...]:
        """One per operator that the run has."""
        layers = (self.attention, self.rms_norm, self.cross_entropy)
        return layers if self.adam is None else (*layers, self.adam)

    @property
    def names(self) -> dict[str, str]:
        """Backend by operator, such as `{"attention": "torch-sdpa", ...}`."""
        return {choice.kernel.op: choice.kernel.name for choice in self.choices}

    def load(self) -> Mapping[str, Callable[..., Any]]:
        """Import the libraries and return the operators by name, for a Session.

        Raises:
            LayerError: a library is installed but cannot be imported.
        """
        return {choice.kernel.op: _loaded(choice.kernel) for choice in self.choices}

    def __str__(self) -> str:
        """One line with the names, and one with the reasons against the others if there were any."""
        chosen = ", ".join(f"{op} {name}" for op, name in self.names.items())
        by_reason: dict[str, dict[str, None]] = {}
        for choice in self.choices:
            for name, reason in choice.passed_over:
                by_reason.setdefault(reason, {})[name] = None
        against = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
        return f"kernels: {chosen}" + (f"\n  passed over: {against}" if against else "")


def choose_all(
    wanted: Mapping[str, str],
    device_type: str,
    dtype: torch.dtype,
    facts: Facts,
    optimizer_device_type: str | None = None,
    optimizer: str = "adam",
) -> Kernels:
    """The kernels of a run; `wanted` gives a name or `auto` for each operator, `auto` where it says nothing.

    Optimizer states in host memory are updated there: `optimizer_device_type` is then `cpu`. An `optimizer` other
    than adam has no kernel to choose.

    Raises:
        LayerError: one that is wanted cannot run here, or is an Adam for another optimizer.
    """
    layers = {
        op: choose(op, wanted.get(op, AUTO), device_type, dtype, facts)
        for op in ("attention", "rms_norm", "cross_entropy")
    }
    adam = wanted.get("adam", AUTO)
    if optimizer == "adam":
        return Kernels(
            **layers, adam=choose("adam", adam, optimizer_device_type or device_type, dtype, facts)
        )
    if adam != AUTO:
        raise LayerError(
            f"kernels.adam: {adam} is named and the optimizer is {optimizer}; leave it auto, or use optimizer adam"
        )
    return Kernels(**layers, adam=None)


def _loaded(kernel: Kernel) -> Callable[..., Any]:
    try:
        return kernel.load()
    except (ImportError, OSError) as error:  # OSError: a shared library that another one needs
        raise LayerError(
            f"kernels.{kernel.op}: {kernel.name} is installed but cannot be loaded: {error}; repair it, or name "
            f"another one in the recipe's kernels section"
        ) from error

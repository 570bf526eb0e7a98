"""One backend of one operator: what it needs, and how it is loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

HALF = (torch.bfloat16, torch.float16)
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a kernel may depend on besides device and dtype."""

    head_dim: int


Unfit = Callable[[str, torch.dtype, Facts], str | None]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A backend: `unfit(device_type, dtype, facts)` says why it cannot run, such as "needs a CUDA device", or None.

    `unfit` neither imports the library nor starts a device. `load` imports it and returns the operator:
    attention `(q_THK, k_THK, v_THK, segments, borders) -> THK`, rms_norm `(x_TD, weight_D, eps) -> TD`, cross_entropy
    `(logits_TV, targets_T, first_id, reduce) -> sum`, adam as `runtime.optimizer.AdamKernel` says.
    """

    op: str
    name: str
    unfit: Unfit
    load: Callable[[], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of a run for one operator, and those that would have come first, with the reasons against them."""

    kernel: Kernel
    passed_over: tuple[tuple[str, str], ...] = ()


def needs(
    *,
    cuda: bool = False,
    half: bool = False,
    whole_eights: bool = False,
    modules: Sequence[str] = (),
    newer: tuple[str, int] | None = None,
    install: str = "",
) -> Unfit:
    """What a kernel needs, as its `unfit`.

    Args:
        whole_eights: a head_dim that is a multiple of 8 and at most 256.
        modules: top-level modules that must be installed; they are looked for, not imported.
        newer: a distribution and its least major version.
        install: where the library comes from.
    """

    def unfit(device_type: str, dtype: torch.dtype, facts: Facts) -> str | None:
        if cuda and device_type != "cuda":
            return f"needs a CUDA device (this run is on {device_type})"
        if half and dtype not in HALF:
            return f"needs bf16 or fp16 (this run computes in {DTYPE_NAMES.get(dtype, dtype)})"
        if whole_eights and (facts.head_dim % 8 or facts.head_dim > 256):
            return f"needs a head_dim that is a multiple of 8, at most 256 (this model has {facts.head_dim})"
        if any(find_spec(module) is None for module in modules):
            return f"is not installed ({install})"
        return _too_old(*newer, install) if newer else None

    return unfit


def _too_old(distribution: str, major: int, install: str) -> str | None:
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return f"is not installed ({install})"
    old = int(found.partition(".")[0]) < major
    return f"needs version {major} or newer ({found} is installed)" if old else None

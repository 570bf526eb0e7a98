"""Every backend on offer, and where it can run in this place: on a GPU if there is one, otherwise on the CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hetero_megatron.layers.kernels import KERNELS, Facts, Kernel

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Here:
    """A loaded backend with a device and dtype that it fits, and the tolerances of that dtype."""

    operator: Callable[..., Any]
    device: torch.device
    dtype: torch.dtype

    @property
    def tolerances(self) -> dict[str, float]:
        """FP32 to rounding; BF16 has 8 bits."""
        if self.dtype is torch.float32:
            return {"rtol": 1e-5, "atol": 1e-5}
        return {"rtol": 2e-2, "atol": 2e-2}


def backends(op: str) -> Any:
    """Parametrize a test over all known backends of `op`."""
    kernels = [kernel for kernel in KERNELS if kernel.op == op]
    return pytest.mark.parametrize("kernel", kernels, ids=[kernel.name for kernel in kernels])


def here(kernel: Kernel, facts: Facts) -> Here:
    """The backend where it can run; otherwise the test is skipped, with the backend's own reason."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    reasons = [kernel.unfit(device_type, dtype, facts) for dtype in DTYPES]
    for dtype, reason in zip(DTYPES, reasons, strict=True):
        if reason is None:
            return Here(kernel.load(), torch.device(device_type), dtype)
    pytest.skip(f"{kernel.op} {kernel.name}: {reasons[-1]}")


def on_cpu_ranks(kernel: Kernel, facts: Facts) -> Callable[..., Any]:
    """The backend for FP32 ranks on the CPU, which is where tests start processes; otherwise the test is skipped."""
    if reason := kernel.unfit("cpu", torch.float32, facts):
        pytest.skip(f"{kernel.op} {kernel.name}: {reason}")
    return kernel.load()

"""Published figures of accelerators, each with its source (paper Table 7; vendors' data sheets).

Peak figures say what a device could do, not what training gets out of it: the planner multiplies them by measured or
inferred shares (`planner/rates.py`). Links count both directions together, as vendors and paper Table 7 do.
"""

from dataclasses import dataclass

MIB, GB = 2**20, 10**9
TERA = 1e12


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One model of device.

    Attributes:
        flops: dense BF16 (FP16 where there is no BF16) FLOP/s with FP32 accumulation.
        memory_bytes: of device memory.
        memory_gb_per_s: its bandwidth.
        link, link_gb_per_s: what connects two of them in one node, both directions together.
        source: where the figures are printed.
    """

    name: str
    flops: float
    memory_bytes: int
    memory_gb_per_s: float
    link: str
    link_gb_per_s: float
    source: str


_HGX = "NVIDIA H100 Tensor Core GPU data sheet (SXM; 1979 TFLOP/s with sparsity)"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet (SXM; third-generation NVLink)"
_V100 = "NVIDIA V100 data sheet (SXM2; tensor cores in FP16, which has no BF16)"

SPECS: tuple[DeviceSpec, ...] = (
    DeviceSpec(
        "h800",
        990 * TERA,
        81559 * MIB,
        3350.0,
        "nvlink",
        400.0,
        "paper Table 7; memory bandwidth: as H100 SXM, whose memory it has",
    ),
    DeviceSpec(
        "h20",
        148 * TERA,
        97871 * MIB,
        4000.0,
        "nvlink",
        900.0,
        "paper Table 7; memory bandwidth: NVIDIA H20 data sheet",
    ),
    DeviceSpec("h100", 989 * TERA, 81559 * MIB, 3350.0, "nvlink", 900.0, _HGX),
    DeviceSpec(
        "h200",
        989 * TERA,
        141 * GB,
        4800.0,
        "nvlink",
        900.0,
        "NVIDIA H200 Tensor Core GPU data sheet (SXM; 1979 TFLOP/s with sparsity)",
    ),
    DeviceSpec("a100-40", 312 * TERA, 40 * GB, 1555.0, "nvlink", 600.0, _A100),
    DeviceSpec("a100-80", 312 * TERA, 80 * GB, 2039.0, "nvlink", 600.0, _A100),
    DeviceSpec(
        "a800",
        312 * TERA,
        80 * GB,
        2039.0,
        "nvlink",
        400.0,
        "NVIDIA A800 data sheet: an A100 80GB SXM with NVLink at 400 GB/s",
    ),
    DeviceSpec("v100-16", 125 * TERA, 16 * GB, 900.0, "nvlink", 300.0, _V100),
    DeviceSpec("v100-32", 125 * TERA, 32 * GB, 900.0, "nvlink", 300.0, _V100),
    DeviceSpec(
        "rtx3090",
        71 * TERA,
        24 * GB,
        936.0,
        "pcie",
        64.0,
        "NVIDIA Ampere GA102 white paper, table 9 (FP16 and BF16 tensor, FP32 accumulate); PCIe 4.0 x16",
    ),
    DeviceSpec(
        "rtx4090",
        165.2 * TERA,
        24 * GB,
        1008.0,
        "pcie",
        64.0,
        "NVIDIA Ada GPU architecture white paper, appendix A (FP16 and BF16 tensor, FP32 accumulate); PCIe 4.0 x16",
    ),
    DeviceSpec(
        "l40s",
        362.05 * TERA,
        48 * GB,
        864.0,
        "pcie",
        64.0,
        "NVIDIA L40S data sheet (733 TFLOP/s with sparsity); PCIe 4.0 x16",
    ),
    DeviceSpec(
        "cpu",
        1e11,
        4 * 2**30,
        10.0,
        "loopback",
        3.0,
        "stands for the machine at hand and promises nothing; `profile` measures it",
    ),
)


def spec_of(kind: str) -> DeviceSpec | None:
    """The figures of a kind of device, None where it is not in the table."""
    return next((spec for spec in SPECS if spec.name == kind), None)

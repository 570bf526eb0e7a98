"""What share of its peak a device sustains in training, by tensor-parallel degree, and links likewise (paper §7.1).

Nominal FLOP/s give wrong plans on mixed clusters: paper Table 9 gives an H800 about 3.3 times the layers of an H20 at
TP4, where the peaks are 6.7 apart. The shares of H800 and H20 are inferred from the paper's tables, not measured: see
`SUSTAINED`. All shares are of whole training steps' layers, so the collectives inside one node are part of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hetero_megatron.cluster import DeviceKind, Link, model_of

DIRECTIONS = 2
"""Links between devices of one node count both directions together; a message takes one."""


@dataclass(frozen=True, slots=True)
class Sustained:
    """Shares of the peak by tensor-parallel degree; degrees between take the next lower entry."""

    shares: Mapping[int, float]
    source: str

    def share(self, tp: int) -> float:
        """The share at a degree of tensor parallelism."""
        return self.shares[max((each for each in self.shares if each <= tp), default=min(self.shares))]


_H20 = 115e12 / 148e12
"""An H20 at TP4, from both step times that the paper prints: with it 6.05 s (Table 9, 16 + 32) is predicted 3.6% too long
and 6.91 s (C4) 3.6% too short."""


def _h800(speed: float) -> float:
    return _H20 * 148e12 * speed / 990e12


# Speeds in units of an H20 at TP4, embedding and head counted, so that level 2 gives the paper's layers back.
# TP4: with 3.25 to 3.4 all three 32B splits of Table 9 come out to the layer (7 7 23 23, 6 6 6 21 21, 11 11 38); the
# middle. TP8: Table 9's 70B splits. TP2 and TP1 of H800: C6's odd stages (13 layers on two and 7 with the head on one
# beside 22 on four). H20 is taken as constant: C2's odd stages (8 layers on two, 4 and the head on one, beside 16 on four)
# balance without the head, or with 15% more at TP1; which of the two, the paper does not say.
_A100 = Sustained(
    {1: 0.74, 2: 0.74, 4: 0.66, 8: 0.56, 16: 0.38},
    "Hydraulis' fits of a 32B Llama on A800: 0.852, 0.956, 1.131, 1.64 GPU-ms per token at TP2, 4, 8, 16 "
    "(197 GFLOP per token), without its constant per micro-batch; TP1 as TP2",
)
_PCIE = Sustained(
    {1: 0.39, 2: 0.33, 4: 0.14, 8: 0.05},
    "HexiScale: Megatron 38.6% on A100 PCIe; how it falls with TP: Sailor's layer profiles of RTX 3090 (TP8: 5%)",
)
_H100 = Sustained(
    {1: 0.41, 2: 0.47, 4: 0.49, 8: 0.46},
    "Megatron-LM README: 1.7B TP1, 7.1B TP2, 16B TP4, 32B TP8 on H100, whole steps",
)
SUSTAINED: Mapping[str, Sustained] = MappingProxyType(
    {
        "h20": Sustained({1: _H20}, "inferred from the steps of paper Table 9 and C4, see above"),
        "h800": Sustained(
            {1: _h800(4.6), 2: _h800(3.95), 4: _h800(10 / 3), 8: _h800(2.6)},
            "inferred from the layer splits of paper Tables 9 and 12, see above",
        ),
        "h100": _H100,
        "h200": _H100,
        "a100-40": _A100,
        "a100-80": _A100,
        "a800": _A100,
        "v100-16": Sustained(
            {1: 0.45, 4: 0.40, 8: 0.35}, "assumed; how it falls with TP: Sailor's V100 profiles"
        ),
        "v100-32": Sustained(
            {1: 0.45, 4: 0.40, 8: 0.35}, "assumed; how it falls with TP: Sailor's V100 profiles"
        ),
        "rtx3090": _PCIE,
        "rtx4090": _PCIE,
        "l40s": _PCIE,
        "cpu": Sustained({1: 0.3}, "a guess; `profile` measures"),
    }
)
MEMORY_SHARE = 0.8
"""Of the memory bandwidth, in operators that only move data."""
# Of the printed bandwidth in one direction.
LINK_SHARES: Mapping[str, float] = MappingProxyType(
    {
        "nvlink": 0.65
        / DIRECTIONS,  # Calculon; Galvatron measured 154-159 of 300 GB/s in an A100 node (0.52)
        "pcie": 0.4 / DIRECTIONS,  # between a direct copy and Sailor's 5-8 GB/s through the host
        "ib": 0.9,  # Calculon; Galvatron's 7.7-8.8 of 12.5 GB/s for one message is 0.66
        "loopback": 1.0,
    }
)


def sustained_flops(kind: DeviceKind, tp: int) -> float:
    """FLOP/s of one device of `kind` in a tensor-parallel group of `tp`; 30% of the peak for a kind without an entry."""
    entry = SUSTAINED.get(model_of(kind.name))
    return kind.flops * (entry.share(tp) if entry else 0.3)


def bytes_per_second(link: Link) -> float:
    """What one message gets on a link, in one direction."""
    return link.gb_per_s * 1e9 * LINK_SHARES.get(link.name, 0.8)
